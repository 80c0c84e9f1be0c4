//! `forebay bench layers`: how soon an engine can begin with a prompt whose KV is on SSD: when the
//! first layer of all its chunks is there, if chunks come layer by layer through the client's ring,
//! and when all of it is, if they come chunk by chunk. And what a request through the ring takes
//! where all is in memory. A real node and its client run in this process. The ceilings are bare
//! reads of as many bytes.

use crate::disk::memory::{At, Buffers, Direction, Objects};
use crate::disk::raw::Raw;
use crate::output::{CommandResult, Error, Outcome, Output, finish};
use crate::timing::cost;
use forebay_client::{Client, ClientOptions, LayerCame, Lease};
use forebay_kv::{ChunkId, NamespaceKey};
use forebay_node::{Node, NodeConfig, SsdConfig, WriteBackPolicy};
use forebay_results::{Results, Row};
use forebay_store::{ChunkShape, StoreEnd};
use forebay_transfer::{
    Class, HostBuffer, HostLink, Limits, LinkSpec, MoverHandle, MoverThread, PathSpec, Place, RegionId, Span,
};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

/// A prompt of 4k tokens of a model of 8B: 64 chunks of 64 tokens, 32 layers of 256 KiB each.
const CHUNKS: usize = 64;
const LAYERS: u64 = 32;
const LAYER_BYTES: u64 = 256 << 10;
const CHUNK_BYTES: u64 = LAYERS * LAYER_BYTES;
const PROMPT_BYTES: u64 = CHUNKS as u64 * CHUNK_BYTES;
/// What the store reads at a time of a chunk, behind its first layer.
const RUN_BYTES: u64 = 2 * LAYER_BYTES;
/// Chunks that are brought by one message, as an engine does it.
const TOGETHER: usize = 16;
const TTL_US: u64 = 60_000_000;
const LIMIT: Duration = Duration::from_secs(120);
const HOST: Place = Place::Host(0);
/// Requests whose time is taken one by one.
const ROUND_TRIPS: usize = 5000;

/// Arguments of `forebay bench layers`.
#[derive(clap::Args)]
pub struct Args {
    /// Directory in which the node's SSD log is made [default: a temporary one]
    #[arg(long)]
    dir: Option<PathBuf>,
    /// Number of runs; each reads the prompt twice
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=100))]
    runs: u32,
    #[command(flatten)]
    output: Output,
}

pub fn run(args: Args) -> CommandResult {
    let folder = match &args.dir {
        Some(dir) => tempfile::tempdir_in(dir)?,
        None => tempfile::tempdir()?,
    };
    let ids = prompt();
    store_all(folder.path(), &ids)?;
    let objects = Objects { bytes: RUN_BYTES, depth: 32, slots: 64 };
    let buffers = Buffers::new(objects)?;
    let mut times: [Vec<f64>; 5] = std::array::from_fn(|_| Vec::new());
    for _ in 0..args.runs {
        let (first, all) = on_disk_alone(folder.path(), |engine| engine.by_layers(&ids))?;
        let (_, by_chunk) = on_disk_alone(folder.path(), |engine| engine.by_chunk(&ids))?;
        let mut raw = Raw::open(&[&folder.path().join("log")], &buffers)?;
        let ms_of = |bytes: u64, raw: &mut Raw| -> Outcome<f64> {
            let places: Vec<At> =
                (0..bytes / RUN_BYTES).map(|place| At { file: 0, offset: place * RUN_BYTES }).collect();
            Ok(cost(|| raw.run(Direction::Read, &places))?.wall_s * 1e3)
        };
        let raw_first = ms_of(CHUNKS as u64 * LAYER_BYTES, &mut raw)?;
        let raw_all = ms_of(PROMPT_BYTES, &mut raw)?;
        times.iter_mut().zip([first, all, by_chunk, raw_first, raw_all]).for_each(|(runs, ms)| runs.push(ms));
    }
    let mut results = Results::new("layers");
    let [first, all, by_chunk, raw_first, raw_all] = &times;
    let row = |name: &str, runs: &[f64], ceiling: &[f64]| {
        Row::of_runs(format!("layers.ssd.4k.{name}"), "ms", runs).with_ceiling(median(ceiling))
    };
    results.rows.push(row("first_layer_ms", first, raw_first));
    results.rows.push(row("last_layer_ms", all, raw_all));
    results.rows.push(row("by_chunk_ms", by_chunk, raw_all));
    results.rows.extend(round_trips(folder.path(), &ids, args.runs)?);
    finish(&results, &args.output)
}

/// Has the node keep all of the prompt on SSD. A busy disk is given up by a node that has waited
/// too long for it, and gets the rest the next time.
fn store_all(folder: &Path, ids: &[ChunkId]) -> CommandResult {
    for _ in 0..5 {
        let node = start(folder)?;
        let engine = Engine::connect(folder)?;
        let is_there = engine.client.lookup(ids) == CHUNKS;
        if !is_there {
            engine.store(ids)?;
        }
        drop(engine);
        node.drain(LIMIT)?;
        if is_there {
            return Ok(());
        }
    }
    Err("the disk does not take the prompt".into())
}

fn median(runs: &[f64]) -> f64 {
    let mut sorted = runs.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted[sorted.len() / 2]
}

/// What requests for one layer of one chunk take, and of all chunks.
fn round_trips(folder: &Path, ids: &[ChunkId], runs: u32) -> Outcome<Vec<Row>> {
    let node = start(folder)?;
    let engine = Engine::connect(folder)?;
    engine.by_chunk(ids)?;
    let rows = time_round_trips(&engine, ids, runs);
    drop(engine);
    node.drain(LIMIT)?;
    let rows = rows?;
    let names = ["1.p50_us", "1.p99_us", "64.p50_us", "64.p99_us"];
    let row = |(name, runs): (&str, &Vec<f64>)| Row::of_runs(format!("layers.ring.{name}"), "us", runs);
    Ok(names.into_iter().zip(&rows).map(row).collect())
}

/// Of each run the medians and 99th percentiles, in microseconds: of one chunk, then of all.
fn time_round_trips(engine: &Engine, ids: &[ChunkId], runs: u32) -> Outcome<[Vec<f64>; 4]> {
    let (ring, lease) = (engine.client.ring()?, engine.lease(ids)?);
    let all: Vec<usize> = (0..CHUNKS).collect();
    let request = |chunks: &[usize]| -> CommandResult {
        let (sender, ended) = channel();
        ring.read(&lease, 0, chunks, (Class::Demand, None), move |read| drop(sender.send(read)))?;
        let read = ended.recv_timeout(LIMIT)?;
        if read.places.iter().any(Result::is_err) { Err("a layer is not there".into()) } else { Ok(()) }
    };
    let mut rows: [Vec<f64>; 4] = std::array::from_fn(|_| Vec::new());
    for _ in 0..runs {
        for (chunks, at) in [(&all[..1], 0), (&all[..], 2)] {
            let mut us = Vec::with_capacity(ROUND_TRIPS);
            for _ in 0..ROUND_TRIPS {
                let begun = Instant::now();
                request(chunks)?;
                us.push(begun.elapsed().as_secs_f64() * 1e6);
            }
            us.sort_by(f64::total_cmp);
            rows[at].push(us[us.len() / 2]);
            rows[at + 1].push(us[us.len() * 99 / 100]);
        }
    }
    Ok(rows)
}

/// What an engine does with a node that has all on SSD and nothing in memory.
fn on_disk_alone<T>(folder: &Path, act: impl FnOnce(&Engine) -> Outcome<T>) -> Outcome<T> {
    let node = start(folder)?;
    let engine = Engine::connect(folder)?;
    let outcome = act(&engine);
    drop(engine);
    node.drain(LIMIT)?;
    outcome
}

fn start(folder: &Path) -> Result<Node, Error> {
    let mut config = NodeConfig::new(folder.join("node.sock"), 2 * PROMPT_BYTES);
    config.memory.chunk_size = CHUNK_BYTES;
    config.write_back = WriteBackPolicy::All;
    let path = folder.join("log");
    // Segments have room for few chunks of this size, and some stay free.
    config.ssd = vec![SsdConfig { path, size: 4 * PROMPT_BYTES, segment_size: 0, create: true }];
    Ok(Node::start(&config)?)
}

fn prompt() -> Vec<ChunkId> {
    let namespace = NamespaceKey::from_bytes([1; 32]);
    let first = ChunkId::derive(&namespace, None, &[1]);
    let next = |parent: &ChunkId| Some(ChunkId::derive(&namespace, Some(parent), &[1]));
    std::iter::successors(Some(first), next).take(CHUNKS).collect()
}

/// A client, and memory for the KV of one chunk.
struct Engine {
    client: Client,
    region: RegionId,
    _mover: MoverThread,
}

impl Drop for Engine {
    fn drop(&mut self) {
        self.client.close();
    }
}

impl Engine {
    fn connect(folder: &Path) -> Result<Engine, Error> {
        let mover = MoverThread::spawn(Limits::default())?;
        let handle: MoverHandle = mover.handle();
        let link = handle.add_link(LinkSpec::new("host", 4, 64 << 20), Box::new(HostLink::new(1)?))?;
        handle.add_path(PathSpec::direct(HOST, HOST, link))??;
        let memory = Arc::new(HostBuffer::new(CHUNK_BYTES as usize));
        let truth: Vec<u8> =
            (0..CHUNK_BYTES).map(|at| (at as u32).wrapping_mul(2_654_435_761).to_le_bytes()[3]).collect();
        memory.write(0, &truth);
        let region = handle.register(HOST, memory)?;
        let client = Client::connect(&handle, HOST, ClientOptions::new(folder.join("node.sock")))?;
        Ok(Engine { client, region, _mover: mover })
    }

    fn store(&self, ids: &[ChunkId]) -> CommandResult {
        let layer = |layer| vec![Span::new(self.region, layer * LAYER_BYTES, LAYER_BYTES)];
        let layers: Vec<Vec<Span>> = (0..LAYERS).map(layer).collect();
        for (number, id) in ids.iter().enumerate() {
            let (sender, stored) = channel();
            let parent = number.checked_sub(1).map(|before| ids[before]);
            let on_end = move |end| drop(sender.send(end));
            self.client.store_chunk(*id, parent, &layers, Class::WriteBack, on_end)?;
            match stored.recv_timeout(LIMIT)? {
                StoreEnd::Stored { .. } => {}
                other => return Err(format!("chunk {number} was not stored: {other:?}").into()),
            }
        }
        Ok(())
    }

    fn lease(&self, ids: &[ChunkId]) -> Outcome<Arc<Lease>> {
        let lease = self.client.lease(ids, TTL_US);
        if lease.len() == CHUNKS { Ok(Arc::new(lease)) } else { Err("a lease of too few chunks".into()) }
    }

    /// When the first layer of all chunks is there, and when the last one is, in milliseconds.
    fn by_layers(&self, ids: &[ChunkId]) -> Outcome<(f64, f64)> {
        // It is asked for with the first prompt of an engine, and then kept.
        self.client.ring()?;
        let begun = Instant::now();
        let lease = self.lease(ids)?;
        let (sender, layers) = channel();
        let shape = Arc::new(ChunkShape::new((0..LAYERS).map(|_| LAYER_BYTES))?);
        let chunks: Vec<usize> = (0..CHUNKS).collect();
        let on_layer = move |came: LayerCame| drop(sender.send(came));
        if !self.client.bring_layers(&lease, &chunks, &shape, (Class::Demand, None), on_layer) {
            return Err("the node gives no ring".into());
        }
        let (mut first, mut left) = (None, LAYERS);
        while left > 0 {
            let came = layers.recv_timeout(LIMIT)?;
            if let Some((chunk, why)) =
                came.chunks.iter().find_map(|(chunk, end)| Some((chunk, end.as_ref().err()?)))
            {
                return Err(format!("layer {} of chunk {chunk}: {why}", came.layer).into());
            }
            if came.layer == 0 {
                first = Some(begun.elapsed());
            }
            left -= 1;
        }
        let first = first.ok_or("layer 0 has not come")?;
        Ok((first.as_secs_f64() * 1e3, begun.elapsed().as_secs_f64() * 1e3))
    }

    /// When the first chunk is there, and when the last one is.
    fn by_chunk(&self, ids: &[ChunkId]) -> Outcome<(f64, f64)> {
        let begun = Instant::now();
        let lease = self.lease(ids)?;
        let (sender, brought) = channel();
        for first in (0..CHUNKS).step_by(TOGETHER) {
            let (chunks, told): (Vec<usize>, _) = ((first..first + TOGETHER).collect(), sender.clone());
            let on_end = move |_, end: Result<_, String>| drop(told.send(end.map(drop)));
            self.client.bring(&lease, &chunks, Class::Demand, None, on_end);
        }
        let mut first = None;
        for _ in 0..CHUNKS {
            brought.recv_timeout(LIMIT)??;
            first.get_or_insert_with(|| begun.elapsed());
        }
        let ms = |time: Duration| time.as_secs_f64() * 1e3;
        Ok((first.map_or(0.0, ms), ms(begun.elapsed())))
    }
}
