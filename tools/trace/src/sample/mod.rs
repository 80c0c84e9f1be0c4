//! `sample`: a smaller trace out of a large one, in one pass and bounded memory.
//!
//! A sample thins the trace by families of requests: each family, a session with its sub-agents, is
//! kept whole or left out whole, by a hash of its name and the seed. Thinning a stream of
//! independent sessions keeps their arrival process at a lower rate, and whole families keep what
//! they reuse of their own. Where the trace records no sessions, families are inferred from prompts
//! that continue each other; thinning such a trace request by request would destroy its reuse. A
//! window of time may be cut out as well: it has the families that begin in it, whole. Time is
//! never compressed. What the sample did to reuse is measured and reported.

mod family;

use crate::format::{TraceError, TraceReader};
use crate::prefix::KeySet;
use crate::request::{OutOfOrder, TraceRequest};
use crate::reuse::{Reuse, ReuseCounter};
use crate::tokens::mix;
use family::Families;
use serde::Serialize;

/// The most families that a sample may have, together with those that begin before its window.
pub const MAX_FAMILIES: usize = 1 << 24;

/// What to keep.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SampleOptions {
    /// The share of all families to keep, above 0 and up to 1.
    pub keep: f64,
    /// Which ones. With one seed, a smaller share is part of a larger one.
    pub seed: u64,
    /// Families that begin earlier are left out, and arrivals count from here.
    pub start_us: u64,
    /// Families that begin this long after the start, or later, are left out.
    pub span_us: Option<u64>,
}

impl Default for SampleOptions {
    /// Keeps everything.
    fn default() -> SampleOptions {
        SampleOptions { keep: 1.0, seed: 0, start_us: 0, span_us: None }
    }
}

/// What a sample is made of.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct SampleReport {
    /// Requests in the trace.
    pub requests: u64,
    /// Requests of the trace that stand behind one that arrives later.
    pub out_of_order: usize,
    pub kept_requests: u64,
    pub kept_families: usize,
    /// Whether families are the recorded sessions, or were inferred from prompts.
    pub sessions_recorded: bool,
    /// Reuse in the trace, where it has prefix information.
    pub reuse: Option<Reuse>,
    pub kept_reuse: Option<Reuse>,
}

/// Why no sample could be made.
#[derive(Debug, thiserror::Error)]
pub enum SampleError {
    /// The trace could not be read.
    #[error(transparent)]
    Trace(#[from] TraceError),
    /// The sample could not be written.
    #[error("the sample could not be written: {0}")]
    Write(#[from] std::io::Error),
    /// The share to keep is none.
    #[error("keep: {0}, allowed above 0 and up to 1")]
    Keep(f64),
    /// There are more families than are told apart.
    #[error(
        "more than {MAX_FAMILIES} sessions in the sample or before its window: keep less, or choose an earlier window"
    )]
    TooManyFamilies,
}

/// Reads a trace to its end and hands the requests of the sample to `write`, in the same order.
pub fn sample(
    reader: &mut TraceReader,
    options: SampleOptions,
    mut write: impl FnMut(&TraceRequest) -> std::io::Result<()>,
) -> Result<SampleReport, SampleError> {
    let mut sampler = Sampler::new(options, reader.format().records_sessions())?;
    for request in reader {
        if let Some(kept) = sampler.pass(request?)? {
            write(&kept)?;
        }
    }
    Ok(sampler.report())
}

/// Decides for one request after the other.
pub struct Sampler {
    options: SampleOptions,
    sessions_recorded: bool,
    families: Families,
    highest_kept: u64,
    began_earlier: KeySet,
    kept: KeySet,
    order: OutOfOrder,
    requests: u64,
    kept_requests: u64,
    reuse: ReuseCounter,
    kept_reuse: ReuseCounter,
}

impl Sampler {
    /// A sampler for a trace that does or does not record sessions.
    pub fn new(options: SampleOptions, sessions_recorded: bool) -> Result<Sampler, SampleError> {
        if !(options.keep > 0.0 && options.keep <= 1.0) {
            return Err(SampleError::Keep(options.keep));
        }
        Ok(Sampler {
            options,
            sessions_recorded,
            families: Families::new(sessions_recorded),
            // The conversion saturates: a share of 1 keeps every hash.
            highest_kept: (options.keep * u64::MAX as f64) as u64,
            began_earlier: KeySet::default(),
            kept: KeySet::default(),
            order: OutOfOrder::default(),
            requests: 0,
            kept_requests: 0,
            reuse: ReuseCounter::default(),
            kept_reuse: ReuseCounter::default(),
        })
    }

    /// The next request as the sample has it, or `None` when it is left out.
    pub fn pass(&mut self, mut request: TraceRequest) -> Result<Option<TraceRequest>, SampleError> {
        let family = self.families.of(&request);
        self.requests += 1;
        self.order.add(&request);
        self.reuse.add(&request);
        if !self.keeps(family, request.arrival_us) {
            return Ok(None);
        }
        if self.kept.len() + self.began_earlier.len() > MAX_FAMILIES {
            return Err(SampleError::TooManyFamilies);
        }
        self.kept_requests += 1;
        self.kept_reuse.add(&request);
        request.arrival_us = request.arrival_us.saturating_sub(self.options.start_us);
        Ok(Some(request))
    }

    fn keeps(&mut self, family: u64, arrival_us: u64) -> bool {
        if mix(family ^ mix(self.options.seed)) > self.highest_kept {
            return false;
        }
        if self.kept.contains(&family) {
            return true;
        }
        let Some(since_start_us) = arrival_us.checked_sub(self.options.start_us) else {
            self.began_earlier.insert(family);
            return false;
        };
        let in_window = self.options.span_us.is_none_or(|span_us| since_start_us < span_us);
        in_window && !self.began_earlier.contains(&family) && self.kept.insert(family)
    }

    pub fn report(&self) -> SampleReport {
        SampleReport {
            requests: self.requests,
            out_of_order: self.order.count(),
            kept_requests: self.kept_requests,
            kept_families: self.kept.len(),
            sessions_recorded: self.sessions_recorded,
            reuse: self.reuse.reuse(),
            kept_reuse: self.kept_reuse.reuse(),
        }
    }
}
