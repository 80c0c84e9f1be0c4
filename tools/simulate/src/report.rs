//! What is said of a run: times, rates and where tokens came from. It knows answers. It knows no
//! engine.

use crate::cluster::{Answer, Outcome};
use forebay_trace::quantile::quantile;

/// The figures of one run.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Figures {
    pub answers: usize,
    pub ttft_mean_s: f64,
    pub ttft_p50_s: f64,
    pub ttft_p90_s: f64,
    pub ttft_p99_s: f64,
    pub tpot_p50_s: f64,
    pub tpot_p90_s: f64,
    pub tpot_p99_s: f64,
    pub tokens_per_s: f64,
    /// Part of the prompts' tokens that was not computed.
    pub cached: f64,
    /// Parts of the requests whose KV was pulled, and that were handed over.
    pub pulled: f64,
    pub handed_over: f64,
}

/// The unit of a figure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unit {
    Seconds,
    /// Seconds that are shown as milliseconds.
    Millis,
    PerSecond,
    Share,
    Count,
}

impl Unit {
    /// As results name it.
    pub fn name(self) -> &'static str {
        match self {
            Unit::Seconds | Unit::Millis => "s",
            Unit::PerSecond => "1/s",
            Unit::Share => "fraction",
            Unit::Count => "answers",
        }
    }
}

/// A figure of a run and how it is shown.
pub struct Metric {
    /// In names of rows.
    pub name: &'static str,
    /// Over a column.
    pub title: &'static str,
    pub unit: Unit,
    pub value: fn(&Figures) -> f64,
}

/// What is said of a run, in order.
pub const METRICS: [Metric; 12] = [
    Metric { name: "answers", title: "answers", unit: Unit::Count, value: |run| run.answers as f64 },
    Metric { name: "ttft_mean_s", title: "TTFT s mean", unit: Unit::Seconds, value: |run| run.ttft_mean_s },
    Metric { name: "ttft_p50_s", title: "p50", unit: Unit::Seconds, value: |run| run.ttft_p50_s },
    Metric { name: "ttft_p90_s", title: "p90", unit: Unit::Seconds, value: |run| run.ttft_p90_s },
    Metric { name: "ttft_p99_s", title: "p99", unit: Unit::Seconds, value: |run| run.ttft_p99_s },
    Metric { name: "tpot_p50_s", title: "TPOT ms p50", unit: Unit::Millis, value: |run| run.tpot_p50_s },
    Metric { name: "tpot_p90_s", title: "p90", unit: Unit::Millis, value: |run| run.tpot_p90_s },
    Metric { name: "tpot_p99_s", title: "p99", unit: Unit::Millis, value: |run| run.tpot_p99_s },
    Metric { name: "tokens_per_s", title: "tokens/s", unit: Unit::PerSecond, value: |run| run.tokens_per_s },
    Metric { name: "cached", title: "cached", unit: Unit::Share, value: |run| run.cached },
    Metric { name: "pulled", title: "pulled", unit: Unit::Share, value: |run| run.pulled },
    Metric { name: "handed_over", title: "handed over", unit: Unit::Share, value: |run| run.handed_over },
];

impl Figures {
    pub fn of(outcome: &Outcome) -> Figures {
        let answers = &outcome.answers;
        let sorted = |values: &mut dyn Iterator<Item = f64>| {
            let mut values: Vec<f64> = values.collect();
            values.sort_by(f64::total_cmp);
            values
        };
        let ttft = sorted(&mut answers.iter().map(ttft_s));
        let tpot = sorted(&mut answers.iter().filter_map(tpot_s));
        let at = |values: &[f64], share| quantile(values, share).unwrap_or(0.0);
        let tokens =
            |count: fn(&Answer) -> u32| answers.iter().map(|answer| f64::from(count(answer))).sum::<f64>();
        let (from_us, until_us) = outcome.counted_us;
        Figures {
            answers: answers.len(),
            ttft_mean_s: ttft.iter().sum::<f64>() / ttft.len().max(1) as f64,
            ttft_p50_s: at(&ttft, 0.5),
            ttft_p90_s: at(&ttft, 0.9),
            ttft_p99_s: at(&ttft, 0.99),
            tpot_p50_s: at(&tpot, 0.5),
            tpot_p90_s: at(&tpot, 0.9),
            tpot_p99_s: at(&tpot, 0.99),
            tokens_per_s: tokens(|answer| answer.output_tokens) / ((until_us - from_us).max(1) as f64 / 1e6),
            cached: tokens(|answer| answer.found.gpu_tokens + answer.found.loaded_tokens)
                / tokens(|answer| answer.input_tokens).max(1.0),
            pulled: outcome.pulls as f64 / outcome.requests.max(1) as f64,
            handed_over: outcome.hand_overs as f64 / outcome.requests.max(1) as f64,
        }
    }
}

fn ttft_s(answer: &Answer) -> f64 {
    (answer.first_token_us - answer.asked_us) as f64 / 1e6
}

/// From token to token; an answer of one token has none.
fn tpot_s(answer: &Answer) -> Option<f64> {
    let tokens = answer.output_tokens - 1;
    (tokens > 0).then(|| (answer.end_us - answer.first_token_us) as f64 / 1e6 / f64::from(tokens))
}
