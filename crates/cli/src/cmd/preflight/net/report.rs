//! What a run of all checks found, as a table, as JSON, and as metrics for Prometheus' textfile
//! collector.

use super::finding::{Check, Finding, Table, worst};
use super::measure::baseline::Rates;
use super::questions::PairFigures;
use crate::cmd::findings::name_of;
use forebay_cuda::preflight::Severity;
use forebay_results::output::Error;
use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;
use serde::Serialize;
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::atomic::AtomicU64;

/// What was found.
#[derive(Debug, Clone, Serialize)]
pub struct Report {
    pub severity: Severity,
    /// How long it took, without measuring.
    pub seconds: f64,
    pub findings: Vec<Finding>,
    /// The hosts that were looked at, by address.
    pub peers: BTreeMap<String, String>,
    pub measured: Option<Measured>,
}

/// What was measured of pairs.
#[derive(Debug, Clone, Serialize)]
pub struct Measured {
    pub seconds: f64,
    /// What was moved, and what could have been.
    pub bytes: u64,
    pub bytes_max: u64,
    /// What each host sends and receives: medians over its pairs.
    pub hosts: BTreeMap<String, Rates>,
    pub pairs: Vec<MeasuredPair>,
}

/// A pair, and what the first of it measured.
#[derive(Debug, Clone, Serialize)]
pub struct MeasuredPair {
    pub hosts: [String; 2],
    #[serde(flatten)]
    pub figures: PairFigures,
}

type Labels = Vec<(&'static str, String)>;

impl Report {
    pub fn new(
        findings: Vec<Finding>,
        peers: BTreeMap<String, String>,
        measured: Option<Measured>,
    ) -> Report {
        Report { severity: worst(&findings), seconds: 0.0, findings, peers, measured }
    }

    pub fn print(&self) {
        if let Some(measured) = &self.measured {
            println!("{:<24} {:>10} {:>10}   GB/s, medians over pairs", "host", "sends", "receives");
            for (host, rates) in &measured.hosts {
                let (sends, receives) = (rates.sends_bytes_per_s / 1e9, rates.receives_bytes_per_s / 1e9);
                println!("{host:<24} {sends:>10.2} {receives:>10.2}");
            }
            let (bytes, seconds) = (measured.bytes as f64 / 1e9, measured.seconds);
            println!("{bytes:.2} GB were moved in {seconds:.1} s\n");
        }
        print!("{}", Table(&self.findings));
        println!("{} in {:.1} s: {}", name_of(self.severity), self.seconds, self.count());
    }

    /// How many findings of which severity.
    fn count(&self) -> String {
        let of = |severity: Severity| {
            let found = self.findings.iter().filter(|finding| finding.severity == severity).count();
            (found > 0).then(|| format!("{found} {}", name_of(severity)))
        };
        let all = [Severity::Fault, Severity::Warning, Severity::Unknown, Severity::Ok];
        all.into_iter().filter_map(of).collect::<Vec<_>>().join(", ")
    }

    /// `null` if it cannot be told, which numbers, texts and structures of both always can.
    pub fn to_json(&self) -> serde_json::Value {
        serde_json::to_value(self).unwrap_or_default()
    }

    pub fn write_json(&self, file: &Path) -> Result<(), Error> {
        write(file, &format!("{:#}\n", self.to_json()))
    }

    /// Writes metrics as the textfile collector reads them, whole or not at all.
    pub fn write_metrics(&self, file: &Path) -> Result<(), Error> {
        let new = file.with_extension("prom.new");
        write(&new, &self.metrics()?)?;
        std::fs::rename(&new, file).map_err(|error| format!("{}: {error}", file.display()).into())
    }

    fn metrics(&self) -> Result<String, Error> {
        let mut registry = Registry::with_prefix("forebay_preflight_net");
        let findings: Family<Labels, Gauge> = Family::default();
        for check in Check::ALL {
            for severity in [Severity::Ok, Severity::Unknown, Severity::Warning, Severity::Fault] {
                let is = |finding: &&Finding| finding.check == check && finding.severity == severity;
                let found = self.findings.iter().filter(is).count() as i64;
                let labels = vec![("check", check.name().into()), ("severity", name_of(severity).into())];
                findings.get_or_create(&labels).set(found);
            }
        }
        registry.register("findings", "Findings of the last run", findings);
        let rates: Family<Labels, Gauge<f64, AtomicU64>> = Family::default();
        for (host, of) in self.measured.iter().flat_map(|measured| &measured.hosts) {
            for (way, rate) in [("sends", of.sends_bytes_per_s), ("receives", of.receives_bytes_per_s)] {
                rates.get_or_create(&vec![("host", host.clone()), ("direction", way.into())]).set(rate);
            }
        }
        registry.register("host_bytes_per_second", "What a host moved, the median over its pairs", rates);
        let seconds: Gauge<f64, AtomicU64> = Gauge::default();
        seconds.set(self.seconds);
        registry.register("seconds", "How long the last run took, without measuring", seconds);
        let mut text = String::new();
        encode(&mut text, &registry)?;
        Ok(text)
    }
}

fn write(file: &Path, text: &str) -> Result<(), Error> {
    std::fs::write(file, text).map_err(|error| format!("{}: {error}", file.display()).into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_check_and_severity_is_a_metric_also_where_it_counts_none() {
        let findings = vec![Finding::bad(Check::Mtu, Severity::Fault, "left", "lost", "1500", "look")];
        let rates = Rates { sends_bytes_per_s: 2.5e9, receives_bytes_per_s: 1e9 };
        let measured = Measured {
            seconds: 1.0,
            bytes: 0,
            bytes_max: 0,
            hosts: [("a \"b\"".into(), rates)].into(),
            pairs: Vec::new(),
        };
        let report = Report::new(findings, BTreeMap::new(), Some(measured));
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("preflight.prom");
        report.write_metrics(&file).unwrap();
        let text = std::fs::read_to_string(&file).unwrap();
        for line in [
            "forebay_preflight_net_findings{check=\"mtu\",severity=\"fault\"} 1\n",
            "forebay_preflight_net_findings{check=\"dns\",severity=\"ok\"} 0\n",
            "forebay_preflight_net_host_bytes_per_second{host=\"a \\\"b\\\"\",direction=\"sends\"} 2500000000.0\n",
        ] {
            assert!(text.contains(line), "{text}");
        }
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1, "nothing is left beside it");
    }
}
