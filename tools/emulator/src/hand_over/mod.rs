//! A prompt that one engine computes and another one says the answer to, as vLLM with NixlConnector
//! or with Forebay's connector does it: the prefiller keeps the prompt's blocks until the decoder
//! has read them or their lease ends. A decoder reads them over HTTP, `GET /kv/{key}`.
//!
//! `params` knows the `kv_transfer_params`, `offers` what a prefiller keeps, `reads` how a decoder
//! gets it.

mod offers;
mod params;
mod reads;

pub use offers::{Offer, Offers};
pub use params::{PrefillParams, RequestParams, Role, Source};
pub use reads::Reads;

use crate::scheduler::RequestId;
use bytes::Bytes;
use std::time::Duration;

/// How long a prefiller keeps blocks that nobody reads, in real time.
pub const LEASE: Duration = Duration::from_secs(30);
/// How long a decoder waits for a prefiller that has yet to compute, in real time.
pub const WAIT: Duration = Duration::from_secs(60);

/// What came of a read.
#[derive(Debug)]
pub struct Read {
    pub request: RequestId,
    /// The extents of all blocks, layer after layer; `None` if there are none to be had.
    pub bytes: Option<Bytes>,
}

/// What an engine does wrong in hand-overs, for tests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// It answers 500 to whoever asks it to prefill.
    RefusePrefill,
    /// It never answers who asks it to prefill.
    HangPrefill,
    /// It prefills and answers without `kv_transfer_params`.
    NoParams,
    /// It answers 500 to whoever says that another engine has the prompt's KV.
    RefuseDecode,
    /// It keeps nothing of what it offers.
    ForgetBlocks,
    /// Whoever reads its blocks waits for ever.
    HangReads,
}
