//! Where a process writes its log: to stderr, as text or as JSON, and which lines are shown. It is
//! started once, by a program that links a client or a node. What is logged is said where it
//! happens.

use std::io::{IsTerminal, stderr};
use std::str::FromStr;
use tracing_subscriber::filter::Targets;
use tracing_subscriber::prelude::*;

pub use tracing_subscriber::filter::LevelFilter;

/// Which lines are shown: a level, or levels of parts, such as `warn,forebay_node=debug`.
const VARIABLE: &str = "FOREBAY_LOG";

/// How a line is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Format {
    /// For people: time, level, part, message, fields.
    #[default]
    Text,
    /// For collectors: an object a line, with the fields beside `timestamp`, `level`, `target` and
    /// `message`.
    Json,
}

impl FromStr for Format {
    type Err = String;

    fn from_str(text: &str) -> Result<Format, String> {
        match text {
            "text" => Ok(Format::Text),
            "json" => Ok(Format::Json),
            _ => Err(format!("'{text}' is no format; allowed are text and json")),
        }
    }
}

/// Why no log was started.
#[derive(Debug, thiserror::Error)]
#[error(
    "{VARIABLE} is {value:?}: {part:?} says nothing; it takes a level (off, error, warn, info, debug, \
     trace), or levels of parts, such as warn,forebay_node=debug"
)]
pub struct BadFilter {
    value: String,
    part: String,
}

/// Writes log lines to stderr from here on, unless somebody writes them already. `usual` are shown
/// where the variable is not set.
pub fn start(usual: LevelFilter, format: Format) -> Result<(), BadFilter> {
    let filter = match std::env::var(VARIABLE) {
        Ok(value) => filter(&value)?,
        Err(_) => Targets::new().with_default(usual),
    };
    let lines = tracing_subscriber::fmt::layer().with_writer(stderr).with_ansi(stderr().is_terminal());
    let lines = match format {
        Format::Text => lines.boxed(),
        Format::Json => lines.json().flatten_event(true).boxed(),
    };
    // It fails where another subscriber was set, which shows them then.
    let _ = tracing_subscriber::registry().with(lines.with_filter(filter)).try_init();
    Ok(())
}

fn filter(value: &str) -> Result<Targets, BadFilter> {
    let mut filter = Targets::new();
    for part in value.split(',').map(str::trim) {
        let level = |level: &str| -> Result<LevelFilter, BadFilter> {
            let bad = || BadFilter { value: value.to_owned(), part: part.to_owned() };
            // Nothing at all would be read as `error`.
            level.parse().ok().filter(|_| !level.is_empty()).ok_or_else(bad)
        };
        filter = match part.split_once('=') {
            Some((target, of_target)) => filter.with_target(target, level(of_target)?),
            None => filter.with_default(level(part)?),
        };
    }
    Ok(filter)
}

#[cfg(test)]
mod tests {
    use super::*;
    use tracing::Level;

    #[test]
    fn a_filter_says_levels_and_anything_else_is_refused_with_what_is_allowed() {
        let shown = filter("warn, forebay_node=debug").unwrap();
        assert!(shown.would_enable("forebay_node::peering", &Level::DEBUG));
        assert!(shown.would_enable("other", &Level::WARN) && !shown.would_enable("other", &Level::INFO));
        for value in ["loud", "", "warn,", "forebay_node=loud", "info,forebay_node"] {
            let refused = filter(value).unwrap_err().to_string();
            assert!(refused.contains(&format!("FOREBAY_LOG is {value:?}")), "{refused}");
            assert!(refused.contains("off, error, warn, info, debug, trace"), "{refused}");
        }
    }
}
