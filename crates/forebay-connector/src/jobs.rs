//! Loads and stores under way and ended, by the numbers that the engine gave them. Glue: this file knows who waits for what; it
//! must never know how a job goes on.

use crate::loading::Loading;
use std::collections::hash_map::Entry;
use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// A load that has ended: nothing of it touches a page any more.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LoadEnd {
    /// Which.
    pub job: u64,
    /// Tokens that may be used, from the first chunk's first one on.
    pub tokens: u64,
    /// Why it is not all of them.
    pub why: Option<String>,
}

/// A store that has ended: nothing of it touches a page any more.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct JobStored {
    /// Which.
    pub job: u64,
    /// The places, in order, of those of its chunks that the node neither took nor had.
    pub missing: Vec<u32>,
}

/// All jobs of a cache.
#[derive(Debug, Default)]
pub struct Jobs {
    state: Mutex<State>,
    ended: Condvar,
}

#[derive(Debug, Default)]
struct State {
    loads: HashMap<u64, Arc<Loading>>,
    stores: HashSet<u64>,
    ended_loads: Vec<LoadEnd>,
    ended_stores: Vec<JobStored>,
}

impl Jobs {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// How many loads there are, and whether one of them has this number.
    pub fn loads(&self, job: u64) -> (usize, bool) {
        let state = self.state();
        (state.loads.len(), state.loads.contains_key(&job))
    }

    /// A load begins. `false`: one with this number is under way.
    pub fn begin_load(&self, job: u64, load: Arc<Loading>) -> bool {
        match self.state().loads.entry(job) {
            Entry::Occupied(_) => false,
            Entry::Vacant(free) => {
                free.insert(load);
                true
            }
        }
    }

    /// A load is over that never began.
    pub fn refuse_load(&self, end: LoadEnd) {
        self.state().ended_loads.push(end);
    }

    /// A load has ended.
    pub fn end_load(&self, end: LoadEnd) {
        let mut state = self.state();
        let ended = state.loads.remove(&end.job);
        state.ended_loads.push(end);
        drop(state);
        drop(ended);
        self.ended.notify_all();
    }

    /// A store begins. `false`: one with this number is under way.
    pub fn begin_store(&self, job: u64) -> bool {
        self.state().stores.insert(job)
    }

    /// A store has ended.
    pub fn end_store(&self, end: JobStored) {
        let mut state = self.state();
        state.stores.remove(&end.job);
        state.ended_stores.push(end);
        drop(state);
        self.ended.notify_all();
    }

    /// Loads under way.
    pub fn under_way(&self) -> Vec<Arc<Loading>> {
        self.state().loads.values().cloned().collect()
    }

    /// What has ended since this was asked last.
    pub fn take_ended(&self) -> (Vec<LoadEnd>, Vec<JobStored>) {
        let mut state = self.state();
        (std::mem::take(&mut state.ended_loads), std::mem::take(&mut state.ended_stores))
    }

    /// Waits until none of these loads is under way.
    pub fn wait_loaded(&self, jobs: &[u64], limit: Option<Duration>) -> bool {
        self.wait(limit, |state| jobs.iter().all(|job| !state.loads.contains_key(job)))
    }

    /// Waits until none of these stores is under way.
    pub fn wait_stored(&self, jobs: &[u64], limit: Option<Duration>) -> bool {
        self.wait(limit, |state| jobs.iter().all(|job| !state.stores.contains(job)))
    }

    fn wait(&self, limit: Option<Duration>, is_so: impl Fn(&State) -> bool) -> bool {
        let until = limit.and_then(|limit| Instant::now().checked_add(limit));
        let mut state = self.state();
        while !is_so(&state) {
            let Some(until) = until else {
                state = self.ended.wait(state).unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            state = self.ended.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        true
    }
}
