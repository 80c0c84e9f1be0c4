//! Profiles: the constants of one model on one GPU. This file knows where they are written and
//! which values make sense.

use serde::Deserialize;
use std::path::{Path, PathBuf};
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
    /// What a request costs outside of steps.
    pub api: ApiCosts,
    /// What the GPU has room for.
    pub memory: MemoryFacts,
    /// How the engine fills its steps.
    pub scheduler: SchedulerFacts,
    /// The path between host memory and the GPU.
    pub host_link: HostLinkFacts,
}

/// The model as it really is.
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

/// Constants of the step time; the formula is that of [`StepModel`](crate::StepModel).
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StepCosts {
    /// Everything that is linear in the tokens of a step.
    pub linear_us_per_token: f64,
    /// Attention, per pair of a query and a key.
    pub attention_ns_per_pair: f64,
    /// Reading the KV of a request's context, once a step.
    pub kv_read_ns_per_context_token: f64,
    /// What a request costs the host in each step.
    pub us_per_request: f64,
    /// Shortest step without CUDA graphs.
    pub floor_eager_us: f64,
    /// Shortest step with CUDA graphs.
    pub floor_graph_us: f64,
}

/// What a request costs in the API before its prompt reaches a step. The GPU does not wait for it.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ApiCosts {
    /// Whatever its length.
    pub us_per_request: f64,
    /// Per token of the prompt: hashing, tokenising.
    pub us_per_token: f64,
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
    #[error("unknown profile {name:?}; allowed are a file whose name ends in .toml, and: {shipped}")]
    Unknown { name: String, shipped: String },
    /// Not TOML, a field is missing, unknown or of the wrong type.
    #[error("profile: {0}")]
    Format(#[from] toml::de::Error),
    /// A file that cannot be read.
    #[error("profile {}: {source}", path.display())]
    File { path: PathBuf, source: std::io::Error },
    /// A value that no machine has.
    #[error("profile: {field} is {value}; it must be {allowed}")]
    Value { field: &'static str, value: f64, allowed: &'static str },
}

/// The profiles in the binary: name and text.
const SHIPPED: [(&str, &str); 3] = [
    ("h20-qwen3-coder-30b-a3b", include_str!("../profiles/h20-qwen3-coder-30b-a3b.toml")),
    ("h100-llama-3.1-8b", include_str!("../profiles/h100-llama-3.1-8b.toml")),
    ("h200-llama-3.1-8b", include_str!("../profiles/h200-llama-3.1-8b.toml")),
];

impl Profile {
    /// Used when none is named.
    pub const DEFAULT: &str = SHIPPED[0].0;

    /// The names of all shipped profiles.
    pub fn names() -> impl Iterator<Item = &'static str> {
        SHIPPED.into_iter().map(|(name, _)| name)
    }

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

    /// The profile in a file if `name` ends in `.toml`, as `forebay calibrate` writes them, else
    /// the shipped one called so.
    pub fn find(name: &str) -> Result<Profile, ProfileError> {
        let path = Path::new(name);
        if path.extension().is_none_or(|extension| extension != "toml") {
            return Profile::shipped(name);
        }
        let text = std::fs::read_to_string(path);
        Profile::from_toml(&text.map_err(|source| ProfileError::File { path: path.to_owned(), source })?)
    }

    /// A profile from the text of a file.
    pub fn from_toml(text: &str) -> Result<Profile, ProfileError> {
        let profile: Profile = toml::from_str(text)?;
        profile.check()?;
        Ok(profile)
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
            ("step.floor_eager_us", self.step.floor_eager_us),
            ("step.floor_graph_us", self.step.floor_graph_us),
            ("host_link.gb_per_s", self.host_link.gb_per_s),
        ];
        if let Some((field, value)) =
            rates.into_iter().find(|(_, value)| !(value.is_finite() && *value > 0.0))
        {
            return Err(ProfileError::Value { field, value, allowed: "a finite number above 0" });
        }
        // A small engine shows none of these within what a measurement can tell apart.
        let costs = [
            ("step.attention_ns_per_pair", self.step.attention_ns_per_pair),
            ("step.kv_read_ns_per_context_token", self.step.kv_read_ns_per_context_token),
            ("step.us_per_request", self.step.us_per_request),
            ("api.us_per_request", self.api.us_per_request),
            ("api.us_per_token", self.api.us_per_token),
        ];
        match costs.into_iter().find(|(_, value)| !(value.is_finite() && *value >= 0.0)) {
            Some((field, value)) => {
                Err(ProfileError::Value { field, value, allowed: "a finite number, 0 or more" })
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
    fn a_profile_is_found_by_its_name_or_in_a_file() {
        let file = concat!(env!("CARGO_MANIFEST_DIR"), "/profiles/h100-llama-3.1-8b.toml");
        assert_eq!(Profile::find(file).unwrap(), Profile::find("h100-llama-3.1-8b").unwrap());
    }

    #[test]
    fn kv_bytes_of_each_profile_follow_from_its_model() {
        // K and V, layers, KV heads, their width, two bytes of bfloat16.
        let by_hand = [2 * 48 * 4 * 128 * 2, 2 * 32 * 8 * 128 * 2, 2 * 32 * 8 * 128 * 2];
        for (name, bytes) in Profile::names().zip(by_hand) {
            assert_eq!(Profile::shipped(name).unwrap().model.kv_bytes_per_token, bytes, "{name}");
        }
    }

    #[test]
    fn the_pool_of_the_h20_is_what_the_reports_engine_printed() {
        let profile = Profile::shipped("h20-qwen3-coder-30b-a3b").unwrap();
        let bytes = profile.memory.pool_tokens as u64 * profile.model.kv_bytes_per_token;
        let gib = bytes as f64 / (1u64 << 30) as f64;
        assert!((gib - 25.8).abs() < 0.05, "{gib}");
    }

    #[test]
    fn a_bad_profile_is_refused_by_field() {
        let text = SHIPPED[0].1;
        let zero = text.replace("layers = 48", "layers = 0");
        assert!(Profile::from_toml(&zero).unwrap_err().to_string().contains("model.layers is 0"));
        let endless = text.replace("gb_per_s = 55.0", "gb_per_s = inf");
        assert!(Profile::from_toml(&endless).unwrap_err().to_string().contains("host_link.gb_per_s"));
        let negative = text.replace("us_per_token = 1.1", "us_per_token = -1.1");
        let error = Profile::from_toml(&negative).unwrap_err().to_string();
        assert_eq!(error, "profile: api.us_per_token is -1.1; it must be a finite number, 0 or more");
        let misspelt = text.replace("max_seqs", "max_sequences");
        assert!(Profile::from_toml(&misspelt).unwrap_err().to_string().contains("max_sequences"));
        let absent = Profile::find("nowhere/b300.toml").unwrap_err().to_string();
        assert!(absent.starts_with("profile nowhere/b300.toml: "), "{absent}");
        let unknown = Profile::find("b300").unwrap_err().to_string();
        assert!(Profile::names().all(|name| unknown.contains(name)), "{unknown}");
    }
}
