//! What the router of an arm decided, in figures: what it chose, how far its predictions were from
//! what came, and what its choices cost beside the others that there were.

use crate::quantile::Quantiles;
use crate::record::{Choice, DecisionSample, RecordLog};
use serde::Serialize;
use std::collections::BTreeMap;

/// The figures of an arm's decisions.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct DecisionSummary {
    pub decisions: usize,
    /// How many there were of each choice.
    pub choices: BTreeMap<Choice, usize>,
    /// Time to first token, predicted less realised, of whole answers.
    pub ttft_error_s: Quantiles,
    /// The same without its sign: how far a prediction is off.
    pub ttft_off_s: Quantiles,
    /// See [`DecisionSample::regret_s`].
    pub regret_s: Quantiles,
    /// See [`DecisionSample::over_best_other_s`].
    pub over_best_other_s: Quantiles,
}

impl DecisionSummary {
    pub fn count(&self, choice: Choice) -> usize {
        self.choices.get(&choice).copied().unwrap_or(0)
    }
}

/// The decisions of an arm; `None` if the log has none.
pub(super) fn decisions(arm: &str, log: &RecordLog) -> Option<DecisionSummary> {
    let of_arm: Vec<&DecisionSample> = log.decisions.iter().filter(|sample| sample.arm == arm).collect();
    let errors = || of_arm.iter().filter_map(|sample| Some(sample.predicted_ttft_s? - sample.ttft_s?));
    let mut choices = BTreeMap::new();
    of_arm.iter().for_each(|sample| *choices.entry(sample.choice).or_default() += 1);
    (!of_arm.is_empty()).then(|| DecisionSummary {
        decisions: of_arm.len(),
        choices,
        ttft_error_s: Quantiles::of(errors()),
        ttft_off_s: Quantiles::of(errors().map(f64::abs)),
        regret_s: Quantiles::of(of_arm.iter().filter_map(|sample| sample.regret_s)),
        over_best_other_s: Quantiles::of(of_arm.iter().filter_map(|sample| sample.over_best_other_s)),
    })
}
