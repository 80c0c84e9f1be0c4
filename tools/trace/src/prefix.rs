//! What two prompts have in common: one key for each prefix of a prompt, equal in two prompts
//! exactly when all blocks up to there are equal. Block ids alone do not give that, for in some
//! traces a block has the same id wherever it stands.

use crate::request::TraceRequest;
use crate::tokens::mix;
use std::collections::{HashMap, HashSet};
use std::hash::{BuildHasherDefault, Hasher};

/// One key for each block of the prompt, from the first: a 64-bit hash of the block size and all
/// ids up to this block. Among ten million different prefixes two have the same key with
/// probability 3e-6.
pub fn prefix_keys(request: &TraceRequest) -> impl Iterator<Item = u64> {
    let start = mix(u64::from(request.block_tokens));
    request.blocks.iter().scan(start, |key, &block| {
        *key = mix(*key ^ mix(block));
        Some(*key)
    })
}

/// For maps whose keys are evenly spread already.
pub(crate) type KeyHasher = BuildHasherDefault<IdentityHasher>;
pub(crate) type KeySet = HashSet<u64, KeyHasher>;
pub(crate) type KeyMap<V> = HashMap<u64, V, KeyHasher>;

/// Hashes an evenly spread key to itself.
#[derive(Default)]
pub(crate) struct IdentityHasher(u64);

impl Hasher for IdentityHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|&byte| self.0 = mix(self.0 ^ u64::from(byte)));
    }

    fn write_u64(&mut self, key: u64) {
        self.0 = key;
    }
}

#[cfg(test)]
mod tests {
    use super::prefix_keys;
    use crate::request::TraceRequest;

    fn keys(blocks: &[u64]) -> Vec<u64> {
        prefix_keys(&TraceRequest { block_tokens: 16, blocks: blocks.to_vec(), ..TraceRequest::default() })
            .collect()
    }

    #[test]
    fn keys_are_equal_as_far_as_prompts_are() {
        let (one, two) = (keys(&[1, 2, 3, 4]), keys(&[1, 2, 9, 4]));
        assert_eq!(one[..2], two[..2]);
        assert_ne!(one[2], two[2]);
        assert_ne!(one[3], two[3], "an equal block after a different one is not the same KV");
    }

    #[test]
    fn position_and_block_size_count() {
        assert_ne!(keys(&[5, 5])[0], keys(&[5, 5])[1]);
        let other = TraceRequest { block_tokens: 64, blocks: vec![1], ..TraceRequest::default() };
        assert_ne!(prefix_keys(&other).next(), keys(&[1]).first().copied());
    }
}
