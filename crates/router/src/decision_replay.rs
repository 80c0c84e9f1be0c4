//! Decides again what a decision log holds, by other policies, and says what each would have cost
//! by the step model. It knows lines of the log and the policies; it reads no files.

use crate::added_latency::added_latency_s;
use crate::decision_log::DecisionLine;
use crate::decisions::DecisionRecord;
use crate::engine_model::EngineModel;
use crate::policy::{Candidate, Policy, Request, View, choose};
use crate::prediction::predict;

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
        let record = &line.record;
        let candidates: Vec<Candidate> = record.candidates.iter().map(|candidate| candidate.known).collect();
        let index = |name: &str| record.candidates.iter().position(|candidate| candidate.backend == name);
        let chosen = index(&record.backend).ok_or_else(|| ReplayError::Chosen(record.backend.clone()))?;
        let view = View { candidates: &candidates, turn: record.number, engine_model };
        let request = Request {
            input_tokens: record.input_tokens,
            output_tokens: record.output_tokens,
            home: record.home.as_deref().and_then(index),
        };
        let costs: Vec<f64> =
            candidates.iter().map(|candidate| added_latency_s(engine_model, candidate, &request)).collect();
        let eligible = candidates.iter().zip(&costs).filter(|(candidate, _)| candidate.eligible);
        let lowest =
            eligible.map(|(_, cost)| *cost).min_by(f64::total_cmp).ok_or(ReplayError::NoCandidate)?;
        let note = |replayed: &mut Replayed, place: usize| {
            replayed.different += u64::from(place != chosen);
            replayed.cost_s.0.push(costs[place]);
            // The log's own choice may be one that could not be chosen: a damaged log.
            replayed.regret_s.0.push((costs[place] - lowest).max(0.0));
            let first_byte_us = predict(engine_model, &candidates[place], &request).first_byte_us;
            replayed.first_byte_s.0.push(first_byte_us as f64 / 1e6);
        };
        note(&mut self.logged, chosen);
        for (policy, replayed) in &mut self.others {
            let decision = choose(*policy, &view, &request).ok_or(ReplayError::NoCandidate)?;
            note(replayed, decision.chosen);
        }
        self.accuracy.add(record, line.total_us);
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
        let whole = record.outcome.filter(|outcome| {
            outcome.failure.is_none()
                && !outcome.cancelled
                && outcome.status.is_some_and(|status| status < 400)
        });
        let Some(first_byte_us) = whole.and_then(|outcome| outcome.first_byte_us) else { return };
        let error_s = |predicted_us: u64, realised_us: u64| (predicted_us as f64 - realised_us as f64) / 1e6;
        self.first_byte_s.0.push(error_s(record.predicted.first_byte_us, first_byte_us));
        let output_us = total_us.saturating_sub(first_byte_us);
        self.output_s.0.push(error_s(record.predicted.output_us, output_us));
    }
}

#[cfg(test)]
mod tests;
