//! A map with a bound that forgets what has not been used for a while.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

/// A bounded map in two generations. Writes go to the young one; when that is full it becomes the
/// old one, and what was in the old one and not written since is forgotten. So the map holds at
/// most `capacity` entries, and at least the `capacity / 2` that were written last. Unlike an LRU
/// list it costs no memory beside the entries and no bookkeeping on reads.
#[derive(Debug)]
pub struct Generations<V> {
    young: HashMap<u64, V, BuildHasherDefault<KeyIsHash>>,
    old: HashMap<u64, V, BuildHasherDefault<KeyIsHash>>,
    half: usize,
}

impl<V: Copy> Generations<V> {
    /// An empty map of at most `capacity` entries (at least 2).
    pub fn new(capacity: usize) -> Generations<V> {
        Generations { young: HashMap::default(), old: HashMap::default(), half: (capacity / 2).max(1) }
    }

    /// The value of `key`. Reading does not keep it from being forgotten.
    pub fn get(&self, key: u64) -> Option<V> {
        self.young.get(&key).or_else(|| self.old.get(&key)).copied()
    }

    /// Sets `key` and returns its former value.
    pub fn insert(&mut self, key: u64, value: V) -> Option<V> {
        let former = self.old.remove(&key);
        if self.young.len() >= self.half && !self.young.contains_key(&key) {
            std::mem::swap(&mut self.young, &mut self.old);
            self.young.clear();
        }
        self.young.insert(key, value).or(former)
    }

    pub fn remove(&mut self, key: u64) {
        self.young.remove(&key);
        self.old.remove(&key);
    }

    /// Holds at most `capacity` entries (at least 2) from now on. If there are more, the old
    /// generation is forgotten at once and the young one by and by.
    pub fn limit(&mut self, capacity: usize) {
        self.half = (capacity / 2).max(1);
        if self.len() > capacity {
            self.old.clear();
        }
    }

    pub fn clear(&mut self) {
        self.young.clear();
        self.old.clear();
    }

    pub fn len(&self) -> usize {
        self.young.len() + self.old.len()
    }
}

/// The keys are hashes already: hashing them again would buy nothing.
#[derive(Debug, Default)]
struct KeyIsHash(u64);

impl Hasher for KeyIsHash {
    fn write(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.0 = self.0.rotate_left(8) ^ u64::from(byte);
        }
    }

    fn write_u64(&mut self, key: u64) {
        self.0 = key;
    }

    fn finish(&self) -> u64 {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn memory_is_bounded_and_the_latest_half_is_kept(
            capacity in 2..40_usize,
            keys in prop::collection::vec(0..60_u64, 0..300),
        ) {
            let mut map = Generations::new(capacity);
            for (time, &key) in keys.iter().enumerate() {
                map.insert(key, time);
                prop_assert!(map.len() <= capacity, "{} > {}", map.len(), capacity);
            }
            let mut latest = Vec::new();
            for (time, &key) in keys.iter().enumerate().rev() {
                if latest.iter().all(|&(seen, _)| seen != key) {
                    latest.push((key, time));
                }
            }
            for &(key, time) in latest.iter().take(capacity / 2) {
                prop_assert_eq!(map.get(key), Some(time));
            }
        }

        #[test]
        fn a_value_is_the_last_one_written_or_forgotten(
            keys in prop::collection::vec(0..20_u64, 0..200),
        ) {
            let mut map = Generations::new(10);
            let mut truth = HashMap::new();
            for (time, key) in keys.into_iter().enumerate() {
                let former = map.insert(key, time);
                let expected = truth.insert(key, time);
                prop_assert!(former.is_none() || former == expected);
            }
            for (key, time) in truth {
                prop_assert!(map.get(key).is_none_or(|value| value == time));
            }
        }
    }
}
