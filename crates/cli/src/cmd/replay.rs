//! `forebay trace replay` and `forebay trace report`: replay a trace against an endpoint, and say
//! what a record log holds. It joins reader, replayer, log and report; what they do is
//! `forebay-trace`'s.

use super::access::Access;
use super::reading::{ReadArgs, show_notes};
use super::values::seconds;
use crate::decisions::LogMark;
use forebay_emulator::truth::Oracle;
use forebay_emulator::{EngineConfig, namespace};
use forebay_results::output::{CommandResult, Error};
use forebay_results::{Results, Row};
use forebay_steps::Profile;
use forebay_trace::format::{Format, Rereadable, TraceError, TraceReader};
use forebay_trace::record::{Line, RecordLog, RecordWriter, RequestRecord, RunInfo, Start};
use forebay_trace::replay::{
    CLOSED_LOOP_REQUESTS_MAX, CancellationToken, Check, Endpoint, Instance, Options, Pacing, ReplayOutcome,
    Replayer, Timeouts, read_start, sample_gpus, sample_load,
};
use forebay_trace::report::{self, GpuSummary, LiveLine, Summary};
use forebay_trace::request::{OutOfOrder, TraceRequest, sort_by_arrival};
use forebay_transfer::lock::Mutex;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

/// Arguments of `forebay trace replay`.
#[derive(clap::Args)]
pub struct ReplayArgs {
    #[command(flatten)]
    read: ReadArgs,
    /// The server that requests go to, an engine or a router: http:// or https://
    #[arg(long, value_name = "URL")]
    target: String,
    #[command(flatten)]
    access: Access,
    /// API that requests use; chat takes no token ids, so that a word stands for each
    #[arg(long, value_enum, default_value = "completions")]
    endpoint: EndpointArg,
    /// Name of this run in the records, usually the routing policy
    #[arg(long, value_name = "NAME", default_value = "replay")]
    arm: String,
    /// Model that requests ask for
    #[arg(long, value_name = "NAME", default_value_t = Options::default().model)]
    model: String,
    /// When requests are sent: open, at their times in the trace; closed, each after the previous
    /// answer of its session and the think time
    #[arg(long, value_enum, default_value = "closed")]
    pacing: PacingArg,
    /// Seconds of the trace in a real second: the ratio of emulated engines, 1 for real ones
    #[arg(long, value_name = "RATIO", default_value_t = 1.0)]
    clock_ratio: f64,
    /// Prompts have token ids below this number
    #[arg(long, value_name = "TOKENS", default_value_t = Options::default().vocab)]
    vocab: u32,
    /// Take only the first N requests of the trace file [default: all]
    #[arg(long, value_name = "N")]
    requests: Option<usize>,
    /// Most requests that may fail; with more, the command fails
    #[arg(long, value_name = "N", default_value_t = 0)]
    max_failures: u64,
    /// Most requests under way at once
    #[arg(long, value_name = "N", default_value_t = Options::default().max_in_flight)]
    max_in_flight: usize,
    /// Most sessions under way at once, sub-agents not counted; the next one begins when another
    /// has ended [default: as the trace has them]
    #[arg(long, value_name = "N")]
    max_sessions: Option<usize>,
    /// Longest time for connecting, in real seconds
    #[arg(long, value_name = "SECONDS", value_parser = seconds, default_value = "5")]
    connect_timeout: Duration,
    /// Longest time from sending a request to its first token, in real seconds
    #[arg(long, value_name = "SECONDS", value_parser = seconds, default_value = "300")]
    first_token_timeout: Duration,
    /// Longest time from a token to the next, in real seconds
    #[arg(long, value_name = "SECONDS", value_parser = seconds, default_value = "60")]
    progress_timeout: Duration,
    /// Check every token that comes back; the engines must be emulated ones of this profile
    #[arg(long, value_name = "PROFILE")]
    check: Option<String>,
    /// With --check: bytes of KV that those engines keep for a token in a layer
    #[arg(long, value_name = "BYTES", default_value_t = 4)]
    kv_bytes_per_token_layer: usize,
    /// An engine whose load is sampled from its metrics, and which says whether it has answered
    /// before; repeat for each
    #[arg(long, value_name = "NAME=URL")]
    engine: Vec<Instance>,
    /// The engines have answered before, and their caches and stores were emptied: they count as
    /// fresh ones
    #[arg(long)]
    emptied: bool,
    /// Log that the router in front of the engines writes with --decision-log: what it decides
    /// during this run goes into the records, and so into the report
    #[arg(long, value_name = "FILE")]
    decisions: Option<PathBuf>,
    /// Seed of what is random in reading the trace
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// File that records are appended to, one JSON object a line
    #[arg(long, value_name = "FILE", default_value = "replay.jsonl")]
    log: PathBuf,
    #[command(flatten)]
    output: Output,
}

#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum EndpointArg {
    Completions,
    Chat,
}

/// Arguments of `forebay trace report`.
#[derive(clap::Args)]
pub struct ReportArgs {
    /// Record logs; arms of several logs are shown together
    #[arg(required = true, value_name = "LOG")]
    logs: Vec<PathBuf>,
    #[command(flatten)]
    output: Output,
}

/// Where the report goes besides the terminal.
#[derive(clap::Args)]
struct Output {
    /// Write the report to this file as one HTML page
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
    /// Write all figures of the report to this file as JSON
    #[arg(long, value_name = "FILE")]
    summary: Option<PathBuf>,
    /// Write the results object to this file, in the form that benchmarks write
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

#[derive(Clone, Copy, clap::ValueEnum)]
enum PacingArg {
    Open,
    Closed,
}

/// Prefixes that the oracle remembers, about 50 bytes each.
const ORACLE_BLOCKS: usize = 1 << 20;
/// How often the load of engines is sampled, in real time.
const SAMPLE_EVERY: Duration = Duration::from_millis(500);
/// A router logs a decision a moment after the client has the end of the answer.
const DECISION_LOG_LAG: Duration = Duration::from_millis(500);

/// Runs `forebay trace replay`.
pub fn run_replay(args: ReplayArgs) -> CommandResult {
    tokio::runtime::Runtime::new()?.block_on(replay(args))
}

/// Runs `forebay trace report`.
pub fn run_report(args: ReportArgs) -> CommandResult {
    let mut log = RecordLog::default();
    for path in &args.logs {
        log.extend(RecordLog::read(path)?);
    }
    log.check_starts()?;
    args.output.show(&log)
}

async fn replay(args: ReplayArgs) -> CommandResult {
    refuse_known_arm(&args.log, &args.arm)?;
    if args.endpoint == EndpointArg::Chat && args.check.is_some() {
        return Err("--check needs --endpoint completions: a chat has no token ids to check".into());
    }
    let options = args.options()?;
    let trace = Trace::prepare(&args)?;
    let replayer = Replayer::new(&args.target, options.clone())?;
    let decisions = args.decisions.as_deref().map(LogMark::now).transpose()?;
    let run = args.run_info(&replayer, &trace).await;
    refuse_other_start(&args.log, &run)?;
    let log = Arc::new(RecordWriter::append(&args.log)?);
    log.write(&Line::Run(run))?;
    let Trace { requests, ending, .. } = trace;

    let cancel = cancelled_by_ctrl_c();
    let sampling = log.clone();
    let transport = replayer.transport();
    let sampled =
        sample_load(&transport, &args.arm, &args.engine, SAMPLE_EVERY, args.clock_ratio, move |sample| {
            // A lost sample is a gap in a plot; a lost record stops the replay below.
            let _ = sampling.write(&Line::Load(sample));
        });
    let gpus = keep_gpus(&args.arm, args.clock_ratio, &log);
    let keep = |record: &RequestRecord| log.write(&Line::Request(record.clone()));
    let work = replayer.run(requests, args.check()?, keep, &cancel);
    let live = LiveLine::new(&args.arm, replayer.progress());
    let outcome = tokio::select! {
        outcome = live.during(work) => outcome?,
        () = sampled => return Err("load sampling ended by itself".into()),
        () = gpus => return Err("GPU sampling ended by itself".into()),
    };
    let mut unread = None;
    if let Some(decisions) = decisions {
        tokio::time::sleep(DECISION_LOG_LAG).await;
        match decisions.read_since(&args.arm, args.clock_ratio) {
            Ok(read) => read.write(&args.arm, &log)?,
            Err(error) => unread = Some(error),
        }
    }
    // What the engines did is shown, whatever the router's log is like.
    args.output.show(&RecordLog::read(&args.log)?)?;
    if let Some(error) = unread {
        return Err(error);
    }
    ending.lock().judge(&outcome, &args)
}

/// Records what this machine's GPUs do, as long as they can be asked. Never ends.
async fn keep_gpus(arm: &str, clock_ratio: f64, log: &RecordWriter) {
    let error = sample_gpus(arm, clock_ratio, |sample| {
        // A lost sample is a gap in a plot.
        let _ = log.write(&Line::Gpu(sample));
    });
    eprintln!("forebay: no GPU utilisation in the report: {}", error.await);
    std::future::pending().await
}

/// A log that already holds the arm would mix two runs into one.
fn refuse_known_arm(log: &Path, arm: &str) -> CommandResult {
    let known = log.exists() && RecordLog::read(log)?.requests.iter().any(|record| record.arm == arm);
    if known {
        let log = log.display();
        return Err(format!("{log} already holds the arm {arm:?}: name another with --arm or --log").into());
    }
    Ok(())
}

/// A log whose arms began with other caches than this one would compare what cannot be compared.
fn refuse_other_start(log: &Path, run: &RunInfo) -> CommandResult {
    let mut all = if log.exists() { RecordLog::read(log)? } else { RecordLog::default() };
    all.push(Line::Run(run.clone()));
    Ok(all.check_starts()?)
}

fn cancelled_by_ctrl_c() -> CancellationToken {
    let cancel = CancellationToken::new();
    let canceller = cancel.clone();
    tokio::spawn(async move {
        if tokio::signal::ctrl_c().await.is_ok() {
            canceller.cancel();
        }
    });
    cancel
}

impl ReplayArgs {
    fn options(&self) -> Result<Options, String> {
        Ok(Options {
            arm: self.arm.clone(),
            model: self.model.clone(),
            endpoint: match self.endpoint {
                EndpointArg::Completions => Endpoint::Completions,
                EndpointArg::Chat => Endpoint::Chat,
            },
            headers: self.access.headers()?,
            ca: self.access.ca.clone(),
            pacing: self.pacing.into(),
            clock_ratio: self.clock_ratio,
            vocab: self.vocab,
            max_in_flight: self.max_in_flight,
            sessions_max: self.max_sessions,
            timeouts: Timeouts {
                connect: self.connect_timeout,
                first_token: self.first_token_timeout,
                progress: self.progress_timeout,
            },
            ..Options::default()
        })
    }

    /// What the engines must answer, if that is known.
    fn check(&self) -> Result<Option<Arc<dyn Check>>, Error> {
        let Some(name) = &self.check else { return Ok(None) };
        let profile = Profile::find(name)?;
        let (vocab, namespace) = (profile.model.vocab, namespace(&profile).key());
        let engines = EngineConfig {
            kv_bytes_per_token_layer: self.kv_bytes_per_token_layer,
            ..EngineConfig::new(profile, namespace)
        };
        Ok(Some(Arc::new(Oracle::new(engines.truth()?, vocab, ORACLE_BLOCKS))))
    }

    /// How this arm is run.
    async fn run_info(&self, replayer: &Replayer, trace: &Trace) -> RunInfo {
        let start = match self.emptied {
            true => Some(Start::Fresh),
            false => read_start(&replayer.transport(), &self.engine).await,
        };
        RunInfo { arm: self.arm.clone(), start, parameters: self.parameters(trace) }
    }

    /// What a reader of the report needs to know, or to run this again.
    fn parameters(&self, trace: &Trace) -> Vec<(String, String)> {
        let pacing = match self.pacing {
            PacingArg::Open => "open loop by the trace's times",
            PacingArg::Closed => "closed loop with think times",
        };
        let Trace { format, out_of_order, .. } = trace;
        let sorted = (*out_of_order > 0)
            .then(|| ("sorted", format!("by arrival: {out_of_order} requests were out of order")));
        let endpoint = match self.endpoint {
            EndpointArg::Completions => "completions",
            EndpointArg::Chat => "chat, a word for each token",
        };
        let parameters = [
            ("trace", format!("{} ({format})", self.read.trace.display())),
            ("requests", self.requests.map_or_else(|| "all".into(), |requests| requests.to_string())),
            ("target", self.target.clone()),
            ("endpoint", endpoint.into()),
            ("model", self.model.clone()),
            ("pacing", pacing.into()),
            ("clock ratio", self.clock_ratio.to_string()),
            ("most in flight", self.max_in_flight.to_string()),
            ("most sessions", self.max_sessions.map_or_else(|| "no limit".into(), |most| most.to_string())),
            ("version", env!("CARGO_PKG_VERSION").into()),
        ];
        parameters.into_iter().chain(sorted).map(|(name, value)| (name.to_owned(), value)).collect()
    }
}

impl Output {
    fn show(&self, log: &RecordLog) -> CommandResult {
        let summary = report::summarize(log);
        print!("{}", report::terminal(&summary));
        let write = |path: &Path, text: String| {
            std::fs::write(path, text).map_err(|error| format!("cannot write {}: {error}", path.display()))
        };
        if let Some(path) = &self.html {
            write(path, report::html(&summary, log))?;
        }
        if let Some(path) = &self.summary {
            write(path, serde_json::to_string_pretty(&summary)? + "\n")?;
        }
        if let Some(path) = &self.json {
            results(&summary).write(path)?;
        }
        Ok(())
    }
}

/// The summary as rows `replay.<arm>.<figure>`.
fn results(summary: &Summary) -> Results {
    let mut results = Results::new("replay");
    for arm in &summary.arms {
        let row = |(name, unit, value)| Row::of_runs(format!("replay.{}.{name}", arm.arm), unit, &[value]);
        results.rows.extend(arm.figures().into_iter().map(row));
        for (name, unit, value) in arm.gpus.iter().flat_map(GpuSummary::figures) {
            results.rows.push(Row::of_runs(format!("replay.{}.{name}", arm.arm), unit, &[value]));
        }
    }
    results
}

/// What is to be sent, and what it was read from.
struct Trace {
    requests: Box<dyn Iterator<Item = TraceRequest> + Send>,
    format: Format,
    /// Requests that were sorted into their places, of an open loop.
    out_of_order: usize,
    ending: Ending,
}

/// The requests of a trace until its end, its first error or a limit.
struct Requests {
    left: usize,
    ending: Ending,
}

/// How the reading of the trace went, seen from outside of the replay.
type Ending = Arc<Mutex<TraceEnd>>;

struct TraceEnd {
    reader: TraceReader,
    error: Option<TraceError>,
}

impl Trace {
    /// Opens the trace. An open loop sends while it reads, so that its order is looked at before;
    /// where it is not that of arrival, all requests are read and sorted.
    fn prepare(args: &ReplayArgs) -> Result<Trace, Error> {
        let left = args.requests.unwrap_or(usize::MAX);
        let options = args.read.options(args.seed)?;
        let (reader, out_of_order) = match args.pacing {
            PacingArg::Closed => (args.read.open(args.seed)?, 0),
            PacingArg::Open => {
                let trace = Rereadable::new(&args.read.trace)?;
                let mut order = OutOfOrder::default();
                for request in trace.open(options)?.take(left) {
                    order.add(&request?);
                }
                (trace.open(options)?, order.count())
            }
        };
        let format = reader.format();
        let ending = Arc::new(Mutex::new(TraceEnd { reader, error: None }));
        let requests = Requests { left, ending: ending.clone() };
        if out_of_order == 0 {
            return Ok(Trace { requests: Box::new(requests), format, out_of_order, ending });
        }
        let mut requests: Vec<TraceRequest> = requests.take(CLOSED_LOOP_REQUESTS_MAX + 1).collect();
        if requests.len() > CLOSED_LOOP_REQUESTS_MAX {
            return Err(format!(
                "{}: {out_of_order} requests are out of order, and at most {CLOSED_LOOP_REQUESTS_MAX} requests can be \
                 sorted here: sort the trace by arrival, or replay a sample of it",
                args.read.trace.display()
            )
            .into());
        }
        sort_by_arrival(&mut requests);
        say_sorted(out_of_order);
        Ok(Trace { requests: Box::new(requests.into_iter()), format, out_of_order, ending })
    }
}

fn say_sorted(out_of_order: usize) {
    eprintln!(
        "forebay: {out_of_order} requests of the trace stand behind ones that arrive later: it was sorted by arrival"
    );
}

impl Iterator for Requests {
    type Item = TraceRequest;

    fn next(&mut self) -> Option<TraceRequest> {
        self.left = self.left.checked_sub(1)?;
        let mut end = self.ending.lock();
        match end.reader.next()? {
            Ok(request) => Some(request),
            Err(error) => {
                end.error = Some(error);
                None
            }
        }
    }
}

impl TraceEnd {
    /// Whether the replay was all that was asked for and all answers were right.
    fn judge(&mut self, outcome: &ReplayOutcome, args: &ReplayArgs) -> CommandResult {
        show_notes(&self.reader);
        if outcome.out_of_order > 0 {
            say_sorted(outcome.out_of_order);
        }
        if let Some(error) = self.error.take() {
            return Err(error.into());
        }
        verdict(outcome, args.max_failures, &args.log).map_or(Ok(()), |wrong| Err(wrong.into()))
    }
}

/// What was wrong with a replay, if anything was.
fn verdict(outcome: &ReplayOutcome, max_failures: u64, log: &Path) -> Option<String> {
    let ReplayOutcome { done, failed, cut_off, wrong_tokens, cancelled, .. } = *outcome;
    let (log, all) = (log.display(), done + failed);
    if cancelled {
        return Some(format!("interrupted; {cut_off} requests were cut off, the others are in {log}"));
    }
    if all == 0 {
        return Some("nothing was sent: the trace has no requests".into());
    }
    if failed > max_failures {
        return Some(format!(
            "{failed} of {all} requests failed, and --max-failures allows {max_failures}; {log} says why"
        ));
    }
    (wrong_tokens > 0).then(|| format!("{wrong_tokens} wrong tokens"))
}

impl From<PacingArg> for Pacing {
    fn from(pacing: PacingArg) -> Pacing {
        match pacing {
            PacingArg::Open => Pacing::Open,
            PacingArg::Closed => Pacing::Closed,
        }
    }
}
