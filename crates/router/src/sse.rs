//! Server-sent events as bytes that pass through. It knows where events end, which ones carry usage
//! and which say that the engine failed.
//!
//! Lines end with LF, CRLF or CR, in any mixture, and an event may have several `data` lines (HTML
//! standard, section 9.2.6). An event goes on as soon as its empty line is there: a LF that turns
//! out to belong to its last CR follows it.

use crate::json::{self, Kind};
use crate::usage::{self, Usage};
use bytes::{Buf, Bytes, BytesMut};
use memchr::memmem::Finder;
use memchr::{memchr, memchr2_iter, memmem, memrchr2_iter};
use std::borrow::Cow;
use std::ops::Range;
use std::sync::LazyLock;

/// An event that has not ended after this many bytes is passed on unread.
pub const MAX_EVENT_BYTES: usize = 1024 * 1024;

/// In a JSON string the quotes would be escaped, so these find keys and whole strings only.
static USAGE: LazyLock<Finder> = LazyLock::new(|| Finder::new(b"\"usage\""));
static ERROR: LazyLock<Finder> = LazyLock::new(|| Finder::new(b"\"error\""));

/// Watches a stream for the usage its engine reports. Bytes come out as they went in, whole events
/// at a time; where the usage was asked for by the router and not by the client, what that added is
/// taken out again.
#[derive(Debug)]
pub struct UsageTap {
    /// The client did not ask for usage: take it out.
    hide: bool,
    /// The beginning of an event whose end has not come.
    partial: BytesMut,
    /// The last event ended with a CR and was taken out: a LF that comes first now is its own.
    drop_lf: bool,
    usage: Option<Usage>,
    failed: bool,
}

impl UsageTap {
    /// A tap at the start of a stream.
    pub fn new(hide: bool) -> UsageTap {
        UsageTap { hide, partial: BytesMut::new(), drop_lf: false, usage: None, failed: false }
    }

    /// The last usage that was seen.
    pub fn usage(&self) -> Option<Usage> {
        self.usage
    }

    /// Has an event said that the engine failed?
    pub fn has_failed(&self) -> bool {
        self.failed
    }

    /// Takes the next bytes of the stream and returns those that can go on; empty when no event has
    /// ended yet. Copies nothing unless an event is split or mentions usage.
    pub fn pass(&mut self, mut bytes: Bytes) -> Bytes {
        if self.drop_lf && !bytes.is_empty() {
            self.drop_lf = false;
            if bytes[0] == b'\n' {
                bytes.advance(1);
            }
        }
        let joined = self.join(bytes);
        let end = end_of_last_event(&joined).or_else(|| end_of_comments(&joined));
        let Some(end) = end else {
            if joined.len() > MAX_EVENT_BYTES {
                return joined;
            }
            self.partial = BytesMut::from(&joined[..]);
            return Bytes::new();
        };
        let whole = joined.slice(..end);
        self.partial = BytesMut::from(&joined[end..]);
        let events = self.read(whole);
        // What follows is here already: it would have begun with that LF.
        self.drop_lf &= self.partial.is_empty();
        events
    }

    /// What is left when the stream ends.
    pub fn finish(&mut self) -> Bytes {
        let rest = self.partial.split().freeze();
        self.read(rest)
    }

    fn join(&mut self, bytes: Bytes) -> Bytes {
        if self.partial.is_empty() {
            return bytes;
        }
        self.partial.extend_from_slice(&bytes);
        self.partial.split().freeze()
    }

    /// Reads whole events.
    fn read(&mut self, events: Bytes) -> Bytes {
        if USAGE.find(&events).is_none() && ERROR.find(&events).is_none() {
            return events;
        }
        let mut kept = BytesMut::with_capacity(events.len());
        for event in Events(&events) {
            let data = Data::of(event);
            let report = data.as_ref().and_then(|data| usage::read(&data.json));
            self.failed |= report.is_some_and(|report| report.failed);
            self.drop_lf = false;
            match report {
                Some(report) if report.usage.is_some() => {
                    self.usage = report.usage;
                    if self.hide && report.without_choices {
                        self.drop_lf = event.ends_with(b"\r");
                        // The second half of the line end before it, whose first half has passed.
                        if event.starts_with(b"\n") {
                            kept.extend_from_slice(b"\n");
                        }
                    } else {
                        kept.extend_from_slice(event);
                    }
                }
                Some(report) => {
                    if let (Some(usage), Some(tokens)) = (&mut self.usage, report.more_output_tokens) {
                        usage.completion_tokens = tokens;
                    }
                    let hidden = data.filter(|_| self.hide).and_then(|data| data.null_usage());
                    match hidden {
                        Some(field) => {
                            kept.extend_from_slice(&event[..field.start]);
                            kept.extend_from_slice(&event[field.end..]);
                        }
                        None => kept.extend_from_slice(event),
                    }
                }
                None => kept.extend_from_slice(event),
            }
        }
        kept.freeze()
    }
}

/// What an event's `data` lines say: one text, with a line feed between two lines.
struct Data<'a> {
    json: Cow<'a, [u8]>,
    /// Where each line's value begins: in the text, and in the event.
    lines: Vec<(usize, usize)>,
}

impl<'a> Data<'a> {
    fn of(event: &'a [u8]) -> Option<Data<'a>> {
        let mut data: Option<Data<'a>> = None;
        let mut start = 0;
        for end in memchr2_iter(b'\n', b'\r', event).chain([event.len()]) {
            let line = &event[start..end];
            if let Some(value) = line.strip_prefix(b"data:") {
                let at = start + "data:".len();
                match &mut data {
                    None => data = Some(Data { json: Cow::Borrowed(value), lines: vec![(0, at)] }),
                    Some(data) => {
                        let json = data.json.to_mut();
                        json.push(b'\n');
                        data.lines.push((json.len(), at));
                        json.extend_from_slice(value);
                    }
                }
            }
            start = end + 1;
        }
        data
    }

    /// The place in the event of a place in the text.
    fn place(&self, at: usize) -> usize {
        let line = self.lines.partition_point(|&(start, _)| start <= at).saturating_sub(1);
        self.lines.get(line).map_or(at, |&(start, in_event)| in_event + at - start)
    }

    /// Where the event has `"usage":null`, with its comma: OpenAI's API adds it to each event but
    /// the last one when usage is asked for.
    fn null_usage(&self) -> Option<Range<usize>> {
        let json = &self.json[..];
        let fields = json::fields(json).filter_map(Result::ok);
        let (_, value) = fields.filter(|(key, value)| key == "usage" && value.kind == Kind::Null).last()?;
        let key_start = memmem::rfind(&json[..value.at.start], b"\"usage\"")?;
        let before = json[..key_start].trim_ascii_end();
        let (start, end) = if before.ends_with(b",") {
            (before.len() - 1, value.at.end)
        } else {
            let after = json[value.at.end..].trim_ascii_start();
            let comma = after.starts_with(b",").then(|| json.len() - after.len() + 1);
            (key_start, comma.unwrap_or(value.at.end))
        };
        Some(self.place(start)..self.place(end - 1) + 1)
    }
}

/// The position after the last event that is whole: after its empty line.
fn end_of_last_event(bytes: &[u8]) -> Option<usize> {
    // Streams mostly arrive in whole events, so the search from the end finds the empty line at
    // once.
    memrchr2_iter(b'\n', b'\r', bytes).map(|at| at + 1).find(|&end| ends_event(&bytes[..end]))
}

/// The position after the whole comments and empty lines that `bytes` begin with: engines send them
/// to keep a connection, and they belong to no event.
fn end_of_comments(bytes: &[u8]) -> Option<usize> {
    let mut end = 0;
    while let Some(b':' | b'\n' | b'\r') = bytes.get(end)
        && let Some(line) = memchr(b'\n', &bytes[end..])
    {
        // A CR before the CRLF ends the comment, and what follows it may be no comment.
        let text = &bytes[end..end + line];
        if memchr(b'\r', text).is_some_and(|cr| cr + 1 < line) {
            break;
        }
        end += line + 1;
    }
    (end > 0).then_some(end)
}

/// Do `bytes`, whose last byte is a LF or a CR, end with an empty line? A CR at the end may be half
/// of a CRLF; the event has ended all the same.
fn ends_event(bytes: &[u8]) -> bool {
    let line_end = if bytes.ends_with(b"\r\n") { 2 } else { 1 };
    matches!(bytes[..bytes.len() - line_end].last(), Some(b'\n' | b'\r'))
}

/// Splits whole events apart; each keeps its empty line. Bytes after the last empty line are one
/// more item.
struct Events<'a>(&'a [u8]);

impl<'a> Iterator for Events<'a> {
    type Item = &'a [u8];

    fn next(&mut self) -> Option<&'a [u8]> {
        if self.0.is_empty() {
            return None;
        }
        let end = memchr2_iter(b'\n', b'\r', self.0)
            .map(|at| at + 1)
            .find(|&end| ends_event(&self.0[..end]))
            .unwrap_or(self.0.len());
        // A LF that follows a CR is the second half of its line end.
        let half = self.0[..end].ends_with(b"\r") && self.0[end..].starts_with(b"\n");
        let (event, rest) = self.0.split_at(end + usize::from(half));
        self.0 = rest;
        Some(event)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const USAGE: &str = r#"data: {"id":"a","choices":[],"usage":{"prompt_tokens":7,"completion_tokens":3,"prompt_tokens_details":{"cached_tokens":4}}}"#;
    const PARSED: Usage =
        Usage { prompt_tokens: 7, completion_tokens: 3, cached_tokens: Some(4), loaded_tokens: None };

    fn token(text: &str) -> String {
        format!("data: {}\n\n", serde_json::json!({"id": "a", "choices": [{"delta": {"content": text}}]}))
    }

    /// Sends `stream` through a tap in the given pieces.
    fn through(hide: bool, stream: &[u8], cuts: &[usize]) -> (Vec<u8>, Option<Usage>) {
        let mut tap = UsageTap::new(hide);
        let mut out = Vec::new();
        let mut rest = Bytes::copy_from_slice(stream);
        for &cut in cuts {
            out.extend_from_slice(&tap.pass(rest.split_to(cut.min(rest.len()))));
        }
        out.extend_from_slice(&tap.pass(rest));
        out.extend_from_slice(&tap.finish());
        (out, tap.usage())
    }

    #[test]
    fn usage_that_the_client_did_not_ask_for_is_invisible() {
        let stream = format!("{}{}{USAGE}\n\ndata: [DONE]\n\n", token("a"), token("b"));
        let wanted = format!("{}{}data: [DONE]\n\n", token("a"), token("b"));
        assert_eq!(through(true, stream.as_bytes(), &[]), (wanted.into_bytes(), Some(PARSED)));
        assert_eq!(through(false, stream.as_bytes(), &[]), (stream.into_bytes(), Some(PARSED)));
    }

    #[test]
    fn null_usage_that_asking_adds_is_taken_out_exactly() {
        let table = [
            (r#"{"id":"a","choices":[{}],"usage":null}"#, r#"{"id":"a","choices":[{}]}"#),
            (r#"{"id":"a", "usage": null, "choices":[{}]}"#, r#"{"id":"a", "choices":[{}]}"#),
            (r#"{"usage":null,"choices":[{}]}"#, r#"{"choices":[{}]}"#),
            (r#"{"usage":null}"#, "{}"),
            (r#"{"choices":[{"usage":null}]}"#, r#"{"choices":[{"usage":null}]}"#),
            (
                r#"{"choices":[{"text":"\",\"usage\":null,\""}]}"#,
                r#"{"choices":[{"text":"\",\"usage\":null,\""}]}"#,
            ),
        ];
        for (sent, wanted) in table {
            let (out, _) = through(true, format!("data: {sent}\n\n").as_bytes(), &[]);
            assert_eq!(String::from_utf8(out).unwrap(), format!("data: {wanted}\n\n"));
        }
    }

    #[test]
    fn usage_on_an_event_with_choices_is_kept_and_read() {
        let event = USAGE.replace("[]", "[{}]") + "\n\n";
        assert_eq!(through(true, event.as_bytes(), &[]), (event.into_bytes(), Some(PARSED)));
    }

    #[test]
    fn comments_crlf_and_foreign_events_pass_unchanged() {
        let stream = ": ping\r\n\r\nevent: x\r\nid: 4\r\ndata: not json \"usage\"\r\n\r\ndata:\n\n\n\nrest";
        assert_eq!(through(true, stream.as_bytes(), &[]), (stream.as_bytes().to_vec(), None));
        let (out, usage) = through(true, USAGE.replace(' ', "").as_bytes(), &[]);
        assert_eq!(
            (out.len(), usage),
            (0, Some(PARSED)),
            "an event at the end of a stream needs no empty line"
        );
    }

    /// All forms of the empty line that ends an event.
    const ENDS: [&str; 8] = ["\n\n", "\r\n\r\n", "\r\r", "\n\r\n", "\r\n\n", "\r\n\r", "\n\r", "\r\r\n"];

    #[test]
    fn an_event_goes_on_when_its_last_line_ends_however_lines_end() {
        for end in ENDS {
            let mut tap = UsageTap::new(true);
            for text in ["a", "b"] {
                let event = token(text).trim_end().to_owned() + end;
                assert_eq!(tap.pass(Bytes::from(event.clone())), event, "{end:?}");
            }
            let usage = Bytes::from(USAGE.to_owned() + end);
            assert!(tap.pass(usage).is_empty(), "{end:?}: usage is not shown");
            let done = Bytes::from(format!("data: [DONE]{end}"));
            assert_eq!(tap.pass(done.clone()), done, "{end:?}");
            assert_eq!(tap.usage(), Some(PARSED), "{end:?}");
        }
    }

    #[test]
    fn several_data_lines_are_one_event_whose_usage_is_learned_and_hidden() {
        let split = |json: &str, end: &str| {
            let lines = json.replace(',', &format!(",{end}data:  ")).replace('{', &format!("{{{end}data:"));
            format!("event: x{end}data: {lines}{end}{end}")
        };
        for end in ["\n", "\r\n", "\r"] {
            let usage = split(USAGE.trim_start_matches("data: "), end);
            let done = format!("data: [DONE]{end}{end}");
            let (out, learned) = through(true, (usage.clone() + &done).as_bytes(), &[]);
            assert_eq!((String::from_utf8(out).unwrap(), learned), (done, Some(PARSED)), "{end:?}");
            assert_eq!(through(false, usage.as_bytes(), &[]).0, usage.as_bytes());
            for (json, wanted) in [
                (r#"{"id":"a","choices":[7],"usage":null}"#, r#"{"id":"a","choices":[7]}"#),
                (r#"{"usage":null,"choices":[7]}"#, r#"{"choices":[7]}"#),
                (r#"{"usage":null}"#, "{}"),
            ] {
                let (out, _) = through(true, split(json, end).as_bytes(), &[]);
                let data = Data::of(&out).unwrap();
                let seen: serde_json::Value = serde_json::from_slice(&data.json).unwrap();
                assert_eq!(seen, serde_json::from_str::<serde_json::Value>(wanted).unwrap(), "{end:?}");
            }
        }
    }

    #[test]
    fn comments_that_keep_a_connection_go_on_at_once() {
        let mut tap = UsageTap::new(true);
        for comment in [": ping\n", "\n", ": ping\r\n", "\r\n", ": ping\n\n"] {
            assert_eq!(tap.pass(Bytes::from_static(comment.as_bytes())), comment);
        }
        assert!(tap.pass(Bytes::from_static(b": ping\ndata: x\n")) == ": ping\n");
        assert_eq!(tap.pass(Bytes::from_static(b"\n")), "data: x\n\n");
    }

    #[test]
    fn an_error_object_in_a_stream_is_a_failure_and_passes_unchanged() {
        for error in [
            r#"data: {"error":{"message":"out of blocks","code":500}}"#,
            r#"data: {"object":"error","message":"out of blocks"}"#,
            "event: error\ndata: {\"type\":\"error\",\"error\":{\"type\":\"api_error\"}}",
            r#"data: {"type":"response.failed","response":{"error":{"code":"server_error"}}}"#,
        ] {
            let stream = format!("{}{error}\n\ndata: [DONE]\n\n", token("a"));
            let mut tap = UsageTap::new(true);
            assert_eq!(tap.pass(Bytes::from(stream.clone())), stream);
            assert!(tap.has_failed(), "{error}");
        }
        for fine in [
            token("\"error\":{}"),
            "data: {\"choices\":[{}],\"error\":null}\n\n".into(),
            "data: {\"type\":\"response.created\",\"response\":{\"error\":null}}\n\n".into(),
        ] {
            let mut tap = UsageTap::new(true);
            tap.pass(Bytes::from(fine.clone()));
            assert!(!tap.has_failed(), "{fine}");
        }
    }

    #[test]
    fn an_event_without_end_is_bounded_and_nothing_of_it_is_lost() {
        let endless = vec![b'x'; MAX_EVENT_BYTES + 10];
        let mut tap = UsageTap::new(true);
        assert!(tap.pass(Bytes::copy_from_slice(&endless[..MAX_EVENT_BYTES])).is_empty());
        assert_eq!(tap.pass(Bytes::copy_from_slice(&endless[MAX_EVENT_BYTES..])), endless);
        assert!(tap.finish().is_empty());
    }

    #[test]
    fn whole_events_are_not_copied() {
        let bytes = Bytes::from(token("a"));
        let address = bytes.as_ptr();
        assert_eq!(UsageTap::new(true).pass(bytes).as_ptr(), address);
    }

    proptest! {
        #[test]
        fn any_split_into_frames_gives_the_same_stream(
            texts in prop::collection::vec(".{0,20}", 0..6),
            ends in prop::collection::vec(prop::sample::select(ENDS.to_vec()), 8),
            hide: bool,
            cuts in prop::collection::vec(0..90_usize, 0..12),
        ) {
            let events = texts.iter().map(|text| token(text).trim_end().to_owned());
            let events = events.chain([USAGE.to_owned(), "data: [DONE]".to_owned()]);
            let stream: String = events.zip(&ends).map(|(event, end)| event + end).collect();
            let whole = through(hide, stream.as_bytes(), &[]);
            prop_assert_eq!(whole.1, Some(PARSED));
            if !hide {
                prop_assert_eq!(&whole.0, stream.as_bytes());
            }
            prop_assert_eq!(through(hide, stream.as_bytes(), &cuts), whole);
        }

        #[test]
        fn arbitrary_bytes_pass_unchanged(bytes: Vec<u8>, cuts in prop::collection::vec(0..20_usize, 0..6)) {
            prop_assert_eq!(through(false, &bytes, &cuts).0, bytes);
        }
    }
}
