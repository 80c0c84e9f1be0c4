//! `forebay trace replay` and `forebay trace report`: replay a trace against an endpoint, and say what a record log holds.
//! It joins reader, replayer, log and report; what they do is `forebay-trace`'s.

use super::trace::ReadArgs;
use crate::results::{Results, Row};
use forebay_engine::EngineConfig;
use forebay_engine::profile::Profile;
use forebay_engine::truth::Oracle;
use forebay_trace::format::{Format, TraceError, TraceReader};
use forebay_trace::record::{Line, RecordLog, RecordWriter, RequestRecord, RunInfo};
use forebay_trace::replay::{
    CancellationToken, Check, Instance, Options, Pacing, ReplayOutcome, Replayer, Timeouts, sample_load,
};
use forebay_trace::report::{self, LiveLine, Summary};
use forebay_trace::request::TraceRequest;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// Arguments of `forebay trace replay`.
#[derive(clap::Args)]
pub struct ReplayArgs {
    #[command(flatten)]
    read: ReadArgs,
    /// The endpoint that requests go to: an engine or a router
    #[arg(long, value_name = "URL")]
    target: String,
    /// What the records call this run, usually the routing policy
    #[arg(long, default_value = "replay")]
    arm: String,
    /// The model that requests name
    #[arg(long, default_value_t = Options::default().model)]
    model: String,
    /// When requests are sent: at their times in the trace, or after the previous answer and the think time
    #[arg(long, value_enum, default_value = "closed")]
    pacing: PacingArg,
    /// Model seconds per real second; the engines' own ratio, 1 for real ones
    #[arg(long, default_value_t = 1.0)]
    clock_ratio: f64,
    /// Prompt token ids are below this
    #[arg(long, default_value_t = Options::default().vocab)]
    vocab: u32,
    /// Stop after this many requests of the trace
    #[arg(long, value_name = "N")]
    requests: Option<usize>,
    /// Most requests under way
    #[arg(long, default_value_t = Options::default().max_in_flight)]
    max_in_flight: usize,
    /// For connecting, in real seconds
    #[arg(long, value_name = "SECONDS", value_parser = seconds, default_value = "5")]
    connect_timeout: Duration,
    /// From sending a request to its first token, in real seconds
    #[arg(long, value_name = "SECONDS", value_parser = seconds, default_value = "300")]
    first_token_timeout: Duration,
    /// From a token to the next, in real seconds
    #[arg(long, value_name = "SECONDS", value_parser = seconds, default_value = "60")]
    progress_timeout: Duration,
    /// Check every token: the engines are emulated ones of this profile
    #[arg(long, value_name = "PROFILE")]
    check: Option<String>,
    /// With --check: KV bytes that those engines keep for a token in a layer
    #[arg(long, value_name = "BYTES", default_value_t = 4)]
    kv_bytes_per_token_layer: usize,
    /// An engine whose load is sampled from its metrics; repeat for each
    #[arg(long, value_name = "NAME=URL")]
    engine: Vec<Instance>,
    /// Decides what reading the trace leaves to chance
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Records are appended here, one JSON object a line
    #[arg(long, value_name = "FILE", default_value = "replay.jsonl")]
    log: PathBuf,
    #[command(flatten)]
    output: Output,
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
    /// Write the report as one HTML page
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
    /// Write all figures of the report as JSON
    #[arg(long, value_name = "FILE")]
    summary: Option<PathBuf>,
    /// Write the results object
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

/// Runs `forebay trace replay`.
pub fn run_replay(args: ReplayArgs) -> crate::CommandResult {
    tokio::runtime::Runtime::new()?.block_on(replay(args))
}

/// Runs `forebay trace report`.
pub fn run_report(args: ReportArgs) -> crate::CommandResult {
    let mut log = RecordLog::default();
    for path in &args.logs {
        log.extend(RecordLog::read(path)?);
    }
    args.output.show(&log)
}

async fn replay(args: ReplayArgs) -> crate::CommandResult {
    refuse_known_arm(&args.log, &args.arm)?;
    let options = args.options();
    let trace = args.read.open(args.seed)?;
    let replayer = Replayer::new(&args.target, options.clone())?;
    let log = Arc::new(RecordWriter::append(&args.log)?);
    log.write(&Line::Run(RunInfo { arm: args.arm.clone(), parameters: args.parameters(trace.format()) }))?;
    let ending = Ending::default();
    let requests = Requests { trace, left: args.requests.unwrap_or(usize::MAX), ending: ending.clone() };

    let cancel = cancelled_by_ctrl_c();
    let sampling = log.clone();
    let sampled = sample_load(&args.arm, &args.engine, SAMPLE_EVERY, args.clock_ratio, move |sample| {
        // A lost sample is a gap in a plot; a lost record stops the replay below.
        let _ = sampling.write(&Line::Load(sample));
    });
    let keep = |record: &RequestRecord| log.write(&Line::Request(record.clone()));
    let work = replayer.run(requests, args.check()?, keep, &cancel);
    let live = LiveLine::new(&args.arm, replayer.progress());
    let outcome = tokio::select! {
        outcome = live.during(work) => outcome?,
        () = sampled => return Err("load sampling ended by itself".into()),
    };
    args.output.show(&RecordLog::read(&args.log)?)?;
    ending.judge(&outcome, &args.log)
}

/// A log that already holds the arm would mix two runs into one.
fn refuse_known_arm(log: &Path, arm: &str) -> crate::CommandResult {
    let known = log.exists() && RecordLog::read(log)?.requests.iter().any(|record| record.arm == arm);
    if known {
        let log = log.display();
        return Err(format!("{log} already holds the arm {arm:?}: name another with --arm or --log").into());
    }
    Ok(())
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
    fn options(&self) -> Options {
        Options {
            arm: self.arm.clone(),
            model: self.model.clone(),
            pacing: self.pacing.into(),
            clock_ratio: self.clock_ratio,
            vocab: self.vocab,
            max_in_flight: self.max_in_flight,
            timeouts: Timeouts {
                connect: self.connect_timeout,
                first_token: self.first_token_timeout,
                progress: self.progress_timeout,
            },
            ..Options::default()
        }
    }

    /// What the engines must answer, if that is known.
    fn check(&self) -> Result<Option<Arc<dyn Check>>, Box<dyn std::error::Error + Send + Sync>> {
        let Some(name) = &self.check else { return Ok(None) };
        let profile = Profile::shipped(name)?;
        let (vocab, namespace) = (profile.model.vocab, profile.namespace().key());
        let engines = EngineConfig {
            kv_bytes_per_token_layer: self.kv_bytes_per_token_layer,
            ..EngineConfig::new(profile, namespace)
        };
        Ok(Some(Arc::new(Oracle::new(engines.truth()?, vocab, ORACLE_BLOCKS))))
    }

    /// What a reader of the report needs to know, or to run this again.
    fn parameters(&self, format: Format) -> Vec<(String, String)> {
        let pacing = match self.pacing {
            PacingArg::Open => "open loop by the trace's times",
            PacingArg::Closed => "closed loop with think times",
        };
        let parameters = [
            ("trace", format!("{} ({format})", self.read.trace.display())),
            ("requests", self.requests.map_or_else(|| "all".into(), |requests| requests.to_string())),
            ("target", self.target.clone()),
            ("model", self.model.clone()),
            ("pacing", pacing.into()),
            ("clock ratio", self.clock_ratio.to_string()),
            ("most in flight", self.max_in_flight.to_string()),
            ("version", env!("CARGO_PKG_VERSION").into()),
        ];
        parameters.into_iter().map(|(name, value)| (name.to_owned(), value)).collect()
    }
}

impl Output {
    fn show(&self, log: &RecordLog) -> crate::CommandResult {
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
    }
    results
}

/// The requests of a trace until its end, its first error or a limit.
struct Requests {
    trace: TraceReader,
    left: usize,
    ending: Ending,
}

/// How the reading of the trace ended, seen from outside of the replay.
#[derive(Clone, Default)]
struct Ending(Arc<Mutex<TraceEnd>>);

#[derive(Default)]
struct TraceEnd {
    error: Option<TraceError>,
    skipped_lines: u64,
}

impl Iterator for Requests {
    type Item = TraceRequest;

    fn next(&mut self) -> Option<TraceRequest> {
        self.left = self.left.checked_sub(1)?;
        let next = self.trace.next();
        let mut ending = self.ending.0.lock().unwrap_or_else(PoisonError::into_inner);
        ending.skipped_lines = self.trace.skipped().lines;
        match next? {
            Ok(request) => Some(request),
            Err(error) => {
                ending.error = Some(error);
                None
            }
        }
    }
}

impl Ending {
    /// Whether the replay was all that was asked for and all answers were right.
    fn judge(&self, outcome: &ReplayOutcome, log: &Path) -> crate::CommandResult {
        let mut ending = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if ending.skipped_lines > 0 {
            eprintln!("forebay: {} bad lines of the trace were left out", ending.skipped_lines);
        }
        if let Some(error) = ending.error.take() {
            return Err(error.into());
        }
        if outcome.cancelled {
            return Err(format!(
                "interrupted; {} requests were cut off, the others are in {}",
                outcome.cut_off,
                log.display()
            )
            .into());
        }
        if outcome.done == 0 && outcome.failed > 0 {
            return Err(format!("every request failed; {} says why", log.display()).into());
        }
        if outcome.wrong_tokens > 0 {
            return Err(format!("{} wrong tokens", outcome.wrong_tokens).into());
        }
        Ok(())
    }
}

impl From<PacingArg> for Pacing {
    fn from(pacing: PacingArg) -> Pacing {
        match pacing {
            PacingArg::Open => Pacing::Open,
            PacingArg::Closed => Pacing::Closed,
        }
    }
}

fn seconds(text: &str) -> Result<Duration, String> {
    let seconds: f64 = text.parse().map_err(|_| format!("{text:?} is no number of seconds"))?;
    let duration = Duration::try_from_secs_f64(seconds).map_err(|error| error.to_string())?;
    if duration.is_zero() { Err("must be more than 0 seconds".into()) } else { Ok(duration) }
}
