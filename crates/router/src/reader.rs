//! Finds the usage that an engine reports in its answer, as the answer passes: a stream of events
//! or a JSON document. It knows bytes, and not where they come from or go.

use crate::encoding::{Coding, Decoder};
use crate::sse::UsageTap;
use crate::usage::{self, Usage};
use bytes::{Bytes, BytesMut};
use http::{HeaderMap, header};

/// Answers that are no stream are searched for usage up to this size.
const MAX_READ_ANSWER_BYTES: usize = 1024 * 1024;

/// Finds the usage in what passes.
#[derive(Debug)]
pub enum Reader {
    /// A stream of events.
    Events(UsageTap),
    /// One JSON document, as far as it was kept.
    Document(BytesMut),
    /// Something that cannot be read.
    Unread,
}

impl Reader {
    /// How an answer with these headers is read, and what makes it plain first. `hide_usage`: the
    /// router asked for usage, and not the client.
    pub fn of(headers: &HeaderMap, hide_usage: bool) -> (Reader, Option<Box<Decoder>>) {
        let content_type = headers.get(header::CONTENT_TYPE);
        let is_stream = content_type.is_some_and(|value| value.as_bytes().starts_with(b"text/event-stream"));
        let reader = || match is_stream {
            true => Reader::Events(UsageTap::new(hide_usage)),
            false => Reader::Document(BytesMut::new()),
        };
        match Coding::of(headers) {
            Coding::Plain => (reader(), None),
            Coding::Known(decoder) => (reader(), Some(decoder)),
            Coding::Unknown => (Reader::Unread, None),
        }
    }

    /// Events pass whole, and some of their bytes may be left out.
    pub fn is_of_events(&self) -> bool {
        matches!(self, Reader::Events(_))
    }

    /// Takes the next bytes, and gives those that can go on.
    pub fn pass(&mut self, bytes: Bytes) -> Bytes {
        match self {
            Reader::Events(tap) => tap.pass(bytes),
            Reader::Document(document) => {
                if document.len() + bytes.len() <= MAX_READ_ANSWER_BYTES {
                    document.extend_from_slice(&bytes);
                }
                bytes
            }
            Reader::Unread => bytes,
        }
    }

    /// What is left when the answer ends.
    pub fn finish(&mut self) -> Bytes {
        match self {
            Reader::Events(tap) => tap.finish(),
            Reader::Document(_) | Reader::Unread => Bytes::new(),
        }
    }

    /// What was reported, and whether it was that the engine failed.
    pub fn outcome(&self) -> (Option<Usage>, bool) {
        match self {
            Reader::Events(tap) => (tap.usage(), tap.has_failed()),
            Reader::Document(document) => {
                usage::read(document).map_or((None, false), |report| (report.usage, report.failed))
            }
            Reader::Unread => (None, false),
        }
    }
}
