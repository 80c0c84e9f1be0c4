//! Loads and stores under way and ended, by the numbers that the engine gave them, and what loads
//! have taken. The engine's threads wait here for ends.

use crate::busy_time::BusyTime;
use crate::cost_model::Tier;
use crate::load::{LoadEnd, LoadStall, Loaded, TierBytes};
use forebay_transfer::lock::{Condvar, Mutex};
use std::collections::{BTreeMap, HashSet, VecDeque};
use std::time::{Duration, Instant};

/// A store that has ended: nothing of it touches a page any more.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct JobStored {
    pub job: u64,
    /// The places, in order, of those of its chunks that the node neither took nor had.
    pub missing: Vec<u32>,
}

/// What was loaded from one place, and how long it came. Loads beside each other share a link: only
/// together do they say what it moves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Measured {
    pub tier: Tier,
    /// What came.
    pub bytes: u64,
    /// How long some of it was coming.
    pub time: Duration,
}

/// Stalls that are kept for whoever asks. Nobody has to: of more the oldest ones are forgotten.
const STALLS_MAX: usize = 4096;

/// Time in which there was always a load.
#[derive(Debug)]
struct Busy {
    since: Instant,
    loads: u32,
    loaded: Loaded,
}

/// Loads that go on without a pause are measured when so many of them have ended,
const LOADS_AT_LEAST: u32 = 8;
/// and so much time has gone by: what is half there at its ends counts little.
const TIME_AT_LEAST: Duration = Duration::from_millis(200);

impl Busy {
    fn begin() -> Busy {
        let loaded = Loaded { bytes: TierBytes::default(), all: true };
        Busy { since: Instant::now(), loads: 0, loaded }
    }

    fn add(&mut self, loaded: Loaded) {
        self.loads += 1;
        self.loaded.bytes.add_all(&loaded.bytes);
        self.loaded.all &= loaded.all;
    }

    /// What it says of the farthest place, from which something was on its way for so long. That is
    /// the slowest: if half of all came from there, at least half of the time was its; else what
    /// was on its way says how long. Of nearer places the time says nothing.
    fn measured(&self, on_its_way: impl Fn(Tier) -> Duration) -> Option<Measured> {
        let Loaded { bytes: loaded, all } = &self.loaded;
        let (tier, bytes) = loaded.farthest()?;
        let is_most = bytes >= loaded.sum() - bytes;
        let time = if is_most { self.since.elapsed() } else { on_its_way(tier) };
        (*all && bytes > 0).then_some(Measured { tier, bytes, time })
    }
}

#[derive(Debug, Default)]
pub struct Jobs {
    state: Mutex<State>,
    ended: Condvar,
}

#[derive(Debug, Default)]
struct State {
    loads: HashSet<u64>,
    /// Loads from another engine's pages, which say nothing of the node's rates.
    direct: HashSet<u64>,
    stores: HashSet<u64>,
    ended_loads: Vec<LoadEnd>,
    ended_stores: Vec<JobStored>,
    busy: Option<Busy>,
    /// Chunks of each tier on their way into the node's memory.
    coming: BTreeMap<Tier, BusyTime>,
    measured: Vec<Measured>,
    stalls: VecDeque<LoadStall>,
}

impl Jobs {
    /// How many loads there are, and whether one of them has this number.
    pub fn loads(&self, job: u64) -> (usize, bool) {
        let state = self.state.lock();
        (state.loads.len(), state.loads.contains(&job) || state.direct.contains(&job))
    }

    /// A load begins. `false`: one with this number is under way.
    pub fn begin_load(&self, job: u64) -> bool {
        let mut state = self.state.lock();
        let is_new = state.loads.insert(job);
        if is_new {
            state.busy.get_or_insert_with(Busy::begin);
        }
        is_new
    }

    pub fn begin_fetch(&self, tier: Tier) {
        self.state.lock().coming.entry(tier).or_default().begin(Instant::now());
    }

    /// A chunk that was asked for is in the node's memory, or will not be.
    pub fn end_fetch(&self, tier: Tier) {
        self.state.lock().coming.entry(tier).or_default().end(Instant::now());
    }

    /// A direct load begins. `false`: a load with this number is under way.
    pub fn begin_direct(&self, job: u64) -> bool {
        let mut state = self.state.lock();
        !state.loads.contains(&job) && state.direct.insert(job)
    }

    pub fn end_direct(&self, end: LoadEnd) {
        let mut state = self.state.lock();
        state.direct.remove(&end.job);
        state.ended_loads.push(end);
        drop(state);
        self.ended.notify_all();
    }

    /// A load is over that never began.
    pub fn refuse_load(&self, end: LoadEnd) {
        self.state.lock().ended_loads.push(end);
    }

    /// A step waited so long for a load.
    pub fn waited(&self, stall: LoadStall) {
        self.state.lock().keep(stall);
    }

    pub fn end_load(&self, end: LoadEnd, loaded: Loaded) {
        let mut state = self.state.lock();
        state.loads.remove(&end.job);
        state.measure(loaded);
        state.ended_loads.push(end);
        drop(state);
        self.ended.notify_all();
    }

    /// A store begins. `false`: one with this number is under way.
    pub fn begin_store(&self, job: u64) -> bool {
        self.state.lock().stores.insert(job)
    }

    pub fn end_store(&self, end: JobStored) {
        let mut state = self.state.lock();
        state.stores.remove(&end.job);
        state.ended_stores.push(end);
        drop(state);
        self.ended.notify_all();
    }

    /// What has ended since this was asked last.
    pub fn take_ended(&self) -> (Vec<LoadEnd>, Vec<JobStored>) {
        let mut state = self.state.lock();
        (std::mem::take(&mut state.ended_loads), std::mem::take(&mut state.ended_stores))
    }

    /// What was measured since this was asked last.
    pub fn take_measured(&self) -> Vec<Measured> {
        std::mem::take(&mut self.state.lock().measured)
    }

    /// How long steps waited for loads that ended since this was asked last.
    pub fn take_stalls(&self) -> Vec<LoadStall> {
        std::mem::take(&mut self.state.lock().stalls).into()
    }

    /// Waits until none of these loads is under way.
    pub fn wait_loaded(&self, jobs: &[u64], limit: Option<Duration>) -> bool {
        let is_over = |state: &State, job| !state.loads.contains(job) && !state.direct.contains(job);
        self.wait(limit, |state| jobs.iter().all(|job| is_over(state, job)))
    }

    /// Waits until none of these stores is under way.
    pub fn wait_stored(&self, jobs: &[u64], limit: Option<Duration>) -> bool {
        self.wait(limit, |state| jobs.iter().all(|job| !state.stores.contains(job)))
    }

    fn wait(&self, limit: Option<Duration>, is_so: impl Fn(&State) -> bool) -> bool {
        let (mut state, is_not) = (self.state.lock(), |state: &mut State| !is_so(state));
        match limit.and_then(|limit| Instant::now().checked_add(limit)) {
            Some(until) => !self.ended.wait_while_until(&mut state, is_not, until).timed_out(),
            None => {
                self.ended.wait_while(&mut state, is_not);
                true
            }
        }
    }
}

impl State {
    fn keep(&mut self, stall: LoadStall) {
        if self.stalls.len() == STALLS_MAX {
            self.stalls.pop_front();
        }
        self.stalls.push_back(stall);
    }

    fn measure(&mut self, loaded: Loaded) {
        let Some(busy) = &mut self.busy else { return };
        busy.add(loaded);
        let is_over = self.loads.is_empty();
        if is_over || (busy.loads >= LOADS_AT_LEAST && busy.since.elapsed() >= TIME_AT_LEAST) {
            let now = Instant::now();
            let times: BTreeMap<Tier, Duration> =
                self.coming.iter_mut().map(|(tier, coming)| (*tier, coming.take(now))).collect();
            self.measured.extend(busy.measured(|tier| times.get(&tier).copied().unwrap_or_default()));
            self.busy = (!is_over).then(Busy::begin);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stalls_that_nobody_asks_for_are_forgotten_the_oldest_first() {
        let jobs = Jobs::default();
        let last = STALLS_MAX as u64 + 9;
        for job in 0..=last {
            let stall = LoadStall { job, time: Duration::from_micros(job), layers_late: 1 };
            let loaded = Loaded { bytes: TierBytes::default(), all: true };
            jobs.waited(stall);
            jobs.end_load(LoadEnd { job, tokens: 1, why: None }, loaded);
        }
        let kept: Vec<u64> = jobs.take_stalls().into_iter().map(|stall| stall.job).collect();
        assert_eq!(kept, (10..=last).collect::<Vec<_>>());
        assert!(jobs.take_stalls().is_empty(), "each once");
    }
}
