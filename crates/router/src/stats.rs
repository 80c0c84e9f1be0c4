//! The router's figures: what is counted and in which units.

use crate::hand_over::HandOverEnd;
use crate::health::Failure;
use crate::policy::Reason;
use crate::rank_events::Counts;
use crate::reported_load::Unread;
use prometheus_client::metrics::histogram::Histogram;

/// Everything at one moment.
#[derive(Debug, Clone)]
pub struct RouterStats {
    /// Name of the policy.
    pub policy: &'static str,
    pub decisions: u64,
    /// Requests that were sent somewhere, by what settled where, in the order of [`Reason::NAMES`].
    pub reasons: [u64; Reason::NAMES.len()],
    /// Prompt chunks of all requests.
    pub prompt_chunks: u64,
    /// How many different ones, about.
    pub distinct_prompt_chunks: u64,
    /// One entry per backend, in the order they were given.
    pub backends: Vec<BackendStats>,
    /// One entry per store, in the order in which engines name them.
    pub stores: Vec<StoreStats>,
}

/// A store of KV that engines share.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoreStats {
    pub name: String,
    /// Prompt chunks that the router remembers of it.
    pub chunks: usize,
}

/// One backend at one moment, and its totals since the start. Tokens in flight are estimates,
/// totals of tokens are as the engines counted them.
#[derive(Debug, Clone)]
pub struct BackendStats {
    pub name: String,
    /// Requests may be sent to it.
    pub up: bool,
    /// `serving`, `draining` or `leaving`.
    pub membership: &'static str,
    /// Requests in flight.
    pub in_flight: u32,
    /// Requests there that the router has not sent, as far as the engine's metrics tell.
    pub others_in_flight: u64,
    /// Tokens whose KV fits its GPU.
    pub pool_tokens: u64,
    /// Prompt tokens that it has yet to compute.
    pub pending_prefill_tokens: u64,
    /// Prompt tokens of its requests in flight.
    pub context_tokens: u64,
    /// Prompt chunks that the router remembers of it.
    pub index_chunks: usize,
    /// Requests that it answered to the end.
    pub answered: u64,
    /// Requests whose client went away.
    pub cancelled: u64,
    /// Attempts that failed, in the order of [`Failure::NAMES`].
    pub failures: [u64; Failure::NAMES.len()],
    /// Hand-overs of prompts that it was to compute, in the order of [`HandOverEnd::NAMES`].
    pub hand_overs: [u64; HandOverEnd::NAMES.len()],
    /// Attempts to read its metrics that failed, in the order of [`Unread::NAMES`].
    pub unread_metrics: [u64; Unread::NAMES.len()],
    /// It is known by its KV events how much it holds.
    pub kv_events_followed: bool,
    /// Blocks that it holds by them; 0 where that is not known.
    pub kv_live_blocks: u64,
    /// What was counted of its KV events.
    pub kv_events: Counts,
    /// How often it was taken out of use.
    pub ejections: u64,
    /// Tokens of answered prompts, where the answer reported what was cached.
    pub prompt_tokens: u64,
    pub cached_tokens: u64,
    /// How many of them the router believed that it had cached.
    pub predicted_tokens: u64,
    /// Predicted and not cached, summed over requests.
    pub over_predicted_tokens: u64,
    /// Cached and not predicted, summed over requests.
    pub under_predicted_tokens: u64,
    /// Answers that reported the prompt's length and not what of it was cached: nothing is learned
    /// from them.
    pub without_cached_tokens: u64,
    /// From the decision to the first byte of the answer.
    pub first_byte_seconds: Histogram,
    /// What these times were predicted to be, summed.
    pub predicted_first_byte_seconds: f64,
    /// From the decision to the end of a whole answer.
    pub request_seconds: Histogram,
    /// Of streams: the time for each token after the first.
    pub output_token_seconds: Histogram,
}

impl BackendStats {
    /// No events yet.
    pub fn new(name: &str) -> BackendStats {
        BackendStats {
            name: name.to_owned(),
            up: true,
            membership: "serving",
            in_flight: 0,
            others_in_flight: 0,
            pool_tokens: 0,
            unread_metrics: [0; Unread::NAMES.len()],
            kv_events_followed: false,
            kv_live_blocks: 0,
            kv_events: Counts::default(),
            pending_prefill_tokens: 0,
            context_tokens: 0,
            index_chunks: 0,
            answered: 0,
            cancelled: 0,
            failures: [0; Failure::NAMES.len()],
            hand_overs: [0; HandOverEnd::NAMES.len()],
            ejections: 0,
            prompt_tokens: 0,
            cached_tokens: 0,
            predicted_tokens: 0,
            over_predicted_tokens: 0,
            under_predicted_tokens: 0,
            without_cached_tokens: 0,
            first_byte_seconds: Histogram::new(FIRST_BYTE_BOUNDS_SECONDS),
            predicted_first_byte_seconds: 0.0,
            request_seconds: Histogram::new(REQUEST_BOUNDS_SECONDS),
            output_token_seconds: Histogram::new(OUTPUT_TOKEN_BOUNDS_SECONDS),
        }
    }

    /// Counts a failed attempt.
    pub fn count_failure(&mut self, failure: Failure) {
        self.failures[failure as usize] += 1;
    }

    /// Counts how long the first byte of an answer took, and how long it was to take.
    pub fn count_first_byte(&mut self, waited_us: u64, predicted_us: u64) {
        self.first_byte_seconds.observe(waited_us as f64 / 1e6);
        self.predicted_first_byte_seconds += predicted_us as f64 / 1e6;
    }

    /// Counts how long each token of a stream took after the first.
    pub fn count_output_tokens(&mut self, output_us: u64, tokens: u64) {
        if tokens > 1 {
            self.output_token_seconds.observe(output_us as f64 / 1e6 / (tokens - 1) as f64);
        }
    }
}

/// Upper bounds of the histograms' buckets: from a warm hit on an idle engine to a cold 100 k
/// prompt behind a queue,
const FIRST_BYTE_BOUNDS_SECONDS: [f64; 12] =
    [0.005, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0];
/// from a few tokens to a long answer in a full engine,
const REQUEST_BOUNDS_SECONDS: [f64; 12] =
    [0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0];
/// and from a small model alone to decodes that wait for the prefills of others.
const OUTPUT_TOKEN_BOUNDS_SECONDS: [f64; 12] =
    [0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.06, 0.1, 0.2, 0.5, 2.0];
