//! How long the GPU would take. This file knows constants, tokens and contexts.
//!
//! A step that computes `n_i` new tokens behind `c_i` tokens of context for each of its requests
//! takes
//!
//! ```text
//! t = max(floor, C_lin * sum(n_i) + C_att * sum(n_i * (c_i + n_i / 2)) + C_dec * sum(c_i of decodes))
//! ```
//!
//! `C_lin` is what the weights cost per token, `C_att` what attention costs per pair of query and
//! key, `C_dec` what a decode reads of its context, and the floor what it costs to launch a step at
//! all. A decode is a request with one new token. A cold prefill of n tokens in few steps thus
//! takes `C_lin * n + C_att * n^2 / 2`. Constants come from a
//! [`Profile`]; attention to a cached prefix is in the formula, which models with a cost per uncached token leave out.

use crate::profile::Profile;

/// One request's part of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepShare {
    /// Tokens whose KV exists already.
    pub context_tokens: usize,
    /// Tokens computed in the step.
    pub new_tokens: usize,
}

/// How the engine launches its kernels: what the shortest step takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Launch {
    /// One kernel after another.
    #[default]
    Eager,
    /// Recorded CUDA graphs.
    Graph,
}

/// The time model of one GPU with one model.
#[derive(Clone, Debug)]
pub struct LatencyModel {
    floor_us: f64,
    linear_us: f64,
    attention_us: f64,
    decode_us: f64,
    load_us: f64,
}

impl LatencyModel {
    /// The model with a profile's constants.
    pub fn new(profile: &Profile, launch: Launch) -> LatencyModel {
        let step = &profile.step;
        LatencyModel {
            floor_us: match launch {
                Launch::Eager => step.floor_eager_us,
                Launch::Graph => step.floor_graph_us,
            },
            linear_us: step.linear_us_per_token,
            attention_us: step.attention_ns_per_pair / 1e3,
            decode_us: step.decode_ns_per_context_token / 1e3,
            // Bytes / (10^9 bytes per second) in microseconds.
            load_us: profile.model.kv_bytes_per_token as f64 / profile.host_link.gb_per_s / 1e3,
        }
    }

    /// Microseconds that a step of these shares takes; 0 for a step without work.
    pub fn step_us(&self, shares: impl IntoIterator<Item = StepShare>) -> f64 {
        let (mut work_us, mut tokens) = (0.0, 0);
        for StepShare { context_tokens, new_tokens } in shares {
            let (context, new) = (context_tokens as f64, new_tokens as f64);
            work_us += self.linear_us * new + self.attention_us * new * (context + new / 2.0);
            work_us += if new_tokens == 1 { self.decode_us * context } else { 0.0 };
            tokens += new_tokens;
        }
        if tokens == 0 { 0.0 } else { work_us.max(self.floor_us) }
    }

    /// Microseconds that the KV of `tokens` tokens, in its real size, spends on the GPU's host
    /// link.
    pub fn load_us(&self, tokens: usize) -> f64 {
        self.load_us * tokens as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn model(launch: Launch) -> LatencyModel {
        LatencyModel::new(&Profile::shipped(Profile::DEFAULT).unwrap(), launch)
    }

    #[test]
    fn an_empty_step_takes_no_time_and_any_other_at_least_the_floor() {
        let (eager, graph) = (model(Launch::Eager), model(Launch::Graph));
        assert_eq!(eager.step_us([]), 0.0);
        let decode = StepShare { context_tokens: 1_000, new_tokens: 1 };
        assert_eq!(eager.step_us([decode]), 50_000.0);
        assert_eq!(graph.step_us([decode]), 7_200.0);
    }

    #[test]
    fn a_cached_prefix_still_costs_attention() {
        let graph = model(Launch::Graph);
        let warm = graph.step_us([StepShare { context_tokens: 100_000, new_tokens: 2_000 }]);
        let short = graph.step_us([StepShare { context_tokens: 0, new_tokens: 2_000 }]);
        // 2,000 x 100,000 pairs at 5.904 ns.
        assert!((warm - short - 1_180_800.0).abs() < 1.0, "{warm} {short}");
    }

    #[test]
    fn loading_takes_what_the_link_needs_for_the_real_bytes() {
        // 75,000 tokens of 98,304 bytes are 7.37 GB.
        let load_us = model(Launch::Eager).load_us(75_000);
        assert!((load_us - 75_000.0 * 98_304.0 / 55e9 * 1e6).abs() < 1.0, "{load_us}");
    }
}
