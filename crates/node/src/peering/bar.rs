//! A bar against chunks that were forgotten a moment ago: a peer that has yet to forget one would
//! give it back. It is up until every peer that is asked has forgotten the chunk, or is known not
//! to have answered. Sans-IO: time is an argument. It must never hold more than its number.

use forebay_kv::ChunkId;
use forebay_store::TenantId;
use std::collections::HashSet;
use thiserror::Error;

/// How long peers may take to forget chunks. Clients wait for a node's answer for 2 s.
pub const FORGET_LIMIT_US: u64 = 1_000_000;
/// For how long at least a chunk is barred, and at most twice as long. Peers are asked a moment
/// after the bar is up.
const BARRED_US: u64 = 2 * FORGET_LIMIT_US;
/// Chunks in each half: sixteen of the longest requests.
const CHUNKS_MAX: usize = 262_144;

/// Chunks that may not be asked for. The younger half takes in, the older one goes in its time.
#[derive(Debug, Default)]
pub struct Bar {
    young: HashSet<(TenantId, ChunkId)>,
    old: HashSet<(TenantId, ChunkId)>,
    since_us: u64,
}

/// As many chunks are barred as may be.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[error("{CHUNKS_MAX} chunks were forgotten a moment ago; no more may be")]
pub struct TooMany;

impl Bar {
    /// Bars these chunks, or none of them.
    pub fn add(&mut self, now_us: u64, tenant: TenantId, ids: &[ChunkId]) -> Result<(), TooMany> {
        self.age(now_us);
        if self.young.len() + ids.len() > CHUNKS_MAX {
            return Err(TooMany);
        }
        self.young.extend(ids.iter().map(|id| (tenant, *id)));
        Ok(())
    }

    pub fn has(&mut self, now_us: u64, tenant: TenantId, id: &ChunkId) -> bool {
        self.age(now_us);
        [&self.young, &self.old].iter().any(|half| half.contains(&(tenant, *id)))
    }

    fn age(&mut self, now_us: u64) {
        let passed_us = now_us.saturating_sub(self.since_us);
        if passed_us < BARRED_US {
            return;
        }
        self.old = std::mem::take(&mut self.young);
        if passed_us >= 2 * BARRED_US {
            self.old = HashSet::new();
        }
        self.since_us = now_us;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TENANT: TenantId = TenantId(3);
    const ID: ChunkId = ChunkId::from_bytes([1; 32]);

    #[test]
    fn a_chunk_is_barred_until_all_peers_have_forgotten_it_and_not_for_ever() {
        for added_us in [0, 1, BARRED_US - 1, BARRED_US, 7 * BARRED_US + 5] {
            let mut bar = Bar::default();
            bar.add(added_us, TENANT, &[ID]).unwrap();
            for later_us in [0, BARRED_US / 2, BARRED_US - 1] {
                assert!(bar.has(added_us + later_us, TENANT, &ID), "{added_us} {later_us}");
            }
            assert!(!bar.has(added_us, TenantId(4), &ID), "another tenant's");
            assert!(!bar.has(added_us + 2 * BARRED_US, TENANT, &ID), "{added_us}");
        }
    }

    #[test]
    fn what_is_too_much_is_refused_as_a_whole_and_taken_later() {
        let id = |number: usize| {
            let mut bytes = [0; 32];
            bytes[..8].copy_from_slice(&number.to_le_bytes());
            ChunkId::from_bytes(bytes)
        };
        let most: Vec<ChunkId> = (0..CHUNKS_MAX).map(id).collect();
        let mut bar = Bar::default();
        bar.add(0, TENANT, &most[1..]).unwrap();
        assert_eq!(bar.add(0, TENANT, &[most[0], id(CHUNKS_MAX)]), Err(TooMany));
        assert!(!bar.has(0, TENANT, &most[0]));
        assert_eq!(bar.add(BARRED_US, TENANT, &most), Ok(()));
    }
}
