//! What each host of a cluster moved when it was first measured, in a file, and which have become
//! slower since.

use crate::cmd::preflight::net::finding::{Check, Finding};
use forebay_cuda::preflight::Severity::Warning;
use forebay_results::output::Error;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::path::Path;

/// A host that is this much slower than it was has drifted.
const DRIFT: f64 = 0.2;

/// What a host sends and receives, in bytes a second: medians over its pairs.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Rates {
    pub sends_bytes_per_s: f64,
    pub receives_bytes_per_s: f64,
}

/// A measurement that later ones are compared with.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Baseline {
    /// When it was measured.
    pub date: String,
    /// By name.
    pub hosts: BTreeMap<String, Rates>,
}

impl Baseline {
    /// The one in a file, if there is a file.
    pub fn read(path: &Path) -> Result<Option<Baseline>, Error> {
        let failed = |error: &dyn std::fmt::Display| format!("--baseline {}: {error}", path.display());
        match std::fs::read(path) {
            Ok(json) => Ok(Some(serde_json::from_slice(&json).map_err(|error| failed(&error))?)),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
            Err(error) => Err(failed(&error).into()),
        }
    }

    pub fn write(&self, path: &Path) -> Result<(), Error> {
        let json = serde_json::to_string_pretty(self)? + "\n";
        std::fs::write(path, json).map_err(|error| format!("--baseline {}: {error}", path.display()).into())
    }

    /// What has become slower.
    pub fn judge(&self, now: &BTreeMap<String, Rates>) -> Vec<Finding> {
        let drifted = now.iter().filter_map(|(name, now)| {
            let then = self.hosts.get(name)?;
            let is_slower = |then: f64, now: f64| now < (1.0 - DRIFT) * then;
            let has_drifted = is_slower(then.sends_bytes_per_s, now.sends_bytes_per_s)
                || is_slower(then.receives_bytes_per_s, now.receives_bytes_per_s);
            let of = |rates: &Rates| {
                let (sends, receives) = (rates.sends_bytes_per_s / 1e9, rates.receives_bytes_per_s / 1e9);
                format!("it sends {sends:.2} and receives {receives:.2} GB/s")
            };
            let expected =
                format!("at most {:.0} % less than on {}, when {}", DRIFT * 100.0, self.date, of(then));
            let action =
                "look what has changed there; remove the file to take the new figures as the baseline";
            let finding = || Finding::bad(Check::Bandwidth, Warning, name, of(now), expected, action);
            has_drifted.then(finding)
        });
        drifted.collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rates(sends: f64, receives: f64) -> Rates {
        Rates { sends_bytes_per_s: sends * 1e9, receives_bytes_per_s: receives * 1e9 }
    }

    #[test]
    fn a_host_that_became_a_fifth_slower_is_told_with_both_figures() {
        let then = Baseline {
            date: "2026-11-28T00:00:00Z".into(),
            hosts: [("left".into(), rates(10.0, 10.0)), ("right".into(), rates(10.0, 10.0))].into(),
        };
        let judged = |now: Rates| then.judge(&[("left".into(), now), ("new".into(), rates(1.0, 1.0))].into());
        assert!(judged(rates(8.0, 8.1)).is_empty() && judged(rates(20.0, 20.0)).is_empty());
        for now in [rates(7.9, 10.0), rates(10.0, 7.9)] {
            let found = judged(now);
            assert!(
                found.len() == 1 && found[0].subject == "left" && found[0].severity == Warning,
                "{found:?}"
            );
            assert!(
                found[0].expected.contains("2026-11-28") && found[0].expected.contains("10.00"),
                "{found:?}"
            );
        }
    }

    #[test]
    fn a_baseline_is_read_as_it_was_written_and_a_damaged_one_is_an_error() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("baseline.json");
        assert_eq!(Baseline::read(&path).unwrap(), None);
        let baseline = Baseline { date: "today".into(), hosts: [("left".into(), rates(1.0, 2.0))].into() };
        baseline.write(&path).unwrap();
        assert_eq!(Baseline::read(&path).unwrap(), Some(baseline));
        std::fs::write(&path, "{").unwrap();
        let error = Baseline::read(&path).unwrap_err().to_string();
        assert!(error.contains("--baseline") && error.contains("baseline.json"), "{error}");
    }
}
