//! Predicts an engine's output from the prompt alone. This file knows the truth and a bounded
//! memory of prefixes.

use super::{BlockHash, BlockKeys, BlockSums, ContextDigest, KvTruth};
use forebay_transfer::lock::Mutex;
use std::collections::HashMap;

/// Predicts tokens. Remembers the digests of the prefixes it saw last, because the turns of a
/// session share theirs.
///
/// ```
/// use forebay_emulator::truth::{KvShape, KvTruth, Oracle};
/// use forebay_kv::NamespaceKey;
///
/// let truth = KvTruth::new(&NamespaceKey::from_bytes([7; 32]), KvShape::new(48, 4, 16)?);
/// let oracle = Oracle::new(truth, 151_936, 100_000);
/// let prompt: Vec<u32> = (0..1000).collect();
/// let output = oracle.predict(&prompt, 4);
/// assert_eq!(output[..2], oracle.predict(&prompt, 2));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Oracle {
    truth: KvTruth,
    vocab: u32,
    seen: Mutex<SeenPrefixes>,
}

impl Oracle {
    /// An oracle for engines with this truth and vocabulary. It remembers at most `max_blocks`
    /// prefixes, each ending with a block; one takes about 50 bytes.
    pub fn new(truth: KvTruth, vocab: u32, max_blocks: usize) -> Oracle {
        Oracle { truth, vocab, seen: Mutex::new(SeenPrefixes::new(max_blocks)) }
    }

    /// The first `tokens` tokens that an engine answers to `prompt`. An empty prompt has no answer.
    pub fn predict(&self, prompt: &[u32], tokens: usize) -> Vec<u32> {
        if prompt.is_empty() {
            return Vec::new();
        }
        let mut walk = self.walk(prompt);
        let mut output = Vec::with_capacity(tokens);
        while output.len() < tokens {
            let token = walk.digest.next_token(self.vocab);
            output.push(token);
            walk.push(token);
        }
        output
    }

    /// How many tokens of `output` are not what an engine must answer to `prompt`. After the first
    /// wrong one all that follow usually are, because each token is part of the context of the
    /// next.
    pub fn wrong_tokens(&self, prompt: &[u32], output: &[u32]) -> usize {
        let expected = self.predict(prompt, output.len());
        output.iter().enumerate().filter(|(position, token)| expected.get(*position) != Some(token)).count()
    }

    /// The walk at the end of `prompt`, started at the longest prefix that was seen before.
    fn walk(&self, prompt: &[u32]) -> Walk<'_> {
        let hasher = self.truth.hasher();
        let mut hashes = Vec::with_capacity(prompt.len() / self.truth.shape().block_tokens());
        hasher.extend(&mut hashes, prompt);
        let mut seen = self.seen.lock();
        let start = seen.longest(&hashes);
        drop(seen);
        let (blocks, digest) = start.unwrap_or((0, ContextDigest::EMPTY));

        let mut walk = Walk::new(&self.truth, blocks.checked_sub(1).map(|last| hashes[last]), digest);
        let mut digests = Vec::with_capacity(hashes.len() - blocks);
        let block_tokens = self.truth.shape().block_tokens();
        let mut rest = prompt[blocks * block_tokens..].chunks_exact(block_tokens);
        for (block, &hash) in rest.by_ref().zip(&hashes[blocks..]) {
            walk.push_block(block, hash);
            digests.push((hash, walk.digest));
        }
        walk.push_all(rest.remainder());

        let mut seen = self.seen.lock();
        digests.into_iter().for_each(|(hash, digest)| seen.insert(hash, digest));
        walk
    }
}

/// A position in a context of which every byte is right.
struct Walk<'a> {
    truth: &'a KvTruth,
    /// The last whole block.
    parent: BlockHash,
    /// Tokens after it.
    tail: Vec<u32>,
    digest: ContextDigest,
    keys: BlockKeys,
    sums: BlockSums,
}

impl<'a> Walk<'a> {
    fn new(truth: &'a KvTruth, parent: Option<BlockHash>, digest: ContextDigest) -> Walk<'a> {
        let parent = parent.unwrap_or(truth.hasher().root());
        Walk {
            truth,
            parent,
            tail: Vec::new(),
            digest,
            keys: BlockKeys::default(),
            sums: BlockSums::default(),
        }
    }

    /// Takes a whole block whose hash is known. The tail is empty.
    fn push_block(&mut self, tokens: &[u32], hash: BlockHash) {
        self.push_all(tokens);
        self.tail.clear();
        self.parent = hash;
    }

    fn push(&mut self, token: u32) {
        self.push_all(&[token]);
        if self.tail.len() == self.truth.shape().block_tokens() {
            self.parent = self.truth.hasher().block(self.parent, &self.tail);
            self.tail.clear();
        }
    }

    /// Takes tokens that stay within the current block.
    fn push_all(&mut self, tokens: &[u32]) {
        let first = self.tail.len();
        self.tail.extend_from_slice(tokens);
        self.truth.set_keys(&mut self.keys, self.parent, &self.tail);
        self.truth.predict(&self.keys, first..self.tail.len(), &mut self.sums);
        self.sums.as_slice().iter().for_each(|&sum| self.digest.absorb(sum));
    }
}

/// Digests of prefixes, in two generations: when the younger one is full it becomes the older one,
/// and the former older one is forgotten. What is used moves to the younger. That is a bounded LRU
/// without lists.
#[derive(Debug)]
struct SeenPrefixes {
    young: HashMap<BlockHash, ContextDigest>,
    old: HashMap<BlockHash, ContextDigest>,
    generation_blocks: usize,
}

impl SeenPrefixes {
    fn new(max_blocks: usize) -> SeenPrefixes {
        SeenPrefixes { young: HashMap::new(), old: HashMap::new(), generation_blocks: max_blocks / 2 }
    }

    /// The longest prefix that was seen: its blocks and its digest.
    fn longest(&mut self, hashes: &[BlockHash]) -> Option<(usize, ContextDigest)> {
        let (last, digest) = hashes.iter().enumerate().rev().find_map(|(index, hash)| {
            let digest = self.young.get(hash).or_else(|| self.old.get(hash))?;
            Some((index, *digest))
        })?;
        self.insert(hashes[last], digest);
        Some((last + 1, digest))
    }

    fn insert(&mut self, hash: BlockHash, digest: ContextDigest) {
        if self.generation_blocks == 0 {
            return;
        }
        if self.young.len() >= self.generation_blocks {
            self.old = std::mem::take(&mut self.young);
        }
        self.young.insert(hash, digest);
    }
}
