//! What the scheduler asks for and is told: steps, loads and stores. This file is data only.

use super::blocks::BlockId;
use super::handed::HandedBlocks;
use super::request::{Request, RequestId};
use forebay_kv::ChunkId;

/// What to do next. Loads are started and not waited for; shares are computed in order and then
/// reported with
/// [`Scheduler::complete`](super::Scheduler::complete).
#[derive(Debug, Default)]
pub struct Step {
    /// What each request computes, in order: a later share may use blocks that an earlier one
    /// fills.
    pub shares: Vec<Share>,
    /// Chunks to fetch from the store.
    pub loads: Vec<Load>,
    /// Blocks to be filled from other engines.
    pub reads: Vec<HandedBlocks>,
    /// Requests that gave their blocks back.
    pub preempted: Vec<RequestId>,
    /// Requests that can never run because too few blocks are left. They are gone.
    pub failed: Vec<RequestId>,
}

/// A request's part of a step: the KV of `tokens` tokens from position `start` on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Share {
    pub request: RequestId,
    /// Tokens whose KV exists already.
    pub start: usize,
    /// Tokens to compute; at least 1.
    pub tokens: usize,
    /// Whether the last of them is the end of the context, so that a token follows.
    pub samples: bool,
}

/// Chunks to fetch for a request. It ends with
/// [`Scheduler::load_ended`](super::Scheduler::load_ended).
#[derive(Debug)]
pub struct Load {
    /// For whom.
    pub request: RequestId,
    /// Tokens whose KV it needs, stored or not.
    pub tokens: usize,
    /// Ids from the start of the sequence to the last chunk wanted.
    pub ids: Vec<ChunkId>,
    /// The first chunk wanted.
    pub first_chunk: usize,
    /// Where the wanted chunks go: the blocks of the first, then of the second, and so on.
    pub blocks: Vec<BlockId>,
}

/// A chunk to copy to the store. Its blocks are held until
/// [`Scheduler::store_ended`](super::Scheduler::store_ended).
#[derive(Debug)]
pub struct ChunkStore {
    pub id: ChunkId,
    /// The one before it.
    pub parent: Option<ChunkId>,
    /// Its blocks, in order.
    pub blocks: Vec<BlockId>,
}

/// What followed from a step.
#[derive(Debug, Default)]
pub struct Completed {
    /// Requests with all their output. Their blocks are free already.
    pub finished: Vec<(RequestId, Request)>,
    /// Chunks that became complete.
    pub stores: Vec<ChunkStore>,
}
