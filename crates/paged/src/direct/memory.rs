//! The contract of who copies pages between two engines' caches, and who says where this one's lie.

use super::message::{Heads, Memory, Opened};
use super::plan::Move;
use crate::errors::NotCopied;
use crate::page_tables::PageTables;
use forebay_cuda::device::Event;
use forebay_net::LeasedSpan;
use std::fmt::Debug;
use std::sync::Arc;

/// Called exactly once, on any thread, with a checksum for each layer, when nothing touches the
/// pages any more. It is short.
pub type OnSummed = Box<dyn FnOnce(Result<Vec<u64>, NotCopied>) + Send>;

/// Where the engine's stream was when a read began. Of host memory nothing is said: there the
/// engine is at rest when it begins one.
pub type Begun = Option<Arc<Event>>;

/// A peer's pages that are read.
#[derive(Debug)]
pub struct Offered {
    /// The peer's name. A process that comes after it may have the same.
    pub peer: String,
    pub opened: Opened,
}

/// Pages of this cache that are filled, listed by group, and which heads of them.
#[derive(Debug)]
pub struct Arriving {
    pub pages: Arc<Vec<Vec<u64>>>,
    pub heads: Heads,
}

pub trait DirectMemory: Send + Sync + Debug {
    /// Where this cache's layers lie, for peers.
    fn memory(&self) -> &Memory;

    /// The spans that a lease of these pages covers; none where the lease alone is what counts.
    fn spans(&self, tables: &PageTables) -> Vec<LeasedSpan>;

    /// The engine's `stream` has come to where a read begins.
    fn begin(&self, stream: u64) -> Result<Begun, NotCopied>;

    /// Copies a peer's pages into this cache's, behind `begun`, and sums up what arrives as
    /// [`sum`](DirectMemory::sum) does. May take a while, not on a thread of the network.
    fn copy(
        self: Arc<Self>,
        offered: &Offered,
        moves: Vec<Move>,
        begun: Begun,
        arriving: Arriving,
        on_summed: OnSummed,
    );

    /// Sums up these heads of pages of this cache, listed by group, each layer by itself. The same
    /// bytes in as many pages of another cache of such layers and this kind of memory have the same
    /// sums. May take a while, not on a thread of the network.
    fn sum(&self, pages: &[Vec<u64>], heads: Heads, on_summed: OnSummed);

    /// Lets go of what peers have that are gone, and says whether anything is left of others.
    fn forget_peers(&self, _is_gone: &dyn Fn(&str) -> bool) -> bool {
        false
    }

    /// Nothing is read any more and nobody reads.
    fn close(&self) {}
}
