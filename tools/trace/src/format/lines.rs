//! Lines of a text file, one at a time and of bounded length.

use std::io::{self, BufRead, Read};

/// The longest line that is read. A prompt of four million tokens in blocks of 16 with ten-digit
/// ids takes 3 MB.
pub const MAX_LINE_BYTES: usize = 16 << 20;

const BYTE_ORDER_MARK: &[u8] = b"\xEF\xBB\xBF";

/// Reads lines out of `input`.
pub(super) struct Lines<R> {
    input: R,
    number: u64,
    line: Vec<u8>,
    limit_bytes: usize,
}

/// A line that is not blank.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Line<'a> {
    /// Counted from 1, blank lines included.
    pub number: u64,
    /// The text without its line ending, or `None` when it is longer than the limit.
    pub text: Option<&'a [u8]>,
}

impl<R: BufRead> Lines<R> {
    pub(super) fn new(input: R) -> Lines<R> {
        Lines { input, number: 0, line: Vec::new(), limit_bytes: MAX_LINE_BYTES }
    }

    /// The next line that is not blank, or `None` at the end.
    pub(super) fn next_line(&mut self) -> io::Result<Option<Line<'_>>> {
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
                return Ok(Some(Line { number: self.number, text: None }));
            }
            let start = if self.number == 1 && self.line.starts_with(BYTE_ORDER_MARK) { 3 } else { 0 };
            let text_bytes = self.line[start..].trim_ascii().len();
            if text_bytes > 0 {
                let text = self.line[start..].trim_ascii();
                return Ok(Some(Line { number: self.number, text: Some(text) }));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{Line, Lines};

    fn lines(text: &[u8], limit_bytes: usize) -> Vec<(u64, Option<Vec<u8>>)> {
        let mut lines = Lines::new(text);
        lines.limit_bytes = limit_bytes;
        let mut found = Vec::new();
        while let Some(Line { number, text }) = lines.next_line().unwrap() {
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
