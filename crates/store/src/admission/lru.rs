//! A tier as admission models it: chunks in the order of their last use, within a number of bytes.
//! This file knows the order.

use super::key::{Chunk, ChunkKey, KeyMap};

/// Chunks from the one used longest ago to the one used last.
///
/// Whoever uses the chunks of a chain from the last to the first gets an order in which a chunk is
/// always more recent than what continues it, so that what is dropped is a leaf.
///
/// ```
/// use forebay_store::admission::{Chunk, ChunkKey, Lru};
///
/// let chunk = |hash| Chunk { key: ChunkKey::from_hash(hash), bytes: 10 };
/// let mut tier = Lru::new(20);
/// for hash in [3, 2, 1] {
///     tier.insert(chunk(hash));
/// }
/// assert_eq!(tier.pop_excess(), Some(chunk(3)));
/// assert_eq!(tier.pop_excess(), None);
/// ```
#[derive(Debug)]
pub struct Lru {
    capacity_bytes: u64,
    /// Chunks of any length may be asked for; their sum must not wrap.
    held_bytes: u128,
    slot_of: KeyMap<u32>,
    /// A ring through the chunks; [`END`] is between the newest and the oldest.
    slots: Vec<Slot>,
    free: Vec<u32>,
}

#[derive(Debug, Clone, Copy)]
struct Slot {
    chunk: Chunk,
    newer: u32,
    older: u32,
}

/// The slot that holds no chunk.
const END: u32 = 0;

pub(crate) const LIMIT: usize = u32::MAX as usize - 1;

impl Lru {
    pub fn new(capacity_bytes: u64) -> Lru {
        let end = Slot { chunk: Chunk { key: ChunkKey::from_hash(0), bytes: 0 }, newer: END, older: END };
        Lru { capacity_bytes, held_bytes: 0, slot_of: KeyMap::default(), slots: vec![end], free: Vec::new() }
    }

    pub fn capacity_bytes(&self) -> u64 {
        self.capacity_bytes
    }

    pub fn len(&self) -> usize {
        self.slot_of.len()
    }

    pub fn is_empty(&self) -> bool {
        self.slot_of.is_empty()
    }

    pub fn contains(&self, key: ChunkKey) -> bool {
        self.slot_of.contains_key(&key)
    }

    /// Makes a chunk the newest; whether it is here.
    pub fn touch(&mut self, key: ChunkKey) -> bool {
        let Some(&slot) = self.slot_of.get(&key) else { return false };
        self.unlink(slot);
        self.link_newest(slot);
        true
    }

    /// Adds a chunk as the newest, or makes it the newest if it is here. The tier may then hold
    /// more than it should:
    /// [`pop_excess`](Lru::pop_excess).
    pub fn insert(&mut self, chunk: Chunk) {
        if self.touch(chunk.key) || self.len() >= LIMIT {
            return;
        }
        let new = Slot { chunk, newer: END, older: END };
        let slot = match self.free.pop() {
            Some(slot) => {
                self.slots[slot as usize] = new;
                slot
            }
            None => {
                self.slots.push(new);
                (self.slots.len() - 1) as u32
            }
        };
        self.slot_of.insert(chunk.key, slot);
        self.held_bytes += u128::from(chunk.bytes);
        self.link_newest(slot);
    }

    /// Takes out the oldest chunk while there are more bytes than the capacity.
    pub fn pop_excess(&mut self) -> Option<Chunk> {
        if self.held_bytes <= u128::from(self.capacity_bytes) {
            return None;
        }
        let oldest = self.slots[END as usize].newer;
        Some(self.remove(oldest))
    }

    /// Half the capacity, for the chunks that stay: those that `keep` names.
    pub(crate) fn halve(&mut self, keep: impl Fn(ChunkKey) -> bool) {
        let gone: Vec<u32> =
            self.slot_of.iter().filter(|(key, _)| !keep(**key)).map(|(_, slot)| *slot).collect();
        gone.into_iter().for_each(|slot| {
            self.remove(slot);
        });
        self.capacity_bytes /= 2;
    }

    /// Bytes of memory, as reserved, but for the hash table's control bytes.
    pub(crate) fn table_bytes(&self) -> u64 {
        let slots = self.slots.capacity() * size_of::<Slot>() + self.free.capacity() * size_of::<u32>();
        (slots + self.slot_of.capacity() * size_of::<(ChunkKey, u32)>()) as u64
    }

    fn remove(&mut self, slot: u32) -> Chunk {
        let chunk = self.slots[slot as usize].chunk;
        self.unlink(slot);
        self.slot_of.remove(&chunk.key);
        self.free.push(slot);
        self.held_bytes -= u128::from(chunk.bytes);
        chunk
    }

    fn link_newest(&mut self, slot: u32) {
        let second = self.slots[END as usize].older;
        let at = &mut self.slots[slot as usize];
        (at.newer, at.older) = (END, second);
        self.slots[second as usize].newer = slot;
        self.slots[END as usize].older = slot;
    }

    fn unlink(&mut self, slot: u32) {
        let Slot { newer, older, .. } = self.slots[slot as usize];
        self.slots[newer as usize].older = older;
        self.slots[older as usize].newer = newer;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn chunk(key: u64) -> Chunk {
        Chunk { key: ChunkKey::from_hash(key), bytes: 1 + key % 5 }
    }

    proptest! {
        #[test]
        fn it_drops_what_a_naive_list_would(
            steps in prop::collection::vec((0u64..30, any::<bool>()), 0..200),
            capacity_bytes in 0u64..40,
        ) {
            let mut lru = Lru::new(capacity_bytes);
            let mut naive: Vec<Chunk> = Vec::new();
            let mut most_held = 0;
            for (key, insert) in steps {
                let place = naive.iter().position(|held| *held == chunk(key));
                if let Some(place) = place {
                    let held = naive.remove(place);
                    naive.push(held);
                } else if insert {
                    naive.push(chunk(key));
                }
                if insert {
                    lru.insert(chunk(key));
                } else {
                    prop_assert_eq!(lru.touch(chunk(key).key), place.is_some());
                }
                most_held = most_held.max(naive.len());
                while naive.iter().map(|held| held.bytes).sum::<u64>() > capacity_bytes {
                    prop_assert_eq!(lru.pop_excess(), Some(naive.remove(0)));
                }
                prop_assert_eq!(lru.pop_excess(), None);
                prop_assert_eq!(lru.len(), naive.len());
                prop_assert!(naive.iter().all(|held| lru.contains(held.key)));
            }
            prop_assert_eq!(lru.slots.len(), 1 + most_held, "slots are used again");
        }

        #[test]
        fn halving_keeps_the_order_of_what_stays(keys in prop::collection::btree_set(0u64..1_000, 0..60)) {
            let mut lru = Lru::new(400);
            keys.iter().for_each(|key| lru.insert(chunk(*key)));
            lru.halve(|key| key.hash_bits() % 2 == 0);
            lru.capacity_bytes = 0;
            let left: Vec<Chunk> = std::iter::from_fn(|| lru.pop_excess()).collect();
            let expected: Vec<Chunk> = keys.iter().filter(|key| *key % 2 == 0).map(|key| chunk(*key)).collect();
            prop_assert_eq!(left, expected);
        }
    }
}
