//! The bytes themselves: fills the extents of a block and reads them back, and folds what was read
//! into a digest. This file knows words, lanes and keys. Words are little-endian.

use super::hash::BlockHash;
use super::{BlockHasher, SplitMix64, fold_product};
use forebay_kv::NamespaceKey;
use std::ops::Range;
use thiserror::Error;
use xxhash_rust::xxh3::xxh3_64;

/// Bytes of one word: the unit in which KV is made and read.
pub const WORD_BYTES: usize = 4;

/// How much KV there is. Scaled down from the real model's, so that several engines fit a small
/// machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvShape {
    layers: usize,
    lanes: usize,
    block_tokens: usize,
}

/// Why a shape is impossible.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum ShapeError {
    /// There is nothing to hold.
    #[error("layers is {0}; at least 1 and at most {MAX_LAYERS} are allowed")]
    Layers(usize),
    /// Tokens of a block out of range.
    #[error("block_tokens is {0}; at least 1 and at most {MAX_BLOCK_TOKENS} are allowed")]
    BlockTokens(usize),
    /// Not a whole number of words, or none, or too many.
    #[error(
        "kv_bytes_per_token_layer is {0}; a multiple of {WORD_BYTES} from {WORD_BYTES} to {MAX_TOKEN_LAYER_BYTES} is allowed"
    )]
    TokenLayerBytes(usize),
}

/// Most layers of a model.
pub const MAX_LAYERS: usize = 512;
/// Most tokens of a block.
pub const MAX_BLOCK_TOKENS: usize = 1024;
/// Most KV of a token in a layer: 64 KiB, twice that of 128 heads of 128 in half precision.
pub const MAX_TOKEN_LAYER_BYTES: usize = 64 << 10;

impl KvShape {
    /// A shape of `layers`, each holding `bytes_per_token_layer` for every token, in blocks of
    /// `block_tokens`.
    pub fn new(
        layers: usize,
        bytes_per_token_layer: usize,
        block_tokens: usize,
    ) -> Result<KvShape, ShapeError> {
        if !(1..=MAX_LAYERS).contains(&layers) {
            return Err(ShapeError::Layers(layers));
        }
        if !(1..=MAX_BLOCK_TOKENS).contains(&block_tokens) {
            return Err(ShapeError::BlockTokens(block_tokens));
        }
        let whole_words = bytes_per_token_layer.is_multiple_of(WORD_BYTES);
        if !whole_words || !(WORD_BYTES..=MAX_TOKEN_LAYER_BYTES).contains(&bytes_per_token_layer) {
            return Err(ShapeError::TokenLayerBytes(bytes_per_token_layer));
        }
        Ok(KvShape { layers, lanes: bytes_per_token_layer / WORD_BYTES, block_tokens })
    }

    /// Layers of the model.
    pub fn layers(&self) -> usize {
        self.layers
    }

    pub fn block_tokens(&self) -> usize {
        self.block_tokens
    }

    /// Bytes of a block's extent in one layer.
    pub fn extent_bytes(&self) -> usize {
        self.lanes * self.row_bytes()
    }

    /// Bytes of one lane of a block's extent: a word per token.
    pub fn row_bytes(&self) -> usize {
        self.block_tokens * WORD_BYTES
    }

    /// Where in a row the words of `tokens` are.
    pub fn word_bytes(tokens: &Range<usize>) -> Range<usize> {
        tokens.start * WORD_BYTES..tokens.end * WORD_BYTES
    }
}

/// Constants of a lane of a layer.
#[derive(Clone, Copy, Debug)]
struct Lane {
    flip_low: u32,
    flip_high: u32,
    /// Odd, so that a changed word always changes the sum.
    weight: u32,
}

impl Lane {
    fn new(random: &mut SplitMix64) -> Lane {
        let (flips, weight) = (random.next(), random.next());
        Lane { flip_low: flips as u32, flip_high: (flips >> 32) as u32, weight: weight as u32 | 1 }
    }

    #[inline(always)]
    fn word(self, key_low: u32, key_high: u32) -> u32 {
        let product = u64::from(key_low ^ self.flip_low) * u64::from(key_high ^ self.flip_high);
        (product >> 32) as u32 ^ product as u32
    }

    #[inline(always)]
    fn weigh(self, word: u32) -> u64 {
        u64::from(word) * u64::from(self.weight)
    }
}

/// The keys of a block's first tokens. Halves lie apart, so that the loops over them become vector
/// instructions.
#[derive(Clone, Debug, Default)]
pub struct BlockKeys {
    low: Vec<u32>,
    high: Vec<u32>,
}

/// The sums of a block's tokens, one each, over the layers read so far.
#[derive(Clone, Debug, Default)]
pub struct BlockSums(Vec<u64>);

impl BlockSums {
    /// Starts over for `tokens` tokens.
    pub fn reset(&mut self, tokens: usize) {
        self.0.clear();
        self.0.resize(tokens, 0);
    }

    /// One sum per token, in order.
    pub fn as_slice(&self) -> &[u64] {
        &self.0
    }
}

/// The KV of one namespace in one shape: what each word must be, and how words are read.
#[derive(Clone, Debug)]
pub struct KvTruth {
    shape: KvShape,
    hasher: BlockHasher,
    key_seed: u64,
    /// All lanes of layer 0, then of layer 1, and so on.
    lanes: Vec<Lane>,
}

impl KvTruth {
    pub fn new(namespace: &NamespaceKey, shape: KvShape) -> KvTruth {
        let mut random = SplitMix64(xxh3_64(namespace.as_bytes()));
        let key_seed = random.next();
        let lanes = (0..shape.layers * shape.lanes).map(|_| Lane::new(&mut random)).collect();
        KvTruth { shape, hasher: BlockHasher::new(namespace, shape.block_tokens), key_seed, lanes }
    }

    pub fn shape(&self) -> KvShape {
        self.shape
    }

    /// Names the blocks of this namespace.
    pub fn hasher(&self) -> &BlockHasher {
        &self.hasher
    }

    /// Sets `keys` to those of `tokens`, the first tokens of the block that follows `parent`.
    pub fn set_keys(&self, keys: &mut BlockKeys, parent: BlockHash, tokens: &[u32]) {
        keys.low.clear();
        keys.high.clear();
        let mut key = fold_product(parent.low_u64() ^ self.key_seed, parent.high_u64() | 1);
        for &token in tokens {
            key = fold_product(key ^ 0x4528_21E6_38D0_1377, u64::from(token) ^ self.key_seed);
            keys.low.push(key as u32);
            keys.high.push((key >> 32) as u32);
        }
    }

    /// Writes the words of the tokens `range` of a block into its extent in `layer`; other words
    /// stay as they are.
    ///
    /// # Panics
    /// When `extent` is not [`KvShape::extent_bytes`] long or `range` reaches past `keys`.
    pub fn fill(&self, layer: usize, keys: &BlockKeys, range: Range<usize>, extent: &mut [u8]) {
        assert_eq!(extent.len(), self.shape.extent_bytes(), "an extent of another shape");
        let (low, high) = (&keys.low[range.clone()], &keys.high[range.clone()]);
        for (lane, row) in self.lanes_of(layer).iter().zip(extent.chunks_exact_mut(self.shape.row_bytes())) {
            let words = row[KvShape::word_bytes(&range)].chunks_exact_mut(WORD_BYTES);
            for ((word, &low), &high) in words.zip(low).zip(high) {
                word.copy_from_slice(&lane.word(low, high).to_le_bytes());
            }
        }
    }

    /// Adds what is read from a block's extent in `layer` to the sums of its tokens `range`.
    ///
    /// # Panics
    /// When `extent` is not [`KvShape::extent_bytes`] long, `range` reaches past the block, or
    /// `sums` were not reset to as many tokens.
    pub fn read(&self, layer: usize, range: Range<usize>, extent: &[u8], sums: &mut BlockSums) {
        assert_eq!(extent.len(), self.shape.extent_bytes(), "an extent of another shape");
        assert_eq!(sums.0.len(), range.len(), "sums of other tokens");
        for (lane, row) in self.lanes_of(layer).iter().zip(extent.chunks_exact(self.shape.row_bytes())) {
            for (sum, word) in
                sums.0.iter_mut().zip(row[KvShape::word_bytes(&range)].chunks_exact(WORD_BYTES))
            {
                let word = u32::from_le_bytes([word[0], word[1], word[2], word[3]]);
                *sum = sum.wrapping_add(lane.weigh(word));
            }
        }
    }

    /// What [`KvTruth::read`] over all layers would give for the tokens `range` of a block, if
    /// every byte were right.
    pub(super) fn predict(&self, keys: &BlockKeys, range: Range<usize>, sums: &mut BlockSums) {
        sums.reset(range.len());
        let (low, high) = (&keys.low[range.clone()], &keys.high[range]);
        for lane in &self.lanes {
            for ((sum, &low), &high) in sums.0.iter_mut().zip(low).zip(high) {
                *sum = sum.wrapping_add(lane.weigh(lane.word(low, high)));
            }
        }
    }

    fn lanes_of(&self, layer: usize) -> &[Lane] {
        &self.lanes[layer * self.shape.lanes..(layer + 1) * self.shape.lanes]
    }
}

/// Folds the KV of a context's tokens, in order, into 64 bits that the next token follows from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ContextDigest {
    state: u64,
    tokens: u32,
}

// Digits of pi behind the point, in 64-bit pieces: constants nobody could have chosen for a
// purpose.
const STEP: u64 = 0x243F_6A88_85A3_08D3;
const FINISH: u64 = 0x1319_8A2E_0370_7344;

impl ContextDigest {
    pub const EMPTY: ContextDigest = ContextDigest { state: 0xA409_3822_299F_31D0, tokens: 0 };

    /// Adds the next token's KV, given as its sum over all layers.
    pub fn absorb(&mut self, token_sum: u64) {
        self.state = fold_product(self.state ^ token_sum, STEP);
        self.tokens += 1;
    }

    /// Tokens absorbed.
    pub fn tokens(&self) -> usize {
        self.tokens as usize
    }

    /// The token that follows this context, below `vocab` (0 is taken as 1).
    pub fn next_token(&self, vocab: u32) -> u32 {
        let random = fold_product(self.state ^ u64::from(self.tokens), FINISH);
        ((u128::from(random) * u128::from(vocab.max(1))) >> 64) as u32
    }
}
