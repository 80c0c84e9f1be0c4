//! Promotion: a chunk that is read whole from the disk goes to memory too. The disk reads it
//! straight into its slot where it can; else it is copied there from staging, behind the load that
//! it was read for.
//!
//! A copy needs a route from the store's place to itself; without one every such promotion fails,
//! and is counted.

use super::StoreInner;
use super::reserve::{ChunkName, Reservation};
use crate::shape::ChunkShape;
use crate::ssd::Staged;
use crate::stat::Refused;
use forebay_transfer::{Class, End, Span, Transfer};
use std::sync::Arc;
use thiserror::Error;

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
    /// Its bytes changed in memory while others were still to come.
    #[error("the chunk changed while it came into memory")]
    Corrupt,
}

/// A slot of memory for a chunk that comes from the disk. Nobody sees it before it is committed;
/// dropped, it gives its slot back.
pub(super) struct Promotion(Reservation);

/// Copies a chunk to memory if all of it is in `staged` and memory takes it in. `on_end` is called
/// once, on this thread or the mover's, or dropped if the mover has ended. If somebody waits for
/// the chunk (`is_awaited`), it takes the place of one that is being written.
pub(super) fn offer(
    shared: &Arc<StoreInner>,
    name: ChunkName,
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
    let pairs = shared.pairs_to_arena(&layers, promotion.pages().offset);
    // What the mover does not take drops the promotion.
    let _ = shared.mover.submit(Transfer::new(pairs, class), move |end| {
        on_end(promotion.copied(&end, &staged.crcs()));
    });
}

impl Promotion {
    /// Asks for a slot. `None`: the chunk is in memory already.
    pub fn begin(
        shared: &Arc<StoreInner>,
        name: ChunkName,
        shape: &ChunkShape,
        is_awaited: bool,
    ) -> Result<Option<Promotion>, NotPromoted> {
        let reserved = shared.reserve(name, shape, is_awaited);
        if reserved.is_err() {
            shared.count_promotion(|stat| &mut stat.refused);
        }
        Ok(reserved?.map(Promotion))
    }

    /// The whole pages of the slot, which the disk can read into.
    pub fn pages(&self) -> Span {
        let slot = self.0.slot();
        Span::new(self.0.shared.arena, slot.start, slot.end - slot.start)
    }

    /// All bytes are in the slot, and were the right ones on disk: the chunk becomes visible, with
    /// the CRC-32C of each layer.
    pub fn commit(mut self, checksums: &[u32]) -> Result<(), NotPromoted> {
        let visible = self.0.make_visible(checksums).is_ok();
        let (shared, ChunkName { tenant, id, .. }) = (&self.0.shared, self.0.name);
        // Whoever deleted it meanwhile cannot have found it in memory before it was there.
        let deleted = shared.disk.as_ref().is_some_and(|disk| !disk.ssd.contains(&id));
        if visible && deleted {
            shared.tier.lock().forget(tenant, &id);
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
        self.0.shared.count_promotion(|stat| &mut stat.failed);
        self.0.abandon(end);
        Err(NotPromoted::NotCopied)
    }

    /// The bytes did not get there. Those that a lost operation may still touch are nobody's until
    /// they are quiet.
    pub fn abandon(self, quarantined: &[Span]) {
        self.0.give_up(quarantined);
    }
}
