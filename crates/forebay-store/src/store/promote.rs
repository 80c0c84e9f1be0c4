//! Promotion: a chunk that was read whole from the disk goes to memory too, behind the load that it was read for. This file
//! knows the copy and its end; it must never know who loaded the chunk.
//!
//! That needs a route from the store's place to itself; without one every promotion fails, and is counted.

use super::Shared;
use crate::shape::ChunkShape;
use crate::ssd::Staged;
use crate::tenant::TenantId;
use crate::tier::{Begun, Write};
use forebay_kv::ChunkId;
use forebay_mover::{Class, End, Span, Transfer};
use std::sync::Arc;

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

/// A chunk on its way to memory. Dropped before it is there, it gives its slot back.
#[derive(Debug)]
struct Promotion {
    shared: Arc<Shared>,
    name: Name,
    write: Option<Write>,
    sums: Vec<u32>,
    /// Where it is copied from.
    _staged: Arc<Staged>,
}

/// Copies a chunk to memory if all of it is in `staged` and memory takes it in.
pub(super) fn offer(shared: &Arc<Shared>, name: Name, staged: Arc<Staged>) {
    let layers = staged.layers();
    if layers != (0..staged.chunk_layers()) {
        return;
    }
    let spans: Vec<Span> = layers.clone().filter_map(|layer| staged.span(layer)).collect();
    let sums = layers.filter_map(|layer| staged.crc(layer)).collect();
    let Ok(shape) = ChunkShape::new(spans.iter().map(|span| span.len)) else { return };
    let Name { tenant, id, parent } = name;
    let write = match shared.begin_write(tenant, &id, parent.as_ref(), &shape) {
        Ok(Begun::Write(write)) => write,
        Ok(Begun::AlreadyHere) => return,
        Err(_) => return shared.count_promotion(|stat| &mut stat.refused),
    };
    let layers: Vec<Vec<Span>> = spans.into_iter().map(|span| vec![span]).collect();
    let pairs = shared.pairs_to_arena(&layers, write.offset_bytes());
    let promotion = Promotion { shared: Arc::clone(shared), name, write: Some(write), sums, _staged: staged };
    // What the mover does not take drops the promotion.
    let _ = shared.mover.submit(Transfer::new(pairs, Class::Prefetch), move |end| promotion.copied(&end));
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
        let visible = shared.tier().commit(shared.now_us(), write, &self.sums).is_ok();
        let Name { tenant, id, .. } = self.name;
        // Whoever deleted it meanwhile cannot have found it in memory before it was there.
        let deleted = shared.disk.as_ref().is_some_and(|disk| !disk.ssd.contains(&id));
        if visible && deleted {
            shared.tier().delete(tenant, &[id]);
        }
        shared
            .count_promotion(|stat| if visible && !deleted { &mut stat.promoted } else { &mut stat.failed });
    }

    fn abort(&mut self, lost_bytes: u64) {
        if let Some(write) = self.write.take() {
            self.shared.tier().abort(self.shared.now_us(), write, lost_bytes);
            self.shared.count_promotion(|stat| &mut stat.failed);
        }
    }
}

impl Drop for Promotion {
    fn drop(&mut self) {
        self.abort(0);
    }
}
