//! What the engine counts.

use crate::scheduler::Counters;
use prometheus_client::metrics::histogram::Histogram;

/// A snapshot of an engine. Times are model seconds.
#[derive(Clone, Debug, Default)]
pub struct Stats {
    /// Requests with a share in every step.
    pub running: usize,
    /// Requests in the queue, loading ones included.
    pub waiting: usize,
    /// KV blocks in use by requests and stores.
    pub blocks_used: usize,
    /// KV blocks in all.
    pub blocks_total: usize,
    /// KV blocks that an I/O may still touch and nobody gets again.
    pub blocks_lost: usize,
    /// What the scheduler counts: cache hits by source, preemptions.
    pub scheduler: Counters,
    /// Prompt tokens of requests that produced their first token.
    pub prompt_tokens: u64,
    pub output_tokens: u64,
    /// Requests with all their output.
    pub finished: u64,
    /// Requests whose client went away.
    pub aborted: u64,
    /// Requests that were accepted and could not be served.
    pub failed: u64,
    /// Steps computed.
    pub steps: u64,
    /// Model time of all steps.
    pub busy_s: f64,
    /// Model time by which steps took longer to emulate than they should have taken.
    pub lag_s: f64,
    /// Batches of KV events that were not published, because the publisher could not keep up.
    pub dropped_event_batches: u64,
    /// What came of chunks that were loaded and stored.
    pub store: StoreStats,
    /// How long requests took.
    pub times: Times,
}

/// Chunks, by what came of them. Each failed load is a miss: its tokens and those behind it are
/// computed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StoreStats {
    /// Loaded and every byte right.
    pub loaded_chunks: u64,
    /// Of these, chunks that the store had on disk.
    pub disk_chunks: u64,
    /// Of these, chunks that the store fetched from peers.
    pub peer_chunks: u64,
    /// Not in memory, and quicker to load than to compute.
    pub gate_loaded_chunks: u64,
    /// Not in memory, and computed again because that was quicker.
    pub gate_recomputed_chunks: u64,
    /// Loaded with wrong bytes, and caught.
    pub corrupt_chunks: u64,
    /// Lost with the node that had found them.
    pub node_gone_chunks: u64,
    /// Under a lease that ended before they were in use.
    pub dead_lease_chunks: u64,
    /// Gone between the lookup and their use.
    pub missing_chunks: u64,
    /// Not moved: the transfer failed or was refused.
    pub unmoved_chunks: u64,
    /// Good, but behind one that was not, so of no use.
    pub unused_chunks: u64,
    /// Whole chunks of prompts that were computed while there was no node to ask for them.
    pub unasked_chunks: u64,
    /// Stored by this engine.
    pub stored_chunks: u64,
    /// Offered to the store, which refused them or failed to copy them.
    pub refused_chunks: u64,
}

/// Model seconds of requests, in vLLM's buckets.
#[derive(Clone, Debug)]
pub struct Times {
    /// To the first token.
    pub ttft: Histogram,
    /// For each output token after the first.
    pub tpot: Histogram,
    /// To the last token.
    pub e2e: Histogram,
}

impl Default for Times {
    fn default() -> Times {
        Times {
            ttft: Histogram::new(TTFT_BOUNDS_S),
            tpot: Histogram::new(TPOT_BOUNDS_S),
            e2e: Histogram::new(E2E_BOUNDS_S),
        }
    }
}

/// vLLM's buckets of the time to the first token, in seconds.
const TTFT_BOUNDS_S: [f64; 22] = [
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0,
    80.0, 160.0, 640.0, 2560.0,
];

/// vLLM's buckets of the time per output token, in seconds.
const TPOT_BOUNDS_S: [f64; 19] = [
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
];

/// vLLM's buckets of the time to the last token, in seconds.
const E2E_BOUNDS_S: [f64; 21] = [
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0,
    960.0, 1920.0, 7680.0,
];
