//! What the bytes of the emulated engine's KV must be, and which tokens follow from them.
//!
//! Knows the function that gives every KV byte from (namespace, token prefix, layer), the digest
//! that folds KV bytes that were really read, and the function that gives a token from that digest.
//!
//! # The function
//!
//! A context is cut into blocks of `block_tokens`. A block's hash is XXH3-128 over its parent's
//! hash and its tokens, so it stands for the whole prefix. Within a block every token has a 64-bit
//! key, chained from the parent's hash over the tokens up to and including it. The KV of one token
//! in one layer is a few 32-bit words, the *lanes*; each is a fold of one 32 x 32 bit product of
//! the key's halves under constants of that lane, and the constants follow from the namespace. A
//! block's extent in a layer holds its lanes one after another, each with all tokens of the block:
//! the order of [heads, tokens, head size] in vLLM's HND layout, with a lane in place of a head.
//!
//! Reading works on words, not on keys: each token's words are summed under odd weights, one per
//! lane (a multilinear hash, so that one changed word always changes the sum), and the sums are
//! chained in token order into a
//! [`ContextDigest`]. The next token is a function of that digest and the position. Each emitted
//! token becomes KV itself and enters the digest before the next one is emitted. **One wrong byte
//! anywhere gives a wrong token**, except with a probability of 1 in the size of the vocabulary.

mod hash;
mod kv;
mod oracle;

pub use hash::{BlockHash, BlockHasher};
pub use kv::{BlockKeys, BlockSums, ContextDigest, KvShape, KvTruth, ShapeError};
pub use oracle::Oracle;

/// Folds a 64 x 64 bit product into 64 bits: the mixing step of wyhash (Wang Yi, public domain).
fn fold_product(a: u64, b: u64) -> u64 {
    let product = u128::from(a) * u128::from(b);
    (product >> 64) as u64 ^ product as u64
}

/// The output function of SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number
/// generators", OOPSLA 2014) over its own counter. Makes constants, not KV bytes.
struct SplitMix64(u64);

impl SplitMix64 {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let word = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let word = (word ^ (word >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        word ^ (word >> 31)
    }
}
