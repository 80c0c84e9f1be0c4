//! Chunks for the tests of admission.

use super::key::{Chunk, ChunkKey};

/// A hash of a number, spread evenly: the output function of SplitMix64.
pub(crate) fn hash(number: u64) -> u64 {
    let word = number.wrapping_add(1).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    let word = (word ^ (word >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let word = (word ^ (word >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    word ^ (word >> 31)
}

/// The chunk of a number, of one byte.
pub(crate) fn chunk(number: u64) -> Chunk {
    Chunk { key: ChunkKey::from_hash(hash(number)), bytes: 1 }
}
