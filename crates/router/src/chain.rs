//! The chunks of a prompt as chained hashes: what the router takes for the identity of a prefix. It
//! knows bytes; what they mean and who holds them it does not.

use xxhash_rust::xxh3::xxh3_64_with_seed;

/// Bytes of a prompt's JSON form per chunk: about 128 tokens of text, 85 token ids.
pub const CHUNK_BYTES: usize = 512;

/// The chained hashes of a prompt's whole chunks: entry `i` identifies bytes
/// `0..(i + 1) * CHUNK_BYTES`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Chain {
    keys: Vec<u64>,
}

impl Chain {
    /// Hashes `prompt`, under `root`: prompts under different roots share nothing.
    pub fn new(root: u64, prompt: &[u8]) -> Chain {
        let mut key = root;
        let chunks = prompt.chunks_exact(CHUNK_BYTES);
        let keys = chunks.map(|chunk| {
            key = xxh3_64_with_seed(chunk, key);
            key
        });
        Chain { keys: keys.collect() }
    }

    /// The hash of each chunk and all before it.
    pub fn keys(&self) -> &[u64] {
        &self.keys
    }

    /// Whole chunks.
    pub fn chunks(&self) -> usize {
        self.keys.len()
    }

    /// Identifies the first chunk, `None` for a prompt shorter than that.
    pub fn first(&self) -> Option<u64> {
        self.keys.first().copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prompts_under_different_roots_share_nothing() {
        let bytes = vec![b'x'; 4 * CHUNK_BYTES + 100];
        let (a, b) = (Chain::new(1, &bytes), Chain::new(2, &bytes));
        assert_eq!((a.chunks(), b.chunks()), (4, 4));
        assert!(a.keys.iter().zip(&b.keys).all(|(a, b)| a != b));
    }
}
