//! What KV is worth: the bytes and the FLOPs of a model's tokens.

/// What matters of a model.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ModelCost {
    /// KV of a token over all layers.
    pub kv_bytes_per_token: u32,
    /// FLOP that grow with the tokens.
    pub flop_per_token: f64,
    /// FLOP of attention, for each pair of a query and a key.
    pub flop_per_pair: f64,
}

impl ModelCost {
    /// A dense model of 8 billion parameters with 32 layers of 32 query and 8 KV heads of 128, in
    /// bfloat16 (Llama 3 8B): two FLOP for each parameter; four for each pair, layer and channel of
    /// the 4,096; keys and values of two bytes.
    pub const DENSE_8B: ModelCost = ModelCost {
        kv_bytes_per_token: 2 * 32 * 8 * 128 * 2,
        flop_per_token: 2.0 * 8e9,
        flop_per_pair: 4.0 * 32.0 * 4_096.0,
    };

    /// FLOP of computing a prompt's first tokens.
    pub(super) fn prefill_flop(&self, tokens: u64) -> f64 {
        let tokens = tokens as f64;
        self.flop_per_token * tokens + self.flop_per_pair * tokens * tokens / 2.0
    }
}
