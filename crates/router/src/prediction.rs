//! How long a request will take at an engine, by what the router knows when it decides. It knows
//! one candidate's numbers and what steps cost. `docs/routing.md` has the formulas.

use crate::engine_model::EngineModel;
use crate::prefill::Prefill;
use crate::view::{Candidate, Request};
use serde::{Deserialize, Serialize};

/// Times that the step model predicts.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Prediction {
    /// From the decision to the first byte of the answer.
    pub first_byte_us: u64,
    /// From there to its end.
    pub output_us: u64,
}

/// The request's times at the candidate.
pub fn predict(engine: &EngineModel, candidate: &Candidate, request: &Request) -> Prediction {
    let steps = &engine.steps;
    let Candidate { in_flight, context_tokens, pending_prefill_us, .. } = *candidate;
    let api_us = steps.api_us(usize::try_from(request.input_tokens).unwrap_or(usize::MAX));
    let prefill_us = Prefill::new(engine, candidate, request.input_tokens).us();
    // What does not fit waits, and makes no step longer.
    let decode_us = |requests: u64, tokens: u64| {
        steps.decode_step_us(requests.min(u64::from(engine.max_seqs)), tokens.min(candidate.pool_tokens))
    };
    // The last of its prompt is computed in a step with everybody's decodes.
    let last_us = decode_us(u64::from(in_flight), context_tokens);
    let beside_it = u64::from(in_flight) + 1;
    let step_us = decode_us(beside_it, context_tokens.saturating_add(request.input_tokens));
    Prediction {
        first_byte_us: (api_us + pending_prefill_us as f64 + prefill_us + last_us).round() as u64,
        output_us: (request.output_tokens as f64 * step_us).round() as u64,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use forebay_steps::{Launch, Profile};

    #[test]
    fn an_idle_engine_takes_the_prompt_and_then_a_step_for_each_token() {
        let engine = EngineModel::new(&Profile::shipped("h100-llama-3.1-8b").unwrap(), Launch::Graph);
        let idle: Candidate = serde_json::from_value(serde_json::json!({
            "eligible": true, "in_flight": 0, "pending_prefill_tokens": 0, "pending_prefill_us": 0,
            "context_tokens": 0, "pool_tokens": 200_000, "hit_tokens": 0, "stored_tokens": 0,
            "load_us_per_token": 0.0,
        }))
        .unwrap();
        let request = Request { input_tokens: 8_000, output_tokens: 100, home: None };
        let alone = predict(&engine, &idle, &request);
        // By hand: 5 ms and 2.8 ms of the API, 172.8 ms linear, 29.9 ms attention, a floor of 6.8.
        assert!(alone.first_byte_us.abs_diff(217_300) < 200, "{alone:?}");
        // A floor of 6.82 ms and 8,000 tokens of context at 50.1 ns, and 16 us, 100 times.
        assert!(alone.output_us.abs_diff(724_000) < 2_000, "{alone:?}");
        let busy = Candidate { in_flight: 10, pending_prefill_us: 1_000_000, context_tokens: 80_000, ..idle };
        let beside = predict(&engine, &busy, &request);
        assert!(beside.first_byte_us > alone.first_byte_us + 1_000_000);
        assert!(beside.output_us > alone.output_us);
        let warm = predict(&engine, &Candidate { hit_tokens: 8_000, ..idle }, &request);
        assert!(warm.first_byte_us < 15_000, "{warm:?}");
    }
}
