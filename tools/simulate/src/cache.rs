//! A prefix cache of blocks, kept by runs of the prefix tree: an engine's KV pool, or a tier of
//! host memory. It knows who holds what and in which order things are evicted. It knows no time.
//!
//! Of a run, a cache holds a beginning. Blocks that nobody holds are evicted in the order in which
//! they became free; of a prompt the last block is freed first. This is the order of vLLM's block
//! pool, as long as nobody holds only a part of what is cached of a run: here it counts as held
//! whole.

use crate::prefixes::{NodeId, Run};
use rustc_hash::FxHashMap;
use std::collections::BTreeMap;

#[derive(Debug)]
pub struct PrefixCache {
    block_tokens: u32,
    blocks: u64,
    held: u64,
    runs: FxHashMap<NodeId, Cached>,
    /// What may be evicted, first what is evicted first.
    free: BTreeMap<u64, FreeBlocks>,
    freed: u64,
}

/// What is cached of a run.
#[derive(Clone, Copy, Debug, Default)]
struct Cached {
    blocks: u32,
    holders: u32,
    /// Its place in `free`, while nobody holds it.
    place: u64,
}

#[derive(Clone, Copy, Debug)]
enum FreeBlocks {
    /// The blocks of a run.
    Run(NodeId),
    /// Blocks that nobody will find again.
    Uncached(u64),
}

impl PrefixCache {
    /// An empty cache with room for `tokens`.
    pub fn new(tokens: u64, block_tokens: u32) -> PrefixCache {
        let blocks = tokens / u64::from(block_tokens);
        PrefixCache {
            block_tokens,
            blocks,
            held: 0,
            runs: FxHashMap::default(),
            free: BTreeMap::from([(0, FreeBlocks::Uncached(blocks))]),
            freed: 0,
        }
    }

    /// Tokens that fit.
    pub fn tokens(&self) -> u64 {
        self.blocks * u64::from(self.block_tokens)
    }

    /// Blocks that somebody holds.
    pub fn held(&self) -> u64 {
        self.held
    }

    /// Blocks that can be taken.
    pub fn available(&self) -> u64 {
        self.blocks - self.held
    }

    /// Tokens of the longest cached beginning of a path, in whole blocks.
    pub fn hit_tokens(&self, path: &[Run]) -> u32 {
        let mut blocks = 0;
        for run in path {
            let all = self.blocks_of(run);
            let cached = self.cached_blocks(run.node).min(all);
            blocks += cached;
            if cached < all {
                break;
            }
        }
        blocks * self.block_tokens
    }

    /// Blocks of a path that are cached and held by nobody.
    pub fn idle_blocks(&self, path: &[Run]) -> u64 {
        let unheld = path.iter().filter_map(|run| self.runs.get(&run.node)).filter(|run| run.holders == 0);
        unheld.map(|run| u64::from(run.blocks)).sum()
    }

    /// Keeps what is cached of a path, and what will be named of it, from eviction.
    pub fn hold(&mut self, path: &[Run]) {
        let mut is_whole = true;
        for run in path {
            let all = self.blocks_of(run);
            let cached = self.runs.entry(run.node).or_default();
            cached.holders += 1;
            if cached.holders == 1 && cached.blocks > 0 {
                let place = self.free.remove(&cached.place);
                if is_whole || place.is_none() {
                    self.held += u64::from(cached.blocks);
                } else {
                    // Something before it is missing, so it is computed again into other blocks.
                    self.free.insert(cached.place, FreeBlocks::Uncached(u64::from(cached.blocks)));
                    cached.blocks = 0;
                }
            }
            is_whole &= cached.blocks >= all;
        }
    }

    /// Holds `blocks` blocks more, of which nobody finds anything until they are named. There must
    /// be as many available.
    pub fn take(&mut self, blocks: u64) {
        self.held += blocks;
        let mut missing = blocks;
        while missing > 0
            && let Some(mut first) = self.free.first_entry()
        {
            match *first.get() {
                FreeBlocks::Uncached(uncached) if uncached > missing => {
                    first.insert(FreeBlocks::Uncached(uncached - missing));
                    return;
                }
                FreeBlocks::Uncached(uncached) => missing -= uncached,
                FreeBlocks::Run(node) => {
                    if let Some(cached) = self.runs.get_mut(&node) {
                        if u64::from(cached.blocks) > missing {
                            cached.blocks -= missing as u32;
                            return;
                        }
                        missing -= u64::from(cached.blocks);
                        self.runs.remove(&node);
                    }
                }
            }
            first.remove();
        }
    }

    /// Names the blocks of the first `tokens` tokens of a path that was held, as far as they are
    /// whole. Returns how many had no name yet.
    pub fn name(&mut self, path: &[Run], tokens: u32) -> u32 {
        let mut named = 0;
        for run in path.iter().take_while(|run| run.start < tokens) {
            let whole = self.blocks_of(&Run { end: run.end.min(tokens), ..*run });
            if let Some(cached) = self.runs.get_mut(&run.node) {
                named += whole.saturating_sub(cached.blocks);
                cached.blocks = cached.blocks.max(whole);
            }
        }
        named
    }

    /// Ends a hold of a path and of `uncached` blocks beside it.
    pub fn release(&mut self, path: &[Run], uncached: u64) {
        self.held -= uncached;
        if uncached > 0 {
            self.add_free(FreeBlocks::Uncached(uncached));
        }
        for run in path.iter().rev() {
            let Some(cached) = self.runs.get_mut(&run.node) else { continue };
            cached.holders -= 1;
            match *cached {
                Cached { holders: 0, blocks: 0, .. } => drop(self.runs.remove(&run.node)),
                Cached { holders: 0, blocks, .. } => {
                    cached.place = self.freed + 1;
                    self.held -= u64::from(blocks);
                    self.add_free(FreeBlocks::Run(run.node));
                }
                _ => {}
            }
        }
    }

    /// Puts all of a path into the cache, unless it is longer than the cache.
    pub fn store(&mut self, path: &[Run]) {
        let all: u64 = path.iter().map(|run| u64::from(self.blocks_of(run))).sum();
        if all > self.blocks {
            return;
        }
        self.hold(path);
        let cached: u64 =
            path.iter().map(|run| u64::from(self.cached_blocks(run.node).min(self.blocks_of(run)))).sum();
        self.take(all - cached);
        self.name(path, path.last().map_or(0, |run| run.end));
        self.release(path, 0);
    }

    fn add_free(&mut self, free: FreeBlocks) {
        self.freed += 1;
        self.free.insert(self.freed, free);
    }

    fn cached_blocks(&self, node: NodeId) -> u32 {
        self.runs.get(&node).map_or(0, |cached| cached.blocks)
    }

    /// Blocks that end within a run.
    fn blocks_of(&self, run: &Run) -> u32 {
        run.end / self.block_tokens - run.start / self.block_tokens
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn run(node: u32, start: u32, end: u32) -> Run {
        Run { node: NodeId(node), start, end }
    }

    #[test]
    fn the_ends_of_what_was_used_longest_ago_are_evicted_first() {
        let mut cache = PrefixCache::new(160, 16);
        cache.store(&[run(0, 0, 32), run(1, 32, 80)]);
        cache.store(&[run(0, 0, 32), run(2, 32, 96)]);
        assert_eq!(cache.hit_tokens(&[run(0, 0, 32), run(1, 32, 80)]), 80);
        cache.store(&[run(3, 0, 48)]);
        assert_eq!(cache.hit_tokens(&[run(0, 0, 32), run(1, 32, 80)]), 48, "two of its blocks are gone");
        assert_eq!(cache.hit_tokens(&[run(0, 0, 32), run(2, 32, 96)]), 96);
    }

    #[test]
    fn what_is_held_stays() {
        let mut cache = PrefixCache::new(96, 16);
        cache.store(&[run(0, 0, 64)]);
        cache.hold(&[run(0, 0, 64)]);
        assert_eq!((cache.available(), cache.held()), (2, 4));
        cache.take(2);
        cache.release(&[], 2);
        cache.take(2);
        assert_eq!(cache.hit_tokens(&[run(0, 0, 64)]), 64);
    }

    proptest! {
        #[test]
        fn every_block_is_held_or_can_be_taken(
            paths in prop::collection::vec((0..3_u32, 0..5_u32, 1..200_u32, any::<bool>()), 1..60),
        ) {
            let mut cache = PrefixCache::new(480, 16);
            let mut held: Vec<(Vec<Run>, u64)> = Vec::new();
            for (root, leaf, length, ends) in paths {
                let path = vec![run(root, 0, 48), run(10 + root * 10 + leaf, 48, 48 + length)];
                let hit = cache.hit_tokens(&path);
                let need = u64::from((48 + length).div_ceil(16) - hit / 16);
                if need + cache.idle_blocks(&path) <= cache.available() {
                    cache.hold(&path);
                    cache.take(need);
                    let uncached = need - u64::from(cache.name(&path, 48 + length));
                    held.push((path, uncached));
                }
                if ends && !held.is_empty() {
                    let (path, uncached) = held.remove(0);
                    cache.release(&path, uncached);
                }
                let free: u64 = cache.free.values().map(|free| match free {
                    FreeBlocks::Uncached(blocks) => *blocks,
                    FreeBlocks::Run(node) => u64::from(cache.runs[node].blocks),
                }).sum();
                prop_assert_eq!(free, cache.available());
            }
            for (path, uncached) in held {
                cache.release(&path, uncached);
            }
            prop_assert_eq!(cache.held(), 0);
        }
    }
}
