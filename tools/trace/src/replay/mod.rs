//! The replayer: sends a trace to an OpenAI endpoint as its clients did, and records what came of each request.
//!
//! It knows traces, prompts and answers.
//!
//! Three things make a replay valid, and each has a file of its own: a turn carries the tokens that were really
//! answered ([`transcript`]), time is never compressed ([`schedule`]), and latencies count from the moment a request was
//! due, so that a late replayer or a full window cannot hide waiting (the record's `arrival_s`).

mod answer;
mod check;
mod client;
mod progress;
mod run;
mod sampling;
pub mod schedule;
pub mod sse;
pub mod transcript;
mod transport;
mod words;

pub use check::Check;
pub use progress::Progress;
pub use run::CLOSED_LOOP_REQUESTS_MAX;
pub use sampling::{Instance, LoadReading, read_load, sample_load};
pub use schedule::Pacing;
pub use tokio_util::sync::CancellationToken;
pub use transport::Transport;

use crate::record::RequestRecord;
use crate::request::TraceRequest;
use client::Client;
use http::HeaderMap;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;

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
    /// Model seconds per real second; 1 with real engines. All times of the trace and of the records are model time.
    pub clock_ratio: f64,
    /// Prompt token ids are below this.
    pub vocab: u32,
    /// Most requests under way. A request that is due while the window is full waits, and its latency counts from when
    /// it was due.
    pub max_in_flight: usize,
    /// Most tokens kept of what sessions have said, four bytes each; the sessions unused for longest are forgotten.
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

/// Sends traces to one target.
#[derive(Debug)]
pub struct Replayer {
    options: Options,
    client: Client,
    progress: watch::Sender<Progress>,
}

/// What a replay came to. The records hold the rest.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct ReplayOutcome {
    /// Requests answered in full.
    pub done: u64,
    /// Requests that failed; their records say why.
    pub failed: u64,
    /// Requests that a cancellation cut off; they have no records.
    pub cut_off: u64,
    /// Tokens that were not what the engine must answer.
    pub wrong_tokens: u64,
    /// Requests of a closed loop that stood in the trace behind one that arrives later; they were sorted.
    pub out_of_order: usize,
    /// Whether the replay was cancelled.
    pub cancelled: bool,
    /// Model time from the start to the end.
    pub span_s: f64,
}

/// A replay that cannot start or cannot go on.
#[derive(Debug, thiserror::Error)]
pub enum ReplayError {
    /// The target is no URL that requests can be sent to.
    #[error("target {target:?} is not a URL of the form http://host:port or https://host")]
    Target {
        /// What was given.
        target: String,
    },
    /// The file with certificates cannot be used.
    #[error("certificates in {}: {reason}", path.display())]
    Ca {
        path: PathBuf,
        /// Why not.
        reason: String,
    },
    /// The target is https, and no certificate is trusted.
    #[error(
        "target {target:?} is https, and this system trusts no certificates: name a file of them with ca"
    )]
    NoCertificates { target: String },
    /// TLS cannot be used.
    #[error("TLS: {0}")]
    Tls(#[source] rustls::Error),
    /// An option is out of its range.
    #[error("{name} is {value}, allowed is {allowed}")]
    Option {
        name: &'static str,
        /// What was given.
        value: String,
        allowed: &'static str,
    },
    /// A closed loop holds its whole trace, and this one is too large.
    #[error("a closed loop holds at most {limit} requests and the trace has more: replay a sample of it")]
    TooManyRequests { limit: usize },
    /// An open loop sends as it reads, so that its trace must be sorted.
    #[error(
        "turn {turn} of session {session:?} arrives before a request in front of it: sort the trace by arrival"
    )]
    OutOfOrder {
        /// The session of the request.
        session: String,
        turn: u32,
    },
    /// A record could not be written; the replay stops, because what it does is not kept.
    #[error("cannot keep a record: {0}")]
    Record(#[source] io::Error),
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
    fn check(&self) -> Result<(), ReplayError> {
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
        Ok(())
    }
}

impl Replayer {
    /// A replayer for the server at `target`, such as `http://127.0.0.1:8000`. Nothing is connected yet.
    pub fn new(target: &str, options: Options) -> Result<Replayer, ReplayError> {
        options.check()?;
        let transport = Transport::new(options.ca.as_deref(), options.timeouts.connect)?;
        let client = Client::new(target, &options, transport)?;
        Ok(Replayer { options, client, progress: watch::Sender::default() })
    }

    /// Its connections, for others that trust the same certificates.
    pub fn transport(&self) -> Transport {
        self.client.transport.clone()
    }

    /// A view of how far the replay has come.
    pub fn progress(&self) -> watch::Receiver<Progress> {
        self.progress.subscribe()
    }

    /// Replays `requests`. Those of an open loop come in the order of their arrival; a closed loop sorts them. `check` says which tokens are wrong; without it
    /// nobody checks. `sink` gets each record once, when its request has ended; an error of it ends the replay.
    ///
    /// Cancellation ends the replay at once: requests under way are cut off and have no record.
    pub async fn run<R, S>(
        &self,
        requests: R,
        check: Option<Arc<dyn Check>>,
        sink: S,
        cancel: &CancellationToken,
    ) -> Result<ReplayOutcome, ReplayError>
    where
        R: IntoIterator<Item = TraceRequest>,
        R::IntoIter: Send + 'static,
        S: FnMut(&RequestRecord) -> io::Result<()>,
    {
        run::Run::new(self, check, sink).finish(requests.into_iter(), cancel).await
    }
}
