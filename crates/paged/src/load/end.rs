//! How a load ended, and what came of it from where.

use crate::cost_model::Tier;
use std::collections::BTreeMap;

/// A load that has ended: nothing of it touches a page any more.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LoadEnd {
    pub job: u64,
    /// Tokens that may be used, from the first chunk's first one on.
    pub tokens: u64,
    pub why: Option<String>,
}

/// What came, of one load or of several.
#[derive(Debug, Clone)]
pub struct Loaded {
    pub bytes: TierBytes,
    /// Whether that was all. A load that fails has mostly waited.
    pub all: bool,
}

#[derive(Debug, Clone, Default)]
pub struct TierBytes(BTreeMap<Tier, u64>);

impl TierBytes {
    pub fn add(&mut self, tier: Tier, bytes: u64) {
        *self.0.entry(tier).or_default() += bytes;
    }

    pub fn add_all(&mut self, others: &TierBytes) {
        others.0.iter().for_each(|(tier, bytes)| self.add(*tier, *bytes));
    }

    pub fn sum(&self) -> u64 {
        self.0.values().sum()
    }

    pub fn iter(&self) -> impl Iterator<Item = (Tier, u64)> + '_ {
        self.0.iter().map(|(tier, bytes)| (*tier, *bytes))
    }

    /// The farthest place, and how many were there.
    pub fn farthest(&self) -> Option<(Tier, u64)> {
        self.0.last_key_value().map(|(tier, bytes)| (*tier, *bytes))
    }
}
