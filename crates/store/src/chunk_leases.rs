//! The leases on chunks of a tier: who may read which of them until when. A lease ends here and
//! nowhere else in the store: by its time, in [`expire`](ChunkLeases::expire), or earlier, in
//! [`end`](ChunkLeases::end), when its holder drops it. Users hold [`Lease`](crate::Lease) and
//! [`DiskLease`](crate::ssd::DiskLease), which name one by its [`LeaseId`].

use crate::entry::ChunkRef;
use std::collections::{BTreeSet, HashMap};

/// Names a lease. Ids are never reused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LeaseId(u64);

#[derive(Debug)]
pub(crate) struct LiveLease {
    /// The chunks, first of the sequence first.
    pub chunks: Box<[ChunkRef]>,
    pub expires_us: u64,
}

/// All leases that have neither ended nor been collected.
#[derive(Debug)]
pub(crate) struct ChunkLeases {
    live: HashMap<LeaseId, LiveLease>,
    by_expiry: BTreeSet<(u64, LeaseId)>,
    next: u64,
    limit: usize,
    max_ttl_us: u64,
    expired: u64,
}

impl ChunkLeases {
    /// At most `limit` leases at a time, each for at most `max_ttl_us`.
    pub fn new(limit: usize, max_ttl_us: u64) -> ChunkLeases {
        let (live, by_expiry) = (HashMap::new(), BTreeSet::new());
        ChunkLeases { live, by_expiry, next: 0, limit, max_ttl_us, expired: 0 }
    }

    /// When a lease ends that is wanted for `ttl_us` from now on.
    pub fn end_of(&self, now_us: u64, ttl_us: u64) -> u64 {
        now_us.saturating_add(ttl_us.min(self.max_ttl_us))
    }

    pub fn has_room(&self) -> bool {
        self.live.len() < self.limit
    }

    /// Adds a lease for which there is [room](ChunkLeases::has_room).
    pub fn add(&mut self, lease: LiveLease) -> LeaseId {
        debug_assert!(self.has_room());
        let id = LeaseId(self.next);
        self.next += 1;
        self.by_expiry.insert((lease.expires_us, id));
        self.live.insert(id, lease);
        id
    }

    /// What the lease grants, if it is alive. Dead ones were taken by
    /// [`expire`](ChunkLeases::expire) before.
    pub fn get(&self, id: LeaseId) -> Option<&LiveLease> {
        self.live.get(&id)
    }

    /// Moves the end of a live lease. Says whether there is such a lease.
    pub fn renew(&mut self, id: LeaseId, expires_us: u64) -> bool {
        let Some(lease) = self.live.get_mut(&id) else { return false };
        self.by_expiry.remove(&(lease.expires_us, id));
        self.by_expiry.insert((expires_us, id));
        lease.expires_us = expires_us;
        true
    }

    pub fn end(&mut self, id: LeaseId) -> Option<LiveLease> {
        let lease = self.live.remove(&id)?;
        self.by_expiry.remove(&(lease.expires_us, id));
        Some(lease)
    }

    /// Ends one lease whose time has come, if there is one.
    pub fn expire(&mut self, now_us: u64) -> Option<LiveLease> {
        let (expires_us, id) = *self.by_expiry.first()?;
        let due = expires_us <= now_us;
        self.expired += u64::from(due);
        if due { self.end(id) } else { None }
    }

    pub fn len(&self) -> usize {
        self.live.len()
    }

    pub fn expired(&self) -> u64 {
        self.expired
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lease(expires_us: u64) -> LiveLease {
        LiveLease { chunks: Box::new([]), expires_us }
    }

    #[test]
    fn leases_expire_at_their_time_and_earliest_first() {
        let mut leases = ChunkLeases::new(3, 100);
        let (late, soon) = (leases.add(lease(20)), leases.add(lease(10)));
        assert!(leases.expire(9).is_none());
        assert_eq!(leases.expire(10).map(|lease| lease.expires_us), Some(10));
        assert!(leases.expire(19).is_none() && leases.get(soon).is_none() && leases.get(late).is_some());
        assert_eq!((leases.len(), leases.expired()), (1, 1));
    }

    #[test]
    fn a_renewed_lease_outlives_its_first_end_and_a_dead_one_stays_dead() {
        let mut leases = ChunkLeases::new(1, 100);
        let id = leases.add(lease(10));
        assert!(!leases.has_room());
        assert!(leases.renew(id, 30));
        assert!(leases.expire(10).is_none());
        assert!(leases.expire(30).is_some());
        assert!(!leases.renew(id, 40) && leases.end(id).is_none());
        assert_ne!(leases.add(lease(50)), id);
    }
}
