//! `forebay engine`: run an emulated engine. It turns arguments into an engine's configuration and
//! a place for its KV: with `--memory` a memory tier beside it, with `--ssd` a log below that, with
//! `--node` the node of this host. What an engine does is `forebay-emulator`'s.

use super::node_socket;
use super::signals::Signals;
use super::values::size;
use forebay_client::protocol::explain::Description;
use forebay_client::{Client, ClientOptions};
use forebay_emulator::events::EventsConfig;
use forebay_emulator::{Engine, EngineConfig, EngineHandle, StoreConnection, namespace};
use forebay_results::output::{CommandResult, Error};
use forebay_steps::{Launch, Profile};
use forebay_store::admission::Policy;
use forebay_store::chunk_store::{ChunkStore, TenantStore};
use forebay_store::disk::DiskOptions;
use forebay_store::ssd::{Existing, Ssd, SsdOptions, Volume, init};
use forebay_store::{Store, TenantId, TierConfig, WriteBackConfig};
use forebay_transfer::HostLink;
use forebay_transfer::Pages;
use forebay_transfer::{Limits, LinkSpec, MoverHandle, MoverThread, PathSpec, Place};
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

/// Requests under way may take this long, in real time, to end after a signal.
const GRACE: Duration = Duration::from_secs(1);

/// Where the engine and its memory tier are for the mover.
const DEVICE: Place = Place::Device(0);
const HOST: Place = Place::Host(0);

/// Copies in flight between the two: lots, and bytes.
const LINK_WINDOW: (u32, u64) = (2, 32 << 20);

/// Length of a segment of a new log.
pub const SEGMENT_BYTES: u64 = 4 << 20;

/// Arguments of `forebay engine`.
#[derive(clap::Args)]
pub struct Args {
    /// Address to listen on
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1")]
    host: IpAddr,
    /// Port to listen on; 0 takes a free one
    #[arg(long, value_name = "PORT", default_value_t = 8000)]
    port: u16,
    /// GPU and model to emulate: a shipped profile, or a file as `forebay calibrate` writes it
    #[arg(long, value_name = "NAME_OR_FILE", default_value = Profile::DEFAULT)]
    profile: String,
    /// Name by which requests ask for the model [default: the profile's]
    #[arg(long, value_name = "NAME")]
    model: Option<String>,
    /// Seconds of the emulated GPU in a real second
    #[arg(long, value_name = "RATIO", default_value_t = 1.0)]
    clock_ratio: f64,
    /// Emulate CUDA graphs: a step takes at least the profile's time for graphs, not its time
    /// without them
    #[arg(long)]
    cuda_graphs: bool,
    /// Bytes of KV that are really kept for a token in a layer, a multiple of 4
    #[arg(long, value_name = "BYTES", default_value_t = 4)]
    kv_bytes_per_token_layer: usize,
    /// Tokens whose KV fits the GPU [default: the profile's]
    #[arg(long, value_name = "TOKENS")]
    pool_tokens: Option<usize>,
    /// Most tokens computed in one step [default: the profile's]
    #[arg(long, value_name = "TOKENS")]
    max_num_batched_tokens: Option<usize>,
    /// Most requests computed at once [default: the profile's]
    #[arg(long, value_name = "REQUESTS")]
    max_num_seqs: Option<usize>,
    /// Longest body of a request, such as 4MiB or 200000
    #[arg(long, value_name = "SIZE", value_parser = size::<usize>, default_value = "16MiB")]
    max_body: usize,
    /// Tokens in each piece of a streamed answer after the first
    #[arg(long, value_name = "TOKENS", default_value_t = 1)]
    stream_interval: usize,
    /// Address at which KV events are published over ZeroMQ
    #[arg(long, value_name = "HOST:PORT")]
    kv_events: Option<SocketAddr>,
    /// Address at which missed KV events can be asked for
    #[arg(long, value_name = "HOST:PORT", requires = "kv_events")]
    kv_events_replay: Option<SocketAddr>,
    /// ZeroMQ topic of the KV events
    #[arg(long, value_name = "TEXT", default_value = "", requires = "kv_events")]
    kv_events_topic: String,
    /// Keep KV in a memory tier too, of this size, such as 1GiB
    #[arg(long, value_name = "SIZE", value_parser = size::<usize>)]
    memory: Option<usize>,
    /// Keep KV on an SSD below the memory tier too, in this log, or in `forebay.log` in this
    /// directory; the log is made if it is missing
    #[arg(long, value_name = "FILE_OR_DIR", requires = "memory")]
    ssd: Option<PathBuf>,
    /// Size of the log, if it is made
    #[arg(long, value_name = "SIZE", value_parser = size::<usize>, default_value = "1GiB", requires = "ssd")]
    ssd_size: usize,
    /// Keep KV in the node that listens on this socket, instead of in a memory tier of the engine
    #[arg(long, value_name = "SOCKET", conflicts_with_all = ["memory", "ssd"])]
    node: Option<PathBuf>,
    /// File with the token that the node asks for
    #[arg(long, value_name = "FILE", requires = "node")]
    node_token: Option<PathBuf>,
    /// Tokens in a chunk of the memory tier or the node
    #[arg(long, value_name = "TOKENS", default_value_t = 256)]
    chunk_tokens: usize,
}

pub fn run(args: Args) -> CommandResult {
    let (memory, node) = (args.memory, args.node_options()?);
    let log = args.ssd.clone().map(|path| Log { path, bytes: args.ssd_size as u64 });
    let config = args.into_config()?;
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    runtime.block_on(async {
        // Dropped last: the engine's transfers end before the mover does.
        let store = match (memory, node) {
            (Some(bytes), _) => Some(EngineStore::here(bytes, log.as_ref(), &config)?),
            (None, Some(node)) => Some(EngineStore::with_node(node, described(&config))?),
            (None, None) => None,
        };
        let connection = store.as_ref().map(EngineStore::connection);
        let (model, ratio) = (config.model.clone(), config.clock_ratio);
        let engine = Engine::spawn(config, connection).await?;
        let mut signals = Signals::listen()?;
        println!("forebay engine: http://{} serves {model}, clock x{ratio}", engine.address());
        print_events(&engine);
        signals.next().await;
        engine.shutdown(GRACE).await;
        // What the engine computed last is still to be written.
        Ok(store.and_then(|store| store.own).map_or(Ok(()), |store| store.close())?)
    })
}

/// What the node is told of the engine's KV.
fn described(config: &EngineConfig) -> Description {
    let mut facts = namespace(&config.profile).facts();
    facts.insert("model".into(), config.profile.model.name.clone());
    Description { key: config.namespace, chunk_tokens: config.chunk_tokens as u32, facts }
}

fn print_events(engine: &EngineHandle) {
    if let Some((publish, replay)) = engine.kv_events() {
        let replay = replay.map(|replay| format!(", replayed by tcp://{replay}")).unwrap_or_default();
        println!("forebay engine: KV events from tcp://{publish}{replay}");
    }
}

impl Args {
    fn node_options(&self) -> Result<Option<ClientOptions>, Error> {
        let Some(socket) = &self.node else { return Ok(None) };
        Ok(Some(node_socket::options("engine", socket, self.node_token.as_deref())?))
    }

    fn into_config(self) -> Result<EngineConfig, Error> {
        let mut profile = Profile::find(&self.profile)?;
        profile.memory.pool_tokens = self.pool_tokens.unwrap_or(profile.memory.pool_tokens);
        let limits = &mut profile.scheduler;
        limits.max_batched_tokens = self.max_num_batched_tokens.unwrap_or(limits.max_batched_tokens);
        limits.max_seqs = self.max_num_seqs.unwrap_or(limits.max_seqs);
        let namespace = namespace(&profile).key();
        let kv_events = self.kv_events.map(|publish| EventsConfig {
            publish,
            replay: self.kv_events_replay,
            topic: self.kv_events_topic,
        });
        let usual = EngineConfig::new(profile, namespace);
        Ok(EngineConfig {
            model: self.model.unwrap_or(usual.model),
            kv_bytes_per_token_layer: self.kv_bytes_per_token_layer,
            chunk_tokens: self.chunk_tokens,
            launch: if self.cuda_graphs { Launch::Graph } else { Launch::Eager },
            clock_ratio: self.clock_ratio,
            stream_interval: self.stream_interval,
            max_body_bytes: self.max_body,
            listen: SocketAddr::new(self.host, self.port),
            kv_events,
            ..usual
        })
    }
}

/// A log of the SSD tier, and how long it is made if it is not there.
pub struct Log {
    pub path: PathBuf,
    pub bytes: u64,
}

impl Log {
    /// Opens the log for the mover's place 0 of the host, and makes it first if it is not there.
    pub fn open(&self, mover: &MoverHandle, chunk_bytes: u64) -> Result<Ssd, Error> {
        if chunk_bytes >= SEGMENT_BYTES {
            return Err(format!(
                "--ssd: a chunk has {chunk_bytes} bytes; allowed are less than {SEGMENT_BYTES}"
            )
            .into());
        }
        let path = if self.path.is_dir() { self.path.join("forebay.log") } else { self.path.clone() };
        if !path.exists() {
            init(&path, self.bytes, SEGMENT_BYTES, Existing::Keep)?;
        }
        let volume = Volume::open(&path, DiskOptions::default())?;
        Ok(Ssd::open(mover, HOST, vec![volume], SsdOptions::default())?)
    }

    /// Everything that memory takes in is written.
    pub fn write_back(&self, memory_bytes: u64, chunk_bytes: u64) -> WriteBackConfig {
        WriteBackConfig::new(Policy::All, memory_bytes, self.bytes, chunk_bytes)
    }
}

/// Where the engine keeps its KV beside its GPU.
struct EngineStore {
    store: Arc<dyn ChunkStore>,
    /// The store, if it is the engine's own.
    own: Option<Store>,
    mover: MoverThread,
}

impl EngineStore {
    /// A memory tier of the engine's own, and what is below it.
    fn here(bytes: usize, log: Option<&Log>, engine: &EngineConfig) -> Result<EngineStore, Error> {
        let tier = TierConfig::new(bytes as u64);
        let chunk_bytes = engine.chunk_tokens * engine.profile.model.layers * engine.kv_bytes_per_token_layer;
        if tier.slab_bytes < chunk_bytes as u64 {
            let slab_bytes = tier.slab_bytes;
            return Err(format!(
                "--memory is {bytes} bytes, in slabs of {slab_bytes}; a chunk has {chunk_bytes}"
            )
            .into());
        }
        let mover = MoverThread::spawn(Limits::default())?;
        let handle = mover.handle();
        let store = match log {
            None => Store::open(&handle, HOST, Pages::Transparent, tier)?,
            Some(log) => {
                let ssd = log.open(&handle, chunk_bytes as u64)?;
                let write_back = log.write_back(bytes as u64, chunk_bytes as u64);
                Store::open_with_ssd(&handle, HOST, Pages::Transparent, tier, ssd, &write_back)?
            }
        };
        join(&handle)?;
        if log.is_some() {
            // What is loaded from the SSD goes from its staging to the memory tier too.
            add_copy(&handle, "h2h", HOST, HOST)?;
        }
        let tenant = TenantId::default();
        Ok(EngineStore { store: Arc::new(TenantStore::new(store.clone(), tenant)), own: Some(store), mover })
    }

    /// The node of this host.
    fn with_node(options: ClientOptions, described: Description) -> Result<EngineStore, Error> {
        let mover = MoverThread::spawn(Limits::default())?;
        let handle = mover.handle();
        join(&handle)?;
        let client = Client::connect(&handle, HOST, options).map_err(|error| format!("--node: {error}"))?;
        client.describe(described)?;
        Ok(EngineStore { store: Arc::new(client), own: None, mover })
    }

    fn connection(&self) -> StoreConnection {
        StoreConnection { store: Arc::clone(&self.store), mover: self.mover.handle(), device: DEVICE }
    }
}

/// Lets bytes go between the host and the engine's device, both ways.
fn join(mover: &MoverHandle) -> Result<(), Error> {
    add_copy(mover, "h2d", HOST, DEVICE)?;
    add_copy(mover, "d2h", DEVICE, HOST)
}

/// Lets bytes be copied from one place to another.
pub fn add_copy(mover: &MoverHandle, name: &str, from: Place, to: Place) -> Result<(), Error> {
    let (window_lots, window_bytes) = LINK_WINDOW;
    let link = mover.add_link(LinkSpec::new(name, window_lots, window_bytes), Box::new(HostLink::new(1)?))?;
    mover.add_path(PathSpec::direct(from, to, link))??;
    Ok(())
}
