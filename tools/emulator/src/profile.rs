//! Profiles: the constants of one model on one GPU. This file knows where they are written and
//! which values make sense.

use forebay_kv::{AxisOrder, Digest, KvDtype, Namespace, Rank};
use serde::Deserialize;
use std::collections::BTreeMap;
use thiserror::Error;

/// The constants of one (GPU, model) pair. Each shipped profile states its sources beside the
/// values.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Profile {
    /// How the profile is chosen.
    pub name: String,
    /// What is known about the model.
    pub model: ModelFacts,
    pub step: StepCosts,
    /// What the GPU has room for.
    pub memory: MemoryFacts,
    /// How the engine fills its steps.
    pub scheduler: SchedulerFacts,
    /// The path between host memory and the GPU.
    pub host_link: HostLinkFacts,
}

/// The model as it really is; the emulated KV is scaled down, the latency model is not.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ModelFacts {
    /// Served name unless another is given.
    pub name: String,
    /// Layers that keep KV.
    pub layers: usize,
    pub vocab: u32,
    /// Longest context, prompt and output together.
    pub max_model_tokens: usize,
    /// KV of one token over all layers.
    pub kv_bytes_per_token: u64,
}

/// Constants of the step time; the formula is that of
/// [`LatencyModel`](crate::latency::LatencyModel).
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StepCosts {
    /// Everything that is linear in the tokens of a step.
    pub linear_us_per_token: f64,
    /// Attention, per pair of a query and a key.
    pub attention_ns_per_pair: f64,
    /// Reading the KV of a decode's context.
    pub decode_ns_per_context_token: f64,
    /// Shortest step without CUDA graphs.
    pub floor_eager_us: f64,
    /// Shortest step with CUDA graphs.
    pub floor_graph_us: f64,
}

/// The KV pool.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MemoryFacts {
    /// Tokens of KV that fit.
    pub pool_tokens: usize,
    pub block_tokens: usize,
}

/// Limits of a step.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SchedulerFacts {
    /// Tokens computed in one step at most.
    pub max_batched_tokens: usize,
    /// Requests running at most.
    pub max_seqs: usize,
}

/// The GPU's link to host memory.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HostLinkFacts {
    /// Rate in 10^9 bytes per second.
    pub gb_per_s: f64,
}

/// Why a profile cannot be used.
#[derive(Debug, Error)]
pub enum ProfileError {
    /// No shipped profile has this name.
    #[error("unknown profile {name:?}; shipped are: {shipped}")]
    Unknown { name: String, shipped: String },
    /// Not TOML, a field is missing, unknown or of the wrong type.
    #[error("profile: {0}")]
    Format(#[from] toml::de::Error),
    /// A value that no machine has.
    #[error("profile: {field} is {value}; it must be {allowed}")]
    Value { field: &'static str, value: f64, allowed: &'static str },
}

/// The profiles in the binary: name and text.
const SHIPPED: [(&str, &str); 1] =
    [("h20-qwen3-coder-30b-a3b", include_str!("../profiles/h20-qwen3-coder-30b-a3b.toml"))];

impl Profile {
    /// Used when none is named.
    pub const DEFAULT: &str = SHIPPED[0].0;

    /// The shipped profile called `name`.
    pub fn shipped(name: &str) -> Result<Profile, ProfileError> {
        match SHIPPED.iter().find(|(shipped, _)| *shipped == name) {
            Some((_, text)) => Profile::from_toml(text),
            None => Err(ProfileError::Unknown {
                name: name.to_owned(),
                shipped: SHIPPED.map(|(shipped, _)| shipped).join(", "),
            }),
        }
    }

    /// A profile from the text of a file.
    fn from_toml(text: &str) -> Result<Profile, ProfileError> {
        let profile: Profile = toml::from_str(text)?;
        profile.check()?;
        Ok(profile)
    }

    /// What makes KV of this model, on one emulated GPU, unusable elsewhere. There are no weights
    /// to digest, so the model's name stands for them; the latency model's constants change no KV.
    pub fn namespace(&self) -> Namespace {
        Namespace {
            weights: Digest::of(self.model.name.as_bytes()),
            dtype: KvDtype::Bfloat16,
            order: AxisOrder::Lbhnc,
            block_tokens: self.memory.block_tokens as u32,
            tensor_parallel: Rank::ONLY,
            pipeline_parallel: Rank::ONLY,
            attention: BTreeMap::new(),
            lora: None,
            tenant_salt: Vec::new(),
        }
    }

    /// Whether every value makes sense; a profile that was changed may not.
    pub fn check(&self) -> Result<(), ProfileError> {
        let counts = [
            ("model.layers", self.model.layers),
            ("model.vocab", self.model.vocab as usize),
            ("model.max_model_tokens", self.model.max_model_tokens),
            ("model.kv_bytes_per_token", self.model.kv_bytes_per_token as usize),
            ("memory.pool_tokens", self.memory.pool_tokens),
            ("memory.block_tokens", self.memory.block_tokens),
            ("scheduler.max_batched_tokens", self.scheduler.max_batched_tokens),
            ("scheduler.max_seqs", self.scheduler.max_seqs),
        ];
        if let Some((field, value)) = counts.into_iter().find(|(_, value)| *value == 0) {
            return Err(ProfileError::Value { field, value: value as f64, allowed: "at least 1" });
        }
        let rates = [
            ("step.linear_us_per_token", self.step.linear_us_per_token),
            ("step.attention_ns_per_pair", self.step.attention_ns_per_pair),
            ("step.decode_ns_per_context_token", self.step.decode_ns_per_context_token),
            ("step.floor_eager_us", self.step.floor_eager_us),
            ("step.floor_graph_us", self.step.floor_graph_us),
            ("host_link.gb_per_s", self.host_link.gb_per_s),
        ];
        match rates.into_iter().find(|(_, value)| !(value.is_finite() && *value > 0.0)) {
            Some((field, value)) => {
                Err(ProfileError::Value { field, value, allowed: "a finite number above 0" })
            }
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_shipped_profile_is_usable_and_called_as_it_says() {
        for (name, _) in SHIPPED {
            assert_eq!(Profile::shipped(name).unwrap().name, name);
        }
    }

    #[test]
    fn kv_bytes_of_the_h20_profile_follow_from_the_model() {
        let profile = Profile::shipped(Profile::DEFAULT).unwrap();
        assert_eq!(profile.model.kv_bytes_per_token, 2 * 48 * 4 * 128 * 2);
        // 25.8 GiB of KV, as the report's engine printed.
        let pool_gib = (profile.memory.pool_tokens as u64 * profile.model.kv_bytes_per_token) as f64
            / (1u64 << 30) as f64;
        assert!((pool_gib - 25.8).abs() < 0.05, "{pool_gib}");
    }

    #[test]
    fn a_bad_profile_is_refused_by_field() {
        let text = SHIPPED[0].1;
        let zero = text.replace("layers = 48", "layers = 0");
        assert!(Profile::from_toml(&zero).unwrap_err().to_string().contains("model.layers is 0"));
        let endless = text.replace("gb_per_s = 55.0", "gb_per_s = inf");
        assert!(Profile::from_toml(&endless).unwrap_err().to_string().contains("host_link.gb_per_s"));
        let misspelt = text.replace("max_seqs", "max_sequences");
        assert!(Profile::from_toml(&misspelt).unwrap_err().to_string().contains("max_sequences"));
        let unknown = Profile::shipped("b300").unwrap_err().to_string();
        assert!(unknown.contains("h20-qwen3-coder-30b-a3b"), "{unknown}");
    }
}
