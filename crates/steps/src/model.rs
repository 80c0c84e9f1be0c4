//! The step model: what a step of an engine takes, and what one request adds to it. This file knows
//! constants, tokens and contexts.
//!
//! A step in which each of `R` requests computes `n_i` new tokens behind `c_i` tokens of context
//! takes
//!
//! ```text
//! t = max(floor, linear * sum(n_i))
//!   + attention * sum(n_i * (c_i + n_i / 2)) + kv_read * sum(c_i) + request * R
//! ```
//!
//! * `floor` is reading the weights and launching the kernels, `linear` the arithmetic with the
//!   weights per token. Both happen at once, so only this part hides under the floor.
//! * `attention` is the arithmetic per pair of query and key. A cached prefix costs it too.
//! * `kv_read` is reading the context's KV, once a step, whether for a decode or for a chunk of a
//!   prefill.
//! * `request` is what each request costs the host: sampling, metadata.
//!
//! Outside of steps a request pays the API: parsing, hashing and tokenising, a fixed time and a
//! time per prompt token, during which the GPU works for others.

use crate::profile::{ApiCosts, Profile, StepCosts};
use serde::{Deserialize, Serialize};

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

/// The time model of one model on one GPU.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct StepModel {
    floor_us: f64,
    linear_us: f64,
    attention_us: f64,
    kv_read_us: f64,
    request_us: f64,
    api_us: f64,
    api_token_us: f64,
}

impl StepModel {
    /// The model with a profile's constants.
    pub fn new(profile: &Profile, launch: Launch) -> StepModel {
        StepModel::of_costs(&profile.step, &profile.api, launch)
    }

    /// The model with these constants.
    pub fn of_costs(step: &StepCosts, api: &ApiCosts, launch: Launch) -> StepModel {
        StepModel {
            floor_us: match launch {
                Launch::Eager => step.floor_eager_us,
                Launch::Graph => step.floor_graph_us,
            },
            linear_us: step.linear_us_per_token,
            attention_us: step.attention_ns_per_pair / 1e3,
            kv_read_us: step.kv_read_ns_per_context_token / 1e3,
            request_us: step.us_per_request,
            api_us: api.us_per_request,
            api_token_us: api.us_per_token,
        }
    }

    /// Microseconds that a step of these shares takes; 0 for a step without work.
    pub fn step_us(&self, shares: impl IntoIterator<Item = StepShare>) -> f64 {
        self.mixed_step_us(0, 0, shares)
    }

    /// Microseconds of a step in which `requests` decode behind `context_tokens` in all, beside
    /// these shares; 0 for a step without work.
    pub fn mixed_step_us(
        &self,
        requests: u64,
        context_tokens: u64,
        shares: impl IntoIterator<Item = StepShare>,
    ) -> f64 {
        let (mut tokens, mut beside_us) = (requests as usize, self.decodes_us(requests, context_tokens));
        for share in shares.into_iter().filter(|share| share.new_tokens > 0) {
            tokens += share.new_tokens;
            let (new, context) = (share.new_tokens as f64, share.context_tokens as f64);
            beside_us += self.attention_us(new, context) + self.kv_read_us * context + self.request_us;
        }
        if tokens == 0 { 0.0 } else { self.floor_us.max(self.linear_us * tokens as f64) + beside_us }
    }

    /// Microseconds of steps that computing `new_tokens` behind `context_tokens` takes, however
    /// many steps it is cut into: the work that everybody at the engine waits for.
    pub fn prefill_us(&self, new_tokens: u64, context_tokens: u64) -> f64 {
        let new = new_tokens as f64;
        self.linear_us * new + self.attention_us(new, context_tokens as f64)
    }

    /// Microseconds by which `requests` decodes behind `context_tokens` in all make each step
    /// longer.
    pub fn decodes_us(&self, requests: u64, context_tokens: u64) -> f64 {
        let (requests, context) = (requests as f64, context_tokens as f64);
        self.request_us * requests
            + self.kv_read_us * context
            + self.attention_us * (context + requests / 2.0)
    }

    /// Microseconds of a step in which `requests` decode behind `context_tokens` in all.
    pub fn decode_step_us(&self, requests: u64, context_tokens: u64) -> f64 {
        self.floor_us.max(self.linear_us * requests as f64) + self.decodes_us(requests, context_tokens)
    }

    /// Microseconds that a prompt spends in the API, while steps go on.
    pub fn api_us(&self, prompt_tokens: usize) -> f64 {
        self.api_us + self.api_token_us * prompt_tokens as f64
    }

    /// The arithmetic of attention.
    fn attention_us(&self, new: f64, context: f64) -> f64 {
        self.attention_us * new * (context + new / 2.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn model(launch: Launch) -> StepModel {
        StepModel::new(&Profile::shipped(Profile::DEFAULT).unwrap(), launch)
    }

    fn share(context_tokens: usize, new_tokens: usize) -> StepShare {
        StepShare { context_tokens, new_tokens }
    }

    #[test]
    fn an_empty_step_takes_no_time() {
        assert_eq!(model(Launch::Eager).step_us([]), 0.0);
        assert_eq!(model(Launch::Eager).step_us([share(1_000, 0)]), 0.0);
    }

    #[test]
    fn a_step_follows_the_formula() {
        // By hand: the floor, 1,000.5 pairs at 5.904 ns, 1,000 tokens read at 24.576 ns, a request.
        let decode_us = 50_000.0 + 5.906952 + 24.576 + 50.0;
        assert!((model(Launch::Eager).step_us([share(1_000, 1)]) - decode_us).abs() < 1e-6);
        let graph = model(Launch::Graph);
        assert!((graph.step_us([share(1_000, 1)]) - (decode_us - 42_800.0)).abs() < 1e-6);
        // 8,000 tokens at 61.5 us are more than the floor; 32 million pairs; nothing to read.
        let prefill_us = 492_000.0 + 188_928.0 + 50.0;
        assert!((graph.step_us([share(0, 8_000)]) - prefill_us).abs() < 1e-6);
    }

    #[test]
    fn only_the_linear_part_hides_under_the_floor() {
        let graph = model(Launch::Graph);
        let [alone, with_context] = [0, 100_000].map(|context| graph.step_us([share(context, 1)]));
        assert!(with_context > alone + 3_000.0, "{alone} {with_context}");
    }

    #[test]
    fn a_cached_prefix_still_costs_attention() {
        let graph = model(Launch::Graph);
        let warm = graph.step_us([share(100_000, 2_000)]);
        let short = graph.step_us([share(0, 2_000)]);
        // 2,000 x 100,000 pairs at 5.904 ns, and 100,000 tokens read at 24.576 ns.
        assert!((warm - short - 1_180_800.0 - 2_457.6).abs() < 1e-3, "{warm} {short}");
    }

    fn any_profile() -> impl Strategy<Value = Profile> {
        prop::sample::select(Profile::names().collect::<Vec<_>>())
            .prop_map(|name| Profile::shipped(name).unwrap())
    }

    fn any_share() -> impl Strategy<Value = StepShare> {
        let new_tokens = prop_oneof![Just(1), 1..10_000_usize];
        (0..200_000_usize, new_tokens).prop_map(|(context, new)| share(context, new))
    }

    proptest! {
        #[test]
        fn a_step_with_more_tokens_is_never_shorter(
            profile in any_profile(),
            mut shares in prop::collection::vec(any_share(), 1..20),
            (more_context, more_new) in (0..5_000_usize, 0..200_usize),
        ) {
            let model = StepModel::new(&profile, Launch::Graph);
            let before = model.step_us(shares.clone());
            shares[0].context_tokens += more_context;
            shares[0].new_tokens += more_new;
            let longer = model.step_us(shares.clone());
            prop_assert!(longer >= before);
            shares.push(share(0, 1));
            prop_assert!(model.step_us(shares) > longer);
        }

        #[test]
        fn a_prefill_costs_the_same_however_it_is_cut(
            profile in any_profile(),
            (context, new) in (0..100_000_u64, 2..50_000_u64),
            cut in 1..50_000_u64,
        ) {
            let model = StepModel::new(&profile, Launch::Graph);
            let first = cut.min(new - 1);
            let whole = model.prefill_us(new, context);
            let parts = model.prefill_us(first, context) + model.prefill_us(new - first, context + first);
            prop_assert!((parts / whole - 1.0).abs() < 1e-9, "{} {}", parts, whole);
        }

        #[test]
        fn decodes_add_to_a_step_what_the_model_says_they_add(
            profile in any_profile(),
            contexts in prop::collection::vec(1..100_000_usize, 1..100),
            context in 1..100_000_usize,
        ) {
            // Under the floor: the linear part of a hundred decodes is below it in every profile.
            let model = StepModel::new(&profile, Launch::Graph);
            let before = model.step_us(contexts.iter().map(|&context| share(context, 1)));
            let all = contexts.iter().copied().chain([context]);
            let added = model.step_us(all.map(|context| share(context, 1))) - before;
            prop_assert!((added - model.decodes_us(1, context as u64)).abs() < 1e-6 * before);
            let step = model.decode_step_us(contexts.len() as u64, contexts.iter().sum::<usize>() as u64);
            prop_assert!((step / before - 1.0).abs() < 1e-9, "{} {}", step, before);
        }

        #[test]
        fn a_mixed_step_takes_what_all_of_its_shares_take(
            profile in any_profile(),
            contexts in prop::collection::vec(1..100_000_usize, 0..50),
            chunks in prop::collection::vec(any_share(), 0..4),
        ) {
            let model = StepModel::new(&profile, Launch::Graph);
            let decodes = contexts.iter().map(|&context| share(context, 1));
            let whole = model.step_us(decodes.chain(chunks.iter().copied()));
            let context_tokens = contexts.iter().sum::<usize>() as u64;
            let mixed = model.mixed_step_us(contexts.len() as u64, context_tokens, chunks);
            prop_assert!((mixed - whole).abs() <= 1e-9 * whole, "{} {}", mixed, whole);
        }
    }
}
