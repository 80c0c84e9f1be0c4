//! What a reader must know before believing the figures of a summary, in sentences. It knows figures and words; it must
//! never know where the sentences are shown.

use super::summary::{ArmSummary, Summary};
use super::units::{count, seconds};

/// Sending late by this share of the median TTFT is worth a note: a replayer that is late measures itself.
const LATE_SHARE: f64 = 0.1;

/// The notes on all arms.
pub fn notes(summary: &Summary) -> Vec<String> {
    let mut notes: Vec<String> = summary.arms.iter().flat_map(of_arm).collect();
    if summary.skipped_lines > 0 {
        notes.push(format!("{} lines of the log could not be read.", summary.skipped_lines));
    }
    notes
}

fn of_arm(arm: &ArmSummary) -> Vec<String> {
    let mut notes = Vec::new();
    if !arm.failures.is_empty() {
        let kinds = arm.failures.iter().map(|(kind, failed)| format!("{failed} x {kind}"));
        notes.push(format!("failed requests: {}.", kinds.collect::<Vec<_>>().join(", ")));
    }
    if arm.early > 0 {
        notes.push(format!("{} turns were sent before the previous answer was complete.", arm.early));
    }
    if arm.sources.unreported > 0 {
        notes.push(format!(
            "engines did not report hits for {} prompt tokens.",
            count(arm.sources.unreported)
        ));
    }
    let late = arm.start_delay_s.p90.zip(arm.ttft_s.p50).filter(|(delay, ttft)| *delay > LATE_SHARE * ttft);
    if let Some((delay_s, _)) = late {
        notes.push(format!(
            "requests were sent late, p90 {} s; their latencies include it.",
            seconds(delay_s)
        ));
    }
    notes.into_iter().map(|note| format!("{}: {note}", arm.arm)).collect()
}
