//! What caches would have made of a trace: one without limit, which gives the new tokens of each
//! request and bounds every other, and some of given sizes, which drop the least recently used
//! block.

use crate::format::TraceError;
use crate::prefix::{KeyMap, KeySet, prefix_keys};
use crate::quantile::ValueSummary;
use crate::request::TraceRequest;
use crate::reuse::{Reuse, ReuseCounter};
use forebay_store::admission::{Chunk, ChunkKey, Lru};
use serde::Serialize;
use std::collections::hash_map::Entry;

/// The most requests that are surveyed.
pub const MAX_REQUESTS: usize = 1 << 25;
/// The most distinct blocks that are surveyed, at some 20 bytes each.
pub const MAX_DISTINCT_BLOCKS: usize = 1 << 26;

/// Why a trace has no figures.
#[derive(Debug, thiserror::Error)]
pub enum InfoError {
    /// It could not be read.
    #[error(transparent)]
    Trace(#[from] TraceError),
    /// It has no request that could be read.
    #[error("no requests: {skipped_lines} bad lines and nothing else")]
    Empty {
        /// How many lines were bad.
        skipped_lines: u64,
    },
    /// It is larger than memory is meant to hold.
    #[error("more than {limit} {what}: sample the trace first")]
    TooLarge {
        /// What there is too much of.
        what: &'static str,
        limit: usize,
    },
}

/// Below this many new tokens a request is warm.
const WARM_BELOW: u64 = 5_000;
/// Below this many new tokens a request that is not warm is medium; from here on it is heavy.
const HEAVY_FROM: u64 = 20_000;

/// What is known about prefixes. Shares are of 1.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct PrefixInfo {
    /// Tokens per block; of the last request, should they differ.
    pub block_tokens: u32,
    /// Different prefixes, counted in blocks.
    pub distinct_blocks: usize,
    /// The share of the distinct blocks that were asked for more than once.
    pub reused_blocks: f64,
    /// Different first blocks.
    pub distinct_first_blocks: usize,
    /// The share of all blocks that a cache without limit would have held: no cache can do better.
    pub max_hit_blocks: f64,
    /// The same as a share of all prompt tokens.
    pub max_hit_tokens: f64,
    /// The share of requests of which such a cache would have held anything.
    pub requests_with_hit: f64,
    /// Reuse by anyone and within a session; the first is `max_hit_blocks`, estimated for large
    /// traces.
    pub reuse: Reuse,
    /// Prompt tokens that such a cache would not have held, per request.
    pub new_tokens: ValueSummary,
    /// The share of requests with less than 5,000 new tokens.
    pub warm: f64,
    /// The share with 5,000 to 20,000.
    pub medium: f64,
    /// The share with 20,000 and more.
    pub heavy: f64,
    /// Caches of given sizes.
    pub caches: Vec<CacheInfo>,
}

/// What one shared cache of a given size would have held, dropping the least recently used blocks.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct CacheInfo {
    pub capacity_tokens: u64,
    /// The share of all blocks.
    pub hit_blocks: f64,
    /// The share of all prompt tokens.
    pub hit_tokens: f64,
}

pub(super) struct Caches {
    block_tokens: u32,
    /// Every prefix that was asked for, and whether more than once.
    known: KeyMap<bool>,
    first_blocks: KeySet,
    unlimited: Hits,
    reuse: ReuseCounter,
    requests: u64,
    requests_with_hit: u64,
    new_tokens: Vec<f32>,
    warm: u64,
    medium: u64,
    limited: Vec<(PrefixCache, Hits)>,
    keys: Vec<u64>,
}

#[derive(Default)]
struct Hits {
    blocks: u64,
    all_blocks: u64,
    tokens: u64,
    all_tokens: u64,
}

impl Hits {
    /// Counts a request of which `held` blocks at the start were held; the tokens held.
    fn add(&mut self, request: &TraceRequest, held: usize) -> u64 {
        let input = u64::from(request.input_tokens);
        let tokens = (held as u64 * u64::from(request.block_tokens)).min(input);
        self.blocks += held as u64;
        self.all_blocks += request.blocks.len() as u64;
        self.tokens += tokens;
        self.all_tokens += input;
        tokens
    }

    fn share_of_blocks(&self) -> f64 {
        self.blocks as f64 / self.all_blocks.max(1) as f64
    }

    fn share_of_tokens(&self) -> f64 {
        self.tokens as f64 / self.all_tokens.max(1) as f64
    }
}

impl Caches {
    pub(super) fn new(cache_tokens: &[u64]) -> Caches {
        Caches {
            block_tokens: 0,
            known: KeyMap::default(),
            first_blocks: KeySet::default(),
            unlimited: Hits::default(),
            reuse: ReuseCounter::default(),
            requests: 0,
            requests_with_hit: 0,
            new_tokens: Vec::new(),
            warm: 0,
            medium: 0,
            limited: cache_tokens
                .iter()
                .map(|&capacity| (PrefixCache::new(capacity), Hits::default()))
                .collect(),
            keys: Vec::new(),
        }
    }

    /// Serves the next request from all caches; gives the tokens that a cache without limit lacks.
    pub(super) fn add(&mut self, request: &TraceRequest) -> Result<u64, InfoError> {
        let mut keys = std::mem::take(&mut self.keys);
        keys.clear();
        keys.extend(prefix_keys(request));
        let held = self.hold(&keys);
        let new_tokens = u64::from(request.input_tokens) - self.unlimited.add(request, held);
        self.requests += 1;
        self.requests_with_hit += u64::from(held > 0);
        self.new_tokens.push(new_tokens as f32);
        self.warm += u64::from(new_tokens < WARM_BELOW);
        self.medium += u64::from((WARM_BELOW..HEAVY_FROM).contains(&new_tokens));
        self.reuse.add(request);
        for (cache, hits) in &mut self.limited {
            hits.add(request, cache.serve(&keys, request.block_tokens));
        }
        self.block_tokens = request.block_tokens.max(self.block_tokens);
        self.first_blocks.extend(keys.first());
        self.keys = keys;
        if self.known.len() > MAX_DISTINCT_BLOCKS {
            return Err(InfoError::TooLarge { what: "distinct blocks", limit: MAX_DISTINCT_BLOCKS });
        }
        Ok(new_tokens)
    }

    /// Remembers the blocks of a prompt; how many were known. These are its first ones, for a key
    /// stands for all blocks before it, too.
    fn hold(&mut self, keys: &[u64]) -> usize {
        let mut known = 0;
        for &key in keys {
            match self.known.entry(key) {
                Entry::Occupied(mut asked_again) => {
                    asked_again.insert(true);
                    known += 1;
                }
                Entry::Vacant(first) => drop(first.insert(false)),
            }
        }
        known
    }

    /// What came of it, or `None` when no request had blocks.
    pub(super) fn finish(self) -> Option<PrefixInfo> {
        let share = |count: u64| count as f64 / self.requests as f64;
        let reused = self.known.values().filter(|&&again| again).count();
        Some(PrefixInfo {
            block_tokens: self.block_tokens,
            distinct_blocks: self.known.len(),
            reused_blocks: reused as f64 / self.known.len() as f64,
            distinct_first_blocks: self.first_blocks.len(),
            max_hit_blocks: self.unlimited.share_of_blocks(),
            max_hit_tokens: self.unlimited.share_of_tokens(),
            requests_with_hit: share(self.requests_with_hit),
            reuse: self.reuse.reuse()?,
            new_tokens: ValueSummary::of(self.new_tokens)?,
            warm: share(self.warm),
            medium: share(self.medium),
            heavy: share(self.requests - self.warm - self.medium),
            caches: self.limited.iter().map(CacheInfo::of).collect(),
        })
    }
}

impl CacheInfo {
    fn of((cache, hits): &(PrefixCache, Hits)) -> CacheInfo {
        let (hit_blocks, hit_tokens) = (hits.share_of_blocks(), hits.share_of_tokens());
        CacheInfo { capacity_tokens: cache.held.capacity_bytes(), hit_blocks, hit_tokens }
    }
}

/// One cache, shared by all requests. Blocks of one prompt are used from the last to the first, so
/// that a prefix is always more recent than what follows it and never dropped before it.
struct PrefixCache {
    /// A byte stands for a token.
    held: Lru,
}

impl PrefixCache {
    fn new(capacity_tokens: u64) -> PrefixCache {
        PrefixCache { held: Lru::new(capacity_tokens) }
    }

    /// Serves one prompt, given the keys of its blocks: how many blocks at its start were held. All
    /// of them are held afterwards, as far as the capacity allows.
    fn serve(&mut self, keys: &[u64], block_tokens: u32) -> usize {
        let mut held_in_a_row = 0;
        for key in keys.iter().rev().map(|&key| ChunkKey::from_hash(key)) {
            held_in_a_row = if self.held.touch(key) { held_in_a_row + 1 } else { 0 };
            self.held.insert(Chunk { key, bytes: u64::from(block_tokens) });
        }
        while self.held.pop_excess().is_some() {}
        held_in_a_row
    }
}

#[cfg(test)]
mod tests {
    use super::PrefixCache;
    use proptest::prelude::*;

    /// The same cache as a list, newest first.
    fn naive(prompts: &[Vec<u64>], capacity_blocks: usize) -> Vec<usize> {
        let mut held: Vec<u64> = Vec::new();
        let serve = |keys: &Vec<u64>| {
            let hits = keys.iter().take_while(|key| held.contains(key)).count();
            for key in keys.iter().rev() {
                held.retain(|other| other != key);
                held.insert(0, *key);
            }
            held.truncate(capacity_blocks);
            hits
        };
        prompts.iter().map(serve).collect()
    }

    proptest! {
        #[test]
        fn it_serves_what_a_naive_list_would(
            prompts in prop::collection::vec(prop::collection::btree_set(0u64..40, 0..12), 0..60),
            capacity_blocks in 0usize..30,
            tokens_to_spare in 0u64..16,
            shuffle in any::<bool>(),
        ) {
            let prompts: Vec<Vec<u64>> = prompts
                .into_iter()
                .map(|keys| if shuffle { keys.into_iter().rev().collect() } else { keys.into_iter().collect() })
                .collect();
            let mut cache = PrefixCache::new(capacity_blocks as u64 * 16 + tokens_to_spare);
            let served: Vec<usize> = prompts.iter().map(|keys| cache.serve(keys, 16)).collect();
            prop_assert_eq!(served, naive(&prompts, capacity_blocks));
        }
    }
}
