//! The routing policies: which of several engines gets a request. It knows a view of the engines
//! and the facts of one request, both as plain numbers, and returns a decision with its scores.
//! Formulas, units, sources and degenerate cases are in `docs/routing.md`.

use crate::added_latency::{added_latency_s, room_us};
use crate::prefill::Prefill;
use std::fmt;
use std::str::FromStr;

pub use crate::view::{Candidate, Request, View};

/// How an engine is chosen. Every policy is an argmin over a score; ties go to fewer requests in
/// flight, then in turn.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Policy {
    /// One after the other. Score: places from the engine whose turn it is.
    RoundRobin,
    /// Score: requests in flight.
    LeastLoaded,
    /// The engine that served the session before; a new session goes to the least loaded.
    SessionSticky,
    /// Score: prefill tokens plus context tokens in flight, a linear sum with both weights 1.
    Linear,
    /// Score: prefill tokens times batch size.
    Lmetric,
    /// Score: prefill tokens (least pending work after the prefix that is already there).
    Lpwl,
    /// Score: seconds that all requests together wait longer, this one included. The engine that
    /// `Lpwl` would choose keeps the request as long as no other one has a clearly lower score.
    AddedLatency,
    /// The same, and a prompt may be computed at one engine and handed over to another.
    Elastic,
}

/// Which rule settled a decision.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Reason {
    /// One engine had the lowest score.
    LowestScore,
    /// Several had the lowest score; the chosen one had fewer requests in flight.
    FewerInFlight,
    /// Several were equal in both; it was the chosen one's turn.
    Turn,
    /// The session's engine was eligible.
    Home,
    /// It had the least pending work and room, and no other engine added less than half of the
    /// latency.
    LeastWork,
    /// Another engine computes the prompt, and hands it over to the chosen one.
    HandOver,
    /// The others with a lower score were not expected to keep to the request's SLOs.
    Slo,
}

impl Reason {
    /// All reasons, in order, with their names in metrics.
    pub const NAMES: [(Reason, &'static str); 7] = [
        (Reason::LowestScore, "lowest-score"),
        (Reason::FewerInFlight, "fewer-in-flight"),
        (Reason::Turn, "turn"),
        (Reason::Home, "home"),
        (Reason::LeastWork, "least-work"),
        (Reason::HandOver, "hand-over"),
        (Reason::Slo, "slo"),
    ];

    pub fn name(self) -> &'static str {
        Reason::NAMES[self as usize].1
    }
}

/// Scores are estimates, and whoever leaves the engine with its KV leaves a copy behind. So an
/// engine with room is left only for one that adds less than this part of the latency.
const CLEARLY_LESS: f64 = 0.5;

/// The chosen engine, and why.
#[derive(Debug, Clone, PartialEq)]
pub struct Decision {
    /// Index into [`View::candidates`].
    pub chosen: usize,
    /// What settled it.
    pub reason: Reason,
    /// The score of each candidate (lower is better), `None` for those that were not eligible.
    pub scores: Vec<Option<f64>>,
}

/// Chooses an engine, or `None` when no candidate is eligible.
///
/// ```
/// use forebay_router::EngineModel;
/// use forebay_router::policy::{Candidate, Policy, Request, View, choose};
/// use forebay_steps::{Launch, Profile};
///
/// let engine_model = EngineModel::new(&Profile::shipped(Profile::DEFAULT)?, Launch::Graph);
/// let cold = Candidate {
///     eligible: true,
///     in_flight: 0,
///     pending_prefill_tokens: 0,
///     pending_prefill_us: 0,
///     context_tokens: 0,
///     pool_tokens: 280_000,
///     hit_tokens: 0,
///     stored_tokens: 0,
///     load_us_per_token: 0.0,
/// };
/// let warm = Candidate { in_flight: 2, pending_prefill_tokens: 500, hit_tokens: 9_000, ..cold };
/// let view = View { candidates: &[cold, warm], turn: 0, engine_model: &engine_model };
/// let request = Request { input_tokens: 10_000, output_tokens: 150, home: None };
/// // cold: 0 + 10000; warm: 500 + 1000
/// assert_eq!(choose(Policy::Lpwl, &view, &request).map(|decision| decision.chosen), Some(1));
/// # Ok::<(), forebay_steps::ProfileError>(())
/// ```
pub fn choose(policy: Policy, view: &View, request: &Request) -> Option<Decision> {
    let places = places_from_turn(view);
    let scores = scores(policy, view, request, &places);
    let (lowest_score, reason) = lowest(view, &places, &scores)?;
    let preferred = match policy {
        Policy::SessionSticky => home(request, &scores).map(|home| (home, Reason::Home)),
        Policy::AddedLatency | Policy::Elastic => least_work(view, request, &places)
            .filter(|&engine| engine != lowest_score && is_kept(view, request, &scores, engine, lowest_score))
            .map(|engine| (engine, Reason::LeastWork)),
        _ => None,
    };
    let (chosen, reason) = preferred.unwrap_or((lowest_score, reason));
    Some(Decision { chosen, reason, scores })
}

/// The session's engine, if it may be chosen.
fn home(request: &Request, scores: &[Option<f64>]) -> Option<usize> {
    request.home.filter(|&home| scores.get(home).is_some_and(Option::is_some))
}

/// What `Lpwl` chooses.
fn least_work(view: &View, request: &Request, places: &[u64]) -> Option<usize> {
    lowest(view, places, &scores(Policy::Lpwl, view, request, places)).map(|(engine, _)| engine)
}

/// Whether an engine is not left for the one with the lowest score.
fn is_kept(
    view: &View,
    request: &Request,
    scores: &[Option<f64>],
    engine: usize,
    lowest_score: usize,
) -> bool {
    let has_room = room_us(view.engine_model, &view.candidates[engine], request) == 0.0;
    let (Some(its), Some(lowest)) = (scores[engine], scores[lowest_score]) else { return false };
    has_room && lowest >= CLEARLY_LESS * its
}

fn scores(policy: Policy, view: &View, request: &Request, places: &[u64]) -> Vec<Option<f64>> {
    let candidates = view.candidates.iter().zip(places);
    let score = |(candidate, place): (&Candidate, &u64)| {
        candidate.eligible.then(|| score(policy, view, request, candidate, *place))
    };
    candidates.map(score).collect()
}

fn score(policy: Policy, view: &View, request: &Request, candidate: &Candidate, place: u64) -> f64 {
    let prefill_tokens = || {
        let new_tokens = Prefill::new(view.engine_model, candidate, request.input_tokens).tokens;
        candidate.pending_prefill_tokens.saturating_add(new_tokens) as f64
    };
    match policy {
        Policy::RoundRobin => place as f64,
        Policy::LeastLoaded | Policy::SessionSticky => f64::from(candidate.in_flight),
        Policy::Linear => prefill_tokens() + candidate.context_tokens as f64,
        Policy::Lmetric => prefill_tokens() * (f64::from(candidate.in_flight) + 1.0),
        Policy::Lpwl => prefill_tokens(),
        Policy::AddedLatency | Policy::Elastic => added_latency_s(view.engine_model, candidate, request),
    }
}

/// How many places after the one whose turn it is, among those that are eligible: one that is not
/// leaves its turns to all of them.
fn places_from_turn(view: &View) -> Vec<u64> {
    let count = view.candidates.iter().filter(|candidate| candidate.eligible).count() as u64;
    let mut before = 0;
    let place = |candidate: &Candidate| {
        let place = (before + count - view.turn % count.max(1)) % count.max(1);
        before += u64::from(candidate.eligible);
        place
    };
    view.candidates.iter().map(place).collect()
}

fn lowest(view: &View, places: &[u64], scores: &[Option<f64>]) -> Option<(usize, Reason)> {
    let load = |index: usize| view.candidates[index].in_flight;
    let eligible =
        || scores.iter().enumerate().filter_map(|(index, score)| score.map(|score| (index, score)));
    let (chosen, lowest) = eligible().min_by(|&(a, score_a), &(b, score_b)| {
        let by_turn = || places[a].cmp(&places[b]);
        score_a.total_cmp(&score_b).then_with(|| load(a).cmp(&load(b))).then_with(by_turn)
    })?;
    let rivals = || eligible().filter(|&(index, score)| index != chosen && score == lowest);
    let reason = if rivals().any(|(index, _)| load(index) == load(chosen)) {
        Reason::Turn
    } else if rivals().next().is_some() {
        Reason::FewerInFlight
    } else {
        Reason::LowestScore
    };
    Some((chosen, reason))
}

impl Policy {
    /// The policies that give a request to one engine, in the order of the documentation.
    pub const ALL: [Policy; 7] = [
        Policy::RoundRobin,
        Policy::LeastLoaded,
        Policy::SessionSticky,
        Policy::Linear,
        Policy::Lmetric,
        Policy::Lpwl,
        Policy::AddedLatency,
    ];

    /// The name on the command line, in metrics and in results.
    pub fn name(self) -> &'static str {
        match self {
            Policy::RoundRobin => "round-robin",
            Policy::LeastLoaded => "least-loaded",
            Policy::SessionSticky => "session-sticky",
            Policy::Linear => "linear",
            Policy::Lmetric => "lmetric",
            Policy::Lpwl => "lpwl",
            Policy::AddedLatency => "added-latency",
            Policy::Elastic => "elastic",
        }
    }
}

impl fmt::Display for Policy {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(self.name())
    }
}

/// The text names no policy.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "policy: '{0}' is none of round-robin, least-loaded, session-sticky, linear, lmetric, lpwl, added-latency, \
     elastic"
)]
pub struct UnknownPolicy(String);

impl FromStr for Policy {
    type Err = UnknownPolicy;

    fn from_str(text: &str) -> Result<Policy, UnknownPolicy> {
        Policy::ALL
            .into_iter()
            .chain([Policy::Elastic])
            .find(|policy| policy.name() == text)
            .ok_or_else(|| UnknownPolicy(text.into()))
    }
}

#[cfg(test)]
mod tests;
