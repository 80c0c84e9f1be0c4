//! `info --tiers`: what a memory tier above an SSD tier would have held of a trace, under each
//! admission policy.

mod report;
mod size;
mod system;

pub use report::{TierReport, TierRow};
pub use size::{SizeError, TierSize, TierSizes};
pub use system::ModelCost;

use crate::format::TraceError;
use crate::info::PrefixInfo;
use crate::prefix::prefix_keys;
use crate::request::TraceRequest;
use forebay_store::admission::{AdmissionConfig, Chunk, ChunkKey, Policy};
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

impl TierStudy {
    /// Replays the requests of a trace against every combination. `prefix` is what
    /// [`info`](crate::info::info) found out about the same trace.
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
