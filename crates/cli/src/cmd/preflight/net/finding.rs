//! What was found: the twelve checks, and one result of one of them. Knows how results are shown.

use crate::cmd::findings::name_of;
use forebay_cuda::preflight::Severity;
use serde::Serialize;
use std::fmt;

/// What is looked at.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Check {
    /// Packets as long as the link allows reach peers.
    Mtu,
    /// Packets go out and come back by the device that is meant.
    Route,
    /// Peers answer, and let this host in.
    Ports,
    /// Host names resolve.
    Dns,
    /// How fast pairs of hosts are. Needs `--measure`.
    Bandwidth,
    /// How late and how lossy they are.
    Latency,
    Rdma,
    /// What this process may have of the host.
    Limits,
    Numa,
    Clocks,
    /// Programs and settings that have to be the same everywhere.
    Versions,
    /// What carries bytes beside TCP.
    Transports,
}

impl Check {
    pub const ALL: [Check; 12] = [
        Check::Mtu,
        Check::Route,
        Check::Ports,
        Check::Dns,
        Check::Bandwidth,
        Check::Latency,
        Check::Rdma,
        Check::Limits,
        Check::Numa,
        Check::Clocks,
        Check::Versions,
        Check::Transports,
    ];

    pub fn name(self) -> &'static str {
        match self {
            Check::Mtu => "mtu",
            Check::Route => "route",
            Check::Ports => "ports",
            Check::Dns => "dns",
            Check::Bandwidth => "bandwidth",
            Check::Latency => "latency",
            Check::Rdma => "rdma",
            Check::Limits => "limits",
            Check::Numa => "numa",
            Check::Clocks => "clocks",
            Check::Versions => "versions",
            Check::Transports => "transports",
        }
    }
}

/// One result.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Finding {
    pub check: Check,
    pub severity: Severity,
    /// Which peer, device or limit it is about; empty: this host.
    pub subject: String,
    pub seen: String,
    /// Empty where what was seen is as it should be.
    pub expected: String,
    /// What to do; empty where there is nothing to be done.
    pub action: String,
}

impl Finding {
    pub fn ok(check: Check, subject: impl Into<String>, seen: impl Into<String>) -> Finding {
        let (subject, seen) = (subject.into(), seen.into());
        let (expected, action) = (String::new(), String::new());
        Finding { check, severity: Severity::Ok, subject, seen, expected, action }
    }

    /// Something that is not as it should be, or could not be found out.
    pub fn bad(
        check: Check,
        severity: Severity,
        subject: impl Into<String>,
        seen: impl Into<String>,
        expected: impl Into<String>,
        action: impl Into<String>,
    ) -> Finding {
        let (subject, seen) = (subject.into(), seen.into());
        Finding { check, severity, subject, seen, expected: expected.into(), action: action.into() }
    }

    /// Whether both are one line: of one check about several subjects, or of several checks about
    /// this host.
    fn says_the_same_as(&self, other: &Finding) -> bool {
        let is_one_line = self.check == other.check || (self.subject.is_empty() && other.subject.is_empty());
        let texts =
            |finding: &Finding| [&finding.seen, &finding.expected, &finding.action].map(String::clone);
        is_one_line && self.severity == other.severity && texts(self) == texts(other)
    }
}

/// The worst of all; what was not looked at is not ok.
pub fn worst(findings: &[Finding]) -> Severity {
    findings.iter().map(|finding| finding.severity).max().unwrap_or(Severity::Unknown)
}

/// The worst first, and a check that was to be made and found nothing at all as unknown, so that
/// none passes in silence.
pub fn complete(mut findings: Vec<Finding>, is_measured: bool) -> Vec<Finding> {
    for check in Check::ALL {
        let is_asked = is_measured || check != Check::Bandwidth;
        if is_asked && !findings.iter().any(|finding| finding.check == check) {
            let (expected, action) =
                ("a peer that answers", "give --peer, --peers or a --config with [directory]");
            findings.push(Finding::bad(check, Severity::Unknown, "", "nothing to look at", expected, action));
        }
    }
    findings.sort_by_key(|finding| (std::cmp::Reverse(finding.severity), finding.check));
    findings
}

/// All findings as lines; those that say the same are one.
pub struct Table<'a>(pub &'a [Finding]);

impl fmt::Display for Table<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut groups: Vec<Vec<&Finding>> = Vec::new();
        for finding in self.0 {
            match groups.iter_mut().find(|group| group[0].says_the_same_as(finding)) {
                Some(group) => group.push(finding),
                None => groups.push(vec![finding]),
            }
        }
        groups.iter().try_for_each(|group| write_group(f, group))
    }
}

fn write_group(f: &mut fmt::Formatter<'_>, group: &[&Finding]) -> fmt::Result {
    /// So many subjects are named.
    const NAMED: usize = 4;
    let Finding { severity, seen, expected, action, .. } = group[0];
    let mut checks: Vec<&str> = group.iter().map(|finding| finding.check.name()).collect();
    checks.dedup();
    let subjects: Vec<&str> =
        group.iter().map(|finding| &*finding.subject).filter(|it| !it.is_empty()).collect();
    let named = match subjects.len() {
        0 => String::new(),
        n if n > NAMED => format!("{} and {} more: ", subjects[..NAMED].join(", "), n - NAMED),
        _ => format!("{}: ", subjects.join(", ")),
    };
    // Several names are wider than their column.
    let colon = if checks.len() > 1 { ":" } else { "" };
    writeln!(f, "{:<8} {:<10}{colon} {named}{seen}", name_of(*severity), checks.join(", "))?;
    for (word, text) in [("expected", expected), ("do", action)] {
        if !text.is_empty() {
            writeln!(f, "{:19} {word}: {text}", "")?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_check_that_found_nothing_is_unknown_and_unknown_is_not_ok() {
        let all = complete(vec![Finding::ok(Check::Mtu, "left", "1500 bytes reach it")], false);
        let unknown: Vec<Check> = all
            .iter()
            .filter(|finding| finding.severity == Severity::Unknown)
            .map(|finding| finding.check)
            .collect();
        assert_eq!(unknown.len(), Check::ALL.len() - 2, "all but mtu, and bandwidth was not asked for");
        assert!(!unknown.contains(&Check::Mtu) && !unknown.contains(&Check::Bandwidth));
        assert_eq!(worst(&all), Severity::Unknown);
        assert_eq!(worst(&[]), Severity::Unknown);
        assert!(complete(Vec::new(), true).iter().any(|finding| finding.check == Check::Bandwidth));
    }

    #[test]
    fn findings_that_say_the_same_are_one_line() {
        let of = |subject: &str| Finding::ok(Check::Ports, subject, "lets this host in");
        let other =
            Finding::bad(Check::Ports, Severity::Fault, "f", "nobody listens there", "a node", "start it");
        let all: Vec<Finding> = ["a", "b", "c", "d", "e"].map(of).into_iter().chain([other]).collect();
        let shown = Table(&all).to_string();
        assert!(shown.contains("a, b, c, d and 1 more: lets this host in\n"), "{shown}");
        assert!(shown.contains("fault    ports      f: nobody listens there\n"), "{shown}");
        assert_eq!(shown.lines().count(), 4, "{shown}");
        let nothing = Table(&complete(Vec::new(), false)).to_string();
        assert!(nothing.starts_with("unknown  mtu, route, ports, dns, latency, "), "{nothing}");
        assert_eq!(nothing.lines().count(), 3, "{nothing}");
    }
}
