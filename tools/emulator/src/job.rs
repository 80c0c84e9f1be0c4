//! What the API hands to the engine's thread and what comes back. This file knows channels and
//! limits.

use crate::hand_over::{Read, Source};
use crate::scheduler::{BlockId, CacheHit};
use forebay_transfer::TraceContext;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc;
use std::time::Instant;
use thiserror::Error;
use tokio::sync::mpsc::UnboundedSender;

/// Names a job of an engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct JobId(u64);

/// What a job is made of.
#[derive(Debug)]
pub struct NewJob {
    /// Position of the prompt in its HTTP request.
    pub index: u32,
    pub prompt: Vec<u32>,
    /// Tokens of output.
    pub max_tokens: usize,
    pub delivery: Delivery,
    /// Its part in a hand-over, if it has one.
    pub handed: Option<Handed>,
    /// The span that it is part of, if that is recorded.
    pub trace: Option<TraceContext>,
}

/// One prompt to be answered.
#[derive(Debug)]
pub struct Job {
    /// Its name, for aborting it.
    pub id: JobId,
    /// Position of the prompt in its HTTP request; repeated in every update.
    pub index: u32,
    pub prompt: Vec<u32>,
    /// Tokens of output.
    pub max_tokens: usize,
    /// When an update is due.
    pub delivery: Delivery,
    /// Its part in a hand-over, if it has one.
    pub handed: Option<Handed>,
    /// The span that it is part of, if that is recorded.
    pub trace: Option<TraceContext>,
    /// When it was accepted.
    pub arrived: Instant,
    /// Takes at most one update per token and one more, so the channel needs no bound of its own.
    pub updates: UnboundedSender<Update>,
}

/// A job's part in a hand-over.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Handed {
    /// Its prompt's blocks are kept under these keys when it has ended.
    Away { keys: [String; 2] },
    /// Its prompt's KV is there.
    Here(Source),
}

/// When output is handed over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Delivery {
    AtEnd,
    /// The first token at once, then whenever this many have come together; vLLM's
    /// `stream_interval`.
    Every(usize),
}

/// Output of a job.
#[derive(Debug)]
pub struct Update {
    /// Whose: [`Job::index`].
    pub index: u32,
    /// Tokens since the last update.
    pub tokens: Vec<u32>,
    /// What of the prompt was cached.
    pub hit: CacheHit,
    /// Set in the last update.
    pub end: Option<End>,
}

/// How a job ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum End {
    /// All output is there.
    Length,
    /// The engine could not go on.
    Failed(String),
}

/// Names a load under way.
pub type LoadId = u64;

/// A chunk of a load has arrived, or never will.
#[derive(Debug)]
pub struct Loaded {
    pub load: LoadId,
    pub chunk: usize,
    pub end: forebay_transfer::End,
    pub at: Instant,
}

/// A chunk has been stored, or not. Nothing reads its blocks any more unless they are not quiet.
#[derive(Debug)]
pub struct Stored {
    pub blocks: Vec<BlockId>,
    /// Whether the blocks are untouched from now on.
    pub quiet: bool,
    /// Whether the store has the chunk now.
    pub there: bool,
}

/// What the engine's thread is told.
#[derive(Debug)]
pub enum Message {
    /// A job to do.
    Submit(Job),
    /// Nobody waits for this job any more.
    Abort(JobId),
    /// A chunk that was to be loaded has arrived, or will not.
    Loaded(Loaded),
    /// A chunk that was to be stored has been, or will not be.
    Stored(Stored),
    /// A prompt's KV has come from another engine, or will not.
    Read(Read),
    /// Another engine has read blocks that were kept for it.
    LetGo(Vec<BlockId>),
    /// Finish nothing more: abort everything and end when it is quiet.
    Stop,
}

/// Why a job was not accepted.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum Rejected {
    /// There is nothing to answer to.
    #[error("the prompt is empty; at least one token is needed")]
    EmptyPrompt,
    /// Longer than the model or the GPU allows.
    #[error(
        "this model's maximum context length is {limit_tokens} tokens, but {prompt_tokens} are in the prompt and \
         {max_tokens} are wanted"
    )]
    TooLong {
        prompt_tokens: usize,
        /// Output wanted.
        max_tokens: usize,
        limit_tokens: usize,
    },
    /// As many requests as may be are under way.
    #[error("{limit} requests are queued or running, which is the limit")]
    Full { limit: usize },
    /// The engine is shutting down.
    #[error("the engine is shutting down")]
    Draining,
}

/// Accepts jobs, as long as there is room. Shared by all connections.
#[derive(Debug)]
pub struct Intake {
    inbox: mpsc::Sender<Message>,
    /// Prompt and output together at most.
    pub limit_tokens: usize,
    /// Jobs at most.
    pub limit_jobs: usize,
    jobs: AtomicUsize,
    draining: AtomicBool,
    next_id: AtomicU64,
}

impl Intake {
    /// An open intake in front of `inbox`.
    pub fn new(inbox: mpsc::Sender<Message>, limit_tokens: usize, limit_jobs: usize) -> Intake {
        Intake {
            inbox,
            limit_tokens,
            limit_jobs,
            jobs: AtomicUsize::new(0),
            draining: AtomicBool::new(false),
            next_id: AtomicU64::new(0),
        }
    }

    /// Hands a job to the engine. The ticket stands for whoever waits for it.
    pub fn submit(
        self: &Arc<Self>,
        new: NewJob,
        updates: UnboundedSender<Update>,
    ) -> Result<Ticket, Rejected> {
        let NewJob { index, prompt, max_tokens, delivery, handed, trace } = new;
        let prompt_tokens = prompt.len();
        if prompt_tokens == 0 {
            return Err(Rejected::EmptyPrompt);
        }
        if prompt_tokens.saturating_add(max_tokens) > self.limit_tokens {
            return Err(Rejected::TooLong { prompt_tokens, max_tokens, limit_tokens: self.limit_tokens });
        }
        if self.draining.load(Ordering::Acquire) {
            return Err(Rejected::Draining);
        }
        let limit = self.limit_jobs;
        let room = |jobs: usize| (jobs < limit).then_some(jobs + 1);
        if self.jobs.fetch_update(Ordering::AcqRel, Ordering::Acquire, room).is_err() {
            return Err(Rejected::Full { limit });
        }
        let id = JobId(self.next_id.fetch_add(1, Ordering::Relaxed));
        let ticket = Ticket { id, intake: Arc::clone(self), ended: false };
        let arrived = Instant::now();
        let job = Job { id, index, prompt, max_tokens, delivery, handed, trace, arrived, updates };
        match self.inbox.send(Message::Submit(job)) {
            Ok(()) => Ok(ticket),
            Err(_) => Err(Rejected::Draining),
        }
    }

    /// Blocks that were kept for another engine have been read.
    pub fn let_go(&self, blocks: Vec<BlockId>) {
        // An engine that is gone keeps nothing.
        let _ = self.inbox.send(Message::LetGo(blocks));
    }

    /// Accepts nothing more.
    pub fn drain(&self) {
        self.draining.store(true, Ordering::Release);
    }

    /// Whether jobs are accepted.
    pub fn is_open(&self) -> bool {
        !self.draining.load(Ordering::Acquire)
    }

    /// Jobs that somebody waits for.
    pub fn jobs(&self) -> usize {
        self.jobs.load(Ordering::Acquire)
    }
}

/// Somebody waits for a job. Dropping the ticket before the end aborts the job.
#[derive(Debug)]
pub struct Ticket {
    id: JobId,
    intake: Arc<Intake>,
    ended: bool,
}

impl Ticket {
    /// The last update has arrived.
    pub fn ended(&mut self) {
        self.ended = true;
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        self.intake.jobs.fetch_sub(1, Ordering::AcqRel);
        if !self.ended {
            // An engine that is gone has nothing left to abort.
            let _ = self.intake.inbox.send(Message::Abort(self.id));
        }
    }
}
