//! Tests of the policies: their formulas, their degenerate cases, and what holds for all views.

use super::*;
use crate::engine_model::EngineModel;
use forebay_steps::{Launch, Profile};
use proptest::prelude::*;

/// Eligible, in flight, pending, context, hit.
type Row = (bool, u32, u64, u64, u64);

/// An engine with round constants: 100 us a token, 10 ns a pair and a token read, 50 us a request,
/// steps of 10 ms, 100,000 tokens of KV, 16 requests at once.
fn profile() -> Profile {
    let mut profile = Profile::shipped(Profile::DEFAULT).unwrap();
    profile.step.linear_us_per_token = 100.0;
    profile.step.attention_ns_per_pair = 10.0;
    profile.step.kv_read_ns_per_context_token = 10.0;
    profile.step.us_per_request = 50.0;
    profile.step.floor_graph_us = 10_000.0;
    profile.memory.pool_tokens = 100_000;
    profile.scheduler.max_seqs = 16;
    profile
}

fn engine_model() -> EngineModel {
    EngineModel::new(&profile(), Launch::Graph)
}

fn candidate(row: Row) -> Candidate {
    let (eligible, in_flight, pending_prefill_tokens, context_tokens, hit_tokens) = row;
    Candidate {
        eligible,
        in_flight,
        pending_prefill_tokens,
        pending_prefill_us: pending_prefill_tokens.saturating_mul(100),
        context_tokens,
        pool_tokens: 100_000,
        hit_tokens,
        stored_tokens: 0,
        load_us_per_token: 1.0,
    }
}

fn request(input_tokens: u64) -> Request {
    Request { input_tokens, output_tokens: 100, home: None }
}

fn decide(policy: Policy, rows: &[Row], turn: u64, home: Option<usize>) -> Option<Decision> {
    let candidates: Vec<Candidate> = rows.iter().copied().map(candidate).collect();
    let view = View { candidates: &candidates, turn, engine_model: &engine_model() };
    choose(policy, &view, &Request { home, ..request(10_000) })
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
fn added_latency_is_the_own_wait_everybodys_wait_and_the_wait_for_room() {
    // For a prompt of 10,000 tokens and an answer of 100: a decode of it adds 250.005 us to a step.
    let view = [
        // 1.0 s of weights and 0.5 s of attention.
        (true, 0, 0, 0, 0),
        // 0.1 s pending, 0.38 s of its own, 100 steps that three others make 630.015 us longer; and
        // each of the three waits for the 0.38 s and for 100 longer steps.
        (true, 3, 1_000, 24_000, 8_000),
        // 0.4 s pending, 199.995 us of its own, 100 steps that nine others make 2,350.045 us
        // longer, nine that wait; one token in twenty has no room for as long as 100 of those steps
        // take.
        (true, 9, 4_000, 95_000, 10_000),
    ];
    let by_hand = [
        1.5,
        0.1 + 0.38 + 0.0630015 + 3.0 * (0.38 + 0.0250005),
        0.4 + 0.000199995 + 0.2350045 + 9.0 * (0.000199995 + 0.0250005) + 0.05 * (1.0 + 0.2350045),
    ];
    let decision = decide(Policy::AddedLatency, &view, 0, None).unwrap();
    for (score, by_hand) in decision.scores.iter().zip(by_hand) {
        assert!((score.unwrap() - by_hand).abs() < 1e-9, "{score:?} {by_hand}");
    }
    // The second has the least pending work and room, and the third adds more than half as much.
    assert_eq!((decision.chosen, decision.reason), (1, Reason::LeastWork));
}

/// An engine that holds nothing of a prompt itself, and whose store holds so much of it.
fn beside_a_store(stored_tokens: u64, load_us_per_token: f64) -> Candidate {
    Candidate { stored_tokens, load_us_per_token, ..candidate((true, 0, 0, 0, 0)) }
}

fn scores(policy: Policy, candidates: &[Candidate]) -> Vec<f64> {
    let view = View { candidates, turn: 0, engine_model: &engine_model() };
    choose(policy, &view, &request(10_000)).unwrap().scores.into_iter().flatten().collect()
}

#[test]
fn what_a_store_holds_is_loaded_where_that_is_quicker_than_computing() {
    // 8,000 tokens take 8 ms to load; the 2,000 behind them 0.38 s to compute, and all 10,000 1.5
    // s.
    let (quick, slow) = (beside_a_store(8_000, 1.0), beside_a_store(8_000, 200.0));
    let added = scores(Policy::AddedLatency, &[quick, slow]);
    assert!((added[0] - 0.388).abs() < 1e-9 && (added[1] - 1.5).abs() < 1e-9, "{added:?}");
    // In tokens a load is worth those that could be computed meanwhile: 8 ms are 80 of 100 us.
    assert_eq!(scores(Policy::Lpwl, &[quick, slow]), [2_080.0, 10_000.0]);
    // Who decodes there waits for what is computed, not for what is loaded.
    let busy = Candidate { in_flight: 2, ..quick };
    let alone = Candidate { in_flight: 2, ..beside_a_store(8_000, 0.0) };
    let added = scores(Policy::AddedLatency, &[busy, alone]);
    assert!((added[0] - added[1] - 0.008).abs() < 1e-9, "{added:?}");
}

#[test]
fn what_the_engine_itself_holds_is_never_loaded() {
    let stored = |stored_tokens| Candidate { hit_tokens: 8_000, ..beside_a_store(stored_tokens, 1.0) };
    for policy in Policy::ALL {
        let scores = scores(policy, &[stored(0), stored(8_000)]);
        let turn = if policy == Policy::RoundRobin { 1.0 } else { 0.0 };
        assert_eq!(scores[1] - scores[0], turn, "{policy}");
    }
}

#[test]
fn with_a_store_a_session_leaves_an_owner_where_it_would_queue() {
    // The owner has 0.2 s of prefill pending; an idle engine loads 9,000 tokens in 9 ms.
    let owner = Candidate { hit_tokens: 9_000, ..candidate((true, 1, 2_000, 10_000, 0)) };
    for policy in [Policy::Lpwl, Policy::AddedLatency] {
        let chosen = |other: Candidate| {
            let view = View { candidates: &[owner, other], turn: 0, engine_model: &engine_model() };
            choose(policy, &view, &request(10_000)).unwrap().chosen
        };
        let (without, with) = (chosen(beside_a_store(0, 1.0)), chosen(beside_a_store(9_000, 1.0)));
        assert_eq!((without, with), (0, 1), "{policy}");
    }
}

#[test]
fn an_engine_without_room_is_left_although_it_holds_the_prompt() {
    let owner = |context_tokens| (true, 2, 0, context_tokens, 9_500);
    let other = (true, 0, 0, 0, 6_500);
    let chosen = |context| decide(Policy::AddedLatency, &[owner(context), other], 0, None).unwrap().chosen;
    // At 100,000 tokens the other is 0.08 s dearer but for the wait for room, which is 0.12 s.
    // Without that wait, it would have to be less than half as dear.
    assert_eq!((chosen(80_000), chosen(100_000)), (0, 1));
}

#[test]
fn an_engine_with_room_is_left_only_for_one_that_adds_less_than_half_of_the_latency() {
    // The owner has next to nothing to compute, and the more are in flight there the dearer it is.
    // The other is idle and computes 1,000 tokens, in 0.195 s.
    let rules: Vec<(usize, Reason)> = (0..16)
        .map(|in_flight| {
            let view = [(true, in_flight, 0, 1_000, 9_990), (true, 0, 0, 0, 9_000)];
            let decision = decide(Policy::AddedLatency, &view, 0, None).unwrap();
            let part = decision.scores[1].unwrap() / decision.scores[0].unwrap();
            let expected = match part {
                1.0.. => (0, Reason::LowestScore),
                0.5.. => (0, Reason::LeastWork),
                _ => (1, Reason::LowestScore),
            };
            assert_eq!((decision.chosen, decision.reason), expected, "{in_flight} in flight: {part}");
            expected
        })
        .collect();
    assert_eq!((rules[0], rules[15]), ((0, Reason::LowestScore), (1, Reason::LowestScore)));
    assert!(rules.contains(&(0, Reason::LeastWork)));
}

#[test]
fn all_places_taken_counts_as_no_room() {
    let decision =
        decide(Policy::AddedLatency, &[(true, 31, 0, 0, 0), (true, 15, 0, 0, 0)], 0, None).unwrap();
    // 16 others more that wait, and that make its steps longer; and who is twice as many as can run
    // waits 100 steps of 10.80008 ms.
    let gap = 16.0 * (1.5 + 0.0250005) + 0.080008 + 1.080008;
    assert!((decision.scores[0].unwrap() - decision.scores[1].unwrap() - gap).abs() < 1e-9, "{decision:?}");
}

/// Where 120 identical prompts of 7,500 tokens go, all before any of them is answered. The first
/// engine has the prompt; whoever gets one is believed to have it from then on.
fn burst(policy: Policy) -> Vec<u32> {
    let engine_model = EngineModel::new(&Profile::shipped(Profile::DEFAULT).unwrap(), Launch::Graph);
    let mut candidates = vec![candidate((true, 0, 0, 0, 0)); 4];
    candidates[0].hit_tokens = 7_500;
    let request = Request { output_tokens: 150, ..request(7_500) };
    let mut most_beside_idle = 0;
    for turn in 0..120 {
        let view = View { candidates: &candidates, turn, engine_model: &engine_model };
        let index = choose(policy, &view, &request).unwrap().chosen;
        let chosen = &mut candidates[index];
        chosen.pending_prefill_tokens += (request.input_tokens - chosen.hit_tokens).max(1);
        chosen.pending_prefill_us += engine_model.prefill_us(7_500, chosen.hit_tokens) as u64;
        chosen.in_flight += 1;
        chosen.context_tokens += request.input_tokens;
        chosen.hit_tokens = request.input_tokens;
        if candidates.iter().any(|candidate| candidate.in_flight == 0) {
            most_beside_idle = candidates.iter().map(|candidate| candidate.in_flight).max().unwrap();
        }
    }
    let mut in_flight: Vec<u32> = candidates.iter().map(|candidate| candidate.in_flight).collect();
    in_flight.push(most_beside_idle);
    in_flight
}

#[test]
fn a_burst_of_one_prompt_does_not_queue_at_its_owner_while_others_idle() {
    let in_flight = burst(Policy::AddedLatency);
    let (engines, most_beside_idle) = (&in_flight[..4], in_flight[4]);
    assert!(most_beside_idle <= 16, "an engine of 16 places queues while others idle: {in_flight:?}");
    assert!(engines.iter().all(|count| (20..=45).contains(count)), "{in_flight:?}");
    // Pending work alone does not see the crowd.
    assert_eq!(burst(Policy::Lpwl)[..4], [120, 0, 0, 0]);
}

#[test]
fn turns_are_shared_evenly_by_those_that_are_eligible() {
    let rows = [(true, 9, 0, 0, 0), (false, 0, 0, 0, 0), (false, 0, 0, 0, 0), (true, 0, 0, 0, 0)];
    let chosen: Vec<usize> =
        (0..6).map(|turn| decide(Policy::RoundRobin, &rows, turn, None).unwrap().chosen).collect();
    assert_eq!(chosen, [0, 3, 0, 3, 0, 3]);
}

#[test]
fn an_idle_owner_of_the_prefix_beats_an_idle_cold_engine() {
    // LMetric as published multiplies by a batch size of 0 here and cannot tell the two apart.
    let rows = [(true, 0, 0, 0, 0), (true, 0, 0, 0, 8_000)];
    for policy in [Policy::Linear, Policy::Lmetric, Policy::Lpwl, Policy::AddedLatency] {
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
    assert!(error.contains("'fastest'") && Policy::ALL.iter().all(|policy| error.contains(policy.name())));
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
        let view = View { candidates: &candidates, turn, engine_model: &engine_model() };
        let decision = choose(policy, &view, &Request { home, ..request(input_tokens) });
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
            let view = View { candidates: &candidates, turn, engine_model: &engine_model() };
            served[choose(policy, &view, &request(100)).unwrap().chosen] += 1;
        }
        prop_assert!(served.iter().all(|&times| times == 3), "{:?}", served);
    }

    #[test]
    fn the_chosen_score_is_the_lowest_or_with_the_least_work_at_most_twice_that(
        candidates in prop::collection::vec(any_candidate(), 1..12),
        policy in prop::sample::select(Policy::ALL.to_vec()),
        turn: u64,
    ) {
        let view = View { candidates: &candidates, turn, engine_model: &engine_model() };
        if let Some(decision) = choose(policy, &view, &request(5_000)) {
            let lowest = decision.scores.iter().flatten().copied().fold(f64::INFINITY, f64::min);
            let chosen = decision.scores[decision.chosen].unwrap();
            prop_assert!(chosen == lowest || decision.reason == Reason::LeastWork && chosen <= 2.0 * lowest);
            let least_work = choose(Policy::Lpwl, &view, &request(5_000)).unwrap().chosen;
            prop_assert!(decision.reason != Reason::LeastWork || decision.chosen == least_work);
        }
    }

    #[test]
    fn with_nothing_in_flight_added_latency_chooses_as_lpwl(
        hits in prop::collection::vec((any::<bool>(), 0..250_000_u64), 1..12),
        turn: u64,
        input_tokens in 1..200_000_u64,
    ) {
        let row = |&(eligible, hit_tokens): &(bool, u64)| candidate((eligible, 0, 0, 0, hit_tokens));
        let candidates: Vec<Candidate> = hits.iter().map(row).collect();
        let view = View { candidates: &candidates, turn, engine_model: &engine_model() };
        let chosen = |policy| choose(policy, &view, &request(input_tokens)).map(|decision| decision.chosen);
        prop_assert_eq!(chosen(Policy::AddedLatency), chosen(Policy::Lpwl));
    }

    #[test]
    fn a_slower_gpu_of_the_same_kind_changes_no_choice(
        rows in prop::collection::vec((0..40_u32, 0..60_000_u64, 0..400_000_u64, 0..20_000_u64), 1..12),
        slower in 2..50_u32,
        turn: u64,
    ) {
        let mut slow = profile();
        for constant in [
            &mut slow.step.linear_us_per_token,
            &mut slow.step.attention_ns_per_pair,
            &mut slow.step.kv_read_ns_per_context_token,
            &mut slow.step.us_per_request,
            &mut slow.step.floor_graph_us,
        ] {
            *constant *= f64::from(slower);
        }
        let slow = EngineModel::new(&slow, Launch::Graph);
        let row = |(load, pending, context, hit)| candidate((true, load, pending, context, hit));
        let mut candidates: Vec<Candidate> = rows.into_iter().map(row).collect();
        let view = View { candidates: &candidates, turn, engine_model: &engine_model() };
        let fast = choose(Policy::AddedLatency, &view, &request(20_000)).unwrap();
        candidates.iter_mut().for_each(|candidate| candidate.pending_prefill_us *= u64::from(slower));
        let view = View { candidates: &candidates, turn, engine_model: &slow };
        let slowed = choose(Policy::AddedLatency, &view, &request(20_000)).unwrap();
        // Nearly equal scores, and scores of which one is nearly half of the other, may be rounded
        // the other way.
        let part = fast.scores[slowed.chosen].unwrap() / fast.scores[fast.chosen].unwrap();
        let is_close = [0.5, 1.0, 2.0].iter().any(|limit| (part / limit - 1.0).abs() < 1e-6);
        prop_assert!(fast.chosen == slowed.chosen || is_close, "{:?} {:?}", fast, slowed);
    }

    #[test]
    fn more_of_anything_but_hits_never_makes_an_engine_cheaper(
        (in_flight, pending, context, hit) in (0..40_u32, 0..60_000_u64, 0..400_000_u64, 0..20_000_u64),
        (more, grown) in (0..3_usize, 1..50_u32),
    ) {
        let row = (true, in_flight, pending, context, hit);
        let longer = match more {
            0 => (true, in_flight + grown, pending, context, hit),
            1 => (true, in_flight, pending + u64::from(grown), context, hit),
            _ => (true, in_flight, pending, context + u64::from(grown), hit),
        };
        let scores = decide(Policy::AddedLatency, &[row, longer], 0, None).unwrap().scores;
        prop_assert!(scores[1] >= scores[0], "{:?}", scores);
        let held = decide(Policy::AddedLatency, &[row, (true, in_flight, pending, context, hit + 1)], 0, None);
        let scores = held.unwrap().scores;
        prop_assert!(scores[1] <= scores[0], "{:?}", scores);
    }
}
