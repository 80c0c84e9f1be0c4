//! Chunks that came before their parents, as chunks do that are stored at the same time. This file
//! knows who waits for whom.

use forebay_kv::ChunkId;
use std::collections::{HashMap, VecDeque};

/// Each waits for one parent, which may never come: beyond a limit those are given up who wait for
/// the parent that was missed first.
#[derive(Debug)]
pub struct Orphans<Orphan> {
    of_parent: HashMap<ChunkId, Vec<Orphan>>,
    /// Parents in the order in which they were missed; some are not missed any more.
    missed: VecDeque<ChunkId>,
    count: usize,
    limit: usize,
}

impl<Orphan> Orphans<Orphan> {
    pub fn new(limit: usize) -> Orphans<Orphan> {
        Orphans { of_parent: HashMap::new(), missed: VecDeque::new(), count: 0, limit }
    }

    /// One more waits. Says how many were given up for it.
    pub fn add(&mut self, parent: ChunkId, orphan: Orphan) -> usize {
        let siblings = self.of_parent.entry(parent).or_default();
        if siblings.is_empty() {
            self.missed.push_back(parent);
        }
        siblings.push(orphan);
        self.count += 1;
        let mut given_up = 0;
        while self.count > self.limit
            && let Some(first) = self.missed.pop_front()
        {
            given_up += self.take(first).len();
        }
        if self.missed.len() > 2 * self.of_parent.len().max(16) {
            self.missed.retain(|parent| self.of_parent.contains_key(parent));
        }
        given_up
    }

    /// Those of a parent that has come.
    pub fn take(&mut self, parent: ChunkId) -> Vec<Orphan> {
        let children = self.of_parent.remove(&parent).unwrap_or_default();
        self.count -= children.len();
        children
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(number: u32) -> ChunkId {
        let mut bytes = [0; 32];
        bytes[..4].copy_from_slice(&number.to_le_bytes());
        ChunkId::from_bytes(bytes)
    }

    #[test]
    fn children_go_with_their_parent_and_beyond_the_limit_those_who_wait_longest() {
        let mut orphans = Orphans::new(3);
        for (number, parent) in [(10, 1), (20, 2), (11, 1)] {
            assert_eq!(orphans.add(id(parent), number), 0);
        }
        assert_eq!(orphans.add(id(3), 30), 2, "both of the first parent");
        assert!(orphans.take(id(1)).is_empty());
        assert_eq!(orphans.take(id(2)), [20]);
        assert_eq!(orphans.take(id(3)), [30]);
        assert_eq!(orphans.count, 0);
    }

    #[test]
    fn parents_that_came_are_forgotten() {
        let mut orphans = Orphans::new(3);
        for parent in 0..1000 {
            assert_eq!(orphans.add(id(parent), parent + 1), 0);
            assert_eq!(orphans.take(id(parent)).len(), 1);
        }
        assert!(orphans.missed.len() <= 33 && orphans.of_parent.is_empty());
    }
}
