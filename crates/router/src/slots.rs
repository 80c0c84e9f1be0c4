//! Sets of engines, by the places that they have in the router's lists.

use std::sync::Arc;

/// Most engines at once: none comes near it, and a list that is longer is a mistake.
pub const MAX_ENGINES: usize = 4096;

/// The engines that may serve a request; `None` is any.
pub type Serving = Option<Arc<EngineSet>>;

/// Engines that were there at one moment. Whoever came to a place later is not among them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct EngineSet {
    pub slots: SlotSet,
    /// The highest id that an engine had then: ids only grow.
    pub newest_id: u64,
}

impl EngineSet {
    pub fn contains(&self, slot: usize, id: u64) -> bool {
        id <= self.newest_id && self.slots.contains(slot)
    }

    pub fn is_empty(&self) -> bool {
        self.slots.is_empty()
    }
}

/// A set of places.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SlotSet {
    words: Vec<u64>,
}

impl SlotSet {
    pub fn insert(&mut self, slot: usize) {
        let word = slot / 64;
        if self.words.len() <= word {
            self.words.resize(word + 1, 0);
        }
        self.words[word] |= 1 << (slot % 64);
    }

    pub fn contains(&self, slot: usize) -> bool {
        self.words.get(slot / 64).is_some_and(|word| word >> (slot % 64) & 1 == 1)
    }

    pub fn is_empty(&self) -> bool {
        self.words.iter().all(|&word| word == 0)
    }

    /// What is in either.
    pub fn union(&self, other: &SlotSet) -> SlotSet {
        let (long, short) = if self.words.len() > other.words.len() { (self, other) } else { (other, self) };
        let mut union = long.clone();
        union.words.iter_mut().zip(&short.words).for_each(|(word, other)| *word |= other);
        union
    }
}

impl FromIterator<usize> for SlotSet {
    fn from_iter<T: IntoIterator<Item = usize>>(slots: T) -> SlotSet {
        let mut set = SlotSet::default();
        slots.into_iter().for_each(|slot| set.insert(slot));
        set
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    proptest! {
        #[test]
        fn a_set_has_what_was_put_in_and_nothing_else(
            first in prop::collection::btree_set(0..300_usize, 0..20),
            second in prop::collection::btree_set(0..300_usize, 0..20),
        ) {
            let (a, b): (SlotSet, SlotSet) = (first.iter().copied().collect(), second.iter().copied().collect());
            let both: BTreeSet<usize> = first.union(&second).copied().collect();
            prop_assert_eq!(a.is_empty(), first.is_empty());
            for (set, truth) in [(&a, &first), (&b, &second), (&a.union(&b), &both)] {
                prop_assert!((0..400).all(|slot| set.contains(slot) == truth.contains(&slot)));
            }
        }
    }
}
