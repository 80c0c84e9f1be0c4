//! Which chunks were used again, among those used recently. This file knows keys and lengths of chunks, in bounded memory;
//! it must never know which tier they are in.

use super::key::{Chunk, ChunkKey, KeyMap};

/// Two generations of chunks that were used: the younger fills up and then takes the place of the older.
///
/// A chunk is forgotten when chunks of at least one generation's bytes, and of at most two, have been used since. A chunk
/// that was used again is remembered as such until it is forgotten. Because every use of a chunk is a use of all chunks
/// before it, and generations change between chains only, nothing is remembered longer, or as used more often, than what
/// it continues.
#[derive(Debug)]
pub(crate) struct History {
    young: KeyMap<bool>,
    old: KeyMap<bool>,
    young_bytes: u64,
    generation_bytes: u64,
}

impl History {
    /// An empty one.
    pub fn new(generation_bytes: u64) -> History {
        History { young: KeyMap::default(), old: KeyMap::default(), young_bytes: 0, generation_bytes }
    }

    /// Remembers the use of a chain.
    pub fn used(&mut self, chain: &[Chunk]) {
        if self.young_bytes >= self.generation_bytes {
            self.old = std::mem::take(&mut self.young);
            self.young_bytes = 0;
        }
        for chunk in chain {
            let known_before = self.old.contains_key(&chunk.key);
            let mut first_in_generation = false;
            self.young
                .entry(chunk.key)
                .and_modify(|again| *again = true)
                .or_insert_with(|| {
                    first_in_generation = true;
                    known_before
                });
            self.young_bytes += if first_in_generation { chunk.bytes } else { 0 };
        }
    }

    /// Whether the chunk was used at least twice as far back as this goes.
    pub fn used_again(&self, key: ChunkKey) -> bool {
        self.young.get(&key).or_else(|| self.old.get(&key)).copied().unwrap_or(false)
    }

    /// How many chunks are remembered, counting those of both generations twice.
    pub fn len(&self) -> usize {
        self.young.len() + self.old.len()
    }
}
