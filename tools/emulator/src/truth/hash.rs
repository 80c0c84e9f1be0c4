//! Names of blocks: a chain of hashes over whole blocks, one chain per namespace. This file knows
//! tokens and parents.

use forebay_kv::NamespaceKey;
use std::fmt;
use xxhash_rust::xxh3::{xxh3_128, xxh3_128_with_seed};

/// Names a block by its namespace, its tokens and all tokens before it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BlockHash(u128);

impl BlockHash {
    /// The lower 64 bits, which is how vLLM's KV events name blocks by default.
    pub fn low_u64(&self) -> u64 {
        self.0 as u64
    }

    /// The upper 64 bits.
    pub(super) fn high_u64(&self) -> u64 {
        (self.0 >> 64) as u64
    }
}

impl fmt::Debug for BlockHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "BlockHash({:08x}..)", self.0 >> 96)
    }
}

/// Names the blocks of one namespace.
#[derive(Clone, Debug)]
pub struct BlockHasher {
    root: BlockHash,
    seed: u64,
    block_tokens: usize,
}

impl BlockHasher {
    /// For blocks of `block_tokens` tokens, at least 1.
    pub fn new(namespace: &NamespaceKey, block_tokens: usize) -> BlockHasher {
        let digest = xxh3_128(namespace.as_bytes());
        BlockHasher { root: BlockHash(digest), seed: digest as u64, block_tokens: block_tokens.max(1) }
    }

    /// What the first block of every sequence follows.
    pub fn root(&self) -> BlockHash {
        self.root
    }

    /// The hash of the block that holds `tokens` and follows `parent`.
    pub fn block(&self, parent: BlockHash, tokens: &[u32]) -> BlockHash {
        let mut bytes = Vec::with_capacity(16 + tokens.len() * 4);
        bytes.extend_from_slice(&parent.0.to_le_bytes());
        tokens.iter().for_each(|token| bytes.extend_from_slice(&token.to_le_bytes()));
        BlockHash(xxh3_128_with_seed(&bytes, self.seed))
    }

    /// Appends to `hashes`, which name the first blocks of `tokens`, those of the further whole
    /// blocks.
    pub fn extend(&self, hashes: &mut Vec<BlockHash>, tokens: &[u32]) {
        let known = hashes.len() * self.block_tokens;
        for block in tokens.get(known..).unwrap_or_default().chunks_exact(self.block_tokens) {
            let parent = hashes.last().copied().unwrap_or(self.root);
            hashes.push(self.block(parent, block));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hash_names_the_whole_prefix_and_the_namespace() {
        let hasher = BlockHasher::new(&NamespaceKey::from_bytes([1; 32]), 16);
        let tokens: Vec<u32> = (0..64).collect();
        let mut changed = tokens.clone();
        changed[3] += 1;
        let (mut hashes, mut others) = (Vec::new(), Vec::new());
        hasher.extend(&mut hashes, &tokens);
        hasher.extend(&mut others, &changed);
        assert_eq!(hashes.len(), 4);
        assert!(hashes.iter().zip(&others).all(|(a, b)| a != b), "a changed token changes every later hash");

        let mut elsewhere = Vec::new();
        BlockHasher::new(&NamespaceKey::from_bytes([2; 32]), 16).extend(&mut elsewhere, &tokens);
        assert!(hashes.iter().zip(&elsewhere).all(|(a, b)| a != b));
    }

    #[test]
    fn hashes_can_be_extended_as_tokens_arrive() {
        let hasher = BlockHasher::new(&NamespaceKey::from_bytes([1; 32]), 16);
        let tokens: Vec<u32> = (0..100).collect();
        let (mut at_once, mut piecewise) = (Vec::new(), Vec::new());
        hasher.extend(&mut at_once, &tokens);
        (0..=100).for_each(|end| hasher.extend(&mut piecewise, &tokens[..end]));
        assert_eq!(at_once, piecewise);
        assert_eq!(at_once.len(), 6);
    }
}
