//! What the router knows when it decides: the engines as they are now, and the facts of one
//! request. All plain numbers; tokens are estimates.

use crate::engine_model::EngineModel;

/// What the router knows of one engine when it decides.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Candidate {
    /// May this engine be chosen at all: healthy and not yet tried for this request.
    pub eligible: bool,
    /// Requests sent to it that have not ended.
    pub in_flight: u32,
    /// Prompt tokens that it has yet to compute for requests whose first byte has not arrived.
    pub pending_prefill_tokens: u64,
    /// How long it will compute them, by the engine model.
    pub pending_prefill_us: u64,
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
