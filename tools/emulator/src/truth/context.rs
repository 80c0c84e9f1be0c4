//! The digest of a context: every KV byte of it, in token order. This file knows sums of tokens'
//! KV.

use super::fold_product;

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
