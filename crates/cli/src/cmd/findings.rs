//! Findings of `preflight` and `doctor` as both show them: on the terminal, as an exit code and in
//! a file.

use forebay_cuda::preflight::{Finding, Severity};
use forebay_results::output::Error;
use serde::Serialize;
use std::path::Path;
use std::process::ExitCode;

/// A finding of a check that has a name.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Check {
    pub check: &'static str,
    #[serde(flatten)]
    pub finding: Finding,
}

impl Check {
    pub fn new(check: &'static str, finding: Finding) -> Check {
        Check { check, finding }
    }
}

/// 0 where nothing is wrong, 2 after faults, 1 after anything else that is not known to be well.
pub fn exit_code(severity: Severity) -> ExitCode {
    ExitCode::from(match severity {
        Severity::Ok | Severity::Note => 0,
        Severity::Unknown | Severity::Warning => 1,
        Severity::Fault => 2,
    })
}

/// The word for it in tables, as in JSON.
pub fn name_of(severity: Severity) -> &'static str {
    match severity {
        Severity::Ok => "ok",
        Severity::Note => "note",
        Severity::Unknown => "unknown",
        Severity::Warning => "warning",
        Severity::Fault => "fault",
    }
}

/// Prints a finding, with the check that found it where that has a name.
pub fn print(check: Option<&str>, finding: &Finding) {
    let severity = name_of(finding.severity);
    let check = check.map_or(String::new(), |check| format!("{check}: "));
    println!("{severity:<8} {check}{}", finding.what);
    for line in [&finding.why, &finding.action].into_iter().filter(|line| !line.is_empty()) {
        println!("         {line}");
    }
}

/// Writes all that was found to a file as JSON.
pub fn write(file: &Path, all: &impl Serialize) -> Result<(), Error> {
    let named = |error: &dyn std::fmt::Display| format!("{}: {error}", file.display());
    let text = serde_json::to_string_pretty(all).map_err(|error| named(&error))?;
    Ok(std::fs::write(file, text + "\n").map_err(|error| named(&error))?)
}
