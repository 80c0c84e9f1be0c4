//! Guarantees of the keyed KV: what engines read out of memory and what the oracle predicts are one
//! function, and no wrong byte, wherever it is, stays without effect.

use forebay_emulator::truth::{BlockKeys, BlockSums, ContextDigest, KvShape, KvTruth, Oracle, ShapeError};
use forebay_kv::NamespaceKey;
use proptest::prelude::*;

const VOCAB: u32 = 151_936;

fn truth_of(namespace: u8, layers: usize, bytes: usize, block_tokens: usize) -> KvTruth {
    let shape = KvShape::new(layers, bytes, block_tokens).expect("a possible shape");
    KvTruth::new(&NamespaceKey::from_bytes([namespace; 32]), shape)
}

/// The KV of a context as an engine holds it: one extent per block and layer.
struct Memory {
    truth: KvTruth,
    extents: Vec<Vec<Vec<u8>>>,
    tokens: Vec<u32>,
}

impl Memory {
    fn new(truth: KvTruth) -> Memory {
        Memory { truth, extents: Vec::new(), tokens: Vec::new() }
    }

    /// Computes the KV of further tokens, as one step of an engine does.
    fn compute(&mut self, tokens: &[u32]) {
        let shape = self.truth.shape();
        let start = self.tokens.len();
        self.tokens.extend_from_slice(tokens);
        let blocks = self.tokens.len().div_ceil(shape.block_tokens());
        self.extents.resize(blocks, vec![vec![0; shape.extent_bytes()]; shape.layers()]);
        let mut hashes = Vec::new();
        self.truth.hasher().extend(&mut hashes, &self.tokens);
        let mut keys = BlockKeys::default();
        for (block, tokens) in self.tokens.chunks(shape.block_tokens()).enumerate() {
            let first = (start.saturating_sub(block * shape.block_tokens())).min(tokens.len());
            let parent = block.checked_sub(1).map_or(self.truth.hasher().root(), |parent| hashes[parent]);
            self.truth.set_keys(&mut keys, parent, tokens);
            for layer in 0..shape.layers() {
                self.truth.fill(layer, &keys, first..tokens.len(), &mut self.extents[block][layer]);
            }
        }
    }

    fn read(&self) -> ContextDigest {
        let block_tokens = self.truth.shape().block_tokens();
        let (mut digest, mut sums) = (ContextDigest::EMPTY, BlockSums::default());
        for (tokens, extents) in self.tokens.chunks(block_tokens).zip(&self.extents) {
            sums.reset(tokens.len());
            extents
                .iter()
                .enumerate()
                .for_each(|(layer, extent)| self.truth.read(layer, 0..tokens.len(), extent, &mut sums));
            sums.as_slice().iter().for_each(|&sum| digest.absorb(sum));
        }
        digest
    }
}

#[test]
fn every_bit_of_every_byte_matters() {
    let mut memory = Memory::new(truth_of(1, 3, 8, 4));
    memory.compute(&[5, 6, 7, 8, 9, 10]);
    let right = memory.read();
    let mut flips = 0;
    for (block, tokens) in [(0, 4), (1, 2)] {
        for layer in 0..3 {
            // Two lanes of four words of four bytes.
            for byte in (0..32).filter(|byte| byte / 4 % 4 < tokens) {
                for bit in 0..8 {
                    memory.extents[block][layer][byte] ^= 1 << bit;
                    assert_ne!(memory.read(), right, "block {block} layer {layer} byte {byte} bit {bit}");
                    memory.extents[block][layer][byte] ^= 1 << bit;
                    flips += 1;
                }
            }
        }
    }
    assert_eq!((flips, memory.read()), (3 * 2 * 6 * 32, right));
}

#[test]
fn kv_in_the_wrong_place_matters() {
    let mut memory = Memory::new(truth_of(1, 4, 4, 4));
    memory.compute(&[1, 2, 3, 4, 5, 6, 7, 8]);
    let right = memory.read();
    memory.extents.swap(0, 1);
    assert_ne!(memory.read(), right, "blocks swapped");
    memory.extents.swap(0, 1);
    memory.extents[1].swap(2, 3);
    assert_ne!(memory.read(), right, "layers swapped");
    memory.extents[1].swap(2, 3);
    memory.extents.iter_mut().flatten().for_each(|extent| extent[..8].rotate_left(4));
    assert_ne!(memory.read(), right, "tokens swapped");
}

#[test]
fn the_same_tokens_after_another_prefix_have_other_kv() {
    let (mut one, mut other) = (Memory::new(truth_of(1, 2, 4, 4)), Memory::new(truth_of(1, 2, 4, 4)));
    one.compute(&[1, 2, 3, 4, 9, 9]);
    other.compute(&[1, 2, 3, 5, 9, 9]);
    assert_eq!(one.extents[0][0][..12], other.extents[0][0][..12], "an equal prefix has equal KV");
    assert_ne!(one.extents[1][0][..4], other.extents[1][0][..4]);
    assert_ne!(one.extents[1][0][4..8], other.extents[1][0][4..8]);
}

#[test]
fn another_namespace_has_other_kv_and_other_tokens() {
    let prompt: Vec<u32> = (0..100).collect();
    let [one, other] = [1, 2].map(|namespace| Oracle::new(truth_of(namespace, 4, 4, 16), VOCAB, 100));
    assert_ne!(one.predict(&prompt, 4), other.predict(&prompt, 4));
}

#[test]
fn a_wrong_answer_is_counted_from_its_first_wrong_token() {
    let oracle = Oracle::new(truth_of(1, 4, 4, 16), VOCAB, 100);
    let prompt: Vec<u32> = (0..40).collect();
    let mut output = oracle.predict(&prompt, 8);
    assert_eq!(oracle.wrong_tokens(&prompt, &output), 0);
    output[5] ^= 1;
    assert_eq!(oracle.wrong_tokens(&prompt, &output), 1);
    assert_eq!(oracle.wrong_tokens(&[], &[1, 2]), 2, "an empty prompt has no answer");
}

#[test]
fn tokens_never_change_between_versions() {
    // Recorded runs are compared across versions: a change here makes every one of them wrong.
    let oracle = Oracle::new(truth_of(7, 48, 4, 16), VOCAB, 100);
    let prompt: Vec<u32> = (0..100).map(|token| token * 31).collect();
    assert_eq!(oracle.predict(&prompt, 4), PINNED);
}

const PINNED: [u32; 4] = [76563, 145770, 66652, 70657];

#[test]
fn impossible_shapes_are_refused_by_name() {
    assert_eq!(KvShape::new(0, 4, 16), Err(ShapeError::Layers(0)));
    assert_eq!(KvShape::new(1, 4, 0), Err(ShapeError::BlockTokens(0)));
    assert_eq!(KvShape::new(1, 6, 16), Err(ShapeError::TokenLayerBytes(6)));
    assert_eq!(KvShape::new(1, 0, 16), Err(ShapeError::TokenLayerBytes(0)));
    let message = KvShape::new(1, 6, 16).unwrap_err().to_string();
    assert!(message.contains("kv_bytes_per_token_layer is 6"), "{message}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn the_oracle_predicts_what_is_read_from_memory(
        prompt in prop::collection::vec(0..VOCAB, 1..200),
        cuts in prop::collection::vec(1usize..60, 0..6),
        words in 1usize..4,
        block_tokens in 1usize..20,
    ) {
        let truth = truth_of(3, 5, words * 4, block_tokens);
        let oracle = Oracle::new(truth.clone(), VOCAB, 64);
        let mut memory = Memory::new(truth);
        let mut rest = &prompt[..];
        for cut in cuts {
            let (now, later) = rest.split_at(cut.min(rest.len()));
            memory.compute(now);
            rest = later;
        }
        memory.compute(rest);
        let mut output = Vec::new();
        for _ in 0..40 {
            let token = memory.read().next_token(VOCAB);
            output.push(token);
            memory.compute(&[token]);
        }
        prop_assert_eq!(&oracle.predict(&prompt, 40), &output);

        // The next turn starts inside what the oracle remembers.
        let turn = [&prompt[..], &output[..], &[1, 2, 3]].concat();
        let mut memory = Memory::new(memory.truth);
        memory.compute(&turn);
        prop_assert_eq!(oracle.predict(&turn, 1)[0], memory.read().next_token(VOCAB));
    }

    #[test]
    fn what_the_oracle_remembers_never_changes_its_answer(
        prompts in prop::collection::vec(prop::collection::vec(0u32..4, 1..80), 1..20),
        max_blocks in 0usize..20,
    ) {
        let oracle = Oracle::new(truth_of(3, 2, 4, 4), VOCAB, max_blocks);
        for prompt in &prompts {
            let fresh = Oracle::new(truth_of(3, 2, 4, 4), VOCAB, 0);
            prop_assert_eq!(oracle.predict(prompt, 3), fresh.predict(prompt, 3));
        }
    }
}
