//! What the prefill of a prompt takes at an engine: what is computed, and what is loaded from the
//! engine's store. It knows one candidate's numbers and what steps cost.

use crate::engine_model::EngineModel;
use crate::view::Candidate;

/// The quicker of two ways: to compute all that the engine itself lacks, or to load of it what its
/// store holds and compute the rest.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Prefill {
    /// Tokens computed, and what is loaded as the number of tokens that could be computed
    /// meanwhile.
    pub tokens: u64,
    /// Microseconds of steps.
    pub compute_us: f64,
    /// Microseconds of loading, during which the engine computes for others.
    pub load_us: f64,
}

impl Prefill {
    pub fn new(engine: &EngineModel, candidate: &Candidate, input_tokens: u64) -> Prefill {
        let Candidate { hit_tokens, stored_tokens, load_us_per_token, .. } = *candidate;
        let computed = Prefill {
            tokens: new_tokens(input_tokens, hit_tokens),
            compute_us: engine.prefill_us(input_tokens, hit_tokens),
            load_us: 0.0,
        };
        let loaded_tokens = stored_tokens.min(input_tokens).saturating_sub(hit_tokens);
        if loaded_tokens == 0 {
            return computed;
        }
        let load_us = loaded_tokens as f64 * load_us_per_token;
        let worth_tokens = load_us / engine.steps.prefill_us(1, 0).max(f64::MIN_POSITIVE);
        let tokens = new_tokens(input_tokens, stored_tokens).saturating_add(worth_tokens.round() as u64);
        let loaded = Prefill {
            tokens: tokens.min(computed.tokens),
            compute_us: engine.prefill_us(input_tokens, stored_tokens),
            load_us,
        };
        if loaded.us() < computed.us() { loaded } else { computed }
    }

    /// Microseconds until it is done, at an engine that has nothing else to do.
    pub fn us(&self) -> f64 {
        self.compute_us + self.load_us
    }
}

/// An engine computes at least the last prompt token, however much it holds.
fn new_tokens(input_tokens: u64, held_tokens: u64) -> u64 {
    input_tokens.saturating_sub(held_tokens).max(1)
}
