//! A request that is on its way to an engine through Envoy: what its answer means for the router's
//! books. It ends once: with the answer, or as cancelled when it is dropped.

use super::messages::Set;
use super::stream::{AnswerBody, AnswerHead};
use crate::dispatcher::End;
use crate::engines::Attempt;
use crate::hand_over::{HandOverEnd, OpenHandOver};
use crate::health::Failure;
use crate::reader::Reader;
use crate::respond::{BACKEND_HEADER, PREFILL_HEADER};
use crate::state::{Permit, RouterState};
use bytes::{Bytes, BytesMut};
use forebay_otlp::ActiveSpan;
use http::{HeaderValue, StatusCode};
use std::net::SocketAddr;
use std::sync::Arc;

#[derive(Debug)]
pub struct Booking {
    router: Arc<RouterState>,
    /// Gone when it has ended.
    attempt: Option<Attempt>,
    hand_over: Option<OpenHandOver>,
    /// The client asked for a stream.
    is_stream: bool,
    /// The router asked for usage, and not the client.
    hide_usage: bool,
    status: StatusCode,
    /// Reads the answer; `None` until its head is here.
    reader: Option<Reader>,
    /// The first byte of the answer's body has come.
    has_begun: bool,
    /// The answer's body is not seen: it has come when Envoy ends the stream, in whatever way.
    is_hidden: bool,
    /// The request's span, if it is traced.
    span: Option<Box<ActiveSpan>>,
    _permit: Permit,
}

impl Booking {
    pub fn new(
        router: Arc<RouterState>,
        attempt: Attempt,
        hand_over: Option<OpenHandOver>,
        is_stream: bool,
        hide_usage: bool,
        (span, permit): (Option<Box<ActiveSpan>>, Permit),
    ) -> Booking {
        Booking {
            router,
            attempt: Some(attempt),
            hand_over,
            is_stream,
            hide_usage,
            status: StatusCode::OK,
            reader: None,
            has_begun: false,
            is_hidden: false,
            span,
            _permit: permit,
        }
    }

    /// The head of an answer is here. Gives what is added to it.
    pub fn begin(&mut self, head: &AnswerHead) -> Set {
        if let Some(served) = &head.served {
            self.served_by(served);
        }
        self.status = head.status;
        let (reader, decoder) = Reader::of(&head.headers, self.hide_usage);
        // What is compressed passes unread: Envoy would have to be told another length.
        if let Some(attempt) = self.attempt.as_mut().filter(|_| reader.is_of_events()) {
            attempt.is_streamed();
        }
        self.reader = Some(if decoder.is_some() { Reader::Unread } else { reader });
        let Some(attempt) = &self.attempt else { return Set::new() };
        attempt.engine.statuses.count(head.status);
        let name = |value: &HeaderValue| Bytes::copy_from_slice(value.as_bytes());
        let mut set = vec![(BACKEND_HEADER, name(&attempt.engine.target.header))];
        if let Some(open) = &self.hand_over {
            set.push((PREFILL_HEADER, name(&open.prefiller.target.header)));
        }
        match head.body {
            AnswerBody::Shown => {}
            AnswerBody::Hidden => {
                self.first_byte();
                self.is_hidden = true;
            }
            AnswerBody::Absent => {
                self.first_byte();
                self.end();
            }
        }
        set
    }

    /// A part of the answer. Gives what of it may go on.
    pub fn pass(&mut self, bytes: Bytes, is_last: bool) -> Bytes {
        if !bytes.is_empty() {
            self.first_byte();
        }
        let Some(reader) = &mut self.reader else { return bytes };
        let mut passed = reader.pass(bytes);
        if is_last {
            let rest = reader.finish();
            if !rest.is_empty() {
                let mut joined = BytesMut::from(&passed[..]);
                joined.extend_from_slice(&rest);
                passed = joined.freeze();
            }
            self.end();
        }
        passed
    }

    /// Envoy says which engine gave the answer: the request is that one's.
    fn served_by(&mut self, said: &str) {
        let served: Option<SocketAddr> = said.parse().ok();
        let is_served = |attempt: &Attempt| served == attempt.engine.target.address;
        let Some(attempt) = self.attempt.take_if(|attempt| !is_served(attempt)) else { return };
        if let Some(mut open) = self.hand_over.take() {
            open.end(HandOverEnd::DecodeLost, false);
        }
        let engine = served.and_then(|served| self.router.engines.at(served));
        self.attempt = match engine {
            Some(engine) => attempt.moved_to(&engine),
            None => {
                attempt.passed_over(said);
                None
            }
        };
    }

    fn first_byte(&mut self) {
        if std::mem::replace(&mut self.has_begun, true) {
            return;
        }
        if let Some(span) = &mut self.span {
            span.note("http.response.status_code", self.status.as_u16());
            span.event(if self.is_stream { "first-token" } else { "first-byte" });
        }
        if let Some(attempt) = &mut self.attempt {
            attempt.first_byte(self.status.as_u16());
        }
        if let Some(open) = self.hand_over.take() {
            self.handed_over(open);
        }
    }

    /// The engine that was to get the prompt from another one has begun to answer. What that one
    /// did is not seen.
    fn handed_over(&self, mut open: OpenHandOver) {
        let end = match Failure::of_status(self.status.as_u16()) {
            Some(_) => HandOverEnd::DecodeRefused,
            None if self.status.is_client_error() => HandOverEnd::ClientError,
            None if self.is_stream => HandOverEnd::Handed,
            None => HandOverEnd::Unseen,
        };
        if let Some(mut prefill) = open.take_prefill()
            && matches!(end, HandOverEnd::Handed | HandOverEnd::Unseen)
        {
            prefill.first_byte(StatusCode::OK.as_u16());
            prefill.end(End::Answered { status: StatusCode::OK.as_u16(), usage: None });
        }
        open.end(end, end == HandOverEnd::Handed);
    }

    fn end(&mut self) {
        if let (Some(mut attempt), Some(reader)) = (self.attempt.take(), &self.reader) {
            attempt.end_whole(self.status, reader);
        }
        drop(self.span.take());
    }
}

impl Drop for Booking {
    fn drop(&mut self) {
        if self.is_hidden {
            self.end();
        }
    }
}
