//! Decides again what a decision log holds, by other policies, and says what each would have cost
//! by the step model. It knows lines of the log and the policies; it reads no files.

use crate::added_latency::added_latency_s;
use crate::decision_log::DecisionLine;
use crate::decisions::{DecisionRecord, Outcome};
use crate::engine_model::EngineModel;
use crate::policy::{Candidate, Policy, Request, View};
use crate::prediction::predict;
use crate::slo::choose_within;

/// What a policy would have done with all decisions of a log.
#[derive(Debug, Clone, PartialEq)]
pub struct Replayed {
    /// `None` is the log's own choices.
    pub policy: Option<Policy>,
    /// Decisions with another engine than the log's.
    pub different: u64,
    /// Seconds that all requests together wait longer for each decision's request.
    pub cost_s: Figures,
    /// Seconds more than the cheapest engine would have cost.
    pub regret_s: Figures,
    /// Seconds to the first byte, as the step model predicts them.
    pub first_byte_s: Figures,
}

/// How far predictions were from what came, over answers that were whole.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Accuracy {
    /// Predicted less realised seconds.
    pub first_byte_s: Figures,
    pub output_s: Figures,
}

/// Some numbers.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Figures(Vec<f64>);

impl Figures {
    pub fn count(&self) -> usize {
        self.0.len()
    }

    pub fn sum(&self) -> f64 {
        self.0.iter().sum()
    }

    /// 0 without numbers.
    pub fn mean(&self) -> f64 {
        if self.0.is_empty() { 0.0 } else { self.sum() / self.0.len() as f64 }
    }

    /// The smallest number that a `share` of them does not exceed; 0 without numbers.
    pub fn quantile(&self, share: f64) -> f64 {
        let mut sorted = self.0.clone();
        sorted.sort_by(f64::total_cmp);
        let place = (share * sorted.len() as f64).ceil() as usize;
        sorted.get(place.saturating_sub(1)).copied().unwrap_or(0.0)
    }
}

/// Why a decision cannot be made again.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ReplayError {
    #[error("the chosen backend {0:?} is none of the candidates")]
    Chosen(String),
    #[error("no candidate could be chosen")]
    NoCandidate,
}

/// Decides again by several policies.
#[derive(Debug)]
pub struct Replay {
    logged: Replayed,
    others: Vec<(Policy, Replayed)>,
    accuracy: Accuracy,
}

impl Replay {
    pub fn new(policies: &[Policy]) -> Replay {
        let others = policies.iter().map(|&policy| (policy, Replayed::new(Some(policy)))).collect();
        Replay { logged: Replayed::new(None), others, accuracy: Accuracy::default() }
    }

    /// Decides one line again, of engines that are taken for `engine_model`.
    pub fn add(&mut self, engine_model: &EngineModel, line: &DecisionLine) -> Result<(), ReplayError> {
        let weighed = Weighed::new(engine_model, &line.record)?;
        let Weighed { candidates, request, chosen, costs_s, .. } = &weighed;
        let view = View { candidates, turn: line.record.number, engine_model };
        let note = |replayed: &mut Replayed, place: usize| {
            replayed.different += u64::from(place != *chosen);
            replayed.cost_s.0.push(costs_s[place]);
            replayed.regret_s.0.push(weighed.regret_s(place));
            let first_byte_us = predict(engine_model, &candidates[place], request).first_byte_us;
            replayed.first_byte_s.0.push(first_byte_us as f64 / 1e6);
        };
        note(&mut self.logged, *chosen);
        for (policy, replayed) in &mut self.others {
            let within = choose_within(*policy, &view, request, line.record.slo);
            note(replayed, within.ok_or(ReplayError::NoCandidate)?.decision.chosen);
        }
        self.accuracy.add(&line.record, line.total_us);
        Ok(())
    }

    /// The log's own choices first, then each policy's.
    pub fn replayed(&self) -> impl Iterator<Item = &Replayed> {
        [&self.logged].into_iter().chain(self.others.iter().map(|(_, replayed)| replayed))
    }

    pub fn accuracy(&self) -> &Accuracy {
        &self.accuracy
    }
}

/// What a logged choice costs beside the others that there were, by the step model.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Judgement {
    /// Seconds that all requests together wait longer.
    pub cost_s: f64,
    /// Seconds more than the cheapest engine would have cost.
    pub regret_s: f64,
    /// What the cheapest of the other engines would have cost; `None` where there was no other.
    pub best_other_s: Option<f64>,
}

/// Judges a logged decision about engines that are taken for `engine_model`.
pub fn judge(engine_model: &EngineModel, record: &DecisionRecord) -> Result<Judgement, ReplayError> {
    let weighed = Weighed::new(engine_model, record)?;
    let Weighed { chosen, .. } = weighed;
    let others = weighed.eligible().filter(|&(place, _)| place != chosen).map(|(_, cost_s)| cost_s);
    Ok(Judgement {
        cost_s: weighed.costs_s[chosen],
        regret_s: weighed.regret_s(chosen),
        best_other_s: others.min_by(f64::total_cmp),
    })
}

/// A logged decision as it can be made again, and what each engine would cost.
struct Weighed {
    candidates: Vec<Candidate>,
    request: Request,
    /// The log's own choice.
    chosen: usize,
    costs_s: Vec<f64>,
    /// Of those that could be chosen.
    lowest_s: f64,
}

impl Weighed {
    fn new(engine_model: &EngineModel, record: &DecisionRecord) -> Result<Weighed, ReplayError> {
        let candidates: Vec<Candidate> = record.candidates.iter().map(|candidate| candidate.known).collect();
        let index = |name: &str| record.candidates.iter().position(|candidate| candidate.backend == name);
        let chosen = index(&record.backend).ok_or_else(|| ReplayError::Chosen(record.backend.clone()))?;
        let request = Request {
            input_tokens: record.input_tokens,
            output_tokens: record.output_tokens,
            home: record.home.as_deref().and_then(index),
        };
        let cost_s = |candidate| added_latency_s(engine_model, candidate, &request);
        let costs_s: Vec<f64> = candidates.iter().map(cost_s).collect();
        let mut weighed = Weighed { candidates, request, chosen, costs_s, lowest_s: 0.0 };
        let lowest_s = weighed.eligible().map(|(_, cost_s)| cost_s).min_by(f64::total_cmp);
        weighed.lowest_s = lowest_s.ok_or(ReplayError::NoCandidate)?;
        Ok(weighed)
    }

    /// The engines that could be chosen, and their costs.
    fn eligible(&self) -> impl Iterator<Item = (usize, f64)> {
        let all = self.candidates.iter().zip(&self.costs_s).enumerate();
        all.filter(|(_, (candidate, _))| candidate.eligible).map(|(place, (_, &cost_s))| (place, cost_s))
    }

    /// The log's own choice may be one that could not be chosen: a damaged log.
    fn regret_s(&self, place: usize) -> f64 {
        (self.costs_s[place] - self.lowest_s).max(0.0)
    }
}

impl Replayed {
    fn new(policy: Option<Policy>) -> Replayed {
        Replayed {
            policy,
            different: 0,
            cost_s: Figures::default(),
            regret_s: Figures::default(),
            first_byte_s: Figures::default(),
        }
    }
}

impl Accuracy {
    fn add(&mut self, record: &DecisionRecord, total_us: u64) {
        let whole = record.outcome.filter(Outcome::is_whole);
        let Some(first_byte_us) = whole.and_then(|outcome| outcome.first_byte_us) else { return };
        let error_s = |predicted_us: u64, realised_us: u64| (predicted_us as f64 - realised_us as f64) / 1e6;
        self.first_byte_s.0.push(error_s(record.predicted.first_byte_us, first_byte_us));
        let output_us = total_us.saturating_sub(first_byte_us);
        self.output_s.0.push(error_s(record.predicted.output_us, output_us));
    }
}

#[cfg(test)]
mod tests;
