//! Why an engine was not calibrated.

use crate::fit::FitError;
use forebay_steps::ProfileError;
use forebay_trace::record::Failure;
use forebay_trace::replay::ReplayError;

/// Why there is no profile.
#[derive(Debug, thiserror::Error)]
pub enum CalibrateError {
    #[error(transparent)]
    Target(#[from] ReplayError),
    /// A page of the server cannot be read or says nothing of use.
    #[error("{path} of the server: {reason}")]
    Page { path: &'static str, reason: String },
    #[error("the server has the models {}: name one with --model", .0.join(", "))]
    SeveralModels(Vec<String>),
    #[error("the server has no model {wanted:?}; it has {}", has.join(", "))]
    NoSuchModel { wanted: String, has: Vec<String> },
    #[error("{count} engines share this address, so nobody knows which one computes: calibrate one alone")]
    SeveralEngines { count: usize },
    #[error("a router answered for its engine {engine:?}: calibrate the engine itself")]
    Router { engine: String },
    #[error("the engine is busy: {running} requests run and {waiting} wait; it must have no others")]
    Busy { running: u64, waiting: u64 },
    #[error("{count} requests of others ended during the measurement, so its times say nothing")]
    Others { count: u64 },
    #[error("{what}: {failure}")]
    Request { what: String, failure: Failure },
    #[error("the engine says that {cached} of {tokens} tokens were cached, of a prompt never sent before")]
    Cached { tokens: usize, cached: usize },
    #[error("the engine takes {tokens} tokens; a calibration needs at least {needed}")]
    ContextTooShort { tokens: usize, needed: usize },
    #[error(
        "the engine is too slow for the time of {seconds} s: it computed prompts of {lengths} lengths, \
         and {needed} are needed"
    )]
    TooSlow { seconds: f64, lengths: usize, needed: usize },
    #[error("the engine returns no token ids (`return_token_ids`), so its tokens cannot be timed")]
    NoTokenIds,
    #[error("{requests} requests never decoded at the same time: say how many can with --max-num-seqs")]
    NotTogether { requests: usize },
    #[error(
        "a prompt of {tokens} tokens took {:.0} ms, and {:.0} ms when all was measured: something else \
         slowed the engine down meanwhile; measure again when its host is quiet",
        first_us / 1e3,
        last_us / 1e3
    )]
    Unsteady { tokens: usize, first_us: f64, last_us: f64 },
    #[error("not done within {seconds} s")]
    Late { seconds: f64 },
    #[error(transparent)]
    Fit(#[from] FitError),
    /// All was measured, and no constants explain it.
    #[error(
        "the step model does not explain this engine: its error is {:.1} %, allowed are {:.0} %; \
         these points do not fit:{points}",
        error * 100.0,
        allowed * 100.0
    )]
    Unfit { error: f64, allowed: f64, points: String },
    #[error(transparent)]
    Profile(#[from] ProfileError),
}
