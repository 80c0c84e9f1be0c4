//! Server-sent events from the frames of an HTTP body, as the WHATWG HTML standard defines the
//! stream ("9.2.6 Interpreting an event stream").

/// Splits a body into events. Frames may cut it anywhere; lines may end in LF, CR or CRLF. Only the
/// `data` field is kept: the OpenAI API uses no other.
///
/// ```
/// use forebay_trace::replay::sse::EventScanner;
///
/// let mut scanner = EventScanner::new(1 << 20);
/// let mut events = Vec::new();
/// for frame in [": hello\r\nda", "ta: {\"a\":1}\r", "\n\r\ndata: [DONE]\n\n"] {
///     scanner.feed(frame.as_bytes(), |data| events.push(String::from_utf8_lossy(data).into_owned())).unwrap();
/// }
/// assert_eq!(events, ["{\"a\":1}", "[DONE]"]);
/// ```
#[derive(Debug)]
pub struct EventScanner {
    line: Vec<u8>,
    data: Vec<u8>,
    event_bytes_max: usize,
    /// The previous byte was the CR that ended a line: a LF now belongs to it.
    after_cr: bool,
    /// No line has ended yet: a byte order mark may stand before the first.
    at_start: bool,
}

/// A line or an event is longer than the scanner may hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("an event is longer than {limit_bytes} bytes")]
pub struct TooLong {
    pub limit_bytes: usize,
}

impl EventScanner {
    /// A scanner that holds at most `event_bytes_max` bytes of one line and as many of one event.
    pub fn new(event_bytes_max: usize) -> EventScanner {
        EventScanner { line: Vec::new(), data: Vec::new(), event_bytes_max, after_cr: false, at_start: true }
    }

    /// Takes the next bytes of the body and hands over the data of each event that they complete.
    /// An event that is never completed is dropped, as the standard says.
    pub fn feed(&mut self, mut frame: &[u8], mut on_event: impl FnMut(&[u8])) -> Result<(), TooLong> {
        if self.after_cr && !frame.is_empty() {
            self.after_cr = false;
            frame = frame.strip_prefix(b"\n").unwrap_or(frame);
        }
        while let Some(end) = memchr::memchr2(b'\n', b'\r', frame) {
            self.extend_line(&frame[..end])?;
            let was_cr = frame[end] == b'\r';
            frame = &frame[end + 1..];
            if was_cr {
                self.after_cr = frame.is_empty();
                frame = frame.strip_prefix(b"\n").unwrap_or(frame);
            }
            self.end_line(&mut on_event)?;
        }
        self.extend_line(frame)
    }

    fn extend_line(&mut self, bytes: &[u8]) -> Result<(), TooLong> {
        self.room(self.line.len() + bytes.len())?;
        self.line.extend_from_slice(bytes);
        Ok(())
    }

    fn end_line(&mut self, on_event: &mut impl FnMut(&[u8])) -> Result<(), TooLong> {
        let line = std::mem::take(&mut self.line);
        let outcome = self.read_line(&line, on_event);
        // The buffer is kept: a stream has thousands of lines.
        self.line = line;
        self.line.clear();
        outcome
    }

    fn read_line(&mut self, mut line: &[u8], on_event: &mut impl FnMut(&[u8])) -> Result<(), TooLong> {
        if std::mem::take(&mut self.at_start) {
            line = line.strip_prefix(b"\xEF\xBB\xBF").unwrap_or(line);
        }
        if line.is_empty() {
            // Each data line left a line feed behind it; the last one is not part of the data.
            if let Some((_, data)) = self.data.split_last() {
                on_event(data);
            }
            self.data.clear();
            return Ok(());
        }
        let (field, value) = match memchr::memchr(b':', line) {
            Some(colon) => (&line[..colon], &line[colon + 1..]),
            None => (line, &[][..]),
        };
        if field == b"data" {
            let value = value.strip_prefix(b" ").unwrap_or(value);
            self.room(self.data.len() + value.len() + 1)?;
            self.data.extend_from_slice(value);
            self.data.push(b'\n');
        }
        Ok(())
    }

    fn room(&self, bytes: usize) -> Result<(), TooLong> {
        if bytes > self.event_bytes_max {
            return Err(TooLong { limit_bytes: self.event_bytes_max });
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn scan<'a>(frames: impl IntoIterator<Item = &'a [u8]>) -> Vec<Vec<u8>> {
        let mut scanner = EventScanner::new(1 << 20);
        let mut events = Vec::new();
        for frame in frames {
            scanner.feed(frame, |data| events.push(data.to_vec())).unwrap();
        }
        events
    }

    #[test]
    fn comments_other_fields_and_the_byte_order_mark_are_not_data() {
        let events =
            scan([&b"\xEF\xBB\xBFdata:first\n: ping\nevent: x\nid: 3\nretry\n\n\n\ndata: second\n\n"[..]]);
        assert_eq!(events, [b"first".to_vec(), b"second".to_vec()]);
    }

    #[test]
    fn data_lines_of_one_event_are_joined_and_one_space_is_dropped() {
        assert_eq!(scan([&b"data:  a\ndata:b\ndata\n\n"[..]]), [b" a\nb\n".to_vec()]);
    }

    #[test]
    fn an_event_that_was_not_ended_is_dropped() {
        assert!(scan([&b"data: half\n"[..]]).is_empty());
    }

    #[test]
    fn a_line_or_an_event_over_the_limit_is_refused() {
        let refused = Err(TooLong { limit_bytes: 16 });
        assert_eq!(EventScanner::new(16).feed(&[b'x'; 17], |_| {}), refused);
        assert_eq!(EventScanner::new(16).feed(b"data: 123456789\ndata: 123456789\n", |_| {}), refused);
        assert_eq!(EventScanner::new(16).feed(b"data: 123456789\n\ndata: 123456789\n\n", |_| {}), Ok(()));
    }

    /// The standard's rules on the whole body at once, as a second opinion.
    fn naive(body: &str) -> Vec<String> {
        let body = body.strip_prefix('\u{feff}').unwrap_or(body).replace("\r\n", "\n").replace('\r', "\n");
        let complete = body.rfind('\n').map_or("", |end| &body[..=end]);
        let mut events = Vec::new();
        let mut data: Vec<String> = Vec::new();
        for line in complete.lines() {
            match line.split_once(':').unwrap_or((line, "")) {
                ("", "") if line.is_empty() => {
                    if !data.is_empty() {
                        events.push(data.join("\n"));
                    }
                    data.clear();
                }
                ("data", value) => data.push(value.strip_prefix(' ').unwrap_or(value).to_owned()),
                _ => {}
            }
        }
        events
    }

    fn body() -> impl Strategy<Value = String> {
        let piece = prop_oneof![
            Just("data: "),
            Just("data:"),
            Just("data"),
            Just("event: e"),
            Just(":"),
            Just(" "),
            Just("{\"x\":1}"),
            Just("ä"),
            Just("\n"),
            Just("\n\n"),
            Just("\r"),
            Just("\r\n"),
            Just("\r\n\r\n"),
            Just("\u{feff}"),
        ];
        prop::collection::vec(piece, 0..40).prop_map(|pieces| pieces.concat())
    }

    proptest! {
        #[test]
        fn any_split_into_frames_gives_the_same_events(body in body(), cuts in prop::collection::vec(0usize..200, 0..20)) {
            let bytes = body.as_bytes();
            let mut cuts: Vec<usize> = cuts.into_iter().map(|cut| cut.min(bytes.len())).collect();
            cuts.extend([0, bytes.len()]);
            cuts.sort_unstable();
            let events = scan(cuts.windows(2).map(|pair| &bytes[pair[0]..pair[1]]));
            let expected: Vec<Vec<u8>> = naive(&body).into_iter().map(String::into_bytes).collect();
            prop_assert_eq!(events, expected);
        }

        #[test]
        fn arbitrary_bytes_never_panic(frames in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..64), 0..16)) {
            let mut scanner = EventScanner::new(64);
            for frame in &frames {
                if scanner.feed(frame, |_| {}).is_err() {
                    break;
                }
            }
        }
    }
}
