//! An engine as a whole: configuration in, a running thread and an HTTP server out.

use crate::arrivals::Arrivals;
use crate::clock::ModelClock;
use crate::compute::Compute;
use crate::device::DeviceMemory;
use crate::events::{EventsConfig, EventsError, Publisher};
use crate::external::{External, StoreConnection};
use crate::hand_over::{Fault, Offers, Reads};
use crate::http::{self, App};
use crate::job::{Intake, Message};
use crate::load_policy::LoadPolicy;
use crate::scheduler::{Scheduler, SchedulerConfig};
use crate::stats::Stats;
use crate::truth::{KvShape, KvTruth, ShapeError};
use crate::worker::{Handing, Jobs, Worker};
use axum::serve::ListenerExt;
use forebay_kv::{AxisOrder, Digest, KvDtype, Namespace, NamespaceKey, Rank};
use forebay_steps::{Launch, Profile, ProfileError, StepModel};
use forebay_transfer::lock::Mutex;
use std::collections::{BTreeMap, VecDeque};
use std::net::SocketAddr;
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use thiserror::Error;
use tokio::net::TcpListener;
use tokio::runtime::Handle;
use tokio::sync::oneshot;
use tokio::task::JoinHandle as TaskHandle;

/// How long idle connections may keep the server from ending.
const CLOSE_CONNECTIONS: Duration = Duration::from_secs(1);

/// How often a shutdown looks whether jobs are left.
const DRAIN_POLL: Duration = Duration::from_millis(5);

/// Stores hold one block in so many of the pool at most: enough for the chunks of several steps,
/// and too few to starve requests when a store is slow.
const STORE_SHARE: usize = 4;

#[derive(Clone, Debug)]
pub struct EngineConfig {
    /// Model and GPU. Its memory and scheduler may be changed before use.
    pub profile: Profile,
    /// Served name of the model.
    pub model: String,
    /// What makes this engine's KV unusable in others.
    pub namespace: NamespaceKey,
    /// KV bytes that are really kept for a token in a layer: a multiple of 4. The step model uses
    /// the real model's.
    pub kv_bytes_per_token_layer: usize,
    /// Tokens of a chunk in the store, a multiple of the profile's `block_tokens`.
    pub chunk_tokens: usize,
    /// How steps are launched.
    pub launch: Launch,
    /// Model seconds per real second.
    pub clock_ratio: f64,
    /// Tokens per streamed chunk after the first.
    pub stream_interval: usize,
    /// Requests queued and running at most; beyond that clients get 503.
    pub max_requests: usize,
    /// Longest body of a request; beyond that clients get 413.
    pub max_body_bytes: usize,
    /// What hand-overs to this engine go over, in GB/s.
    pub kv_network_gb_per_s: f64,
    /// Where the API listens; port 0 lets the system choose.
    pub listen: SocketAddr,
    /// Where KV events are published, if they are.
    pub kv_events: Option<EventsConfig>,
}

/// What makes KV of a profile's model, on one emulated GPU, unusable elsewhere. There are no
/// weights to digest, so the model's name stands for them; the step model's constants change no KV.
pub fn namespace(profile: &Profile) -> Namespace {
    Namespace {
        weights: Digest::of(profile.model.name.as_bytes()),
        dtype: KvDtype::Bfloat16,
        order: AxisOrder::Lbhnc,
        block_tokens: profile.memory.block_tokens as u32,
        tensor_parallel: Rank::ONLY,
        pipeline_parallel: Rank::ONLY,
        attention: BTreeMap::new(),
        lora: None,
        tenant_salt: Vec::new(),
    }
}

impl EngineConfig {
    /// The usual configuration: real time, the smallest KV, a free port of the loopback address, no
    /// KV events.
    pub fn new(profile: Profile, namespace: NamespaceKey) -> EngineConfig {
        EngineConfig {
            model: profile.model.name.clone(),
            profile,
            namespace,
            kv_bytes_per_token_layer: 4,
            chunk_tokens: 256,
            launch: Launch::default(),
            clock_ratio: 1.0,
            stream_interval: 1,
            max_requests: 4_096,
            max_body_bytes: 16 << 20,
            kv_network_gb_per_s: 25.0,
            listen: SocketAddr::from(([127, 0, 0, 1], 0)),
            kv_events: None,
        }
    }

    /// How much KV is really kept.
    pub fn shape(&self) -> Result<KvShape, ShapeError> {
        let profile = &self.profile;
        KvShape::new(profile.model.layers, self.kv_bytes_per_token_layer, profile.memory.block_tokens)
    }

    /// What the bytes of its KV must be, and what an [`Oracle`](crate::truth::Oracle) needs.
    pub fn truth(&self) -> Result<KvTruth, ShapeError> {
        Ok(KvTruth::new(&self.namespace, self.shape()?))
    }

    fn pool_blocks(&self) -> Result<u32, SpawnError> {
        let blocks = self.profile.memory.pool_tokens / self.profile.memory.block_tokens;
        match u32::try_from(blocks) {
            Ok(blocks @ 1..) => Ok(blocks),
            _ => Err(SpawnError::value(
                "memory.pool_tokens",
                self.profile.memory.pool_tokens,
                "at least one block",
            )),
        }
    }

    fn check(&self) -> Result<(), SpawnError> {
        self.profile.check()?;
        let block_tokens = self.profile.memory.block_tokens;
        let (ratio, network) = (self.clock_ratio, self.kv_network_gb_per_s);
        match () {
            () if self.chunk_tokens == 0 || !self.chunk_tokens.is_multiple_of(block_tokens) => {
                Err(SpawnError::value("chunk_tokens", self.chunk_tokens, "a multiple of memory.block_tokens"))
            }
            () if !(ratio.is_finite() && ratio > 0.0) => {
                Err(SpawnError::value("clock_ratio", ratio, "a finite number above 0"))
            }
            () if !(network.is_finite() && network > 0.0) => {
                Err(SpawnError::value("kv_network_gb_per_s", network, "a finite number above 0"))
            }
            () if self.stream_interval == 0 => Err(SpawnError::value("stream_interval", 0, "at least 1")),
            () if self.max_requests == 0 => Err(SpawnError::value("max_requests", 0, "at least 1")),
            () => Ok(()),
        }
    }
}

/// Why an engine did not start.
#[derive(Debug, Error)]
pub enum SpawnError {
    /// A value that makes no sense.
    #[error("{field} is {value}; it must be {allowed}")]
    Value { field: &'static str, value: String, allowed: &'static str },
    /// The profile makes no sense.
    #[error(transparent)]
    Profile(#[from] ProfileError),
    /// There is no cost model of it.
    #[error(transparent)]
    CostModel(#[from] forebay_paged::cost_model::BadProfile),
    /// The KV is impossible.
    #[error(transparent)]
    Shape(#[from] ShapeError),
    /// The API's address cannot be bound.
    #[error("cannot listen on {address}: {error}")]
    Listen { address: SocketAddr, error: std::io::Error },
    /// KV events cannot be published.
    #[error(transparent)]
    Events(#[from] EventsError),
    /// There is no thread for the engine.
    #[error("cannot start the engine's thread: {0}")]
    Thread(std::io::Error),
    /// The store's mover has ended.
    #[error("cannot connect to the store: {0}")]
    Mover(#[from] forebay_transfer::Closed),
}

impl SpawnError {
    fn value(field: &'static str, value: impl std::fmt::Display, allowed: &'static str) -> SpawnError {
        SpawnError::Value { field, value: value.to_string(), allowed }
    }
}

/// Starts engines.
#[derive(Debug)]
pub struct Engine;

impl Engine {
    /// Starts an engine: a thread that computes, and on the current tokio runtime its HTTP server
    /// and the publisher of its KV events. With a store it fetches chunks from there and stores
    /// what it computes.
    pub async fn spawn(
        config: EngineConfig,
        store: Option<StoreConnection>,
    ) -> Result<EngineHandle, SpawnError> {
        config.check()?;
        let truth = config.truth()?;
        let block_tokens = config.profile.memory.block_tokens;
        let pool_blocks = config.pool_blocks()?;
        let listener = TcpListener::bind(config.listen).await;
        let listener = listener.map_err(|error| SpawnError::Listen { address: config.listen, error })?;
        let address =
            listener.local_addr().map_err(|error| SpawnError::Listen { address: config.listen, error })?;
        let publisher = match &config.kv_events {
            Some(events) => Some(Publisher::start(events, block_tokens).await?),
            None => None,
        };

        let (inbox, messages) = mpsc::channel();
        let identity = format!("{:?}", config.namespace);
        let device = DeviceMemory::new(truth.shape(), pool_blocks);
        let step_model = StepModel::new(&config.profile, config.launch);
        let clock = ModelClock::new(config.clock_ratio);
        let external = match store {
            Some(connection) => {
                let (device, shape) = (device.clone(), truth.shape());
                let policy = LoadPolicy::new(&config.profile, &step_model, &clock, config.chunk_tokens)?;
                let inbox = inbox.clone();
                Some(External::connect(connection, device, shape, config.chunk_tokens, inbox, policy)?)
            }
            None => None,
        };
        let scheduler = Scheduler::new(SchedulerConfig {
            namespace: config.namespace,
            pool_blocks,
            block_tokens,
            max_batched_tokens: config.profile.scheduler.max_batched_tokens,
            max_seqs: config.profile.scheduler.max_seqs,
            max_queued: config.max_requests,
            max_model_tokens: config.profile.model.max_model_tokens,
            chunk_tokens: external.is_some().then_some(config.chunk_tokens),
            max_store_blocks: pool_blocks as usize / STORE_SHARE,
        });
        let limit_tokens = config.profile.model.max_model_tokens.min(pool_blocks as usize * block_tokens);
        let intake = Arc::new(Intake::new(inbox.clone(), limit_tokens, config.max_requests));
        let shared = Arc::new(Mutex::new(Stats::default()));
        let offers = Arc::new(Offers::default());
        let model_kv_bytes = config.profile.model.kv_bytes_per_token as f64;
        let worker = Worker {
            inbox: messages,
            deferred: VecDeque::new(),
            arrivals: Arrivals::default(),
            scheduler,
            compute: Compute::new(truth, device.clone(), config.profile.model.vocab),
            step_model,
            clock,
            external,
            events: publisher.as_ref().map(|publisher| publisher.sender.clone()),
            shared: Arc::clone(&shared),
            stats: Stats::default(),
            jobs: Jobs::default(),
            handed: Handing::new(
                Reads::new(Handle::current(), inbox.clone()),
                offers.clone(),
                device.clone(),
                model_kv_bytes / (config.kv_network_gb_per_s * 1e3),
            ),
            stop_by: None,
        };
        let thread = std::thread::Builder::new().name("forebay-engine".into()).spawn(move || worker.run());
        let thread = thread.map_err(SpawnError::Thread)?;

        let app = App {
            intake: Arc::clone(&intake),
            model: config.model,
            vocab: config.profile.model.vocab,
            stream_interval: config.stream_interval,
            block_tokens,
            stats: Arc::clone(&shared),
            offers: offers.clone(),
            device,
            address,
            identity,
        };
        let (close, closed) = oneshot::channel::<()>();
        let server = tokio::spawn(serve(listener, Arc::new(app), config.max_body_bytes, closed));
        Ok(EngineHandle {
            address,
            inbox,
            intake,
            stats: shared,
            offers,
            publisher,
            close: Some(close),
            server,
            thread: Some(thread),
        })
    }
}

async fn serve(listener: TcpListener, app: Arc<App>, max_body_bytes: usize, closed: oneshot::Receiver<()>) {
    // Without it, a small write waits up to 40 ms for the client's delayed acknowledgement of the
    // one before.
    let listener = listener.tap_io(|connection| drop(connection.set_nodelay(true)));
    let server = axum::serve(listener, http::router(app, max_body_bytes));
    // It only ends when it is told to.
    let _ = server.with_graceful_shutdown(async { drop(closed.await) }).await;
}

/// A running engine. Dropping it stops it without waiting.
#[derive(Debug)]
pub struct EngineHandle {
    address: SocketAddr,
    inbox: mpsc::Sender<Message>,
    intake: Arc<Intake>,
    stats: Arc<Mutex<Stats>>,
    offers: Arc<Offers>,
    publisher: Option<Publisher>,
    close: Option<oneshot::Sender<()>>,
    server: TaskHandle<()>,
    thread: Option<JoinHandle<()>>,
}

impl EngineHandle {
    /// Where the API listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Where KV events are published, and where they can be replayed.
    pub fn kv_events(&self) -> Option<(SocketAddr, Option<SocketAddr>)> {
        self.publisher.as_ref().map(|publisher| (publisher.publish, publisher.replay))
    }

    /// What the engine has counted, as of its last step.
    pub fn stats(&self) -> Stats {
        self.stats.lock().clone()
    }

    /// Prompts whose blocks are kept for other engines.
    pub fn kept_prompts(&self) -> usize {
        self.offers.kept()
    }

    /// From now on it does this wrong in hand-overs, or nothing.
    pub fn set_fault(&self, fault: Option<Fault>) {
        self.offers.set_fault(fault);
    }

    /// Stops the engine: requests that are not done within `grace` are aborted. When this returns
    /// no transfer reads or writes the engine's memory any more, unless the mover did not end one
    /// in 10 s.
    pub async fn shutdown(mut self, grace: Duration) {
        self.intake.drain();
        let deadline = Instant::now() + grace;
        while self.intake.jobs() > 0 && Instant::now() < deadline {
            tokio::time::sleep(DRAIN_POLL).await;
        }
        // An engine that has ended already need not be told.
        let _ = self.inbox.send(Message::Stop);
        if let Some(thread) = self.thread.take() {
            // Without another thread: there may be none to be had.
            while !thread.is_finished() {
                tokio::time::sleep(DRAIN_POLL).await;
            }
            // A panic of the thread has been printed already.
            let _ = thread.join();
        }
        drop(self.close.take());
        if tokio::time::timeout(CLOSE_CONNECTIONS, &mut self.server).await.is_err() {
            self.server.abort();
        }
        if let Some(publisher) = self.publisher.take() {
            drop(publisher.sender);
            // It ends with its last sender, which the thread had.
            let _ = tokio::time::timeout(CLOSE_CONNECTIONS, publisher.task).await;
        }
    }
}

impl Drop for EngineHandle {
    fn drop(&mut self) {
        self.intake.drain();
        // An engine that has ended already need not be told.
        let _ = self.inbox.send(Message::Stop);
        self.server.abort();
    }
}
