//! The limits of a scheduler, why it refuses, and what it counts. This file is data only.

use forebay_kv::NamespaceKey;
use thiserror::Error;

/// The limits of a scheduler.
#[derive(Clone, Debug)]
pub struct SchedulerConfig {
    /// Enters every name of a block or chunk.
    pub namespace: NamespaceKey,
    pub pool_blocks: u32,
    pub block_tokens: usize,
    /// Tokens computed in one step at most; vLLM's `max_num_batched_tokens`. At least 1.
    pub max_batched_tokens: usize,
    /// Requests running at most; vLLM's `max_num_seqs`. At least 1.
    pub max_seqs: usize,
    /// Requests in the queue at most.
    pub max_queued: usize,
    /// Prompt and output of a request together at most.
    pub max_model_tokens: usize,
    /// What a chunk of the store holds, a multiple of `block_tokens`; `None` without a store.
    pub chunk_tokens: Option<usize>,
    /// Blocks that stores hold at most. Beyond that, chunks wait until their request's next step;
    /// those of a finished request are not stored.
    pub max_store_blocks: usize,
}

/// Why a request was not accepted.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum Refused {
    /// There is nothing to answer to.
    #[error("the prompt is empty; at least one token is needed")]
    EmptyPrompt,
    /// No output was wanted.
    #[error("max_tokens is 0; at least 1 is needed")]
    NoOutput,
    /// Longer than the model or the pool allows.
    #[error(
        "the context may be at most {limit_tokens} tokens, but the prompt has {prompt_tokens} and max_tokens is \
         {max_tokens}"
    )]
    TooLong {
        prompt_tokens: usize,
        /// Output wanted.
        max_tokens: usize,
        limit_tokens: usize,
    },
    #[error("{limit} requests are queued, which is the limit")]
    QueueFull { limit: usize },
}

/// Sums since the start, as vLLM's metrics count them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Tokens looked up in the prefix cache.
    pub gpu_queries_tokens: u64,
    pub gpu_hits_tokens: u64,
    /// Tokens looked up in the store: those not in the prefix cache.
    pub store_queries_tokens: u64,
    /// Tokens that came from the store.
    pub store_hits_tokens: u64,
    /// Of these, tokens that the store had on disk.
    pub disk_hits_tokens: u64,
    /// Of the tokens from the store, those that it had to fetch from peers.
    pub peer_hits_tokens: u64,
    /// Requests that gave their blocks back to be recomputed.
    pub preemptions: u64,
    /// Complete chunks of finished requests that the store was not given, because stores held too
    /// many blocks.
    pub unstored_chunks: u64,
}
