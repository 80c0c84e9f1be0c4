//! What admission knows of a chunk: 64 bits of its name and its length.

use forebay_kv::ChunkId;
use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hash, Hasher};

/// Stands for a chunk id. Among ten million chunks two share a key with probability 3e-6; the price
/// is one chunk written or left out by mistake, never a wrong byte.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct ChunkKey(u64);

/// A chunk as admission sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Chunk {
    pub key: ChunkKey,
    /// What it takes on the SSD.
    pub bytes: u64,
}

impl ChunkKey {
    /// A key from a hash of the chunk and all before it, whose bits are spread evenly.
    pub const fn from_hash(hash: u64) -> ChunkKey {
        ChunkKey(hash)
    }

    pub(crate) fn hash_bits(self) -> u64 {
        self.0
    }

    /// Whether the chunk is in a sample of one in `one_in`, a power of two. Smaller samples are
    /// part of larger ones.
    pub(crate) fn is_sampled(self, one_in: u64) -> bool {
        // The bits in the middle: hash tables take theirs from both ends.
        (self.0 >> SAMPLE_SHIFT) & (one_in - 1) == 0
    }
}

/// Samples are chosen by the bits from here on.
const SAMPLE_SHIFT: u32 = 24;

/// The largest `one_in` that leaves the highest seven bits, which the standard hash table looks at,
/// alone.
pub(crate) const MAX_ONE_IN: u64 = 1 << (57 - SAMPLE_SHIFT);

impl From<&ChunkId> for ChunkKey {
    fn from(id: &ChunkId) -> ChunkKey {
        let mut key = [0; 8];
        key.copy_from_slice(&id.as_bytes()[..8]);
        ChunkKey(u64::from_le_bytes(key))
    }
}

impl Hash for ChunkKey {
    fn hash<H: Hasher>(&self, state: &mut H) {
        state.write_u64(self.0);
    }
}

pub(crate) type KeyMap<V> = HashMap<ChunkKey, V, BuildHasherDefault<AsItIs>>;

/// Hashes a key, which is a hash already, to itself.
#[derive(Default)]
pub(crate) struct AsItIs(u64);

impl Hasher for AsItIs {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        // Keys write one word; anything else still has to depend on every byte.
        bytes.iter().for_each(|byte| self.0 = (self.0.rotate_left(8)) ^ u64::from(*byte));
    }

    fn write_u64(&mut self, word: u64) {
        self.0 = word;
    }
}
