//! Leases: the right to read given chunks until a time. This file knows who may read what until when; it must never know
//! where chunks lie or what holding one means for eviction.

use crate::entry::ChunkRef;
use std::collections::{BTreeSet, HashMap};

/// Names a lease. Ids are never reused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LeaseId(u64);

/// What a lease grants.
#[derive(Debug)]
pub(crate) struct Grant {
    /// The chunks, first of the sequence first.
    pub chunks: Box<[ChunkRef]>,
    /// From this time on the lease is dead.
    pub expires_us: u64,
}

/// All leases that have neither ended nor been collected.
#[derive(Debug)]
pub(crate) struct Leases {
    live: HashMap<LeaseId, Grant>,
    by_expiry: BTreeSet<(u64, LeaseId)>,
    next: u64,
    limit: usize,
    expired: u64,
}

impl Leases {
    /// At most `limit` leases at a time.
    pub fn new(limit: usize) -> Leases {
        Leases { live: HashMap::new(), by_expiry: BTreeSet::new(), next: 0, limit, expired: 0 }
    }

    /// Whether one more may be granted.
    pub fn has_room(&self) -> bool {
        self.live.len() < self.limit
    }

    /// Grants a lease for which there is [room](Leases::has_room).
    pub fn grant(&mut self, grant: Grant) -> LeaseId {
        debug_assert!(self.has_room());
        let id = LeaseId(self.next);
        self.next += 1;
        self.by_expiry.insert((grant.expires_us, id));
        self.live.insert(id, grant);
        id
    }

    /// What the lease grants, if it is alive. Dead ones were taken by [`expire`](Leases::expire) before.
    pub fn get(&self, id: LeaseId) -> Option<&Grant> {
        self.live.get(&id)
    }

    /// Moves the end of a live lease. Says whether there is such a lease.
    pub fn renew(&mut self, id: LeaseId, expires_us: u64) -> bool {
        let Some(grant) = self.live.get_mut(&id) else { return false };
        self.by_expiry.remove(&(grant.expires_us, id));
        self.by_expiry.insert((expires_us, id));
        grant.expires_us = expires_us;
        true
    }

    /// Ends a lease.
    pub fn end(&mut self, id: LeaseId) -> Option<Grant> {
        let grant = self.live.remove(&id)?;
        self.by_expiry.remove(&(grant.expires_us, id));
        Some(grant)
    }

    /// Ends one lease whose time has come, if there is one.
    pub fn expire(&mut self, now_us: u64) -> Option<Grant> {
        let (expires_us, id) = *self.by_expiry.first()?;
        let due = expires_us <= now_us;
        self.expired += u64::from(due);
        if due { self.end(id) } else { None }
    }

    /// Leases alive.
    pub fn len(&self) -> usize {
        self.live.len()
    }

    /// Leases that ended by time so far.
    pub fn expired(&self) -> u64 {
        self.expired
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn grant(expires_us: u64) -> Grant {
        Grant { chunks: Box::new([]), expires_us }
    }

    #[test]
    fn leases_expire_at_their_time_and_earliest_first() {
        let mut leases = Leases::new(3);
        let (late, soon) = (leases.grant(grant(20)), leases.grant(grant(10)));
        assert!(leases.expire(9).is_none());
        assert_eq!(leases.expire(10).map(|grant| grant.expires_us), Some(10));
        assert!(leases.expire(19).is_none() && leases.get(soon).is_none() && leases.get(late).is_some());
        assert_eq!((leases.len(), leases.expired()), (1, 1));
    }

    #[test]
    fn a_renewed_lease_outlives_its_first_end_and_a_dead_one_stays_dead() {
        let mut leases = Leases::new(1);
        let id = leases.grant(grant(10));
        assert!(!leases.has_room());
        assert!(leases.renew(id, 30));
        assert!(leases.expire(10).is_none());
        assert!(leases.expire(30).is_some());
        assert!(!leases.renew(id, 40) && leases.end(id).is_none());
        assert_ne!(leases.grant(grant(50)), id);
    }
}
