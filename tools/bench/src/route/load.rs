//! The load: streaming chat completions over kept connections, in a closed or an open loop. It
//! knows prompts, times and just enough HTTP to see the first event and the end of an answer; any
//! answer that is not whole ends the benchmark.

use rand::rngs::StdRng;
use rand::{Rng, RngExt, SeedableRng};
use std::error::Error;
use std::net::SocketAddr;
use std::time::{Duration, Instant};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::task::JoinSet;

/// Sessions whose prompts are sent in turn.
const SESSIONS: usize = 64;

/// Bytes at the end of a prompt that differ from request to request.
const FRESH_BYTES: usize = 9;

/// Why the benchmark cannot go on.
pub type Failure = Box<dyn Error + Send + Sync>;

/// Requests whose prompts look like words: the same text within a session, but for the last bytes.
pub struct Prompts {
    requests: Vec<Vec<u8>>,
    prompt_bytes: usize,
    made: usize,
}

impl Prompts {
    pub fn new(prompt_bytes: usize) -> Prompts {
        let mut random = StdRng::seed_from_u64(1);
        let requests = (0..SESSIONS).map(|_| request(&words(prompt_bytes, &mut random))).collect();
        Prompts { requests, prompt_bytes, made: 0 }
    }

    /// The next request, whole.
    fn next(&mut self) -> Vec<u8> {
        let mut request = self.requests[self.made % SESSIONS].clone();
        self.made += 1;
        let fresh = format!("#{:08}", self.made);
        let end = request.len() - CLOSING.len();
        request[end - FRESH_BYTES.min(self.prompt_bytes)..end].copy_from_slice(fresh.as_bytes());
        request
    }
}

const CLOSING: &str = "\"}]}";

fn words(bytes: usize, random: &mut impl Rng) -> String {
    let mut text = String::with_capacity(bytes + 10);
    while text.len() < bytes {
        for _ in 0..random.random_range(2..10) {
            text.push(char::from(random.random_range(b'a'..=b'z')));
        }
        text.push(' ');
    }
    text.truncate(bytes);
    text
}

fn request(prompt: &str) -> Vec<u8> {
    let opening = r#"{"model":"fake","stream":true,"max_tokens":16,"messages":[{"role":"user","content":""#;
    let length = opening.len() + prompt.len() + CLOSING.len();
    let head = format!(
        "POST /v1/chat/completions HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\n\
         content-length: {length}\r\n\r\n"
    );
    [head.as_bytes(), opening.as_bytes(), prompt.as_bytes(), CLOSING.as_bytes()].concat()
}

/// Times of one target's requests, from sending.
#[derive(Default)]
pub struct Times {
    /// To the first event.
    pub first_ms: Vec<f64>,
    /// To the end of the answer.
    pub end_ms: Vec<f64>,
}

/// Keeps `clients` requests under way for a while; returns how many were answered.
pub async fn closed_loop(
    target: SocketAddr,
    prompts: &mut Prompts,
    clients: usize,
    length: Duration,
) -> Result<u64, Failure> {
    let end = Instant::now() + length;
    let mut running = JoinSet::new();
    for _ in 0..clients {
        let connection = Connection::open(target).await?;
        running.spawn(connection.ask(prompts.next()));
    }
    let mut answered = 0;
    while let Some(ended) = running.join_next().await {
        let (connection, _) = ended??;
        answered += 1;
        if Instant::now() < end {
            running.spawn(connection.ask(prompts.next()));
        }
    }
    Ok(answered)
}

/// Sends requests at random times, `rate` a second, to one target and the other by turns, whatever
/// comes back. Returns the times of each target.
pub async fn open_loop(
    targets: [SocketAddr; 2],
    prompts: &mut Prompts,
    rate: f64,
    length: Duration,
    seed: u64,
) -> Result<[Times; 2], Failure> {
    let mut random = StdRng::seed_from_u64(seed);
    let mut idle = [open(targets[0], prompts).await?, open(targets[1], prompts).await?];
    let mut times = [Times::default(), Times::default()];
    let mut running = JoinSet::new();
    let start = Instant::now();
    let mut arrival = start;
    for number in 0.. {
        // Exponential gaps make a Poisson process.
        arrival += Duration::from_secs_f64(-f64::ln(1.0 - random.random::<f64>()) / rate);
        if arrival > start + length {
            break;
        }
        tokio::time::sleep_until(arrival.into()).await;
        while let Some(ended) = running.try_join_next() {
            keep(ended?, &mut idle, &mut times)?;
        }
        let target = number % targets.len();
        let connection = match idle[target].pop() {
            Some(connection) => connection,
            None => Connection::open(targets[target]).await?,
        };
        let request = prompts.next();
        running.spawn(async move { (target, connection.ask(request).await) });
    }
    while let Some(ended) = running.join_next().await {
        keep(ended?, &mut idle, &mut times)?;
    }
    Ok(times)
}

/// Connections that have been used once, so that opening them is not measured: few requests meet
/// one another.
async fn open(target: SocketAddr, prompts: &mut Prompts) -> Result<Vec<Connection>, Failure> {
    const OPEN: usize = 4;
    let mut connections = Vec::new();
    for _ in 0..OPEN {
        connections.push(Connection::open(target).await?.ask(prompts.next()).await?.0);
    }
    Ok(connections)
}

type Asked = Result<(Connection, Answered), Failure>;

fn keep(
    (target, asked): (usize, Asked),
    idle: &mut [Vec<Connection>],
    times: &mut [Times],
) -> Result<(), Failure> {
    let (connection, answered) = asked?;
    idle[target].push(connection);
    times[target].first_ms.push(answered.first.as_secs_f64() * 1e3);
    times[target].end_ms.push(answered.end.as_secs_f64() * 1e3);
    Ok(())
}

struct Connection {
    stream: TcpStream,
    buffer: Vec<u8>,
}

struct Answered {
    first: Duration,
    end: Duration,
}

impl Connection {
    async fn open(target: SocketAddr) -> Result<Connection, Failure> {
        let stream = TcpStream::connect(target).await?;
        stream.set_nodelay(true)?;
        Ok(Connection { stream, buffer: Vec::with_capacity(16 * 1024) })
    }

    /// Sends a request and reads the whole answer.
    async fn ask(mut self, request: Vec<u8>) -> Asked {
        self.buffer.clear();
        let start = Instant::now();
        self.stream.write_all(&request).await?;
        let mut first = None;
        while !self.buffer.ends_with(b"\r\n0\r\n\r\n") {
            if self.stream.read_buf(&mut self.buffer).await? == 0 {
                return Err(self.broken());
            }
            if first.is_none() && self.buffer.windows(6).any(|window| window == b"data: ") {
                first = Some(start.elapsed());
            }
        }
        let end = start.elapsed();
        let whole =
            self.buffer.starts_with(b"HTTP/1.1 200") && self.buffer.ends_with(b"[DONE]\n\n\r\n0\r\n\r\n");
        match first {
            Some(first) if whole => Ok((self, Answered { first, end })),
            _ => Err(self.broken()),
        }
    }

    fn broken(&self) -> Failure {
        let seen = String::from_utf8_lossy(&self.buffer[..self.buffer.len().min(300)]);
        format!("an answer was not whole; it began with: {seen}").into()
    }
}
