//! A replay finds the log's own choices, and says what others would have cost.

use super::*;
use crate::decision_log::VERSION;
use crate::decisions::CandidateRecord;
use crate::policy::{Reason, choose};
use crate::prediction::Prediction;
use crate::slo::Slo;
use forebay_steps::{Launch, Profile};
use proptest::prelude::*;

fn engine_model() -> EngineModel {
    EngineModel::new(&Profile::shipped("h100-llama-3.1-8b").unwrap(), Launch::Graph)
}

fn candidate(in_flight: u32, pending_prefill_us: u64, hit_tokens: u64) -> Candidate {
    Candidate {
        eligible: true,
        in_flight,
        pending_prefill_tokens: pending_prefill_us / 20,
        pending_prefill_us,
        context_tokens: u64::from(in_flight) * 10_000,
        pool_tokens: 200_000,
        hit_tokens,
        stored_tokens: 0,
        load_us_per_token: 0.0,
    }
}

/// The line of a decision by a policy, of a prompt of 10,000 tokens.
fn line(policy: Policy, candidates: &[Candidate]) -> DecisionLine {
    let (engine_model, number) = (engine_model(), 7);
    let view = View { candidates, turn: number, engine_model: &engine_model };
    let request = Request { input_tokens: 10_000, output_tokens: 150, home: None };
    let decision = choose(policy, &view, &request).unwrap();
    let records = candidates.iter().zip(&decision.scores).enumerate();
    let records = records.map(|(index, (&known, &score))| CandidateRecord {
        backend: format!("e{index}"),
        score,
        known,
    });
    let record = DecisionRecord {
        number,
        at_us: 0,
        session: "0".into(),
        input_tokens: 10_000,
        output_tokens: 150,
        home: None,
        policy,
        attempt: 1,
        backend: format!("e{}", decision.chosen),
        reason: Reason::LowestScore,
        predicted: Prediction { first_byte_us: 300_000, output_us: 1_000_000 },
        candidates: records.collect(),
        options: Vec::new(),
        hand_over: None,
        slo: Slo::default(),
        outcome: Some(Outcome { status: Some(200), first_byte_us: Some(250_000), ..Outcome::default() }),
    };
    DecisionLine { version: VERSION, record, total_us: 1_450_000 }
}

/// The owner of a popular prompt, with a queue, and an idle engine without it.
fn popular() -> [Candidate; 2] {
    [candidate(60, 0, 10_000), candidate(0, 0, 0)]
}

#[test]
fn a_policy_that_decided_a_log_decides_it_again_without_a_difference() {
    for policy in Policy::ALL {
        let mut replay = Replay::new(&Policy::ALL);
        replay.add(&engine_model(), &line(policy, &popular())).unwrap();
        let same = replay.replayed().find(|replayed| replayed.policy == Some(policy)).unwrap();
        assert_eq!(same.different, 0, "{policy}");
        let logged = replay.replayed().next().unwrap();
        assert_eq!((logged.policy, logged.different), (None, 0));
        assert_eq!(logged.cost_s, same.cost_s, "{policy}");
    }
}

#[test]
fn other_policies_keep_to_the_slo_of_a_logged_request_too() {
    let mut replay = Replay::new(&[Policy::Lpwl, Policy::AddedLatency]);
    // The idle engine would have to compute all of it, which takes it longer than 0.2 s.
    let mut line = line(Policy::Lpwl, &[candidate(10, 0, 10_000), candidate(0, 0, 0)]);
    line.record.slo = Slo { ttft_us: Some(200_000), tpot_us: None };
    replay.add(&engine_model(), &line).unwrap();
    let different: Vec<u64> = replay.replayed().map(|replayed| replayed.different).collect();
    assert_eq!(different, [0, 0, 0], "added-latency alone would choose the idle one");
}

#[test]
fn what_another_choice_would_have_cost_and_saved_is_told() {
    let mut replay = Replay::new(&[Policy::AddedLatency]);
    // lpwl queues at the owner, though sixty others wait for each of its tokens.
    replay.add(&engine_model(), &line(Policy::Lpwl, &popular())).unwrap();
    let [logged, other] = replay.replayed().collect::<Vec<_>>()[..] else { panic!("two") };
    assert_eq!((logged.different, other.different), (0, 1));
    assert_eq!(other.regret_s.sum(), 0.0);
    let saved_s = logged.cost_s.sum() - other.cost_s.sum();
    assert!(saved_s > 0.0 && (logged.regret_s.sum() - saved_s).abs() < 1e-9, "{saved_s}");
    // The owner would have answered sooner.
    assert!(logged.first_byte_s.mean() < other.first_byte_s.mean());
}

#[test]
fn a_choice_is_judged_beside_the_cheapest_of_the_others() {
    let dear = line(Policy::Lpwl, &popular()).record;
    let cheap = line(Policy::AddedLatency, &popular()).record;
    let [dear, cheap] = [dear, cheap].map(|record| judge(&engine_model(), &record).unwrap());
    assert_eq!((dear.best_other_s, cheap.best_other_s), (Some(cheap.cost_s), Some(dear.cost_s)));
    assert_eq!((dear.regret_s, cheap.regret_s), (dear.cost_s - cheap.cost_s, 0.0));
    let alone = line(Policy::Lpwl, &popular()[..1]).record;
    assert_eq!(judge(&engine_model(), &alone).unwrap().best_other_s, None);
}

#[test]
fn predictions_are_compared_with_what_came_of_whole_answers_only() {
    let mut replay = Replay::new(&[]);
    let mut line = line(Policy::Lpwl, &popular());
    replay.add(&engine_model(), &line).unwrap();
    line.record.outcome = Some(Outcome { cancelled: true, ..line.record.outcome.unwrap() });
    replay.add(&engine_model(), &line).unwrap();
    line.record.outcome = None;
    replay.add(&engine_model(), &line).unwrap();
    let accuracy = replay.accuracy();
    assert_eq!((accuracy.first_byte_s.count(), accuracy.output_s.count()), (1, 1));
    assert!((accuracy.first_byte_s.mean() - 0.05).abs() < 1e-9);
    assert!((accuracy.output_s.mean() + 0.2).abs() < 1e-9);
}

#[test]
fn a_line_that_cannot_be_decided_again_is_refused_with_the_reason() {
    let mut replay = Replay::new(&[Policy::Lpwl]);
    let mut nobody = line(Policy::Lpwl, &popular());
    nobody.record.candidates.iter_mut().for_each(|candidate| candidate.known.eligible = false);
    assert_eq!(replay.add(&engine_model(), &nobody), Err(ReplayError::NoCandidate));
    let mut unknown = line(Policy::Lpwl, &popular());
    unknown.record.backend = "e9".into();
    assert_eq!(replay.add(&engine_model(), &unknown), Err(ReplayError::Chosen("e9".into())));
    assert_eq!(replay.replayed().next().unwrap().cost_s.count(), 0);
}

#[test]
fn quantiles_are_of_what_was_added() {
    let figures = Figures((0..100).rev().map(f64::from).collect());
    assert_eq!((figures.quantile(0.5), figures.quantile(0.99), figures.mean()), (49.0, 98.0, 49.5));
    assert_eq!((Figures::default().quantile(0.9), Figures::default().mean()), (0.0, 0.0));
}

proptest! {
    #[test]
    fn nobody_regrets_less_than_nothing_and_numbers_of_any_size_do_not_panic(
        numbers in prop::collection::vec((any::<bool>(), any::<u32>(), any::<u64>(), any::<u64>()), 1..8),
        (input_tokens, output_tokens, number) in any::<(u64, u64, u64)>(),
    ) {
        let candidates: Vec<Candidate> = numbers
            .iter()
            .map(|&(eligible, in_flight, large, hit)| Candidate {
                eligible,
                in_flight,
                pending_prefill_tokens: large,
                pending_prefill_us: large,
                context_tokens: large,
                pool_tokens: large,
                hit_tokens: hit,
                stored_tokens: large,
                load_us_per_token: f64::from(in_flight),
            })
            .collect();
        prop_assume!(candidates.iter().any(|candidate| candidate.eligible));
        let mut line = line(Policy::LeastLoaded, &popular());
        line.record.candidates = candidates
            .into_iter()
            .map(|known| CandidateRecord { backend: "e0".into(), score: None, known })
            .collect();
        line.record.backend = "e0".into();
        (line.record.input_tokens, line.record.output_tokens, line.record.number) =
            (input_tokens, output_tokens, number);
        let mut replay = Replay::new(&Policy::ALL);
        replay.add(&engine_model(), &line).unwrap();
        for replayed in replay.replayed() {
            prop_assert!(replayed.regret_s.sum() >= 0.0);
        }
    }
}
