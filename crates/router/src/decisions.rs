//! Why each of the last requests went where it went. It knows decisions and how they ended, as
//! plain values in a ring of fixed size.

use crate::health::Failure;
use crate::policy::{Candidate, Decision, Reason};
use serde::Serialize;
use std::collections::VecDeque;
use std::sync::Arc;

/// Decisions that are remembered.
pub const REMEMBERED: usize = 256;

/// One decision and what came of it.
#[derive(Debug, Clone, Serialize)]
pub struct DecisionRecord {
    /// Counts decisions from 0; a request that is tried again has one for each attempt.
    pub number: u64,
    /// When it was made, since the router's start.
    pub at_us: u64,
    /// Identifies the session: a hash, in hexadecimal.
    pub session: String,
    /// Estimated length of the prompt.
    pub input_tokens: u64,
    /// Which attempt at the request this was, from 1.
    pub attempt: u32,
    /// Name of the chosen backend.
    pub backend: String,
    /// Which rule settled it.
    pub reason: Reason,
    /// What was known of each backend.
    pub candidates: Vec<CandidateRecord>,
    /// How it ended; absent while it is under way.
    pub outcome: Option<Outcome>,
}

/// What was known of one backend when a decision was made.
#[derive(Debug, Clone, Serialize)]
pub struct CandidateRecord {
    pub backend: String,
    /// Its score, lower is better; absent when it could not be chosen.
    pub score: Option<f64>,
    #[serde(flatten)]
    pub known: Candidate,
}

/// How an attempt ended.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct Outcome {
    /// Status of the answer; absent if there was none.
    pub status: Option<u16>,
    /// Why there was no whole answer.
    pub failure: Option<Failure>,
    /// The client went away.
    pub cancelled: bool,
    /// From the decision to the first byte of the answer.
    pub first_byte_us: Option<u64>,
    /// Length of the prompt as the engine counted it.
    pub prompt_tokens: Option<u64>,
    /// Predicted hit, scaled to the engine's count.
    pub predicted_tokens: Option<u64>,
    /// The hit that the engine reported.
    pub cached_tokens: Option<u64>,
}

#[derive(Debug, Default)]
pub struct Decisions {
    entries: VecDeque<Entry>,
    /// Number of the first entry.
    first: u64,
}

/// A [`DecisionRecord`] before names are filled in.
#[derive(Debug)]
pub struct Entry {
    pub at_us: u64,
    pub session: u64,
    pub input_tokens: u64,
    pub attempt: u32,
    pub decision: Decision,
    /// Of the candidates; empty where a slot was free.
    pub names: Arc<[String]>,
    /// On what grounds.
    pub candidates: Vec<Candidate>,
    pub outcome: Option<Outcome>,
}

impl Decisions {
    /// Adds a decision and returns its number.
    pub fn push(&mut self, entry: Entry) -> u64 {
        if self.entries.len() == REMEMBERED {
            self.entries.pop_front();
            self.first += 1;
        }
        self.entries.push_back(entry);
        self.first + self.entries.len() as u64 - 1
    }

    /// Notes how a decision ended, if it is still remembered.
    pub fn finish(&mut self, number: u64, outcome: Outcome) {
        let place = number.checked_sub(self.first).and_then(|place| usize::try_from(place).ok());
        if let Some(entry) = place.and_then(|place| self.entries.get_mut(place)) {
            entry.outcome = Some(outcome);
        }
    }

    /// All that are remembered, oldest first.
    pub fn records(&self) -> Vec<DecisionRecord> {
        let numbers = self.first..;
        numbers.zip(&self.entries).map(|(number, entry)| entry.record(number)).collect()
    }
}

impl Entry {
    fn record(&self, number: u64) -> DecisionRecord {
        let scores = &self.decision.scores;
        let candidates = self.names.iter().zip(&self.candidates).zip(scores);
        let candidates = candidates.filter(|((name, _), _)| !name.is_empty());
        let candidates = candidates.map(|((name, &known), &score)| CandidateRecord {
            backend: name.clone(),
            score,
            known,
        });
        DecisionRecord {
            number,
            at_us: self.at_us,
            session: format!("{:016x}", self.session),
            input_tokens: self.input_tokens,
            attempt: self.attempt,
            backend: self.names.get(self.decision.chosen).cloned().unwrap_or_default(),
            reason: self.decision.reason,
            candidates: candidates.collect(),
            outcome: self.outcome,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(at_us: u64) -> Entry {
        let decision = Decision { chosen: 0, reason: Reason::LowestScore, scores: vec![Some(1.5)] };
        let candidates = vec![Candidate {
            eligible: true,
            in_flight: 1,
            pending_prefill_tokens: 2,
            pending_prefill_us: 7,
            context_tokens: 3,
            pool_tokens: 8,
            hit_tokens: 4,
            stored_tokens: 5,
            load_us_per_token: 1.5,
        }];
        let names = ["a".to_owned()].into();
        Entry { at_us, session: 5, input_tokens: 6, attempt: 1, decision, names, candidates, outcome: None }
    }

    #[test]
    fn the_last_decisions_are_kept_and_no_more() {
        let done = Outcome { status: Some(200), first_byte_us: Some(7), ..Outcome::default() };
        let mut decisions = Decisions::default();
        for number in 0..REMEMBERED as u64 + 10 {
            assert_eq!(decisions.push(entry(number)), number);
        }
        decisions.finish(3, done);
        decisions.finish(10, done);
        let records = decisions.records();
        assert_eq!((records.len(), records[0].number, records[0].at_us), (REMEMBERED, 10, 10));
        assert_eq!((records[0].outcome, records[1].outcome), (Some(done), None));
        assert_eq!((&records[0].backend[..], records[0].candidates[0].score), ("a", Some(1.5)));
    }
}
