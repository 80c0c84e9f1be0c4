//! What clients are told of chunks that go. Each follows what it is told, as an index of this
//! node's chunks would.

use crate::rig::*;
use forebay_client::Gone;
use forebay_kv::ChunkId;
use forebay_node::{Node, SsdConfig, WriteBackPolicy};
use forebay_store::{ChunkShape, TenantId};
use std::collections::HashSet;
use std::sync::{Arc, Mutex};
use testkit::eventually;

const TENANT: TenantId = TenantId(0);

/// What a client knows of chunks that it watches.
#[derive(Clone, Default)]
struct Index(Arc<Mutex<Known>>);

#[derive(Default)]
struct Known {
    here: HashSet<ChunkId>,
    /// Everything that was told, in order.
    told: Vec<Gone>,
    unanswered: usize,
}

impl Index {
    fn of(peer: &Peer) -> Index {
        let index = Index::default();
        let told = index.clone();
        peer.client.on_gone(move |gone| {
            let mut known = told.0.lock().unwrap();
            match &gone {
                Gone::These(ids) => known.here.retain(|id| !ids.contains(id)),
                Gone::All => known.here.clear(),
            }
            known.told.push(gone);
        });
        index
    }

    fn watch(&self, peer: &Peer, numbers: &[usize]) {
        let ids: Vec<ChunkId> = numbers.iter().map(|number| id(*number)).collect();
        let (index, all) = (self.clone(), ids.clone());
        self.0.lock().unwrap().unanswered += 1;
        peer.client.watch_then(&ids, move |absent| {
            let mut known = index.0.lock().unwrap();
            known.here.extend(all);
            known.here.retain(|id| !absent.contains(id));
            known.unanswered -= 1;
        });
    }

    fn knows(&self, numbers: &[usize]) -> bool {
        let known = self.0.lock().unwrap();
        known.unanswered == 0 && known.here == numbers.iter().map(|number| id(*number)).collect()
    }

    /// How often each was told to be gone.
    fn told(&self, number: usize) -> usize {
        let known = self.0.lock().unwrap();
        known.told.iter().filter(|gone| matches!(gone, Gone::These(ids) if ids.contains(&id(number)))).count()
    }
}

/// A chunk without a parent; its bytes are those that were there.
fn put(node: &Node, number: usize) {
    let shape = ChunkShape::new([LAYER_BYTES; LAYERS]).unwrap();
    let slot = node.store().reserve(TENANT, id(number), None, &shape).unwrap().unwrap();
    let sums = slot.checksums();
    slot.commit(&sums).unwrap();
}

#[test]
fn every_chunk_that_goes_is_told_once_and_to_nobody_who_does_not_watch_it() {
    let site = Site::new();
    let mut config = site.config();
    (config.memory.size, config.memory.largest_chunk) = (256 << 10, 64 << 10);
    let node = Node::start(&config).unwrap();
    let (peer, other) = (site.peer(), site.peer());
    let (index, others) = (Index::of(&peer), Index::of(&other));
    (0..4).for_each(|number| put(&node, number));
    index.watch(&peer, &[0, 1, 2, 3, 7]);
    others.watch(&other, &[3]);
    eventually("it is said what is there", || index.knows(&[0, 1, 2, 3]) && others.knows(&[3]));

    put(&node, 4);
    eventually("what is evicted is told", || index.knows(&[1, 2, 3]));
    assert_eq!(node.store().delete(TENANT, &[id(1)]), 1);
    eventually("what is deleted is told", || index.knows(&[2, 3]));
    let lease = peer.client.lease(&[id(2)], MINUTE_US);
    corrupt(&node, 2, 5);
    assert!(!peer.hit(&lease, 0));
    eventually("what is corrupt is told", || index.knows(&[3]));
    drop(lease);
    assert_eq!(node.store().delete(TENANT, &[id(3), id(4)]), 2);
    eventually("both are told", || index.knows(&[]) && others.knows(&[]));
    assert_eq!((0..5).map(|number| index.told(number)).collect::<Vec<_>>(), [1, 1, 1, 1, 0]);
    assert_eq!((0..5).map(|number| others.told(number)).collect::<Vec<_>>(), [0, 0, 0, 1, 0]);

    put(&node, 0);
    put(&node, 5);
    index.watch(&peer, &[0, 5]);
    eventually("what is watched again is there", || index.knows(&[0, 5]));
    assert_eq!(node.store().delete(TENANT, &[id(0)]), 1);
    eventually("and goes again", || index.knows(&[5]));
    assert_eq!(index.told(0), 2);
}

#[test]
fn a_chunk_that_is_still_on_disk_has_not_gone() {
    let site = Site::new();
    let mut config = site.config();
    (config.memory.size, config.memory.largest_chunk) = (256 << 10, 64 << 10);
    config.ssd = vec![SsdConfig {
        path: site.folder.path().join("log"),
        size: 16 << 20,
        segment_size: 1 << 20,
        create: true,
    }];
    config.write_back = WriteBackPolicy::All;
    let node = Node::start(&config).unwrap();
    let peer = site.peer();
    let index = Index::of(&peer);
    (0..4).for_each(|number| put(&node, number));
    index.watch(&peer, &[0, 1, 2, 3]);
    eventually("all are watched", || index.knows(&[0, 1, 2, 3]));
    node.store().flush().unwrap();
    (4..8).for_each(|number| put(&node, number));
    node.store().flush().unwrap();
    assert_eq!(node.store().locate(TENANT, &[id(0)]), (0, 1), "evicted, and on disk");
    // Told in order: had an eviction been told, it would have been before this.
    assert_eq!(node.store().delete(TENANT, &[id(1)]), 1);
    eventually("what is in neither is told", || index.knows(&[0, 2, 3]));
    assert_eq!((0..4).map(|number| index.told(number)).collect::<Vec<_>>(), [0, 1, 0, 0]);
}

#[test]
fn who_follows_what_is_told_knows_what_is_there_however_chunks_come_and_go_meanwhile() {
    let site = Site::new();
    let node = site.node();
    let peer = site.peer();
    let index = Index::of(&peer);
    std::thread::scope(|scope| {
        for number in 0..4 {
            let (node, index, peer) = (&node, &index, &peer);
            scope.spawn(move || {
                for round in 0..60 {
                    put(node, number);
                    index.watch(peer, &[number]);
                    if round % 7 > number {
                        std::thread::yield_now();
                    }
                    node.store().delete(TENANT, &[id(number)]);
                    if (round + number) % 3 == 0 {
                        index.watch(peer, &[number]);
                    }
                }
                if number < 2 {
                    put(node, number);
                    index.watch(peer, &[number]);
                }
            });
        }
    });
    eventually("the index is what a lookup finds", || index.knows(&[0, 1]));
    assert!((0..4).all(|number| index.told(number) <= 80), "as often as it was watched at most");
}

#[test]
fn with_the_node_all_that_is_known_is_void_and_the_next_node_is_watched_like_the_first() {
    let site = Site::new();
    let node = site.child("node");
    let peer = site.peer();
    let index = Index::of(&peer);
    peer.store(0);
    index.watch(&peer, &[0, 1]);
    eventually("it is said what is there", || index.knows(&[0]));
    node.kill();
    eventually("it is void", || index.0.lock().unwrap().told == [Gone::All]);
    assert!(index.knows(&[]));
    index.watch(&peer, &[0]);
    eventually("nothing is there", || index.knows(&[]));

    let node = site.node();
    eventually("the next node is found", || peer.client.is_connected());
    peer.store(0);
    index.watch(&peer, &[0]);
    eventually("it is there", || index.knows(&[0]));
    assert_eq!(node.store().delete(TENANT, &[id(0)]), 1);
    eventually("it has gone", || index.knows(&[]));
    assert_eq!(index.told(0), 1);
}
