//! The room of a listener for connections that have not authenticated: how many there are, whose,
//! and which of them gives way to one that comes. Places are given back when they are dropped.
//!
//! A full room never keeps a newcomer out for long. The source with the most connections gives up
//! its oldest one, so that whoever connects a thousand times takes places from itself alone; and
//! every connection has [`GRACE_US`] undisturbed, in which one that means well has authenticated.

use crate::LogGate;
use crate::lock::{Condvar, Mutex};
use std::collections::{BTreeMap, HashMap};
use std::hash::Hash;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// A connection keeps its place for so long whoever comes. Newcomers wait meanwhile, in the
/// system's queue.
const GRACE_US: u64 = 100_000;
/// A listener looks this often whether it is to end while it waits for a place.
const LOOK_EVERY: Duration = Duration::from_millis(50);

type Evict = Box<dyn FnOnce() + Send>;

/// A listener's room for connections that have not authenticated.
pub struct Room<S> {
    name: &'static str,
    places: usize,
    epoch: Instant,
    pending: Mutex<Pending<S>>,
    left: Condvar,
    evicted: AtomicU64,
    gate: LogGate,
}

/// The connections in the room, by number. Time is an argument.
struct Pending<S> {
    places: usize,
    next: u64,
    connections: BTreeMap<u64, Connection<S>>,
}

struct Connection<S> {
    source: S,
    since_us: u64,
    /// What is done to it if it loses its place.
    evict: Evict,
}

impl<S: Eq + Hash> Pending<S> {
    fn new(places: usize) -> Pending<S> {
        Pending { places: places.max(1), next: 0, connections: BTreeMap::new() }
    }

    /// A connection comes. Its number, and the one that gives way to it; or when to ask again,
    /// unless one of the connections leaves before.
    fn enter(&mut self, source: S, now_us: u64, evict: Evict) -> Result<(u64, Option<(u64, Evict)>), u64> {
        let mut evicted = None;
        if self.connections.len() >= self.places
            && let Some(number) = self.who_gives_way(&source)
            && let Some(oldest) = self.connections.get(&number)
        {
            let until_us = oldest.since_us.saturating_add(GRACE_US);
            if now_us < until_us {
                return Err(until_us);
            }
            evicted = self.connections.remove(&number).map(|oldest| (number, oldest.evict));
        }
        let number = self.next;
        self.next += 1;
        self.connections.insert(number, Connection { source, since_us: now_us, evict });
        Ok((number, evicted))
    }

    /// A connection has authenticated, or ended. `None`: it had lost its place before.
    fn leave(&mut self, number: u64) -> Option<Connection<S>> {
        self.connections.remove(&number)
    }

    /// The oldest connection of the source that has the most, the newcomer counted.
    fn who_gives_way(&self, newcomer: &S) -> Option<u64> {
        let mut counts: HashMap<&S, usize> = HashMap::from([(newcomer, 1)]);
        for connection in self.connections.values() {
            *counts.entry(&connection.source).or_default() += 1;
        }
        let count = |connection: &Connection<S>| counts.get(&connection.source).copied().unwrap_or(0);
        let most = self.connections.values().map(count).max()?;
        let mut oldest_first = self.connections.iter();
        oldest_first.find(|(_, connection)| count(connection) == most).map(|(number, _)| *number)
    }
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
            pending: Mutex::new(Pending::new(places)),
            left: Condvar::new(),
            evicted: AtomicU64::new(0),
            gate: LogGate::new(),
        })
    }

    pub fn places(&self) -> usize {
        self.places
    }

    pub fn stat(&self) -> RoomStat {
        let pending = self.pending.lock().connections.len();
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
        let lost = Arc::new(AtomicBool::new(false));
        let tell = Arc::clone(&lost);
        let evict = move || {
            tell.store(true, Ordering::Release);
            evict();
        };
        let now_us = self.epoch.elapsed().as_micros() as u64;
        let entered = self.pending.lock().enter(source.clone(), now_us, Box::new(evict));
        let wait = |until_us: u64| Duration::from_micros(until_us.saturating_sub(now_us));
        let (number, evicted) = entered.map_err(wait)?;
        if let Some((_, evict)) = evicted {
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
                    let mut pending = self.pending.lock();
                    if pending.connections.len() >= self.places {
                        self.left.wait_for(&mut pending, wait);
                    }
                }
            }
        }
        None
    }

    /// Everybody loses their place: the listener ends.
    pub fn clear(&self) {
        let connections = std::mem::take(&mut self.pending.lock().connections);
        connections.into_values().for_each(|connection| (connection.evict)());
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
    pub fn is_evicted(&self) -> bool {
        self.evicted.load(Ordering::Acquire)
    }

    /// The connection has authenticated and leaves the room; it cannot lose its place any more.
    /// `false`: it had before.
    pub fn leave(&self) -> bool {
        let left = self.room.pending.lock().leave(self.number);
        if left.is_some() {
            self.room.left.notify_one();
        }
        left.is_some()
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
    use proptest::prelude::*;
    use std::sync::mpsc::channel;

    impl<S: Eq + Hash> Pending<S> {
        /// The number of a connection that comes, and of the one that gives way; or when to ask
        /// again.
        fn comes(&mut self, source: S, now_us: u64) -> Result<(u64, Option<u64>), u64> {
            let entered = self.enter(source, now_us, Box::new(|| {}));
            entered.map(|(number, evicted)| (number, evicted.map(|(number, _)| number)))
        }
    }

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

    #[test]
    fn whoever_connects_most_gives_way_with_its_oldest_connection() {
        let mut room = Pending::new(4);
        for (number, source) in ["b", "a", "a", "a"].into_iter().enumerate() {
            assert_eq!(room.comes(source, 0), Ok((number as u64, None)));
        }
        assert_eq!(room.comes("c", GRACE_US), Ok((4, Some(1))));
        assert_eq!(room.comes("a", GRACE_US), Ok((5, Some(2))), "from itself alone");
        assert!(room.leave(1).is_none() && room.leave(0).is_some() && room.leave(4).is_some());
        assert_eq!(room.comes("d", GRACE_US), Ok((6, None)));
    }

    #[test]
    fn a_connection_has_its_grace_undisturbed_and_a_newcomer_then_has_its_place() {
        let mut room = Pending::new(2);
        room.comes("a", 0).unwrap();
        room.comes("a", 50).unwrap();
        assert_eq!(room.comes("a", GRACE_US - 1), Err(GRACE_US));
        assert_eq!(room.comes("a", GRACE_US), Ok((2, Some(0))));
        assert_eq!(room.comes("a", GRACE_US), Err(GRACE_US + 50));
        room.leave(1).unwrap();
        assert_eq!(room.comes("a", GRACE_US), Ok((3, None)));
    }

    proptest! {
        /// Whatever a flood from elsewhere does, one connection of another source is never evicted,
        /// and no newcomer waits longer than the grace.
        #[test]
        fn a_flood_takes_places_from_itself(
            places in 2usize..6,
            steps in prop::collection::vec((0u64..60_000, 0u8..3), 1..200),
        ) {
            let mut room = Pending::new(places);
            let (mut now_us, good) = (0, 0);
            prop_assert_eq!(room.comes(9u8, 0), Ok((good, None)));
            for (later_us, source) in steps {
                now_us += later_us;
                match room.comes(source % 2, now_us) {
                    Ok((_, evicted)) => prop_assert!(places < 3 || evicted != Some(good)),
                    Err(until_us) => {
                        prop_assert!(until_us > now_us && until_us <= now_us + GRACE_US);
                    }
                }
                prop_assert!(room.connections.len() <= places);
            }
        }
    }
}
