//! What the router takes its engines for: what their steps cost, and what they have room for. All
//! plain numbers from a profile.

use forebay_steps::{Launch, Profile, StepModel};

/// An engine as the router reckons with it.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct EngineModel {
    pub steps: StepModel,
    /// Microseconds that a token takes from a store in host memory to the GPU.
    pub load_us_per_token: f64,
    /// Tokens whose KV fits the GPU of an engine that does not say it.
    pub pool_tokens: u64,
    /// Most requests computed at once.
    pub max_seqs: u32,
}

impl EngineModel {
    /// An engine with the constants of a profile.
    pub fn new(profile: &Profile, launch: Launch) -> EngineModel {
        EngineModel {
            steps: StepModel::new(profile, launch),
            // Bytes / (10^9 bytes per second) in microseconds.
            load_us_per_token: profile.model.kv_bytes_per_token as f64 / profile.host_link.gb_per_s / 1e3,
            pool_tokens: profile.memory.pool_tokens as u64,
            max_seqs: u32::try_from(profile.scheduler.max_seqs).unwrap_or(u32::MAX),
        }
    }

    /// Microseconds of steps for what is new of a prompt.
    pub fn prefill_us(&self, input_tokens: u64, hit_tokens: u64) -> f64 {
        // An engine computes at least the last prompt token, however much it holds.
        let new_tokens = input_tokens.saturating_sub(hit_tokens).max(1);
        self.steps.prefill_us(new_tokens, input_tokens.saturating_sub(new_tokens))
    }
}
