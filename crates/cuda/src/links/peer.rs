//! The NVLink pair of two GPUs as a link: a copy engine moves whole lots, a kernel those of small
//! pages, gathering or scattering them on the way.

use super::table::Tables;
use super::{ENGINE_PIECE_BYTES, WINDOW_LOTS, finish_when_passed};
use crate::addresses::Addresses;
use crate::driver::CudaError;
use crate::kernels::{Kernels, Piece};
use crate::poller::Track;
use forebay_transfer::{Completion, Link, LinkOp, Memory, Outcome};
use std::sync::Arc;

/// The NVLink pair between a GPU and a peer's staging.
#[derive(Debug)]
pub struct PeerLink {
    /// Moves whole lots, if an engine does.
    engine: Option<Track>,
    /// Moves pages. Always the GPU's own: only it need reach its memory.
    shuffle: Shuffle,
}

/// A kernel on a stream, and its lists.
#[derive(Debug)]
struct Shuffle {
    track: Track,
    kernels: Arc<Kernels>,
    tables: Arc<Tables>,
    addresses: Arc<Addresses>,
}

/// Blocks of a kernel that copies from or to a peer. It is two microseconds away, so this many have
/// enough bytes in flight for NVLink, and leave most of the GPU to whoever computes.
pub(crate) const PEER_BLOCKS: u32 = 64;

impl PeerLink {
    /// A link for the kernels' GPU, which puts kernels into `kernel`, and whole lots into `engine`
    /// if there is one: a stream of either GPU. A lot goes there only if that GPU reaches both
    /// sides.
    pub fn new(
        engine: Option<Track>,
        kernel: Track,
        kernels: &Arc<Kernels>,
        addresses: &Arc<Addresses>,
    ) -> Result<PeerLink, CudaError> {
        Ok(PeerLink { engine, shuffle: Shuffle::new(kernel, kernels, addresses)? })
    }
}

impl Link for PeerLink {
    fn start(&mut self, op: LinkOp, memory: &Arc<Memory>, done: Completion) {
        match self.engine.as_ref().filter(|_| op.bytes >= ENGINE_PIECE_BYTES * op.pairs.len() as u64) {
            Some(engine) => self.shuffle.with_pieces(&op, memory, done, engine, |pieces, done| {
                finish_when_passed(engine, op.bytes, by_engine(engine, pieces), done, ());
            }),
            None => self.shuffle.start(&op, memory, done),
        }
    }
}

impl Shuffle {
    fn new(track: Track, kernels: &Arc<Kernels>, addresses: &Arc<Addresses>) -> Result<Shuffle, CudaError> {
        let tables = Tables::new(track.stream().device(), WINDOW_LOTS as usize)?;
        let (kernels, addresses) = (Arc::clone(kernels), Arc::clone(addresses));
        Ok(Shuffle { track, kernels, tables, addresses })
    }

    /// Calls `act` with what an operation copies, the device of `track` entered.
    fn with_pieces(
        &self,
        op: &LinkOp,
        memory: &Memory,
        done: Completion,
        track: &Track,
        act: impl FnOnce(&[Piece], Completion),
    ) {
        let pieces = match self.addresses.resolve(op, memory) {
            Ok(pieces) => pieces,
            Err(error) => return done.finish(Outcome::Failed { error: error.to_string() }),
        };
        match track.stream().device().enter() {
            Ok(_current) => act(&pieces, done),
            Err(error) => done.finish(Outcome::Failed { error: error.to_string() }),
        }
    }

    /// Copies by kernel.
    fn start(&self, op: &LinkOp, memory: &Memory, done: Completion) {
        self.with_pieces(op, memory, done, &self.track, |pieces, done| {
            let Some(table) = self.tables.fill(pieces) else {
                let error = format!("{} pieces do not fit into a list", pieces.len());
                return done.finish(Outcome::Failed { error });
            };
            let (stream, count) = (self.track.stream(), pieces.len() as u32);
            // SAFETY: the pieces were resolved from registered memory, which the mover keeps
            // registered and to itself until the operation is finished; the list is held until
            // then.
            let posted = unsafe { self.kernels.copy(stream, table.address(), count, op.bytes, PEER_BLOCKS) };
            finish_when_passed(&self.track, op.bytes, posted, done, table);
        });
    }
}

fn by_engine(track: &Track, pieces: &[Piece]) -> Result<(), CudaError> {
    for piece in pieces {
        // SAFETY: the pieces were resolved from registered memory, which the mover keeps registered
        // and to itself until the operation is finished.
        unsafe { track.stream().copy(piece.from, piece.to, piece.bytes)? };
    }
    Ok(())
}
