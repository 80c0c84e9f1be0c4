//! What a trace says about its conversations: how many turns, how prompts grow, how long people and
//! tools take.

use crate::prefix::{KeyMap, KeySet};
use crate::quantile::ValueSummary;
use crate::request::TraceRequest;
use serde::Serialize;
use xxhash_rust::xxh3::xxh3_64;

/// A prompt that is shorter than this share of the one before it has been reset: the conversation
/// was compacted.
const RESET_BELOW: f64 = 0.7;

const MICROS_PER_S: f64 = 1e6;

/// What is known about sessions. All but the counts of sub-agents and the share of the largest
/// speak of top-level sessions only.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct SessionInfo {
    /// Top-level sessions.
    pub sessions: usize,
    pub sub_agents: usize,
    /// Requests per session.
    pub turns: ValueSummary,
    /// Prompt of the first request, in tokens.
    pub first_input_tokens: ValueSummary,
    /// Prompt of the last request, in tokens.
    pub last_input_tokens: ValueSummary,
    /// How much longer a prompt is than the one before it, in tokens; shrinking counts below zero.
    pub growth_tokens: Option<ValueSummary>,
    /// Requests that follow another one in their session.
    pub continuations: u64,
    /// How many of these have a prompt below 0.7 of the one before.
    pub resets: u64,
    /// Pauses before a request, in seconds, where recorded.
    pub think_s: Option<ValueSummary>,
    /// Time the recorded service took, in seconds, where recorded.
    pub service_s: Option<ValueSummary>,
    /// From the first arrival of a session to its last, in seconds.
    pub length_s: ValueSummary,
    /// Tool definitions and system prompt, in tokens, one value a session, where recorded.
    pub system_tokens: Option<ValueSummary>,
    /// The share of all prompt tokens that the largest tenth of the sessions has, sub-agents
    /// included; 0 with fewer than ten sessions.
    pub largest_tenth: f64,
}

#[derive(Default)]
pub(super) struct Sessions {
    of_name: KeyMap<State>,
    sub_agents: KeySet,
    growth: Vec<f32>,
    think_s: Vec<f32>,
    service_s: Vec<f32>,
    continuations: u64,
    resets: u64,
}

#[derive(Default)]
struct State {
    turns: u32,
    first_input: u32,
    last_input: u32,
    first_us: u64,
    last_us: u64,
    all_input: u64,
    system_tokens: Option<u32>,
}

impl Sessions {
    pub(super) fn add(&mut self, request: &TraceRequest) {
        let state = self.of_name.entry(xxh3_64(request.root_session().as_bytes())).or_default();
        state.all_input += u64::from(request.input_tokens);
        if request.parent_session.is_some() {
            self.sub_agents.insert(xxh3_64(request.session.as_bytes()));
            return;
        }
        match state.turns {
            0 => state.begin(request),
            _ => {
                let (before, now) = (f64::from(state.last_input), f64::from(request.input_tokens));
                self.growth.push((now - before) as f32);
                self.continuations += 1;
                self.resets += u64::from(now < RESET_BELOW * before);
            }
        }
        state.turns += 1;
        state.last_input = request.input_tokens;
        state.last_us = state.last_us.max(request.arrival_us);
        let recorded = |values: &mut Vec<f32>, time_us: Option<u64>| {
            time_us.into_iter().for_each(|time_us| values.push((time_us as f64 / MICROS_PER_S) as f32));
        };
        recorded(&mut self.think_s, request.think_us);
        recorded(&mut self.service_s, request.service_us);
    }

    /// What came of it, or `None` when no session has more than one request: then none were
    /// recorded.
    pub(super) fn finish(self) -> Option<SessionInfo> {
        let recorded = self.of_name.values().any(|state| state.turns > 1) || !self.sub_agents.is_empty();
        let main = || self.of_name.values().filter(|state| state.turns > 0);
        let summary = |value: &dyn Fn(&State) -> f64| {
            ValueSummary::of(main().map(|state| value(state) as f32).collect())
        };
        let system_tokens = main().filter_map(|state| state.system_tokens).map(|tokens| tokens as f32);
        let info = SessionInfo {
            sessions: main().count(),
            sub_agents: self.sub_agents.len(),
            turns: summary(&|state| state.turns.into())?,
            first_input_tokens: summary(&|state| state.first_input.into())?,
            last_input_tokens: summary(&|state| state.last_input.into())?,
            length_s: summary(&|state| (state.last_us - state.first_us) as f64 / MICROS_PER_S)?,
            largest_tenth: self.largest_tenth(),
            growth_tokens: ValueSummary::of(self.growth),
            continuations: self.continuations,
            resets: self.resets,
            think_s: ValueSummary::of(self.think_s),
            service_s: ValueSummary::of(self.service_s),
            system_tokens: ValueSummary::of(system_tokens.collect()),
        };
        recorded.then_some(info)
    }

    fn largest_tenth(&self) -> f64 {
        let mut inputs: Vec<u64> = self.of_name.values().map(|state| state.all_input).collect();
        inputs.sort_unstable_by(|one, other| other.cmp(one));
        let largest: u64 = inputs[..inputs.len() / 10].iter().sum();
        largest as f64 / inputs.iter().sum::<u64>().max(1) as f64
    }
}

impl State {
    fn begin(&mut self, request: &TraceRequest) {
        self.first_input = request.input_tokens;
        self.first_us = request.arrival_us;
        self.last_us = request.arrival_us;
        self.system_tokens = request.system_tokens;
    }
}
