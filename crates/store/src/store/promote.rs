//! Promotion: a chunk that was read whole from the disk goes to memory too, behind the load that it was read for. This file
//! knows the copy and its end; it must never know who loaded the chunk.
//!
//! That needs a route from the store's place to itself; without one every promotion fails, and is counted.

use super::Shared;
use crate::shape::ChunkShape;
use crate::ssd::Staged;
use crate::stat::Refused;
use crate::tenant::TenantId;
use crate::tier::{Begun, Write};
use forebay_kv::ChunkId;
use forebay_transfer::{Class, End, Span, Transfer};
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
    /// The memory tier does not take it in.
    #[error("not taken into memory: {0}")]
    Refused(#[from] Refused),
    /// It was not copied.
    #[error("not copied from the disk's staging to memory")]
    NotCopied,
    /// It was there, and is gone: deleted, or evicted at once.
    #[error("the chunk was deleted or evicted while it came into memory")]
    Gone,
}

type OnEnd = Box<dyn FnOnce(Result<(), NotPromoted>) + Send>;

/// A chunk on its way to memory. Dropped before it is there, it gives its slot back and says that it failed.
struct Promotion {
    shared: Arc<Shared>,
    name: Name,
    write: Option<Write>,
    sums: Vec<u32>,
    on_end: Option<OnEnd>,
    /// Where it is copied from.
    _staged: Arc<Staged>,
}

/// Copies a chunk to memory if all of it is in `staged` and memory takes it in. `on_end` is called exactly once, on this
/// thread or the mover's. If somebody waits for the chunk (`is_awaited`), it takes the place of one that is being written.
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
    let spans: Vec<Span> = layers.clone().filter_map(|layer| staged.span(layer)).collect();
    let sums = layers.filter_map(|layer| staged.crc(layer)).collect();
    let Ok(shape) = ChunkShape::new(spans.iter().map(|span| span.len)) else {
        return on_end(Err(NotPromoted::NotCopied));
    };
    let Name { tenant, id, parent } = name;
    let begun = match is_awaited {
        true => shared.begin_write_over(tenant, &id, parent.as_ref(), &shape),
        false => shared.begin_write(tenant, &id, parent.as_ref(), &shape),
    };
    let write = match begun {
        Ok(Begun::Write(write)) => write,
        Ok(Begun::AlreadyHere) => return on_end(Ok(())),
        Err(refused) => {
            shared.count_promotion(|stat| &mut stat.refused);
            return on_end(Err(refused.into()));
        }
    };
    let layers: Vec<Vec<Span>> = spans.into_iter().map(|span| vec![span]).collect();
    let pairs = shared.pairs_to_arena(&layers, write.offset_bytes());
    let (shared, on_end): (_, OnEnd) = (Arc::clone(shared), Box::new(on_end));
    let mover = shared.mover.clone();
    let promotion =
        Promotion { shared, name, write: Some(write), sums, on_end: Some(on_end), _staged: staged };
    // What the mover does not take drops the promotion.
    let _ = mover.submit(Transfer::new(pairs, class), move |end| promotion.copied(&end));
}

impl Promotion {
    /// The copy has ended; on the mover's thread. The sums are those of the disk: what the copy got wrong is found by
    /// whoever loads it.
    fn copied(mut self, end: &End) {
        if !matches!(end, End::Done { .. }) {
            return self.abort(self.shared.lost_bytes(end));
        }
        let Some(write) = self.write.take() else { return };
        let shared = &self.shared;
        let visible = shared.tier.lock().commit(shared.now_us(), write, &self.sums).is_ok();
        let Name { tenant, id, .. } = self.name;
        // Whoever deleted it meanwhile cannot have found it in memory before it was there.
        let deleted = shared.disk.as_ref().is_some_and(|disk| !disk.ssd.contains(&id));
        if visible && deleted {
            shared.tier.lock().delete(tenant, &[id]);
        }
        let there = visible && !deleted;
        shared.count_promotion(|stat| if there { &mut stat.promoted } else { &mut stat.failed });
        if let Some(on_end) = self.on_end.take() {
            on_end(if there { Ok(()) } else { Err(NotPromoted::Gone) });
        }
    }

    fn abort(&mut self, lost_bytes: u64) {
        if let Some(write) = self.write.take() {
            self.shared.tier.lock().abort(self.shared.now_us(), write, lost_bytes);
            self.shared.count_promotion(|stat| &mut stat.failed);
        }
        if let Some(on_end) = self.on_end.take() {
            on_end(Err(NotPromoted::NotCopied));
        }
    }
}

impl Drop for Promotion {
    fn drop(&mut self) {
        self.abort(0);
    }
}
