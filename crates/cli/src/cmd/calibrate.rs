//! `forebay calibrate`: measure a running engine and write a profile of it. It turns arguments into
//! a measurement and its outcome into a file; how an engine is measured is `forebay-calibrate`'s.

use super::access::Access;
use super::values::seconds;
use forebay_calibrate::{Calibration, Given, Header, TIME_MAX, calibrate};
use forebay_results::output::{CommandResult, Error};
use forebay_results::{Results, Row};
use forebay_steps::Profile;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Arguments of `forebay calibrate`.
#[derive(clap::Args)]
pub struct Args {
    /// The engine, such as http://127.0.0.1:8000; nobody else may use it meanwhile
    #[arg(value_name = "URL")]
    target: String,
    #[command(flatten)]
    access: Access,
    /// File to write the profile to; its name ends in .toml
    #[arg(long, value_name = "FILE", value_parser = toml_file)]
    out: PathBuf,
    /// Model to measure [default: the only one that is served]
    #[arg(long, value_name = "NAME")]
    model: Option<String>,
    /// Profile with what the engine does not say and no option does
    #[arg(long, value_name = "NAME_OR_FILE", default_value = "h100-llama-3.1-8b")]
    like: String,
    /// Most tokens computed in one step
    #[arg(long, value_name = "TOKENS")]
    max_num_batched_tokens: Option<NonZeroUsize>,
    /// Most requests computed at once
    #[arg(long, value_name = "REQUESTS")]
    max_num_seqs: Option<NonZeroUsize>,
    /// Longest context, where the engine does not say it
    #[arg(long, value_name = "TOKENS")]
    max_model_len: Option<NonZeroUsize>,
    /// Tokens whose KV fits the GPU, where the engine does not say it
    #[arg(long, value_name = "TOKENS")]
    pool_tokens: Option<NonZeroUsize>,
    /// Longest time that it may take, at most 90
    #[arg(long, value_name = "SECONDS", value_parser = seconds, default_value = "90")]
    time: Duration,
    /// Write what was measured to a file as JSON too
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

pub fn run(args: Args) -> CommandResult {
    if args.time > TIME_MAX {
        return Err(format!("--time is {} s; allowed are at most 90 s", args.time.as_secs_f64()).into());
    }
    let like = Profile::find(&args.like)?;
    check_writable("--out", &args.out)?;
    if let Some(json) = &args.json {
        check_writable("--json", json)?;
    }
    let given = Given {
        headers: args.access.headers()?,
        ca: args.access.ca,
        model: args.model,
        max_model_tokens: args.max_model_len.map(NonZeroUsize::get),
        pool_tokens: args.pool_tokens.map(NonZeroUsize::get),
        max_batched_tokens: args.max_num_batched_tokens.map(NonZeroUsize::get),
        max_seqs: args.max_num_seqs.map(NonZeroUsize::get),
    };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let tell = |line: &str| println!("{line}");
    let calibration = runtime.block_on(calibrate(&args.target, &given, &like, args.time, tell))?;
    print!("\n{}", calibration.table());
    if let Some(path) = &args.json {
        results(&calibration).write(path)?;
    }
    write(&calibration, &args.target, &args.out, &like)
}

/// The points, the constants and the fit's error as rows `calibrate.<name>`.
fn results(calibration: &Calibration) -> Results {
    let mut results = Results::new("calibrate");
    let mut row = |name: &str, unit, value: f64| {
        let name = format!("calibrate.{}", name.replace(' ', "_"));
        results.rows.push(Row::of_runs(name, unit, &[value]));
    };
    for (point, error) in calibration.points.iter().zip(&calibration.fit.errors) {
        row(&point.name, "ms", point.measured_us / 1e3);
        row(&format!("{}.error", point.name), "%", error * 100.0);
    }
    let (step, api) = (&calibration.fit.step, &calibration.fit.api);
    row("floor", "us", step.floor_graph_us);
    row("linear", "us", step.linear_us_per_token);
    row("attention", "ns", step.attention_ns_per_pair);
    row("kv_read", "ns", step.kv_read_ns_per_context_token);
    row("request", "us", step.us_per_request);
    row("api", "us", api.us_per_request);
    row("api_token", "us", api.us_per_token);
    row("error", "%", calibration.fit.error() * 100.0);
    row("time", "s", calibration.seconds);
    results
}

fn write(calibration: &Calibration, target: &str, out: &Path, like: &Profile) -> CommandResult {
    calibration.check()?;
    let name = out.file_stem().map(|stem| stem.to_string_lossy().into_owned()).unwrap_or_default();
    let header = Header {
        name,
        target: target.to_owned(),
        version: env!("CARGO_PKG_VERSION").to_owned(),
        date: forebay_results::date(),
    };
    let text = calibration.profile_text(&header, like)?;
    std::fs::write(out, text).map_err(|error| refused("--out", out, &error))?;
    let (error, out) = (calibration.fit.error() * 100.0, out.display());
    println!("{out}: fit error {error:.1} %, measured in {:.0} s", calibration.seconds);
    Ok(())
}

/// Nobody measures for a minute and then has no place for it. Leaves no file behind.
fn check_writable(flag: &str, file: &Path) -> CommandResult {
    let was_there = file.exists();
    let opened = std::fs::OpenOptions::new().append(true).create(true).open(file);
    opened.map_err(|error| refused(flag, file, &error))?;
    if !was_there {
        std::fs::remove_file(file)?;
    }
    Ok(())
}

fn refused(flag: &str, file: &Path, error: &std::io::Error) -> Error {
    format!("{flag} {}: {error}", file.display()).into()
}

fn toml_file(text: &str) -> Result<PathBuf, String> {
    let path = PathBuf::from(text);
    match path.extension() {
        Some(extension) if extension == "toml" => Ok(path),
        _ => Err(format!("'{text}' does not end in .toml, by which profiles in files are known")),
    }
}
