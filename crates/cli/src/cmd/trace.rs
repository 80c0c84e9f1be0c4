//! `forebay trace`: look at traces, cut samples from them, make new ones and replay them. It turns
//! arguments into calls of `forebay-trace` and prints what came back; every format, figure and
//! choice is decided there.

use super::reading::{ReadArgs, micros, show_notes};
use super::replay::{ReplayArgs, ReportArgs, run_replay, run_report};
use forebay_results::output::{CommandResult, Error};
use forebay_steps::Profile;
use forebay_store::admission::Policy;
use forebay_trace::format::{Rereadable, TraceError, TraceReader, write_line};
use forebay_trace::generate::{Generator, Marginals};
use forebay_trace::info::{DEFAULT_CACHE_TOKENS, Info, InfoError, PrefixInfo, info};
use forebay_trace::request::TraceRequest;
use forebay_trace::reuse::Reuse;
use forebay_trace::roofline::Roofline;
use forebay_trace::sample::{SampleOptions, SampleReport, sample};
use forebay_trace::tiers::{ModelCost, TierReport, TierSizes, TierStudy};
use serde::Serialize;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

/// Arguments of `forebay trace`.
#[derive(clap::Args)]
pub struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(clap::Subcommand)]
enum Command {
    /// Print the figures of a trace: lengths, reuse, hits of caches, sessions
    Info(InfoArgs),
    /// Estimate what a trace takes of a GPU, and whether prompts or answers bound it
    Roofline(RooflineArgs),
    /// Make a smaller trace of whole sessions
    Sample(SampleArgs),
    /// Make a trace of agent sessions from stated distributions
    Generate(GenerateArgs),
    /// Send a trace to an engine or a router as its clients did, and report what came back
    Replay(Box<ReplayArgs>),
    /// Make a report of what replays recorded
    Report(ReportArgs),
}

#[derive(clap::Args)]
struct InfoArgs {
    #[command(flatten)]
    read: ReadArgs,
    /// Sizes of caches to try, in tokens
    #[arg(long, value_name = "TOKENS,..", value_delimiter = ',', default_values_t = DEFAULT_CACHE_TOKENS)]
    cache_tokens: Vec<u64>,
    #[command(flatten)]
    tiers: TierArgs,
    /// Write the figures to a file as JSON too
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// The memory and SSD tiers to study.
#[derive(clap::Args)]
struct TierArgs {
    /// Tiers to try, such as memory=2%,ssd=20% of the distinct blocks; or in bytes (64GiB) or
    /// tokens (500000tokens)
    #[arg(long, value_name = "SIZES", num_args = 1..)]
    tiers: Vec<TierSizes>,
    /// Which chunks go to the SSD when memory drops them: all, second-hit, adaptive
    #[arg(
        long,
        value_name = "POLICY,..",
        value_delimiter = ',',
        default_values_t = Policy::NAMES.map(|(policy, _)| policy),
        requires = "tiers"
    )]
    admission: Vec<Policy>,
    /// Most bytes that may be written to the SSD in a day [default: no limit]
    #[arg(long, value_name = "BYTES", value_parser = forebay_transfer::size::parse, requires = "tiers")]
    endurance: Option<u64>,
    /// Bytes of KV of a token; the default is that of Llama 3 8B, the model whose FLOP are counted
    #[arg(
        long,
        value_name = "BYTES",
        value_parser = clap::value_parser!(u32).range(1..),
        default_value_t = ModelCost::DENSE_8B.kv_bytes_per_token,
        requires = "tiers"
    )]
    kv_bytes_per_token: u32,
}

/// What `info --json` writes.
#[derive(Serialize)]
struct Figures<'a> {
    #[serde(flatten)]
    info: &'a Info,
    #[serde(skip_serializing_if = "Option::is_none")]
    tiers: Option<&'a TierReport>,
}

#[derive(clap::Args)]
struct RooflineArgs {
    #[command(flatten)]
    read: ReadArgs,
    /// GPU and model, a shipped profile or a file as `forebay calibrate` writes it
    #[arg(long, value_name = "NAME_OR_FILE", default_value = Profile::DEFAULT)]
    profile: String,
    /// Write the figures to a file as JSON too
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

#[derive(clap::Args)]
struct SampleArgs {
    #[command(flatten)]
    read: ReadArgs,
    /// File to write the sample to
    #[arg(long, value_name = "FILE")]
    out: PathBuf,
    /// Share of the sessions to keep, above 0 and up to 1
    #[arg(long, value_name = "SHARE", default_value_t = 1.0)]
    keep: f64,
    /// Seed that chooses the sessions; with the same seed a smaller share is part of a larger one
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Leave out sessions that begin before this time of the trace
    #[arg(long, value_name = "SECONDS", default_value_t = 0.0)]
    start: f64,
    /// Leave out sessions that begin this long after --start, or later [default: no limit]
    #[arg(long, value_name = "SECONDS")]
    span: Option<f64>,
    /// Write the report to a file as JSON too
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

#[derive(clap::Args)]
struct GenerateArgs {
    /// File to write the trace to
    #[arg(long, value_name = "FILE", required_unless_present = "show")]
    out: Option<PathBuf>,
    #[command(flatten)]
    source: Source,
    /// Seed of all that is random; the same seed gives the same trace
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Print the distributions and make no trace
    #[arg(long)]
    show: bool,
}

/// The distributions that a generated trace is drawn from.
#[derive(clap::Args)]
pub struct Source {
    /// Distributions to draw from [default: claude-code]
    #[arg(long)]
    preset: Option<Preset>,
    /// File with distributions of your own, in TOML as --show prints them
    #[arg(long, value_name = "FILE", conflicts_with = "preset")]
    marginals: Option<PathBuf>,
    /// Number of sessions [default: the preset's]
    #[arg(long, value_name = "N")]
    sessions: Option<u32>,
}

#[derive(Clone, Copy, clap::ValueEnum)]
enum Preset {
    /// Coding agents as Weka recorded them
    ClaudeCode,
    /// A small trace for four emulated H20 and four minutes
    Demo,
    /// Agents with long contexts: many warm turns, and prompts of 50,000 tokens
    LongContext,
    /// Agents as the agentic-kv report describes them: half of the requests have 20,000 new tokens
    /// and more
    HeavyPrefill,
}

impl Source {
    pub fn marginals(&self) -> Result<Marginals, Error> {
        let mut marginals: Marginals = match (&self.marginals, self.preset) {
            (Some(file), _) => {
                read_text(file)?.parse().map_err(|error| format!("{}: {error}", file.display()))?
            }
            (None, None | Some(Preset::ClaudeCode)) => Marginals::CLAUDE_CODE.parse()?,
            (None, Some(Preset::Demo)) => Marginals::DEMO.parse()?,
            (None, Some(Preset::LongContext)) => Marginals::LONG_CONTEXT.parse()?,
            (None, Some(Preset::HeavyPrefill)) => Marginals::HEAVY_PREFILL.parse()?,
        };
        marginals.sessions = self.sessions.unwrap_or(marginals.sessions);
        Ok(marginals)
    }
}

/// Runs the command.
pub fn run(args: Args) -> CommandResult {
    match args.command {
        Command::Info(args) => run_info(&args),
        Command::Roofline(args) => run_roofline(&args),
        Command::Sample(args) => run_sample(&args),
        Command::Generate(args) => run_generate(&args),
        Command::Replay(args) => run_replay(*args),
        Command::Report(args) => run_report(args),
    }
}

fn run_info(args: &InfoArgs) -> CommandResult {
    if !args.tiers.are_given() {
        let info = surveyed(args.read.open(0)?, &args.cache_tokens)?;
        return write_json(args.json.as_deref(), &Figures { info: &info, tiers: None });
    }
    // The tiers' sizes are shares of what the first reading finds.
    let (trace, options) = (Rereadable::new(&args.read.trace)?, args.read.options(0)?);
    let info = surveyed(trace.open(options)?, &args.cache_tokens)?;
    let tiers = args.tiers.study(trace.open(options)?, info.prefix.as_ref())?;
    print!("{tiers}");
    write_json(args.json.as_deref(), &Figures { info: &info, tiers: Some(&tiers) })
}

fn run_roofline(args: &RooflineArgs) -> CommandResult {
    let profile = Profile::find(&args.profile)?;
    let mut reader = args.read.open(0)?;
    let roofline = Roofline::of(&mut reader, &profile);
    show_notes(&reader);
    let roofline = roofline?;
    print!("{roofline}");
    write_json(args.json.as_deref(), &roofline)
}

impl TierArgs {
    /// Whether there is anything to study.
    fn are_given(&self) -> bool {
        !self.tiers.is_empty()
    }

    /// Tries the tiers on the requests of a trace, of which `prefix` is known already.
    fn study(
        &self,
        requests: impl IntoIterator<Item = Result<TraceRequest, TraceError>>,
        prefix: Option<&PrefixInfo>,
    ) -> Result<TierReport, Error> {
        let prefix =
            prefix.ok_or("--tiers: the trace says nothing about prefixes, so nothing could be a hit")?;
        let study = TierStudy {
            sizes: self.tiers.clone(),
            policies: self.admission.clone(),
            model: ModelCost { kv_bytes_per_token: self.kv_bytes_per_token, ..ModelCost::DENSE_8B },
            endurance_bytes_per_day: self.endurance,
        };
        Ok(study.run(requests, prefix)?)
    }
}

/// The figures of a trace, which are printed with what there is to know about it.
fn surveyed(mut reader: TraceReader, cache_tokens: &[u64]) -> Result<Info, InfoError> {
    let outcome = info(&mut reader, cache_tokens);
    show_notes(&reader);
    let info = outcome?;
    print!("{info}");
    Ok(info)
}

fn run_sample(args: &SampleArgs) -> CommandResult {
    let start_us = micros("--start", args.start)?;
    let span_us = args.span.map(|span| micros("--span", span)).transpose()?;
    let options = SampleOptions { keep: args.keep, seed: args.seed, start_us, span_us };
    let mut reader = args.read.open(args.seed)?;
    if std::fs::canonicalize(&args.out)
        .is_ok_and(|out| std::fs::canonicalize(&args.read.trace).is_ok_and(|trace| trace == out))
    {
        return Err(
            format!("{}: is the trace itself; the sample needs another file", args.out.display()).into()
        );
    }
    let mut out = create(&args.out)?;
    let report = sample(&mut reader, options, |request| write_line(&mut out, request))?;
    out.flush()?;
    show_notes(&reader);
    let trace = args.read.trace.display();
    if report.requests == 0 {
        return Err(format!("{trace}: no requests").into());
    }
    if report.kept_requests == 0 {
        let of = report.requests;
        return Err(format!(
            "{trace}: the sample is empty, none of {of} requests is in it: --keep more, or choose another --seed, \
             --start or --span"
        )
        .into());
    }
    show_sample(&report);
    write_json(args.json.as_deref(), &report)
}

fn run_generate(args: &GenerateArgs) -> CommandResult {
    let marginals = args.source.marginals()?;
    if args.show {
        print!("{}", toml::to_string(&marginals)?);
    }
    let requests = Generator::new(&marginals, args.seed)?;
    let Some(file) = args.out.as_deref().filter(|_| !args.show) else { return Ok(()) };
    let (mut out, mut count) = (create(file)?, 0u64);
    for request in requests {
        write_line(&mut out, &request)?;
        count += 1;
    }
    out.flush()?;
    println!("{count} requests of {} sessions in {}", marginals.sessions, file.display());
    Ok(())
}

fn show_sample(report: &SampleReport) {
    let SampleReport { requests, kept_requests, kept_families, .. } = report;
    let families = if report.sessions_recorded { "sessions" } else { "conversations, inferred from prompts" };
    println!("{kept_requests} of {requests} requests, in {kept_families} {families}");
    if report.out_of_order > 0 {
        println!(
            "{} requests of the trace are out of order; the sample keeps its order",
            report.out_of_order
        );
    }
    let line = |name: &str, reuse: Option<Reuse>| {
        let Some(reuse) = reuse else { return };
        let [shared, within, across] =
            [reuse.shared, reuse.within_session, reuse.across_sessions()].map(|share| share * 100.0);
        println!(
            "reuse {name}: {shared:.1} % of blocks, {within:.1} % within a session, {across:.1} % across"
        );
    };
    line("in the trace ", report.reuse);
    line("in the sample", report.kept_reuse);
}

fn create(file: &Path) -> Result<BufWriter<File>, String> {
    File::create(file).map(BufWriter::new).map_err(|error| format!("{}: {error}", file.display()))
}

fn read_text(file: &Path) -> Result<String, String> {
    std::fs::read_to_string(file).map_err(|error| format!("{}: {error}", file.display()))
}

fn write_json(file: Option<&Path>, value: &impl Serialize) -> CommandResult {
    let Some(file) = file else { return Ok(()) };
    let mut out = create(file)?;
    serde_json::to_writer_pretty(&mut out, value)?;
    writeln!(out)?;
    Ok(out.flush()?)
}
