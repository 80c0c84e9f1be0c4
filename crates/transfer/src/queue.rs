//! Queues: what waits between two places, and whose turn it is on a link.

use crate::path::PathId;
use crate::region::Place;
use crate::transfer::{Class, TransferId};
use std::collections::BTreeSet;

/// A class with a lot that could start on a link is passed over by at most this many lots of more
/// urgent classes, plus one for each other class that is overdue at the same time.
pub const STARVE_LOTS: u32 = 16;

/// Orders the transfers of a class: earliest deadline first, then first come first served.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Rank {
    pub deadline_us: u64,
    pub transfer: TransferId,
}

/// A leg of a transfer, waiting.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Waiting {
    pub rank: Rank,
    pub leg: usize,
}

/// Everything that waits to go from one place to another, and the paths that can take it.
#[derive(Debug)]
pub(crate) struct PlacePair {
    pub from: Place,
    pub to: Place,
    pub paths: Vec<PathId>,
    /// Bytes of all waiting legs that are not cut yet.
    pub waiting_bytes: u64,
    classes: [BTreeSet<Waiting>; Class::ALL.len()],
}

impl PlacePair {
    pub fn new(from: Place, to: Place) -> PlacePair {
        PlacePair { from, to, paths: Vec::new(), waiting_bytes: 0, classes: Default::default() }
    }

    pub fn insert(&mut self, class: Class, waiting: Waiting) {
        self.classes[class.index()].insert(waiting);
    }

    pub fn remove(&mut self, class: Class, waiting: &Waiting) {
        self.classes[class.index()].remove(waiting);
    }

    /// The leg of `class` that goes first.
    pub fn first(&self, class: Class) -> Option<Waiting> {
        self.classes[class.index()].first().copied()
    }

    pub fn waits(&self, class: Class) -> bool {
        !self.classes[class.index()].is_empty()
    }

    pub fn is_empty(&self) -> bool {
        self.classes.iter().all(BTreeSet::is_empty)
    }

    /// All legs waiting, for the place pair whose last path went down.
    pub fn all(&self) -> impl Iterator<Item = Waiting> + '_ {
        self.classes.iter().flatten().copied()
    }
}

/// Which class goes next on a link: the most urgent class, unless another has been passed over too
/// often.
#[derive(Debug, Default)]
pub(crate) struct Fairness {
    passed_over: [u32; Class::ALL.len()],
}

impl Fairness {
    /// How soon `class` goes: overdue classes first, then by urgency. Lower is sooner.
    pub fn precedence(&self, class: Class) -> (bool, Class) {
        (self.passed_over[class.index()] < STARVE_LOTS, class)
    }

    /// Notes that `served` got a lot while the classes for which `waits` holds could have had one.
    pub fn served(&mut self, served: Class, waits: impl Fn(Class) -> bool) {
        for class in Class::ALL {
            let count = &mut self.passed_over[class.index()];
            *count = if class == served || !waits(class) { 0 } else { *count + 1 };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_class_is_passed_over_beyond_the_bound() {
        let mut fairness = Fairness::default();
        let mut gap = [0u32; 4];
        for _ in 0..1_000 {
            let served = Class::ALL.into_iter().min_by_key(|class| fairness.precedence(*class)).unwrap();
            fairness.served(served, |_| true);
            for class in Class::ALL {
                let gap = &mut gap[class.index()];
                *gap = if class == served { 0 } else { *gap + 1 };
                assert!(*gap <= STARVE_LOTS + 2, "{class:?} was passed over {gap} times");
            }
        }
    }

    #[test]
    fn urgency_decides_while_nobody_is_overdue() {
        let mut fairness = Fairness::default();
        for _ in 0..STARVE_LOTS {
            assert!(fairness.precedence(Class::Demand) < fairness.precedence(Class::Scrub));
            fairness.served(Class::Demand, |class| matches!(class, Class::Demand | Class::Scrub));
        }
        assert!(fairness.precedence(Class::Scrub) < fairness.precedence(Class::Demand));
    }
}
