//! The section of the page about the GPUs of the machine that replayed.

use super::{legend, line_key, panels_of};
use crate::record::RecordLog;
use crate::report::plot::{Measure, Panel, Series, over_time};
use crate::report::summary::{ArmSummary, Summary};

const BUSY: Measure = Measure {
    title: "Utilisation of each GPU over time",
    axis: "percent busy over model time (s)",
    unit: "percent",
    most: Some(100.0),
};

/// Empty if nobody asked the GPUs.
pub fn section(summary: &Summary, log: &RecordLog) -> String {
    if log.gpus.is_empty() {
        return String::new();
    }
    let mut numbers: Vec<u32> = log.gpus.iter().map(|sample| sample.gpu).collect();
    numbers.sort_unstable();
    numbers.dedup();
    let panels: Vec<Panel> = summary.arms.iter().map(|arm| panel(&numbers, arm, log)).collect();
    let keys = numbers
        .iter()
        .enumerate()
        .map(|(color, gpu)| line_key(&format!("thin i{} d{color}", color % 6), &format!("GPU {gpu}")));
    let text = "How much of each second a kernel ran on each GPU of the machine that replayed, as nvidia-smi tells it; \
                beside each name the mean of all.";
    super::section(
        "gpus",
        "GPU utilisation",
        text,
        &(legend(keys) + &panels_of(over_time("plot-gpus", &BUSY, &panels))),
    )
}

fn panel(numbers: &[u32], arm: &ArmSummary, log: &RecordLog) -> Panel {
    let samples = |gpu| log.gpus.iter().filter(move |sample| sample.arm == arm.arm && sample.gpu == gpu);
    let series = numbers.iter().enumerate().map(|(color, &gpu)| Series {
        name: format!("GPU {gpu}"),
        color,
        points: samples(gpu).map(|sample| (sample.at_s, sample.busy_percent)).collect(),
    });
    let mean = arm.gpus.iter().map(|gpu| gpu.busy_percent_mean).sum::<f64>() / arm.gpus.len().max(1) as f64;
    let note = if arm.gpus.is_empty() { String::new() } else { format!("mean {mean:.0} %") };
    Panel { name: arm.arm.clone(), note, series: series.collect() }
}
