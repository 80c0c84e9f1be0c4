//! KV events in vLLM's wire format, so that routers and indexers made for vLLM understand this
//! engine.
//!
//! One task numbers batches, publishes them and replays the last ones. Who asks for a replay holds
//! up nobody but others who do, and those for a moment.
//!
//! # The wire, as vLLM has it since events became maps (0.24)
//!
//! A PUB socket sends three frames for each batch: the topic, the sequence number as 8 bytes
//! big-endian, and a msgpack array `[timestamp, [events], data_parallel_rank]`. An event is a map
//! with `type` `BlockStored`, `BlockRemoved` or `AllBlocksCleared`. Sequence numbers start at 0 and
//! have no gaps. Block hashes are integers, the lower 64 bits.
//!
//! A ROUTER socket replays: a request of an empty frame and a sequence number is answered with
//! `[empty, number, payload]` for every buffered batch from that number on, and then with
//! `[empty, -1, empty]`. What is older than the buffer is gone, and there is no snapshot. The first
//! batch of an engine says that its cache is empty, so a subscriber that was there before a restart
//! forgets what it knew.

use crate::scheduler::CacheEvent;
use bytes::Bytes;
use forebay_transfer::lock::Mutex;
use rmpv::Value;
use std::collections::VecDeque;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use thiserror::Error;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use zeromq::{Endpoint, PubSocket, RouterSocket, Socket, SocketRecv, SocketSend, ZmqError, ZmqMessage};

/// Batches that can be replayed; vLLM's `buffer_steps`.
pub const BUFFER_BATCHES: usize = 10_000;

/// Batches that wait to be published at most.
const QUEUE_BATCHES: usize = 10_000;

/// Pause after an error of the replay socket, so that one that lasts costs nothing.
const AFTER_ERROR: Duration = Duration::from_millis(100);

/// Whoever takes nothing of a replay for so long gets no more of it.
const REPLAY_LIMIT: Duration = Duration::from_secs(1);

/// Ends a replay: -1 as 8 bytes.
const END_OF_REPLAY: &[u8] = &[0xFF; 8];

/// Where events go.
#[derive(Clone, Debug)]
pub struct EventsConfig {
    /// Address of the PUB socket; port 0 lets the system choose.
    pub publish: SocketAddr,
    /// Address of the ROUTER socket for replays, if there is to be one.
    pub replay: Option<SocketAddr>,
    /// First frame of every message; empty is vLLM's default.
    pub topic: String,
}

/// Why events cannot be published.
#[derive(Debug, Error)]
pub enum EventsError {
    /// The address cannot be bound.
    #[error("cannot bind {socket} for KV events to {address}: {error}")]
    Bind { socket: &'static str, address: SocketAddr, error: ZmqError },
    /// The socket was bound to something that is not an IP address and a port.
    #[error("{socket} for KV events is bound to {endpoint}, which is not TCP")]
    NotTcp { socket: &'static str, endpoint: String },
}

/// Takes batches from the engine. Never waits.
#[derive(Clone, Debug)]
pub struct EventSender {
    batches: mpsc::Sender<Vec<CacheEvent>>,
    dropped: Arc<AtomicU64>,
}

impl EventSender {
    /// Publishes a batch, unless the queue is full.
    pub fn send(&self, events: Vec<CacheEvent>) {
        if !events.is_empty() && self.batches.try_send(events).is_err() {
            self.dropped.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Batches dropped so far. Subscribers cannot notice those.
    pub fn dropped(&self) -> u64 {
        self.dropped.load(Ordering::Relaxed)
    }
}

/// The running publisher. It ends when every [`EventSender`] is gone.
#[derive(Debug)]
pub struct Publisher {
    pub publish: SocketAddr,
    /// Where the ROUTER socket is.
    pub replay: Option<SocketAddr>,
    /// Takes batches.
    pub sender: EventSender,
    /// Ends with the publisher.
    pub task: JoinHandle<()>,
}

impl Publisher {
    /// Binds the sockets and starts publishing on the current runtime.
    pub async fn start(config: &EventsConfig, block_tokens: usize) -> Result<Publisher, EventsError> {
        let mut publisher = PubSocket::new();
        let publish = bind(&mut publisher, "PUB", config.publish).await?;
        let (replay, router) = match config.replay {
            Some(address) => {
                let mut router = RouterSocket::new();
                (Some(bind(&mut router, "ROUTER", address).await?), Some(router))
            }
            None => (None, None),
        };
        let (sender, batches) = mpsc::channel(QUEUE_BATCHES);
        let topic = Bytes::from(config.topic.clone().into_bytes());
        let publishing =
            Publishing { publisher, batches, topic, block_tokens, next_number: 0, buffer: Arc::default() };
        let replaying = router.map(|router| Replaying { router, buffer: Arc::clone(&publishing.buffer) });
        let task = tokio::spawn(async move {
            tokio::select! {
                () = publishing.run() => {}
                () = replay_all(replaying) => {}
            }
        });
        let sender = EventSender { batches: sender, dropped: Arc::default() };
        Ok(Publisher { publish, replay, sender, task })
    }
}

async fn bind(
    socket: &mut impl Socket,
    name: &'static str,
    address: SocketAddr,
) -> Result<SocketAddr, EventsError> {
    let endpoint = socket.bind(&format!("tcp://{address}")).await;
    let endpoint = endpoint.map_err(|error| EventsError::Bind { socket: name, address, error })?;
    match endpoint {
        Endpoint::Tcp(_, port) => Ok(SocketAddr::new(address.ip(), port)),
        other => Err(EventsError::NotTcp { socket: name, endpoint: other.to_string() }),
    }
}

/// The last batches, by their numbers.
type Buffer = Arc<Mutex<VecDeque<(u64, Bytes)>>>;

struct Publishing {
    publisher: PubSocket,
    batches: mpsc::Receiver<Vec<CacheEvent>>,
    topic: Bytes,
    block_tokens: usize,
    next_number: u64,
    buffer: Buffer,
}

impl Publishing {
    async fn run(mut self) {
        self.publish(encode_cleared(now_s())).await;
        while let Some(events) = self.batches.recv().await {
            self.publish(encode(now_s(), &events, self.block_tokens)).await;
        }
    }

    async fn publish(&mut self, payload: Vec<u8>) {
        let (number, payload) = (self.next_number, Bytes::from(payload));
        self.next_number += 1;
        {
            let mut buffer = self.buffer.lock();
            if buffer.len() == BUFFER_BATCHES {
                buffer.pop_front();
            }
            buffer.push_back((number, payload.clone()));
        }
        let frames = vec![self.topic.clone(), number_frame(number), payload];
        if let Ok(message) = ZmqMessage::try_from(frames) {
            // A subscriber that is gone or too slow misses it, and asks for a replay.
            let _ = self.publisher.send(message).await;
        }
    }
}

struct Replaying {
    router: RouterSocket,
    buffer: Buffer,
}

/// Replays for ever, also where there is no socket for that.
async fn replay_all(replaying: Option<Replaying>) {
    let Some(mut replaying) = replaying else { return std::future::pending().await };
    loop {
        match replaying.router.recv().await {
            Ok(request) => replaying.replay(request).await,
            Err(_) => tokio::time::sleep(AFTER_ERROR).await,
        }
    }
}

impl Replaying {
    /// Answers `[identity, empty, first number]`; anything else is ignored, as vLLM does.
    async fn replay(&mut self, request: ZmqMessage) {
        let frames = request.into_vec();
        let [identity, _, first] = &frames[..] else { return };
        let Ok(first) = <[u8; 8]>::try_from(&first[..]).map(u64::from_be_bytes) else { return };
        let batches: Vec<(u64, Bytes)> =
            self.buffer.lock().iter().filter(|(number, _)| *number >= first).cloned().collect();
        let answers = batches.into_iter().map(|(number, payload)| (number_frame(number), payload));
        for (number, payload) in answers.chain([(Bytes::from_static(END_OF_REPLAY), Bytes::new())]) {
            let frames = vec![identity.clone(), Bytes::new(), number, payload];
            let Ok(message) = ZmqMessage::try_from(frames) else { return };
            let sent = tokio::time::timeout(REPLAY_LIMIT, self.router.send(message)).await;
            if !matches!(sent, Ok(Ok(()))) {
                // The asker is gone, or takes nothing.
                return;
            }
        }
    }
}

fn number_frame(number: u64) -> Bytes {
    Bytes::copy_from_slice(&number.to_be_bytes())
}

fn now_s() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64())
}

/// Where vLLM says that blocks are which an engine itself holds.
const MEDIUM: &str = "GPU";

/// A batch as a payload: `[timestamp_s, [events], data_parallel_rank 0]`.
fn encode(timestamp_s: f64, events: &[CacheEvent], block_tokens: usize) -> Vec<u8> {
    let events = events.iter().map(|event| encode_event(event, block_tokens)).collect();
    payload(timestamp_s, events)
}

/// A batch that says that everything stored before is gone.
fn encode_cleared(timestamp_s: f64) -> Vec<u8> {
    payload(timestamp_s, vec![map(vec![("type", "AllBlocksCleared".into())])])
}

fn payload(timestamp_s: f64, events: Vec<Value>) -> Vec<u8> {
    let batch = Value::Array(vec![timestamp_s.into(), Value::Array(events), 0.into()]);
    let mut bytes = Vec::new();
    // Writing to a Vec cannot fail.
    let _ = rmpv::encode::write_value(&mut bytes, &batch);
    bytes
}

fn encode_event(event: &CacheEvent, block_tokens: usize) -> Value {
    match event {
        CacheEvent::Stored { hashes, parent, tokens } => map(vec![
            ("type", "BlockStored".into()),
            ("block_hashes", array(hashes.iter().map(|hash| hash.low_u64().into()))),
            ("parent_block_hash", parent.map_or(Value::Nil, |parent| parent.low_u64().into())),
            ("token_ids", array(tokens.iter().map(|token| (*token).into()))),
            ("block_size", (block_tokens as u64).into()),
            ("lora_id", Value::Nil),
            ("medium", MEDIUM.into()),
            ("lora_name", Value::Nil),
            ("group_idx", 0.into()),
        ]),
        CacheEvent::Removed { hashes } => map(vec![
            ("type", "BlockRemoved".into()),
            ("block_hashes", array(hashes.iter().map(|hash| hash.low_u64().into()))),
            ("medium", MEDIUM.into()),
            ("group_idx", 0.into()),
        ]),
    }
}

fn map(fields: Vec<(&str, Value)>) -> Value {
    Value::Map(fields.into_iter().map(|(name, value)| (name.into(), value)).collect())
}

fn array(values: impl Iterator<Item = Value>) -> Value {
    Value::Array(values.collect())
}
