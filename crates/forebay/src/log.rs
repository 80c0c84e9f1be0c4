//! Log lines: where those of all crates go, and which are shown.
//! It knows the environment variable and the format; what is logged is said by the crate where it happens.

use std::io::{IsTerminal, stderr};
use tracing_subscriber::filter::{LevelFilter, ParseError, Targets};
use tracing_subscriber::prelude::*;

/// Which lines are shown: a level (`off`, `error`, `warn`, `info`, `debug`, `trace`), or levels of parts, such as
/// `warn,forebay_node=debug`. Without it `info`.
const VARIABLE: &str = "FOREBAY_LOG";

/// Why no log was started.
#[derive(Debug, thiserror::Error)]
#[error(
    "{VARIABLE} is {value:?}: {source}; it takes a level (off, error, warn, info, debug, trace), or levels of parts, \
     such as warn,forebay_node=debug"
)]
pub struct BadFilter {
    value: String,
    source: ParseError,
}

/// Writes log lines to stderr from here on.
pub fn start() -> Result<(), BadFilter> {
    let filter = match std::env::var(VARIABLE) {
        Ok(value) => value.parse().map_err(|source| BadFilter { value, source })?,
        Err(_) => Targets::new().with_default(LevelFilter::INFO),
    };
    let lines = tracing_subscriber::fmt::layer().with_writer(stderr).with_ansi(stderr().is_terminal());
    tracing_subscriber::registry().with(lines.with_filter(filter)).init();
    Ok(())
}
