//! A store under way. Its chunks may be of parts of the heads: then what is one chunk of the sequence
//! is stored as several. They get slots in the node's arena, are copied there from the engine's
//! pages, and become visible to others. It ends with its last chunk, when nothing of it touches a
//! page any more.

use crate::access::Accessing;
use crate::cache::Layer;
use crate::copies::{Batch, Job, NotCopied};
use crate::jobs::JobStored;
use crate::limiter::Permit;
use crate::pages::{ChunkAt, HeadRange, PageTables, Source, pieces};
use crate::shared::Shared;
use crate::stats::{add, take};
use crate::thread_pool::Urgency;
use forebay_client::{Reserved, Slot};
use forebay_kv::ChunkId;
use forebay_store::{ChunkShape, StoreEnd};
use forebay_transfer::Span;
use forebay_transfer::lock::Mutex;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

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
    tables: PageTables,
    /// Into how many equal parts the heads are cut.
    parts: u32,
    copying: Arc<dyn Job>,
    /// Chunks that have not ended, and one while they are begun.
    left: AtomicUsize,
    /// The numbers of those of which the node neither took nor had some part.
    missing: Mutex<Vec<u32>>,
    /// How many of these were beyond the limit of bytes on their way.
    over_limit: AtomicUsize,
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

impl Storing {
    /// Begins a store: the chunks of each part one after another, with the pages of `tables`.
    pub fn begin(
        shared: &Arc<Shared>,
        job: u64,
        parts: Vec<Vec<NewChunk>>,
        tables: PageTables,
        copying: Arc<dyn Job>,
    ) {
        let left = AtomicUsize::new(1);
        let (shared, missing) = (Arc::clone(shared), Mutex::default());
        let (over_limit, of) = (AtomicUsize::new(0), parts.len() as u32);
        let store = Storing { shared, job, tables, parts: of, copying, left, missing, over_limit };
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
        for same in admitted.chunk_by(|one, other| one.shape == other.shape) {
            for together in same.chunks(slots.together()) {
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
        let Ok(shape) = ChunkShape::new(bytes) else {
            add(&counters.stores_failed, 1);
            self.miss(number);
            return None;
        };
        if !self.shared.admit(shape.bytes()) {
            add(&counters.stores_refused, 1);
            self.over_limit.fetch_add(1, Ordering::Relaxed);
            self.miss(number);
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
            return stored.into_iter().for_each(|stored| stored.end(&StoreEnd::Deleted));
        };
        let stored: Vec<_> = stored.into_iter().map(|stored| Mutex::new(Some(stored))).collect();
        client.reserve(&shape, &chunks, move |number, reserved| {
            let Some(stored) = stored.get(number).and_then(|stored| stored.lock().take()) else { return };
            stored.soon(move |stored| match reserved {
                Reserved::Slot(slot) => stored.fill(slot),
                Reserved::Here => stored.end(&StoreEnd::AlreadyHere),
                Reserved::Refused(_) => stored.end(&StoreEnd::Deleted),
            });
        });
    }

    /// Says in the log why chunks are not stored.
    fn log(&self, missing: usize) {
        let over_limit = self.over_limit.load(Ordering::Relaxed);
        let reason = match over_limit {
            0 if self.shared.client().is_none_or(|client| !client.is_connected()) => "no node",
            0 => "the node did not take them",
            _ => "too many bytes are on their way",
        };
        if missing > 0 {
            self.shared.log.refused(self.job, missing, reason);
        }
    }

    fn miss(&self, number: u32) {
        self.missing.lock().push(number);
    }

    /// A chunk has ended, or all have been begun.
    fn ended(&self) {
        if self.left.fetch_sub(1, Ordering::AcqRel) == 1 {
            let mut missing = std::mem::take(&mut *self.missing.lock());
            missing.sort_unstable();
            missing.dedup();
            self.log(missing.len());
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

    /// Copies the pages into the slot.
    fn fill(self, slot: Slot) {
        let access = self.store.shared.access.enter();
        let (Some(access), Some((batch, sources))) = (access, self.gather(&slot)) else {
            drop(slot);
            return self.end(&StoreEnd::Deleted);
        };
        let copying = Arc::clone(&self.store.copying);
        let on_copied = move |outcome: Result<(), NotCopied>| {
            self.soon(move |stored| match outcome {
                Ok(()) => stored.commit(slot, sources, access),
                Err(_) => {
                    drop((slot, access));
                    stored.end(&StoreEnd::Deleted);
                }
            });
        };
        copying.copy(0, batch, Box::new(on_copied));
    }

    /// What goes where, and of each layer the spans to sum up, if the host reads them.
    fn gather(&self, slot: &Slot) -> Option<(Batch, Vec<Vec<Span>>)> {
        let (shared, mut found, mut sources) = (&self.store.shared, Vec::new(), Vec::new());
        for (number, of_cache) in shared.cache.layers().iter().enumerate() {
            let (to, from, layer) = (slot.layer(number)?, found.len(), number as u32);
            let (source, extent) = (self.store.source_of(of_cache, self.part), (to.offset, to.len));
            pieces(&shared.cache, &self.store.tables, layer, self.at, &source, extent, &mut found).ok()?;
            if let Some(region) = shared.copies.region(layer) {
                let span = |piece: &crate::copies::Piece| Span::new(region, piece.page_offset, piece.bytes);
                sources.push(found[from..].iter().map(span).collect());
            }
        }
        Some((Batch { arena: Arc::clone(slot.arena()), pieces: found }, sources))
    }

    /// The bytes have arrived: sums them up and has the chunk made visible.
    fn commit(self, slot: Slot, sources: Vec<Vec<Span>>, access: Accessing) {
        let sums = slot.sums(&sources);
        drop(access);
        slot.commit(sums, move |end| self.soon(move |stored| stored.end(&end)));
    }

    /// It is over. Its permit is given back last.
    fn end(self, end: &StoreEnd) {
        let counters = &self.store.shared.counters;
        match end {
            StoreEnd::Stored { bytes } => {
                add(&counters.stores_done, 1);
                add(&counters.bytes_stored, *bytes);
            }
            StoreEnd::AlreadyHere => add(&counters.stores_done, 1),
            StoreEnd::Deleted | StoreEnd::Failed(_) => {
                add(&counters.stores_failed, 1);
                self.store.miss(self.number);
            }
        }
        take(&counters.bytes_storing, self.bytes);
        self.store.ended();
    }
}
