//! The known formats by name, and how to read a trace: its own blocks and units of time where
//! nothing else is said.

use super::check::MAX_TOKENS;
use super::error::TraceError;
use super::{WekaOptions, mooncake};
use std::fmt;
use std::path::Path;
use std::str::FromStr;

/// A trace format.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    /// The project's own JSONL.
    Forebay,
    /// Mooncake's JSONL (FAST'25 release).
    Mooncake,
    /// Weka's Claude Code sessions: a JSON file, or a directory of them.
    Weka,
    /// Qwen-Bailian's JSONL.
    Bailian,
    /// The JSONL of the agentic-kvc traces.
    AgenticKv,
    /// Azure's CSV.
    Azure,
    /// BurstGPT's CSV.
    BurstGpt,
    /// TraceLab's session CSV.
    TraceLab,
}

impl Format {
    /// All formats with their names.
    pub const ALL: [(Format, &str); 8] = [
        (Format::Forebay, "forebay"),
        (Format::Mooncake, "mooncake"),
        (Format::Weka, "weka"),
        (Format::Bailian, "bailian"),
        (Format::AgenticKv, "agentic-kv"),
        (Format::Azure, "azure"),
        (Format::BurstGpt, "burstgpt"),
        (Format::TraceLab, "tracelab"),
    ];

    /// Whether the format says which requests belong to one conversation. In the others each
    /// request is a session.
    pub fn records_sessions(self) -> bool {
        !matches!(self, Format::Mooncake | Format::Azure | Format::BurstGpt)
    }

    pub(super) fn names() -> String {
        Format::ALL.map(|(_, name)| name).join(", ")
    }
}

impl fmt::Display for Format {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = Format::ALL.iter().find(|(format, _)| format == self).map_or("", |(_, name)| name);
        out.write_str(name)
    }
}

impl FromStr for Format {
    type Err = String;

    fn from_str(text: &str) -> Result<Format, String> {
        let found = Format::ALL.iter().find(|(_, name)| *name == text);
        found
            .map(|(format, _)| *format)
            .ok_or_else(|| format!("unknown format {text:?}, allowed {}", Format::names()))
    }
}

/// How to read a trace.
#[derive(Debug, Clone, Copy, Default)]
pub struct ReadOptions {
    /// The format, or `None` to tell it by the content.
    pub format: Option<Format>,
    /// Whether the first bad line ends the reading with its error. Otherwise bad lines are left out
    /// and counted.
    pub strict: bool,
    /// Tokens per prefix block, for formats that do not state them; `None` for the format's own.
    pub block_tokens: Option<u32>,
    /// The unit of times, for formats that do not state it; `None` for the format's own.
    pub time_unit: Option<TimeUnit>,
    /// What to add to Weka's sessions.
    pub weka: WekaOptions,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TimeUnit {
    Seconds,
    Millis,
    Micros,
    Nanos,
}

impl TimeUnit {
    /// All units with their names and lengths in seconds.
    const ALL: [(TimeUnit, &str, f64); 4] = [
        (TimeUnit::Seconds, "s", 1.0),
        (TimeUnit::Millis, "ms", 1e-3),
        (TimeUnit::Micros, "us", 1e-6),
        (TimeUnit::Nanos, "ns", 1e-9),
    ];

    fn seconds(self) -> f64 {
        TimeUnit::ALL.iter().find(|(unit, ..)| *unit == self).map_or(1.0, |(.., seconds)| *seconds)
    }
}

impl FromStr for TimeUnit {
    type Err = String;

    fn from_str(text: &str) -> Result<TimeUnit, String> {
        let found = TimeUnit::ALL.iter().find(|(_, name, _)| *name == text);
        found.map(|(unit, ..)| *unit).ok_or_else(|| format!("unknown unit {text:?}, allowed s, ms, us or ns"))
    }
}

impl ReadOptions {
    /// Refuses what says nothing about a trace of this format.
    pub(super) fn check(&self, file: &Path, format: Format) -> Result<(), TraceError> {
        let misplaced = |option, has: &dyn Fn(Format) -> bool| {
            let named = Format::ALL.iter().filter(|(format, _)| has(*format)).map(|(_, name)| *name);
            let allowed = named.collect::<Vec<_>>().join(", ");
            Err(TraceError::Option { file: file.into(), option, format: format.to_string(), allowed })
        };
        if let Some(given) = self.block_tokens {
            if own_block_tokens(format).is_none() {
                return misplaced("--block-tokens", &|format| own_block_tokens(format).is_some());
            }
            if !(1..=MAX_TOKENS).contains(&given) {
                return Err(TraceError::BlockTokens { given, most: MAX_TOKENS });
            }
        }
        if self.time_unit.is_some() && own_unit(format).is_none() {
            return misplaced("--time-unit", &|format| own_unit(format).is_some());
        }
        Ok(())
    }

    /// Tokens per block in traces of a format that does not state them.
    pub(super) fn block_tokens(&self, format: Format) -> u32 {
        self.block_tokens.or(own_block_tokens(format)).unwrap_or(0)
    }

    /// The unit of times in traces of a format that does not state it, in seconds.
    pub(super) fn unit_s(&self, format: Format) -> f64 {
        self.time_unit.or(own_unit(format)).map_or(1.0, TimeUnit::seconds)
    }
}

fn own_block_tokens(format: Format) -> Option<u32> {
    match format {
        Format::Mooncake => Some(mooncake::BLOCK_TOKENS),
        Format::Bailian => Some(mooncake::BAILIAN_BLOCK_TOKENS),
        Format::AgenticKv => Some(mooncake::AGENTIC_BLOCK_TOKENS),
        Format::Forebay | Format::Weka | Format::Azure | Format::BurstGpt | Format::TraceLab => None,
    }
}

fn own_unit(format: Format) -> Option<TimeUnit> {
    match format {
        Format::Mooncake => Some(TimeUnit::Millis),
        Format::Bailian | Format::AgenticKv | Format::BurstGpt => Some(TimeUnit::Seconds),
        Format::Forebay | Format::Weka | Format::Azure | Format::TraceLab => None,
    }
}
