//! Links between GPUs. [`PeerLink`] is the NVLink pair of two: a copy engine moves whole lots, a kernel those of small
//! pages, gathering or scattering them on the way. [`RelayLink`] is a peer's PCIe lane and NVLink in one: a kernel of the
//! peer moves bytes between host memory and another GPU without staging. This file knows who executes what; it must never
//! know what the other side of a staging slot does.

use super::table::Tables;
use super::{ENGINE_PIECE_BYTES, finish_when_passed};
use crate::addresses::Addresses;
use crate::driver::CudaError;
use crate::kernels::{Kernels, Piece};
use crate::poller::Track;
use forebay_mover::{Completion, Link, LinkOp, Memory, Outcome};
use std::sync::Arc;

/// The NVLink pair between a GPU and a peer's staging. All work is the GPU's own: only its engine and kernels need to reach
/// its memory, so any allocator will do.
#[derive(Debug)]
pub struct PeerLink {
    parts: Parts,
    blocks: u32,
}

/// A peer's lane as one hop, driven by a kernel of the peer.
#[derive(Debug)]
pub struct RelayLink {
    parts: Parts,
    blocks: u32,
}

#[derive(Debug)]
struct Parts {
    track: Track,
    kernels: Arc<Kernels>,
    tables: Arc<Tables>,
    addresses: Arc<Addresses>,
}

/// Blocks of a kernel that gathers or scatters: as many as keep NVLink busy.
const PEER_BLOCKS: u32 = 64;
/// Blocks of a kernel on a GPU that works for another: few, since they take its multiprocessors.
const RELAY_BLOCKS: u32 = 16;

impl PeerLink {
    /// A link whose work is put into `track`, with `window_lots` lots in flight at most.
    pub fn new(
        track: Track,
        kernels: &Arc<Kernels>,
        addresses: &Arc<Addresses>,
        window_lots: u32,
    ) -> Result<PeerLink, CudaError> {
        Ok(PeerLink { parts: Parts::new(track, kernels, addresses, window_lots)?, blocks: PEER_BLOCKS })
    }
}

impl RelayLink {
    /// A link whose work is put into `track`, a stream of the peer that relays.
    pub fn new(
        track: Track,
        kernels: &Arc<Kernels>,
        addresses: &Arc<Addresses>,
        window_lots: u32,
    ) -> Result<RelayLink, CudaError> {
        Ok(RelayLink { parts: Parts::new(track, kernels, addresses, window_lots)?, blocks: RELAY_BLOCKS })
    }
}

impl Link for PeerLink {
    fn start(&mut self, op: LinkOp, memory: &Arc<Memory>, done: Completion) {
        let whole = op.bytes >= ENGINE_PIECE_BYTES * op.pairs.len() as u64;
        self.parts.start(op, memory, done, if whole { None } else { Some(self.blocks) });
    }
}

impl Link for RelayLink {
    fn start(&mut self, op: LinkOp, memory: &Arc<Memory>, done: Completion) {
        self.parts.start(op, memory, done, Some(self.blocks));
    }
}

impl Parts {
    fn new(
        track: Track,
        kernels: &Arc<Kernels>,
        addresses: &Arc<Addresses>,
        window_lots: u32,
    ) -> Result<Parts, CudaError> {
        let tables = Tables::new(track.stream().device(), window_lots)?;
        Ok(Parts { track, kernels: Arc::clone(kernels), tables, addresses: Arc::clone(addresses) })
    }

    /// Copies by a kernel with as many blocks as stated, else by copy engine.
    fn start(&self, op: LinkOp, memory: &Memory, done: Completion, blocks: Option<u32>) {
        let pieces = match self.addresses.resolve(&op, memory) {
            Ok(pieces) => pieces,
            Err(error) => return done.finish(Outcome::Failed { error: error.to_string() }),
        };
        let current = match self.track.stream().device().enter() {
            Ok(current) => current,
            Err(error) => return done.finish(Outcome::Failed { error: error.to_string() }),
        };
        let Some(blocks) = blocks else {
            let posted = self.by_engine(&pieces);
            return finish_when_passed(&self.track, op.bytes, posted, done, ());
        };
        let Some(table) = self.tables.fill(&pieces) else {
            let error = format!("{} pieces do not fit into a list", pieces.len());
            return done.finish(Outcome::Failed { error });
        };
        // SAFETY: the pieces were resolved from registered memory, which the mover keeps registered and to itself until the
        // operation is finished; the list is held until then.
        let posted = unsafe {
            self.kernels.copy(self.track.stream(), table.address(), pieces.len() as u32, op.bytes, blocks)
        };
        drop(current);
        finish_when_passed(&self.track, op.bytes, posted, done, table);
    }

    fn by_engine(&self, pieces: &[Piece]) -> Result<(), CudaError> {
        for piece in pieces {
            // SAFETY: the pieces were resolved from registered memory, which the mover keeps registered and to itself until
            // the operation is finished.
            unsafe { self.track.stream().copy(piece.from, piece.to, piece.bytes)? };
        }
        Ok(())
    }
}
