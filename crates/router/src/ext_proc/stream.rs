//! One HTTP request as Envoy tells it, message by message, and what Envoy is told in turn: a state
//! machine that takes messages and gives steps. It does no I/O, chooses no engine and keeps no
//! books.
//!
//! ```text
//! request:  expected --head--> receiving --all is here--> deciding --decided--> passing
//! answer:   expected --head--> passing --end--> ended
//! ```
//!
//! The two halves are apart: Envoy may answer itself before the request is here. When all is here
//! depends on the mode in which Envoy sends bodies, which its first message says.

use super::api::{
    BodySendMode, HttpBody, HttpHeaders, Metadata, ProcessingRequest, ProcessingResponse,
    ProtocolConfiguration, Told,
};
use super::heads::{self, BadHead};
use super::messages::{self, Destination, Set};
use crate::refusal::Refusal;
use bytes::{Bytes, BytesMut};
use http::request::Parts as Head;
use http::{HeaderMap, Response, StatusCode};

/// What is to be done after a message.
#[derive(Debug)]
pub enum Step {
    /// Envoy is told this; perhaps nothing.
    Say(Vec<ProcessingResponse>),
    /// Somebody says where the request goes: [`Stream::decided`].
    Decide(Asked),
    /// The request is answered with this: [`Stream::answered`].
    Refuse(Refusal),
    /// Somebody looks at the head of the answer: [`Stream::begun`].
    Begin(AnswerHead),
    /// Somebody looks at a part of the answer: [`Stream::passed`].
    Pass(Bytes, Part),
}

/// A request, as far as it comes before it goes anywhere.
#[derive(Debug)]
pub struct Asked {
    pub head: Head,
    /// `None` where Envoy sends it too late, or not at all.
    pub body: Option<Bytes>,
    /// The engines that may be chosen, if Envoy says it.
    pub subset: Option<Vec<String>>,
    /// The body, and the answer, may be changed.
    pub may_change: bool,
}

/// What comes of a request.
#[derive(Debug)]
pub enum Decision {
    Send {
        destination: Destination,
        /// The body, changed or not.
        body: Bytes,
    },
    /// No engine is asked.
    Answer(Response<Bytes>),
}

/// The head of an answer.
#[derive(Debug)]
pub struct AnswerHead {
    pub status: StatusCode,
    pub headers: HeaderMap,
    /// The engine that gave it, if Envoy says it.
    pub served: Option<String>,
    /// What follows.
    pub body: AnswerBody,
}

/// What is seen of an answer's body.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AnswerBody {
    Shown,
    /// Envoy does not show it.
    Hidden,
    /// There is none.
    Absent,
}

/// Which part of an answer it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Part {
    Middle,
    Last,
    /// Nothing, behind what was the last part: trailers say that it was.
    Trailers,
}

/// Envoy does what the protocol, or this picker, does not allow.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Violation {
    #[error("{0} is {1}; NONE, STREAMED, BUFFERED and FULL_DUPLEX_STREAMED are allowed")]
    Mode(&'static str, i32),
    #[error("observability_mode is set; a picker must be able to answer")]
    Observed,
    #[error("a message has no content that is known")]
    Empty,
    #[error("{0} came where {1}")]
    Order(&'static str, &'static str),
    #[error(transparent)]
    Head(#[from] BadHead),
}

/// How bodies come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum BodyMode {
    None,
    Streamed,
    Buffered,
    FullDuplex,
}

#[derive(Debug, Clone, Copy)]
struct Modes {
    request: BodyMode,
    answer: BodyMode,
    /// Envoy does not wait for an answer to the head before it sends the body.
    at_once: bool,
}

#[derive(Debug)]
enum RequestState {
    Expected,
    /// Its body comes.
    Receiving(Box<Received>),
    /// Somebody decides where it goes.
    Deciding(Owed),
    /// What still comes of it passes.
    Passing,
}

#[derive(Debug)]
struct Received {
    head: Head,
    subset: Option<Vec<String>>,
    body: BytesMut,
    /// Messages that the body came in.
    messages: usize,
}

/// The messages that Envoy waits for when it is decided where the request goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Owed {
    /// To the head, and to so many parts of the body.
    Head { parts: usize, trailers: bool },
    /// The same, with the body streamed.
    Streamed { trailers: bool },
    /// To the body that Envoy holds. The head has its answer.
    Body,
    /// The same to trailers, where there was no body.
    Trailers,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum AnswerState {
    Expected,
    Passing,
    Ended,
}

#[derive(Debug)]
pub struct Stream {
    max_body_bytes: usize,
    modes: Option<Modes>,
    request: RequestState,
    answer: AnswerState,
    /// Envoy has been given an answer: whatever it says now, it wants to hear nothing.
    is_over: bool,
}

impl Stream {
    /// Nothing has come. A longer body is refused.
    pub fn new(max_body_bytes: usize) -> Stream {
        let (request, answer) = (RequestState::Expected, AnswerState::Expected);
        Stream { max_body_bytes, modes: None, request, answer, is_over: false }
    }

    /// Nothing more is to be said.
    pub fn is_over(&self) -> bool {
        self.is_over
    }

    /// The request's body is on its way.
    pub fn is_receiving(&self) -> bool {
        matches!(self.request, RequestState::Expected | RequestState::Receiving(_)) && !self.is_over
    }

    /// Envoy has said something.
    pub fn on(&mut self, message: ProcessingRequest) -> Result<Step, Violation> {
        let ProcessingRequest { request, metadata_context, observability_mode, protocol_config } = message;
        if self.is_over {
            return Ok(Step::Say(Vec::new()));
        }
        if observability_mode {
            return Err(Violation::Observed);
        }
        let modes = match self.modes {
            Some(modes) => modes,
            None => *self.modes.insert(Modes::of(protocol_config)?),
        };
        match request.ok_or(Violation::Empty)? {
            Told::RequestHeaders(headers) => self.request_head(modes, headers, metadata_context),
            Told::RequestBody(body) => self.request_body(modes, body),
            Told::RequestTrailers(_) => self.request_trailers(modes),
            Told::ResponseHeaders(headers) => self.answer_head(modes, headers, metadata_context),
            Told::ResponseBody(HttpBody { body, end_of_stream }) => {
                let part = if end_of_stream { Part::Last } else { Part::Middle };
                self.answer_part("a part of an answer", body, part)
            }
            Told::ResponseTrailers(_) => {
                self.answer_part("trailers of an answer", Bytes::new(), Part::Trailers)
            }
        }
    }

    /// It is decided what comes of the request.
    pub fn decided(&mut self, decision: Decision) -> Vec<ProcessingResponse> {
        let RequestState::Deciding(owed) = self.request else { return Vec::new() };
        self.request = RequestState::Passing;
        let (destination, body) = match decision {
            Decision::Answer(answer) => return self.answered(answer),
            Decision::Send { destination, body } => (destination, body),
        };
        match owed {
            Owed::Body => vec![messages::request_body(Some(&destination))],
            Owed::Trailers => vec![messages::request_trailers(Some(&destination))],
            Owed::Head { parts, trailers } => {
                let parts = (0..parts).map(|_| messages::request_body(None));
                behind_head(&destination, parts, trailers)
            }
            Owed::Streamed { trailers } => {
                behind_head(&destination, messages::request_pieces(body, !trailers), trailers)
            }
        }
    }

    /// The request is answered here, whatever has come of it.
    pub fn answered(&mut self, answer: Response<Bytes>) -> Vec<ProcessingResponse> {
        self.is_over = true;
        vec![messages::immediate(answer)]
    }

    /// The head of an answer goes on with these headers.
    pub fn begun(&self, set: Set) -> Vec<ProcessingResponse> {
        vec![messages::answer_headers(set)]
    }

    /// A part of an answer goes on as these bytes. They are the same where it may not be changed.
    pub fn passed(&self, bytes: Bytes, part: Part) -> Vec<ProcessingResponse> {
        let is_streamed = self.modes.is_some_and(|modes| modes.answer == BodyMode::FullDuplex);
        match (is_streamed, part) {
            (true, Part::Middle | Part::Last) => messages::answer_pieces(bytes, part == Part::Last).collect(),
            (true, Part::Trailers) => {
                messages::answer_pieces(bytes, false).chain([messages::answer_trailers()]).collect()
            }
            (false, Part::Middle | Part::Last) => vec![messages::answer_body()],
            (false, Part::Trailers) => vec![messages::answer_trailers()],
        }
    }

    fn request_head(
        &mut self,
        modes: Modes,
        headers: HttpHeaders,
        metadata: Option<Metadata>,
    ) -> Result<Step, Violation> {
        let RequestState::Expected = self.request else {
            return Err(Violation::Order("the head of a request", "one has come already"));
        };
        let HttpHeaders { headers, end_of_stream } = headers;
        let head = heads::of_request(headers.unwrap_or_default())?;
        let subset = metadata.and_then(|metadata| metadata.subset());
        let received = Received { head, subset, body: BytesMut::new(), messages: 0 };
        let waits = modes.request == BodyMode::FullDuplex
            || modes.request == BodyMode::Buffered
            || modes.request == BodyMode::Streamed && modes.at_once;
        if end_of_stream || !waits {
            let owed = Owed::Head { parts: 0, trailers: false };
            return Ok(self.decide(modes, received, owed, end_of_stream));
        }
        self.request = RequestState::Receiving(Box::new(received));
        Ok(Step::Say(match modes.request {
            // Envoy sends the body when the head has its answer.
            BodyMode::Buffered => vec![messages::request_headers(None)],
            BodyMode::None | BodyMode::Streamed | BodyMode::FullDuplex => Vec::new(),
        }))
    }

    fn request_body(&mut self, modes: Modes, message: HttpBody) -> Result<Step, Violation> {
        let HttpBody { body, end_of_stream } = message;
        let received = match &mut self.request {
            RequestState::Receiving(received) => received,
            RequestState::Passing => return Ok(Step::Say(vec![messages::request_body(None)])),
            RequestState::Expected => return Err(Violation::Order("a body", "no head has come")),
            RequestState::Deciding(_) => return Err(Violation::Order("a body", "all had come")),
        };
        if received.body.len().saturating_add(body.len()) > self.max_body_bytes {
            return Ok(Step::Refuse(Refusal::too_long(self.max_body_bytes)));
        }
        received.messages += 1;
        received.body.extend_from_slice(&body);
        // Envoy holds all of it, and sends it once.
        if !end_of_stream && modes.request != BodyMode::Buffered {
            return Ok(Step::Say(Vec::new()));
        }
        self.all_is_here(modes, false)
    }

    fn request_trailers(&mut self, modes: Modes) -> Result<Step, Violation> {
        match &self.request {
            RequestState::Receiving(_) => self.all_is_here(modes, true),
            RequestState::Passing => Ok(Step::Say(vec![messages::request_trailers(None)])),
            RequestState::Expected => Err(Violation::Order("trailers", "no head has come")),
            RequestState::Deciding(_) => Err(Violation::Order("trailers", "all had come")),
        }
    }

    fn all_is_here(&mut self, modes: Modes, trailers: bool) -> Result<Step, Violation> {
        let received = match std::mem::replace(&mut self.request, RequestState::Passing) {
            RequestState::Receiving(received) => *received,
            RequestState::Expected | RequestState::Deciding(_) | RequestState::Passing => {
                return Err(Violation::Order("the end of a request", "none was on its way"));
            }
        };
        let owed = match modes.request {
            BodyMode::FullDuplex => Owed::Streamed { trailers },
            BodyMode::Buffered if trailers => Owed::Trailers,
            BodyMode::Buffered => Owed::Body,
            BodyMode::Streamed | BodyMode::None => Owed::Head { parts: received.messages, trailers },
        };
        Ok(self.decide(modes, received, owed, true))
    }

    fn decide(&mut self, modes: Modes, received: Received, owed: Owed, is_whole: bool) -> Step {
        self.request = RequestState::Deciding(owed);
        let Received { head, subset, body, .. } = received;
        let is_streamed = matches!(owed, Owed::Streamed { .. });
        let may_change = is_streamed && modes.answer == BodyMode::FullDuplex;
        let body = is_whole.then(|| body.freeze());
        Step::Decide(Asked { head, body, subset, may_change })
    }

    fn answer_head(
        &mut self,
        modes: Modes,
        headers: HttpHeaders,
        metadata: Option<Metadata>,
    ) -> Result<Step, Violation> {
        if self.answer != AnswerState::Expected {
            return Err(Violation::Order("the head of an answer", "one has come already"));
        }
        let HttpHeaders { headers, end_of_stream } = headers;
        let (status, headers) = heads::of_answer(headers.unwrap_or_default())?;
        let body = match modes.answer {
            _ if end_of_stream => AnswerBody::Absent,
            BodyMode::None => AnswerBody::Hidden,
            BodyMode::Streamed | BodyMode::Buffered | BodyMode::FullDuplex => AnswerBody::Shown,
        };
        self.answer = if end_of_stream { AnswerState::Ended } else { AnswerState::Passing };
        let served = metadata.and_then(|metadata| metadata.served().map(str::to_owned));
        Ok(Step::Begin(AnswerHead { status, headers, served, body }))
    }

    fn answer_part(&mut self, what: &'static str, bytes: Bytes, part: Part) -> Result<Step, Violation> {
        match self.answer {
            AnswerState::Passing => {}
            AnswerState::Expected => return Err(Violation::Order(what, "no head of one has come")),
            AnswerState::Ended => return Err(Violation::Order(what, "it had ended")),
        }
        if part != Part::Middle {
            self.answer = AnswerState::Ended;
        }
        Ok(Step::Pass(bytes, part))
    }
}

/// A request goes there: its head, these parts of its body, and its trailers where it has some.
fn behind_head(
    destination: &Destination,
    parts: impl Iterator<Item = ProcessingResponse>,
    trailers: bool,
) -> Vec<ProcessingResponse> {
    let trailers = trailers.then(|| messages::request_trailers(None));
    [messages::request_headers(Some(destination))].into_iter().chain(parts).chain(trailers).collect()
}

impl Modes {
    /// As the first message says. Whoever does not say it streams bodies both ways, as llm-d wants
    /// it.
    fn of(config: Option<ProtocolConfiguration>) -> Result<Modes, Violation> {
        let Some(config) = config else {
            let (request, answer) = (BodyMode::FullDuplex, BodyMode::FullDuplex);
            return Ok(Modes { request, answer, at_once: true });
        };
        Ok(Modes {
            request: BodyMode::of("request_body_mode", config.request_body_mode)?,
            answer: BodyMode::of("response_body_mode", config.response_body_mode)?,
            at_once: config.send_body_without_waiting_for_header_response,
        })
    }
}

impl BodyMode {
    fn of(field: &'static str, mode: i32) -> Result<BodyMode, Violation> {
        match BodySendMode::try_from(mode) {
            Ok(BodySendMode::None) => Ok(BodyMode::None),
            Ok(BodySendMode::Streamed) => Ok(BodyMode::Streamed),
            Ok(BodySendMode::Buffered) => Ok(BodyMode::Buffered),
            Ok(BodySendMode::FullDuplexStreamed) => Ok(BodyMode::FullDuplex),
            Ok(BodySendMode::BufferedPartial | BodySendMode::Grpc) | Err(_) => {
                Err(Violation::Mode(field, mode))
            }
        }
    }
}

#[cfg(test)]
mod tests;
