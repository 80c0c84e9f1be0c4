//! Which trace a command reads, and what is said of its reading.

use forebay_results::output::Error;
use forebay_trace::format::{Format, ReadOptions, TimeUnit, TraceReader, WekaOptions};
use std::path::PathBuf;

/// Which trace to read, and how.
#[derive(clap::Args)]
pub struct ReadArgs {
    /// Trace file, '-' for standard input, or a directory of Weka's session files; gzip and zstd
    /// are unpacked
    pub trace: PathBuf,
    /// Format of the trace: forebay, mooncake, weka, bailian, agentic-kv, azure, burstgpt or
    /// tracelab [default: found from the content]
    #[arg(long, value_name = "FORMAT")]
    format: Option<Format>,
    /// Tokens in a prefix block, for mooncake, bailian and agentic-kv [default: 512, 16 and 512]
    #[arg(long, value_name = "TOKENS")]
    block_tokens: Option<u32>,
    /// Unit of the trace's times, s, ms, us or ns, for mooncake, bailian, agentic-kv and burstgpt
    /// [default: ms for mooncake, s for the others]
    #[arg(long, value_name = "UNIT")]
    time_unit: Option<TimeUnit>,
    /// Fail at the first bad line instead of leaving bad lines out
    #[arg(long)]
    strict: bool,
    /// Weka only: let sessions of one model share their system prompt, which the trace does not
    /// record
    #[arg(long)]
    share_system_prompt: bool,
    /// Weka only: spread the starts of the sessions over this time, because all of the trace's
    /// sessions start at once
    #[arg(long, value_name = "SECONDS", default_value_t = 0.0)]
    spread_starts: f64,
}

impl ReadArgs {
    /// Opens the trace; `seed` decides whatever the reading leaves to chance.
    pub fn open(&self, seed: u64) -> Result<TraceReader, Error> {
        Ok(TraceReader::open(&self.trace, self.options(seed)?)?)
    }

    /// How the trace is read; see [`ReadArgs::open`].
    pub fn options(&self, seed: u64) -> Result<ReadOptions, String> {
        let spread_starts_us = micros("--spread-starts", self.spread_starts)?;
        let weka = WekaOptions { share_system_prompt: self.share_system_prompt, spread_starts_us, seed };
        let ReadArgs { format, strict, block_tokens, time_unit, .. } = *self;
        Ok(ReadOptions { format, strict, block_tokens, time_unit, weka })
    }
}

/// What a reader of the figures must know about the trace.
pub fn show_notes(reader: &TraceReader) {
    let skipped = reader.skipped();
    if skipped.lines > 0 {
        eprintln!("forebay: {} bad lines left out, the first of them:", skipped.lines);
        skipped.first.iter().for_each(|error| eprintln!("  {error}"));
    }
    if reader.coverage().is_worth_a_note() {
        eprintln!("forebay: {}", reader.coverage());
    }
}

/// Seconds of the command line as microseconds.
pub fn micros(name: &str, seconds: f64) -> Result<u64, String> {
    const MOST_S: f64 = 1e9;
    if !(0.0..=MOST_S).contains(&seconds) {
        return Err(format!("{name}: {seconds}, allowed 0 to {MOST_S} seconds"));
    }
    Ok((seconds * 1e6).round() as u64)
}
