//! What GPUs did during an arm, in figures.

use crate::record::{GpuSample, RecordLog};
use serde::Serialize;
use std::collections::BTreeSet;

/// One GPU during one arm.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct GpuSummary {
    pub gpu: u32,
    pub samples: usize,
    /// Share of the time in which a kernel ran.
    pub busy_percent_mean: f64,
    /// The most memory that was in use.
    pub memory_mib_max: f64,
}

impl GpuSummary {
    /// The figures that results objects keep, as name, unit and value.
    pub fn figures(&self) -> [(String, &'static str, f64); 2] {
        let named = |name: &str| format!("gpu{}.{name}", self.gpu);
        [
            (named("busy_percent_mean"), "%", self.busy_percent_mean),
            (named("memory_mib_max"), "MiB", self.memory_mib_max),
        ]
    }
}

/// The GPUs of an arm, by their numbers.
pub(super) fn gpus(arm: &str, log: &RecordLog) -> Vec<GpuSummary> {
    let of_arm: Vec<&GpuSample> = log.gpus.iter().filter(|sample| sample.arm == arm).collect();
    let numbers: BTreeSet<u32> = of_arm.iter().map(|sample| sample.gpu).collect();
    let summary = |gpu| {
        let samples = || of_arm.iter().filter(move |sample| sample.gpu == gpu);
        let busy: f64 = samples().map(|sample| sample.busy_percent).sum();
        GpuSummary {
            gpu,
            samples: samples().count(),
            busy_percent_mean: busy / samples().count() as f64,
            memory_mib_max: samples().map(|sample| sample.memory_mib).fold(0.0, f64::max),
        }
    };
    numbers.into_iter().map(summary).collect()
}
