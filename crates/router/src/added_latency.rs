//! The latency that a request adds at an engine: its own wait, everybody's wait for it, and the
//! wait for room. The formula and its limits are in `docs/routing.md`.

use crate::engine_model::EngineModel;
use crate::prefill::Prefill;
use crate::view::{Candidate, Request};

/// Seconds that all requests together, this one included, wait longer if it goes to the candidate.
pub fn added_latency_s(engine: &EngineModel, candidate: &Candidate, request: &Request) -> f64 {
    let prefill_us = prefill_latency_us(engine, candidate, request);
    (prefill_us + answer_latency_us(engine, candidate, request)) / 1e6
}

/// What its prefill makes all requests wait: itself, and whoever is in flight there. Nobody else
/// waits for its load: the engine goes on computing.
pub fn prefill_latency_us(engine: &EngineModel, candidate: &Candidate, request: &Request) -> f64 {
    let prefill = Prefill::new(engine, candidate, request.input_tokens);
    let own_us = candidate.pending_prefill_us as f64 + prefill.us();
    own_us + f64::from(candidate.in_flight) * prefill.compute_us
}

/// What its answer makes all requests wait. Each token of an answer waits for whoever decodes in
/// the same step. Those whose prefill is still to come will do so.
pub fn answer_latency_us(engine: &EngineModel, candidate: &Candidate, request: &Request) -> f64 {
    let Candidate { in_flight, context_tokens, .. } = *candidate;
    let answer_us = |decodes_us: f64| request.output_tokens as f64 * decodes_us;
    let beside_others_us = answer_us(engine.steps.decodes_us(u64::from(in_flight), context_tokens));
    let beside_it_us = answer_us(engine.steps.decodes_us(1, request.input_tokens));
    beside_others_us + f64::from(in_flight) * beside_it_us + room_us(engine, candidate, request)
}

/// How long it waits until others have ended and there is room. A full engine gives back all that
/// it holds in the time of an answer, so who is a tenth too much waits a tenth of that.
pub fn room_us(engine: &EngineModel, candidate: &Candidate, request: &Request) -> f64 {
    let held_tokens = candidate.context_tokens;
    let of_pool = (held_tokens as f64 + request.input_tokens as f64) / candidate.pool_tokens as f64;
    let of_seqs = (f64::from(candidate.in_flight) + 1.0) / f64::from(engine.max_seqs);
    let over = of_pool.max(of_seqs) - 1.0;
    // An idle engine has room, unless prompts that it has computed wait to be fetched.
    if over <= 0.0 || (candidate.in_flight == 0 && held_tokens == 0) {
        return 0.0;
    }
    let running = u64::from(candidate.in_flight.min(engine.max_seqs));
    let step_us = engine.steps.decode_step_us(running, held_tokens.min(candidate.pool_tokens));
    over * request.output_tokens as f64 * step_us
}
