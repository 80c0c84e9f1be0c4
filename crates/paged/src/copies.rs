//! Who copies between the node's arena and an engine's pages. This file is the contract.
//!
//! `host.rs` copies with the mover's host link. On a GPU the same contract is kept by chains in
//! streams: then nobody on the host waits for a layer, the engine's own stream does.

pub use crate::errors::NotCopied;
use forebay_client::NodeArena;
use forebay_transfer::RegionId;
use std::fmt::Debug;
use std::sync::Arc;
use std::time::Duration;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    /// From the arena into pages. Requests wait for it, so it goes before stores.
    Load,
    /// From pages into the arena.
    Store,
}

/// Bytes that are the same in the arena and in a page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Piece {
    /// Where they lie in the arena.
    pub arena_offset: u64,
    /// Whose page: a layer of the cache.
    pub layer: u32,
    /// Where they lie from the layer's page 0 on.
    pub page_offset: u64,
    pub bytes: u64,
}

/// Bytes that have a part in a checksum.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ExtentPart {
    /// Of a page, from the layer's page 0 on.
    Page { layer: u32, offset: u64, bytes: u64 },
    /// Of the arena: what is not copied.
    Arena { offset: u64, bytes: u64 },
}

/// The parts of what has one checksum, one after another: a layer of a chunk.
pub type Extent = Vec<ExtentPart>;

/// Pieces that are copied together: of a load what of one layer is there, of a store all layers of
/// one chunk.
#[derive(Debug)]
pub struct Batch {
    /// The arena that the offsets are in. It stays mapped as long as this is held.
    pub arena: Arc<NodeArena>,
    /// What is copied. Inside of the arena and of the cache, both were looked at; no two write the
    /// same byte.
    pub pieces: Vec<Piece>,
    /// What is summed up on the GPU behind all pieces, inside of the arena and of the cache too.
    /// None where [`Copies::has_sums`] says that there are no sums.
    pub extents: Vec<Extent>,
}

/// What relays of the node carry and carried.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Relayed {
    /// Relays that reach the arena now.
    pub relays: u64,
    /// How often they were lost.
    pub lost: u64,
    pub bytes: u64,
}

/// Called exactly once, on any thread, when nothing touches the bytes of a batch any more; also
/// after an error. It is short, and does not wait for anything. It is given the CRC-32C of each
/// extent of the batch.
pub type OnCopied = Box<dyn FnOnce(Result<Vec<u32>, NotCopied>) + Send>;

/// Copies between arenas and one cache. For any number of threads.
pub trait Copies: Send + Sync + Debug {
    /// Begins a job, on the engine's thread. What is in the engine's `stream` now comes before any
    /// copy of the job: kernels that were queued may still read or write the pages. `is_awaited`:
    /// it computes nothing until the job is over but what waits for it layer by layer.
    fn begin(&self, direction: Direction, is_awaited: bool, stream: u64) -> Result<Arc<dyn Job>, NotCopied>;

    /// The cache's layer as a region of the client's mover, if the host can read it: then the host
    /// verifies loaded layers where they arrived, and sums up stored ones where they came from.
    /// Otherwise it does both in the arena, if it is to do it at all.
    fn region(&self, layer: u32) -> Option<RegionId>;

    /// Whether whoever copies sums up extents as well.
    fn has_sums(&self) -> bool {
        false
    }

    /// How many batches of one load may be on their way at a time, 1 at least, if none has more
    /// than so many bytes.
    fn batches_max(&self, bytes: u64) -> usize;

    /// What the node's relays do for it.
    fn relayed(&self) -> Relayed {
        Relayed::default()
    }

    /// There is an arena that batches will lie in: the memory can be made ready for it meanwhile.
    fn meet(&self, _arena: &Arc<NodeArena>) {}

    /// Nothing is under way and nothing will be: what was made ready is let go of.
    fn close(&self) {}
}

pub trait Job: Send + Sync + Debug {
    /// Copies a batch of layer `layer`, of a store of all layers (`layer` is 0). Batches of a load
    /// come layer by layer, more than one for a layer if chunks come late. May take a while, to
    /// queue thousands of pieces say, but does not wait for the copy itself. When this has
    /// returned, [`follow`](Job::follow) covers the batch.
    fn copy(&self, layer: u32, batch: Batch, on_copied: OnCopied);

    /// Has `stream`, which comes to where it needs a layer, wait for all batches of it that were
    /// given to [`copy`](Job::copy), if all of these are queued: the host waits for nothing. What
    /// the stream waits is told by [`stalls`](Job::stalls). `false`: nothing was done, and
    /// [`come`](Job::come) and [`follow`](Job::follow) are to be called.
    fn pass(&self, _layer: u32, _stream: u64) -> Result<bool, NotCopied> {
        Ok(false)
    }

    /// `stream` has come to where it needs a layer; said before each [`follow`](Job::follow). What
    /// it waits from here on, until that lets it pass, is told by [`stalls`](Job::stalls), whatever
    /// holds it up. `false`: it is the host that waits here, and knows how long.
    fn come(&self, _layer: u32, _stream: u64) -> Result<bool, NotCopied> {
        Ok(false)
    }

    /// Has `stream` wait for all batches of a layer that were given to [`copy`](Job::copy), however
    /// long ago they ended. `false`: there is no such waiting here, wait for the batches' ends
    /// instead.
    fn follow(&self, layer: u32, stream: u64) -> Result<bool, NotCopied>;

    /// What is to be queued for the layers behind one that was followed, if that waits for somebody
    /// to do it.
    fn rest(&self) -> Option<Box<dyn FnOnce() + Send>> {
        None
    }

    /// Of layers that a stream has waited for, each and how long. Asked once, when all batches have
    /// ended and nobody is in
    /// [`follow`](Job::follow) any more.
    fn stalls(&self) -> Vec<(u32, Duration)> {
        Vec::new()
    }
}
