//! What the tests of the router share: a fake engine that follows a script, and a client that keeps
//! its connection. It knows sockets and bytes of HTTP only, so that it can misbehave in every way.
#![allow(dead_code, clippy::unwrap_used)]

use bytes::Bytes;
use forebay_router::{Backend, EngineModel, Failure, Limits, Policy, Router, RouterConfig, RouterHandle};
use forebay_steps::{Launch, Profile};
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::client::conn::http1::SendRequest;
use hyper_util::rt::TokioIo;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::sync::Semaphore;
use tokio::task::JoinHandle;

/// One step of an engine's answer.
#[derive(Clone)]
pub enum Step {
    /// Writes text in one go.
    Write(String),
    /// Writes bytes in one go.
    Bytes(Vec<u8>),
    /// Does nothing for a while.
    Wait(Duration),
    /// Does nothing until there is a permit, and takes it.
    Gate(Arc<Semaphore>),
    /// Does nothing until the other side has gone.
    Hang,
    /// Closes the connection in order.
    Close,
    /// Resets the connection.
    Reset,
}

/// What an engine answers to a request with this path and body.
pub type Script = Arc<dyn Fn(&str, &str) -> Vec<Step> + Send + Sync>;

/// What happened at an engine.
#[derive(Default)]
pub struct Seen {
    /// Bodies of requests other than for health and models.
    pub bodies: Vec<String>,
    /// Heads of the same.
    pub heads: Vec<String>,
    /// When clients went away while they were waited for.
    pub left: Vec<Instant>,
    /// Connections that brought completion requests.
    pub connections: usize,
}

/// A fake engine. Dropping it closes its socket and its connections.
pub struct Engine {
    pub address: SocketAddr,
    pub seen: Arc<Mutex<Seen>>,
    accepting: JoinHandle<()>,
    connections: Arc<Mutex<Vec<JoinHandle<()>>>>,
}

impl Engine {
    pub async fn start(script: impl Fn(&str, &str) -> Vec<Step> + Send + Sync + 'static) -> Engine {
        Engine::start_at(([127, 0, 0, 1], 0).into(), script).await
    }

    pub async fn start_at(
        address: SocketAddr,
        script: impl Fn(&str, &str) -> Vec<Step> + Send + Sync + 'static,
    ) -> Engine {
        let socket = TcpSocket::new_v4().unwrap();
        socket.set_reuseaddr(true).unwrap();
        socket.bind(address).unwrap();
        let listener = socket.listen(64).unwrap();
        let address = listener.local_addr().unwrap();
        let seen = Arc::new(Mutex::new(Seen::default()));
        let connections = Arc::new(Mutex::new(Vec::new()));
        let accepting = tokio::spawn(accept(listener, Arc::new(script), seen.clone(), connections.clone()));
        Engine { address, seen, accepting, connections }
    }

    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    pub fn requests(&self) -> usize {
        self.seen.lock().unwrap().bodies.len()
    }

    /// Requests with exactly this body.
    pub fn requests_of(&self, body: &str) -> usize {
        self.seen.lock().unwrap().bodies.iter().filter(|seen| *seen == body).count()
    }

    pub fn left(&self) -> usize {
        self.seen.lock().unwrap().left.len()
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        self.accepting.abort();
        self.connections.lock().unwrap().iter().for_each(JoinHandle::abort);
    }
}

async fn accept(
    listener: TcpListener,
    script: Script,
    seen: Arc<Mutex<Seen>>,
    connections: Arc<Mutex<Vec<JoinHandle<()>>>>,
) {
    while let Ok((stream, _)) = listener.accept().await {
        stream.set_nodelay(true).unwrap();
        let serving = tokio::spawn(serve(stream, script.clone(), seen.clone()));
        connections.lock().unwrap().push(serving);
    }
}

async fn serve(mut stream: TcpStream, script: Script, seen: Arc<Mutex<Seen>>) {
    let mut buffer = Vec::new();
    let mut counted = false;
    while let Some((head, body)) = read_request(&mut stream, &mut buffer).await {
        let path = head.split(' ').nth(1).unwrap_or_default().to_owned();
        if !["/health", "/v1/models", "/metrics"].contains(&&path[..]) {
            let mut seen = seen.lock().unwrap();
            seen.bodies.push(body.clone());
            seen.heads.push(head.clone());
            seen.connections += usize::from(!counted);
            counted = true;
        }
        for step in script(&path, &body) {
            match step {
                Step::Write(_) | Step::Bytes(_) => {
                    let bytes = match step {
                        Step::Write(text) => text.into_bytes(),
                        Step::Bytes(bytes) => bytes,
                        _ => Vec::new(),
                    };
                    if stream.write_all(&bytes).await.is_err() {
                        seen.lock().unwrap().left.push(Instant::now());
                        return;
                    }
                }
                Step::Wait(time) => tokio::time::sleep(time).await,
                Step::Gate(gate) => gate.acquire().await.unwrap().forget(),
                Step::Hang => {
                    let mut byte = [0];
                    let _ = stream.read(&mut byte).await;
                    seen.lock().unwrap().left.push(Instant::now());
                    return;
                }
                Step::Close => return,
                Step::Reset => {
                    stream.set_zero_linger().unwrap();
                    return;
                }
            }
        }
    }
}

async fn read_request(stream: &mut TcpStream, buffer: &mut Vec<u8>) -> Option<(String, String)> {
    loop {
        if let Some(end) = buffer.windows(4).position(|window| window == b"\r\n\r\n") {
            let head = String::from_utf8_lossy(&buffer[..end]).into_owned();
            let length = head.lines().find_map(|line| {
                let (name, value) = line.split_once(':')?;
                name.eq_ignore_ascii_case("content-length").then(|| value.trim().parse::<usize>().unwrap())
            });
            let whole = end + 4 + length.unwrap_or(0);
            if buffer.len() >= whole {
                let body = String::from_utf8_lossy(&buffer[end + 4..whole]).into_owned();
                buffer.drain(..whole);
                return Some((head, body));
            }
        }
        if stream.read_buf(buffer).await.ok()? == 0 {
            return None;
        }
    }
}

/// A whole JSON answer.
pub fn document(status: &str, body: &str) -> Vec<Step> {
    let length = body.len();
    vec![Step::Write(format!(
        "HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n\r\n{body}"
    ))]
}

pub fn stream_head() -> Step {
    Step::Write(
        "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n".into(),
    )
}

/// One HTTP chunk.
pub fn chunk(data: &str) -> Step {
    Step::Write(format!("{:x}\r\n{data}\r\n", data.len()))
}

/// One event with a piece of text.
pub fn event(text: &str) -> Step {
    chunk(&format!("data: {{\"choices\":[{{\"index\":0,\"text\":\"{text}\"}}]}}\n\n"))
}

pub fn stream_end() -> Step {
    Step::Write("e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n".into())
}

pub fn usage_event(prompt_tokens: u64, cached_tokens: u64) -> Step {
    chunk(&format!("data: {{\"choices\":[],\"usage\":{}}}\n\n", usage(prompt_tokens, cached_tokens)))
}

/// A `usage` object.
pub fn usage(prompt_tokens: u64, cached_tokens: u64) -> String {
    format!(
        "{{\"prompt_tokens\":{prompt_tokens},\"completion_tokens\":1,\"total_tokens\":{},\
         \"prompt_tokens_details\":{{\"cached_tokens\":{cached_tokens}}}}}",
        prompt_tokens + 1
    )
}

/// An engine that is well: answers probes, documents and streams.
pub fn well(path: &str, body: &str) -> Vec<Step> {
    if path == "/health" {
        document("200 OK", "{}")
    } else if path == "/v1/models" {
        document("200 OK", r#"{"object":"list","data":[]}"#)
    } else if body.contains("\"stream\":true") {
        let mut steps = vec![stream_head(), event("a"), event("b")];
        if body.contains("\"include_usage\":true") {
            steps.push(usage_event(10, 4));
        }
        steps.push(stream_end());
        steps
    } else {
        document("200 OK", &format!("{{\"choices\":[{{}}],\"usage\":{}}}", usage(10, 4)))
    }
}

/// An engine that is well except for completions.
pub fn only_probes(steps: Vec<Step>) -> impl Fn(&str, &str) -> Vec<Step> {
    move |path, body| if path.starts_with("/v1/c") { steps.clone() } else { well(path, body) }
}

/// An engine that is well and lists these models.
pub fn serving(models: &'static [&'static str]) -> impl Fn(&str, &str) -> Vec<Step> {
    move |path, body| {
        if path != "/v1/models" {
            return well(path, body);
        }
        let data: Vec<_> = models.iter().map(|id| serde_json::json!({"id": id, "object": "model"})).collect();
        document("200 OK", &serde_json::json!({"object": "list", "data": data}).to_string())
    }
}

/// A router before engines named `e0`, `e1` and so on. It drains quickly, so that tests end soon,
/// and has patience with engines on a busy machine.
pub fn router(policy: Policy, urls: &[String], adjust: impl FnOnce(&mut Limits)) -> RouterHandle {
    configured(policy, urls, |config| adjust(&mut config.limits))
}

/// The same with more of its configuration.
pub fn configured(policy: Policy, urls: &[String], adjust: impl FnOnce(&mut RouterConfig)) -> RouterHandle {
    let backends = urls.iter().enumerate();
    let backends = backends.map(|(index, url)| Backend::new(format!("e{index}"), url));
    let profile = Profile::shipped(Profile::DEFAULT).unwrap();
    let model = EngineModel::new(&profile, Launch::Graph);
    let mut config = RouterConfig::new(([127, 0, 0, 1], 0).into(), backends.collect(), policy, model);
    config.threads = 2;
    config.limits.drain = Duration::from_millis(500);
    config.limits.answer = Duration::from_secs(120);
    config.limits.connect = PATIENCE;
    config.limits.probe_timeout = PATIENCE;
    adjust(&mut config);
    Router::spawn(config).unwrap()
}

/// A client with one connection.
pub struct Client {
    sender: SendRequest<Full<Bytes>>,
    driving: JoinHandle<()>,
}

impl Client {
    pub async fn connect(router: &RouterHandle) -> Client {
        Client::connect_to(router.addr()).await
    }

    pub async fn connect_to(address: SocketAddr) -> Client {
        let stream = TcpStream::connect(address).await.unwrap();
        stream.set_nodelay(true).unwrap();
        let (sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.unwrap();
        let driving = tokio::spawn(async move { drop(connection.await) });
        Client { sender, driving }
    }

    /// Sends a request; the answer's body has not been read yet.
    pub async fn begin(
        &mut self,
        method: &str,
        path: &str,
        headers: &[(&str, &str)],
        body: &str,
    ) -> Result<http::Response<Incoming>, hyper::Error> {
        let mut request = http::Request::builder().method(method).uri(path).header("host", "router");
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let request = request.body(Full::new(Bytes::copy_from_slice(body.as_bytes()))).unwrap();
        self.sender.ready().await?;
        self.sender.send_request(request).await
    }

    pub async fn get(&mut self, path: &str) -> Got {
        let answer = self.begin("GET", path, &[], "").await.unwrap();
        Got::read(answer).await
    }

    pub async fn complete(&mut self, body: &str) -> Got {
        self.complete_as("", body).await
    }

    /// Completes a prompt of a session.
    pub async fn complete_as(&mut self, session: &str, body: &str) -> Got {
        let session_header = [("x-session-id", session)];
        let headers = if session.is_empty() { &[][..] } else { &session_header[..] };
        self.post("/v1/completions", headers, body).await
    }

    pub async fn post(&mut self, path: &str, headers: &[(&str, &str)], body: &str) -> Got {
        self.ask("POST", path, headers, body).await
    }

    pub async fn ask(&mut self, method: &str, path: &str, headers: &[(&str, &str)], body: &str) -> Got {
        Got::read(self.begin(method, path, headers, body).await.unwrap()).await
    }

    /// Goes away at once, whatever is under way.
    pub fn vanish(self) {
        self.driving.abort();
    }
}

/// An answer that has been read.
#[derive(Debug)]
pub struct Got {
    pub status: u16,
    pub headers: http::HeaderMap,
    pub body: String,
    /// The body did not end in order.
    pub broken: bool,
}

impl Got {
    pub async fn read(answer: http::Response<Incoming>) -> Got {
        let (head, mut incoming) = answer.into_parts();
        let mut body = Vec::new();
        let mut broken = false;
        while let Some(frame) = incoming.frame().await {
            match frame {
                Ok(frame) => body.extend_from_slice(frame.data_ref().unwrap_or(&Bytes::new())),
                Err(_) => {
                    broken = true;
                    break;
                }
            }
        }
        let body = String::from_utf8_lossy(&body).into_owned();
        Got { status: head.status.as_u16(), headers: head.headers, body, broken }
    }

    pub fn backend(&self) -> &str {
        self.headers.get("x-forebay-backend").map_or("", |value| value.to_str().unwrap())
    }

    pub fn json(&self) -> serde_json::Value {
        serde_json::from_str(&self.body).unwrap()
    }
}

/// A port that is taken, and where nobody listens.
pub struct Nobody(TcpSocket);

impl Nobody {
    pub fn new() -> Nobody {
        let socket = TcpSocket::new_v4().unwrap();
        socket.bind(([127, 0, 0, 1], 0).into()).unwrap();
        Nobody(socket)
    }

    pub fn url(&self) -> String {
        format!("http://{}", self.0.local_addr().unwrap())
    }
}

/// What anything may take on a busy machine. Shorter than the limits that would end it otherwise.
pub const PATIENCE: Duration = Duration::from_secs(20);
pub const SECOND: Duration = Duration::from_secs(1);
pub const MS: Duration = Duration::from_millis(1);
pub const PROMPT: &str = r#"{"model":"m","prompt":"Once upon a time"}"#;
pub const STREAM: &str = r#"{"model":"m","prompt":"Once upon a time","stream":true}"#;

pub fn failures(router: &RouterHandle, backend: usize, failure: Failure) -> u64 {
    router.stats().backends[backend].failures[failure as usize]
}

/// A prompt that waits at its engine.
pub const HELD: &str = r#"{"model":"m","prompt":"held"}"#;

/// An engine that lets [`HELD`] wait for a permit, and is well then.
pub fn held(
    gate: Arc<Semaphore>,
    others: impl Fn(&str, &str) -> Vec<Step>,
) -> impl Fn(&str, &str) -> Vec<Step> {
    move |path, body| {
        if body != HELD {
            return others(path, body);
        }
        let mut steps = vec![Step::Gate(gate.clone())];
        steps.extend(well(path, body));
        steps
    }
}

/// Several engines that do the same.
pub async fn engines(
    count: usize,
    script: impl Fn(&str, &str) -> Vec<Step> + Send + Sync + 'static,
) -> Vec<Engine> {
    let script = Arc::new(script);
    let mut engines = Vec::new();
    for _ in 0..count {
        let script = script.clone();
        engines.push(Engine::start(move |path: &str, body: &str| script(path, body)).await);
    }
    engines
}

pub fn urls(engines: &[Engine]) -> Vec<String> {
    engines.iter().map(Engine::url).collect()
}

pub fn sent(engines: &[Engine]) -> usize {
    engines.iter().map(Engine::requests).sum()
}

/// An engine that separates KV by all that engines separate it by, as vLLM does: it holds what it
/// has seen in full, by the rest of the body.
#[derive(Default)]
pub struct Separating(Mutex<Vec<(String, String)>>);

impl Separating {
    pub fn run(&self, path: &str, body: &str) -> Vec<Step> {
        if path == "/health" {
            return well(path, body);
        }
        let mut rest: serde_json::Value = serde_json::from_str(body).unwrap();
        let prompt = rest["prompt"].take().as_str().unwrap().to_owned();
        let (mut seen, rest) = (self.0.lock().unwrap(), rest.to_string());
        let common = |other: &str| prompt.bytes().zip(other.bytes()).take_while(|(a, b)| a == b).count();
        let same = seen.iter().filter(|(other, _)| *other == rest);
        let cached = same.map(|(_, other)| common(other)).max().unwrap_or(0);
        seen.push((rest, prompt.clone()));
        let usage = usage(prompt.len() as u64 / 4, cached as u64 / 4);
        document("200 OK", &format!("{{\"choices\":[{{}}],\"usage\":{usage}}}"))
    }
}
