//! A prefix cache of a given size that drops the least recently used block: what share of a trace
//! would it have served?

use forebay_store::admission::{Chunk, ChunkKey, Lru};

/// One cache, shared by all requests. Blocks of one prompt are used from the last to the first, so
/// that a prefix is always more recent than what follows it and never dropped before it.
pub(super) struct PrefixCache {
    /// A byte stands for a token.
    held: Lru,
}

impl PrefixCache {
    pub(super) fn new(capacity_tokens: u64) -> PrefixCache {
        PrefixCache { held: Lru::new(capacity_tokens) }
    }

    pub(super) fn capacity_tokens(&self) -> u64 {
        self.held.capacity_bytes()
    }

    /// Serves one prompt, given the keys of its blocks: how many blocks at its start were held. All
    /// of them are held afterwards, as far as the capacity allows.
    pub(super) fn serve(&mut self, keys: &[u64], block_tokens: u32) -> usize {
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
