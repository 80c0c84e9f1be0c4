//! `info --tiers`: what a memory tier above an SSD tier would have held of a trace, under each
//! admission policy.

mod model;
mod size;
mod system;
mod text;

pub use model::ModelCost;
pub use size::{SizeError, TierSize, TierSizes};

use crate::format::TraceError;
use crate::info::PrefixInfo;
use crate::prefix::prefix_keys;
use crate::request::TraceRequest;
use forebay_store::admission::{AdmissionConfig, Chunk, ChunkKey, Policy};
use serde::Serialize;
use system::System;

/// What is to be tried.
#[derive(Debug, Clone, PartialEq)]
pub struct TierStudy {
    pub sizes: Vec<TierSizes>,
    /// Policies, each with each of the sizes.
    pub policies: Vec<Policy>,
    /// The model whose KV it is.
    pub model: ModelCost,
    /// Bytes that may be written to the SSD in any 24 hours.
    pub endurance_bytes_per_day: Option<u64>,
}

/// What came of it.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct TierReport {
    pub kv_bytes_per_token: u32,
    /// Sizes by policies, in the order of the study.
    pub rows: Vec<TierRow>,
}

/// What tiers of given sizes did under one policy. Shares are of 1; hits are blocks that were held together with all
/// before them.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct TierRow {
    /// The sizes, as they were asked for.
    pub tiers: String,
    /// Size of the memory tier.
    pub memory_bytes: u64,
    /// Size of the SSD tier.
    pub ssd_bytes: u64,
    /// The policy.
    pub admission: String,
    /// Blocks found in memory, of all blocks.
    pub memory_hits: f64,
    /// Blocks found on the SSD and not in memory, of all blocks.
    pub ssd_hits: f64,
    /// FLOP of prefill that hits of both tiers saved, of all FLOP of prefill.
    pub flop_saved: f64,
    /// Written to the SSD.
    pub written_bytes: u64,
    /// Found on the SSD and not in memory.
    pub ssd_hit_bytes: u64,
    /// Not written for want of endurance budget.
    pub over_budget_bytes: u64,
    /// The requests during which the adaptive policy admitted all chunks, of all requests.
    pub admitted_all: Option<f64>,
}

impl TierRow {
    /// How often a byte that was written was found on the SSD; 0 when none was written.
    pub fn hits_per_written_byte(&self) -> f64 {
        self.ssd_hit_bytes as f64 / self.written_bytes.max(1) as f64
    }
}

impl TierStudy {
    /// Replays the requests of a trace against every combination. `prefix` is what [`info`](crate::info::info) found out
    /// about the same trace.
    ///
    /// # Errors
    /// The first of the requests that is one.
    pub fn run(
        &self,
        requests: impl IntoIterator<Item = Result<TraceRequest, TraceError>>,
        prefix: &PrefixInfo,
    ) -> Result<TierReport, TraceError> {
        let mut systems = self.systems(prefix);
        let mut chain = Vec::new();
        for request in requests {
            let request = request?;
            let bytes = self.block_bytes(request.block_tokens);
            chain.clear();
            chain.extend(prefix_keys(&request).map(|hash| Chunk { key: ChunkKey::from_hash(hash), bytes }));
            for system in &mut systems {
                system.serve(&request, &chain, &self.model);
            }
        }
        let rows = systems.iter().map(System::row).collect();
        Ok(TierReport { kv_bytes_per_token: self.model.kv_bytes_per_token, rows })
    }

    fn systems(&self, prefix: &PrefixInfo) -> Vec<System> {
        let combinations =
            self.sizes.iter().flat_map(|sizes| self.policies.iter().map(move |policy| (*sizes, *policy)));
        combinations
            .map(|(sizes, policy)| {
                let ssd_blocks = self.blocks(sizes.ssd, prefix);
                let block_bytes = self.block_bytes(prefix.block_tokens);
                let config = AdmissionConfig {
                    policy,
                    memory_bytes: self.blocks(sizes.memory, prefix).saturating_mul(block_bytes),
                    ssd_bytes: ssd_blocks.saturating_mul(block_bytes),
                    // No more can ever be there.
                    ssd_chunks: ssd_blocks.min(prefix.distinct_blocks as u64),
                    endurance_bytes_per_day: self.endurance_bytes_per_day,
                };
                System::new(sizes, config)
            })
            .collect()
    }

    /// Whole blocks of a tier.
    fn blocks(&self, size: TierSize, prefix: &PrefixInfo) -> u64 {
        match size {
            TierSize::Percent(percent) => (prefix.distinct_blocks as f64 * percent / 100.0) as u64,
            TierSize::Tokens(tokens) => tokens / u64::from(prefix.block_tokens.max(1)),
            TierSize::Bytes(bytes) => bytes / self.block_bytes(prefix.block_tokens).max(1),
        }
    }

    fn block_bytes(&self, block_tokens: u32) -> u64 {
        u64::from(block_tokens) * u64::from(self.model.kv_bytes_per_token)
    }
}
