//! What clients of this node may have from other nodes: questions that sessions ask, and `peering`
//! answers.

use forebay_kv::ChunkId;
use forebay_store::{ReadGuard, TenantId};
use forebay_transfer::Class;
use std::time::Instant;

/// A chunk of which other nodes have a copy.
#[derive(Debug, Clone)]
pub struct PullRequest {
    pub tenant: TenantId,
    /// The chunk and those that follow it in its sequence and are likely to be wanted next.
    pub ids: Vec<ChunkId>,
    /// The chunk before it.
    pub parent: Option<ChunkId>,
    /// How urgent it is.
    pub class: Class,
    /// When it is of no use any more, in the mover's clock.
    pub deadline_us: Option<u64>,
}

/// Is told how many chunks there are.
pub type OnFound = Box<dyn FnOnce(usize) + Send>;
/// Is told of a chunk that is in this node's memory now, or why it is not.
pub type OnPulled = Box<dyn FnOnce(Result<ReadGuard, String>) + Send>;

pub trait RemoteNodes: Send + Sync {
    /// How many of `ids`, which follow what this node has, other nodes have. `on_found` is called
    /// exactly once, soon, on any thread.
    fn lookup(&self, tenant: TenantId, ids: &[ChunkId], on_found: OnFound);

    /// The same as far as it is known without asking.
    fn lookup_known(&self, tenant: TenantId, ids: &[ChunkId]) -> usize;

    /// Fetches the first chunk that is wanted into this node's memory, verified. `on_end` is called
    /// exactly once, on any thread.
    fn pull(&self, wanted: PullRequest, on_end: OnPulled);

    /// Chunks that were fetched, and that were to be.
    fn pulled(&self) -> (u64, u64);

    /// Leases nothing more to other nodes. What they have from this one stays leased.
    fn stop(&self);

    /// Waits until other nodes have nothing from this one, and says how many leases they have when
    /// the time is over.
    fn wait_until_back(&self, until: Instant) -> usize;
}
