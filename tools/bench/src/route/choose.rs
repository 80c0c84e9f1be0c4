//! What a decision alone takes: `policy::choose` on views of many engines, without a socket.

use crate::output::Outcome;
use forebay_results::Row;
use forebay_router::policy::{Candidate, Request, View, choose};
use forebay_router::{EngineModel, Policy};
use forebay_steps::{Launch, Profile};
use std::hint::black_box;
use std::time::Instant;

const ENGINES: [u32; 2] = [64, 1_000];
const DECISIONS: u32 = 20_000;

/// A row for each number of engines.
pub fn rows(policy: Policy, runs: u32) -> Outcome<Vec<Row>> {
    let engine_model = EngineModel::new(&Profile::shipped(Profile::DEFAULT)?, Launch::Graph);
    let row = |engines: u32| {
        let candidates: Vec<Candidate> =
            (0..engines).map(|number| candidate(number, &engine_model)).collect();
        let times: Vec<f64> = (0..runs).map(|_| decision_us(policy, &candidates, &engine_model)).collect();
        Row::of_runs(format!("route.choose_us.{engines}"), "us", &times)
    };
    Ok(ENGINES.map(row).into())
}

/// Engines that differ in everything.
fn candidate(number: u32, engine_model: &EngineModel) -> Candidate {
    let varied = |most: u64| u64::from(number).wrapping_mul(2_654_435_761) % most;
    Candidate {
        eligible: true,
        in_flight: varied(32) as u32,
        pending_prefill_tokens: varied(10_000),
        pending_prefill_us: varied(600_000),
        context_tokens: varied(400_000),
        pool_tokens: engine_model.pool_tokens,
        hit_tokens: varied(20_000),
        stored_tokens: varied(30_000),
        load_us_per_token: engine_model.load_us_per_token,
    }
}

fn decision_us(policy: Policy, candidates: &[Candidate], engine_model: &EngineModel) -> f64 {
    let request = Request { input_tokens: 20_000, output_tokens: 150, home: None };
    let began = Instant::now();
    for turn in 0..u64::from(DECISIONS) {
        black_box(choose(policy, &View { candidates, turn, engine_model }, black_box(&request)));
    }
    began.elapsed().as_secs_f64() * 1e6 / f64::from(DECISIONS)
}
