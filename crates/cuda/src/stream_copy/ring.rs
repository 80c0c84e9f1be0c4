//! A ring of places: who comes takes as many as it wants in one piece, and they come back in the
//! order in which they were taken. Pure.

use std::collections::VecDeque;
use std::ops::Range;

/// Places, and which are taken.
#[derive(Debug)]
pub struct Ring {
    places: usize,
    taken: VecDeque<Range<usize>>,
}

impl Ring {
    pub fn new(places: usize) -> Ring {
        Ring { places, taken: VecDeque::new() }
    }

    /// Where at least `wanted` places in one piece are free, and all that are free there.
    pub fn room(&self, wanted: usize) -> Option<Range<usize>> {
        let (start, end) = match (self.taken.front(), self.taken.back()) {
            (Some(first), Some(last)) => (first.start, last.end),
            _ => return (wanted <= self.places).then_some(0..self.places),
        };
        let is_round = self.taken.back().is_some_and(|last| last.start < start);
        let behind = if is_round { end..start } else { end..self.places };
        let before = if is_round { 0..0 } else { 0..start };
        [behind, before].into_iter().find(|free| free.len() >= wanted)
    }

    /// Takes places of what [`room`](Ring::room) gave, from its start on.
    pub fn take(&mut self, places: Range<usize>) {
        debug_assert!(!places.is_empty() && places.end <= self.places);
        self.taken.push_back(places);
    }

    /// Gives back what was taken first.
    pub fn give_back(&mut self) {
        self.taken.pop_front();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn what_does_not_fit_behind_goes_to_the_front_when_that_has_come_back() {
        let mut ring = Ring::new(10);
        ring.take(0..4);
        ring.take(4..8);
        assert_eq!((ring.room(2), ring.room(3)), (Some(8..10), None));
        ring.give_back();
        assert_eq!(ring.room(3), Some(0..4));
        ring.take(0..3);
        assert_eq!((ring.room(1), ring.room(2)), (Some(3..4), None));
        ring.give_back();
        ring.give_back();
        assert_eq!((ring.room(10), ring.room(11)), (Some(0..10), None));
    }

    proptest! {
        #[test]
        fn no_place_is_taken_twice(steps in prop::collection::vec(prop::option::of(1..12_usize), 1..80)) {
            let mut ring = Ring::new(16);
            let mut model: VecDeque<Range<usize>> = VecDeque::new();
            for step in steps {
                match step {
                    Some(wanted) => {
                        let Some(free) = ring.room(wanted) else { continue };
                        prop_assert!(free.len() >= wanted && free.end <= 16);
                        let apart = |one: &Range<usize>| one.end <= free.start || free.end <= one.start;
                        prop_assert!(model.iter().all(apart), "{free:?} {model:?}");
                        ring.take(free.start..free.start + wanted);
                        model.push_back(free.start..free.start + wanted);
                    }
                    None => {
                        ring.give_back();
                        model.pop_front();
                    }
                }
                prop_assert!(!model.is_empty() || ring.room(16).is_some());
            }
        }
    }
}
