//! Formats of lines: each has a parser that makes a request of a line, and one reader serves all.

use super::error::{LineError, Place, Problem, TraceError};
use super::lines::{Line, Lines, MAX_LINE_BYTES};
use crate::request::TraceRequest;
use std::io::BufRead;
use std::path::Path;
use std::sync::Arc;

/// Requests as they are read.
pub(super) type Requests = Box<dyn Iterator<Item = Result<TraceRequest, TraceError>> + Send>;

/// A format of lines.
pub(super) trait LineParser {
    /// The request of line `number`, or `None` where the line is a header.
    fn parse(&mut self, text: &[u8], number: u64) -> Result<Option<TraceRequest>, Problem>;
}

/// The requests of a file of lines.
pub(super) struct LineRequests<R> {
    pub(super) lines: Lines<R>,
    pub(super) parser: Box<dyn LineParser + Send>,
    pub(super) file: Arc<Path>,
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
