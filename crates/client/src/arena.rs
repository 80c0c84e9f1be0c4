//! The arena of a node as its clients map it: for those who copy by themselves, a GPU's copy
//! engines say, and have to register the memory first.

use forebay_transfer::Arena;
use forebay_transfer::lock::Mutex;
use forebay_transfer::{Backing, RegionId, Span};
use std::fmt::{self, Debug, Formatter};
use std::sync::Arc;

/// Called when an arena is gone, on whichever thread held it last. It is short, and does not wait
/// for anything.
pub type OnGone = Box<dyn FnOnce() + Send>;

/// Called with each arena that comes, on one of the client's threads. It is short, and does not
/// wait for anything.
pub type OnArena = Box<dyn Fn(&Arc<NodeArena>) + Send + Sync>;

/// The memory of one life of a node. It stays mapped as long as somebody holds it, also when the
/// node is gone.
pub struct NodeArena {
    pub(super) region: RegionId,
    pub(super) memory: Arc<Arena>,
    pub(super) instance: [u8; 16],
    on_gone: Mutex<Vec<OnGone>>,
}

impl NodeArena {
    pub(super) fn new(region: RegionId, memory: Arc<Arena>, instance: [u8; 16]) -> NodeArena {
        NodeArena { region, memory, instance, on_gone: Mutex::default() }
    }

    /// What it is to the client's mover, until nothing of the client uses it and the node is gone.
    pub fn region(&self) -> RegionId {
        self.region
    }

    /// Its pages, mapped. Who keeps them, without the arena, is told by
    /// [`when_gone`](NodeArena::when_gone) when the client is done with it.
    pub fn memory(&self) -> &Arc<Arena> {
        &self.memory
    }
    pub fn bytes(&self) -> u64 {
        self.memory.len() as u64
    }

    /// Which life of the node it belongs to.
    pub fn instance(&self) -> [u8; 16] {
        self.instance
    }

    /// Has `on_gone` called when nobody holds this any more: its node is gone, and nothing uses its
    /// memory.
    pub fn when_gone(&self, on_gone: OnGone) {
        self.on_gone.lock().push(on_gone);
    }

    /// `len` bytes at `offset`, if they are inside.
    pub(super) fn span(&self, offset: u64, len: u64) -> Option<Span> {
        let end = offset.checked_add(len)?;
        (end <= self.bytes()).then(|| Span::new(self.region, offset, len))
    }
}

impl Drop for NodeArena {
    fn drop(&mut self) {
        let on_gone = std::mem::take(&mut *self.on_gone.lock());
        on_gone.into_iter().for_each(|on_gone| on_gone());
    }
}

impl Debug for NodeArena {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        f.debug_struct("NodeArena")
            .field("region", &self.region)
            .field("bytes", &self.bytes())
            .finish_non_exhaustive()
    }
}

/// Bytes of all spans. A sum that cannot be fits nothing, whatever number stands for it.
pub(super) fn span_bytes(spans: &[Span]) -> u64 {
    spans.iter().fold(0, |sum, span| sum.saturating_add(span.len))
}
