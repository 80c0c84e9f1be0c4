//! The known formats by name.

use std::fmt;
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
