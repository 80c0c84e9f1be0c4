//! What was learned lately of chunks that peers have: who said that it has which, where the
//! directory does not know, and which of them this node can never take, since no slab holds them.
//! Whoever is told of such a chunk asks for it and gets nothing, time after time. Sans-IO: time is
//! an argument. It forgets by age and by number; it must never be asked for more than a hint.

use forebay_kv::ChunkId;
use forebay_store::TenantId;
use std::collections::{HashMap, HashSet};

/// Chunks that are remembered at most, of each half.
const CHUNKS_MAX: usize = 65_536;
/// For how long at least, unless there are too many; and at most twice as long.
const AGE_US: u64 = 5_000_000;

type Half = HashMap<(TenantId, ChunkId), Vec<String>>;

/// What was learned. Two halves each: the younger one takes in, the older one goes when the younger
/// is full or, of what peers said, old.
#[derive(Debug, Default)]
pub struct Hints {
    young: Half,
    old: Half,
    since_us: u64,
    unfit: [HashSet<(TenantId, ChunkId)>; 2],
}

impl Hints {
    /// A peer said that it has these chunks.
    pub fn note(&mut self, now_us: u64, tenant: TenantId, ids: &[ChunkId], peer: &str) {
        for id in ids {
            self.age(now_us);
            let peers = self.young.entry((tenant, *id)).or_default();
            if !peers.iter().any(|known| known == peer) {
                peers.push(peer.to_owned());
            }
        }
    }

    /// A peer that was said to have a chunk does not give it.
    pub fn deny(&mut self, tenant: TenantId, id: &ChunkId, peer: &str) {
        for half in [&mut self.young, &mut self.old] {
            if let Some(peers) = half.get_mut(&(tenant, *id)) {
                peers.retain(|known| known != peer);
            }
        }
    }

    pub fn peers(&mut self, now_us: u64, tenant: TenantId, id: &ChunkId) -> Vec<String> {
        self.age(now_us);
        let halves = [&self.young, &self.old].into_iter().filter_map(|half| half.get(&(tenant, *id)));
        let mut peers: Vec<String> = halves.flatten().cloned().collect();
        peers.sort_unstable();
        peers.dedup();
        peers
    }

    /// How many chunks, from the first on, somebody has.
    pub fn prefix(&mut self, now_us: u64, tenant: TenantId, ids: &[ChunkId]) -> usize {
        ids.iter().take_while(|id| !self.peers(now_us, tenant, id).is_empty()).count()
    }

    /// A chunk does not fit.
    pub fn note_unfit(&mut self, tenant: TenantId, id: ChunkId) {
        let [young, old] = &mut self.unfit;
        if young.len() >= CHUNKS_MAX {
            *old = std::mem::take(young);
        }
        young.insert((tenant, id));
    }

    /// The chunks before the first one that does not fit.
    pub fn before_unfit<'a>(&self, tenant: TenantId, ids: &'a [ChunkId]) -> &'a [ChunkId] {
        let is_unfit = |id: &ChunkId| self.unfit.iter().any(|half| half.contains(&(tenant, *id)));
        &ids[..ids.iter().position(is_unfit).unwrap_or(ids.len())]
    }

    fn age(&mut self, now_us: u64) {
        if self.young.len() >= CHUNKS_MAX || now_us.saturating_sub(self.since_us) >= AGE_US {
            self.old = std::mem::take(&mut self.young);
            // What is older than both halves is not to come back.
            if now_us.saturating_sub(self.since_us) >= 2 * AGE_US {
                self.old.clear();
            }
            self.since_us = now_us;
        }
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
    fn a_prefix_ends_at_the_first_chunk_that_nobody_has() {
        let mut known = Hints::default();
        known.note(0, TENANT, &[id(0), id(1)], "left");
        known.note(0, TENANT, &[id(1), id(3)], "right");
        let ids: Vec<ChunkId> = (0..4).map(id).collect();
        assert_eq!(known.prefix(1, TENANT, &ids), 2);
        assert_eq!(known.peers(1, TENANT, &id(1)), ["left", "right"]);
        known.deny(TENANT, &id(0), "left");
        assert_eq!(known.prefix(1, TENANT, &ids), 0);
        assert_eq!(known.prefix(1, TenantId(1), &ids[1..]), 0, "another tenant's are another's");
    }

    #[test]
    fn what_was_said_is_forgotten() {
        let mut known = Hints::default();
        known.note(0, TENANT, &[id(0)], "left");
        assert_eq!(known.prefix(AGE_US, TENANT, &[id(0)]), 1);
        assert_eq!(known.prefix(2 * AGE_US, TENANT, &[id(0)]), 0);
        for number in 0..3 * CHUNKS_MAX as u32 {
            known.note(3 * AGE_US, TENANT, &[id(number)], "left");
        }
        assert!(known.young.len() + known.old.len() <= 2 * CHUNKS_MAX);
    }

    #[test]
    fn a_sequence_ends_before_the_first_chunk_that_does_not_fit() {
        let mut known = Hints::default();
        let ids: Vec<ChunkId> = (0..4).map(id).collect();
        assert_eq!(known.before_unfit(TENANT, &ids), ids);
        [3, 2, 2].into_iter().for_each(|number| known.note_unfit(TENANT, id(number)));
        assert_eq!(known.before_unfit(TENANT, &ids), &ids[..2]);
        assert_eq!(known.before_unfit(TenantId(1), &ids), ids, "another tenant's are another's");
    }

    #[test]
    fn of_the_chunks_that_do_not_fit_the_oldest_are_forgotten() {
        let mut known = Hints::default();
        (0..=2 * CHUNKS_MAX as u32).for_each(|number| known.note_unfit(TENANT, id(number)));
        assert!(known.unfit.iter().map(HashSet::len).sum::<usize>() <= 2 * CHUNKS_MAX);
        assert_eq!(known.before_unfit(TENANT, &[id(0), id(CHUNKS_MAX as u32)]), [id(0)]);
    }
}
