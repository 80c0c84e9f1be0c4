//! A stream copy that is to be queued: what is copied, over which paths, and what it waits for.

use super::pages::{Pages, are_shorter};
use super::submit_pool::SubmitPool;
use crate::device::{Event, StreamId};
use crate::driver::abi::{Address, StreamHandle};
use crate::links::ENGINE_PIECE_BYTES;
use std::ops::Range;

/// A stream copy to be queued.
#[derive(Debug)]
pub struct StreamCopy<'a> {
    /// A stream of the target's context, in which the direct path's copies are queued.
    pub stream: StreamHandle,
    /// The stream that goes on when all of the stream copy is over. For a caller's stream copy it
    /// is the same one.
    pub joined: StreamHandle,
    /// Which one that is: by this the path set and its pipelines are held.
    pub holder: StreamId,
    pub pages: Pages<'a>,
    /// Where pieces that touch are two all the same: see [`KernelList`].
    pub seams: &'a [Address],
    /// Whether peers reach the target's side.
    pub peers_reach: bool,
    /// Whether host memory is in pieces too small for a copy engine. There are no pipelines then.
    pub is_scattered: bool,
    /// If the GPU computes nothing meanwhile but what waits for this: how many bytes it waits for,
    /// of which these are some.
    pub awaited_bytes: Option<u64>,
    /// Where its lists may be, as [`PathSet::room_for`] said.
    pub places: Range<usize>,
    pub waits: Waits<'a>,
    /// Who queues what its pipelines do, each pipeline's beside the others'. Without them the
    /// caller does.
    pub submit_pool: Option<&'a SubmitPool>,
}

/// What a stream copy waits for.
#[derive(Debug, Clone, Copy)]
pub enum Waits<'a> {
    Nothing,
    /// Until its stream has come to where the path set was taken. The direct path is in that
    /// stream.
    Stream,
    /// An event that is somebody else's.
    For(&'a Event),
}

/// Whether these are pages too small for a copy engine.
pub fn is_small(pieces: usize, bytes: u64) -> bool {
    are_shorter(ENGINE_PIECE_BYTES, pieces, bytes)
}
