//! A map with a bound: it keeps the keys that came last, so that a trace of any length is read in
//! bounded memory.

use std::collections::{HashMap, VecDeque};
use std::hash::{BuildHasher, Hash};

/// The values of the latest `limit` different keys.
pub(crate) struct Latest<K, V, S> {
    values: HashMap<K, V, S>,
    oldest_first: VecDeque<K>,
    limit: usize,
}

impl<K: Hash + Eq + Clone, V, S: BuildHasher + Default> Latest<K, V, S> {
    pub(crate) fn new(limit: usize) -> Latest<K, V, S> {
        Latest { values: HashMap::default(), oldest_first: VecDeque::new(), limit }
    }

    pub(crate) fn get(&self, key: &K) -> Option<&V> {
        self.values.get(key)
    }

    pub(crate) fn insert(&mut self, key: K, value: V) {
        self.make_room(&key);
        self.values.insert(key, value);
    }

    /// The value of a key, which is remembered from now on.
    pub(crate) fn or_default(&mut self, key: K) -> &mut V
    where
        V: Default,
    {
        self.make_room(&key);
        self.values.entry(key).or_default()
    }

    /// Forgets the oldest key where a new one would be one too many.
    fn make_room(&mut self, key: &K) {
        if self.values.contains_key(key) {
            return;
        }
        self.oldest_first.push_back(key.clone());
        if self.oldest_first.len() > self.limit
            && let Some(oldest) = self.oldest_first.pop_front()
        {
            self.values.remove(&oldest);
        }
    }

    /// How many keys it holds, counted in both of its parts.
    #[cfg(test)]
    pub(crate) fn lengths(&self) -> (usize, usize) {
        (self.values.len(), self.oldest_first.len())
    }
}
