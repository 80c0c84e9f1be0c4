//! The decision log: a JSON object on a line of its own for each decision that has ended, off by
//! default. It knows the lines' format, to write them and to read them again; `docs/routing.md`
//! explains it.

use crate::decisions::{DecisionRecord, Entry};
use crate::engine_model::EngineModel;
use crate::line_log::LineLog;
use crate::policy::Policy;
use crate::rotating_file::RotatingFile;
use serde::{Deserialize, Serialize};
use std::io;
use std::path::PathBuf;
use std::time::Duration;

/// Of the lines. Who changes what a field means, or adds one that replaying needs, counts it up.
pub const VERSION: u64 = 2;

/// Lines that wait to be written; more are dropped and counted. One has some 150 bytes an engine.
const QUEUE_LINES: usize = 1024;

/// The file may not be so short that it holds next to nothing.
pub const BYTES_MIN: u64 = 1 << 20;

/// Where decisions are logged.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DecisionLogPlace {
    pub path: PathBuf,
    /// What the file and the one before it may take together.
    pub bytes: u64,
}

/// A line of the log.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "kebab-case")]
pub enum Line {
    /// Each file and each start of a router begins with one.
    Router(RouterLine),
    Decision(Box<DecisionLine>),
}

/// What holds for the decisions behind it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RouterLine {
    pub version: u64,
    pub policy: Policy,
    pub engine_model: EngineModel,
}

/// A decision that has ended.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct DecisionLine {
    pub version: u64,
    #[serde(flatten)]
    pub record: DecisionRecord,
    /// From the decision to the end of the answer.
    pub total_us: u64,
}

/// Why a line cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum LineError {
    #[error("no line of a decision log: {0}")]
    Format(serde_json::Error),
    #[error("version {found} is not read here; allowed is {VERSION}")]
    Version { found: u64 },
}

impl Line {
    /// Reads a line, whatever it is.
    pub fn read(line: &[u8]) -> Result<Line, LineError> {
        #[derive(Deserialize)]
        struct Versioned {
            version: u64,
        }
        let Versioned { version } = serde_json::from_slice(line).map_err(LineError::Format)?;
        if version != VERSION {
            return Err(LineError::Version { found: version });
        }
        serde_json::from_slice(line).map_err(LineError::Format)
    }

    /// The line as it is written, without its end.
    fn text(&self) -> Vec<u8> {
        // Strings and numbers: nothing in it can fail.
        serde_json::to_vec(self).unwrap_or_default()
    }
}

#[derive(Debug)]
pub struct DecisionLog(LineLog);

impl DecisionLog {
    /// Opens the file and starts the thread that writes.
    pub fn open(
        place: &DecisionLogPlace,
        policy: Policy,
        engine_model: EngineModel,
    ) -> io::Result<DecisionLog> {
        let mut header = Line::Router(RouterLine { version: VERSION, policy, engine_model }).text();
        header.push(b'\n');
        let file = RotatingFile::open(&place.path, place.bytes, header)?;
        Ok(DecisionLog(LineLog::start("decision", QUEUE_LINES, file)?))
    }

    /// Logs a decision that has ended, `total_us` after it was made.
    pub fn push(&self, entry: &Entry, total_us: u64) {
        let line = DecisionLine { version: VERSION, record: entry.record(), total_us };
        self.0.push(Line::Decision(Box::new(line)).text());
    }

    /// Lines that were lost because the queue was full or could not be written.
    pub fn dropped(&self) -> u64 {
        self.0.dropped()
    }

    /// Waits until all lines so far have been written, for at most `limit`.
    pub fn flush(&self, limit: Duration) {
        self.0.flush(limit);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use forebay_steps::{Launch, Profile};
    use proptest::prelude::*;

    fn router_line() -> Line {
        let engine_model = EngineModel::new(&Profile::shipped(Profile::DEFAULT).unwrap(), Launch::Graph);
        Line::Router(RouterLine { version: VERSION, policy: Policy::Lpwl, engine_model })
    }

    #[test]
    fn a_line_is_read_as_it_was_written() {
        let line = router_line();
        assert_eq!(Line::read(&line.text()).unwrap(), line);
    }

    #[test]
    fn what_is_no_line_of_this_version_is_refused_with_the_reason() {
        let whole = router_line().text();
        let newer = String::from_utf8(whole.clone()).unwrap().replace("\"version\":2", "\"version\":3");
        let refused = Line::read(newer.as_bytes()).unwrap_err().to_string();
        assert_eq!(refused, "version 3 is not read here; allowed is 2");
        for bad in [&whole[..whole.len() / 2], b"", b"{}", b"[2]", b"\xFF\x00", b"{\"version\":2}"] {
            assert!(
                Line::read(bad).unwrap_err().to_string().starts_with("no line of a decision log: "),
                "{bad:?}"
            );
        }
    }

    proptest! {
        #[test]
        fn no_bytes_make_the_reader_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let _ = Line::read(&bytes);
        }

        #[test]
        fn a_line_that_was_cut_or_damaged_is_refused_or_a_line(at in 0..200_usize, byte in any::<u8>()) {
            let mut line = router_line().text();
            let at = at % line.len();
            line[at] = byte;
            let _ = Line::read(&line);
            prop_assert!(Line::read(&line[..at]).is_err());
        }
    }
}
