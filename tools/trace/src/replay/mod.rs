//! The replayer: sends a trace to an OpenAI endpoint as its clients did, and records what came of
//! each request.
//!
//! It knows traces, prompts and answers.
//!
//! Three things make a replay valid, and each has a file of its own: a turn carries the tokens that
//! were really answered ([`transcript`]), time is never compressed ([`schedule`]), and latencies
//! count from the moment a request was due, so that a late replayer or a full window cannot hide
//! waiting (the record's `arrival_s`).

mod answer;
mod client;
mod error;
mod gpus;
mod options;
mod progress;
mod run;
mod sampling;
pub mod schedule;
pub mod sse;
pub mod transcript;
mod transport;
mod words;

pub use answer::{Answer, PromptTokensDetails, Usage};
pub use client::{Call, Client, Reply};
pub use error::ReplayError;
pub use gpus::{GpuError, sample_gpus};
pub use options::{Endpoint, Options, Timeouts};
pub use progress::Progress;
pub use run::{CLOSED_LOOP_REQUESTS_MAX, Check, ReplayOutcome};
pub use sampling::{Instance, LoadReading, read_load, read_start, sample, sample_load};
pub use schedule::Pacing;
pub use tokio_util::sync::CancellationToken;
pub use transport::Transport;

use crate::record::RequestRecord;
use crate::request::TraceRequest;
use std::io;
use std::sync::Arc;
use tokio::sync::watch;

/// Sends traces to one target.
#[derive(Debug)]
pub struct Replayer {
    options: Options,
    client: Client,
    progress: watch::Sender<Progress>,
}

impl Replayer {
    /// A replayer for the server at `target`, such as `http://127.0.0.1:8000`. Nothing is connected
    /// yet.
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

    /// Replays `requests`. Those of an open loop come in the order of their arrival; a closed loop
    /// sorts them. `check` says which tokens are wrong; without it nobody checks. `sink` gets each
    /// record once, when its request has ended; an error of it ends the replay.
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
        run::Run::new(&self.options, self.client.clone(), &self.progress, check, sink)
            .finish(requests.into_iter(), cancel)
            .await
    }
}
