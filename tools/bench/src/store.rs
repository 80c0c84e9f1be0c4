//! `forebay bench store`: lookups and leases in a memory tier that holds a million chunks. It
//! measures the tier behind the lock that a store has around it; no bytes move.

use crate::output::{CommandResult, Output, finish};
use forebay_kv::{ChunkId, NamespaceKey};
use forebay_results::{Results, Row};
use forebay_store::{Begun, ChunkShape, MemoryTier, SLOT_ALIGN_BYTES, TenantId, TierConfig};
use forebay_transfer::lock::Mutex;
use rand::SeedableRng;
use rand::rngs::StdRng;
use rand::seq::SliceRandom;
use std::hint::black_box;
use std::time::Instant;

/// Chunks of a sequence.
const PREFIX: usize = 100;
const TENANT: TenantId = TenantId(0);
const TTL_US: u64 = 1_000_000;

/// Arguments of `forebay bench store`.
#[derive(clap::Args)]
pub struct Args {
    /// Number of chunks in the tier
    #[arg(long, default_value_t = 1_000_000, value_parser = clap::value_parser!(u32).range(PREFIX as i64..=10_000_000))]
    chunks: u32,
    /// Number of runs; each looks every sequence up once, and its median counts
    #[arg(long, default_value_t = 9, value_parser = clap::value_parser!(u32).range(1..=1000))]
    runs: u32,
    #[command(flatten)]
    output: Output,
}

/// Runs the benchmark.
pub fn run(args: Args) -> CommandResult {
    let mut sequences = sequences(args.chunks as usize / PREFIX);
    let tier = full_tier(&sequences)?;
    let stat = tier.stat();
    let bytes_per_chunk = |bytes: u64| bytes as f64 / stat.chunks as f64;
    let tier = Mutex::new(tier);
    let locked = || tier.lock();

    let (mut lookups, mut lookups_p99, mut leases) = (Vec::new(), Vec::new(), Vec::new());
    let mut random = StdRng::seed_from_u64(1);
    for _ in 0..args.runs {
        // Another order each time, so that a sequence's rows have left the cache when it comes up.
        sequences.shuffle(&mut random);
        let times = times_us(&sequences, |ids| locked().lookup(TENANT, ids));
        lookups.push(times[times.len() / 2]);
        lookups_p99.push(times[times.len() * 99 / 100]);
        let times = times_us(&sequences, |ids| {
            let granted = locked().lease(0, TENANT, ids, TTL_US);
            granted.map_or(0, |(lease, chunks)| {
                locked().release(0, lease);
                chunks
            })
        });
        leases.push(times[times.len() / 2]);
    }

    let mut results = Results::new("store");
    results.rows.push(Row::of_runs("store.lookup_us.100chunks", "us", &lookups));
    results.rows.push(Row::of_runs("store.lookup_us_p99.100chunks", "us", &lookups_p99));
    results.rows.push(Row::of_runs("store.lease_release_us.100chunks", "us", &leases));
    results.rows.push(Row::of_runs("store.index_bytes_per_chunk", "B", &[bytes_per_chunk(stat.index_bytes)]));
    let slot_tables = [bytes_per_chunk(stat.slot_table_bytes)];
    results.rows.push(Row::of_runs("store.slot_table_bytes_per_chunk", "B", &slot_tables));
    finish(&results, &args.output)
}

/// How long `find` takes for each sequence, whose chunks it must all find, shortest first.
fn times_us(sequences: &[Vec<ChunkId>], mut find: impl FnMut(&[ChunkId]) -> usize) -> Vec<f64> {
    let mut ids = Vec::with_capacity(PREFIX);
    let mut time_us = |sequence: &Vec<ChunkId>| {
        // A caller has just derived the ids: they are in its cache, the tier's rows are not.
        ids.clone_from(sequence);
        let begin = Instant::now();
        let found = black_box(find(black_box(&ids)));
        let elapsed = begin.elapsed();
        assert_eq!(found, PREFIX, "every chunk is resident");
        elapsed.as_secs_f64() * 1e6
    };
    let mut times: Vec<f64> = sequences.iter().map(&mut time_us).collect();
    times.sort_by(f64::total_cmp);
    times
}

/// Sequences of chunks that share nothing.
fn sequences(count: usize) -> Vec<Vec<ChunkId>> {
    let namespace = NamespaceKey::from_bytes([1; 32]);
    let sequence = |number: u32| {
        let first = ChunkId::derive(&namespace, None, &[number]);
        let next = |parent: &ChunkId| Some(ChunkId::derive(&namespace, Some(parent), &[number]));
        std::iter::successors(Some(first), next).take(PREFIX).collect()
    };
    (0..count as u32).map(sequence).collect()
}

/// A tier that holds all sequences, in chunks of the smallest slot with one layer.
fn full_tier(sequences: &[Vec<ChunkId>]) -> Result<MemoryTier, Box<dyn std::error::Error + Send + Sync>> {
    let chunks = sequences.len() * PREFIX;
    let slabs = 256;
    let slab_bytes = (chunks as u64).div_ceil(slabs) * SLOT_ALIGN_BYTES;
    let mut config = TierConfig::new(slabs * slab_bytes);
    config.slab_bytes = slab_bytes;
    config.max_chunks = chunks as u32;
    let mut tier = MemoryTier::new(config)?;
    let shape = ChunkShape::new([SLOT_ALIGN_BYTES])?;
    // Round by round, as sessions grow side by side: neighbours in a sequence are not neighbours in
    // memory.
    for place in 0..PREFIX {
        for sequence in sequences {
            let parent = place.checked_sub(1).map(|before| &sequence[before]);
            match tier.begin_write(0, TENANT, &sequence[place], parent, &shape)? {
                Begun::Write(write) => tier.commit(0, write, &[0])?,
                Begun::AlreadyHere => return Err("two chunks have one id".into()),
            }
        }
    }
    Ok(tier)
}
