//! Loads and stores under way and ended, by the numbers that the engine gave them, and what loads have taken. Glue: this file knows
//! who waits for what; it must never know how a job goes on.

use crate::bubble::Bubble;
use crate::cost_model::Tier;
use crate::loading::Loading;
use parking_lot::{Condvar, Mutex};
use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::sync::Arc;
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

/// What was loaded from one place, and how long it came. Loads beside each other share a link: only together do they say what it
/// moves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Measured {
    /// From where.
    pub tier: Tier,
    /// What came.
    pub bytes: u64,
    /// How long some of it was coming.
    pub time: Duration,
}

/// What an ended load says of the time since no load was under way.
#[derive(Debug, Clone)]
pub struct Came {
    /// What came, and from where.
    pub bytes: TierBytes,
    /// Whether that was all. A load that fails has mostly waited.
    pub all: bool,
}

/// Bytes, by where they were.
#[derive(Debug, Clone, Default)]
pub struct TierBytes(BTreeMap<Tier, u64>);

impl TierBytes {
    /// So many more were there.
    pub fn add(&mut self, tier: Tier, bytes: u64) {
        *self.0.entry(tier).or_default() += bytes;
    }

    /// These were there too.
    pub fn add_all(&mut self, others: &TierBytes) {
        others.0.iter().for_each(|(tier, bytes)| self.add(*tier, *bytes));
    }

    /// All of them.
    pub fn sum(&self) -> u64 {
        self.0.values().sum()
    }

    /// Each place with its bytes.
    pub fn iter(&self) -> impl Iterator<Item = (Tier, u64)> + '_ {
        self.0.iter().map(|(tier, bytes)| (*tier, *bytes))
    }

    /// The farthest place, and how many were there.
    fn farthest(&self) -> Option<(Tier, u64)> {
        self.0.last_key_value().map(|(tier, bytes)| (*tier, *bytes))
    }
}

/// Chunks of one place on their way into the node's memory.
#[derive(Debug, Clone, Copy, Default)]
struct Coming {
    chunks: u32,
    /// Since when there were always some.
    since: Option<Instant>,
    /// How long there were some before.
    time: Duration,
}

impl Coming {
    fn begin(&mut self, now: Instant) {
        self.chunks += 1;
        self.since.get_or_insert(now);
    }

    fn end(&mut self, now: Instant) {
        self.chunks = self.chunks.saturating_sub(1);
        if self.chunks == 0 {
            self.time +=
                self.since.take().map_or(Duration::ZERO, |since| now.saturating_duration_since(since));
        }
    }

    /// How long there were some, since this was asked last.
    fn take(&mut self, now: Instant) -> Duration {
        let going_on =
            self.since.replace(now).map_or(Duration::ZERO, |since| now.saturating_duration_since(since));
        self.since = self.since.filter(|_| self.chunks > 0);
        std::mem::take(&mut self.time) + going_on
    }
}

/// Bubbles that are kept for whoever asks. Nobody has to: of more the oldest ones are forgotten.
const BUBBLES_MAX: usize = 4096;

/// Time in which there was always a load.
#[derive(Debug)]
struct Busy {
    since: Instant,
    loads: u32,
    came: Came,
}

/// Loads that go on without a pause are measured when so many of them have ended,
const LOADS_AT_LEAST: u32 = 8;
/// and so much time has gone by: what is half there at its ends counts little.
const TIME_AT_LEAST: Duration = Duration::from_millis(200);

impl Busy {
    fn begin() -> Busy {
        let came = Came { bytes: TierBytes::default(), all: true };
        Busy { since: Instant::now(), loads: 0, came }
    }

    fn add(&mut self, came: Came) {
        self.loads += 1;
        self.came.bytes.add_all(&came.bytes);
        self.came.all &= came.all;
    }

    /// What it says of the farthest place, from which something was on its way for so long. That is the slowest: if half of all came
    /// from there, at least half of the time was its; else what was on its way says how long. Of nearer places the time says nothing.
    fn measured(&self, on_its_way: impl Fn(Tier) -> Duration) -> Option<Measured> {
        let Came { bytes: came, all } = &self.came;
        let (tier, bytes) = came.farthest()?;
        let is_most = bytes >= came.sum() - bytes;
        let time = if is_most { self.since.elapsed() } else { on_its_way(tier) };
        (*all && bytes > 0).then_some(Measured { tier, bytes, time })
    }
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
    busy: Option<Busy>,
    coming: BTreeMap<Tier, Coming>,
    measured: Vec<Measured>,
    bubbles: VecDeque<Bubble>,
}

impl Jobs {
    /// How many loads there are, and whether one of them has this number.
    pub fn loads(&self, job: u64) -> (usize, bool) {
        let state = self.state.lock();
        (state.loads.len(), state.loads.contains_key(&job))
    }

    /// A load begins. `false`: one with this number is under way.
    pub fn begin_load(&self, job: u64, load: Arc<Loading>) -> bool {
        let mut state = self.state.lock();
        match state.loads.entry(job) {
            Entry::Occupied(_) => return false,
            Entry::Vacant(free) => free.insert(load),
        };
        state.busy.get_or_insert_with(Busy::begin);
        true
    }

    /// A chunk is asked for.
    pub fn begin_bring(&self, tier: Tier) {
        self.state.lock().coming.entry(tier).or_default().begin(Instant::now());
    }

    /// A chunk that was asked for is in the node's memory, or will not be.
    pub fn end_bring(&self, tier: Tier) {
        self.state.lock().coming.entry(tier).or_default().end(Instant::now());
    }

    /// A load is over that never began.
    pub fn refuse_load(&self, end: LoadEnd) {
        self.state.lock().ended_loads.push(end);
    }

    /// A step waited so long for a load.
    pub fn waited(&self, bubble: Bubble) {
        self.state.lock().keep(bubble);
    }

    /// A load has ended.
    pub fn end_load(&self, end: LoadEnd, came: Came) {
        let mut state = self.state.lock();
        let ended = state.loads.remove(&end.job);
        state.measure(came);
        state.ended_loads.push(end);
        drop(state);
        drop(ended);
        self.ended.notify_all();
    }

    /// A store begins. `false`: one with this number is under way.
    pub fn begin_store(&self, job: u64) -> bool {
        self.state.lock().stores.insert(job)
    }

    /// A store has ended.
    pub fn end_store(&self, end: JobStored) {
        let mut state = self.state.lock();
        state.stores.remove(&end.job);
        state.ended_stores.push(end);
        drop(state);
        self.ended.notify_all();
    }

    /// Loads under way.
    pub fn under_way(&self) -> Vec<Arc<Loading>> {
        self.state.lock().loads.values().cloned().collect()
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
    pub fn take_bubbles(&self) -> Vec<Bubble> {
        std::mem::take(&mut self.state.lock().bubbles).into()
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
        let mut state = self.state.lock();
        while !is_so(&state) {
            let Some(until) = until else {
                self.ended.wait(&mut state);
                continue;
            };
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            self.ended.wait_for(&mut state, left);
        }
        true
    }
}

impl State {
    fn keep(&mut self, bubble: Bubble) {
        if self.bubbles.len() == BUBBLES_MAX {
            self.bubbles.pop_front();
        }
        self.bubbles.push_back(bubble);
    }

    fn measure(&mut self, came: Came) {
        let Some(busy) = &mut self.busy else { return };
        busy.add(came);
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
    fn the_time_of_a_place_is_that_in_which_something_was_on_its_way_from_there() {
        let start = Instant::now();
        let at = |second: u64| start + Duration::from_secs(second);
        let mut coming = Coming::default();
        assert_eq!(coming.take(at(1)), Duration::ZERO);
        // Two beside each other, a pause, and one that goes on.
        [(2, true), (3, true), (4, false), (6, false), (9, true)].into_iter().for_each(|(second, begins)| {
            if begins { coming.begin(at(second)) } else { coming.end(at(second)) }
        });
        assert_eq!(coming.take(at(10)), Duration::from_secs(4 + 1));
        coming.end(at(12));
        assert_eq!(coming.take(at(20)), Duration::from_secs(2));
        assert_eq!(coming.take(at(30)), Duration::ZERO);
    }

    #[test]
    fn bubbles_that_nobody_asks_for_are_forgotten_the_oldest_first() {
        let jobs = Jobs::default();
        let last = BUBBLES_MAX as u64 + 9;
        for job in 0..=last {
            let bubble = Bubble { job, time: Duration::from_micros(job), layers_late: 1 };
            let came = Came { bytes: TierBytes::default(), all: true };
            jobs.waited(bubble);
            jobs.end_load(LoadEnd { job, tokens: 1, why: None }, came);
        }
        let kept: Vec<u64> = jobs.take_bubbles().into_iter().map(|bubble| bubble.job).collect();
        assert_eq!(kept, (10..=last).collect::<Vec<_>>());
        assert!(jobs.take_bubbles().is_empty(), "each once");
    }
}
