//! The room of a listener for connections that have not authenticated: how many there are, whose,
//! and which of them gives way to one that comes. Pure, time is an argument.
//!
//! A full room never keeps a newcomer out for long. The source with the most connections gives up
//! its oldest one, so that whoever connects a thousand times takes places from itself alone; and
//! every connection has [`GRACE_US`] undisturbed, in which one that means well has authenticated.

use std::collections::{BTreeMap, HashMap};
use std::hash::Hash;

/// A connection keeps its place for so long whoever comes. Newcomers wait meanwhile, in the
/// system's queue.
pub const GRACE_US: u64 = 100_000;

/// The connections in the room.
#[derive(Debug)]
pub struct Pending<S> {
    places: usize,
    next: u64,
    connections: BTreeMap<u64, Connection<S>>,
}

#[derive(Debug)]
struct Connection<S> {
    source: S,
    since_us: u64,
}

/// What becomes of a newcomer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Entry {
    /// It has a place, under this number. The other one, if any, has lost its place.
    Placed {
        /// Of the newcomer.
        number: u64,
        /// Of the one that gives way.
        evicted: Option<u64>,
    },
    /// No place is free before this time, unless one of the connections leaves.
    Full {
        /// When to ask again.
        until_us: u64,
    },
}

impl<S: Eq + Hash> Pending<S> {
    /// A room with so many places.
    pub fn new(places: usize) -> Pending<S> {
        Pending { places: places.max(1), next: 0, connections: BTreeMap::new() }
    }

    /// Connections in the room.
    pub fn len(&self) -> usize {
        self.connections.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.connections.is_empty()
    }

    /// A connection comes.
    pub fn enter(&mut self, source: S, now_us: u64) -> Entry {
        let mut evicted = None;
        if self.connections.len() >= self.places
            && let Some((number, since_us)) = self.who_gives_way(&source)
        {
            let until_us = since_us.saturating_add(GRACE_US);
            if now_us < until_us {
                return Entry::Full { until_us };
            }
            self.connections.remove(&number);
            evicted = Some(number);
        }
        let number = self.next;
        self.next += 1;
        self.connections.insert(number, Connection { source, since_us: now_us });
        Entry::Placed { number, evicted }
    }

    /// A connection has authenticated, or ended. `false`: it had lost its place before.
    pub fn leave(&mut self, number: u64) -> bool {
        self.connections.remove(&number).is_some()
    }

    /// The oldest connection of the source that has the most, the newcomer counted.
    fn who_gives_way(&self, newcomer: &S) -> Option<(u64, u64)> {
        let mut counts: HashMap<&S, usize> = HashMap::from([(newcomer, 1)]);
        for connection in self.connections.values() {
            *counts.entry(&connection.source).or_default() += 1;
        }
        let count = |connection: &Connection<S>| counts.get(&connection.source).copied().unwrap_or(0);
        let most = self.connections.values().map(count).max()?;
        let mut oldest_first = self.connections.iter();
        let found = oldest_first.find(|(_, connection)| count(connection) == most);
        found.map(|(number, connection)| (*number, connection.since_us))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn placed(number: u64, evicted: Option<u64>) -> Entry {
        Entry::Placed { number, evicted }
    }

    #[test]
    fn whoever_connects_most_gives_way_with_its_oldest_connection() {
        let mut room = Pending::new(4);
        for (number, source) in ["b", "a", "a", "a"].into_iter().enumerate() {
            assert_eq!(room.enter(source, 0), placed(number as u64, None));
        }
        assert_eq!(room.enter("c", GRACE_US), placed(4, Some(1)));
        assert_eq!(room.enter("a", GRACE_US), placed(5, Some(2)), "from itself alone");
        assert!(!room.leave(1) && room.leave(0) && room.leave(4));
        assert_eq!(room.enter("d", GRACE_US), placed(6, None));
    }

    #[test]
    fn a_connection_has_its_grace_undisturbed_and_a_newcomer_then_has_its_place() {
        let mut room = Pending::new(2);
        room.enter("a", 0);
        room.enter("a", 50);
        assert_eq!(room.enter("a", GRACE_US - 1), Entry::Full { until_us: GRACE_US });
        assert_eq!(room.enter("a", GRACE_US), placed(2, Some(0)));
        assert_eq!(room.enter("a", GRACE_US), Entry::Full { until_us: GRACE_US + 50 });
        room.leave(1);
        assert_eq!(room.enter("a", GRACE_US), placed(3, None));
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
            prop_assert_eq!(room.enter(9u8, 0), placed(good, None));
            for (later_us, source) in steps {
                now_us += later_us;
                match room.enter(source % 2, now_us) {
                    Entry::Placed { evicted, .. } => prop_assert!(places < 3 || evicted != Some(good)),
                    Entry::Full { until_us } => {
                        prop_assert!(until_us > now_us && until_us <= now_us + GRACE_US);
                    }
                }
                prop_assert!(room.len() <= places);
            }
        }
    }
}
