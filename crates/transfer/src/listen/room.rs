//! [`Pending`] for the threads and tasks of a listener: places that are given back when they are
//! dropped, and what is done to a connection that has lost its place.

use super::pending::{Entry, Pending};
use crate::LogGate;
use parking_lot::{Condvar, Mutex};
use std::collections::HashMap;
use std::hash::Hash;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// A listener looks this often whether it is to end while it waits for a place.
const LOOK_EVERY: Duration = Duration::from_millis(50);

type Evict = Box<dyn FnOnce() + Send>;

/// A listener's room for connections that have not authenticated.
pub struct Room<S> {
    /// Which listener, for the log.
    name: &'static str,
    places: usize,
    epoch: Instant,
    state: Mutex<State<S>>,
    left: Condvar,
    evicted: AtomicU64,
    gate: LogGate,
}

struct State<S> {
    pending: Pending<S>,
    /// What is done to each if it loses its place.
    evicts: HashMap<u64, Evict>,
}

/// A connection's place. Given back when it is dropped.
pub struct RoomPlace<S: Eq + Hash> {
    room: Arc<Room<S>>,
    number: u64,
    evicted: Arc<AtomicBool>,
}

/// What a room shows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct RoomStat {
    /// Connections that have not authenticated.
    pub pending: usize,
    /// Those that gave way to others so far.
    pub evicted: u64,
}

impl<S: Eq + Hash + Clone> Room<S> {
    /// A room with so many places; `name` is the listener's, in log lines.
    pub fn new(name: &'static str, places: usize) -> Arc<Room<S>> {
        Arc::new(Room {
            name,
            places,
            epoch: Instant::now(),
            state: Mutex::new(State { pending: Pending::new(places), evicts: HashMap::new() }),
            left: Condvar::new(),
            evicted: AtomicU64::new(0),
            gate: LogGate::new(),
        })
    }

    pub fn places(&self) -> usize {
        self.places
    }

    /// What it shows.
    pub fn stat(&self) -> RoomStat {
        let pending = self.state.lock().pending.len();
        RoomStat { pending, evicted: self.evicted.load(Ordering::Relaxed) }
    }

    /// A place for a connection of `source`, for which somebody else may have to give way, or how
    /// long to wait before the next attempt. `evict` is called, quickly and on another thread, if
    /// this connection has to give way.
    pub fn try_enter(
        self: &Arc<Self>,
        source: &S,
        evict: impl FnOnce() + Send + 'static,
    ) -> Result<RoomPlace<S>, Duration> {
        let now_us = self.epoch.elapsed().as_micros() as u64;
        let mut state = self.state.lock();
        let (number, evicted) = match state.pending.enter(source.clone(), now_us) {
            Entry::Placed { number, evicted } => (number, evicted),
            Entry::Full { until_us } => return Err(Duration::from_micros(until_us.saturating_sub(now_us))),
        };
        let lost = Arc::new(AtomicBool::new(false));
        let tell = Arc::clone(&lost);
        let evict = move || {
            tell.store(true, Ordering::Release);
            evict();
        };
        state.evicts.insert(number, Box::new(evict));
        let evict = evicted.and_then(|evicted| state.evicts.remove(&evicted));
        drop(state);
        if let Some(evict) = evict {
            evict();
            self.count_evicted();
        }
        Ok(RoomPlace { room: Arc::clone(self), number, evicted: lost })
    }

    /// The same, and waits. `None`: `stop` says that the listener ends.
    pub fn enter(
        self: &Arc<Self>,
        source: &S,
        evict: impl FnOnce() + Send + Clone + 'static,
        stop: impl Fn() -> bool,
    ) -> Option<RoomPlace<S>> {
        while !stop() {
            match self.try_enter(source, evict.clone()) {
                Ok(place) => return Some(place),
                Err(wait) => {
                    let wait = wait.clamp(Duration::from_micros(100), LOOK_EVERY);
                    let mut state = self.state.lock();
                    if state.pending.len() >= self.places {
                        self.left.wait_for(&mut state, wait);
                    }
                }
            }
        }
        None
    }

    /// Everybody loses their place: the listener ends.
    pub fn clear(&self) {
        let mut state = self.state.lock();
        let evicts: Vec<(u64, Evict)> = state.evicts.drain().collect();
        evicts.iter().for_each(|(number, _)| {
            state.pending.leave(*number);
        });
        drop(state);
        evicts.into_iter().for_each(|(_, evict)| evict());
    }

    fn count_evicted(&self) {
        self.evicted.fetch_add(1, Ordering::Relaxed);
        if let Some(before) = self.gate.pass() {
            let (listener, places) = (self.name, self.places);
            tracing::warn!(listener, places, repeated = before, "silent connections give way");
        }
    }
}

impl<S: Eq + Hash> RoomPlace<S> {
    /// Whether the place was lost.
    pub fn is_evicted(&self) -> bool {
        self.evicted.load(Ordering::Acquire)
    }

    /// The connection has authenticated and leaves the room; it cannot lose its place any more.
    /// `false`: it had before.
    pub fn leave(&self) -> bool {
        let mut state = self.room.state.lock();
        let here = state.pending.leave(self.number);
        let evict = state.evicts.remove(&self.number);
        drop(state);
        // What it keeps is dropped without the lock.
        drop(evict);
        if here {
            self.room.left.notify_one();
        }
        here
    }
}

impl<S: Eq + Hash> Drop for RoomPlace<S> {
    fn drop(&mut self) {
        self.leave();
    }
}

impl<S> std::fmt::Debug for Room<S> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Room").field("name", &self.name).field("places", &self.places).finish_non_exhaustive()
    }
}

impl<S: Eq + Hash> std::fmt::Debug for RoomPlace<S> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RoomPlace").field("number", &self.number).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::channel;

    #[test]
    fn a_full_room_lets_a_newcomer_in_soon_and_tells_the_one_that_gives_way() {
        let room = Room::new("test", 2);
        let (sender, evicted) = channel();
        let enter = |name: &'static str| {
            let sender = sender.clone();
            room.enter(&0, move || sender.send(name).unwrap(), || false).unwrap()
        };
        let (first, second) = (enter("first"), enter("second"));
        let third = enter("third");
        assert_eq!(evicted.recv_timeout(Duration::from_secs(30)), Ok("first"));
        assert!(first.is_evicted() && !first.leave() && second.leave() && !third.is_evicted());
        assert_eq!(room.stat(), RoomStat { pending: 1, evicted: 1 });
        room.clear();
        assert_eq!(evicted.recv_timeout(Duration::from_secs(30)), Ok("third"));
        assert!(third.is_evicted() && !third.leave());
        assert_eq!(room.stat(), RoomStat { pending: 0, evicted: 1 });
    }

    #[test]
    fn a_listener_that_ends_does_not_wait_for_a_place() {
        let room = Room::new("test", 1);
        let _kept = room.enter(&0, || {}, || false);
        assert!(room.enter(&0, || {}, || true).is_none());
    }
}
