//! What a replay measured: one record per finished request, samples of load and of links, and
//! counters. All times are seconds of model time from the start of the replay: real seconds times
//! the clock ratio.

mod log;

pub use log::{LogError, MixedStarts, RecordLog, RecordWriter};

use serde::{Deserialize, Serialize};

/// One line of a record log.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Line {
    /// How an arm was run; written before its requests.
    Run(RunInfo),
    /// A request that ended.
    Request(RequestRecord),
    /// The load of one engine at one moment.
    Load(LoadSample),
    /// What one GPU of the replaying machine does at one moment.
    Gpu(GpuSample),
    /// What one link has carried so far.
    Link(LinkSample),
    /// Where the router in front of the engines sent a request, and what it expected.
    Decision(DecisionSample),
    /// A count at the end of an arm.
    Counter(Counter),
}

/// How an arm was run, for the reader of the report.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct RunInfo {
    pub arm: String,
    /// What the engines had done before; `None` where nobody asked them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub start: Option<Start>,
    /// Names and values, in the order in which they are to be shown.
    pub parameters: Vec<(String, String)>,
}

/// What the engines of an arm had done before it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Start {
    /// Nothing, or all their caches were emptied.
    Fresh,
    /// They had answered requests, whose prompts they may still have cached.
    Warm,
}

/// One request that ended, well or not.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RequestRecord {
    /// What was compared with what: usually the routing policy.
    pub arm: String,
    /// The session of the trace.
    pub session: String,
    /// Position within the session, from 0.
    pub turn: u32,
    /// The engine that answered, from the response header `x-forebay-backend`.
    pub backend: Option<String>,
    /// When the request was due. Latencies count from here: a replayer that is late must not hide
    /// it.
    pub arrival_s: f64,
    /// When the request was sent.
    pub start_s: f64,
    /// From `arrival_s` to the first token; `None` when no token came.
    pub ttft_s: Option<f64>,
    /// Mean time per token after the first; `None` with fewer than two tokens.
    pub tpot_s: Option<f64>,
    /// From `arrival_s` to the end, whatever the end was.
    pub e2e_s: f64,
    pub input_tokens: u32,
    /// Leading tokens of the prompt that come from earlier turns as they really went, answers
    /// included.
    pub carried_tokens: u32,
    /// The turn was sent before the previous turn's answer was complete (open loop only), so it
    /// could not carry it.
    #[serde(default, skip_serializing_if = "is_false")]
    pub early: bool,
    /// Tokens that were asked for; `None` in logs that did not record it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub asked_tokens: Option<u32>,
    /// Tokens that were received.
    pub output_tokens: u32,
    /// That number is one of events with text, because the server said neither token ids nor a
    /// count.
    #[serde(default, skip_serializing_if = "is_false")]
    pub estimated: bool,
    /// Prompt tokens that the engine did not compute; `None` when it did not say.
    pub cached_tokens: Option<u32>,
    /// Those of them that came from outside the GPU's own cache; `None` when the engine did not
    /// say.
    pub external_cached_tokens: Option<u32>,
    /// Those of the latter that came from an SSD; `None` when the engine did not say.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ssd_cached_tokens: Option<u32>,
    /// Those of the external ones that came from another node; `None` when the engine did not say.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub peer_cached_tokens: Option<u32>,
    /// Tokens that differ from what the engine must answer; `None` when nobody checked.
    pub wrong_tokens: Option<u32>,
    pub outcome: Outcome,
}

/// How a request ended.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    /// The whole answer arrived.
    Ok,
    /// It did not.
    Failed(Failure),
}

/// Why a request failed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("{}: {detail}", kind.label())]
pub struct Failure {
    pub kind: FailureKind,
    /// What was seen, for a person; at most [`Failure::DETAIL_BYTES_MAX`] bytes.
    pub detail: String,
}

/// The kinds of failure that a client can tell apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FailureKind {
    /// No connection, or it broke before an answer began.
    Unreachable,
    /// An HTTP status other than 200.
    Status,
    /// No first token within the limit.
    FirstTokenTimeout,
    /// No further bytes within the limit.
    ProgressTimeout,
    /// The connection broke within the answer.
    Reset,
    /// The stream ended before the answer did.
    Truncated,
    /// The answer was not what the protocol allows.
    Garbage,
    /// The engine reported an error within the stream.
    EngineError,
    /// The engine gave the request up, and said so in its finish reason.
    Aborted,
    /// The answer ended well and had no tokens.
    Empty,
}

/// The load of one engine at one moment.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct LoadSample {
    pub arm: String,
    pub at_s: f64,
    pub instance: String,
    /// Requests in its batch.
    pub running: u32,
    /// Requests in its queue.
    pub waiting: u32,
    /// Share of its KV blocks in use, 0 to 1.
    pub kv_usage: f64,
}

/// What one GPU of the machine that replays did in about the second before.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct GpuSample {
    pub arm: String,
    pub at_s: f64,
    pub gpu: u32,
    /// Share of the time in which a kernel ran on it.
    pub busy_percent: f64,
    pub memory_mib: f64,
}

/// What one link has carried since the start of the arm.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct LinkSample {
    pub arm: String,
    pub at_s: f64,
    pub link: String,
    pub bytes: u64,
    pub lots: u64,
}

/// One decision of the router that an arm went through. Times are what the router counts: from the
/// decision to the first byte of the answer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct DecisionSample {
    pub arm: String,
    /// Since the arm's first decision.
    pub at_s: f64,
    pub choice: Choice,
    /// Time to first token as the router expected it; `None` of a request that goes by load alone,
    /// or nowhere.
    pub predicted_ttft_s: Option<f64>,
    /// As it came; `None` without a whole answer.
    pub ttft_s: Option<f64>,
    /// Seconds that all requests together wait longer than they would had the request gone to the
    /// cheapest engine, all as predicted.
    pub regret_s: Option<f64>,
    /// What the choice cost with the time to first token as it came, less what the cheapest of the
    /// other engines was expected to cost. Below zero the choice was right.
    pub over_best_other_s: Option<f64>,
}

/// What a router chose.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Choice {
    /// The engine that the session had before.
    Home,
    /// Another one than that.
    Elsewhere,
    /// The session had none yet.
    NewSession,
    /// The request has nothing to do with caches, and went to the least loaded.
    ByLoad,
    /// None: it could not be served in the time that it asked for.
    Refused,
}

impl Choice {
    /// All choices, in the order of the report.
    pub const ALL: [Choice; 5] =
        [Choice::Home, Choice::Elsewhere, Choice::NewSession, Choice::ByLoad, Choice::Refused];

    /// The choice in words.
    pub fn label(self) -> &'static str {
        match self {
            Choice::Home => "stay",
            Choice::Elsewhere => "elsewhere",
            Choice::NewSession => "new session",
            Choice::ByLoad => "by load",
            Choice::Refused => "refused",
        }
    }
}

/// A count that an arm ended with, such as corruptions caught.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Counter {
    pub arm: String,
    /// What was counted, in words that a report can show.
    pub name: String,
    pub value: u64,
}

impl RequestRecord {
    /// Whether the whole answer arrived.
    pub fn is_ok(&self) -> bool {
        self.outcome == Outcome::Ok
    }

    /// Prompt tokens that the engine computed: input less cached. `None` when the engine did not
    /// say what was cached.
    pub fn executed_tokens(&self) -> Option<u32> {
        self.cached_tokens.map(|cached| self.input_tokens.saturating_sub(cached))
    }

    /// Tokens that were asked for and did not come.
    pub fn missing_tokens(&self) -> u32 {
        self.asked_tokens.map_or(0, |asked| asked.saturating_sub(self.output_tokens))
    }

    /// How late the request was sent.
    pub fn start_delay_s(&self) -> f64 {
        self.start_s - self.arrival_s
    }
}

impl Failure {
    /// Longest detail that a record keeps.
    pub const DETAIL_BYTES_MAX: usize = 200;

    /// A failure; a longer detail is cut.
    pub fn new(kind: FailureKind, detail: impl Into<String>) -> Failure {
        let mut detail = detail.into();
        detail.truncate(detail.floor_char_boundary(Failure::DETAIL_BYTES_MAX));
        Failure { kind, detail }
    }
}

impl FailureKind {
    /// The kind in words.
    pub fn label(self) -> &'static str {
        match self {
            FailureKind::Unreachable => "unreachable",
            FailureKind::Status => "HTTP status",
            FailureKind::FirstTokenTimeout => "first token timeout",
            FailureKind::ProgressTimeout => "progress timeout",
            FailureKind::Reset => "reset",
            FailureKind::Truncated => "truncated",
            FailureKind::Garbage => "garbage",
            FailureKind::EngineError => "engine error",
            FailureKind::Aborted => "aborted",
            FailureKind::Empty => "empty answer",
        }
    }
}

fn is_false(flag: &bool) -> bool {
    !flag
}
