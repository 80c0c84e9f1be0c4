//! Chunks that are on their way, and what waits for each: until it has a slot, so that those that
//! follow it may have one, and until it is here or failed. Pure: this file keeps what waits and
//! gives it back when its time has come; it must never run it.

use super::bar::{Bar, TooMany};
use forebay_kv::ChunkId;
use forebay_store::{ReadGuard, TenantId};
use forebay_transfer::RaisableClass;
use std::collections::HashMap;
use thiserror::Error;

/// Something to be done by a thread that may wait.
pub type Job = Box<dyn FnOnce() + Send>;
/// Is told of a chunk that is in this node's memory now, or why it is not.
pub type OnPulled = Box<dyn FnOnce(Result<ReadGuard, String>) + Send>;

/// Chunks that are on their way.
#[derive(Default)]
pub struct Arrivals {
    /// Chunks that may be asked for at a time. As many others may come along with them.
    asked_max: usize,
    chunks: HashMap<(TenantId, ChunkId), Waiting>,
    forgotten: Bar,
}

/// Why a chunk may not set out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum NotTaken {
    #[error("{limit} chunks are on their way from peers; no more may be")]
    Full { limit: usize },
    #[error("the chunk was forgotten a moment ago")]
    Forgotten,
}

/// What waits for a chunk.
#[derive(Default)]
pub struct Waiting {
    /// Of the transfer that brings it.
    class: Option<RaisableClass>,
    has_slot: bool,
    /// It must not arrive.
    is_forgotten: bool,
    /// For its slot.
    pub jobs: Vec<Job>,
    pub on_ends: Vec<OnPulled>,
}

impl Arrivals {
    /// None, of which so many may be asked for at a time.
    pub fn new(asked_max: usize) -> Arrivals {
        Arrivals { asked_max, ..Arrivals::default() }
    }

    /// How many may come along with this one, which is asked for. They never take the place of one
    /// that may be asked for.
    pub fn room(&mut self, now_us: u64, tenant: TenantId, id: &ChunkId) -> Result<usize, NotTaken> {
        let (arrivals, limit) = (self.chunks.len(), self.asked_max.saturating_mul(2));
        if arrivals >= limit {
            return Err(NotTaken::Full { limit });
        }
        if self.forgotten.has(now_us, tenant, id) {
            return Err(NotTaken::Forgotten);
        }
        Ok(self.asked_max.saturating_sub(arrivals + 1))
    }

    fn has(&self, tenant: TenantId, id: &ChunkId) -> bool {
        self.chunks.contains_key(&(tenant, *id))
    }

    /// Whether a chunk may come along: it is not on its way, and may be.
    pub fn may_come_along(&mut self, now_us: u64, tenant: TenantId, id: &ChunkId) -> bool {
        !self.has(tenant, id) && !self.forgotten.has(now_us, tenant, id)
    }

    /// These chunks are forgotten: those on their way must not arrive, and none may set out before
    /// peers have forgotten them too.
    pub fn forget(&mut self, now_us: u64, tenant: TenantId, ids: &[ChunkId]) -> Result<(), TooMany> {
        self.forgotten.add(now_us, tenant, ids)?;
        for id in ids {
            if let Some(waiting) = self.chunks.get_mut(&(tenant, *id)) {
                waiting.is_forgotten = true;
            }
        }
        Ok(())
    }

    /// Whether a chunk was forgotten since it set out.
    pub fn is_forgotten(&self, tenant: TenantId, id: &ChunkId) -> bool {
        self.chunks.get(&(tenant, *id)).is_some_and(|waiting| waiting.is_forgotten)
    }

    /// A chunk is on its way from now on.
    pub fn add(&mut self, tenant: TenantId, id: &ChunkId, class: RaisableClass) {
        self.chunks.entry((tenant, *id)).or_default().class = Some(class);
    }

    /// How urgent a chunk is that is on its way.
    pub fn class(&self, tenant: TenantId, id: &ChunkId) -> Option<RaisableClass> {
        self.chunks.get(&(tenant, *id))?.class.clone()
    }

    /// Keeps what waits for the end of a chunk, or gives it back: the chunk is not on its way.
    pub fn wait_for_end(&mut self, tenant: TenantId, id: &ChunkId, on_end: OnPulled) -> Option<OnPulled> {
        match self.chunks.get_mut(&(tenant, *id)) {
            Some(waiting) => waiting.on_ends.push(on_end),
            None => return Some(on_end),
        }
        None
    }

    /// Keeps what waits for the slot of a chunk, or gives it back: the chunk has one, or is not on
    /// its way.
    pub fn wait_for_slot(&mut self, tenant: TenantId, id: &ChunkId, job: Job) -> Option<Job> {
        match self.chunks.get_mut(&(tenant, *id)) {
            Some(waiting) if !waiting.has_slot => waiting.jobs.push(job),
            _ => return Some(job),
        }
        None
    }

    /// A chunk has a slot. What waited for that is given back.
    pub fn place(&mut self, tenant: TenantId, id: &ChunkId) -> Vec<Job> {
        let Some(waiting) = self.chunks.get_mut(&(tenant, *id)) else { return Vec::new() };
        waiting.has_slot = true;
        std::mem::take(&mut waiting.jobs)
    }

    /// A chunk has lost its slot, and will have another: those that follow it wait again.
    pub fn displace(&mut self, tenant: TenantId, id: &ChunkId) {
        if let Some(waiting) = self.chunks.get_mut(&(tenant, *id)) {
            waiting.has_slot = false;
        }
    }

    /// A chunk is here, or will not be. All that waited is given back.
    pub fn end(&mut self, tenant: TenantId, id: &ChunkId) -> Waiting {
        self.chunks.remove(&(tenant, *id)).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use forebay_transfer::{Class, Limits, MoverThread};

    const TENANT: TenantId = TenantId(3);
    const ID: ChunkId = ChunkId::from_bytes([1; 32]);

    fn class() -> RaisableClass {
        RaisableClass::new(&MoverThread::spawn(Limits::default()).unwrap().handle(), Class::Demand)
    }

    fn job() -> Job {
        Box::new(|| {})
    }

    fn on_end() -> OnPulled {
        Box::new(|_| {})
    }

    #[test]
    fn what_waits_for_a_slot_waits_until_there_is_one_or_never_will_be() {
        let mut arrivals = Arrivals::default();
        assert!(arrivals.wait_for_slot(TENANT, &ID, job()).is_some(), "nothing is on its way");
        arrivals.add(TENANT, &ID, class());
        assert!(arrivals.wait_for_slot(TENANT, &ID, job()).is_none());
        assert!(arrivals.wait_for_slot(TenantId(4), &ID, job()).is_some(), "another tenant's");
        assert_eq!(arrivals.place(TENANT, &ID).len(), 1);
        assert!(arrivals.wait_for_slot(TENANT, &ID, job()).is_some(), "it has one");
        arrivals.displace(TENANT, &ID);
        assert!(arrivals.wait_for_slot(TENANT, &ID, job()).is_none(), "it has lost it");
        assert_eq!(arrivals.end(TENANT, &ID).jobs.len(), 1);
        arrivals.add(TENANT, &ID, class());
        assert!(arrivals.wait_for_slot(TENANT, &ID, job()).is_none(), "the next one has none yet");
        assert_eq!(arrivals.end(TENANT, &ID).jobs.len(), 1, "it failed before it had one");
        assert!(arrivals.place(TENANT, &ID).is_empty() && !arrivals.has(TENANT, &ID));
    }

    #[test]
    fn all_that_may_be_asked_for_may_be_on_its_way_whatever_comes_along() {
        for batch in [1, 2, 16, 100] {
            let (mut arrivals, class) = (Arrivals::new(20), class());
            let mut numbers = (0u8..).map(|number| ChunkId::from_bytes([number; 32]));
            let mut add =
                |arrivals: &mut Arrivals| arrivals.add(TENANT, &numbers.next().unwrap(), class.clone());
            for _ in 0..20 {
                let along = arrivals.room(0, TENANT, &ID).unwrap().min(batch - 1);
                (0..=along).for_each(|_| add(&mut arrivals));
            }
            while arrivals.room(0, TENANT, &ID).is_ok() {
                add(&mut arrivals);
            }
            let full = arrivals.room(0, TENANT, &ID).unwrap_err().to_string();
            assert_eq!(full, "40 chunks are on their way from peers; no more may be");
        }
    }

    #[test]
    fn a_forgotten_chunk_neither_arrives_nor_sets_out() {
        let (mut arrivals, other) = (Arrivals::new(20), ChunkId::from_bytes([2; 32]));
        arrivals.add(TENANT, &ID, class());
        arrivals.forget(0, TENANT, &[ID, other]).unwrap();
        assert!(arrivals.is_forgotten(TENANT, &ID));
        assert_eq!(arrivals.room(0, TENANT, &other), Err(NotTaken::Forgotten));
        assert!(!arrivals.may_come_along(0, TENANT, &other));
        assert!(arrivals.may_come_along(0, TenantId(4), &other), "another tenant's");
        arrivals.end(TENANT, &ID);
        let later_us = 60_000_000;
        assert!(arrivals.room(later_us, TENANT, &ID).is_ok());
        arrivals.add(TENANT, &ID, class());
        assert!(!arrivals.is_forgotten(TENANT, &ID), "it has set out since");
    }

    #[test]
    fn all_who_wait_for_the_end_are_given_back_at_the_end() {
        let mut arrivals = Arrivals::default();
        assert!(arrivals.wait_for_end(TENANT, &ID, on_end()).is_some());
        arrivals.add(TENANT, &ID, class());
        assert!((0..3).all(|_| arrivals.wait_for_end(TENANT, &ID, on_end()).is_none()));
        arrivals.add(TENANT, &ID, class());
        assert!(arrivals.place(TENANT, &ID).is_empty() && arrivals.has(TENANT, &ID));
        assert_eq!(arrivals.end(TENANT, &ID).on_ends.len(), 3);
        assert!(!arrivals.has(TENANT, &ID));
    }
}
