//! Sends one prompt to an endpoint of the OpenAI API and follows its stream to whatever end it has.

use super::answer::{Answer, shown};
use super::error::{ReplayError, chain};
use super::options::{Endpoint, Options, Timeouts};
use super::sse::EventScanner;
use super::{Transport, words};
use crate::record::{Failure, FailureKind};
use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue, Request, Response, StatusCode, Uri, header};
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Incoming;
use serde::Serialize;
use std::time::Duration;
use tokio::time::{Instant, timeout_at};

/// A pool of connections to one target.
#[derive(Debug, Clone)]
pub struct Client {
    pub(super) transport: Transport,
    endpoint: Endpoint,
    uri: Uri,
    headers: HeaderMap,
    timeouts: Timeouts,
}

/// One request.
#[derive(Debug)]
pub struct Call<'a> {
    pub model: &'a str,
    pub session: &'a str,
    pub prompt: &'a [u32],
    /// How long the answer is to be, neither shorter nor longer.
    pub output_tokens: u32,
}

/// What came of a request. Times are real microseconds since the request was sent.
#[derive(Debug)]
pub struct Reply {
    pub started: Instant,
    /// The engine that answered, where a router said so.
    pub backend: Option<String>,
    pub answer: Answer,
    pub ended_us: u64,
    pub failure: Option<Failure>,
}

/// vLLM's first event repeats the whole prompt as token ids: 16 MiB hold two million of them.
const EVENT_BYTES_MAX: usize = 16 << 20;
/// What is read of an answer that is an error.
const ERROR_BODY_BYTES_MAX: usize = 4 << 10;

const BACKEND: HeaderName = HeaderName::from_static("x-forebay-backend");
const SESSION: HeaderName = HeaderName::from_static("x-session-id");

#[derive(Serialize)]
struct Body<'a> {
    model: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt: Option<&'a [u32]>,
    #[serde(skip_serializing_if = "Option::is_none")]
    messages: Option<[Message; 1]>,
    max_tokens: u32,
    min_tokens: u32,
    ignore_eos: bool,
    temperature: f32,
    stream: bool,
    stream_options: StreamOptions,
    return_token_ids: bool,
}

#[derive(Serialize)]
struct Message {
    role: &'static str,
    content: String,
}

#[derive(Serialize)]
struct StreamOptions {
    include_usage: bool,
}

impl Client {
    /// A client of the server at `target`, such as `http://127.0.0.1:8000`.
    pub fn new(target: &str, options: &Options, transport: Transport) -> Result<Client, ReplayError> {
        let uri = endpoint_uri(target, options.endpoint)
            .ok_or_else(|| ReplayError::Target { target: target.to_owned() })?;
        if uri.scheme_str() == Some("https") && transport.roots == 0 {
            return Err(ReplayError::NoCertificates { target: target.to_owned() });
        }
        let headers = options.headers.clone();
        Ok(Client { transport, endpoint: options.endpoint, uri, headers, timeouts: options.timeouts })
    }

    /// Sends the request and waits for its end, which comes within the timeouts. Dropping the
    /// future closes the connection, so that the engine learns of it.
    pub async fn call(&self, call: Call<'_>) -> Reply {
        let request = self.request(&call);
        let started = Instant::now();
        let mut reply = Reply {
            started,
            backend: None,
            answer: Answer::new(call.output_tokens),
            ended_us: 0,
            failure: None,
        };
        reply.failure = match request {
            Ok(request) => self.exchange(request, &mut reply).await.err(),
            Err(failure) => Some(failure),
        };
        reply.ended_us = micros_since(started);
        reply
    }

    fn request(&self, call: &Call) -> Result<Request<Full<Bytes>>, Failure> {
        let unsendable = |error: &dyn std::fmt::Display| {
            Failure::new(FailureKind::Unreachable, format!("cannot make the request: {error}"))
        };
        let (prompt, messages) = match self.endpoint {
            Endpoint::Completions => (Some(call.prompt), None),
            Endpoint::Chat => (None, Some([Message { role: "user", content: words::text(call.prompt) }])),
        };
        let body = Body {
            model: call.model,
            prompt,
            messages,
            max_tokens: call.output_tokens,
            min_tokens: call.output_tokens,
            ignore_eos: true,
            temperature: 0.0,
            stream: true,
            stream_options: StreamOptions { include_usage: true },
            return_token_ids: true,
        };
        let body = serde_json::to_vec(&body).map_err(|error| unsendable(&error))?;
        let mut request = Request::post(self.uri.clone())
            .header(header::CONTENT_TYPE, "application/json")
            .header(header::ACCEPT, "text/event-stream")
            .header(SESSION, session_header(call.session))
            .body(Full::new(Bytes::from(body)))
            .map_err(|error| unsendable(&error))?;
        for (name, value) in &self.headers {
            request.headers_mut().insert(name, value.clone());
        }
        Ok(request)
    }

    async fn exchange(&self, request: Request<Full<Bytes>>, reply: &mut Reply) -> Result<(), Failure> {
        let deadline = reply.started + self.timeouts.first_token;
        let response = timeout_at(deadline, self.transport.http.request(request))
            .await
            .map_err(|_| no_first_token(self.timeouts.first_token))?
            .map_err(|error| Failure::new(FailureKind::Unreachable, chain(&error)))?;
        reply.backend =
            response.headers().get(BACKEND).and_then(|name| name.to_str().ok()).map(str::to_owned);
        if response.status() != StatusCode::OK {
            return Err(refusal(response, deadline).await);
        }
        let content_type =
            response.headers().get(header::CONTENT_TYPE).map_or(&b""[..], HeaderValue::as_bytes);
        if !content_type.starts_with(b"text/event-stream") {
            let detail = format!("expected text/event-stream, got content type {:?}", shown(content_type));
            return Err(Failure::new(FailureKind::Garbage, detail));
        }
        self.follow(response.into_body(), deadline, reply).await
    }

    /// Reads the stream to its end. Only tokens and the end count as progress: bytes without them
    /// may come forever.
    async fn follow(
        &self,
        mut body: Incoming,
        mut deadline: Instant,
        reply: &mut Reply,
    ) -> Result<(), Failure> {
        let mut scanner = EventScanner::new(EVENT_BYTES_MAX);
        while !reply.answer.is_done() {
            let progress = reply.answer.last_token_us;
            let frame = match timeout_at(deadline, body.frame()).await {
                Err(_) if progress.is_none() => return Err(no_first_token(self.timeouts.first_token)),
                Err(_) => return Err(no_progress(self.timeouts.progress, &reply.answer)),
                Ok(None) => break,
                Ok(Some(Err(error))) => return Err(Failure::new(FailureKind::Reset, chain(&error))),
                Ok(Some(Ok(frame))) => frame,
            };
            let Ok(data) = frame.into_data() else { continue };
            let now_us = micros_since(reply.started);
            let mut outcome = Ok(());
            let scanned = scanner.feed(&data, |event| {
                if outcome.is_ok() {
                    outcome = reply.answer.event(event, now_us);
                }
            });
            outcome?;
            scanned.map_err(|error| Failure::new(FailureKind::Garbage, error.to_string()))?;
            if reply.answer.last_token_us != progress {
                deadline = Instant::now() + self.timeouts.progress;
            }
        }
        reply.answer.end()
    }
}

/// `target` with the path of an endpoint; `None` unless it is a plain
/// `http[s]://host[:port][/prefix]`.
fn endpoint_uri(target: &str, endpoint: Endpoint) -> Option<Uri> {
    let uri: Uri = target.parse().ok()?;
    let plain = matches!(uri.scheme_str(), Some("http" | "https")) && uri.query().is_none();
    // A name and a password in it would stand in the log: keys have an option of their own.
    uri.authority().filter(|authority| plain && !authority.as_str().contains('@'))?;
    let path = match endpoint {
        Endpoint::Completions => "completions",
        Endpoint::Chat => "chat/completions",
    };
    format!("{}/v1/{path}", target.trim_end_matches('/')).parse().ok()
}

/// The session as a header; one that HTTP does not allow is replaced by its hash.
fn session_header(session: &str) -> HeaderValue {
    HeaderValue::from_str(session)
        .unwrap_or_else(|_| HeaderValue::from(xxhash_rust::xxh3::xxh3_64(session.as_bytes())))
}

async fn refusal(response: Response<Incoming>, deadline: Instant) -> Failure {
    let status = response.status();
    let body = timeout_at(deadline, Limited::new(response.into_body(), ERROR_BODY_BYTES_MAX).collect()).await;
    let text = match body {
        Ok(Ok(body)) => String::from_utf8_lossy(&body.to_bytes()).trim().to_owned(),
        _ => "(its body could not be read)".to_owned(),
    };
    Failure::new(FailureKind::Status, format!("{status}: {text}"))
}

fn no_first_token(limit: Duration) -> Failure {
    Failure::new(FailureKind::FirstTokenTimeout, format!("no token within {} s", limit.as_secs_f64()))
}

fn no_progress(limit: Duration, answer: &Answer) -> Failure {
    let detail = format!("no token for {} s after {} tokens", limit.as_secs_f64(), answer.output_tokens());
    Failure::new(FailureKind::ProgressTimeout, detail)
}

fn micros_since(start: Instant) -> u64 {
    start.elapsed().as_micros() as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_target_is_a_plain_url() {
        let path = |target| endpoint_uri(target, Endpoint::Completions).map(|uri| uri.to_string());
        let expected = Some("http://127.0.0.1:8000/v1/completions".to_owned());
        assert_eq!(path("http://127.0.0.1:8000"), expected);
        assert_eq!(path("http://127.0.0.1:8000/"), expected);
        assert_eq!(path("http://h/prefix").as_deref(), Some("http://h/prefix/v1/completions"));
        assert_eq!(path("https://h").as_deref(), Some("https://h/v1/completions"));
        let chat = endpoint_uri("https://h:1/x/", Endpoint::Chat).map(|uri| uri.to_string());
        assert_eq!(chat.as_deref(), Some("https://h:1/x/v1/chat/completions"));
        for bad in ["ftp://h", "http://user:key@h", "127.0.0.1:8000", "h", "", "http://h/?q=1", "http://"] {
            assert_eq!(path(bad), None, "{bad}");
        }
    }

    #[test]
    fn a_session_that_is_no_header_value_still_names_one_session() {
        assert_eq!(session_header("s-1"), "s-1");
        let strange = session_header("s\n1");
        assert_eq!(strange, session_header("s\n1"));
        assert_ne!(strange, session_header("s\n2"));
    }
}
