//! The routing policies: which of several engines gets a request. It knows a view of the engines
//! and the facts of one request, both as plain numbers, and returns a decision with its scores.
//! Formulas, units, sources and degenerate cases are in `docs/routing.md`.

use std::fmt;
use std::str::FromStr;

/// How an engine is chosen. Every policy is an argmin over a score; ties go to fewer requests in
/// flight, then in turn.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
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
}

/// What the router knows of one engine when it decides. Tokens are estimates.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
pub struct Candidate {
    /// May this engine be chosen at all: healthy and not yet tried for this request.
    #[serde(skip)]
    pub eligible: bool,
    /// Requests sent to it that have not ended.
    pub in_flight: u32,
    /// Prompt tokens that it has yet to compute for requests whose first byte has not arrived.
    pub pending_prefill_tokens: u64,
    /// Prompt tokens of all its requests in flight: the KV that decoding holds.
    pub context_tokens: u64,
    /// How many tokens of this request's prompt it is believed to hold.
    pub hit_tokens: u64,
}

/// The engines as they are now.
#[derive(Debug, Clone, Copy)]
pub struct View<'a> {
    /// One entry per engine, in a fixed order.
    pub candidates: &'a [Candidate],
    /// Decisions made so far: rotates ties and is the turn of round-robin.
    pub turn: u64,
}

/// What matters of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Request {
    pub input_tokens: u64,
    /// The engine that served this request's session before.
    pub home: Option<usize>,
}

/// Which rule settled a decision.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
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
}

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
/// use forebay_router::policy::{Candidate, Policy, Request, View, choose};
///
/// let cold = Candidate { eligible: true, in_flight: 0, pending_prefill_tokens: 0, context_tokens: 0, hit_tokens: 0 };
/// let warm = Candidate { in_flight: 2, pending_prefill_tokens: 500, hit_tokens: 9_000, ..cold };
/// let view = View { candidates: &[cold, warm], turn: 0 };
/// let request = Request { input_tokens: 10_000, home: None };
/// // cold: 0 + 10000; warm: 500 + 1000
/// assert_eq!(choose(Policy::Lpwl, &view, &request).map(|decision| decision.chosen), Some(1));
/// ```
pub fn choose(policy: Policy, view: &View, request: &Request) -> Option<Decision> {
    let scores: Vec<Option<f64>> = view
        .candidates
        .iter()
        .enumerate()
        .map(|(index, candidate)| candidate.eligible.then(|| score(policy, view, request, index)))
        .collect();
    let (chosen, reason) = lowest(view, &scores)?;
    if policy == Policy::SessionSticky
        && let Some(home) = request.home
        && scores.get(home).is_some_and(Option::is_some)
    {
        return Some(Decision { chosen: home, reason: Reason::Home, scores });
    }
    Some(Decision { chosen, reason, scores })
}

fn score(policy: Policy, view: &View, request: &Request, index: usize) -> f64 {
    let candidate = &view.candidates[index];
    // An engine computes at least the last prompt token, however much it holds.
    let new_tokens = request.input_tokens.saturating_sub(candidate.hit_tokens).max(1);
    let prefill_tokens = candidate.pending_prefill_tokens.saturating_add(new_tokens) as f64;
    match policy {
        Policy::RoundRobin => places_from_turn(view, index) as f64,
        Policy::LeastLoaded | Policy::SessionSticky => f64::from(candidate.in_flight),
        Policy::Linear => prefill_tokens + candidate.context_tokens as f64,
        Policy::Lmetric => prefill_tokens * (f64::from(candidate.in_flight) + 1.0),
        Policy::Lpwl => prefill_tokens,
    }
}

/// How many places after the one whose turn it is.
fn places_from_turn(view: &View, index: usize) -> u64 {
    let count = view.candidates.len() as u64;
    (index as u64 + count - view.turn % count) % count
}

fn lowest(view: &View, scores: &[Option<f64>]) -> Option<(usize, Reason)> {
    let load = |index: usize| view.candidates[index].in_flight;
    let eligible =
        || scores.iter().enumerate().filter_map(|(index, score)| score.map(|score| (index, score)));
    let (chosen, lowest) = eligible().min_by(|&(a, score_a), &(b, score_b)| {
        let by_turn = || places_from_turn(view, a).cmp(&places_from_turn(view, b));
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
    /// All policies, in the order of the documentation.
    pub const ALL: [Policy; 6] = [
        Policy::RoundRobin,
        Policy::LeastLoaded,
        Policy::SessionSticky,
        Policy::Linear,
        Policy::Lmetric,
        Policy::Lpwl,
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
#[error("policy: '{0}' is none of round-robin, least-loaded, session-sticky, linear, lmetric, lpwl")]
pub struct UnknownPolicy(String);

impl FromStr for Policy {
    type Err = UnknownPolicy;

    fn from_str(text: &str) -> Result<Policy, UnknownPolicy> {
        Policy::ALL.into_iter().find(|policy| policy.name() == text).ok_or_else(|| UnknownPolicy(text.into()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Eligible, in flight, pending, context, hit.
    type Row = (bool, u32, u64, u64, u64);

    fn candidate(row: Row) -> Candidate {
        let (eligible, in_flight, pending_prefill_tokens, context_tokens, hit_tokens) = row;
        Candidate { eligible, in_flight, pending_prefill_tokens, context_tokens, hit_tokens }
    }

    fn decide(policy: Policy, rows: &[Row], turn: u64, home: Option<usize>) -> Option<Decision> {
        let candidates: Vec<Candidate> = rows.iter().copied().map(candidate).collect();
        choose(policy, &View { candidates: &candidates, turn }, &Request { input_tokens: 10_000, home })
    }

    #[test]
    fn each_policy_follows_its_formula() {
        // One view, worked by hand for a prompt of 10,000 tokens. New tokens: 10000, 2000, 1 (all
        // is there).
        let view = [(true, 0, 0, 0, 0), (true, 3, 1_000, 24_000, 8_000), (true, 9, 4_000, 90_000, 10_000)];
        let table: [(Policy, [f64; 3], usize); 5] = [
            (Policy::LeastLoaded, [0.0, 3.0, 9.0], 0),
            (Policy::SessionSticky, [0.0, 3.0, 9.0], 0),
            (Policy::Linear, [10_000.0, 27_000.0, 94_001.0], 0),
            (Policy::Lmetric, [10_000.0, 12_000.0, 40_010.0], 0),
            (Policy::Lpwl, [10_000.0, 3_000.0, 4_001.0], 1),
        ];
        for (policy, scores, chosen) in table {
            let decision = decide(policy, &view, 0, None).unwrap();
            assert_eq!(decision.scores, scores.map(Some), "{policy}");
            assert_eq!(decision.chosen, chosen, "{policy}");
            assert_eq!(decision.reason, Reason::LowestScore, "{policy}");
        }
    }

    #[test]
    fn round_robin_takes_turns_and_passes_over_the_ineligible() {
        let rows = [(true, 9, 0, 0, 0), (false, 0, 0, 0, 0), (true, 0, 0, 0, 0)];
        let chosen: Vec<usize> =
            (0..6).map(|turn| decide(Policy::RoundRobin, &rows, turn, None).unwrap().chosen).collect();
        assert_eq!(chosen, [0, 2, 2, 0, 2, 2]);
    }

    #[test]
    fn an_idle_owner_of_the_prefix_beats_an_idle_cold_engine() {
        // LMetric as published multiplies by a batch size of 0 here and cannot tell the two apart.
        let rows = [(true, 0, 0, 0, 0), (true, 0, 0, 0, 8_000)];
        for policy in [Policy::Linear, Policy::Lmetric, Policy::Lpwl] {
            assert_eq!(decide(policy, &rows, 0, None).unwrap().chosen, 1, "{policy}");
        }
    }

    #[test]
    fn a_fully_cached_but_crowded_engine_is_not_free() {
        // As published P = 0 makes the crowd invisible; with the last token counted two full owners
        // differ.
        let rows = [(true, 40, 0, 0, 10_000), (true, 2, 0, 0, 10_000)];
        let decision = decide(Policy::Lmetric, &rows, 0, None).unwrap();
        assert_eq!((decision.chosen, decision.scores), (1, vec![Some(41.0), Some(3.0)]));
    }

    #[test]
    fn ties_go_to_fewer_in_flight_and_then_in_turn() {
        let rows = [(true, 2, 0, 0, 0), (true, 1, 0, 0, 0), (true, 1, 0, 0, 0)];
        let decisions: Vec<(usize, Reason)> = (0..3)
            .map(|turn| decide(Policy::Lpwl, &rows, turn, None).unwrap())
            .map(|decision| (decision.chosen, decision.reason))
            .collect();
        assert_eq!(decisions, [(1, Reason::Turn), (1, Reason::Turn), (2, Reason::Turn)]);
        let rows = [(true, 2, 0, 0, 0), (true, 1, 0, 0, 0)];
        let decision = decide(Policy::Lpwl, &rows, 0, None).unwrap();
        assert_eq!((decision.chosen, decision.reason), (1, Reason::FewerInFlight));
    }

    #[test]
    fn a_session_stays_home_until_home_is_not_eligible() {
        let rows = [(true, 0, 0, 0, 0), (true, 50, 9_000, 0, 0)];
        let decision = decide(Policy::SessionSticky, &rows, 0, Some(1)).unwrap();
        assert_eq!((decision.chosen, decision.reason), (1, Reason::Home));
        let rows = [(true, 0, 0, 0, 0), (false, 50, 9_000, 0, 0)];
        assert_eq!(decide(Policy::SessionSticky, &rows, 0, Some(1)).unwrap().chosen, 0);
        assert_eq!(decide(Policy::SessionSticky, &rows, 0, Some(7)).unwrap().chosen, 0);
    }

    #[test]
    fn names_round_trip_and_unknown_names_are_refused_with_the_choices() {
        for policy in Policy::ALL {
            assert_eq!(policy.name().parse(), Ok(policy));
        }
        let error = "fastest".parse::<Policy>().unwrap_err().to_string();
        assert!(
            error.contains("'fastest'") && Policy::ALL.iter().all(|policy| error.contains(policy.name()))
        );
    }

    #[test]
    fn no_candidates_is_no_decision() {
        assert_eq!(decide(Policy::RoundRobin, &[], 3, None), None);
    }

    fn any_candidate() -> impl Strategy<Value = Candidate> {
        (any::<bool>(), 0..50_u32, any::<u64>(), any::<u64>(), any::<u64>()).prop_map(candidate)
    }

    proptest! {
        #[test]
        fn an_ineligible_candidate_is_never_chosen_and_an_eligible_one_always_found(
            candidates in prop::collection::vec(any_candidate(), 0..12),
            policy in prop::sample::select(Policy::ALL.to_vec()),
            turn: u64,
            input_tokens: u64,
            home in prop::option::of(0..14_usize),
        ) {
            let view = View { candidates: &candidates, turn };
            let decision = choose(policy, &view, &Request { input_tokens, home });
            prop_assert_eq!(decision.is_some(), candidates.iter().any(|candidate| candidate.eligible));
            if let Some(decision) = decision {
                prop_assert!(candidates[decision.chosen].eligible);
                prop_assert_eq!(decision.scores.len(), candidates.len());
            }
        }

        #[test]
        fn equal_candidates_are_served_in_turn(
            count in 1..12_usize,
            policy in prop::sample::select(Policy::ALL.to_vec()),
            first in 0..u64::MAX / 2,
        ) {
            let candidates = vec![candidate((true, 0, 0, 0, 0)); count];
            let mut served = vec![0; count];
            for turn in first..first + 3 * count as u64 {
                let view = View { candidates: &candidates, turn };
                let request = Request { input_tokens: 100, home: None };
                served[choose(policy, &view, &request).unwrap().chosen] += 1;
            }
            prop_assert!(served.iter().all(|&times| times == 3), "{:?}", served);
        }

        #[test]
        fn the_chosen_score_is_the_lowest(
            candidates in prop::collection::vec(any_candidate(), 1..12),
            policy in prop::sample::select(Policy::ALL.to_vec()),
            turn: u64,
        ) {
            let view = View { candidates: &candidates, turn };
            if let Some(decision) = choose(policy, &view, &Request { input_tokens: 5_000, home: None }) {
                let lowest = decision.scores.iter().flatten().copied().fold(f64::INFINITY, f64::min);
                prop_assert_eq!(decision.scores[decision.chosen], Some(lowest));
            }
        }
    }
}
