//! Server-sent events as bytes that pass through. It knows where events end and which ones carry usage; it must never
//! know sockets or who reads the stream.

use crate::json::{self, Kind};
use crate::usage::{self, Usage};
use bytes::{Bytes, BytesMut};
use memchr::memmem;
use std::ops::Range;

/// An event that has not ended after this many bytes is passed on unread.
pub const MAX_EVENT_BYTES: usize = 1024 * 1024;

/// Watches a stream for the usage its engine reports. Bytes come out as they went in, whole events at a time; where
/// the usage was asked for by the router and not by the client, what that added is taken out again.
#[derive(Debug)]
pub struct UsageTap {
    /// The client did not ask for usage: take it out.
    hide: bool,
    /// The beginning of an event whose end has not come.
    partial: BytesMut,
    usage: Option<Usage>,
}

impl UsageTap {
    /// A tap at the start of a stream.
    pub fn new(hide: bool) -> UsageTap {
        UsageTap { hide, partial: BytesMut::new(), usage: None }
    }

    /// The last usage that was seen.
    pub fn usage(&self) -> Option<Usage> {
        self.usage
    }

    /// Takes the next bytes of the stream and returns those that can go on; empty when no event has ended yet.
    /// Copies nothing unless an event is split or mentions usage.
    pub fn pass(&mut self, bytes: Bytes) -> Bytes {
        let joined = self.join(bytes);
        let Some(end) = end_of_last_event(&joined) else {
            if joined.len() > MAX_EVENT_BYTES {
                return joined;
            }
            self.partial = BytesMut::from(&joined[..]);
            return Bytes::new();
        };
        let whole = joined.slice(..end);
        self.partial = BytesMut::from(&joined[end..]);
        self.read(whole)
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

    /// Reads whole events. In a JSON string the quotes would be escaped, so the search finds keys only.
    fn read(&mut self, events: Bytes) -> Bytes {
        if memmem::find(&events, b"\"usage\"").is_none() {
            return events;
        }
        let mut kept = BytesMut::with_capacity(events.len());
        for event in Events(&events) {
            match data(event).and_then(usage::read) {
                Some(report) if report.usage.is_some() => {
                    self.usage = report.usage;
                    if !(self.hide && report.without_choices) {
                        kept.extend_from_slice(event);
                    }
                }
                Some(_) if self.hide => match null_usage(event) {
                    Some(field) => {
                        kept.extend_from_slice(&event[..field.start]);
                        kept.extend_from_slice(&event[field.end..]);
                    }
                    None => kept.extend_from_slice(event),
                },
                _ => kept.extend_from_slice(event),
            }
        }
        kept.freeze()
    }
}

/// Where an event has `"usage":null`, with its comma: OpenAI's API adds it to each event but the last one when usage
/// is asked for.
fn null_usage(event: &[u8]) -> Option<Range<usize>> {
    let json = data(event)?;
    let fields = json::fields(json).filter_map(Result::ok);
    let (_, value) = fields.filter(|(key, value)| key == "usage" && value.kind == Kind::Null).last()?;
    let json_start = json.as_ptr() as usize - event.as_ptr() as usize;
    let (value_start, value_end) = (json_start + value.at.start, json_start + value.at.end);
    let key_start = memmem::rfind(&event[..value_start], b"\"usage\"")?;
    let before = event[..key_start].trim_ascii_end();
    if before.ends_with(b",") {
        return Some(before.len() - 1..value_end);
    }
    let after = event[value_end..].trim_ascii_start();
    let comma = usize::from(after.starts_with(b","));
    Some(key_start..event.len() - after.len() + comma)
}

/// The value of an event's only `data` line.
fn data(event: &[u8]) -> Option<&[u8]> {
    let line = event.split(|&byte| byte == b'\n' || byte == b'\r').find(|line| line.starts_with(b"data:"))?;
    Some(line["data:".len()..].trim_ascii())
}

/// The position after the last event that is whole: after its empty line.
fn end_of_last_event(bytes: &[u8]) -> Option<usize> {
    // Streams mostly arrive in whole events, so the search from the end finds the empty line at once.
    (2..=bytes.len()).rev().find(|&end| ends_event(&bytes[..end]))
}

/// Do `bytes` end with an empty line? Lines end with LF, CRLF or CR. A CR at the very end may be half of a CRLF, so
/// only its LF counts as the end then; streams with bare CRs are passed on at their end.
fn ends_event(bytes: &[u8]) -> bool {
    bytes.ends_with(b"\n\n") || bytes.ends_with(b"\n\r\n")
}

/// Splits whole events apart; each keeps its empty line. Bytes after the last empty line are one more item.
struct Events<'a>(&'a [u8]);

impl<'a> Iterator for Events<'a> {
    type Item = &'a [u8];

    fn next(&mut self) -> Option<&'a [u8]> {
        if self.0.is_empty() {
            return None;
        }
        let end = memchr::memchr_iter(b'\n', self.0)
            .map(|newline| newline + 1)
            .find(|&end| ends_event(&self.0[..end]))
            .unwrap_or(self.0.len());
        let (event, rest) = self.0.split_at(end);
        self.0 = rest;
        Some(event)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const USAGE: &str = r#"data: {"id":"a","choices":[],"usage":{"prompt_tokens":7,"completion_tokens":3,"prompt_tokens_details":{"cached_tokens":4}}}"#;
    const PARSED: Usage = Usage { prompt_tokens: 7, completion_tokens: 3, cached_tokens: Some(4) };

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
            crlf: bool,
            hide: bool,
            cuts in prop::collection::vec(0..90_usize, 0..12),
        ) {
            let mut stream: String = texts.iter().map(|text| token(text)).collect();
            stream += USAGE;
            stream += "\n\ndata: [DONE]\n\n";
            if crlf {
                stream = stream.replace('\n', "\r\n");
            }
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
