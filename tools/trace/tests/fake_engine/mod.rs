//! A server that answers completions as an engine would, or in one of the ways in which engines
//! fail. It speaks HTTP by hand, because it must also do what a proper server never does.

use forebay_trace::replay::Check;
use serde_json::{Value, json};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{TcpListener, TcpStream};

/// How one request is answered.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Behaviour {
    /// In full, after a delay.
    Answer(Duration),
    /// In full, but with the last token replaced.
    WrongToken,
    OneTokenLess,
    /// Without token ids, as engines that cannot return them.
    NoTokenIds,
    /// Not even with a status line.
    Hang,
    /// With a head and comments for ever.
    OnlyComments,
    /// With this many tokens, and then comments for ever.
    HangAfter(usize),
    /// With this many tokens, and then a TCP reset.
    ResetAfter(usize),
    /// With this many tokens, and then a clean end of the body.
    EndAfter(usize),
    /// With more tokens than were asked for.
    Endless,
    /// With events that are no JSON.
    Garbage,
    /// With bytes that are no HTTP.
    NoHttp,
    /// With an HTML page.
    Html,
    /// With status 500 and a reason.
    Status500,
    ErrorEvent,
}

/// One request as the engine saw it.
#[derive(Debug, Clone)]
pub struct Seen {
    pub session: String,
    pub path: String,
    pub headers: Vec<(String, String)>,
    pub body: Value,
    pub prompt: Vec<u32>,
    pub at: Instant,
}

/// A running engine.
#[derive(Default)]
pub struct FakeEngine {
    pub url: String,
    pub seen: Arc<Mutex<Vec<Seen>>>,
    pub most_open: Arc<AtomicUsize>,
}

/// What the engine must answer.
pub fn output(prompt: &[u32], tokens: usize) -> Vec<u32> {
    let sum = prompt.iter().fold(7u32, |sum, &token| sum.wrapping_mul(31).wrapping_add(token));
    (0..tokens as u32).map(|position| sum.wrapping_add(position * 17) % 1_000 + 100_000).collect()
}

/// Checks answers against [`output`].
pub struct FakeCheck;

impl Check for FakeCheck {
    fn wrong(&self, prompt: &[u32], answer: &[u32]) -> u32 {
        let expected = output(prompt, answer.len());
        expected.iter().zip(answer).filter(|(expected, got)| expected != got).count() as u32
    }
}

impl FakeEngine {
    pub async fn start(behaviour: impl Fn(&Seen) -> Behaviour + Send + Sync + 'static) -> FakeEngine {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let engine = FakeEngine { url, seen: Arc::default(), most_open: Arc::default() };
        let (seen, most_open) = (engine.seen.clone(), engine.most_open.clone());
        let behaviour = Arc::new(behaviour);
        let open = Arc::new(AtomicUsize::new(0));
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let (behaviour, seen) = (behaviour.clone(), seen.clone());
                let (open, most_open) = (open.clone(), most_open.clone());
                tokio::spawn(async move {
                    stream.set_nodelay(true).unwrap();
                    let mut stream = BufReader::new(stream);
                    while let Some(request) = read_request(&mut stream).await {
                        most_open.fetch_max(open.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
                        seen.lock().unwrap().push(request.clone());
                        let kept = answer(stream.get_mut(), behaviour(&request), &request).await;
                        open.fetch_sub(1, Ordering::SeqCst);
                        if kept.is_err() {
                            break;
                        }
                    }
                });
            }
        });
        engine
    }

    /// All requests so far.
    pub fn seen(&self) -> Vec<Seen> {
        self.seen.lock().unwrap().clone()
    }

    /// Most requests that were being answered at one time.
    pub fn most_open(&self) -> usize {
        self.most_open.load(Ordering::SeqCst)
    }
}

async fn read_request(stream: &mut BufReader<TcpStream>) -> Option<Seen> {
    let (mut session, mut length) = (String::new(), 0);
    let (mut path, mut headers) = (String::new(), Vec::new());
    loop {
        let mut line = String::new();
        if stream.read_line(&mut line).await.ok()? == 0 {
            return None;
        }
        let line = line.trim_end();
        if line.is_empty() {
            break;
        }
        if path.is_empty() {
            path = line.split(' ').nth(1).unwrap().to_owned();
        }
        if let Some((name, value)) = line.split_once(": ") {
            headers.push((name.to_ascii_lowercase(), value.to_owned()));
            match name.to_ascii_lowercase().as_str() {
                "x-session-id" => session = value.to_owned(),
                "content-length" => length = value.parse().unwrap(),
                _ => {}
            }
        }
    }
    let mut body = vec![0; length];
    stream.read_exact(&mut body).await.ok()?;
    let body: Value = serde_json::from_slice(&body).unwrap();
    let prompt = serde_json::from_value(body["prompt"].clone()).unwrap_or_default();
    Some(Seen { session, path, headers, body, prompt, at: Instant::now() })
}

/// Answers one request; an error ends the connection.
async fn answer(stream: &mut TcpStream, behaviour: Behaviour, request: &Seen) -> std::io::Result<()> {
    let asked = request.body["max_tokens"].as_u64().unwrap() as usize;
    let mut tokens = output(&request.prompt, asked);
    match behaviour {
        Behaviour::Answer(delay) => tokio::time::sleep(delay).await,
        Behaviour::WrongToken => *tokens.last_mut().unwrap() += 1,
        Behaviour::OneTokenLess => tokens.truncate(asked - 1),
        Behaviour::NoTokenIds | Behaviour::Garbage | Behaviour::ErrorEvent | Behaviour::OnlyComments => {}
        Behaviour::Endless => tokens.push(1),
        Behaviour::HangAfter(sent) | Behaviour::ResetAfter(sent) | Behaviour::EndAfter(sent) => {
            tokens.truncate(sent);
        }
        Behaviour::Hang => std::future::pending().await,
        Behaviour::NoHttp => return stream.write_all(b"SSH-2.0-x\r\n\r\n").await.and(hang_up()),
        Behaviour::Html => return whole(stream, "200 OK", "text/html", "<html>hello</html>").await,
        Behaviour::Status500 => {
            return whole(stream, "500 Internal Server Error", "application/json", "{\"error\":\"boom\"}")
                .await;
        }
    }
    let head = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nx-forebay-backend: fake-0\r\n\
                transfer-encoding: chunked\r\n\r\n";
    stream.write_all(head.as_bytes()).await?;
    match behaviour {
        Behaviour::Garbage => chunk(stream, "data: {\"choices\": [\r\n\r\n").await?,
        Behaviour::ErrorEvent => chunk(stream, "data: {\"error\":{\"message\":\"no blocks\"}}\n\n").await?,
        Behaviour::OnlyComments => return comments(stream).await,
        _ => {}
    }
    for (position, token) in tokens.iter().enumerate() {
        let ids = (behaviour != Behaviour::NoTokenIds).then(|| vec![*token]);
        let last = position + 1 == tokens.len() && !matches!(behaviour, Behaviour::EndAfter(_));
        let text = format!(" t{token}");
        let mut choice = json!({"index": 0, "token_ids": ids, "finish_reason": last.then_some("length")});
        if request.path.ends_with("/chat/completions") {
            choice["delta"] = json!({"content": text});
        } else {
            choice["text"] = text.into();
        }
        let event = json!({ "choices": [choice] });
        chunk(stream, &format!("data: {event}\n\n")).await?;
    }
    match behaviour {
        Behaviour::HangAfter(_) => return comments(stream).await,
        Behaviour::ResetAfter(_) => {
            // The client must have read the tokens: a reset discards what is still on its way.
            tokio::time::sleep(Duration::from_millis(50)).await;
            stream.set_zero_linger()?;
            return hang_up();
        }
        Behaviour::EndAfter(_) => return stream.write_all(b"0\r\n\r\n").await,
        _ => {}
    }
    let usage = json!({"choices": [], "usage": {"prompt_tokens": request.prompt.len(),
        "completion_tokens": tokens.len(), "prompt_tokens_details":
        {"cached_tokens": request.prompt.len() / 2, "external_cached_tokens": request.prompt.len() / 4}}});
    chunk(stream, &format!("data: {usage}\n\ndata: [DONE]\n\n")).await?;
    stream.write_all(b"0\r\n\r\n").await
}

async fn chunk(stream: &mut TcpStream, text: &str) -> std::io::Result<()> {
    stream.write_all(format!("{:x}\r\n{text}\r\n", text.len()).as_bytes()).await
}

async fn comments(stream: &mut TcpStream) -> std::io::Result<()> {
    loop {
        chunk(stream, ": still here\n\n").await?;
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

async fn whole(stream: &mut TcpStream, status: &str, kind: &str, body: &str) -> std::io::Result<()> {
    let head = format!("HTTP/1.1 {status}\r\ncontent-type: {kind}\r\ncontent-length: {}\r\n\r\n", body.len());
    stream.write_all((head + body).as_bytes()).await
}

fn hang_up() -> std::io::Result<()> {
    Err(std::io::ErrorKind::ConnectionAborted.into())
}
