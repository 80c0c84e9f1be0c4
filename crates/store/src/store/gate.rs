//! The gate before the disk: how many of the leased chunks are quicker to load than to compute, given how the disk has been
//! read lately. It knows reads under way and how long they took, and asks [`choose`]; it must never know how they are read.
//!
//! What lies in memory is loaded in any case: a copy takes a small part of what computing does.

use super::{Lease, Shared, Store};
use crate::admission::MeasuredRate;
use crate::admission::gate::{Decision, PrefillCost, Prefix, Source, StoredChunk, choose};
use parking_lot::Mutex;
use std::sync::Arc;

/// What a disk is expected to read in a microsecond as long as nothing is known. It is believed no longer than a read or
/// two take, so that what is measured counts at once.
const EXPECTED_BYTES_PER_US: f64 = 1_000.0;
const EXPECTED_WEIGHT_US: u64 = 1_000;
const HALF_LIFE_US: u64 = 10_000_000;

/// A prompt of which a prefix is leased. Times are real ones.
#[derive(Debug, Clone, Copy)]
pub struct Prompt {
    /// All of its tokens.
    pub tokens: usize,
    /// How many chunks, from the first on, the caller has already.
    pub held_chunks: usize,
    /// Tokens of a chunk.
    pub chunk_tokens: u32,
    /// Bytes of a chunk.
    pub chunk_bytes: u64,
    /// What it costs to compute.
    pub prefill: PrefillCost,
    /// How long it takes anyway before anything can be computed.
    pub wait_us: f64,
}

/// Chunks that were leased on disk, by what the gate said.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct GateStat {
    /// To be loaded.
    pub loaded: u64,
    /// To be computed again, because that is quicker.
    pub recomputed: u64,
}

/// How the disk is being read. Its rate is that of all reads together: bytes for the time in which any read was under way.
#[derive(Debug)]
pub(super) struct Reads(Mutex<State>);

#[derive(Debug)]
struct State {
    rate: MeasuredRate,
    under_way: usize,
    queued_bytes: u64,
    /// Since when the time that reads took has not been counted.
    since_us: u64,
    stat: GateStat,
}

/// A read under way. Dropped, it has failed.
#[derive(Debug)]
pub(super) struct Reading {
    shared: Arc<Shared>,
    bytes: u64,
    read_bytes: u64,
}

impl Store {
    /// How many chunks of the lease, from the first on, are to be loaded so that the KV of the prompt is there soonest:
    /// all that are in memory, and those on disk that are quicker to load than to compute. What was decided is counted in
    /// [`DiskSideStat::gate`](super::DiskSideStat::gate).
    pub fn worth_loading(&self, lease: &Lease, prompt: &Prompt) -> usize {
        let held = lease.in_memory().max(prompt.held_chunks);
        let on_disk = lease.len().saturating_sub(held);
        let Some(disk) = self.shared.disk.as_ref().filter(|_| on_disk > 0) else { return lease.len() };
        let chunk = StoredChunk { tokens: prompt.chunk_tokens, bytes: prompt.chunk_bytes, source: 0 };
        let tokens = |chunks: usize| prompt.chunk_tokens.saturating_mul(chunks as u32);
        let new_tokens = prompt.tokens.saturating_sub(tokens(lease.len()) as usize);
        let mut reads = disk.reads.0.lock();
        let prefix = Prefix {
            held_tokens: tokens(held),
            chunks: &vec![chunk; on_disk],
            new_tokens: u32::try_from(new_tokens).unwrap_or(u32::MAX),
            sources: &[reads.source(self.shared.now_us())],
            prefill: prompt.prefill,
            wait_us: prompt.wait_us,
        };
        let loaded = match choose(&prefix).decision {
            Decision::Recompute => 0,
            Decision::Load { chunks } => chunks,
        };
        reads.stat.loaded += loaded as u64;
        reads.stat.recomputed += (on_disk - loaded) as u64;
        held + loaded
    }
}

impl Reads {
    pub fn new() -> Reads {
        let rate = MeasuredRate::new(EXPECTED_BYTES_PER_US, EXPECTED_WEIGHT_US, HALF_LIFE_US);
        let stat = GateStat::default();
        Reads(Mutex::new(State { rate, under_way: 0, queued_bytes: 0, since_us: 0, stat }))
    }

    pub fn stat(&self) -> GateStat {
        self.0.lock().stat
    }
}

impl State {
    fn begun(&mut self, now_us: u64, bytes: u64) {
        if self.under_way == 0 {
            self.since_us = now_us;
        }
        self.under_way += 1;
        self.queued_bytes += bytes;
    }

    fn ended(&mut self, now_us: u64, bytes: u64, read_bytes: u64) {
        self.rate.observe(read_bytes, now_us.saturating_sub(self.since_us), now_us);
        self.since_us = self.since_us.max(now_us);
        self.under_way -= 1;
        self.queued_bytes -= bytes;
    }

    /// The disk as it is now. Reads that have been under way for long count, although nobody knows what they will bring:
    /// a disk that hangs is slow. The rate includes what a read takes before its first byte.
    fn source(&self, now_us: u64) -> Source {
        let mut rate = self.rate;
        if self.under_way > 0 {
            rate.observe(0, now_us.saturating_sub(self.since_us), now_us);
        }
        Source { bytes_per_us: rate.per_us(now_us), latency_us: 0.0, queued_bytes: self.queued_bytes }
    }
}

impl Reading {
    /// A read of so many bytes begins.
    pub fn begin(shared: &Arc<Shared>, bytes: u64) -> Reading {
        let reading = Reading { shared: Arc::clone(shared), bytes, read_bytes: 0 };
        if let Some(disk) = &shared.disk {
            disk.reads.0.lock().begun(shared.now_us(), bytes);
        }
        reading
    }

    /// All of it was read.
    pub fn succeeded(mut self) {
        self.read_bytes = self.bytes;
    }
}

impl Drop for Reading {
    fn drop(&mut self) {
        if let Some(disk) = &self.shared.disk {
            disk.reads.0.lock().ended(self.shared.now_us(), self.bytes, self.read_bytes);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rate(reads: &Reads, now_us: u64) -> f64 {
        reads.0.lock().source(now_us).bytes_per_us
    }

    #[test]
    fn reads_side_by_side_share_the_time_that_they_take() {
        let reads = Reads::new();
        let mut state = reads.0.lock();
        (0..4).for_each(|_| state.begun(0, 100_000_000));
        assert_eq!(state.source(0).queued_bytes, 400_000_000);
        (0..4).for_each(|_| state.ended(1_000_000, 100_000_000, 100_000_000));
        drop(state);
        assert!((rate(&reads, 1_000_000) - 400.0).abs() < 1.0, "not 100: {}", rate(&reads, 1_000_000));
        assert_eq!(reads.0.lock().source(0).queued_bytes, 0);
        // Nothing was read in the minute after.
        reads.0.lock().begun(61_000_000, 1);
        assert!(rate(&reads, 61_000_000) > 400.0);
    }

    #[test]
    fn a_disk_that_hangs_or_fails_is_slow_and_is_tried_again_when_that_is_forgotten() {
        let reads = Reads::new();
        assert_eq!(rate(&reads, 0), EXPECTED_BYTES_PER_US);
        reads.0.lock().begun(0, 1_000_000);
        assert!(rate(&reads, 10_000_000) < 1.0, "it hangs");
        reads.0.lock().ended(10_000_000, 1_000_000, 0);
        assert!(rate(&reads, 10_000_000) < 1.0, "it failed");
        assert!(rate(&reads, 300_000_000) > 900.0, "it is forgotten");
    }
}
