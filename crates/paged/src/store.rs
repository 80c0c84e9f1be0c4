//! A store under way. Its chunks may be of parts of the heads: then what is one chunk of the
//! sequence is stored as several. They get slots in the node's arena, are copied there from the
//! engine's pages, and become visible to others. It ends with its last chunk, when nothing of it
//! touches a page any more.

use crate::access::Accessing;
use crate::cache::Layer;
use crate::copies::{Batch, ExtentPart, Job, NotCopied, Piece};
use crate::jobs::JobStored;
use crate::limiter::Permit;
use crate::page_tables::PageTables;
use crate::pages::{ChunkAt, HeadRange, Source, pieces};
use crate::shared::Shared;
use crate::stats::{add, take};
use crate::thread_pool::Urgency;
use forebay_client::{Reserved, Slot};
use forebay_kv::ChunkId;
use forebay_store::{ChunkShape, StoreEnd, TenantId};
use forebay_transfer::lock::Mutex;
use forebay_transfer::{End, Span};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NewChunk {
    pub id: ChunkId,
    /// The id of the chunk before it.
    pub parent: Option<ChunkId>,
    pub tokens: u32,
}

/// A store under way. It ends with its last chunk.
pub struct Storing {
    shared: Arc<Shared>,
    job: u64,
    /// Whose chunks they are to be, if not the client's own tenant's.
    tenant: Option<TenantId>,
    tables: PageTables,
    /// Into how many equal parts the heads are cut.
    parts: u32,
    copying: Arc<dyn Job>,
    /// Chunks that have not ended, and one while they are begun.
    left: AtomicUsize,
    /// The numbers of those of which the node neither took nor had some part.
    missing: Mutex<Vec<u32>>,
    /// Why the first of them is missing.
    why: OnceLock<String>,
}

/// A chunk that may be stored.
#[derive(Clone)]
struct Admitted {
    chunk: forebay_client::NewChunk,
    number: u32,
    part: u32,
    at: ChunkAt,
    shape: ChunkShape,
}

struct Chunk {
    store: Arc<Storing>,
    /// Which chunk of the sequence, and which part of its heads.
    number: u32,
    part: u32,
    at: ChunkAt,
    bytes: u64,
    /// Until the node has the slot back.
    _permit: Permit,
}

/// The parts of one chunk of the sequence whose slots were asked for together. One copy fills them:
/// to look whether memory is there takes longer than to copy a few KiB.
struct Place {
    /// Parts for which the node has not answered.
    awaited: AtomicUsize,
    slots: Mutex<Vec<(Chunk, Slot)>>,
}

impl Storing {
    /// Begins a store: the chunks of each part one after another, with the pages of `tables`.
    pub fn begin(
        shared: &Arc<Shared>,
        (job, tenant): (u64, Option<TenantId>),
        parts: Vec<Vec<NewChunk>>,
        tables: PageTables,
        copying: Arc<dyn Job>,
    ) {
        let left = AtomicUsize::new(1);
        let (shared, missing) = (Arc::clone(shared), Mutex::default());
        let (why, of) = (OnceLock::new(), parts.len() as u32);
        let store = Storing { shared, job, tenant, tables, parts: of, copying, left, missing, why };
        let (store, chunks) = (Arc::new(store), parts.first().map_or(0, Vec::len));
        let (mut first_token, mut admitted) = (0, Vec::with_capacity(chunks * parts.len()));
        for place in 0..chunks {
            let at = ChunkAt { first_token, tokens: parts[0][place].tokens };
            first_token += u64::from(at.tokens);
            for (part, of_part) in (0..).zip(&parts) {
                admitted.extend(store.admit(&of_part[place], place as u32, part, at));
            }
        }
        let slots = &store.shared.slots;
        // Whole places, if they are not larger than what is begun together.
        let together = match slots.together() / parts.len() {
            0 => slots.together(),
            places => places * parts.len(),
        };
        for same in admitted.chunk_by(|one, other| one.shape == other.shape) {
            for together in same.chunks(together) {
                let (store, together) = (Arc::clone(&store), together.to_vec());
                slots.acquire_many(together.len(), move |permits| store.reserve(together, permits));
            }
        }
        store.ended();
    }

    /// A chunk that begins as soon as the node has room for its slot, if so many bytes may be on
    /// their way.
    fn admit(&self, chunk: &NewChunk, number: u32, part: u32, at: ChunkAt) -> Option<Admitted> {
        let counters = &self.shared.counters;
        add(&counters.stores, 1);
        let bytes = self.shared.cache.layer_bytes(at.tokens).map(|bytes| bytes / u64::from(self.parts));
        let shape = match ChunkShape::new(bytes) {
            Ok(shape) => shape,
            Err(error) => {
                add(&counters.stores_failed, 1);
                self.miss(number, error);
                return None;
            }
        };
        if !self.shared.admit(shape.bytes()) {
            add(&counters.stores_refused, 1);
            self.miss(number, "too many bytes are on their way");
            return None;
        }
        self.left.fetch_add(1, Ordering::AcqRel);
        let chunk = forebay_client::NewChunk { id: chunk.id, parent: chunk.parent };
        Some(Admitted { chunk, number, part, at, shape })
    }

    /// Where the bytes of a part come from: as if it were a chunk of some of the heads of a layer.
    fn source_of(&self, layer: &Layer, part: u32) -> Source {
        let heads = self.shared.cache.group_of(layer).heads / self.parts;
        Source { heads: HeadRange { first_there: 0, first_here: part * heads, heads }, page_tokens: None }
    }

    /// Asks for slots of chunks of one shape.
    fn reserve(self: Arc<Self>, together: Vec<Admitted>, permits: Vec<Permit>) {
        let Some(shape) = together.first().map(|first| first.shape.clone()) else { return };
        let chunks: Vec<_> = together.iter().map(|admitted| admitted.chunk).collect();
        let stored = |(Admitted { number, part, at, shape, .. }, permit)| {
            let (store, bytes) = (Arc::clone(&self), shape.bytes());
            Chunk { store, number, part, at, bytes, _permit: permit }
        };
        let stored: Vec<Chunk> = together.into_iter().zip(permits).map(stored).collect();
        let Some(client) = self.shared.client() else {
            return stored.into_iter().for_each(|stored| stored.not_stored("no node"));
        };
        let places = stored.chunk_by(|one, other| one.number == other.number);
        let places: Vec<_> = places.flat_map(|parts| vec![Place::of(parts.len()); parts.len()]).collect();
        let stored: Vec<_> = stored.into_iter().zip(places).map(|stored| Mutex::new(Some(stored))).collect();
        client.for_tenant(self.tenant).reserve(&shape, &chunks, move |number, reserved| {
            let Some((stored, place)) = stored.get(number).and_then(|stored| stored.lock().take()) else {
                return;
            };
            stored.soon(move |stored| place.answered(stored, reserved));
        });
    }

    /// A chunk lies in the arena with other bytes than in its pages.
    fn corrupt(&self, number: u32, one: &[u32], other: &[u32]) {
        add(&self.shared.counters.chunks_corrupt, 1);
        let layer = one.iter().zip(other).position(|(one, other)| one != other).unwrap_or(0);
        self.shared.log.corrupt(self.job, number as usize, layer as u32);
    }

    fn miss(&self, number: u32, why: impl ToString) {
        self.why.get_or_init(|| why.to_string());
        self.missing.lock().push(number);
    }

    /// A chunk has ended, or all have been begun.
    fn ended(&self) {
        if self.left.fetch_sub(1, Ordering::AcqRel) == 1 {
            let mut missing = std::mem::take(&mut *self.missing.lock());
            missing.sort_unstable();
            missing.dedup();
            if let Some(why) = self.why.get() {
                self.shared.log.refused(self.job, missing.len(), why);
            }
            self.shared.jobs.end_store(JobStored { job: self.job, missing });
        }
    }
}

impl Chunk {
    /// Goes on, on a worker: whoever has the permit next sends, which may wait for the node, and
    /// the client's own thread takes its answers.
    fn soon(self, then: impl FnOnce(Chunk) + Send + 'static) {
        let tasks = Arc::clone(&self.store.shared.tasks);
        tasks.post(Urgency::Store, move || then(self));
    }

    /// Its slot was filled, or not needed.
    fn end(self, end: &StoreEnd) {
        let counters = &self.store.shared.counters;
        match end {
            StoreEnd::Stored { bytes } => {
                add(&counters.stores_done, 1);
                add(&counters.bytes_stored, *bytes);
            }
            StoreEnd::AlreadyHere => add(&counters.stores_done, 1),
            StoreEnd::Deleted => return self.not_stored("deleted while it was written"),
            StoreEnd::Failed(End::Failed(failure)) => return self.not_stored(&failure.reason),
            StoreEnd::Failed(_) => return self.not_stored("cancelled"),
        }
        self.over();
    }

    fn not_stored(self, why: impl ToString) {
        add(&self.store.shared.counters.stores_failed, 1);
        self.store.miss(self.number, why);
        self.over();
    }

    /// Its permit is given back last.
    fn over(self) {
        take(&self.store.shared.counters.bytes_storing, self.bytes);
        self.store.ended();
    }
}

impl Place {
    fn of(parts: usize) -> Arc<Place> {
        Arc::new(Place { awaited: AtomicUsize::new(parts), slots: Mutex::default() })
    }

    /// The node has answered for one part.
    fn answered(&self, chunk: Chunk, reserved: Reserved) {
        match reserved {
            Reserved::Slot(slot) => self.slots.lock().push((chunk, slot)),
            Reserved::Here => chunk.end(&StoreEnd::AlreadyHere),
            Reserved::Refused(why) => chunk.not_stored(why),
        }
        if self.awaited.fetch_sub(1, Ordering::AcqRel) == 1 {
            fill(std::mem::take(&mut *self.slots.lock()));
        }
    }
}

/// Copies the pages of one place into the slots of its parts.
fn fill(slots: Vec<(Chunk, Slot)>) {
    let Some(store) = slots.first().map(|(chunk, _)| Arc::clone(&chunk.store)) else { return };
    let (Some(access), Some((batch, sources))) = (store.shared.access.enter(), gather(&store, &slots)) else {
        return give_up(slots, "its pages cannot be read");
    };
    let tasks = Arc::clone(&store.shared.tasks);
    let on_copied = move |outcome: Result<Vec<u32>, NotCopied>| {
        tasks.post(Urgency::Store, move || match outcome {
            Ok(sums) => commit(slots, &sources, &sums, access),
            Err(_) => {
                drop(access);
                give_up(slots, "its pages could not be copied");
            }
        });
    };
    store.copying.copy(0, batch, Box::new(on_copied));
}

/// Of each layer of a chunk the spans to sum up, if the host reads them.
type Sources = Vec<Vec<Span>>;

/// What goes where, and the sources of each part. All parts lie in one arena: they were asked for
/// with one message.
fn gather(store: &Storing, slots: &[(Chunk, Slot)]) -> Option<(Batch, Vec<Sources>)> {
    let (shared, mut found, mut extents) = (&store.shared, Vec::new(), Vec::new());
    let mut sources = vec![Vec::new(); slots.len()];
    let arena = slots.first()?.1.arena();
    if slots.iter().any(|(_, slot)| !Arc::ptr_eq(slot.arena(), arena)) {
        return None;
    }
    for (number, of_cache) in shared.cache.layers().iter().enumerate() {
        let layer = number as u32;
        for ((chunk, slot), sources) in slots.iter().zip(&mut sources) {
            let (to, from) = (slot.layer(number)?, found.len());
            let (source, extent) = (store.source_of(of_cache, chunk.part), (to.offset, to.len));
            pieces(&shared.cache, &store.tables, layer, chunk.at, &source, extent, &mut found).ok()?;
            if let Some(region) = shared.copies.region(layer) {
                let span = |piece: &Piece| Span::new(region, piece.page_offset, piece.bytes);
                sources.push(found[from..].iter().map(span).collect());
            }
            if shared.verify.on_gpu() {
                let part =
                    |piece: &Piece| ExtentPart::Page { layer, offset: piece.page_offset, bytes: piece.bytes };
                extents.push(found[from..].iter().map(part).collect());
            }
        }
    }
    Some((Batch { arena: Arc::clone(arena), pieces: found, extents }, sources))
}

/// The bytes have arrived: has the chunks made visible, with the sums that the GPU made of its
/// pages or the host makes now. A chunk of which these differ is given up.
fn commit(slots: Vec<(Chunk, Slot)>, sources: &[Sources], of_gpu: &[u32], access: Accessing) {
    let Some(store) = slots.first().map(|(chunk, _)| Arc::clone(&chunk.store)) else { return };
    let verify = store.shared.verify;
    let filled: Vec<_> = slots.iter().zip(sources).map(|((_, slot), of)| (slot, of.as_slice())).collect();
    let of_host = if verify.on_host() { Slot::sums_of(&filled) } else { Vec::new() };
    drop(access);
    let count = slots.len();
    for (number, (chunk, slot)) in slots.into_iter().enumerate() {
        // Layer by layer, of each all slots.
        let of_gpu = || of_gpu.iter().skip(number).step_by(count).copied().collect();
        let sums = of_host.get(number).cloned().unwrap_or_else(of_gpu);
        if verify.on_gpu() && sums != of_gpu() {
            store.corrupt(chunk.number, &sums, &of_gpu());
            give_up(vec![(chunk, slot)], "its bytes are not those of its pages");
            continue;
        }
        slot.commit(sums, move |end| chunk.soon(move |stored| stored.end(&end)));
    }
}

/// Gives slots back, and ends their chunks.
fn give_up(slots: Vec<(Chunk, Slot)>, why: &str) {
    for (chunk, slot) in slots {
        drop(slot);
        chunk.not_stored(why);
    }
}
