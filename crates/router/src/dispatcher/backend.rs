//! One backend as the dispatcher keeps it: its load, its health, whether it takes part, and what it
//! reports. It knows one backend's numbers.

use super::hand_overs::Partner;
use crate::chain::CHUNK_BYTES;
use crate::health::{Health, Thresholds};
use crate::reported_cache::ReportedCache;
use crate::reported_load::ReportedLoad;
use crate::request::Endpoint;
use crate::stats::BackendStats;
use crate::usage::Usage;

/// So many answers without cached tokens, to prompts that should have been cached, are told in the
/// log.
const SILENT_HITS: u32 = 8;

/// Whether a backend takes part.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Membership {
    /// It gets requests.
    Serving,
    /// It gets none until it serves again.
    Draining,
    /// It gets none, and is gone when those that it has have ended.
    Leaving,
    /// Its slot is free.
    Gone,
}

impl Membership {
    pub fn name(self) -> &'static str {
        match self {
            Membership::Serving => "serving",
            Membership::Draining => "draining",
            Membership::Leaving => "leaving",
            Membership::Gone => "gone",
        }
    }
}

#[derive(Debug)]
pub struct Backend {
    pub membership: Membership,
    /// Nobody else's, ever: another one may have this slot later.
    pub id: u64,
    pub health: Health,
    pub in_flight: u32,
    /// Of those, requests whose first byte has not come.
    pub waiting: u32,
    pub reported: ReportedLoad,
    pub cache: ReportedCache,
    /// Bytes of what came into its cache that are no whole chunk yet.
    stored_bytes: f64,
    pub pending_prefill_tokens: u64,
    pub pending_prefill_us: u64,
    pub context_tokens: u64,
    /// Calls whose answers have reported what was cached, one bit each.
    reports_cached: u8,
    /// Answers that should have reported it and did not.
    silent_hits: u32,
    /// How it did in hand-overs.
    pub partner: Partner,
    pub totals: BackendStats,
}

impl Backend {
    /// Requests before their first token, those of others included.
    pub fn waiting(&self, now_us: u64) -> u32 {
        let others = self.reported.others(now_us).waiting;
        self.waiting.saturating_add(u32::try_from(others).unwrap_or(u32::MAX))
    }

    /// Up and idle.
    pub fn new(name: &str, id: u64, thresholds: Thresholds) -> Backend {
        Backend {
            membership: Membership::Serving,
            id,
            health: Health::new(thresholds),
            in_flight: 0,
            waiting: 0,
            reported: ReportedLoad::default(),
            cache: ReportedCache::default(),
            stored_bytes: 0.0,
            pending_prefill_tokens: 0,
            pending_prefill_us: 0,
            context_tokens: 0,
            reports_cached: 0,
            silent_hits: 0,
            partner: Partner::default(),
            totals: BackendStats::new(name),
        }
    }

    /// May it get requests, if all is well with it?
    pub fn is_up(&self) -> bool {
        self.membership == Membership::Serving && self.health.is_up()
    }

    /// May it get requests where nobody else is up?
    pub fn is_last_resort(&self) -> bool {
        self.membership == Membership::Serving && self.health.is_last_resort()
    }

    /// A prompt is computed, or never will be.
    pub fn release_prefill(&mut self, tokens: u64, us: u64) {
        self.waiting -= 1;
        self.pending_prefill_tokens -= tokens;
        self.pending_prefill_us -= us;
    }

    /// Whole chunks that have come into its cache, now that so many tokens more have: a step may
    /// bring less than one.
    pub fn stored_chunks(&mut self, tokens: u64, bytes_per_token: f64) -> usize {
        let bytes = self.stored_bytes + tokens as f64 * bytes_per_token;
        self.stored_bytes = bytes % CHUNK_BYTES as f64;
        bytes as usize / CHUNK_BYTES
    }

    /// What of a prompt was cached. vLLM leaves the count out where it is zero, and everywhere
    /// unless it is asked to report it: what is left out means zero only where other answers to the
    /// same call have it.
    pub fn cached_tokens(&mut self, endpoint: Endpoint, usage: Usage, expected: bool) -> Option<u64> {
        let bit = 1 << endpoint as u8;
        if usage.cached_tokens.is_some() {
            self.reports_cached |= bit;
        } else if self.reports_cached & bit == 0 {
            self.totals.without_cached_tokens += 1;
            self.silent_hits = self.silent_hits.saturating_add(u32::from(expected));
            if expected && self.silent_hits == SILENT_HITS {
                let engine = &self.totals.name;
                tracing::warn!(engine, prompts = SILENT_HITS, "engine reports no cached tokens");
            }
            return None;
        }
        Some(usage.cached_tokens.unwrap_or(0))
    }
}
