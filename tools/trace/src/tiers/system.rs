//! Simulates the requests of a trace on one memory tier and one SSD tier, with one admission policy
//! for the SSD. [`ModelCost`] is the size of a model's KV in bytes, and the FLOP that computing it
//! takes.

use super::report::TierRow;
use super::size::TierSizes;
use crate::request::TraceRequest;
use forebay_store::admission::{Admission, AdmissionConfig, Chunk, Lru, Verdict};

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
    fn prefill_flop(&self, tokens: u64) -> f64 {
        let tokens = tokens as f64;
        self.flop_per_token * tokens + self.flop_per_pair * tokens * tokens / 2.0
    }
}

/// The tiers, and what they did so far. Both drop the least recently used chunk, which is always a
/// leaf: a prompt's chunks are used from the last to the first.
pub(super) struct System {
    sizes: TierSizes,
    config: AdmissionConfig,
    memory: Lru,
    ssd: Lru,
    admission: Admission,
    served: Served,
}

/// Sums over all requests.
#[derive(Debug, Default)]
struct Served {
    requests: u64,
    requests_admitting_all: u64,
    blocks: u64,
    memory_blocks: u64,
    ssd_blocks: u64,
    ssd_hit_bytes: u64,
    flop: f64,
    flop_saved: f64,
}

impl System {
    pub fn new(sizes: TierSizes, config: AdmissionConfig) -> System {
        System {
            sizes,
            config,
            memory: Lru::new(config.memory_bytes),
            ssd: Lru::new(config.ssd_bytes),
            admission: Admission::new(config),
            served: Served::default(),
        }
    }

    /// Serves a request, whose chunks are given from the first.
    pub fn serve(&mut self, request: &TraceRequest, chain: &[Chunk], model: &ModelCost) {
        self.count(request, chain, model);
        self.admission.used(chain);
        for chunk in chain.iter().rev() {
            if !self.memory.contains(chunk.key) {
                self.ssd.touch(chunk.key);
            }
            self.memory.insert(*chunk);
        }
        while let Some(dropped) = self.memory.pop_excess() {
            self.demote(dropped, request.arrival_us);
        }
    }

    /// Counts what of the prompt is held without a gap.
    fn count(&mut self, request: &TraceRequest, chain: &[Chunk], model: &ModelCost) {
        let served = &mut self.served;
        let mut held = 0;
        for chunk in chain {
            if self.memory.contains(chunk.key) {
                served.memory_blocks += 1;
            } else if self.ssd.contains(chunk.key) {
                served.ssd_blocks += 1;
                served.ssd_hit_bytes = served.ssd_hit_bytes.saturating_add(chunk.bytes);
            } else {
                break;
            }
            held += u64::from(request.block_tokens);
        }
        let input = u64::from(request.input_tokens);
        served.requests += 1;
        served.requests_admitting_all +=
            u64::from(self.admission.adaptive().is_some_and(|adaptive| adaptive.admits_all));
        served.blocks += chain.len() as u64;
        served.flop += model.prefill_flop(input);
        served.flop_saved += model.prefill_flop(held.min(input));
    }

    fn demote(&mut self, chunk: Chunk, now_us: u64) {
        if self.ssd.touch(chunk.key) || self.admission.admit(chunk, now_us) != Verdict::Write {
            return;
        }
        self.ssd.insert(chunk);
        while self.ssd.pop_excess().is_some() {}
    }

    pub fn row(&self) -> TierRow {
        let (served, verdicts) = (&self.served, self.admission.verdicts());
        let of_blocks = |blocks: u64| blocks as f64 / served.blocks.max(1) as f64;
        TierRow {
            tiers: self.sizes.to_string(),
            memory_bytes: self.config.memory_bytes,
            ssd_bytes: self.config.ssd_bytes,
            admission: self.config.policy.to_string(),
            memory_hits: of_blocks(served.memory_blocks),
            ssd_hits: of_blocks(served.ssd_blocks),
            flop_saved: if served.flop > 0.0 { served.flop_saved / served.flop } else { 0.0 },
            written_bytes: verdicts.write_bytes,
            ssd_hit_bytes: served.ssd_hit_bytes,
            over_budget_bytes: verdicts.over_budget_bytes,
            admitted_all: self
                .admission
                .adaptive()
                .map(|_| served.requests_admitting_all as f64 / served.requests.max(1) as f64),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::prefix::prefix_keys;
    use crate::tiers::TierSize;
    use forebay_store::admission::{ChunkKey, Policy};
    use proptest::prelude::*;
    use std::collections::HashMap;

    const BLOCK_BYTES: u64 = 10;

    fn system(policy: Policy, memory_blocks: u64, ssd_blocks: u64) -> System {
        let size = TierSize::Tokens(0);
        let config = AdmissionConfig {
            policy,
            memory_bytes: memory_blocks * BLOCK_BYTES,
            ssd_bytes: ssd_blocks * BLOCK_BYTES,
            // Far more than there are, so that no chunk is taken for another.
            ssd_chunks: 1 << 12,
            endurance_bytes_per_day: None,
        };
        System::new(TierSizes { memory: size, ssd: size }, config)
    }

    /// A prompt that begins as others of its family do.
    fn prompt(family: u64, length: u64) -> TraceRequest {
        let blocks = (0..length).map(|block| family * 1_000 + block).collect();
        TraceRequest { block_tokens: 16, input_tokens: 16 * length as u32, blocks, ..TraceRequest::default() }
    }

    fn chain(request: &TraceRequest) -> Vec<Chunk> {
        let chunk = |hash| Chunk { key: ChunkKey::from_hash(hash), bytes: BLOCK_BYTES };
        prefix_keys(request).map(chunk).collect()
    }

    /// Two lists, the newest last, with `all` between them: hits in memory, hits on the SSD,
    /// writes.
    fn naive(prompts: &[TraceRequest], memory_blocks: usize, ssd_blocks: usize) -> (u64, u64, u64) {
        let (mut memory, mut ssd): (Vec<ChunkKey>, Vec<ChunkKey>) = (Vec::new(), Vec::new());
        let (mut in_memory, mut on_ssd, mut written) = (0, 0, 0);
        let renew = |list: &mut Vec<ChunkKey>, key: ChunkKey| {
            list.retain(|other| *other != key);
            list.push(key);
        };
        for keys in
            prompts.iter().map(|prompt| chain(prompt).iter().map(|chunk| chunk.key).collect::<Vec<_>>())
        {
            for key in keys.iter().take_while(|key| memory.contains(key) || ssd.contains(key)) {
                if memory.contains(key) { in_memory += 1 } else { on_ssd += 1 }
            }
            for key in keys.iter().rev() {
                if !memory.contains(key) && ssd.contains(key) {
                    renew(&mut ssd, *key);
                }
                renew(&mut memory, *key);
            }
            while memory.len() > memory_blocks {
                let key = memory.remove(0);
                written += u64::from(!ssd.contains(&key));
                renew(&mut ssd, key);
                if ssd.len() > ssd_blocks {
                    ssd.remove(0);
                }
            }
        }
        (in_memory, on_ssd, written)
    }

    proptest! {
        #[test]
        fn it_serves_what_two_naive_lists_would(
            prompts in prop::collection::vec((0u64..8, 0u64..12), 0..80),
            memory_blocks in 0u64..30,
            ssd_blocks in 0u64..60,
        ) {
            let prompts: Vec<TraceRequest> = prompts.into_iter().map(|(family, length)| prompt(family, length)).collect();
            let mut system = system(Policy::All, memory_blocks, ssd_blocks);
            for request in &prompts {
                system.serve(request, &chain(request), &ModelCost::DENSE_8B);
            }
            let written = system.row().written_bytes / BLOCK_BYTES;
            let found = (system.served.memory_blocks, system.served.ssd_blocks, written);
            prop_assert_eq!(found, naive(&prompts, memory_blocks as usize, ssd_blocks as usize));
        }

        /// What makes a sample of single chunks sound, and an unbroken prefix of whatever is held.
        #[test]
        fn what_is_held_has_all_before_it_held(
            prompts in prop::collection::vec((0u64..8, 1u64..12), 1..80),
            memory_blocks in 0u64..30,
            ssd_blocks in 0u64..60,
            second_hit in any::<bool>(),
        ) {
            let policy = if second_hit { Policy::SecondHit } else { Policy::All };
            let mut system = system(policy, memory_blocks, ssd_blocks);
            let mut parents: HashMap<ChunkKey, ChunkKey> = HashMap::new();
            for (family, length) in prompts {
                let request = prompt(family, length);
                let chain = chain(&request);
                parents.extend(chain.windows(2).map(|pair| (pair[1].key, pair[0].key)));
                system.serve(&request, &chain, &ModelCost::DENSE_8B);
                let held = |key: &ChunkKey| system.memory.contains(*key) || system.ssd.contains(*key);
                let orphans = parents.iter().filter(|(child, parent)| held(child) && !held(parent)).count();
                prop_assert_eq!(orphans, 0);
            }
        }
    }

    #[test]
    fn flops_are_those_of_the_tokens_held_and_no_more_than_the_prompt_has() {
        let mut system = system(Policy::All, 10, 10);
        let mut request = prompt(1, 4);
        // The last block is partial.
        request.input_tokens = 50;
        for _ in 0..2 {
            system.serve(&request, &chain(&request), &ModelCost::DENSE_8B);
        }
        assert_eq!(system.row().flop_saved, 0.5, "the second of two equal prompts is held in full");
        assert_eq!(ModelCost::DENSE_8B.prefill_flop(2), 2.0 * 16e9 + 2.0 * 524_288.0);
    }
}
