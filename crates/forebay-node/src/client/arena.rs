//! The arena of a node as its clients map it: for those who copy by themselves, a GPU's copy engines say, and have to register
//! the memory first. This file knows which memory belongs to which life of a node; it must never know what lies there.

use forebay_mover::{Backing, RegionId, Span};
use forebay_store::Arena;
use std::sync::Arc;

/// The memory of one life of a node. It stays mapped as long as somebody holds it, also when the node is gone.
#[derive(Debug)]
pub struct NodeArena {
    pub(super) region: RegionId,
    pub(super) memory: Arc<Arena>,
    pub(super) instance: [u8; 16],
}

impl NodeArena {
    /// What it is to the client's mover, until nothing of the client uses it and the node is gone.
    pub fn region(&self) -> RegionId {
        self.region
    }

    /// Its pages, mapped. Who keeps them, without the arena, learns by a [`Weak`](std::sync::Weak) arena when the client is
    /// done with it.
    pub fn memory(&self) -> &Arc<Arena> {
        &self.memory
    }

    /// Its length.
    pub fn bytes(&self) -> u64 {
        self.memory.len() as u64
    }

    /// Which life of the node it belongs to.
    pub fn instance(&self) -> [u8; 16] {
        self.instance
    }

    /// `len` bytes at `offset`, if they are inside.
    pub(super) fn span(&self, offset: u64, len: u64) -> Option<Span> {
        let end = offset.checked_add(len)?;
        (end <= self.bytes()).then(|| Span::new(self.region, offset, len))
    }
}
