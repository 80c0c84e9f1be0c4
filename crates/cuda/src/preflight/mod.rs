//! What stands in the way of fast copies on a host: judgements over its topology and, where there
//! are some, figures that were measured.

mod links;
mod measured;
mod memory;

pub use memory::{huge_pages, memory_lock};

use crate::driver::LoadError;
use crate::profile::Profile;
use crate::topology::Topology;
use serde::{Deserialize, Serialize};

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Severity {
    /// As it should be.
    Ok,
    /// Good to know; nothing to be done, or nothing that can be told from here.
    Note,
    /// It could not be seen. Whoever needs it must not take it for granted.
    Unknown,
    /// Copies are slower than they could be.
    Warning,
    /// No copies, or wrong ones.
    Fault,
}

/// One thing that was found.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Finding {
    pub severity: Severity,
    pub what: String,
    /// Why it matters.
    pub why: String,
    /// What to do about it; empty where there is nothing to be done.
    pub action: String,
}

impl Finding {
    pub fn new(severity: Severity, what: impl Into<String>, why: &str, action: &str) -> Finding {
        Finding { severity, what: what.into(), why: why.into(), action: action.into() }
    }

    pub fn ok(what: impl Into<String>) -> Finding {
        Finding::new(Severity::Ok, what, "", "")
    }
}

/// What is to be said of a host, the worst first.
pub fn findings(host: &Topology, profile: Option<&Profile>) -> Vec<Finding> {
    if host.gpus.is_empty() {
        let what = "the driver shows this process no GPU";
        let action = "check CUDA_VISIBLE_DEVICES and what devices the container was given";
        return vec![Finding::new(Severity::Fault, what, "there is nothing to copy to", action)];
    }
    let mut all = links::findings(host);
    all.extend(memory::findings(host));
    all.extend(profile.into_iter().flat_map(|profile| measured::findings(host, profile)));
    // Stable: findings of a kind stay together.
    all.sort_by_key(|finding| std::cmp::Reverse(finding.severity));
    all
}

/// What is to be said where there is no driver to ask.
pub fn without_driver(error: &LoadError) -> Finding {
    let action = match error {
        LoadError::Path => "set FOREBAY_LIBCUDA to the driver's path, or not at all",
        LoadError::NoLibrary { .. } => "install the NVIDIA driver, or start the container with its GPUs",
        LoadError::MissingSymbol { .. } | LoadError::TooOld { .. } => "update the NVIDIA driver",
        LoadError::Start(_) => "see what nvidia-smi says, and whether the container was given GPUs",
    };
    Finding::new(Severity::Fault, error.to_string(), "without a driver no GPU can be used", action)
}

pub fn worst(findings: &[Finding]) -> Severity {
    findings.iter().map(|finding| finding.severity).max().unwrap_or(Severity::Ok)
}

/// GPUs as a sentence has them.
fn gpus(indices: &[u16]) -> String {
    let list: Vec<String> = indices.iter().map(u16::to_string).collect();
    match list.as_slice() {
        [one] => format!("GPU {one}"),
        [first @ .., last] => format!("GPUs {} and {last}", first.join(", ")),
        [] => "no GPU".into(),
    }
}
