//! Why each of the last requests went where it went. It knows decisions and how they ended, as
//! plain values in a ring of fixed size.

use crate::elastic::{Choice, WeighedOption};
use crate::hand_over::HandOverEnd;
use crate::health::Failure;
use crate::policy::{Candidate, Decision, Policy, Reason};
use crate::prediction::Prediction;
use crate::slo::{RefusalReason, Slo};
use serde::{Deserialize, Serialize};
use std::collections::VecDeque;
use std::sync::{Arc, OnceLock};

/// Decisions that are remembered.
pub const REMEMBERED: usize = 256;

/// One decision and what came of it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct DecisionRecord {
    /// Counts decisions from 0; a request that is tried again has one for each attempt.
    pub number: u64,
    /// When it was made, since the router's start.
    pub at_us: u64,
    /// Identifies the session: a hash, in hexadecimal.
    pub session: String,
    /// Estimated length of the prompt.
    pub input_tokens: u64,
    /// Expected length of the answer.
    pub output_tokens: u64,
    /// Name of the backend that the session had before.
    pub home: Option<String>,
    /// By which policy it was decided.
    pub policy: Policy,
    /// Which attempt at the request this was, from 1.
    pub attempt: u32,
    /// Name of the chosen backend.
    pub backend: String,
    /// Which rule settled it.
    pub reason: Reason,
    /// How long the chosen backend was expected to take.
    pub predicted: Prediction,
    /// What was known of each backend.
    pub candidates: Vec<CandidateRecord>,
    /// What could have been done with it under `elastic`, the cheapest of each kind.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub options: Vec<OptionRecord>,
    /// How its prompt was handed over to the chosen backend, if that was decided.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hand_over: Option<HandOverRecord>,
    /// How long the request may take.
    #[serde(default, skip_serializing_if = "Slo::is_empty")]
    pub slo: Slo,
    /// How it ended; absent while it is under way.
    pub outcome: Option<Outcome>,
}

/// What was known of one backend when a decision was made.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct CandidateRecord {
    pub backend: String,
    /// Its score, lower is better; absent when it could not be chosen.
    pub score: Option<f64>,
    #[serde(flatten)]
    pub known: Candidate,
}

/// Something that could have been done.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct OptionRecord {
    /// Name of the backend that would say the answer.
    pub backend: String,
    /// Name of the one that would compute the prompt, if that is another.
    pub prefill_backend: Option<String>,
    /// Seconds that all requests together would wait longer.
    pub added_s: f64,
    /// Seconds until its first token.
    pub first_token_s: f64,
}

/// A hand-over that was decided.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct HandOverRecord {
    /// Name of the backend that was to compute the prompt.
    pub prefill_backend: String,
    /// What it computed; absent if it did not answer, or not yet.
    pub prefilled: Option<PrefilledRecord>,
    /// How it ended; absent while it is under way.
    pub handed: Option<HandedRecord>,
}

/// A prompt that was computed to be handed over.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct PrefilledRecord {
    /// From the decision to the prefiller's answer.
    pub after_us: u64,
    /// As the prefiller counted them.
    pub prompt_tokens: Option<u64>,
    pub cached_tokens: Option<u64>,
}

/// How a hand-over ended.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct HandedRecord {
    pub end: HandOverEnd,
    /// From the decision on.
    pub after_us: u64,
}

/// How an attempt ended.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct Outcome {
    /// Status of the answer; absent if there was none.
    pub status: Option<u16>,
    /// Why there was no whole answer.
    pub failure: Option<Failure>,
    /// The client went away.
    pub cancelled: bool,
    /// It was refused, and went nowhere: the chosen backend is where it would have gone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub refused: Option<RefusalReason>,
    /// From the decision to the first byte of the answer.
    pub first_byte_us: Option<u64>,
    /// Length of the prompt as the engine counted it.
    pub prompt_tokens: Option<u64>,
    /// Predicted hit, scaled to the engine's count.
    pub predicted_tokens: Option<u64>,
    /// The hit that the engine reported. The rest of the prompt was computed.
    pub cached_tokens: Option<u64>,
    /// Length of the answer as the engine counted it.
    pub completion_tokens: Option<u64>,
}

impl DecisionRecord {
    /// The request went nowhere.
    pub fn is_refused(&self) -> bool {
        self.outcome.is_some_and(|outcome| outcome.refused.is_some())
    }
}

impl Outcome {
    /// A whole answer came, and no error.
    pub fn is_whole(&self) -> bool {
        self.failure.is_none() && !self.cancelled && self.status.is_some_and(|status| status < 400)
    }
}

#[derive(Debug, Default)]
pub struct Decisions {
    entries: VecDeque<Arc<Entry>>,
}

/// A [`DecisionRecord`] before names are filled in.
#[derive(Debug)]
pub struct Entry {
    pub number: u64,
    pub at_us: u64,
    pub session: u64,
    pub input_tokens: u64,
    pub output_tokens: u64,
    pub home: Option<usize>,
    pub policy: Policy,
    pub attempt: u32,
    pub decision: Decision,
    pub predicted: Prediction,
    pub slo: Slo,
    /// Of the candidates; empty where a slot was free.
    pub names: Arc<[String]>,
    /// On what grounds.
    pub candidates: Vec<Candidate>,
    /// What was weighed, under `elastic`.
    pub options: Vec<WeighedOption>,
    /// Who computes the prompt for the chosen backend, if another one does.
    pub prefill: Option<usize>,
    /// Set once, when the prefiller has answered.
    pub prefilled: OnceLock<PrefilledRecord>,
    /// Set once, at the end of a hand-over.
    pub handed: OnceLock<HandedRecord>,
    /// Set once, at its end.
    pub outcome: OnceLock<Outcome>,
}

impl Decisions {
    /// Remembers a decision, in the place of the oldest.
    pub fn push(&mut self, entry: Arc<Entry>) {
        if self.entries.len() == REMEMBERED {
            self.entries.pop_front();
        }
        self.entries.push_back(entry);
    }

    /// All that are remembered, oldest first.
    pub fn entries(&self) -> Vec<Arc<Entry>> {
        self.entries.iter().cloned().collect()
    }
}

impl Entry {
    /// The candidate with the lowest score beside those that it goes to.
    pub fn runner_up(&self) -> Option<usize> {
        let scores = self.decision.scores.iter().enumerate();
        let others = scores.filter_map(|(slot, score)| Some((slot, (*score)?)));
        let others = others.filter(|(slot, _)| *slot != self.decision.chosen && Some(*slot) != self.prefill);
        let load = |slot: usize| self.candidates[slot].in_flight;
        let lowest =
            others.min_by(|(a, first), (b, second)| first.total_cmp(second).then(load(*a).cmp(&load(*b))));
        lowest.map(|(slot, _)| slot)
    }

    /// The whole of it.
    pub fn record(&self) -> DecisionRecord {
        let name = |index: usize| self.names.get(index).cloned();
        let scores = &self.decision.scores;
        let candidates = self.names.iter().zip(&self.candidates).zip(scores);
        let candidates = candidates.filter(|((name, _), _)| !name.is_empty());
        let candidates = candidates.map(|((name, &known), &score)| CandidateRecord {
            backend: name.clone(),
            score,
            known,
        });
        DecisionRecord {
            number: self.number,
            at_us: self.at_us,
            session: format!("{:016x}", self.session),
            input_tokens: self.input_tokens,
            output_tokens: self.output_tokens,
            home: self.home.and_then(name),
            policy: self.policy,
            attempt: self.attempt,
            backend: name(self.decision.chosen).unwrap_or_default(),
            reason: self.decision.reason,
            predicted: self.predicted,
            candidates: candidates.collect(),
            options: self.options.iter().map(|option| self.option(option)).collect(),
            hand_over: self.prefill.map(|prefill| HandOverRecord {
                prefill_backend: name(prefill).unwrap_or_default(),
                prefilled: self.prefilled.get().copied(),
                handed: self.handed.get().copied(),
            }),
            slo: self.slo,
            outcome: self.outcome.get().copied(),
        }
    }

    fn option(&self, option: &WeighedOption) -> OptionRecord {
        let name = |index: usize| self.names.get(index).cloned().unwrap_or_default();
        let prefill = match option.choice {
            Choice::HandOver { prefill, .. } => Some(name(prefill)),
            Choice::Place { .. } | Choice::Pull { .. } => None,
        };
        OptionRecord {
            backend: name(option.choice.home()),
            prefill_backend: prefill,
            added_s: option.cost_s,
            first_token_s: option.own_s,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(number: u64) -> Arc<Entry> {
        Arc::new(Entry {
            number,
            at_us: 10 * number,
            session: 5,
            input_tokens: 6,
            output_tokens: 150,
            home: Some(0),
            policy: Policy::Lpwl,
            attempt: 1,
            decision: Decision { chosen: 0, reason: Reason::LowestScore, scores: vec![Some(1.5)] },
            predicted: Prediction { first_byte_us: 8, output_us: 9 },
            slo: Slo { ttft_us: Some(9), tpot_us: None },
            names: ["a".to_owned()].into(),
            candidates: vec![Candidate {
                eligible: true,
                in_flight: 1,
                pending_prefill_tokens: 2,
                pending_prefill_us: 7,
                context_tokens: 3,
                pool_tokens: 8,
                hit_tokens: 4,
                stored_tokens: 5,
                load_us_per_token: 1.5,
            }],
            options: Vec::new(),
            prefill: None,
            prefilled: OnceLock::new(),
            handed: OnceLock::new(),
            outcome: OnceLock::new(),
        })
    }

    #[test]
    fn the_last_decisions_are_kept_and_no_more() {
        let done = Outcome { status: Some(200), first_byte_us: Some(7), ..Outcome::default() };
        let mut decisions = Decisions::default();
        for number in 0..REMEMBERED as u64 + 10 {
            let entry = entry(number);
            decisions.push(entry.clone());
            if number == 10 {
                entry.outcome.set(done).unwrap();
            }
        }
        let records: Vec<_> = decisions.entries().iter().map(|entry| entry.record()).collect();
        assert_eq!((records.len(), records[0].number, records[0].at_us), (REMEMBERED, 10, 100));
        assert_eq!((records[0].outcome, records[1].outcome), (Some(done), None));
        assert_eq!((&records[0].backend[..], records[0].candidates[0].score), ("a", Some(1.5)));
        assert_eq!(records[0].home.as_deref(), Some("a"));
    }

    #[test]
    fn the_runner_up_has_the_lowest_score_of_those_that_have_no_part_in_it() {
        let candidate = entry(0).candidates[0];
        let of = |scores: &[Option<f64>], in_flight: &[u32], prefill| {
            let decision = Decision { chosen: 0, reason: Reason::LowestScore, scores: scores.to_vec() };
            let candidate = |&in_flight: &u32| Candidate { in_flight, ..candidate };
            let candidates = in_flight.iter().map(candidate).collect();
            let entry = Arc::into_inner(entry(0)).unwrap();
            Entry { decision, candidates, prefill, ..entry }.runner_up()
        };
        assert_eq!(of(&[Some(1.0), Some(3.0), Some(2.0)], &[0, 0, 9], None), Some(2));
        assert_eq!(of(&[Some(1.0), Some(2.0), Some(2.0)], &[0, 2, 1], None), Some(2), "fewer in flight");
        assert_eq!(of(&[Some(1.0), None, Some(2.0)], &[0; 3], Some(2)), None, "it computes the prompt");
        assert_eq!(of(&[Some(1.0)], &[0], None), None);
    }

    #[test]
    fn what_is_written_of_a_decision_can_be_read_again() {
        let record = entry(3).record();
        let text = serde_json::to_string(&record).unwrap();
        assert_eq!(serde_json::from_str::<DecisionRecord>(&text).unwrap(), record);
    }
}
