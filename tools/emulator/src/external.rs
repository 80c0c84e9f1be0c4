//! The engine's side of the store: chunks are fetched into blocks, checked, and handed over when
//! their model time has passed; computed chunks are copied away. This file is glue; what is fetched
//! and stored when is the scheduler's choice.
//!
//! A fetched chunk counts only if every byte of it is right. The first one that is not, for
//! whatever reason, ends the fetched prefix: it and all behind it are computed. A load's blocks
//! belong to the mover until every transfer of it has ended, and so do a store's.

use crate::clock::ModelClock;
use crate::device::DeviceMemory;
use crate::job::{LoadId, Loaded, Message, Stored};
use crate::load_policy::{LoadPolicy, Measured};
use crate::scheduler::{BlockId, ChunkStore, Load, RequestId, Residence};
use crate::stats::StoreStats;
use crate::truth::KvShape;
use forebay_kv::ChunkId;
use forebay_store::StoreEnd;
use forebay_store::chunk_store::{self, ChunkLease, Miss, NotTaken};
use forebay_transfer::{Class, Closed, End, MoverHandle, Place, Reason, RegionId, Span, TraceContext};
use std::collections::HashMap;
use std::sync::{Arc, mpsc};
use std::time::Instant;

/// How long chunks are leased for a load; a load that takes longer is a miss. The store may allow
/// less.
const LEASE_US: u64 = 30_000_000;

/// How an engine reaches a store.
#[derive(Clone, Debug)]
pub struct StoreConnection {
    pub store: Arc<dyn chunk_store::ChunkStore>,
    /// What moves the bytes between the two. There must be routes between the store's place and
    /// `device`, both ways, and it must outlive the engine.
    pub mover: MoverHandle,
    /// Where the engine's device memory is to be registered.
    pub device: Place,
}

/// What came of a load: the first of its chunks, as many as are `good`, may be used.
#[derive(Debug)]
pub struct Fetched {
    /// For whom it was.
    pub request: RequestId,
    /// Chunks of which every byte was checked.
    pub good: Residence,
    /// Blocks that a lost transfer may still write.
    pub withdrawn: Vec<BlockId>,
}

/// A load that the scheduler waits for.
#[derive(Debug)]
struct Active {
    load: Load,
    /// When the real bytes would have been on the GPU.
    due: Instant,
    state: State,
}

#[derive(Debug)]
enum State {
    /// `ends` has one for each chunk that was submitted, in order; `None` while it is under way.
    Moving { lease: Box<dyn ChunkLease>, ends: Vec<Option<End>>, measured: Measured },
    /// Everything has ended, and what arrived was checked.
    Checked(Fetched),
}

impl State {
    fn has_ended(&self) -> bool {
        match self {
            State::Moving { ends, .. } => ends.iter().all(Option::is_some),
            State::Checked(_) => true,
        }
    }
}

/// The connection at work.
#[derive(Debug)]
pub struct External {
    connection: StoreConnection,
    device: DeviceMemory,
    region: RegionId,
    shape: KvShape,
    chunk_blocks: usize,
    inbox: mpsc::Sender<Message>,
    policy: LoadPolicy,
    loads: HashMap<LoadId, Active>,
    next_load: LoadId,
    /// When the engine's host link has carried all bytes of the loads so far.
    link_free: Option<Instant>,
    /// Chunks on their way to the store.
    storing: usize,
    /// Bytes of a chunk in one layer.
    layer: Vec<u8>,
    stats: StoreStats,
}

impl External {
    /// Registers the device with the store's mover.
    pub fn connect(
        connection: StoreConnection,
        device: DeviceMemory,
        shape: KvShape,
        chunk_tokens: usize,
        inbox: mpsc::Sender<Message>,
        policy: LoadPolicy,
    ) -> Result<External, Closed> {
        let region = connection.mover.register(connection.device, device.buffer())?;
        let chunk_blocks = chunk_tokens / shape.block_tokens();
        Ok(External {
            connection,
            device,
            region,
            shape,
            chunk_blocks,
            inbox,
            policy,
            loads: HashMap::new(),
            next_load: 0,
            link_free: None,
            storing: 0,
            layer: vec![0; chunk_blocks * shape.extent_bytes()],
            stats: StoreStats::default(),
        })
    }

    /// Takes the device out of the mover again. Call it when everything is quiet.
    pub fn disconnect(self) {
        // While a lost operation uses it, or where the mover has ended, the memory stays as it is.
        let _ = self.connection.mover.unregister(self.region);
    }

    /// How many of `ids` the store holds, from the first on.
    pub fn longest_stored(&self, ids: &[ChunkId]) -> usize {
        self.connection.store.lookup(ids)
    }

    /// Tells the store which chunks a request uses, wherever they are or if they have to be
    /// computed.
    pub fn used(&self, ids: &[ChunkId]) {
        self.connection.store.used(ids, self.chunk_bytes());
    }

    /// Starts a load of what is worth loading while so many other requests compute. Its end comes
    /// out of [`External::take_due`]. `trace`: what the store is told that it is part of.
    pub fn load(&mut self, load: Load, trace: Option<TraceContext>, clock: &ModelClock, others: usize) {
        let traced = trace.and_then(|trace| self.connection.store.within(trace));
        let store = traced.as_deref().unwrap_or(&*self.connection.store);
        let lease = store.lease(&load.ids, LEASE_US);
        let wanted = load.first_chunk..load.ids.len();
        let held = lease.residence().of(wanted.clone());
        let leased = held.chunks();
        let now = Instant::now();
        let (chunk_us, link_free) = (self.policy.chunk_link_us(), self.link_free.unwrap_or(now).max(now));
        let due_with = |chunks: usize| match chunks {
            0 => now,
            _ => link_free + clock.real(chunk_us * chunks as f64),
        };
        let wait = due_with(held.memory).duration_since(now);
        let taken = self.policy.chunks_to_load(load.tokens, load.first_chunk, held, wait, others).min(leased);
        let due = due_with(taken);
        self.link_free = self.link_free.max(Some(due));
        let deadline_us =
            self.connection.mover.now_us() + due.saturating_duration_since(now).as_micros() as u64;

        let id = self.next_load;
        self.next_load += 1;
        let ends = self.submit(id, &load, lease.as_ref(), taken, deadline_us);
        let asked = lease.residence().of(load.first_chunk..load.first_chunk + ends.len());
        let measured = self.policy.began(asked, now);
        self.count(Miss::Missing, wanted.len() - leased);
        self.stats.gate_loaded_chunks += taken.saturating_sub(held.memory) as u64;
        self.stats.gate_recomputed_chunks += (leased - taken) as u64;
        self.loads.insert(id, Active { load, due, state: State::Moving { lease, ends, measured } });
        self.check_ended(id);
    }

    /// Has the first `taken` chunks of a load moved. Gives a place for the end of each that is
    /// under way.
    fn submit(
        &mut self,
        id: LoadId,
        load: &Load,
        lease: &dyn ChunkLease,
        taken: usize,
        deadline_us: u64,
    ) -> Vec<Option<End>> {
        let mut ends = Vec::with_capacity(taken);
        for (chunk, blocks) in load.blocks.chunks(self.chunk_blocks).take(taken).enumerate() {
            let inbox = self.inbox.clone();
            // An engine that has ended does not care.
            let on_end = move |end| {
                let loaded = Loaded { load: id, chunk, end, at: Instant::now() };
                drop(inbox.send(Message::Loaded(loaded)));
            };
            let targets = self.layers(blocks);
            let place = load.first_chunk + chunk;
            match lease.load_chunk(place, &targets, Class::Demand, Some(deadline_us), Box::new(on_end)) {
                Ok(()) => ends.push(None),
                Err(miss) => {
                    // What is behind it would be of no use.
                    self.count(miss, 1);
                    break;
                }
            }
        }
        ends
    }

    /// Takes in that a chunk has arrived or failed.
    pub fn loaded(&mut self, loaded: Loaded) {
        if let Some(Active { state: State::Moving { ends, measured, .. }, .. }) =
            self.loads.get_mut(&loaded.load)
            && let Some(end) = ends.get_mut(loaded.chunk)
        {
            if matches!(loaded.end, End::Done { .. }) {
                measured.arrived(loaded.chunk, loaded.at);
            }
            *end = Some(loaded.end);
            self.check_ended(loaded.load);
        }
    }

    /// Checks what a load brought once all of it has ended. That may be before it is due, and then
    /// costs no model time.
    fn check_ended(&mut self, id: LoadId) {
        let Some(mut active) = self.loads.remove(&id) else { return };
        if let State::Moving { lease, ends, measured } = &active.state
            && active.state.has_ended()
        {
            self.policy.ended(measured);
            let first = active.load.first_chunk;
            let good_chunks = self.good_chunks(&active.load, lease.as_ref(), ends);
            let good = lease.residence().of(first..first + good_chunks);
            self.stats.disk_chunks += good.disk as u64;
            self.stats.peer_chunks += good.peers as u64;
            let withdrawn = self.touched_blocks(&active.load, ends);
            let fetched = Fetched { request: active.load.request, good, withdrawn };
            active.state = State::Checked(fetched);
        }
        self.loads.insert(id, active);
    }

    /// How many chunks of a load, from the first on, arrived with every byte right.
    fn good_chunks(&mut self, load: &Load, lease: &dyn ChunkLease, ends: &[Option<End>]) -> usize {
        let mut good = 0;
        for (blocks, end) in load.blocks.chunks(self.chunk_blocks).zip(ends) {
            let arrived = match end {
                Some(End::Done { .. }) => self.verify(lease, load.first_chunk + good, blocks),
                Some(End::Failed(failure)) if matches!(failure.reason, Reason::Corrupt { .. }) => {
                    Err(Miss::Corrupt)
                }
                _ => Err(Miss::Unmoved),
            };
            if let Err(miss) = arrived {
                self.count(miss, 1);
                break;
            }
            good += 1;
        }
        self.stats.loaded_chunks += good as u64;
        self.stats.unused_chunks += ends.len().saturating_sub(good + 1) as u64;
        good
    }

    /// Checks every layer of a chunk as it lies in the device.
    fn verify(&mut self, lease: &dyn ChunkLease, chunk: usize, blocks: &[BlockId]) -> Result<(), Miss> {
        for layer in 0..self.shape.layers() {
            let extents = self.layer.chunks_exact_mut(self.shape.extent_bytes());
            extents.zip(blocks).for_each(|(extent, block)| self.device.read(layer, *block, extent));
            lease.verify(chunk, layer, &self.layer)?;
        }
        Ok(())
    }

    /// Counts chunks that were found and cannot be used. Whatever a store that is gone did not do,
    /// it did not do because of that; wrong bytes are another matter.
    fn count(&mut self, miss: Miss, chunks: usize) {
        let miss = match miss {
            Miss::Corrupt => Miss::Corrupt,
            _ if !self.connection.store.is_reachable() => Miss::NodeGone,
            other => other,
        };
        let stats = &mut self.stats;
        let counter = match miss {
            Miss::NodeGone => &mut stats.node_gone_chunks,
            Miss::DeadLease => &mut stats.dead_lease_chunks,
            Miss::Missing => &mut stats.missing_chunks,
            Miss::Corrupt => &mut stats.corrupt_chunks,
            Miss::Unmoved => &mut stats.unmoved_chunks,
        };
        *counter += chunks as u64;
    }

    /// So many tokens of a prompt have been computed. What could not be asked for is worth to be
    /// known.
    pub fn computed(&mut self, tokens: usize) {
        if !self.connection.store.is_reachable() {
            self.stats.unasked_chunks += (tokens / self.chunk_tokens()) as u64;
        }
    }

    /// Blocks of chunks of which a lost operation may still write some part.
    fn touched_blocks(&self, load: &Load, ends: &[Option<End>]) -> Vec<BlockId> {
        let chunks = load.blocks.chunks(self.chunk_blocks).zip(ends);
        let touched = chunks.filter(|(_, end)| end.as_ref().is_some_and(|end| !is_quiet(end)));
        touched.flat_map(|(blocks, _)| blocks).copied().collect()
    }

    /// Loads that have been checked and whose time has passed, the first one first.
    pub fn take_due(&mut self, now: Instant) -> Vec<Fetched> {
        let is_due = |active: &Active| matches!(active.state, State::Checked(_)) && active.due <= now;
        let mut due: Vec<(LoadId, Active)> = self.loads.extract_if(|_, active| is_due(active)).collect();
        due.sort_by_key(|(id, _)| *id);
        let fetched = due.into_iter().map(|(_, active)| active.state);
        fetched
            .filter_map(|state| if let State::Checked(fetched) = state { Some(fetched) } else { None })
            .collect()
    }

    /// When the next load that has been checked is due.
    pub fn next_due(&self) -> Option<Instant> {
        let checked = self.loads.values().filter(|active| matches!(active.state, State::Checked(_)));
        checked.map(|active| active.due).min()
    }

    /// Copies a chunk to the store; its end comes as [`Message::Stored`]. Gives its blocks back if
    /// the store does not take it.
    pub fn store(&mut self, chunk: ChunkStore) -> Option<Vec<BlockId>> {
        let ChunkStore { id, parent, blocks } = chunk;
        let (inbox, held) = (self.inbox.clone(), blocks.clone());
        let on_end = move |end: StoreEnd| {
            let there = matches!(end, StoreEnd::Stored { .. } | StoreEnd::AlreadyHere);
            let quiet = !matches!(&end, StoreEnd::Failed(end) if !is_quiet(end));
            // An engine that has ended does not care.
            let _ = inbox.send(Message::Stored(Stored { blocks: held, quiet, there }));
        };
        let layers = self.layers(&blocks);
        let store = &self.connection.store;
        match store.store_chunk(id, parent, &layers, Class::WriteBack, Box::new(on_end)) {
            Ok(()) => {
                self.storing += 1;
                None
            }
            Err(NotTaken) => {
                self.stats.refused_chunks += 1;
                Some(blocks)
            }
        }
    }

    /// Takes in that a chunk has been stored or not.
    pub fn stored(&mut self, stored: &Stored) {
        self.storing -= 1;
        match stored.there {
            true => self.stats.stored_chunks += 1,
            false => self.stats.refused_chunks += 1,
        }
    }

    /// Whether nothing is under way.
    pub fn is_quiet(&self) -> bool {
        self.storing == 0 && self.loads.values().all(|active| active.state.has_ended())
    }

    /// What came of all chunks so far.
    pub fn stats(&self) -> StoreStats {
        self.stats
    }

    fn chunk_tokens(&self) -> usize {
        self.chunk_blocks * self.shape.block_tokens()
    }

    fn chunk_bytes(&self) -> u64 {
        (self.layer.len() * self.shape.layers()) as u64
    }

    /// Where blocks lie in the device, layer by layer.
    fn layers(&self, blocks: &[BlockId]) -> Vec<Vec<Span>> {
        (0..self.shape.layers()).map(|layer| self.device.spans(self.region, layer, blocks)).collect()
    }
}

/// Whether nothing of an ended transfer can touch its spans any more.
fn is_quiet(end: &End) -> bool {
    match end {
        End::Done { .. } => true,
        End::Failed(failure) => failure.quarantined.is_empty(),
        End::Cancelled { quarantined, .. } => quarantined.is_empty(),
    }
}
