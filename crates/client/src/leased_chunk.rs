//! Chunks that lie still in the node's arena, for those who copy them from there: where their
//! layers lie, and what they must sum up to. [`Client::bring`] has the node lay them there.

use super::arena::{NodeArena, span_bytes};
use super::connection::Question;
use super::lease::{Held, Lease};
use super::{Client, Shared};
use crate::protocol::answer::{Answer, Brought, ChunkPlace, Refusal};
use crate::protocol::request::{Request, TOGETHER_MAX};
use forebay_store::{ChunkShape, NotVerified, Unreadable, checksum};
use forebay_transfer::{Class, Span};
use std::sync::Arc;

/// A chunk of a lease, in the arena. It keeps the lease, so that the chunk stays where it is:
/// whoever reads it holds this until nothing reads any more.
#[derive(Debug, Clone)]
pub struct LeasedChunk {
    held: Arc<Held>,
    chunk: usize,
    place: ChunkPlace,
}

impl Client {
    /// As [`lease`](Client::lease), without waiting and with the reason if there is none:
    /// `on_lease` is called exactly once, on one of the client's threads or, if there is no node,
    /// on this one. Keep it short.
    pub fn lease_then(
        &self,
        ids: &[forebay_kv::ChunkId],
        ttl_us: u64,
        on_lease: impl FnOnce(Result<Lease, String>) + Send + 'static,
    ) {
        self.keep_then(ids, ttl_us, true, on_lease);
    }

    /// As [`lease_then`](Client::lease_then), to keep what is there for others who will load it
    /// under leases of their own: the node does not count it as a hit.
    pub fn hold_then(
        &self,
        ids: &[forebay_kv::ChunkId],
        ttl_us: u64,
        on_lease: impl FnOnce(Result<Lease, String>) + Send + 'static,
    ) {
        self.keep_then(ids, ttl_us, false, on_lease);
    }

    fn keep_then(
        &self,
        ids: &[forebay_kv::ChunkId],
        ttl_us: u64,
        to_load: bool,
        on_lease: impl FnOnce(Result<Lease, String>) + Send + 'static,
    ) {
        let shared = &self.shared;
        let Some(connection) = shared.connection() else { return on_lease(Err(shared.why_gone())) };
        let (granter, asked, asked_us) = (Arc::clone(shared), Arc::clone(&connection), shared.now_us());
        let context = self.context;
        let request = Request::Lease { ttl_us, to_load, ids: ids.to_vec() };
        shared.ask_patiently(&asked, Question::new(&request, context), move |answer| {
            on_lease(match answer {
                Some(Answer::Leased(leased)) => {
                    Ok(Lease::granted(granter, connection, leased, (asked_us, context)))
                }
                Some(Answer::Refused(_, why)) => Err(why),
                Some(other) => Err(format!("an answer to something else: {other:?}")),
                None => Err("the node is gone".into()),
            });
        });
    }

    /// A chunk of the lease, if the node has said already where it lies.
    pub fn leased_chunk(&self, lease: &Lease, chunk: usize) -> Option<LeasedChunk> {
        LeasedChunk::of(lease.alive().ok()?, chunk)
    }

    /// Has chunks of the lease lie in the arena, from the node's disk or a peer if need be,
    /// verified there. `deadline_us` is in the mover's clock. `on_end` is called exactly once for
    /// each of `chunks`, on one of the client's threads or this one, with the chunk or why it is
    /// not to be had. Keep it short.
    pub fn bring(
        &self,
        lease: &Lease,
        chunks: &[usize],
        class: Class,
        deadline_us: Option<u64>,
        on_end: impl Fn(usize, Result<LeasedChunk, String>) + Send + Sync + 'static,
    ) {
        let held = match lease.alive() {
            Ok(held) => held,
            Err(error) => return chunks.iter().for_each(|chunk| on_end(*chunk, Err(error.to_string()))),
        };
        let mut missing = Vec::with_capacity(chunks.len());
        for chunk in chunks.iter().copied() {
            match LeasedChunk::of(held, chunk) {
                Some(leased) => on_end(chunk, Ok(leased)),
                None if chunk < lease.len() => missing.push(chunk),
                None => on_end(chunk, Err(Unreadable::Outside { chunk, layer: 0 }.to_string())),
            }
        }
        bring(held, &missing, class, deadline_us, Arc::new(on_end));
    }
}

/// Is told what became of each chunk, by its place in the lease.
pub(super) type OnBrought = Arc<dyn Fn(usize, Result<LeasedChunk, String>) + Send + Sync>;

/// Asks the node for chunks that it has not said yet where they lie. It answers as they come.
pub(super) fn bring(
    held: &Arc<Held>,
    chunks: &[usize],
    class: Class,
    deadline_us: Option<u64>,
    on_end: OnBrought,
) {
    let shared: &Arc<Shared> = &held.shared;
    let now_us = shared.now_us();
    let within_us = deadline_us.map(|deadline_us| deadline_us.saturating_sub(now_us));
    for chunks in chunks.chunks(TOGETHER_MAX) {
        let places = chunks.iter().map(|chunk| u32::try_from(*chunk).unwrap_or(u32::MAX)).collect();
        let request = Request::Bring { lease: held.id, chunks: places, class, within_us };
        let (taken, mut left, on_end) = (Arc::clone(held), chunks.to_vec(), Arc::clone(&on_end));
        let question = Question::new(&request, held.context);
        shared.ask_for_many(&held.connection, question, move |answer| {
            let why = match answer {
                Some(Answer::Brought(all)) => {
                    for Brought { chunk, end } in all {
                        let chunk = chunk as usize;
                        let Some(at) = left.iter().position(|one| *one == chunk) else { continue };
                        left.swap_remove(at);
                        on_end(chunk, taken.take(chunk, end));
                    }
                    return !left.is_empty();
                }
                Some(Answer::Refused(_, why)) => why,
                Some(other) => format!("an answer to something else: {other:?}"),
                None => "the node is gone".into(),
            };
            std::mem::take(&mut left).into_iter().for_each(|chunk| on_end(chunk, Err(why.clone())));
            false
        });
    }
}

impl Held {
    /// The node has brought a chunk, or not.
    fn take(
        self: &Arc<Held>,
        chunk: usize,
        end: Result<ChunkPlace, (Refusal, String)>,
    ) -> Result<LeasedChunk, String> {
        let place = end.map_err(|(_, why)| why)?;
        self.note(chunk, place);
        LeasedChunk::of(self, chunk).ok_or_else(|| "the chunk lies outside of the arena".into())
    }
}

impl LeasedChunk {
    fn of(held: &Arc<Held>, chunk: usize) -> Option<LeasedChunk> {
        let place = held.place(chunk)?;
        Some(LeasedChunk { held: Arc::clone(held), chunk, place })
    }

    /// One that comes layer by layer: only of those that have come something may be read.
    pub(super) fn coming(held: &Arc<Held>, chunk: usize, place: ChunkPlace) -> LeasedChunk {
        LeasedChunk { held: Arc::clone(held), chunk, place }
    }

    /// The lengths of its layers.
    pub fn shape(&self) -> &ChunkShape {
        &self.place.shape
    }

    /// The memory that it lies in.
    pub fn arena(&self) -> &Arc<NodeArena> {
        &self.held.connection.arena
    }

    /// Where a layer lies. It was compared with the arena's length when the chunk came.
    pub fn layer(&self, layer: usize) -> Option<Span> {
        let extent = self.place.shape.layer(layer)?;
        Some(self.held.span(self.place.offset_bytes + extent.start, extent.end - extent.start))
    }

    /// Checks that the bytes of `spans`, one after another, are the layer's, and that they were
    /// read under a live lease. The spans are in memory of the client's mover, and nobody writes
    /// them meanwhile. Anything but `Ok` is a miss.
    pub fn verify(&self, layer: usize, spans: &[Span]) -> Result<(), NotVerified> {
        let memory = self.held.shared.mover.memory();
        let sum = || checksum::of_spans(memory, spans);
        self.held.verify(self.chunk, layer, span_bytes(spans), sum)
    }

    /// The same of bytes that somebody else has summed up, where this process cannot read them. No
    /// sum is a miss as well.
    pub fn verify_sum(&self, layer: usize, sum: Option<u32>) -> Result<(), NotVerified> {
        let layer_bytes = self.layer(layer).map_or(0, |span| span.len);
        self.held.verify(self.chunk, layer, layer_bytes, || sum)
    }

    /// The same of a layer of several chunks, with one look at the memory for all of them.
    pub fn verify_each(layer: usize, chunks: &[(&LeasedChunk, &[Span])]) -> Vec<Result<(), NotVerified>> {
        let Some((first, _)) = chunks.first() else { return Vec::new() };
        let lists: Vec<&[Span]> = chunks.iter().map(|(_, spans)| *spans).collect();
        let sums = checksum::of_each(first.held.shared.mover.memory(), &lists);
        let verify = |((chunk, spans), sum): (&(&LeasedChunk, &[Span]), Option<u32>)| {
            chunk.held.verify(chunk.chunk, layer, span_bytes(spans), || sum)
        };
        chunks.iter().zip(sums).map(verify).collect()
    }
}
