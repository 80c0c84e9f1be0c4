//! What a tier knows of a chunk, for people who ask. Looking is no use.

use super::{SlotAllocator, Tier};
use crate::tenant::TenantId;
use forebay_kv::ChunkId;

#[derive(Debug, Clone, Copy)]
pub(crate) struct KnownChunk {
    /// Its bytes are here.
    pub is_resident: bool,
    pub owner: TenantId,
    /// Whether a chunk that is known here continues it.
    pub is_continued: bool,
}

impl<S: SlotAllocator> Tier<S> {
    pub(crate) fn known(&self, id: &ChunkId) -> Option<KnownChunk> {
        let row = self.index.find(id)?;
        let entry = self.entry(row);
        let (is_resident, is_continued) = (entry.is_resident(), !self.tree.is_leaf(row));
        Some(KnownChunk { is_resident, owner: entry.tenant, is_continued })
    }
}
