//! How a replay is run.

use super::error::ReplayError;
use super::schedule::Pacing;
use http::HeaderMap;
use std::path::PathBuf;
use std::time::Duration;

/// How a replay is run.
#[derive(Debug, Clone, PartialEq)]
pub struct Options {
    /// What the records call this run, usually the routing policy.
    pub arm: String,
    /// The model that requests name.
    pub model: String,
    /// The call that requests make.
    pub endpoint: Endpoint,
    /// Headers that every request has besides the replayer's own: keys are marked as sensitive.
    pub headers: HeaderMap,
    /// For https: a PEM file with the certificates to trust instead of the system's.
    pub ca: Option<PathBuf>,
    /// What decides when a request is sent.
    pub pacing: Pacing,
    /// Model seconds per real second; 1 with real engines. All times of the trace and of the
    /// records are model time.
    pub clock_ratio: f64,
    /// Prompt token ids are below this.
    pub vocab: u32,
    /// Most requests under way. A request that is due while the window is full waits, and its
    /// latency counts from when it was due.
    pub max_in_flight: usize,
    /// Most top-level sessions under way, in a closed loop; `None` is no limit. The next session
    /// begins when another has ended, and is due from then on.
    pub sessions_max: Option<usize>,
    /// Most tokens kept of what sessions have said, four bytes each; the sessions unused for
    /// longest are forgotten.
    pub transcript_tokens_max: usize,
    /// When to give a request up.
    pub timeouts: Timeouts,
}

/// The call that requests make.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Endpoint {
    /// `/v1/completions`, with the prompt as token ids.
    Completions,
    /// `/v1/chat/completions`, with the prompt as one message of the user: a word for each token.
    Chat,
}

/// When to give a request up, in real time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Timeouts {
    /// To get a connection.
    pub connect: Duration,
    /// From sending to the first token.
    pub first_token: Duration,
    /// From a token to the next one or to the end.
    pub progress: Duration,
}

impl Default for Options {
    fn default() -> Options {
        Options {
            arm: "replay".into(),
            model: "Qwen/Qwen3-Coder-30B-A3B-Instruct".into(),
            endpoint: Endpoint::Completions,
            headers: HeaderMap::new(),
            ca: None,
            pacing: Pacing::Closed,
            clock_ratio: 1.0,
            vocab: 151_936,
            max_in_flight: 256,
            sessions_max: None,
            transcript_tokens_max: 64 << 20,
            timeouts: Timeouts::default(),
        }
    }
}

impl Default for Timeouts {
    fn default() -> Timeouts {
        Timeouts {
            connect: Duration::from_secs(5),
            first_token: Duration::from_secs(300),
            progress: Duration::from_secs(60),
        }
    }
}

impl Options {
    /// Whether all values are allowed.
    pub(super) fn check(&self) -> Result<(), ReplayError> {
        let bad = |name, value: String, allowed| Err(ReplayError::Option { name, value, allowed });
        if !(self.clock_ratio > 0.0 && self.clock_ratio.is_finite()) {
            return bad("clock_ratio", self.clock_ratio.to_string(), "a finite number above 0");
        }
        if self.vocab == 0 {
            return bad("vocab", self.vocab.to_string(), "1 or more");
        }
        if self.max_in_flight == 0 {
            return bad("max_in_flight", self.max_in_flight.to_string(), "1 or more");
        }
        match (self.sessions_max, self.pacing) {
            (Some(0), _) => return bad("sessions_max", "0".into(), "1 or more"),
            // An open loop sends at the trace's times, whoever has ended.
            (Some(most), Pacing::Open) => {
                return bad("sessions_max", most.to_string(), "no limit in an open loop");
            }
            _ => {}
        }
        Ok(())
    }
}
