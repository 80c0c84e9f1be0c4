//! Which chunks were used again, among those used recently. This file knows keys of chunks, in
//! memory of a fixed size.

use super::filter::Filter;
use super::key::{Chunk, ChunkKey};

/// Chunks of a generation for each chunk that fits on the SSD.
///
/// A ghost list of four capacities is what the study of the Mooncake traces had; with half of that,
/// `second-hit` loses 1 point of hits on the synthetic one, with a quarter 3.
const GENERATION_PER_SSD_CHUNK: u64 = 4;

/// From here on the history of an SSD with more chunks grows no more: 2 GiB.
const MAX_SSD_CHUNKS: u64 = 1 << 26;

/// Two generations of chunks that were used: the younger fills up and then becomes the older.
///
/// A chunk is remembered while fewer than a generation of other chunks have been used since, and
/// forgotten after two. One that was used again counts as such until it is forgotten. Every use of
/// a chunk is a use of all chunks before it, and generations change between chains only; so nothing
/// is remembered longer, or as used more often, than what it continues. In one case in some hundred
/// a chunk is taken for another (see [`Filter`]) and counts as used again when it was not.
#[derive(Debug)]
pub(crate) struct History {
    young: Filter,
    old: Filter,
    /// Chunks in the younger generation.
    young_chunks: u64,
    generation_chunks: u64,
}

impl History {
    /// An empty one, for an SSD that has room for so many chunks: 32 bytes for each.
    pub fn new(ssd_chunks: u64) -> History {
        let generation_chunks = ssd_chunks.min(MAX_SSD_CHUNKS) * GENERATION_PER_SSD_CHUNK;
        // Each chunk has a mark when it is used, and another when it is used again.
        let filter = || Filter::new(generation_chunks * 2);
        History { young: filter(), old: filter(), young_chunks: 0, generation_chunks }
    }

    pub fn used(&mut self, chain: &[Chunk]) {
        if self.young_chunks >= self.generation_chunks {
            std::mem::swap(&mut self.young, &mut self.old);
            self.young.clear();
            self.young_chunks = 0;
        }
        for Chunk { key, .. } in chain {
            if self.is_marked(used_mark(*key)) {
                self.young.insert(again_mark(*key));
            }
            self.young_chunks += u64::from(self.young.insert(used_mark(*key)));
        }
    }

    /// Whether the chunk was used at least twice as far back as this goes.
    pub fn used_again(&self, key: ChunkKey) -> bool {
        self.is_marked(again_mark(key))
    }

    pub fn table_bytes(&self) -> u64 {
        self.young.table_bytes() + self.old.table_bytes()
    }

    fn is_marked(&self, mark: u64) -> bool {
        self.young.contains(mark) || self.old.contains(mark)
    }
}

fn used_mark(key: ChunkKey) -> u64 {
    key.hash_bits()
}

fn again_mark(key: ChunkKey) -> u64 {
    // Any other hash of the key would do.
    key.hash_bits().rotate_left(32).wrapping_mul(0xD6E8_FEB8_6659_FD93)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::admission::testing::chunk;
    use proptest::prelude::*;

    fn chain(numbers: std::ops::Range<u64>) -> Vec<Chunk> {
        numbers.map(chunk).collect()
    }

    #[test]
    fn twice_is_again_and_once_is_not() {
        let mut history = History::new(100);
        history.used(&chain(0..4));
        assert!((0..4).all(|number| !history.used_again(chunk(number).key)));
        history.used(&chain(0..2));
        assert_eq!(
            (0..4).map(|number| history.used_again(chunk(number).key)).collect::<Vec<_>>(),
            [true, true, false, false]
        );
    }

    #[test]
    fn a_use_is_remembered_for_one_generation_and_forgotten_after_two() {
        for (between, again) in [(399, true), (1_000, false)] {
            let mut history = History::new(100);
            history.used(&chain(0..1));
            (1..=between).for_each(|number| history.used(&chain(number..number + 1)));
            history.used(&chain(0..1));
            assert_eq!(history.used_again(chunk(0).key), again, "{between} chunks between");
        }
    }

    #[test]
    fn memory_is_thirty_two_bytes_for_each_chunk_on_the_ssd() {
        let mut history = History::new(10_000);
        let bytes = history.table_bytes();
        assert_eq!(bytes, 320_000);
        (0..500).for_each(|round| history.used(&chain(round * 200..round * 200 + 300)));
        assert_eq!(history.table_bytes(), bytes);
    }

    proptest! {
        #[test]
        fn what_is_used_again_has_all_before_it_used_again(
            prompts in prop::collection::vec((0u64..6, 1u64..12), 1..200),
            generation_chunks in 1u64..100,
        ) {
            // Prompts of a family share their beginnings. In filters that are nearly empty no chunk
            // is taken for another.
            let mut history = History { generation_chunks, ..History::new(1 << 11) };
            for (family, length) in prompts {
                history.used(&chain(family * 100..family * 100 + length));
                for start in (0..6).map(|family| family * 100) {
                    let again: Vec<bool> = (start..start + 12).map(|at| history.used_again(chunk(at).key)).collect();
                    prop_assert!(again.is_sorted_by(|before, after| before >= after), "{again:?}");
                }
            }
        }
    }
}
