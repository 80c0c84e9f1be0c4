//! What a reader must know before believing the figures of a summary, in sentences. It knows
//! figures and words.

use super::summary::{ArmSummary, Summary};
use crate::units::{count, seconds};

/// Sending late by this share of the median TTFT is worth a note: a replayer that is late measures
/// itself.
const LATE_SHARE: f64 = 0.1;

/// One sentence for each thing to know, over all arms that it concerns.
pub fn notes(summary: &Summary) -> Vec<String> {
    let of_arms = [
        note(summary, "Failed requests, whose latencies are in no figure", failures),
        note(summary, "Answers shorter than asked for, whose latencies say less", short),
        note(summary, "Answers whose tokens are counted by events, because the server counts none", |arm| {
            some_count(arm.estimated_answers as u64)
        }),
        note(summary, "Requests were sent late, because the machine was busy or the window full (p90)", late),
        note(summary, "Turns sent before the previous answer was complete", |arm| {
            some_count(arm.early as u64)
        }),
        note(summary, "Prompt tokens for which engines did not report hits", |arm| {
            some_count(arm.sources.unreported)
        }),
    ];
    let of_log = some_count(summary.skipped_lines as u64)
        .map(|lines| format!("Lines of the log that could not be read: {lines}."));
    of_arms.into_iter().flatten().chain(of_log).collect()
}

/// `what: arm figure, arm figure.` for the arms that have a figure.
fn note(summary: &Summary, what: &str, figure: impl Fn(&ArmSummary) -> Option<String>) -> Option<String> {
    let arms: Vec<String> =
        summary.arms.iter().filter_map(|arm| Some(format!("{} {}", arm.arm, figure(arm)?))).collect();
    (!arms.is_empty()).then(|| format!("{what}: {}.", arms.join(", ")))
}

fn failures(arm: &ArmSummary) -> Option<String> {
    let kinds: Vec<String> = arm.failures.iter().map(|(kind, failed)| format!("{failed} x {kind}")).collect();
    (!kinds.is_empty()).then(|| format!("({})", kinds.join(", ")))
}

fn short(arm: &ArmSummary) -> Option<String> {
    let (answers, got, asked) = (arm.short_answers, arm.output_tokens, arm.asked_tokens?);
    (answers > 0)
        .then(|| format!("{} ({} of {} tokens came)", count(answers as u64), count(got), count(asked)))
}

fn late(arm: &ArmSummary) -> Option<String> {
    let (delay_s, ttft_s) = arm.start_delay_s.p90.zip(arm.ttft_s.p50)?;
    (delay_s > LATE_SHARE * ttft_s).then(|| format!("{} s", seconds(delay_s)))
}

fn some_count(value: u64) -> Option<String> {
    (value > 0).then(|| count(value))
}
