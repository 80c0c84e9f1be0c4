//! What the router knows when it decides: the engines as they are now, and the facts of one
//! request. All plain numbers; tokens are estimates.

use crate::engine_model::EngineModel;

/// What the router knows of one engine when it decides.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct Candidate {
    /// May this engine be chosen at all: healthy and not yet tried for this request.
    pub eligible: bool,
    /// Requests sent to it that have not ended, and those that others have sent it.
    pub in_flight: u32,
    /// Prompt tokens that it has yet to compute for requests whose first byte has not arrived.
    pub pending_prefill_tokens: u64,
    /// How long it will load and compute them, by the engine model.
    pub pending_prefill_us: u64,
    /// Prompt tokens of all its requests in flight: the KV that decoding holds.
    pub context_tokens: u64,
    /// Tokens whose KV fits its GPU.
    pub pool_tokens: u64,
    /// How many tokens of this request's prompt it is believed to hold itself.
    pub hit_tokens: u64,
    /// How many, from the first on, its store is believed to hold; 0 without a store.
    pub stored_tokens: u64,
    /// Microseconds that a token takes from the store to the engine.
    pub load_us_per_token: f64,
}

/// The engines as they are now.
#[derive(Debug, Clone, Copy)]
pub struct View<'a> {
    /// One entry per engine, in a fixed order.
    pub candidates: &'a [Candidate],
    /// Decisions made so far: rotates ties and is the turn of round-robin.
    pub turn: u64,
    /// What all of them are taken for.
    pub engine_model: &'a EngineModel,
}

/// What matters of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Request {
    pub input_tokens: u64,
    /// How long its answer is expected to be.
    pub output_tokens: u64,
    /// The engine that served this request's session before.
    pub home: Option<usize>,
}
