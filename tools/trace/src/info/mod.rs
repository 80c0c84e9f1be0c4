//! `info`: what a trace is like, in the figures that decide how hard it is on a cache. One pass
//! over the requests; memory grows with the number of requests (a few words each) and of distinct
//! blocks, and both have limits.

mod caches;
mod load;
mod sessions;
mod text;

pub use crate::quantile::ValueSummary;
pub use caches::{CacheInfo, InfoError, MAX_DISTINCT_BLOCKS, MAX_REQUESTS, PrefixInfo};
pub use load::{ImbalanceInfo, LoadInfo};
pub use sessions::SessionInfo;

use crate::format::{Format, TraceReader};
use crate::request::{OutOfOrder, TraceRequest};
use caches::Caches;
use load::Load;
use serde::Serialize;
use sessions::Sessions;

/// Cache sizes that are looked at by default, in tokens: the KV of Qwen3-Coder-30B-A3B that fits on
/// one, 8 and 32 H20 with 96 GB (281,888 tokens each).
pub const DEFAULT_CACHE_TOKENS: [u64; 3] = [281_888, 8 * 281_888, 32 * 281_888];

/// Context lengths for which the share of prompts that fit is told: 128 Ki tokens, and Claude's
/// 200,000.
const CONTEXT_LENGTHS: [u32; 2] = [131_072, 200_000];

/// What a trace is like. Shares are of 1.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Info {
    /// The format it was read in.
    pub format: String,
    pub requests: usize,
    /// How many bad lines were left out.
    pub skipped_lines: u64,
    /// From the first arrival to the last, in seconds.
    pub span_s: f64,
    /// Requests per second over that time; 0 when all arrive at once.
    pub requests_per_s: f64,
    /// Requests that stand behind one that arrives later.
    pub out_of_order: usize,
    /// Prompt lengths.
    pub input_tokens: ValueSummary,
    /// Answer lengths.
    pub output_tokens: ValueSummary,
    /// All prompt tokens for each answer token.
    pub input_per_output: f64,
    /// Prompt tokens as a share of all tokens.
    pub prefill_share: f64,
    /// The share of prompts that fit into a context length.
    pub fits: Vec<FitInfo>,
    /// Prefixes and caches, where the trace has prefix information.
    pub prefix: Option<PrefixInfo>,
    /// Conversations, where the trace records them.
    pub sessions: Option<SessionInfo>,
    /// What they make of engines, where the trace records them.
    pub load: Option<LoadInfo>,
}

/// The share of prompts that fit into a context length.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct FitInfo {
    pub context_tokens: u32,
    /// The share of prompts that are not longer.
    pub share: f64,
}

/// Reads a trace to its end and says what it is like; `cache_tokens` are the sizes of caches to
/// try.
pub fn info(reader: &mut TraceReader, cache_tokens: &[u64]) -> Result<Info, InfoError> {
    let mut survey = Survey::new(cache_tokens);
    for request in reader.by_ref() {
        survey.add(&request?)?;
    }
    survey.finish(reader.format(), reader.skipped().lines)
}

struct Survey {
    requests: usize,
    first_us: u64,
    last_us: u64,
    order: OutOfOrder,
    input: Vec<f32>,
    output: Vec<f32>,
    all_input: u64,
    all_output: u64,
    fitting: [u64; CONTEXT_LENGTHS.len()],
    caches: Caches,
    sessions: Sessions,
    load: Load,
}

impl Survey {
    fn new(cache_tokens: &[u64]) -> Survey {
        Survey {
            requests: 0,
            first_us: u64::MAX,
            last_us: 0,
            order: OutOfOrder::default(),
            input: Vec::new(),
            output: Vec::new(),
            all_input: 0,
            all_output: 0,
            fitting: [0; CONTEXT_LENGTHS.len()],
            caches: Caches::new(cache_tokens),
            sessions: Sessions::default(),
            load: Load::default(),
        }
    }

    fn add(&mut self, request: &TraceRequest) -> Result<(), InfoError> {
        if self.requests >= MAX_REQUESTS {
            return Err(InfoError::TooLarge { what: "requests", limit: MAX_REQUESTS });
        }
        self.requests += 1;
        self.first_us = self.first_us.min(request.arrival_us);
        self.last_us = self.last_us.max(request.arrival_us);
        self.order.add(request);
        self.input.push(request.input_tokens as f32);
        self.output.push(request.output_tokens as f32);
        self.all_input += u64::from(request.input_tokens);
        self.all_output += u64::from(request.output_tokens);
        for (fitting, context_tokens) in self.fitting.iter_mut().zip(CONTEXT_LENGTHS) {
            *fitting += u64::from(request.input_tokens <= context_tokens);
        }
        self.sessions.add(request);
        let new_tokens = self.caches.add(request)?;
        self.load.add(request, new_tokens);
        Ok(())
    }

    fn finish(self, format: Format, skipped_lines: u64) -> Result<Info, InfoError> {
        let empty = || InfoError::Empty { skipped_lines };
        let span_s = self.last_us.saturating_sub(self.first_us) as f64 / 1e6;
        let requests = self.requests as f64;
        let fit = |(context_tokens, &fitting): (u32, &u64)| FitInfo {
            context_tokens,
            share: fitting as f64 / requests,
        };
        let sessions = self.sessions.finish();
        Ok(Info {
            format: format.to_string(),
            requests: self.requests,
            skipped_lines,
            span_s,
            requests_per_s: if span_s > 0.0 { requests / span_s } else { 0.0 },
            out_of_order: self.order.count(),
            input_tokens: ValueSummary::of(self.input).ok_or_else(empty)?,
            output_tokens: ValueSummary::of(self.output).ok_or_else(empty)?,
            input_per_output: self.all_input as f64 / self.all_output.max(1) as f64,
            prefill_share: self.all_input as f64 / (self.all_input + self.all_output) as f64,
            fits: CONTEXT_LENGTHS.into_iter().zip(&self.fitting).map(fit).collect(),
            prefix: self.caches.finish(),
            load: sessions.as_ref().and_then(|_| self.load.finish()),
            sessions,
        })
    }
}
