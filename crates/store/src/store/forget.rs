//! Forgetting: chunks that are to leave no byte. From the call on nobody finds them; who reads one
//! then reads to the end, and its bytes are overwritten when the last reader has gone, on a thread
//! of its own. What is on disk is journalled and overwritten there.
//!
//! The disk comes first: whoever brings a chunk from there into memory looks whether it is still
//! there when it has come.

use super::{Store, StoreInner};
use crate::tenant::TenantId;
use forebay_kv::ChunkId;
use forebay_transfer::Span;
use std::sync::Weak;
use std::sync::mpsc::Receiver;

impl Store {
    /// Drops these chunks, even if they are leased, pinned or being written, and has their bytes
    /// overwritten in memory and on disk. Says of each whether it was here. That it is gone from
    /// the disk is durable after a [`flush`](Store::flush).
    pub fn forget(&self, tenant: TenantId, ids: &[ChunkId]) -> Vec<bool> {
        let on_disk = self.shared.open_disk().map(|disk| disk.ssd.forget(tenant, ids));
        let mut tier = self.shared.tier.lock();
        let in_memory: Vec<bool> = ids.iter().map(|id| tier.forget(tenant, id)).collect();
        drop(tier);
        let on_disk = on_disk.unwrap_or_else(|| vec![false; ids.len()]);
        in_memory.into_iter().zip(on_disk).map(|(memory, disk)| memory || disk).collect()
    }

    /// Chunks of memory that are forgotten and whose bytes are not overwritten yet.
    pub fn to_overwrite(&self) -> usize {
        self.shared.tier.lock().to_overwrite()
    }
}

/// The thread that overwrites. It keeps nothing alive while it waits.
pub(super) fn overwrite_all(shared: Weak<StoreInner>, rings: Receiver<()>) {
    for () in rings {
        let Some(shared) = shared.upgrade() else { return };
        shared.overwrite_next();
    }
}

impl StoreInner {
    /// Overwrites one slot that nobody uses any more, if there is one.
    fn overwrite_next(&self) {
        let Some(wipe) = self.tier.lock().next_wipe() else { return };
        let span = Span::new(self.arena, wipe.offset_bytes, wipe.bytes);
        if !self.mover.memory().zero(&span) {
            tracing::error!(offset = wipe.offset_bytes, bytes = wipe.bytes, "bytes not overwritten");
        }
        self.tier.lock().end_wipe(wipe);
    }
}
