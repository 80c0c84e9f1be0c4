//! What the engine counts. This file is data.

use crate::scheduler::Counters;

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
    /// Tokens of output.
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
    /// Time to the first token.
    pub ttft: Histogram<22>,
    /// Time per output token after the first.
    pub tpot: Histogram<19>,
    /// Time to the last token.
    pub e2e: Histogram<21>,
}

/// Chunks, by what came of them. Each failed load is a miss: its tokens and those behind it are computed.
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

/// Counts of values by upper bound, as Prometheus keeps them.
#[derive(Clone, Debug, PartialEq)]
pub struct Histogram<const BOUNDS: usize> {
    /// Values up to each bound and above the one before it; the last count is of those above all bounds.
    counts: [u64; BOUNDS],
    above: u64,
    sum: f64,
}

impl<const BOUNDS: usize> Default for Histogram<BOUNDS> {
    fn default() -> Self {
        Histogram { counts: [0; BOUNDS], above: 0, sum: 0.0 }
    }
}

impl<const BOUNDS: usize> Histogram<BOUNDS> {
    /// Counts a value under ascending `bounds`.
    pub fn observe(&mut self, bounds: &[f64; BOUNDS], value: f64) {
        self.sum += value;
        match self.counts.get_mut(bounds.partition_point(|bound| *bound < value)) {
            Some(count) => *count += 1,
            None => self.above += 1,
        }
    }

    /// How many values there are up to each bound, all smaller ones included.
    pub fn cumulative(&self) -> [u64; BOUNDS] {
        let mut sum = 0;
        self.counts.map(|count| {
            sum += count;
            sum
        })
    }

    /// How many values there are.
    pub fn count(&self) -> u64 {
        self.counts.iter().sum::<u64>() + self.above
    }

    /// The sum of all values.
    pub fn sum(&self) -> f64 {
        self.sum
    }
}

/// vLLM's buckets of the time to the first token, in seconds.
pub const TTFT_BOUNDS_S: [f64; 22] = [
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0,
    80.0, 160.0, 640.0, 2560.0,
];

/// vLLM's buckets of the time per output token, in seconds.
pub const TPOT_BOUNDS_S: [f64; 19] = [
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
];

/// vLLM's buckets of the time to the last token, in seconds.
pub const E2E_BOUNDS_S: [f64; 21] = [
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0,
    960.0, 1920.0, 7680.0,
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_counts_under_every_bound_that_is_not_below_it() {
        let bounds = [1.0, 2.0, 4.0];
        let mut histogram = Histogram::<3>::default();
        [0.5, 1.0, 3.0, 9.0].iter().for_each(|value| histogram.observe(&bounds, *value));
        assert_eq!(histogram.cumulative(), [2, 2, 3]);
        assert_eq!((histogram.count(), histogram.sum()), (4, 13.5));
    }
}
