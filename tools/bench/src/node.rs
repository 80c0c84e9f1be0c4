//! `forebay bench node`: what it costs to store and to load the KV of a prompt by way of a node:
//! time, CPU of node and client together, and messages. A real node and its client run in this
//! process, and share memory as two processes do. Chunks are small unless others are asked for, so
//! that messages weigh more than bytes. The ceilings are one copy of the bytes by one thread, and
//! bare reads of as many bytes from the SSD into memory that is in no processor's cache.

use crate::disk::memory::{At, Buffers, Direction, Objects};
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
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};
use std::time::Duration;

const CHUNK_TOKENS: u32 = 64;
const LAYERS: u64 = 32;
/// Direct I/O moves whole pages.
const PAGE_BYTES: u32 = 4096;
/// Chunks that are stored or brought at a time, as an engine does it.
const AT_A_TIME: usize = 512;
/// And those that are asked for together.
const TOGETHER: usize = 128;
/// Chunks that a node has memory for at least: with fewer, one would not fit a slab of it.
const MEMORY_CHUNKS_MIN: u64 = 128;
const TTL_US: u64 = 60_000_000;
const LIMIT: Duration = Duration::from_secs(60);
const HOST: Place = Place::Host(0);

/// Arguments of `forebay bench node`.
#[derive(clap::Args)]
pub struct Args {
    /// Directory in which the node's SSD log is made [default: a temporary one]
    #[arg(long)]
    dir: Option<PathBuf>,
    /// Length of the prompt, which is stored in chunks of 64 tokens
    #[arg(long, value_name = "COUNT", default_value_t = 128 << 10, value_parser = whole::<CHUNK_TOKENS>)]
    tokens: u32,
    /// KV of a chunk in each of its 32 layers: 262144 is that of an 8B model
    #[arg(long, value_name = "BYTES", default_value_t = PAGE_BYTES, value_parser = whole::<PAGE_BYTES>)]
    layer_bytes: u32,
    /// Number of runs; each stores and loads a prompt of its own
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=1000))]
    runs: u32,
    #[command(flatten)]
    output: Output,
}

/// A number of which `OF` is a part.
fn whole<const OF: u32>(text: &str) -> Result<u32, String> {
    let number = text.parse().ok().filter(|number: &u32| (OF..=1 << 30).contains(number));
    let number = number.filter(|number| number.is_multiple_of(OF));
    number.ok_or_else(|| format!("'{text}' is not allowed: multiples of {OF} up to {}", 1 << 30))
}

/// How large a prompt's KV is.
#[derive(Clone, Copy)]
struct Prompt {
    chunks: usize,
    layer_bytes: u64,
}

impl Prompt {
    fn chunk_bytes(&self) -> u64 {
        LAYERS * self.layer_bytes
    }

    fn bytes(&self) -> u64 {
        self.chunks as u64 * self.chunk_bytes()
    }

    /// The chunks to ask for next, where so many have been asked for and so many are done: `None`
    /// when enough are under way.
    fn next(&self, asked: usize, done: usize) -> Option<Range<usize>> {
        let end = self.chunks.min(asked + TOGETHER);
        (asked < end && end <= done + AT_A_TIME).then_some(asked..end)
    }

    /// The ids of the chunks of one such prompt.
    fn ids(&self, number: u32) -> Vec<ChunkId> {
        let namespace = NamespaceKey::from_bytes([1; 32]);
        let first = ChunkId::derive(&namespace, None, &[number]);
        let next = |parent: &ChunkId| Some(ChunkId::derive(&namespace, Some(parent), &[number]));
        std::iter::successors(Some(first), next).take(self.chunks).collect()
    }
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
    let prompt =
        Prompt { chunks: (args.tokens / CHUNK_TOKENS) as usize, layer_bytes: u64::from(args.layer_bytes) };
    let mut ceilings = Ceilings::new(prompt)?;
    for run in 0..args.runs {
        let ids = prompt.ids(run);
        let node = start(folder.path(), prompt)?;
        let engine = Engine::connect(&socket(folder.path()), prompt)?;
        costs[0].1.push(engine.cost(|| engine.store(&ids))?);
        costs[1].1.push(engine.cost(|| engine.load(&ids, 0))?);
        drop(engine);
        // The next one has all of it on its SSD, and nothing in memory.
        node.drain(LIMIT)?;
        let node = start(folder.path(), prompt)?;
        let engine = Engine::connect(&socket(folder.path()), prompt)?;
        costs[2].1.push(engine.cost(|| engine.load(&ids, prompt.chunks))?);
        drop((engine, node));
        ceilings.add(&folder.path().join("log"))?;
    }
    let mut results = Results::new("node");
    for (name, costs) in &costs {
        let row = |what: &str, unit, of: fn(&Cost) -> f64| {
            let runs: Vec<f64> = costs.iter().map(of).collect();
            Row::of_runs(format!("node.{name}.{}.{what}", short(args.tokens)), unit, &runs)
        };
        let time = row("ms", "ms", |cost| cost.ms).with_ceiling(ceilings.ms_of(name));
        results.rows.push(time);
        results.rows.push(row("cpu_ms", "ms", |cost| cost.cpu_ms));
        results.rows.push(row("messages", "", |cost| cost.messages));
    }
    finish(&results, &args.output)
}

/// 128k for 131,072.
fn short(tokens: u32) -> String {
    if tokens.is_multiple_of(1 << 10) { format!("{}k", tokens >> 10) } else { tokens.to_string() }
}

/// What the machine does at best, run by run.
struct Ceilings {
    prompt: Prompt,
    buffers: Buffers,
    copy_ms: Vec<f64>,
    disk_ms: Vec<f64>,
}

impl Ceilings {
    fn new(prompt: Prompt) -> Result<Ceilings, Error> {
        // A page behind each chunk says what is in it.
        let bytes = prompt.chunk_bytes() + u64::from(PAGE_BYTES);
        let objects = Objects { bytes, depth: 32, slots: prompt.chunks };
        Ok(Ceilings { prompt, buffers: Buffers::new(objects)?, copy_ms: Vec::new(), disk_ms: Vec::new() })
    }

    /// Measures both. Nobody uses the log meanwhile.
    fn add(&mut self, log: &Path) -> CommandResult {
        let from = vec![1_u8; self.prompt.bytes() as usize];
        let mut to = vec![0_u8; from.len()];
        let copied = cost(|| {
            to.copy_from_slice(std::hint::black_box(&from));
            Ok(())
        })?;
        self.copy_ms.push(copied.wall_s * 1e3);
        std::hint::black_box(to);
        let place = |chunk| At { file: 0, offset: chunk * self.buffers.objects.bytes };
        let places: Vec<At> = (0..self.prompt.chunks as u64).map(place).collect();
        let mut raw = Raw::open(&[log], &self.buffers)?;
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
fn start(folder: &Path, prompt: Prompt) -> Result<Node, Error> {
    let memory_bytes = (3 * prompt.bytes()).max(MEMORY_CHUNKS_MIN * prompt.chunk_bytes());
    let mut config = NodeConfig::new(socket(folder), memory_bytes);
    config.memory.chunk_size = prompt.chunk_bytes();
    config.write_back = WriteBackPolicy::All;
    let (path, size) = (folder.join("log"), 8 * memory_bytes);
    config.ssd = vec![SsdConfig { path, size, segment_size: 0, create: true }];
    Ok(Node::start(&config)?)
}

/// A client, and memory for the KV of a prompt.
struct Engine {
    client: Client,
    prompt: Prompt,
    region: RegionId,
    mover: MoverThread,
}

impl Drop for Engine {
    fn drop(&mut self) {
        self.client.close();
    }
}

impl Engine {
    fn connect(socket: &Path, prompt: Prompt) -> Result<Engine, Error> {
        let mover = MoverThread::spawn(Limits::default())?;
        let handle: MoverHandle = mover.handle();
        let link = handle.add_link(LinkSpec::new("host", 4, 64 << 20), Box::new(HostLink::new(1)?))?;
        handle.add_path(PathSpec::direct(HOST, HOST, link))??;
        let memory = Arc::new(HostBuffer::new(prompt.bytes() as usize));
        let truth: Vec<u8> =
            (0..memory.len()).map(|at| (at as u32).wrapping_mul(2_654_435_761).to_le_bytes()[3]).collect();
        memory.write(0, &truth);
        let region = handle.register(HOST, memory)?;
        let client = Client::connect(&handle, HOST, ClientOptions::new(socket))?;
        Ok(Engine { client, prompt, region, mover })
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
        let Prompt { layer_bytes, .. } = self.prompt;
        let start = chunk as u64 * self.prompt.chunk_bytes();
        let layer = |layer| vec![Span::new(self.region, start + layer * layer_bytes, layer_bytes)];
        (0..LAYERS).map(layer).collect()
    }

    fn store(&self, ids: &[ChunkId]) -> CommandResult {
        let shape = ChunkShape::new((0..LAYERS).map(|_| self.prompt.layer_bytes))?;
        let (sender, events) = channel();
        let (mut begun, mut stored) = (0, 0);
        while stored < self.prompt.chunks {
            while let Some(asked) = self.prompt.next(begun, stored) {
                let (first, told) = (asked.start, sender.clone());
                let on_end =
                    move |chunk, reserved| drop(told.send((first + chunk, Event::Reserved(reserved))));
                let parent = |chunk: usize| chunk.checked_sub(1).map(|before| ids[before]);
                let new = |chunk| NewChunk { id: ids[chunk], parent: parent(chunk) };
                begun = asked.end;
                let asked: Vec<NewChunk> = asked.map(new).collect();
                self.client.reserve(&shape, &asked, on_end);
            }
            let (chunk, event) = events.recv_timeout(LIMIT)?;
            match event {
                Event::Reserved(Reserved::Slot(slot)) => self.fill(chunk, slot, &sender)?,
                Event::Copied(slot, End::Done { bytes }) if bytes == self.prompt.chunk_bytes() => {
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
        let bytes = self.prompt.chunk_bytes();
        let from = Span::new(self.region, chunk as u64 * bytes, bytes);
        let transfer = Transfer::new(vec![SpanPair::new(from, slot.span())], Class::WriteBack);
        let told = sender.clone();
        let on_end = move |end| drop(told.send((chunk, Event::Copied(slot, end))));
        Ok(self.mover.handle().submit(transfer, on_end).map(drop)?)
    }

    /// Loads a prompt, of which so many chunks are on SSD.
    fn load(&self, ids: &[ChunkId], on_disk: usize) -> CommandResult {
        let lease = self.client.lease(ids, TTL_US);
        if (lease.len(), lease.on_disk()) != (self.prompt.chunks, on_disk) {
            return Err(format!("a lease of {} chunks, {} on disk", lease.len(), lease.on_disk()).into());
        }
        let (sender, events) = channel();
        let (mut begun, mut loaded) = (0, 0);
        while loaded < self.prompt.chunks {
            while let Some(asked) = self.prompt.next(begun, loaded) {
                let told = sender.clone();
                let on_end = move |chunk, brought: Result<LeasedChunk, String>| {
                    drop(told.send((chunk, Came::Brought(brought.map(drop)))));
                };
                begun = asked.end;
                let asked: Vec<usize> = asked.collect();
                self.client.bring(&lease, &asked, Class::Demand, None, on_end);
            }
            let (chunk, came) = events.recv_timeout(LIMIT)?;
            match came {
                Came::Brought(Ok(())) => {
                    let told = sender.clone();
                    let on_end = move |end| drop(told.send((chunk, Came::Loaded(end))));
                    let layers = self.layers(chunk);
                    self.client.load_chunk(&lease, chunk, &layers, Class::Demand, None, on_end)?;
                }
                Came::Loaded(End::Done { bytes }) if bytes == self.prompt.chunk_bytes() => loaded += 1,
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
