//! Log lines of the extension in a Python process: warnings and errors, on stderr.
//! It knows the environment variable; what is logged is said by the crate where it happens.

use pyo3::PyErr;
use pyo3::exceptions::PyValueError;
use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::prelude::*;

/// The same variable as the command line's.
const VARIABLE: &str = "FOREBAY_LOG";

/// Writes log lines to stderr from here on, unless somebody else writes them already.
pub fn start() -> Result<(), PyErr> {
    let filter: Targets = match std::env::var(VARIABLE) {
        Ok(value) => value.parse().map_err(|error| {
            let allowed = "a level (off, error, warn, info, debug, trace), or levels of parts, such as \
                           warn,forebay_node=debug";
            PyValueError::new_err(format!("{VARIABLE} is {value:?}: {error}; it takes {allowed}"))
        })?,
        Err(_) => Targets::new().with_default(LevelFilter::WARN),
    };
    let lines = tracing_subscriber::fmt::layer().with_writer(std::io::stderr).with_ansi(false);
    // It fails where another subscriber was set, which shows them then.
    let _ = tracing_subscriber::registry().with(lines.with_filter(filter)).try_init();
    Ok(())
}
