//! Leases as clients hold them: what of a sequence may be loaded until when, and where it lies.
//!
//! A client believes its lease for shorter than the node does: its time counts from before the node
//! was asked. So what is verified while the client believes it was read while the node kept it.

use super::Shared;
use super::connection::{Connection, RequestContext};
use crate::protocol::answer::{ChunkPlace, Leased};
use crate::protocol::request::Request;
use forebay_store::{ChunkShape, NotVerified, Unreadable, checksum};
use forebay_transfer::Span;
use forebay_transfer::lock::Mutex;
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// The right to load the chunks of a prefix until it is dropped. It is kept alive meanwhile. The
/// first
/// [`in_memory`](Lease::in_memory) chunks are in the node's memory, the next
/// [`on_disk`](Lease::on_disk) on its disk, and the last [`on_peers`](Lease::on_peers) are said to
/// be on other nodes.
#[derive(Debug)]
pub struct Lease {
    pub(super) held: Option<Arc<Held>>,
    in_memory: usize,
    on_disk: usize,
    on_peers: usize,
}

/// A lease and what lies where. Whoever loads under it keeps it.
#[derive(Debug)]
pub(super) struct Held {
    pub shared: Arc<Shared>,
    pub connection: Arc<Connection>,
    pub id: u64,
    /// In the mover's clock.
    expires_us: AtomicU64,
    /// What the client wished.
    pub ttl_us: u64,
    /// What it was asked for, and loads under it are.
    pub context: RequestContext,
    places: Mutex<HashMap<usize, ChunkPlace>>,
    /// Of those chunks that come layer by layer, as far as they have come.
    partial: Mutex<HashMap<usize, ChunkPlace>>,
}

/// Where a layer of a chunk lies in the arena, and what its bytes must sum up to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LayerPlace {
    pub offset_bytes: u64,
    /// Its CRC-32C: what was read is compared with it before it is used.
    pub checksum: u32,
}

impl Lease {
    /// Of nothing.
    pub(super) fn none() -> Lease {
        Lease { held: None, in_memory: 0, on_disk: 0, on_peers: 0 }
    }

    /// What the node granted to a request that was made at `asked_us`, for this.
    pub(super) fn granted(
        shared: Arc<Shared>,
        connection: Arc<Connection>,
        leased: Leased,
        (asked_us, context): (u64, RequestContext),
    ) -> Lease {
        if leased.lease == 0 {
            return Lease::none();
        }
        let places = leased.places.into_iter().enumerate().collect();
        let held = Held {
            shared,
            connection,
            id: leased.lease,
            expires_us: AtomicU64::new(asked_us.saturating_add(leased.ttl_us)),
            ttl_us: leased.ttl_us,
            context,
            places: Mutex::new(places),
            partial: Mutex::default(),
        };
        let held = Arc::new(held);
        held.shared.keep_alive(&held);
        Lease {
            held: Some(held),
            in_memory: leased.in_memory as usize,
            on_disk: leased.on_disk as usize,
            on_peers: leased.on_peers as usize,
        }
    }
    pub fn len(&self) -> usize {
        self.in_memory + self.on_disk + self.on_peers
    }

    /// Whether it gives access to nothing.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// How many of its chunks, from the first on, were in memory when it was granted.
    pub fn in_memory(&self) -> usize {
        self.in_memory
    }

    /// How many of its chunks, behind those in memory, were on disk.
    pub fn on_disk(&self) -> usize {
        self.on_disk
    }

    /// How many of its chunks, the last ones, other nodes are said to have.
    pub fn on_peers(&self) -> usize {
        self.on_peers
    }

    /// Whether chunks can still be loaded and verified under it.
    pub fn is_alive(&self) -> bool {
        self.held.as_ref().is_some_and(|held| held.is_alive())
    }

    /// Ends the lease; dropping it does the same. Loads under way go on.
    pub fn release(self) {}

    pub(super) fn alive(&self) -> Result<&Arc<Held>, Unreadable> {
        self.held.as_ref().filter(|held| held.is_alive()).ok_or(Unreadable::DeadLease)
    }

    /// Checks that `pieces`, one after another, are the bytes that a layer of a chunk had when it
    /// was stored. The chunk must have been loaded under this lease.
    pub(super) fn verify(&self, chunk: usize, layer: usize, pieces: &[&[u8]]) -> Result<(), NotVerified> {
        // Before anything is locked: in a child of `fork()` the lock may never be free.
        let held = self.alive()?;
        let given_bytes = pieces.iter().map(|piece| piece.len() as u64).sum();
        held.verify(chunk, layer, given_bytes, || Some(checksum::of_pieces(pieces)))
    }
}

impl Held {
    pub fn is_alive(&self) -> bool {
        let expires_us = self.expires_us.load(Ordering::Acquire);
        self.shared.now_us() < expires_us && self.connection.is_alive()
    }

    /// Whether nothing makes it live again.
    pub fn is_over(&self) -> bool {
        self.expires_us.load(Ordering::Acquire) == 0 || !self.connection.is_alive()
    }

    /// The node keeps it for `ttl_us` from a request on that was made at `asked_us`.
    pub fn renewed(&self, asked_us: u64) {
        self.expires_us.fetch_max(asked_us.saturating_add(self.ttl_us), Ordering::AcqRel);
    }

    /// The node does not keep it any more.
    pub fn ended(&self) {
        self.expires_us.store(0, Ordering::Release);
    }

    /// The chunk lies in the arena from now on.
    pub fn note(&self, chunk: usize, place: ChunkPlace) {
        self.places.lock().insert(chunk, place);
    }

    /// Where a chunk lies, if it is known and inside of the arena.
    pub fn place(&self, chunk: usize) -> Option<ChunkPlace> {
        let place = self.places.lock().get(&chunk).cloned()?;
        self.connection.arena.span(place.offset_bytes, place.shape.bytes()).map(|_| place)
    }

    /// A layer of a chunk of this shape lies in the arena from now on. Gives where the chunk lies;
    /// nothing if that is not inside of the arena, or not where the layers before are.
    pub fn note_layer(
        &self,
        chunk: usize,
        layer: usize,
        at: LayerPlace,
        shape: &Arc<ChunkShape>,
    ) -> Option<ChunkPlace> {
        let offset_bytes = at.offset_bytes.checked_sub(shape.layer(layer)?.start)?;
        self.connection.arena.span(offset_bytes, shape.bytes())?;
        let mut partial = self.partial.lock();
        let new = || ChunkPlace { offset_bytes, shape: Arc::clone(shape), sums: vec![0; shape.layers()] };
        let place = partial.entry(chunk).or_insert_with(new);
        *place.sums.get_mut(layer)? = at.checksum;
        (place.offset_bytes == offset_bytes).then(|| place.clone())
    }

    /// `len` bytes at `offset` of the arena.
    pub fn span(&self, offset: u64, len: u64) -> Span {
        Span::new(self.connection.arena.region, offset, len)
    }

    /// Compares the checksum of bytes that were read with the one that the layer must have. What
    /// was read under a dead lease may be anything, so nothing is said about it. `sum` gives none
    /// if the bytes cannot be reached.
    pub fn verify(
        &self,
        chunk: usize,
        layer: usize,
        given_bytes: u64,
        sum: impl FnOnce() -> Option<u32>,
    ) -> Result<(), NotVerified> {
        let (stored, layer_bytes) = self.sum(chunk, layer).ok_or(Unreadable::Outside { chunk, layer })?;
        if given_bytes != layer_bytes {
            return Err(NotVerified::Length { layer, layer_bytes, given_bytes });
        }
        let found = sum();
        if !self.is_alive() {
            return Err(Unreadable::DeadLease.into());
        }
        let found = found.ok_or(Unreadable::Outside { chunk, layer })?;
        if found != stored {
            let chunk_there = u32::try_from(chunk).unwrap_or(u32::MAX);
            self.connection.tell(&Request::Corrupt { lease: self.id, chunk: chunk_there });
            return Err(NotVerified::Corrupt { chunk, layer, stored, found });
        }
        Ok(())
    }

    fn sum(&self, chunk: usize, layer: usize) -> Option<(u32, u64)> {
        let (places, partial) = (self.places.lock(), self.partial.lock());
        let place = places.get(&chunk).or_else(|| partial.get(&chunk))?;
        let extent = place.shape.layer(layer)?;
        Some((*place.sums.get(layer)?, extent.end - extent.start))
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.connection.tell(&Request::Release(vec![self.id]));
    }
}
