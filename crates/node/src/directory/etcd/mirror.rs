//! What etcd says about nodes and chunks, as of a revision, in memory. This file applies changes
//! and answers.

use super::keys::{Key, Keys};
use super::wire::Entry;
use crate::directory::{DirectoryFaults, NodeRecord};
use forebay_kv::ChunkId;
use std::collections::{BTreeSet, HashMap};

const NODES_MAX: usize = 4096;

/// A copy of everything below the prefix.
#[derive(Debug, Clone, Default)]
pub(super) struct Mirror {
    nodes: HashMap<[u8; 16], NodeRecord>,
    holdings: BTreeSet<(ChunkId, [u8; 16])>,
    /// Everything up to this revision is in here.
    pub revision: i64,
}

impl Mirror {
    /// Takes in a key with its value. What is not what it should be is not taken in, and counted.
    pub fn put(&mut self, keys: &Keys, entry: &Entry, holdings_max: usize, faults: &mut DirectoryFaults) {
        match keys.read(&entry.key) {
            Some(Key::Node(node)) => match NodeRecord::from_json(&entry.value) {
                Ok(record) if record.node == node => self.put_node(record, faults),
                // What was there before is not true any more, whatever this is.
                Ok(_) | Err(_) => {
                    self.nodes.remove(&node);
                    faults.bad_entries += 1;
                }
            },
            Some(Key::Holding(chunk, node)) => {
                if self.holdings.len() < holdings_max || self.holdings.contains(&(chunk, node)) {
                    self.holdings.insert((chunk, node));
                } else {
                    faults.over_limit += 1;
                }
            }
            None => faults.bad_entries += 1,
        }
    }

    fn put_node(&mut self, record: NodeRecord, faults: &mut DirectoryFaults) {
        if self.nodes.len() < NODES_MAX || self.nodes.contains_key(&record.node) {
            self.nodes.insert(record.node, record);
        } else {
            faults.over_limit += 1;
        }
    }

    pub fn delete(&mut self, keys: &Keys, key: &[u8]) {
        match keys.read(key) {
            Some(Key::Node(node)) => {
                self.nodes.remove(&node);
            }
            Some(Key::Holding(chunk, node)) => {
                self.holdings.remove(&(chunk, node));
            }
            None => {}
        }
    }

    pub fn nodes_but(&self, me: [u8; 16]) -> impl Iterator<Item = &NodeRecord> {
        self.nodes.values().filter(move |record| record.node != me)
    }

    /// Which nodes with a record, but one, are said to hold a chunk.
    pub fn holders_but(&self, chunk: ChunkId, me: [u8; 16]) -> Vec<[u8; 16]> {
        let holdings = self.holdings.range((chunk, [0; 16])..=(chunk, [0xFF; 16]));
        let nodes = holdings.map(|&(_, node)| node);
        nodes.filter(|node| *node != me && self.nodes.contains_key(node)).collect()
    }

    pub fn holdings(&self) -> usize {
        self.holdings.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(node: u8) -> NodeRecord {
        let address = "127.0.0.1:7000".parse().unwrap();
        NodeRecord { node: [node; 16], instance: [9; 16], name: format!("node {node}"), address }
    }

    fn entry(keys: &Keys, key: Key, value: &str) -> Entry {
        Entry { key: keys.write(key), value: value.as_bytes().to_vec(), ..Entry::default() }
    }

    #[test]
    fn entries_that_are_not_what_they_should_be_are_ignored_and_counted() {
        let keys = Keys::new("/f");
        let (mut mirror, mut faults) = (Mirror::default(), DirectoryFaults::default());
        let mut put = |mirror: &mut Mirror, key, value: &str| {
            mirror.put(&keys, &entry(&keys, key, value), 2, &mut faults);
        };
        put(&mut mirror, Key::Node([1; 16]), &record(1).to_json());
        put(&mut mirror, Key::Node([2; 16]), &record(2).to_json());
        put(&mut mirror, Key::Node([3; 16]), &record(4).to_json());
        put(&mut mirror, Key::Node([2; 16]), "garbage");
        let chunk = ChunkId::from_bytes([7; 32]);
        put(&mut mirror, Key::Holding(chunk, [1; 16]), "");
        put(&mut mirror, Key::Holding(chunk, [2; 16]), "");
        put(&mut mirror, Key::Holding(chunk, [3; 16]), "");
        assert_eq!(mirror.nodes_but([0; 16]).collect::<Vec<_>>(), [&record(1)]);
        assert_eq!(mirror.holders_but(chunk, [0; 16]), [[1; 16]], "only nodes that can be reached");
        assert!(mirror.holders_but(chunk, [1; 16]).is_empty(), "not the one that asks");
        mirror.put(&keys, &Entry { key: b"/f/what".to_vec(), ..Entry::default() }, 2, &mut faults);
        assert_eq!((faults.bad_entries, faults.over_limit), (3, 1));
    }
}
