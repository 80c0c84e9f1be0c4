//! Reads one large JSON object in pieces: the small fields at its beginning, then the elements of
//! its `requests` array one at a time, so that a session of any length takes the memory of its
//! largest request.

use crate::format::error::Problem;
use std::io::{self, BufRead};

/// The largest element of `requests`, and the largest field before it: a sub-agent's entry holds
/// all of its requests.
pub(super) const MAX_VALUE_BYTES: usize = 64 << 20;

/// Why a piece could not be read. Nothing of the object can be read after that.
#[derive(Debug)]
pub(super) enum ReadError {
    Io(io::Error),
    Text(Problem),
}

impl From<io::Error> for ReadError {
    fn from(error: io::Error) -> ReadError {
        ReadError::Io(error)
    }
}

/// The object in `input`.
pub(super) struct SessionText<R> {
    input: R,
    offset: u64,
    limit_bytes: usize,
}

impl<R: BufRead> SessionText<R> {
    pub(super) fn new(input: R) -> SessionText<R> {
        SessionText { input, offset: 0, limit_bytes: MAX_VALUE_BYTES }
    }

    /// Opens the object, hands each field before `requests` to `field` as JSON texts of its name
    /// and value, and opens the array.
    pub(super) fn open(&mut self, mut field: impl FnMut(&[u8], &[u8])) -> Result<(), ReadError> {
        let (mut name, mut value) = (Vec::new(), Vec::new());
        self.expect(b'{')?;
        loop {
            self.value(&mut name)?;
            self.expect(b':')?;
            if name == br#""requests""# {
                return self.expect(b'[');
            }
            self.value(&mut value)?;
            field(&name, &value);
            match self.next_byte()? {
                b',' => {}
                b'}' => return Err(ReadError::Text(Problem::missing("requests"))),
                other => return Err(self.unexpected(other)),
            }
        }
    }

    /// Replaces `element` with the JSON text of the next element of the array; false after the last
    /// one. What follows the array is not read.
    pub(super) fn next_element(&mut self, element: &mut Vec<u8>) -> Result<bool, ReadError> {
        if matches!(self.peek()?, b',') {
            self.consume(1);
        }
        if self.peek()? == b']' {
            return Ok(false);
        }
        self.value(element)?;
        match self.peek()? {
            b',' | b']' => Ok(true),
            other => Err(self.unexpected(other)),
        }
    }

    /// Replaces `text` with the next value: balanced brackets, a string, or anything up to a
    /// delimiter.
    fn value(&mut self, text: &mut Vec<u8>) -> Result<(), ReadError> {
        text.clear();
        self.peek()?;
        let mut shape = Shape::default();
        loop {
            let chunk = self.input.fill_buf()?;
            if chunk.is_empty() {
                return Err(self.ends_early());
            }
            let taken = shape.extent(chunk);
            if text.len() + taken > self.limit_bytes {
                return Err(ReadError::Text(Problem::TooLong { limit_bytes: self.limit_bytes }));
            }
            text.extend_from_slice(&chunk[..taken]);
            self.consume(taken);
            if shape.complete {
                break;
            }
        }
        if text.is_empty() {
            let found = self.peek()?;
            return Err(self.unexpected(found));
        }
        Ok(())
    }

    fn expect(&mut self, wanted: u8) -> Result<(), ReadError> {
        match self.next_byte()? {
            found if found == wanted => Ok(()),
            found => Err(self.unexpected(found)),
        }
    }

    fn next_byte(&mut self) -> Result<u8, ReadError> {
        let byte = self.peek()?;
        self.consume(1);
        Ok(byte)
    }

    /// The next byte that is not white space.
    fn peek(&mut self) -> Result<u8, ReadError> {
        loop {
            let chunk = self.input.fill_buf()?;
            if chunk.is_empty() {
                return Err(self.ends_early());
            }
            let blank = chunk.iter().take_while(|byte| byte.is_ascii_whitespace()).count();
            let found = chunk.get(blank).copied();
            self.consume(blank);
            if let Some(byte) = found {
                return Ok(byte);
            }
        }
    }

    fn consume(&mut self, bytes: usize) {
        self.input.consume(bytes);
        self.offset += bytes as u64;
    }

    fn unexpected(&self, byte: u8) -> ReadError {
        let shown = char::from(byte).escape_default();
        ReadError::Text(Problem::Malformed(format!("unexpected '{shown}' near byte {}", self.offset)))
    }

    fn ends_early(&self) -> ReadError {
        ReadError::Text(Problem::Malformed(format!(
            "the file ends at byte {} in the middle of the session",
            self.offset
        )))
    }
}

/// How far into a value the reading has come.
#[derive(Default)]
struct Shape {
    depth: usize,
    in_string: bool,
    escaped: bool,
    begun: bool,
    complete: bool,
}

impl Shape {
    /// How many bytes of `chunk` belong to the value; sets `complete` when it ends there.
    fn extent(&mut self, chunk: &[u8]) -> usize {
        for (index, &byte) in chunk.iter().enumerate() {
            if self.in_string {
                self.within_string(byte);
            } else {
                match byte {
                    b'"' => self.in_string = true,
                    b'{' | b'[' => self.depth += 1,
                    b'}' | b']' | b',' | b':' if self.depth == 0 => return self.end(index),
                    b'}' | b']' => self.depth -= 1,
                    _ if self.depth == 0 && self.begun && byte.is_ascii_whitespace() => {
                        return self.end(index);
                    }
                    // A scalar: it ends at the delimiter after it.
                    _ => {
                        self.begun = true;
                        continue;
                    }
                }
            }
            self.begun = true;
            let closed = matches!(byte, b'"' | b'}' | b']') && self.depth == 0 && !self.in_string;
            if closed {
                return self.end(index + 1);
            }
        }
        chunk.len()
    }

    fn within_string(&mut self, byte: u8) {
        match byte {
            _ if self.escaped => self.escaped = false,
            b'\\' => self.escaped = true,
            b'"' => self.in_string = false,
            _ => {}
        }
    }

    fn end(&mut self, at: usize) -> usize {
        self.complete = true;
        at
    }
}

#[cfg(test)]
mod tests {
    use super::{ReadError, SessionText};
    use std::io::BufReader;

    /// The fields and the elements of `text`, read through a buffer of `buffer_bytes`.
    fn read(text: &str, buffer_bytes: usize) -> Result<(Vec<String>, Vec<String>), String> {
        let shown = |error| match error {
            ReadError::Io(error) => error.to_string(),
            ReadError::Text(problem) => problem.to_string(),
        };
        let utf8 = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).unwrap();
        let mut session = SessionText::new(BufReader::with_capacity(buffer_bytes, text.as_bytes()));
        let (mut fields, mut elements, mut element) = (Vec::new(), Vec::new(), Vec::new());
        session.open(|name, value| fields.push(format!("{}={}", utf8(name), utf8(value)))).map_err(shown)?;
        while session.next_element(&mut element).map_err(shown)? {
            elements.push(utf8(&element));
        }
        Ok((fields, elements))
    }

    const SESSION: &str = r#" { "id" : "a\"]}", "n": 64 ,"o":{"p":[1,{}]}, "requests": [ {"t":[1,"]"]} , "x" ,7, [] ], "rest": 1 }"#;

    #[test]
    fn pieces_are_the_same_through_any_buffer() {
        for buffer_bytes in 1..SESSION.len() {
            let (fields, elements) = read(SESSION, buffer_bytes).unwrap();
            assert_eq!(fields, [r#""id"="a\"]}""#, r#""n"=64"#, r#""o"={"p":[1,{}]}"#]);
            assert_eq!(elements, [r#"{"t":[1,"]"]}"#, r#""x""#, "7", "[]"]);
        }
    }

    #[test]
    fn a_cut_or_crooked_session_is_an_error_and_never_a_hang() {
        let end = SESSION.find(", \"rest\"").unwrap() - 1;
        (0..end).for_each(|cut| assert!(read(&SESSION[..cut], 8).is_err(), "cut at {cut}"));
        for crooked in [
            "[]",
            "{}",
            r#"{"a":1}"#,
            r#"{"a" 1}"#,
            r#"{"requests":{}}"#,
            r#"{"requests":[1}"#,
            r#"{"requests":[}"#,
        ] {
            assert!(read(crooked, 8).is_err(), "{crooked}");
        }
        assert_eq!(read(r#"{"requests":[]"#, 8).unwrap().1.len(), 0);
    }

    #[test]
    fn a_value_over_the_limit_is_refused() {
        let mut session = SessionText::new(&br#"{"requests":["12345678","123456789"]}"#[..]);
        session.limit_bytes = 10;
        let mut element = Vec::new();
        session.open(|_, _| ()).unwrap();
        assert!(session.next_element(&mut element).unwrap());
        let Err(ReadError::Text(problem)) = session.next_element(&mut element) else { panic!("not refused") };
        assert_eq!(problem.to_string(), "longer than 10 bytes");
    }
}
