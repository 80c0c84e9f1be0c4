//! A chunk that lies still in the node's arena, for those who copy it from there by themselves. This file knows where its
//! layers lie and what they must sum up to; it must never know where the node had it before, or who copies it.

use super::arena::NodeArena;
use super::lease::{Held, Lease};
use super::load::span_bytes;
use super::{Client, Shared};
use crate::protocol::answer::{Answer, Lent};
use crate::protocol::request::Request;
use forebay_store::{ChunkShape, NotVerified, Unreadable, checksum};
use forebay_transfer::{Class, Span};
use std::sync::Arc;

/// A chunk of a lease, in the arena. It keeps the lease, so that the chunk stays where it is: whoever reads it holds this
/// until nothing reads any more.
#[derive(Debug, Clone)]
pub struct LentChunk {
    held: Arc<Held>,
    chunk: usize,
    lent: Lent,
}

impl Client {
    /// As [`lease`](Client::lease), without waiting and with the reason if there is none: `on_lease` is called exactly once, on
    /// one of the client's threads or, if there is no node, on this one. Keep it short.
    pub fn lease_then(
        &self,
        ids: &[forebay_kv::ChunkId],
        ttl_us: u64,
        on_lease: impl FnOnce(Result<Lease, String>) + Send + 'static,
    ) {
        self.keep_then(ids, ttl_us, true, on_lease);
    }

    /// As [`lease_then`](Client::lease_then), to keep what is there for others who will load it under leases of their own:
    /// the node does not count it as a hit.
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
        let request = Request::Lease { ttl_us, to_load, ids: ids.to_vec() };
        shared.ask_patiently(&asked, &request, move |answer| {
            on_lease(match answer {
                Some(Answer::Leased(leased)) => Ok(Lease::granted(granter, connection, leased, asked_us)),
                Some(Answer::Refused(_, why)) => Err(why),
                Some(other) => Err(format!("an answer to something else: {other:?}")),
                None => Err("the node is gone".into()),
            });
        });
    }

    /// A chunk of the lease, if the node has said already where it lies.
    pub fn lent(&self, lease: &Lease, chunk: usize) -> Option<LentChunk> {
        LentChunk::of(lease.alive().ok()?, chunk)
    }

    /// Has a chunk of the lease lie in the arena, from the node's disk or a peer if need be, verified there. `deadline_us` is
    /// in the mover's clock. `on_end` is called exactly once, on one of the client's threads or this one, with the chunk or
    /// why it is not to be had. Keep it short.
    pub fn bring(
        &self,
        lease: &Lease,
        chunk: usize,
        class: Class,
        deadline_us: Option<u64>,
        on_end: impl FnOnce(Result<LentChunk, String>) + Send + 'static,
    ) {
        match lease.alive() {
            Err(error) => on_end(Err(error.to_string())),
            Ok(_) if chunk >= lease.len() => on_end(Err(Unreadable::Outside { chunk, layer: 0 }.to_string())),
            Ok(held) => match LentChunk::of(held, chunk) {
                Some(lent) => on_end(Ok(lent)),
                None => bring(held, chunk, class, deadline_us, on_end),
            },
        }
    }
}

/// Asks the node for a chunk that it has not lent yet.
pub(super) fn bring(
    held: &Arc<Held>,
    chunk: usize,
    class: Class,
    deadline_us: Option<u64>,
    on_end: impl FnOnce(Result<LentChunk, String>) + Send + 'static,
) {
    let shared: &Arc<Shared> = &held.shared;
    let now_us = shared.now_us();
    let request = Request::Bring {
        lease: held.id,
        chunk: u32::try_from(chunk).unwrap_or(u32::MAX),
        class,
        within_us: deadline_us.map(|deadline_us| deadline_us.saturating_sub(now_us)),
    };
    let taken = Arc::clone(held);
    shared.ask_patiently(&held.connection, &request, move |answer| {
        on_end(match answer {
            Some(Answer::Brought(lent)) => {
                taken.note(chunk, lent);
                LentChunk::of(&taken, chunk).ok_or_else(|| "the chunk lies outside of the arena".into())
            }
            Some(Answer::Refused(_, why)) => Err(why),
            Some(other) => Err(format!("an answer to something else: {other:?}")),
            None => Err("the node is gone".into()),
        });
    });
}

impl LentChunk {
    fn of(held: &Arc<Held>, chunk: usize) -> Option<LentChunk> {
        let lent = held.place(chunk)?;
        Some(LentChunk { held: Arc::clone(held), chunk, lent })
    }

    /// The lengths of its layers.
    pub fn shape(&self) -> &ChunkShape {
        &self.lent.shape
    }

    /// The memory that it lies in.
    pub fn arena(&self) -> &Arc<NodeArena> {
        &self.held.connection.arena
    }

    /// Where a layer lies. It was compared with the arena's length when the chunk came.
    pub fn layer(&self, layer: usize) -> Option<Span> {
        let extent = self.lent.shape.layer(layer)?;
        Some(self.held.span(self.lent.offset_bytes + extent.start, extent.end - extent.start))
    }

    /// Whether what is read now is still the chunk.
    pub fn is_alive(&self) -> bool {
        self.held.is_alive()
    }

    /// Checks that the bytes of `spans`, one after another, are the layer's, and that they were read under a live lease.
    /// The spans are in memory of the client's mover, and nobody writes them meanwhile. Anything but `Ok` is a miss.
    pub fn verify(&self, layer: usize, spans: &[Span]) -> Result<(), NotVerified> {
        let memory = self.held.shared.mover.memory();
        let sum = || checksum::of_spans(memory, spans);
        self.held.verify(self.chunk, layer, span_bytes(spans), sum)
    }
}
