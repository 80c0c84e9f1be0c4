//! Formats of lines: each has a parser that makes a request of a line, and one reader serves all.
//! Lines are of bounded length. The project's own JSONL is here too, as `sample` and `generate`
//! write it: each line is a [`TraceRequest`], field by field.

use super::check::{FieldNames, check, check_micros};
use super::error::{LineError, Place, Problem, TraceError, parse_object};
use crate::request::TraceRequest;
use std::io::{self, BufRead, Read, Write};
use std::path::Path;
use std::sync::Arc;

/// The longest line that is read. A prompt of four million tokens in blocks of 16 with ten-digit
/// ids takes 3 MB.
pub const MAX_LINE_BYTES: usize = 16 << 20;

const BYTE_ORDER_MARK: &[u8] = b"\xEF\xBB\xBF";

/// The number of a line, counted from 1 with blank lines included, and its text without the line
/// ending, or `None` when it is longer than the limit.
type NumberedLine<'a> = (u64, Option<&'a [u8]>);

/// Reads the lines of `input` that are not blank.
pub(crate) struct Lines<R> {
    input: R,
    number: u64,
    line: Vec<u8>,
    limit_bytes: usize,
}

impl<R: BufRead> Lines<R> {
    pub(crate) fn new(input: R, limit_bytes: usize) -> Lines<R> {
        Lines { input, number: 0, line: Vec::new(), limit_bytes }
    }

    /// The next line, or `None` at the end.
    pub(crate) fn next_line(&mut self) -> io::Result<Option<NumberedLine<'_>>> {
        loop {
            self.line.clear();
            let most = self.limit_bytes as u64 + 1;
            let read = self.input.by_ref().take(most).read_until(b'\n', &mut self.line)?;
            if read == 0 {
                return Ok(None);
            }
            self.number += 1;
            if read as u64 == most && self.line.last() != Some(&b'\n') {
                self.input.skip_until(b'\n')?;
                return Ok(Some((self.number, None)));
            }
            let start = if self.number == 1 && self.line.starts_with(BYTE_ORDER_MARK) { 3 } else { 0 };
            if !self.line[start..].trim_ascii().is_empty() {
                let text = self.line[start..].trim_ascii();
                return Ok(Some((self.number, Some(text))));
            }
        }
    }
}

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
                Ok(Some((number, Some(text)))) => (number, self.parser.parse(text, number)),
                Ok(Some((number, None))) => (number, Err(Problem::TooLong { limit_bytes: MAX_LINE_BYTES })),
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

const OWN_NAMES: FieldNames =
    FieldNames { input: "input_tokens", output: "output_tokens", blocks: "blocks", other_size: "" };

/// The project's own format.
pub(super) struct Own;

impl LineParser for Own {
    fn parse(&mut self, text: &[u8], _number: u64) -> Result<Option<TraceRequest>, Problem> {
        let request: TraceRequest = parse_object(text)?;
        check_micros("arrival_us", Some(request.arrival_us))?;
        check_micros("think_us", request.think_us)?;
        check_micros("service_us", request.service_us)?;
        check(request, &OWN_NAMES).map(Some)
    }
}

/// Writes one request as one line of the project's own format.
pub fn write_line(out: &mut impl Write, request: &TraceRequest) -> io::Result<()> {
    serde_json::to_writer(&mut *out, request)?;
    out.write_all(b"\n")
}

#[cfg(test)]
mod tests {
    use super::Lines;

    fn lines(text: &[u8], limit_bytes: usize) -> Vec<(u64, Option<Vec<u8>>)> {
        let mut lines = Lines::new(text, limit_bytes);
        let mut found = Vec::new();
        while let Some((number, text)) = lines.next_line().unwrap() {
            found.push((number, text.map(<[u8]>::to_vec)));
        }
        found
    }

    #[test]
    fn marks_endings_and_blank_lines_are_tolerated() {
        let found = lines(b"\xEF\xBB\xBFone\r\n\r\n  \ntwo\n\nthree", 100);
        let expected = [(1, "one"), (4, "two"), (6, "three")];
        assert_eq!(found, expected.map(|(number, text)| (number, Some(text.as_bytes().to_vec()))));
    }

    #[test]
    fn a_line_over_the_limit_is_reported_and_the_next_one_read() {
        assert_eq!(
            lines(b"12345\n123456\n1\n", 5),
            [(1, Some(b"12345".to_vec())), (2, None), (3, Some(b"1".to_vec()))]
        );
        assert_eq!(lines(b"123456", 5), [(1, None)]);
    }
}
