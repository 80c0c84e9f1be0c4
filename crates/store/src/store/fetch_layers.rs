//! Fetching layer by layer: chunks of a lease come from the disk into the arena in runs of layers,
//! so that the first layers of all chunks can be used before the last ones have been read. When all
//! runs of a chunk are there it is in memory, for everybody.
//!
//! Whoever is told of a layer holds a [`LayerGuard`], under which the bytes stay where they are. A
//! chunk of which nobody wants the rest is given up with the last guard.

use super::fetch::{NotFetched, READ_BYTES, ReadGuard};
use super::load::Urgency;
use super::promote::{NotPromoted, Promotion};
use super::reserve::ChunkName;
use super::{Lease, Store, StoreInner};
use crate::checksum;
use crate::log::SlotShape;
use crate::ssd::{DiskLease, LayerRead, NotRead, NotStaged, ReadResults, Staged};
use forebay_kv::ChunkId;
use forebay_transfer::lock::Mutex;
use forebay_transfer::{Class, Span};
use std::collections::HashMap;
use std::ops::Range;
use std::sync::{Arc, Weak};

/// Layers are read together until they are at least so long. Where we measured it, a read of 80 KiB
/// took 2.4 times the CPU per byte of one of 1 MiB.
const RUN_BYTES: u64 = 512 << 10;
/// The first ones are read as soon as they have so much: nothing is computed before they are there.
const FIRST_RUN_BYTES: u64 = 128 << 10;

/// A layer that lies still in the arena until this is dropped.
#[derive(Debug, Clone)]
pub struct LayerGuard(Held);

#[derive(Debug, Clone)]
enum Held {
    /// All of its chunk is in memory.
    Whole(Arc<ReadGuard>),
    /// It has been read, and others of its chunk may not have been.
    Part(Arc<PartialChunk>),
}

/// Chunks of which runs are being read.
#[derive(Debug, Default)]
pub(super) struct PartialChunks(Mutex<HashMap<ChunkId, Weak<PartialChunk>>>);

type OnLayer = Box<dyn FnOnce(Result<LayerGuard, NotFetched>) + Send>;

/// A chunk that comes run by run.
struct PartialChunk {
    shared: Arc<StoreInner>,
    name: ChunkName,
    shape: Arc<SlotShape>,
    /// Its slot of the arena.
    slot: Span,
    runs: Vec<Range<usize>>,
    state: Mutex<State>,
}

struct State {
    /// Until all runs are there, or one of them is not to be had.
    promotion: Option<Promotion>,
    /// When they are.
    whole: Option<ReadGuard>,
    failed: Option<NotFetched>,
    runs: Vec<Run>,
    checksums: Vec<u32>,
    /// Of reads that were lost.
    quarantined: Vec<Span>,
}

/// What is known of a run, and who waits for it.
enum Run {
    Absent,
    Reading(Vec<OnLayer>),
    There,
}

/// A run that is being read. Dropped before it was, it is not there.
struct RunRead {
    chunk: Arc<PartialChunk>,
    run: usize,
    outcome: Result<(), NotFetched>,
}

impl Store {
    /// Has a layer of chunks of the lease lie in the arena, wherever they are, verified as
    /// [`Check`](crate::ssd::Check) says. What comes
    /// from the disk comes with the layers right behind it, if they are short. `deadline_us` is in
    /// the mover's clock; who wants what another one has read shares the fate of that read.
    ///
    /// `on_end` is called exactly once for each chunk, on a thread of the store or the mover, or on
    /// this one: keep it short, and do not wait for either in it. Keep the lease until then.
    pub fn fetch_layer(
        &self,
        lease: &Lease,
        layer: usize,
        chunks: impl IntoIterator<Item = usize>,
        (class, deadline_us): (Class, Option<u64>),
        on_end: impl Fn(usize, Result<LayerGuard, NotFetched>) + Send + Sync + 'static,
    ) {
        let on_end = Arc::new(on_end);
        let mut reads = Vec::new();
        for chunk in chunks {
            let told = Arc::clone(&on_end);
            let on_layer: OnLayer = Box::new(move |layer| told(chunk, layer));
            match self.read_guard(lease, chunk) {
                Ok(guard) => on_layer(Ok(LayerGuard::whole(guard))),
                Err(_) => match self.shared.partial(lease, chunk) {
                    Some((place, partial)) => {
                        reads.extend(partial.want(layer, on_layer).map(|read| (place, read)));
                    }
                    None => self.fetch(lease, chunk, class, deadline_us, move |guard| {
                        on_layer(guard.map(LayerGuard::whole));
                    }),
                },
            }
        }
        if let Some((part, _)) = lease.on_disk(usize::MAX) {
            self.shared.read_runs(reads, &part.lease, Urgency { class, deadline_us });
        }
    }
}

impl StoreInner {
    /// The chunk of a lease that comes run by run, and its place on the disk. `None`: it has to
    /// come as a whole, or is in memory, or not to be had.
    fn partial(self: &Arc<Self>, lease: &Lease, chunk: usize) -> Option<(usize, Arc<PartialChunk>)> {
        let (part, place) = lease.on_disk(chunk)?;
        let (id, parent) = part.name(place)?;
        let mut table = self.partial.0.lock();
        if let Some(partial) = table.get(&id).and_then(Weak::upgrade) {
            // The last one to let go of it takes the lock.
            drop(table);
            return (partial.name.tenant == part.tenant).then_some((place, partial));
        }
        let (shape, is_plain) = part.lease.layout_of(place).ok()?;
        let runs = runs_of(&shape).filter(|runs| is_plain && runs.len() > 1)?;
        if self.fetches.has(&id) {
            return None;
        }
        let name = ChunkName { tenant: part.tenant, id, parent };
        let promotion = Promotion::begin(self, name, shape.chunk(), true).ok().flatten()?;
        let partial = Arc::new(PartialChunk::new(self, name, (shape, runs), promotion));
        table.insert(id, Arc::downgrade(&partial));
        Some((place, partial))
    }

    /// Reads runs of chunks, many by one request.
    fn read_runs(self: &Arc<Self>, reads: Vec<(usize, RunRead)>, lease: &DiskLease, urgency: Urgency) {
        let (mut together, mut bytes) = (Vec::new(), 0);
        for (place, read) in reads {
            let want = read.want(place);
            let run_bytes = want.into.map_or(0, |into| into.len);
            if bytes > 0 && bytes + run_bytes > READ_BYTES {
                self.read_together(std::mem::take(&mut together), lease, urgency);
                bytes = 0;
            }
            bytes += run_bytes;
            together.push((want, read));
        }
        self.read_together(together, lease, urgency);
    }

    fn read_together(
        self: &Arc<Self>,
        together: Vec<(LayerRead, RunRead)>,
        lease: &DiskLease,
        urgency: Urgency,
    ) {
        let Some(disk) = self.open_disk().filter(|_| !together.is_empty()) else { return };
        let (wants, reads): (Vec<_>, Vec<_>) = together.into_iter().unzip();
        let reading = self.disk_reading();
        let on_read = move |ends: ReadResults| {
            reading.end(&ends);
            reads.into_iter().zip(ends).for_each(|(read, end)| read.end(end));
        };
        // What the disk refuses drops the reads, which say so.
        let _ = disk.ssd.read(lease, &wants, urgency.class, urgency.deadline_us, on_read);
    }
}

/// Runs of layers that fill pages of their own. `None` if layers do not.
fn runs_of(shape: &SlotShape) -> Option<Vec<Range<usize>>> {
    let (mut runs, mut first, mut bytes) = (Vec::new(), 0, 0);
    for layer in 0..shape.layers() {
        bytes += shape.layer(layer).map_or(0, |place| place.end - place.start);
        let enough = if runs.is_empty() { FIRST_RUN_BYTES } else { RUN_BYTES };
        if bytes >= enough || layer + 1 == shape.layers() {
            runs.push(first..layer + 1);
            (first, bytes) = (layer + 1, 0);
        }
    }
    runs.iter().all(|run| shape.are_alone(run.clone())).then_some(runs)
}

impl PartialChunk {
    fn new(
        shared: &Arc<StoreInner>,
        name: ChunkName,
        (shape, runs): (Arc<SlotShape>, Vec<Range<usize>>),
        promotion: Promotion,
    ) -> PartialChunk {
        let (slot, layers) = (promotion.pages(), shape.layers());
        let state = State {
            promotion: Some(promotion),
            whole: None,
            failed: None,
            runs: runs.iter().map(|_| Run::Absent).collect(),
            checksums: vec![0; layers],
            quarantined: Vec::new(),
        };
        PartialChunk { shared: Arc::clone(shared), name, shape, slot, runs, state: Mutex::new(state) }
    }

    /// Somebody wants a layer. Gives what has to be read for it, unless that is there, or others
    /// have it read.
    fn want(self: &Arc<Self>, layer: usize, on_layer: OnLayer) -> Option<RunRead> {
        let run = self.runs.iter().position(|run| run.contains(&layer)).unwrap_or(0);
        let mut state = self.state.lock();
        let failed = state.failed.clone();
        let told = match (failed, &mut state.runs[run]) {
            (Some(why), _) => Err(why),
            (None, Run::There) => Ok(LayerGuard(Held::Part(Arc::clone(self)))),
            (None, Run::Reading(waiting)) => {
                waiting.push(on_layer);
                return None;
            }
            (None, absent) => {
                *absent = Run::Reading(vec![on_layer]);
                let outcome = Err(NotRead::Closed.into());
                return Some(RunRead { chunk: Arc::clone(self), run, outcome });
            }
        };
        drop(state);
        on_layer(told);
        None
    }

    /// The run has been read, or is not to be had.
    fn ended(self: &Arc<Self>, run: usize, outcome: &Result<(), NotFetched>) {
        let mut state = self.state.lock();
        let read = std::mem::replace(&mut state.runs[run], Run::There);
        if let Err(why) = outcome {
            state.runs[run] = Run::Absent;
            if *why != NotFetched::Disk(NotStaged::Late.into()) {
                state.failed.get_or_insert_with(|| why.clone());
            }
        } else if state.runs.iter().all(|run| matches!(run, Run::There)) {
            self.commit(&mut state);
        }
        drop(state);
        let Run::Reading(waiting) = read else { return };
        for on_layer in waiting {
            on_layer(outcome.clone().map(|()| LayerGuard(Held::Part(Arc::clone(self)))));
        }
    }

    /// As [`ReadGuard::check`], of what is there.
    fn check(&self) -> bool {
        let mut state = self.state.lock();
        if let Some(whole) = &state.whole {
            let intact = whole.check();
            if !intact {
                // Whoever holds a part of it has others find this one.
                state.failed = Some(NotPromoted::Corrupt.into());
            }
            return intact;
        }
        let memory = self.shared.mover.memory();
        let is_intact = |layer: usize| {
            let place = self.shape.layer(layer).unwrap_or(0..0);
            let span = Span::new(self.slot.region, self.slot.offset + place.start, place.end - place.start);
            checksum::of_spans(memory, &[span]) == state.checksums.get(layer).copied()
        };
        let is_there = |(_, run): &(&Range<usize>, &Run)| matches!(run, Run::There);
        let mut there = self.runs.iter().zip(&state.runs).filter(is_there).flat_map(|(run, _)| run.clone());
        let intact = there.all(is_intact);
        if !intact {
            state.failed = Some(NotPromoted::Corrupt.into());
            drop(state);
            self.shared.tier.lock().count_corrupt();
            self.shared.drop_unchecked_copy(Some((self.name.tenant, self.name.id)));
        }
        intact
    }

    /// All of it is there: others find it in memory from now on, and these guards hold it there.
    fn commit(&self, state: &mut State) {
        if state.failed.is_some() {
            // The slot goes back with the last guard.
            return;
        }
        let Some(promotion) = state.promotion.take() else { return };
        let ChunkName { tenant, id, .. } = self.name;
        let committed = promotion.commit(&state.checksums);
        state.whole = self.shared.read_guard_by_id(tenant, &id).filter(|_| committed.is_ok());
        if state.whole.is_none() {
            // Deleted meanwhile: whoever still copies finds other bytes than the checksums say.
            state.failed = Some(NotPromoted::Gone.into());
        }
    }
}

impl Drop for PartialChunk {
    fn drop(&mut self) {
        let mut table = self.shared.partial.0.lock();
        // Another one may have come in its place.
        if table.get(&self.name.id).is_some_and(|partial| partial.strong_count() == 0) {
            table.remove(&self.name.id);
        }
        drop(table);
        let state = self.state.get_mut();
        if let Some(promotion) = state.promotion.take() {
            promotion.abandon(&state.quarantined);
        }
    }
}

impl RunRead {
    fn want(&self, place: usize) -> LayerRead {
        let layers = self.chunk.runs[self.run].clone();
        let window = self.chunk.shape.window(layers.clone()).unwrap_or(0..0);
        let slot = &self.chunk.slot;
        let into = Span::new(slot.region, slot.offset + window.start, window.end - window.start);
        let check = self.chunk.shared.check_of_fetches();
        LayerRead { chunk: place, layers, into: Some(into), check }
    }

    fn end(mut self, end: Result<Staged, NotRead>) {
        self.outcome = match end {
            Ok(staged) if staged.is_direct() => {
                let mut state = self.chunk.state.lock();
                for layer in staged.layers() {
                    state.checksums[layer] = staged.crc(layer).unwrap_or_default();
                }
                Ok(())
            }
            // It is encrypted since its lease was granted.
            Ok(_) => Err(NotPromoted::NotCopied.into()),
            Err(error) => {
                self.chunk.state.lock().quarantined.extend_from_slice(error.quarantined());
                Err(error.into())
            }
        };
    }
}

impl Drop for RunRead {
    fn drop(&mut self) {
        self.chunk.ended(self.run, &self.outcome);
    }
}

impl LayerGuard {
    fn whole(guard: ReadGuard) -> LayerGuard {
        LayerGuard(Held::Whole(Arc::new(guard)))
    }

    /// Where a layer lies in the arena: that which was asked for, or one that came with it.
    pub fn place(&self, layer: usize) -> Option<Range<u64>> {
        let (start, extent) = match &self.0 {
            Held::Whole(guard) => (guard.offset_bytes(), guard.shape().layer(layer)?),
            Held::Part(chunk) => (chunk.slot.offset, chunk.shape.layer(layer)?),
        };
        Some(start + extent.start..start + extent.end)
    }

    /// Whether what is there of the chunk is still what was stored. If not, the chunk is a miss for
    /// all from now on, and counted. It takes as long as reading that.
    pub fn check(&self) -> bool {
        match &self.0 {
            Held::Whole(guard) => guard.check(),
            Held::Part(chunk) => chunk.check(),
        }
    }

    /// The CRC-32C that the layer had when it was stored.
    pub fn checksum(&self, layer: usize) -> Option<u32> {
        match &self.0 {
            Held::Whole(guard) => guard.checksums().get(layer).copied(),
            Held::Part(chunk) => chunk.state.lock().checksums.get(layer).copied(),
        }
    }
}

impl std::fmt::Debug for PartialChunk {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PartialChunk").field("id", &self.name.id).finish_non_exhaustive()
    }
}
