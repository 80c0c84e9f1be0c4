//! Whole runs of a simulated cluster.

#![allow(clippy::unwrap_used)]

use forebay_router::policy::Policy;
use forebay_simulate::arm::{Arm, TransferKinds};
use forebay_simulate::cluster::{Answer, Outcome};
use forebay_simulate::report::Figures;
use forebay_simulate::router::ViewErrors;
use forebay_simulate::scenario::Scenario;
use forebay_simulate::sessions::{Pacing, WarmUp};
use forebay_simulate::workload::Workload;
use forebay_steps::{Launch, Profile, StepModel, StepShare};
use forebay_trace::generate::{Generator, Marginals};
use forebay_trace::request::TraceRequest;
use std::convert::Infallible;

const GIB: u64 = 1 << 30;

fn scenario() -> Scenario {
    let profile = Profile::shipped("h20-qwen3-coder-30b-a3b").unwrap();
    Scenario {
        router_profile: profile.clone(),
        profile,
        launch: Launch::Graph,
        engines: 4,
        pacing: Pacing::Closed { at_once: 24, warm_up: WarmUp::FirstTurns },
        tier_bytes: 16 * GIB,
        shared_tier: false,
        network_gb_per_s: 25.0,
        errors: ViewErrors::default(),
        knows_hits: false,
        most_answers: usize::MAX,
    }
}

fn workload(scenario: &Scenario, sessions: u32) -> Workload {
    let marginals = Marginals { sessions, ..Marginals::LONG_CONTEXT.parse().unwrap() };
    let requests = Generator::new(&marginals, 3).unwrap().map(Ok::<_, Infallible>);
    Workload::new(requests, scenario.most_tokens()).unwrap()
}

/// Prompts of one session, each of which continues the one before it.
fn session(lengths: &[u32], output_tokens: u32) -> Workload {
    let request = |(turn, &input_tokens): (usize, &u32)| {
        let blocks = (0..u64::from(input_tokens / 64)).collect();
        let base = TraceRequest { session: "a".into(), turn: turn as u32, ..TraceRequest::default() };
        Ok::<_, Infallible>(TraceRequest { input_tokens, output_tokens, block_tokens: 64, blocks, ..base })
    };
    Workload::new(lengths.iter().enumerate().map(request), 250_000).unwrap()
}

/// All answers to one session on one engine.
fn answers_alone(scenario: Scenario, workload: &Workload) -> Vec<Answer> {
    let pacing = Pacing::Closed { at_once: 1, warm_up: WarmUp::Ramp { over_us: 0, share: 0.0 } };
    let alone = Scenario { engines: 1, pacing, ..scenario };
    alone.run(Arm::Policy(Policy::Lpwl), workload, 1).unwrap().answers
}

fn all_arms() -> Vec<Arm> {
    let policies = Policy::ALL.map(Arm::Policy);
    policies.into_iter().chain([Arm::Elastic(TransferKinds::Both), Arm::Threshold, Arm::Migrate(3)]).collect()
}

#[test]
fn every_request_is_answered_once_and_the_same_run_is_the_same() {
    let delayed = ViewErrors { delay_us: 700_000, hits: 0.3 };
    for errors in [ViewErrors::default(), delayed] {
        let scenario = Scenario { errors, ..scenario() };
        let workload = workload(&scenario, 60);
        for arm in all_arms() {
            let Outcome { answers, .. } = scenario.run(arm, &workload, 5).unwrap();
            assert_eq!(answers.len(), workload.turns() - 24, "{arm}");
            assert!(
                answers.iter().all(|it| it.asked_us < it.first_token_us && it.first_token_us <= it.end_us)
            );
            assert_eq!(scenario.run(arm, &workload, 5).unwrap().answers, answers, "{arm}");
        }
    }
}

#[test]
fn arms_that_move_kv_move_some() {
    let scenario = scenario();
    let workload = workload(&scenario, 60);
    let moved = |arm| {
        let outcome = scenario.run(arm, &workload, 5).unwrap();
        (outcome.pulls > 0, outcome.hand_overs > 0)
    };
    assert_eq!(moved(Arm::Policy(Policy::AddedLatency)), (false, false));
    assert_eq!(moved(Arm::Elastic(TransferKinds::Both)), (true, true));
    assert_eq!(moved(Arm::Elastic(TransferKinds::Pulls)), (true, false));
    assert_eq!(moved(Arm::Elastic(TransferKinds::HandOvers)), (false, true));
    assert_eq!(moved(Arm::Threshold), (false, true));
    assert_eq!(moved(Arm::Migrate(3)), (true, false));
}

#[test]
fn a_request_alone_takes_the_time_of_the_step_model() {
    let scenario = scenario();
    let steps = StepModel::new(&scenario.profile, scenario.launch);
    let answer = answers_alone(scenario, &session(&[8_000], 3))[0];
    let share = |context_tokens, new_tokens| StepShare { context_tokens, new_tokens };
    let prefill_us = steps.api_us(8_000) + steps.step_us([share(0, 8_000)]);
    let ttft_us = (answer.first_token_us - answer.asked_us) as f64;
    assert!((ttft_us - prefill_us).abs() <= 2.0, "{ttft_us} {prefill_us}");
    let decodes_us = steps.step_us([share(8_000, 1)]) + steps.step_us([share(8_001, 1)]);
    let answer_us = (answer.end_us - answer.first_token_us) as f64;
    assert!((answer_us - decodes_us).abs() <= 2.0, "{answer_us} {decodes_us}");
}

#[test]
fn a_turn_computes_only_what_follows_the_answer_before_it() {
    let answers = answers_alone(scenario(), &session(&[8_000, 9_000], 100));
    // Of 8,099 tokens with KV, 506 blocks of 16 are whole.
    assert_eq!((answers[1].found.gpu_tokens, answers[1].found.loaded_tokens), (8_096, 0));
}

#[test]
fn a_cached_prompt_still_computes_a_block() {
    let prompt = |(name, arrival_us): (&str, u64)| {
        let base = TraceRequest { session: name.into(), arrival_us, ..TraceRequest::default() };
        let blocks = (0..100).collect();
        let request =
            TraceRequest { input_tokens: 6_400, output_tokens: 2, block_tokens: 64, blocks, ..base };
        Ok::<_, Infallible>(request)
    };
    let workload = Workload::new([("a", 0), ("b", 60_000_000)].map(prompt), 10_000).unwrap();
    let open = Scenario { engines: 1, pacing: Pacing::Open, ..scenario() };
    let answers = open.run(Arm::Policy(Policy::Lpwl), &workload, 1).unwrap().answers;
    assert_eq!([answers[0], answers[1]].map(|it| it.found.gpu_tokens), [0, 6_384]);
}

#[test]
fn what_the_gpu_has_lost_is_loaded_from_host_memory() {
    let mut scenario = scenario();
    scenario.profile.memory.pool_tokens = 32_000;
    let mut requests = Vec::new();
    for (turn, session) in ["a", "b", "a"].into_iter().enumerate() {
        let first = if session == "a" { 0 } else { 1_000 };
        let blocks = (first..first + 300 + 10 * turn as u64).collect::<Vec<u64>>();
        let input_tokens = 64 * blocks.len() as u32;
        let base = TraceRequest { session: session.into(), turn: turn as u32, ..TraceRequest::default() };
        let arrival_us = 60_000_000 * turn as u64;
        let request =
            TraceRequest { input_tokens, output_tokens: 2, block_tokens: 64, blocks, arrival_us, ..base };
        requests.push(Ok::<_, Infallible>(request));
    }
    let workload = Workload::new(requests, 30_000).unwrap();
    let run = |tier_bytes| {
        let open = Scenario { engines: 1, pacing: Pacing::Open, tier_bytes, ..scenario.clone() };
        open.run(Arm::Policy(Policy::Lpwl), &workload, 1).unwrap().answers[2]
    };
    let (with, without) = (run(16 * GIB), run(0));
    // Both sessions are 39,000 tokens, of which 32,000 fit.
    assert_eq!(with.found.gpu_tokens + with.found.loaded_tokens, 19_200);
    assert!(with.found.loaded_tokens > 6_000 && without.found.loaded_tokens == 0, "{with:?}");
    let ttft_us = |answer: Answer| answer.first_token_us - answer.asked_us;
    assert!(ttft_us(with) < ttft_us(without) / 2);
}

#[test]
fn a_router_that_is_wrong_about_hits_makes_requests_wait_longer() {
    let pacing = Pacing::Closed { at_once: 12, warm_up: WarmUp::FirstTurns };
    let scenario = Scenario { pacing, ..scenario() };
    let workload = workload(&scenario, 200);
    let ttft_mean_s = |scenario: &Scenario| {
        Figures::of(&scenario.run(Arm::Policy(Policy::Lpwl), &workload, 5).unwrap()).ttft_mean_s
    };
    let wrong = Scenario { errors: ViewErrors { delay_us: 0, hits: 1.0 }, ..scenario.clone() };
    let (wrong_s, right_s) = (ttft_mean_s(&wrong), ttft_mean_s(&scenario));
    assert!(wrong_s > 1.1 * right_s, "{wrong_s} {right_s}");
}

#[test]
fn what_cannot_be_simulated_is_refused_by_name() {
    let refused = |change: fn(&mut Scenario)| {
        let mut scenario = scenario();
        change(&mut scenario);
        scenario.check().unwrap_err().to_string()
    };
    assert_eq!(refused(|it| it.engines = 0), "--engines: 0, allowed 1 to 100000");
    assert_eq!(refused(|it| it.errors.hits = 1.5), "--hit-error: 1.5, allowed 0 to 1");
    assert!(refused(|it| it.network_gb_per_s = f64::NAN).starts_with("--network: NaN"));
    assert!(
        refused(|it| it.profile.scheduler.max_batched_tokens = 512)
            .starts_with("--max-num-batched-tokens: 512")
    );
    assert!(refused(|it| it.profile.memory.pool_tokens = 31).starts_with("--pool-tokens: 31, allowed 32"));
    assert!(refused(|it| it.most_answers = 0).starts_with("--answers: 0"));
    let ramp = |share| Pacing::Closed { at_once: 1, warm_up: WarmUp::Ramp { over_us: 0, share } };
    for share in [f64::NAN, -0.1, 1.1] {
        let refused = Scenario { pacing: ramp(share), ..scenario() }.check().unwrap_err();
        assert_eq!(refused.field, "--warm-up");
    }
    assert!(scenario().check().is_ok());
}

#[test]
fn requests_as_long_as_a_pool_of_any_size_are_answered() {
    for pool_tokens in [32, 47, 50_010] {
        let mut scenario = Scenario { pacing: Pacing::Open, ..scenario() };
        scenario.profile.memory.pool_tokens = pool_tokens;
        scenario.check().unwrap();
        let workload = workload(&scenario, 4);
        for arm in all_arms() {
            let outcome = scenario.run(arm, &workload, 1).unwrap();
            assert_eq!(outcome.answers.len(), workload.turns(), "{arm} {pool_tokens}");
        }
    }
}
