//! What came of a study.

use serde::Serialize;

/// What came of it.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct TierReport {
    pub kv_bytes_per_token: u32,
    /// Sizes by policies, in the order of the study.
    pub rows: Vec<TierRow>,
}

/// What tiers of given sizes did under one policy. Shares are of 1; hits are blocks that were held
/// together with all before them.
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
