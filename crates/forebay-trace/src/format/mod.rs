//! Trace files of every known format as one stream of requests. This module knows how to tell formats apart, how to open
//! them and what becomes of bad lines; what a format says is in its own module. Reading is streaming: however long the
//! trace, memory holds a line of it, or for session files one request of each.

mod azure;
mod chat;
mod check;
mod detect;
mod error;
mod lines;
mod mooncake;
mod own;
mod weka;

pub use check::MAX_TOKENS;
pub use error::{LineError, Place, Problem, TraceError};
pub use lines::MAX_LINE_BYTES;
pub use own::write_line;
pub use weka::WekaOptions;

use crate::request::TraceRequest;
use lines::{Line, Lines};
use std::fmt;
use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;

/// How many bad lines are kept to be shown; all are counted.
const SHOWN_BAD_LINES: usize = 5;

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
}

impl Format {
    /// All formats with their names.
    pub const ALL: [(Format, &str); 6] = [
        (Format::Forebay, "forebay"),
        (Format::Mooncake, "mooncake"),
        (Format::Weka, "weka"),
        (Format::Bailian, "bailian"),
        (Format::AgenticKv, "agentic-kv"),
        (Format::Azure, "azure"),
    ];

    /// Whether the format says which requests belong to one conversation. In the others each request is a session.
    pub fn records_sessions(self) -> bool {
        !matches!(self, Format::Mooncake | Format::Azure)
    }

    fn names() -> String {
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
    /// Whether the first bad line ends the reading with its error. Otherwise bad lines are left out and counted.
    pub strict: bool,
    /// What to add to Weka's sessions.
    pub weka: WekaOptions,
}

/// The bad lines that were left out.
#[derive(Debug, Default)]
pub struct Skipped {
    /// How many.
    pub lines: u64,
    /// The first few.
    pub first: Vec<LineError>,
}

type Requests = Box<dyn Iterator<Item = Result<TraceRequest, TraceError>> + Send>;

/// The requests of a trace, in the order of the file; those of several session files in order of arrival.
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
    finished: bool,
}

impl TraceReader {
    /// Opens a trace file, or a directory of session files (`*.json`, in the order of their names).
    ///
    /// # Errors
    /// When it cannot be read, is a git-LFS pointer, or is in no known format while `options` names none.
    pub fn open(path: &Path, options: ReadOptions) -> Result<TraceReader, TraceError> {
        let failed = |source| TraceError::Io { file: path.into(), source };
        let is_directory = std::fs::metadata(path).map_err(failed)?.is_dir();
        let files = if is_directory { session_files(path)? } else { vec![path.into()] };
        let mut format = options.format.or(is_directory.then_some(Format::Weka));
        for file in &files {
            let beginning = beginning_of(file)?;
            if detect::is_lfs_pointer(&beginning) {
                return Err(TraceError::LfsPointer { file: file.clone() });
            }
            format = format.or_else(|| detect::detect(&beginning));
        }
        match format {
            None => Err(TraceError::Unrecognised { file: path.into(), known: Format::names() }),
            Some(Format::Weka) => {
                let inputs = files.into_iter().map(|file| {
                    let file: Arc<Path> = file.into();
                    (Arc::clone(&file), weka::reopening(file))
                });
                Ok(TraceReader::new(Box::new(weka::Weka::open(inputs, options.weka)), Format::Weka, options))
            }
            Some(format) => {
                let input = BufReader::new(File::open(path).map_err(failed)?);
                Ok(TraceReader::from_input(path, input, format, options))
            }
        }
    }

    /// Reads `input`, which errors call `name`, as `format`; for Weka's as one session file.
    pub fn from_input(
        name: impl AsRef<Path>,
        input: impl BufRead + Send + 'static,
        format: Format,
        options: ReadOptions,
    ) -> TraceReader {
        let file: Arc<Path> = Arc::from(name.as_ref());
        let parser: Box<dyn LineParser + Send> = match format {
            Format::Forebay => Box::new(own::Own),
            Format::Mooncake => Box::new(mooncake::Mooncake),
            Format::Bailian => Box::new(chat::Chat::new(chat::BAILIAN_BLOCK_TOKENS)),
            Format::AgenticKv => Box::new(chat::Chat::new(chat::AGENTIC_BLOCK_TOKENS)),
            Format::Azure => Box::<azure::Azure>::default(),
            Format::Weka => {
                let input: weka::Input = Box::new(input);
                let session = weka::Weka::open([(file, input)], options.weka);
                return TraceReader::new(Box::new(session), format, options);
            }
        };
        TraceReader::new(Box::new(LineRequests { lines: Lines::new(input), parser, file }), format, options)
    }

    fn new(requests: Requests, format: Format, options: ReadOptions) -> TraceReader {
        TraceReader { requests, format, strict: options.strict, skipped: Skipped::default(), finished: false }
    }

    /// The format that is read.
    pub fn format(&self) -> Format {
        self.format
    }

    /// The bad lines so far.
    pub fn skipped(&self) -> &Skipped {
        &self.skipped
    }
}

impl Iterator for TraceReader {
    type Item = Result<TraceRequest, TraceError>;

    /// The next request. After an error there are no more.
    fn next(&mut self) -> Option<Self::Item> {
        while !self.finished {
            match self.requests.next() {
                Some(Err(TraceError::Line(error))) if !self.strict => self.skipped.add(error),
                Some(Ok(request)) => return Some(Ok(request)),
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

/// A format of lines.
trait LineParser {
    /// The request of line `number`, or `None` where the line is a header.
    fn parse(&mut self, text: &[u8], number: u64) -> Result<Option<TraceRequest>, Problem>;
}

struct LineRequests<R> {
    lines: Lines<R>,
    parser: Box<dyn LineParser + Send>,
    file: Arc<Path>,
}

impl<R: BufRead> Iterator for LineRequests<R> {
    type Item = Result<TraceRequest, TraceError>;

    fn next(&mut self) -> Option<Self::Item> {
        loop {
            let (number, parsed) = match self.lines.next_line() {
                Ok(None) => return None,
                Ok(Some(Line { number, text: Some(text) })) => (number, self.parser.parse(text, number)),
                Ok(Some(Line { number, text: None })) => {
                    (number, Err(Problem::TooLong { limit_bytes: MAX_LINE_BYTES }))
                }
                Err(source) => return Some(Err(TraceError::Io { file: self.file.to_path_buf(), source })),
            };
            let place = Place::Line(number);
            match parsed {
                Ok(None) => {}
                Ok(Some(request)) => return Some(Ok(request)),
                Err(problem) => {
                    return Some(Err(LineError { file: Arc::clone(&self.file), place, problem }.into()));
                }
            }
        }
    }
}

fn beginning_of(file: &Path) -> Result<Vec<u8>, TraceError> {
    let mut beginning = Vec::new();
    let read = File::open(file)
        .and_then(|opened| opened.take(detect::DETECT_BYTES as u64).read_to_end(&mut beginning));
    read.map_err(|source| TraceError::Io { file: file.into(), source })?;
    Ok(beginning)
}

fn session_files(directory: &Path) -> Result<Vec<PathBuf>, TraceError> {
    let entries: io::Result<Vec<PathBuf>> =
        std::fs::read_dir(directory).and_then(|entries| entries.map(|entry| Ok(entry?.path())).collect());
    let mut files = entries.map_err(|source| TraceError::Io { file: directory.into(), source })?;
    files.retain(|file| file.extension().is_some_and(|extension| extension == "json"));
    files.sort();
    match files.len() {
        1..=weka::MAX_SESSION_FILES => Ok(files),
        found => {
            Err(TraceError::SessionFiles { file: directory.into(), found, limit: weka::MAX_SESSION_FILES })
        }
    }
}
