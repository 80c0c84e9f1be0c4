//! Trace files of every known format as one stream of requests. This module knows how to tell
//! formats apart, how to open them and what becomes of bad lines; what a format says is in its own
//! module. Reading is streaming: however long the trace, memory holds a line of it, or for session
//! files one request of each.

mod check;
mod coverage;
mod csv;
mod detect;
mod error;
mod input;
mod kind;
mod lines;
mod mooncake;
mod rebase;
mod reread;
mod rows;
mod tracelab;
mod unsupported;
mod weka;

pub use check::MAX_TOKENS;
pub use coverage::Coverage;
pub use error::{LineError, Place, Problem, TraceError};
pub use kind::{Format, ReadOptions, TimeUnit};
pub(crate) use lines::Lines;
pub use lines::{MAX_LINE_BYTES, write_line};
pub use reread::Rereadable;
pub use weka::WekaOptions;

use crate::request::TraceRequest;
use input::{Input, KIND_BYTES};
use lines::{LineParser, LineRequests, Requests};
use rebase::Rebased;
use std::collections::HashMap;
use std::io::{self, BufRead};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// How many bad lines are kept to be shown; all are counted.
const SHOWN_BAD_LINES: usize = 5;

/// The bad lines that were left out.
#[derive(Debug, Default)]
pub struct Skipped {
    pub lines: u64,
    /// The first few.
    pub first: Vec<LineError>,
}

/// The requests of a trace, in the order of the file; those of several session files in order of
/// arrival.
///
/// ```
/// use forebay_trace::format::{Format, ReadOptions, TraceReader};
///
/// let text = &br#"{"timestamp": 1500, "input_length": 600, "output_length": 20, "hash_ids": [4, 7]}"#[..];
/// let options = ReadOptions { format: Some(Format::Mooncake), ..ReadOptions::default() };
/// let mut requests = TraceReader::from_input("inline", text, Format::Mooncake, options);
/// let request = requests.next().unwrap().unwrap();
/// assert_eq!((request.arrival_us, request.input_tokens, request.block_tokens), (1_500_000, 600, 512));
/// assert!(requests.next().is_none());
/// ```
pub struct TraceReader {
    requests: Requests,
    format: Format,
    strict: bool,
    skipped: Skipped,
    coverage: Coverage,
    finished: bool,
}

impl TraceReader {
    /// Opens a trace file, standard input (`-`), or a directory of session files (`*.json`, in the
    /// order of their names). What is compressed with gzip or zstd is unpacked, whatever its name.
    /// Everything is read once, so that it may come through a pipe.
    ///
    /// # Errors
    /// When it cannot be read, is of a kind that no reader takes, or is in no known format while
    /// `options` names none.
    pub fn open(path: &Path, options: ReadOptions) -> Result<TraceReader, TraceError> {
        let failed = |source| TraceError::Io { file: path.into(), source };
        if path != Path::new("-") && std::fs::metadata(path).map_err(failed)?.is_dir() {
            return TraceReader::open_directory(path, options);
        }
        TraceReader::of_input(path, Input::open(path)?, options)
    }

    fn open_directory(path: &Path, options: ReadOptions) -> Result<TraceReader, TraceError> {
        let format = options.format.unwrap_or(Format::Weka);
        if format != Format::Weka {
            let source = io::Error::from(io::ErrorKind::IsADirectory);
            return Err(TraceError::Io { file: path.into(), source });
        }
        options.check(path, format)?;
        let mut inputs = Vec::new();
        for file in session_files(path)? {
            let file: Arc<Path> = file.into();
            // There may be many files, and each beginning is held until it is read.
            let input = Input::new(&file, weka::reopening(Arc::clone(&file)), KIND_BYTES)?;
            inputs.push((file, input.into_bytes()));
        }
        Ok(TraceReader::new(Box::new(weka::Weka::open(inputs, options.weka)), format, options))
    }

    /// Tells the format of what errors call `name`, and reads it.
    fn of_input(name: &Path, input: Input, options: ReadOptions) -> Result<TraceReader, TraceError> {
        let format = match options.format {
            Some(format) => format,
            None => detect::format_of(name, &input.beginning)?,
        };
        options.check(name, format)?;
        Ok(TraceReader::from_input(name, input.into_bytes(), format, options))
    }

    /// Reads the text `input`, which errors call `name`, as `format`; for Weka's as one session
    /// file.
    pub fn from_input(
        name: impl AsRef<Path>,
        input: impl BufRead + Send + 'static,
        format: Format,
        options: ReadOptions,
    ) -> TraceReader {
        let file: Arc<Path> = Arc::from(name.as_ref());
        let (block_tokens, unit_s) = (options.block_tokens(format), options.unit_s(format));
        let parser: Box<dyn LineParser + Send> = match format {
            Format::Forebay => Box::new(lines::Own),
            Format::Mooncake => Box::new(mooncake::Mooncake::new(block_tokens, unit_s, false)),
            Format::Bailian | Format::AgenticKv => {
                Box::new(mooncake::Mooncake::new(block_tokens, unit_s, true))
            }
            Format::Azure => Box::new(rows::Rows::azure()),
            Format::BurstGpt => Box::new(rows::Rows::burstgpt(unit_s)),
            Format::TraceLab => Box::new(tracelab::TraceLab::new()),
            Format::Weka => {
                let input: input::Bytes = Box::new(input);
                let session = weka::Weka::open([(file, input)], options.weka);
                return TraceReader::new(Box::new(session), format, options);
            }
        };
        let lines =
            LineRequests { lines: Lines::new(input, MAX_LINE_BYTES), parser, file: Arc::clone(&file) };
        let requests: Requests = match format {
            Format::Azure | Format::BurstGpt => Box::new(Rebased::new(Box::new(lines), file)),
            _ => Box::new(lines),
        };
        TraceReader::new(requests, format, options)
    }

    fn new(requests: Requests, format: Format, options: ReadOptions) -> TraceReader {
        TraceReader {
            requests,
            format,
            strict: options.strict,
            skipped: Skipped::default(),
            coverage: Coverage::default(),
            finished: false,
        }
    }

    /// The format that is read.
    pub fn format(&self) -> Format {
        self.format
    }

    /// The bad lines so far.
    pub fn skipped(&self) -> &Skipped {
        &self.skipped
    }

    /// Whether block ids have covered the prompts so far.
    pub fn coverage(&self) -> &Coverage {
        &self.coverage
    }
}

impl Iterator for TraceReader {
    type Item = Result<TraceRequest, TraceError>;

    /// The next request. After an error there are no more.
    fn next(&mut self) -> Option<Self::Item> {
        while !self.finished {
            match self.requests.next() {
                Some(Err(TraceError::Line(error))) if !self.strict => self.skipped.add(error),
                Some(Ok(request)) => {
                    self.coverage.add(&request);
                    return Some(Ok(request));
                }
                ended => {
                    self.finished = true;
                    return ended;
                }
            }
        }
        None
    }
}

impl Skipped {
    fn add(&mut self, error: LineError) {
        self.lines += 1;
        if self.first.len() < SHOWN_BAD_LINES {
            self.first.push(error);
        }
    }
}

fn session_files(directory: &Path) -> Result<Vec<PathBuf>, TraceError> {
    let entries: io::Result<Vec<PathBuf>> =
        std::fs::read_dir(directory).and_then(|entries| entries.map(|entry| Ok(entry?.path())).collect());
    let mut files = entries.map_err(|source| TraceError::Io { file: directory.into(), source })?;
    files.retain(|file| {
        let name = file.file_name().unwrap_or_default().as_encoded_bytes();
        [".json", ".json.gz", ".json.zst"].iter().any(|end| name.ends_with(end.as_bytes()))
    });
    files.sort();
    let mut named = HashMap::new();
    for file in &files {
        if let Some(one) = named.insert(weka::session_name(file), file) {
            return Err(TraceError::SessionTwice { one: one.clone(), other: file.clone() });
        }
    }
    match files.len() {
        1..=weka::MAX_SESSION_FILES => Ok(files),
        found => {
            Err(TraceError::SessionFiles { file: directory.into(), found, limit: weka::MAX_SESSION_FILES })
        }
    }
}
