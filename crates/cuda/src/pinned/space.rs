//! Who has which bytes of the pool's slabs.

use std::collections::BTreeMap;
use thiserror::Error;

/// Ranges begin and end at multiples of this.
pub const GRAIN_BYTES: u64 = 4096;

/// Names a slab. Ids are never reused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SlabId(u64);

/// A range that is lent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Place {
    pub slab: SlabId,
    /// Its first byte, from the slab's start.
    pub offset: u64,
    /// Its length: what was asked for, rounded up to [`GRAIN_BYTES`].
    pub bytes: u64,
}

/// What to do so that a request fits.
#[derive(Debug, PartialEq, Eq)]
pub struct Growth<S> {
    /// Slabs to give back first. Nothing of them is lent, and they are forgotten already.
    pub unused: Vec<S>,
    /// Length of the slab to add.
    pub add_bytes: u64,
}

/// The request does not fit under the limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[error(
    "{asked_bytes} bytes do not fit: the pool may hold {limit_bytes} bytes and {lent_bytes} of them are lent; \
     the longest range that is left has {left_bytes} bytes"
)]
pub struct Full {
    pub asked_bytes: u64,
    pub limit_bytes: u64,
    pub lent_bytes: u64,
    /// The longest request that would fit.
    pub left_bytes: u64,
}

/// The bytes of all slabs. Requests go to the first range that is long enough, oldest slab first,
/// so that later slabs stay empty and can make room for one of another length.
#[derive(Debug)]
pub struct Space<S> {
    limit_bytes: u64,
    slab_bytes: u64,
    next: u64,
    slabs: BTreeMap<SlabId, Slab<S>>,
}

#[derive(Debug)]
struct Slab<S> {
    memory: S,
    bytes: u64,
    free_bytes: u64,
    /// Start and length of each free range. No two touch.
    free: BTreeMap<u64, u64>,
}

impl<S> Space<S> {
    /// No slabs. Slabs will have `slab_bytes`, but where a request is longer or the limit leaves
    /// less.
    pub fn new(limit_bytes: u64, slab_bytes: u64) -> Space<S> {
        let limit_bytes = limit_bytes / GRAIN_BYTES * GRAIN_BYTES;
        Space { limit_bytes, slab_bytes, next: 0, slabs: BTreeMap::new() }
    }

    /// Lends `bytes` bytes, at least one grain, where a slab has them.
    pub fn take(&mut self, bytes: u64) -> Option<(Place, &S)> {
        let bytes = in_grains(bytes)?;
        self.slabs.iter_mut().find_map(|(id, slab)| {
            slab.take(bytes).map(|offset| (Place { slab: *id, offset, bytes }, &slab.memory))
        })
    }

    pub fn give_back(&mut self, place: Place) {
        let slab = self.slabs.get_mut(&place.slab);
        debug_assert!(slab.is_some(), "a slab stays while a range of it is lent");
        if let Some(slab) = slab {
            slab.give_back(place.offset, place.bytes);
        }
    }

    /// What has to be done so that a request of `bytes` fits. Free slabs make room only for a
    /// request that cannot be met without: memory that is pinned is kept.
    pub fn grow(&mut self, bytes: u64) -> Result<Growth<S>, Full> {
        let needed = in_grains(bytes).ok_or_else(|| self.full(bytes))?;
        let mut room = self.limit_bytes - self.held_bytes();
        let mut unused = Vec::new();
        for (id, slab) in self.slabs.iter().rev().filter(|(_, slab)| slab.is_free()) {
            if room >= needed {
                break;
            }
            room += slab.bytes;
            unused.push(*id);
        }
        if room < needed {
            return Err(self.full(bytes));
        }
        let unused = unused.iter().filter_map(|id| self.slabs.remove(id)).map(|slab| slab.memory).collect();
        // The last slab may be shorter than others.
        let usual = self.slab_bytes.min(room) / GRAIN_BYTES * GRAIN_BYTES;
        Ok(Growth { unused, add_bytes: usual.max(needed) })
    }

    /// What is missing until `bytes` are held, a slab's worth at most.
    pub fn missing(&self, bytes: u64) -> Result<u64, Full> {
        if bytes > self.limit_bytes {
            return Err(self.full(bytes));
        }
        Ok(bytes.saturating_sub(self.held_bytes()).min(self.slab_bytes))
    }

    fn full(&self, asked_bytes: u64) -> Full {
        let (limit_bytes, lent_bytes) = (self.limit_bytes, self.lent_bytes());
        Full { asked_bytes, limit_bytes, lent_bytes, left_bytes: self.left_bytes() }
    }

    /// Adds a slab, whose length [`grow`](Space::grow) gave.
    pub fn add(&mut self, bytes: u64, memory: S) {
        let slab = Slab { memory, bytes, free_bytes: bytes, free: [(0, bytes)].into() };
        self.slabs.insert(SlabId(self.next), slab);
        self.next += 1;
    }

    pub fn held_bytes(&self) -> u64 {
        self.slabs.values().map(|slab| slab.bytes).sum()
    }

    pub fn lent_bytes(&self) -> u64 {
        self.slabs.values().map(|slab| slab.bytes - slab.free_bytes).sum()
    }

    /// The longest request that can be met, with growth where that is needed.
    pub fn left_bytes(&self) -> u64 {
        let used = self.slabs.values().filter(|slab| !slab.is_free()).map(|slab| slab.bytes).sum::<u64>();
        let new = self.limit_bytes.saturating_sub(used);
        let there = self.slabs.values().flat_map(|slab| slab.free.values()).max();
        new.max(there.copied().unwrap_or(0))
    }
}

impl<S> Slab<S> {
    fn is_free(&self) -> bool {
        self.free_bytes == self.bytes
    }

    fn take(&mut self, bytes: u64) -> Option<u64> {
        let (&offset, &len) = self.free.iter().find(|(_, len)| **len >= bytes)?;
        self.free.remove(&offset);
        if len > bytes {
            self.free.insert(offset + bytes, len - bytes);
        }
        self.free_bytes -= bytes;
        Some(offset)
    }

    fn give_back(&mut self, offset: u64, bytes: u64) {
        let (mut start, mut end) = (offset, offset + bytes);
        if let Some((&before, &len)) = self.free.range(..offset).next_back()
            && before + len == offset
        {
            self.free.remove(&before);
            start = before;
        }
        if let Some(len) = self.free.remove(&end) {
            end += len;
        }
        self.free.insert(start, end - start);
        self.free_bytes += bytes;
    }
}

/// The length in whole grains, at least one.
fn in_grains(bytes: u64) -> Option<u64> {
    bytes.max(1).checked_next_multiple_of(GRAIN_BYTES)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const KIB: u64 = 1024;

    /// Takes what is asked for as a pool does: from what is there, else after growing.
    fn take(space: &mut Space<u64>, bytes: u64) -> Result<Place, Full> {
        if let Some((place, _)) = space.take(bytes) {
            return Ok(place);
        }
        let growth = space.grow(bytes)?;
        space.add(growth.add_bytes, space.next);
        Ok(space.take(bytes).expect("a slab that was added for a request has room for it").0)
    }

    #[test]
    fn a_request_above_the_limit_is_refused_with_what_is_left() {
        let mut space = Space::new(100 * KIB, 32 * KIB);
        take(&mut space, 60 * KIB).unwrap();
        let full = take(&mut space, 48 * KIB).unwrap_err();
        let expected = Full {
            asked_bytes: 48 * KIB,
            limit_bytes: 100 * KIB,
            lent_bytes: 60 * KIB,
            left_bytes: 40 * KIB,
        };
        assert_eq!(full, expected);
        assert!(take(&mut space, full.left_bytes).is_ok());
        assert!(take(&mut space, 1).is_err());
        assert!(take(&mut space, u64::MAX).is_err());
    }

    #[test]
    fn free_slabs_make_room_for_a_longer_one_and_lent_ones_do_not() {
        let mut space = Space::new(96 * KIB, 32 * KIB);
        let places: Vec<Place> = (0..3).map(|_| take(&mut space, 32 * KIB).unwrap()).collect();
        space.give_back(places[1]);
        space.give_back(places[2]);
        let growth = space.grow(64 * KIB).unwrap();
        assert_eq!(growth, Growth { unused: vec![2, 1], add_bytes: 64 * KIB });
        assert_eq!(space.held_bytes(), 32 * KIB);
        assert!(space.grow(65 * KIB).is_err());
    }

    #[test]
    fn warming_asks_for_what_is_missing_and_never_for_more_than_the_limit() {
        let mut space = Space::new(72 * KIB + 1, 32 * KIB);
        for expected in [32 * KIB, 32 * KIB, 8 * KIB, 0] {
            let missing = space.missing(72 * KIB).unwrap();
            assert_eq!(missing, expected);
            if missing > 0 {
                let growth = space.grow(missing).unwrap();
                assert!(growth.unused.is_empty(), "what is pinned already is kept");
                space.add(growth.add_bytes, 0);
            }
        }
        assert!(space.missing(72 * KIB + 1).is_err());
    }

    #[test]
    fn ranges_given_back_in_any_order_become_one() {
        let mut space = Space::new(64 * KIB, 64 * KIB);
        let places: Vec<Place> = (0..16).map(|_| take(&mut space, 4 * KIB).unwrap()).collect();
        for odd in [1, 0] {
            places.iter().skip(odd).step_by(2).for_each(|place| space.give_back(*place));
        }
        assert_eq!(space.take(64 * KIB).unwrap().0.offset, 0);
    }

    #[derive(Debug, Clone)]
    enum Step {
        Take(u64),
        GiveBack(usize),
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![(0..80 * KIB).prop_map(Step::Take), any::<usize>().prop_map(Step::GiveBack)]
    }

    proptest! {
        #[test]
        fn no_byte_is_lent_twice_and_none_is_lost(steps in prop::collection::vec(step(), 1..200)) {
            let limit = 200 * KIB;
            let mut space = Space::new(limit, 48 * KIB);
            let mut lent: Vec<Place> = Vec::new();
            for step in steps {
                match step {
                    Step::Take(bytes) => {
                        let fits = space.left_bytes() >= bytes.max(1).next_multiple_of(GRAIN_BYTES);
                        let taken = take(&mut space, bytes);
                        prop_assert_eq!(taken.is_ok(), fits, "refused if and only if it does not fit");
                        let Ok(place) = taken else { continue };
                        prop_assert!(place.bytes >= bytes && place.offset % GRAIN_BYTES == 0);
                        for other in &lent {
                            let apart = other.slab != place.slab
                                || other.offset + other.bytes <= place.offset
                                || place.offset + place.bytes <= other.offset;
                            prop_assert!(apart, "{:?} and {:?} overlap", other, place);
                        }
                        lent.push(place);
                    }
                    Step::GiveBack(which) if !lent.is_empty() => {
                        space.give_back(lent.swap_remove(which % lent.len()));
                    }
                    Step::GiveBack(_) => {}
                }
                prop_assert_eq!(space.lent_bytes(), lent.iter().map(|place| place.bytes).sum::<u64>());
                prop_assert!(space.held_bytes() <= limit);
            }
            lent.drain(..).for_each(|place| space.give_back(place));
            prop_assert_eq!(space.lent_bytes(), 0);
            prop_assert_eq!(space.left_bytes(), limit);
        }
    }
}
