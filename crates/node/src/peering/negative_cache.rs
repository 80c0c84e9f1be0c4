//! Chunks of peers that this node can never take, since no slab holds them. Whoever is told of one
//! asks for it and gets nothing, time after time; so one refusal is remembered as long as there is
//! room. Pure: this file must never know why a chunk does not fit.

use forebay_kv::ChunkId;
use forebay_store::TenantId;
use std::collections::{HashSet, VecDeque};

/// Chunks that are remembered at most.
const CHUNKS_MAX: usize = 65_536;

/// The chunks that did not fit, the last ones of them.
#[derive(Debug, Default)]
pub struct NegativeCache {
    chunks: HashSet<(TenantId, ChunkId)>,
    order: VecDeque<(TenantId, ChunkId)>,
}

impl NegativeCache {
    /// A chunk does not fit.
    pub fn note(&mut self, tenant: TenantId, id: ChunkId) {
        if !self.chunks.insert((tenant, id)) {
            return;
        }
        self.order.push_back((tenant, id));
        if self.order.len() > CHUNKS_MAX
            && let Some(oldest) = self.order.pop_front()
        {
            self.chunks.remove(&oldest);
        }
    }

    /// The chunks before the first one that does not fit.
    pub fn before<'a>(&self, tenant: TenantId, ids: &'a [ChunkId]) -> &'a [ChunkId] {
        if self.chunks.is_empty() {
            return ids;
        }
        let end = ids.iter().position(|id| self.chunks.contains(&(tenant, *id)));
        &ids[..end.unwrap_or(ids.len())]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TENANT: TenantId = TenantId(0);

    fn id(number: u32) -> ChunkId {
        let mut bytes = [0; 32];
        bytes[..4].copy_from_slice(&number.to_le_bytes());
        ChunkId::from_bytes(bytes)
    }

    #[test]
    fn a_sequence_ends_before_the_first_chunk_that_does_not_fit() {
        let mut negative_cache = NegativeCache::default();
        let ids: Vec<ChunkId> = (0..4).map(id).collect();
        assert_eq!(negative_cache.before(TENANT, &ids), ids);
        [3, 2, 2].into_iter().for_each(|number| negative_cache.note(TENANT, id(number)));
        assert_eq!(negative_cache.before(TENANT, &ids), &ids[..2]);
        assert_eq!(negative_cache.before(TenantId(1), &ids), ids, "another tenant's are another's");
    }

    #[test]
    fn the_oldest_are_forgotten() {
        let mut negative_cache = NegativeCache::default();
        (0..=CHUNKS_MAX as u32).for_each(|number| negative_cache.note(TENANT, id(number)));
        assert_eq!((negative_cache.chunks.len(), negative_cache.order.len()), (CHUNKS_MAX, CHUNKS_MAX));
        assert_eq!(negative_cache.before(TENANT, &[id(0), id(1)]), [id(0)]);
    }
}
