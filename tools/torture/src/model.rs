//! What a store may answer: the versions of each key that are right now, and those that may be
//! found after a crash. A store may always have lost a value, since it is a cache; it may never
//! have another.

use std::collections::BTreeMap;

/// What was put and deleted, and what of it was flushed.
#[derive(Debug, Clone, Default)]
pub struct Model {
    keys: BTreeMap<u64, Key>,
}

#[derive(Debug, Clone)]
struct Key {
    /// What is right now; `None` is nothing. More than one only after a crash that may or may not
    /// have lost the last ones.
    now: Vec<Option<u32>>,
    /// What may be right after a crash.
    after_crash: Vec<Option<u32>>,
    /// Versions handed out.
    versions: u32,
}

impl Model {
    /// The next version of `key` to put.
    pub fn next_version(&mut self, key: u64) -> u32 {
        let absent = || Key { now: vec![None], after_crash: vec![None], versions: 0 };
        let key = self.keys.entry(key).or_insert_with(absent);
        key.versions += 1;
        key.versions - 1
    }

    /// Versions of all keys are below.
    pub fn versions(&self) -> u32 {
        self.keys.values().map(|key| key.versions).max().unwrap_or(0)
    }

    /// Keys are below.
    pub fn keys(&self) -> u64 {
        self.keys.last_key_value().map_or(0, |(key, _)| key + 1)
    }

    /// Versions that a `get` may return now.
    pub fn allowed(&self, key: u64) -> Vec<u32> {
        self.keys.get(&key).map_or_else(Vec::new, |key| key.now.iter().flatten().copied().collect())
    }

    /// Whether there is a value that only eviction may have taken.
    pub fn is_due(&self, key: u64) -> bool {
        self.keys.get(&key).is_some_and(|key| !key.now.contains(&None))
    }

    /// A value was not there, so that it is no longer due.
    pub fn has_missed(&mut self, key: u64) {
        self.change(key, |key| {
            if !key.now.contains(&None) {
                key.now.push(None);
                key.after_crash.push(None);
            }
        });
    }

    /// A put is about to be made: from now on a crash may leave either.
    pub fn putting(&mut self, key: u64, version: u32) {
        self.change(key, |key| key.after_crash.push(Some(version)));
    }

    /// A put was answered: the value is there.
    pub fn has_put(&mut self, key: u64, version: u32) {
        self.change(key, |key| key.now = vec![Some(version)]);
    }

    /// A deletion is about to be made.
    pub fn deleting(&mut self, key: u64) {
        self.change(key, |key| key.after_crash.push(None));
    }

    /// A deletion was answered.
    pub fn has_deleted(&mut self, key: u64) {
        self.change(key, |key| key.now = vec![None]);
    }

    /// A flush was answered: what is right now is what a crash leaves.
    pub fn has_flushed(&mut self) {
        self.keys.values_mut().for_each(|key| key.after_crash.clone_from(&key.now));
    }

    /// The store was opened after a crash.
    pub fn has_crashed(&mut self) {
        self.keys.values_mut().for_each(|key| key.now.clone_from(&key.after_crash));
    }

    /// Nothing may be found from now on.
    pub fn nothing_is_there(&mut self) {
        self.keys.values_mut().for_each(|key| (key.now, key.after_crash) = (vec![None], vec![None]));
    }

    /// All complete versions are right from now on: the disk went back in time.
    pub fn any_past(&mut self) {
        for key in self.keys.values_mut() {
            key.now = std::iter::once(None).chain((0..key.versions).map(Some)).collect();
            key.after_crash.clone_from(&key.now);
        }
    }

    fn change(&mut self, key: u64, change: impl FnOnce(&mut Key)) {
        if let Some(key) = self.keys.get_mut(&key) {
            change(key);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn put(model: &mut Model, key: u64) {
        let version = model.next_version(key);
        model.putting(key, version);
        model.has_put(key, version);
    }

    #[test]
    fn a_flushed_value_is_due_after_a_crash_and_an_unflushed_one_is_not() {
        let mut model = Model::default();
        for key in [1, 2] {
            put(&mut model, key);
            if key == 1 {
                model.has_flushed();
            }
        }
        model.has_crashed();
        assert!(model.is_due(1) && !model.is_due(2));
        assert_eq!((model.allowed(1), model.allowed(2)), (vec![0], vec![0]));
    }

    #[test]
    fn a_deleted_value_may_come_back_from_a_crash_until_the_deletion_is_flushed() {
        let mut model = Model::default();
        put(&mut model, 1);
        model.has_flushed();
        model.deleting(1);
        model.has_deleted(1);
        assert!(model.allowed(1).is_empty());
        let mut crashed = model.clone();
        crashed.has_crashed();
        assert_eq!(crashed.allowed(1), [0]);
        assert!(!crashed.is_due(1));
        model.has_flushed();
        model.has_crashed();
        assert!(model.allowed(1).is_empty());
    }

    #[test]
    fn a_value_that_a_crash_may_have_lost_is_not_due_however_often_it_is_flushed_later() {
        let mut model = Model::default();
        let version = model.next_version(1);
        model.putting(1, version);
        model.has_crashed();
        model.has_flushed();
        model.has_crashed();
        assert!(!model.is_due(1));
        assert_eq!(model.allowed(1), [0]);
    }

    #[test]
    fn a_lost_value_is_lost_once() {
        let mut model = Model::default();
        put(&mut model, 1);
        assert!(model.is_due(1));
        model.has_missed(1);
        assert!(!model.is_due(1));
    }
}
