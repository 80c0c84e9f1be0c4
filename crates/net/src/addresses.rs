//! Which memory an address lies in. Used for this end's registrations and for what a peer said of
//! its own. This file knows ranges of addresses.

use std::collections::BTreeMap;
use std::ops::Range;

/// Ranges of addresses that do not overlap, and what each stands for.
#[derive(Debug, Clone)]
pub(crate) struct Addresses<T> {
    by_base: BTreeMap<u64, (u64, T)>,
}

/// Why a range is not taken in.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum BadRange {
    /// It has no bytes, or ends beyond 2^64.
    Unsound,
    Overlaps(Range<u64>),
}

/// A range that was found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Found<'a, T> {
    pub base: u64,
    pub len: u64,
    pub what: &'a T,
}

impl<T> Default for Addresses<T> {
    fn default() -> Addresses<T> {
        Addresses { by_base: BTreeMap::new() }
    }
}

impl<T> Addresses<T> {
    /// Whether a range could be taken in.
    pub fn check(&self, base: u64, len: u64) -> Result<(), BadRange> {
        let end = base.checked_add(len).filter(|_| len > 0).ok_or(BadRange::Unsound)?;
        let before = self.by_base.range(..end).next_back();
        match before.map(|(start, (len, _))| *start..start + len) {
            Some(other) if other.end > base => Err(BadRange::Overlaps(other)),
            _ => Ok(()),
        }
    }

    pub fn insert(&mut self, base: u64, len: u64, what: T) -> Result<(), BadRange> {
        self.check(base, len)?;
        self.by_base.insert(base, (len, what));
        Ok(())
    }

    pub fn remove(&mut self, base: u64) -> Option<T> {
        self.by_base.remove(&base).map(|(_, what)| what)
    }

    pub fn find(&self, address: u64) -> Option<Found<'_, T>> {
        let (base, (len, what)) = self.by_base.range(..=address).next_back()?;
        (address - base < *len).then_some(Found { base: *base, len: *len, what })
    }

    pub fn iter(&self) -> impl Iterator<Item = Found<'_, T>> {
        self.by_base.iter().map(|(base, (len, what))| Found { base: *base, len: *len, what })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_range_that_overlaps_is_refused_and_names_the_other() {
        let mut addresses = Addresses::default();
        assert_eq!(addresses.insert(100, 50, 'a'), Ok(()));
        assert_eq!(addresses.insert(150, 50, 'b'), Ok(()));
        assert_eq!(addresses.insert(0, 101, 'c'), Err(BadRange::Overlaps(100..150)));
        assert_eq!(addresses.insert(149, 1, 'c'), Err(BadRange::Overlaps(100..150)));
        assert_eq!(addresses.insert(0, u64::MAX, 'c'), Err(BadRange::Overlaps(150..200)));
        assert_eq!(addresses.insert(7, 0, 'c'), Err(BadRange::Unsound));
        assert_eq!(addresses.insert(u64::MAX, 2, 'c'), Err(BadRange::Unsound));
        assert_eq!(addresses.find(149).map(|found| *found.what), Some('a'));
        assert_eq!(addresses.find(200), None);
        assert_eq!(addresses.remove(100), Some('a'));
        assert_eq!(addresses.insert(0, 150, 'c'), Ok(()));
    }

    proptest! {
        #[test]
        fn no_address_lies_in_two_ranges(ranges in prop::collection::vec((0u64..300, 0u64..40), 0..60)) {
            let mut addresses = Addresses::default();
            let mut model = [None; 400];
            for (number, (base, len)) in ranges.into_iter().enumerate() {
                let cells = base as usize..(base + len) as usize;
                let free = len > 0 && model[cells.clone()].iter().all(Option::is_none);
                prop_assert_eq!(addresses.insert(base, len, number).is_ok(), free);
                if free {
                    model[cells].fill(Some(number));
                }
            }
            for (address, cell) in model.iter().enumerate() {
                prop_assert_eq!(addresses.find(address as u64).map(|found| *found.what), *cell);
            }
        }
    }
}
