//! `forebay bench node`: what it costs to store and to load the KV of a prompt of 128k tokens by
//! way of a node: time, CPU of node and client together, and messages. A real node and its client
//! run in this process, and share memory as two processes do. Chunks are small, so that messages
//! weigh more than bytes. The ceilings are one copy of the bytes by one thread, and bare reads of as
//! many bytes from the SSD into memory that is in no processor's cache.

use crate::disk::memory::{Buffers, Direction, Objects};
use crate::disk::raw::Raw;
use crate::output::{CommandResult, Error, Output, finish};
use crate::timing::cost;
use forebay_client::{Client, ClientOptions, LeasedChunk, NewChunk, Reserved, Slot};
use forebay_kv::{ChunkId, NamespaceKey};
use forebay_node::{Node, NodeConfig, SsdConfig, WriteBackPolicy};
use forebay_results::{Results, Row};
use forebay_store::{ChunkShape, StoreEnd};
use forebay_transfer::{
    Backing, Class, End, HostBuffer, HostLink, Limits, LinkSpec, MoverHandle, MoverThread, PathSpec, Place,
    RegionId, Span, SpanPair, Transfer,
};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};
use std::time::Duration;

/// Chunks of the prompt: 128k tokens in chunks of 64.
const CHUNKS: usize = 2048;
const LAYERS: u64 = 32;
const LAYER_BYTES: u64 = 4096;
const CHUNK_BYTES: u64 = LAYERS * LAYER_BYTES;
/// Chunks that are stored or brought at a time, as an engine does it.
const AT_A_TIME: usize = 512;
/// And those that are asked for together.
const TOGETHER: usize = 128;
const MEMORY_BYTES: u64 = 3 * CHUNKS as u64 * CHUNK_BYTES;
const TTL_US: u64 = 60_000_000;
const LIMIT: Duration = Duration::from_secs(60);
const HOST: Place = Place::Host(0);

/// Arguments of `forebay bench node`.
#[derive(clap::Args)]
pub struct Args {
    /// Directory in which the node's SSD log is made [default: a temporary one]
    #[arg(long)]
    dir: Option<PathBuf>,
    /// Number of runs; each stores and loads a prompt of its own
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=1000))]
    runs: u32,
    #[command(flatten)]
    output: Output,
}

/// What one act cost.
struct Cost {
    ms: f64,
    cpu_ms: f64,
    messages: f64,
}

pub fn run(args: Args) -> CommandResult {
    let folder = match &args.dir {
        Some(dir) => tempfile::tempdir_in(dir)?,
        None => tempfile::tempdir()?,
    };
    let mut costs: [(&str, Vec<Cost>); 3] = ["store", "load", "load_ssd"].map(|name| (name, Vec::new()));
    let mut ceilings = Ceilings::new()?;
    for run in 0..args.runs {
        let ids = prompt(run);
        let node = start(folder.path())?;
        let engine = Engine::connect(&socket(folder.path()))?;
        costs[0].1.push(engine.cost(|| engine.store(&ids))?);
        costs[1].1.push(engine.cost(|| engine.load(&ids, 0))?);
        drop(engine);
        // The next one has all of it on its SSD, and nothing in memory.
        node.drain(LIMIT)?;
        let node = start(folder.path())?;
        let engine = Engine::connect(&socket(folder.path()))?;
        costs[2].1.push(engine.cost(|| engine.load(&ids, CHUNKS))?);
        drop((engine, node));
        ceilings.add(&folder.path().join("log"))?;
    }
    let mut results = Results::new("node");
    for (name, costs) in &costs {
        let row = |what: &str, unit, of: fn(&Cost) -> f64| {
            let runs: Vec<f64> = costs.iter().map(of).collect();
            Row::of_runs(format!("node.{name}.128k.{what}"), unit, &runs)
        };
        let time = row("ms", "ms", |cost| cost.ms).with_ceiling(ceilings.ms_of(name));
        results.rows.push(time);
        results.rows.push(row("cpu_ms", "ms", |cost| cost.cpu_ms));
        results.rows.push(row("messages", "", |cost| cost.messages));
    }
    finish(&results, &args.output)
}

/// What the machine does at best, run by run.
struct Ceilings {
    buffers: Buffers,
    copy_ms: Vec<f64>,
    disk_ms: Vec<f64>,
}

impl Ceilings {
    fn new() -> Result<Ceilings, Error> {
        // A page behind each chunk says what is in it.
        let objects = Objects { bytes: CHUNK_BYTES + 4096, depth: 32, slots: CHUNKS };
        Ok(Ceilings { buffers: Buffers::new(objects)?, copy_ms: Vec::new(), disk_ms: Vec::new() })
    }

    /// Measures both. Nobody uses the log meanwhile.
    fn add(&mut self, log: &Path) -> CommandResult {
        let from = vec![1_u8; CHUNKS * CHUNK_BYTES as usize];
        let mut to = vec![0_u8; from.len()];
        let copied = cost(|| {
            to.copy_from_slice(std::hint::black_box(&from));
            Ok(())
        })?;
        self.copy_ms.push(copied.wall_s * 1e3);
        std::hint::black_box(to);
        let places: Vec<u64> = (0..CHUNKS as u64).map(|chunk| chunk * self.buffers.objects.bytes).collect();
        let mut raw = Raw::open(log, &self.buffers)?;
        self.disk_ms.push(cost(|| raw.run(Direction::Read, &places))?.wall_s * 1e3);
        Ok(())
    }

    /// The median for what so is called.
    fn ms_of(&self, name: &str) -> f64 {
        let mut runs = if name == "load_ssd" { self.disk_ms.clone() } else { self.copy_ms.clone() };
        runs.sort_by(f64::total_cmp);
        runs[runs.len() / 2]
    }
}

fn socket(folder: &Path) -> PathBuf {
    folder.join("node.sock")
}

/// A node with room for three prompts in memory, and for all of them on SSD.
fn start(folder: &Path) -> Result<Node, Error> {
    let mut config = NodeConfig::new(socket(folder), MEMORY_BYTES);
    config.memory.chunk_size = CHUNK_BYTES;
    config.write_back = WriteBackPolicy::All;
    let (path, size) = (folder.join("log"), 8 * MEMORY_BYTES);
    config.ssd = vec![SsdConfig { path, size, segment_size: 0, create: true }];
    Ok(Node::start(&config)?)
}

fn prompt(number: u32) -> Vec<ChunkId> {
    let namespace = NamespaceKey::from_bytes([1; 32]);
    let first = ChunkId::derive(&namespace, None, &[number]);
    let next = |parent: &ChunkId| Some(ChunkId::derive(&namespace, Some(parent), &[number]));
    std::iter::successors(Some(first), next).take(CHUNKS).collect()
}

/// A client, and memory for the KV of a prompt.
struct Engine {
    client: Client,
    region: RegionId,
    mover: MoverThread,
}

impl Drop for Engine {
    fn drop(&mut self) {
        self.client.close();
    }
}

impl Engine {
    fn connect(socket: &Path) -> Result<Engine, Error> {
        let mover = MoverThread::spawn(Limits::default())?;
        let handle: MoverHandle = mover.handle();
        let link = handle.add_link(LinkSpec::new("host", 4, 64 << 20), Box::new(HostLink::new(1)?))?;
        handle.add_path(PathSpec::direct(HOST, HOST, link))??;
        let memory = Arc::new(HostBuffer::new(CHUNKS * CHUNK_BYTES as usize));
        let truth: Vec<u8> =
            (0..memory.len()).map(|at| (at as u32).wrapping_mul(2_654_435_761).to_le_bytes()[3]).collect();
        memory.write(0, &truth);
        let region = handle.register(HOST, memory)?;
        let client = Client::connect(&handle, HOST, ClientOptions::new(socket))?;
        Ok(Engine { client, region, mover })
    }

    /// Does it, and says what it cost.
    fn cost(&self, act: impl FnOnce() -> CommandResult) -> Result<Cost, Error> {
        let before = self.client.messages();
        let cost = cost(act)?;
        let messages = (self.client.messages() - before) as f64;
        Ok(Cost { ms: cost.wall_s * 1e3, cpu_ms: cost.cpu_s * 1e3, messages })
    }

    /// Where the layers of a chunk lie.
    fn layers(&self, chunk: usize) -> Vec<Vec<Span>> {
        let start = chunk as u64 * CHUNK_BYTES;
        let layer = |layer| vec![Span::new(self.region, start + layer * LAYER_BYTES, LAYER_BYTES)];
        (0..LAYERS).map(layer).collect()
    }

    fn store(&self, ids: &[ChunkId]) -> CommandResult {
        let shape = ChunkShape::new((0..LAYERS).map(|_| LAYER_BYTES))?;
        let (sender, events) = channel();
        let (mut begun, mut stored) = (0, 0);
        while stored < CHUNKS {
            while begun + TOGETHER <= CHUNKS.min(stored + AT_A_TIME) {
                let (first, told) = (begun, sender.clone());
                let on_end =
                    move |chunk, reserved| drop(told.send((first + chunk, Event::Reserved(reserved))));
                let parent = |chunk: usize| chunk.checked_sub(1).map(|before| ids[before]);
                let new = |chunk| NewChunk { id: ids[chunk], parent: parent(chunk) };
                begun += TOGETHER;
                let chunks: Vec<NewChunk> = (first..begun).map(new).collect();
                self.client.reserve(&shape, &chunks, on_end);
            }
            let (chunk, event) = events.recv_timeout(LIMIT)?;
            match event {
                Event::Reserved(Reserved::Slot(slot)) => self.fill(chunk, slot, &sender)?,
                Event::Copied(slot, End::Done { bytes: CHUNK_BYTES }) => {
                    let (sums, told) = (slot.sums(&self.layers(chunk)), sender.clone());
                    slot.commit(sums, move |end| drop(told.send((chunk, Event::Stored(end)))));
                }
                Event::Stored(StoreEnd::Stored { .. }) => stored += 1,
                other => return Err(format!("chunk {chunk} was not stored: {other:?}").into()),
            }
        }
        Ok(())
    }

    /// Copies a chunk into its slot.
    fn fill(&self, chunk: usize, slot: Slot, sender: &Sender<(usize, Event)>) -> CommandResult {
        let from = Span::new(self.region, chunk as u64 * CHUNK_BYTES, CHUNK_BYTES);
        let transfer = Transfer::new(vec![SpanPair::new(from, slot.span())], Class::WriteBack);
        let told = sender.clone();
        let on_end = move |end| drop(told.send((chunk, Event::Copied(slot, end))));
        Ok(self.mover.handle().submit(transfer, on_end).map(drop)?)
    }

    /// Loads a prompt, of which so many chunks are on SSD.
    fn load(&self, ids: &[ChunkId], on_disk: usize) -> CommandResult {
        let lease = self.client.lease(ids, TTL_US);
        if (lease.len(), lease.on_disk()) != (CHUNKS, on_disk) {
            return Err(format!("a lease of {} chunks, {} on disk", lease.len(), lease.on_disk()).into());
        }
        let (sender, events) = channel();
        let (mut begun, mut loaded) = (0, 0);
        while loaded < CHUNKS {
            while begun + TOGETHER <= CHUNKS.min(loaded + AT_A_TIME) {
                let told = sender.clone();
                let on_end = move |chunk, brought: Result<LeasedChunk, String>| {
                    drop(told.send((chunk, Came::Brought(brought.map(drop)))));
                };
                let chunks: Vec<usize> = (begun..begun + TOGETHER).collect();
                self.client.bring(&lease, &chunks, Class::Demand, None, on_end);
                begun += TOGETHER;
            }
            let (chunk, came) = events.recv_timeout(LIMIT)?;
            match came {
                Came::Brought(Ok(())) => {
                    let told = sender.clone();
                    let on_end = move |end| drop(told.send((chunk, Came::Loaded(end))));
                    let layers = self.layers(chunk);
                    self.client.load_chunk(&lease, chunk, &layers, Class::Demand, None, on_end)?;
                }
                Came::Loaded(End::Done { bytes: CHUNK_BYTES }) => loaded += 1,
                other => return Err(format!("chunk {chunk} was not loaded: {other:?}").into()),
            }
        }
        Ok(())
    }
}

/// What happened to a chunk that is stored.
#[derive(Debug)]
enum Event {
    Reserved(Reserved),
    Copied(Slot, End),
    Stored(StoreEnd),
}

/// What happened to a chunk that is loaded.
#[derive(Debug)]
enum Came {
    Brought(Result<(), String>),
    Loaded(End),
}
