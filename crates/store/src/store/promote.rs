//! Promotion: a chunk that is read whole from the disk goes to memory too. The disk reads it
//! straight into its slot where it can; else it is copied there from staging, behind the load that
//! it was read for.
//!
//! A copy needs a route from the store's place to itself; without one every such promotion fails,
//! and is counted.

use super::{Shared, quarantined};
use crate::lost::bytes_in;
use crate::shape::ChunkShape;
use crate::slots::slot_bytes;
use crate::ssd::Staged;
use crate::stat::Refused;
use crate::tenant::TenantId;
use crate::tier::{Begun, Write};
use forebay_kv::ChunkId;
use forebay_transfer::{Class, End, Span, Transfer};
use std::ops::Range;
use std::sync::Arc;
use thiserror::Error;

/// What a chunk is called.
#[derive(Debug, Clone, Copy)]
pub(super) struct Name {
    pub tenant: TenantId,
    pub id: ChunkId,
    pub parent: Option<ChunkId>,
}

/// What became of chunks that were read whole from the disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PromotionStat {
    /// In memory since then.
    pub promoted: u64,
    /// Not taken in by the memory tier, for example because it is full of what is in use.
    pub refused: u64,
    /// Not copied, or deleted meanwhile.
    pub failed: u64,
}

/// Why a chunk that was read from the disk is not in memory.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum NotPromoted {
    #[error("not taken into memory: {0}")]
    Refused(#[from] Refused),
    #[error("not copied from the disk's staging to memory")]
    NotCopied,
    /// It was there, and is gone: deleted, or evicted at once.
    #[error("the chunk was deleted or evicted while it came into memory")]
    Gone,
}

/// A slot of memory for a chunk that comes from the disk. Nobody sees it before it is committed;
/// dropped, it gives its slot back.
pub(super) struct Promotion {
    shared: Arc<Shared>,
    name: Name,
    write: Option<Write>,
}

/// Copies a chunk to memory if all of it is in `staged` and memory takes it in. `on_end` is called
/// once, on this thread or the mover's, or dropped if the mover has ended. If somebody waits for
/// the chunk (`is_awaited`), it takes the place of one that is being written.
pub(super) fn offer(
    shared: &Arc<Shared>,
    name: Name,
    staged: Arc<Staged>,
    class: Class,
    is_awaited: bool,
    on_end: impl FnOnce(Result<(), NotPromoted>) + Send + 'static,
) {
    let layers = staged.layers();
    if layers != (0..staged.chunk_layers()) {
        return on_end(Err(NotPromoted::NotCopied));
    }
    let spans: Vec<Span> = layers.filter_map(|layer| staged.span(layer)).collect();
    let Ok(shape) = ChunkShape::new(spans.iter().map(|span| span.len)) else {
        return on_end(Err(NotPromoted::NotCopied));
    };
    let promotion = match Promotion::begin(shared, name, &shape, is_awaited) {
        Ok(Some(promotion)) => promotion,
        Ok(None) => return on_end(Ok(())),
        Err(error) => return on_end(Err(error)),
    };
    let layers: Vec<Vec<Span>> = spans.into_iter().map(|span| vec![span]).collect();
    let pairs = shared.pairs_to_arena(&layers, promotion.slot().start);
    // What the mover does not take drops the promotion.
    let _ = shared.mover.submit(Transfer::new(pairs, class), move |end| {
        on_end(promotion.copied(&end, &staged.crcs()));
    });
}

impl Promotion {
    /// Asks for a slot. `None`: the chunk is in memory already.
    pub fn begin(
        shared: &Arc<Shared>,
        name: Name,
        shape: &ChunkShape,
        is_awaited: bool,
    ) -> Result<Option<Promotion>, NotPromoted> {
        let Name { tenant, id, parent } = name;
        let begun = match is_awaited {
            true => shared.begin_write_over(tenant, &id, parent.as_ref(), shape),
            false => shared.begin_write(tenant, &id, parent.as_ref(), shape),
        };
        match begun {
            Ok(Begun::AlreadyHere) => Ok(None),
            Ok(Begun::Write(write)) => {
                Ok(Some(Promotion { shared: Arc::clone(shared), name, write: Some(write) }))
            }
            Err(refused) => {
                shared.count_promotion(|stat| &mut stat.refused);
                Err(refused.into())
            }
        }
    }

    /// The whole pages of the slot, which the disk can read into.
    pub fn pages(&self) -> Span {
        let slot = self.slot();
        Span::new(self.shared.arena, slot.start, slot.end - slot.start)
    }

    fn slot(&self) -> Range<u64> {
        let place = |write: &Write| (write.offset_bytes(), slot_bytes(write.shape()));
        let (start, bytes) = self.write.as_ref().map_or((0, 0), place);
        start..start + bytes
    }

    /// All bytes are in the slot, and were the right ones on disk: the chunk becomes visible, with
    /// the CRC-32C of each layer.
    pub fn commit(mut self, checksums: &[u32]) -> Result<(), NotPromoted> {
        let Some(write) = self.write.take() else { return Err(NotPromoted::Gone) };
        let shared = &self.shared;
        let visible = shared.tier.lock().commit(shared.now_us(), write, checksums).is_ok();
        let Name { tenant, id, .. } = self.name;
        // Whoever deleted it meanwhile cannot have found it in memory before it was there.
        let deleted = shared.disk.as_ref().is_some_and(|disk| !disk.ssd.contains(&id));
        if visible && deleted {
            shared.tier.lock().delete(tenant, &[id]);
        }
        let there = visible && !deleted;
        shared.count_promotion(|stat| if there { &mut stat.promoted } else { &mut stat.failed });
        if there { Ok(()) } else { Err(NotPromoted::Gone) }
    }

    /// A copy to the slot, or from it, has ended. The checksums are those of the disk: what a copy
    /// got wrong is found by whoever loads the chunk.
    pub fn copied(self, end: &End, checksums: &[u32]) -> Result<(), NotPromoted> {
        if matches!(end, End::Done { .. }) {
            return self.commit(checksums);
        }
        self.shared.count_promotion(|stat| &mut stat.failed);
        self.abandon(quarantined(end));
        Err(NotPromoted::NotCopied)
    }

    /// The bytes did not get there. Those that a lost operation may still touch are nobody's until
    /// they are quiet.
    pub fn abandon(mut self, quarantined: &[Span]) {
        self.abort(bytes_in(self.shared.arena, &self.slot(), quarantined));
    }

    fn abort(&mut self, lost_bytes: u64) {
        if let Some(write) = self.write.take() {
            self.shared.tier.lock().abort(self.shared.now_us(), write, lost_bytes);
        }
    }
}

impl Drop for Promotion {
    fn drop(&mut self) {
        self.abort(0);
    }
}
