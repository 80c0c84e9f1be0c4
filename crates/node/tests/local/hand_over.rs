//! A node's memory goes over to another node: what clients find then, and what becomes of it when
//! the other one is not what it should be, or dies at any point.

use super::rig::*;
use forebay_client::protocol::bytes::Writer;
use forebay_client::protocol::frame::{Frame, Inbox};
use forebay_client::protocol::socket;
use forebay_client::{NewChunk, Reserved};
use forebay_node::{HandedOver, Node, NodeConfig, NodeError, SsdConfig, Successor, WriteBackPolicy};
use forebay_store::{ChunkShape, StoreEnd, TenantId};
use rustix::fd::OwnedFd;
use rustix::fs::fstat;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;
use testkit::{ended, eventually};

/// Of the frames of a hand-over, as `docs/reference/wire.md` has them.
const TAKE_OVER: u16 = 32;
const PART: u16 = 33;
const READY: u16 = 34;
const YOURS: u16 = 35;
const VERSION: u16 = 1;

/// A node that is to be handed over, and who wants it.
struct Old {
    node: Node,
    config: NodeConfig,
    successors: Receiver<Successor>,
}

impl Old {
    fn new(site: &Site) -> Old {
        Old::of(site.node(), site.config())
    }

    fn of(node: Node, config: NodeConfig) -> Old {
        let (sender, successors) = channel();
        node.on_successor(&config, move |successor| drop(sender.send(successor)));
        Old { node, config, successors }
    }

    /// Hands over to whoever asks next.
    fn hand_over(self) -> Option<Old> {
        let successor = self.asked();
        self.hand_over_to(successor)
    }

    /// Whoever asks next.
    fn asked(&self) -> Successor {
        self.successors.recv_timeout(PATIENCE).unwrap()
    }

    fn hand_over_to(self, successor: Successor) -> Option<Old> {
        match self.node.hand_over(&self.config, successor).unwrap() {
            HandedOver::Gone { chunks, .. } => {
                assert_eq!(chunks, CHUNKS);
                None
            }
            HandedOver::Back(node) => Some(Old::of(*node, self.config)),
        }
    }
}

/// A peer that has stored every chunk.
fn filled(site: &Site) -> Peer {
    let peer = site.peer();
    assert!((0..CHUNKS).all(|number| peer.store(number) == StoreEnd::Stored { bytes: CHUNK_BYTES }));
    peer
}

/// Waits until every chunk is a hit again, on a node that is not `before`.
fn all_hits(peer: &Peer, before: [u8; 16]) {
    eventually("the client has come back", || peer.client.instance().is_some_and(|now| now != before));
    assert_eq!(peer.client.lookup(&ids()), CHUNKS);
    let lease = peer.lease();
    assert_eq!((lease.len(), lease.in_memory()), (CHUNKS, CHUNKS));
    assert!((0..CHUNKS).all(|number| peer.hit(&lease, number)));
}

/// Takes over in another thread while the old node hands over.
fn taken_over(old: Old, config: &NodeConfig) -> (Option<Old>, Result<Node, NodeError>) {
    std::thread::scope(|scope| {
        let new = scope.spawn(|| Node::take_over(config));
        (old.hand_over(), new.join().unwrap())
    })
}

/// A new node that a test speaks for.
struct Raw {
    stream: OwnedFd,
    inbox: Inbox,
}

impl Raw {
    fn ask(site: &Site, version: u16, memory_bytes: u64) -> Raw {
        let stream = socket::connect_to(&site.socket()).unwrap();
        socket::set_timeouts(&stream, Some(PATIENCE), Some(PATIENCE)).unwrap();
        let largest_chunk = site.config().effective().memory.largest_chunk;
        let body = Writer::default().u16(version).u64(memory_bytes).u64(largest_chunk);
        let raw = Raw { stream, inbox: Inbox::default() };
        raw.say(TAKE_OVER, body.0);
        raw
    }

    fn say(&self, kind: u16, body: Vec<u8>) {
        socket::send_all(&self.stream, &Frame::new(kind, 0, body).encode()).unwrap();
    }

    fn hear(&mut self) -> Frame {
        let mut bytes = [0; 4096];
        loop {
            if let Some(frame) = self.inbox.next_frame().unwrap() {
                return frame;
            }
            let (received, _) = socket::receive_with(&self.stream, &mut bytes).unwrap();
            assert!(received > 0, "the old node has closed the connection");
            self.inbox.put(&bytes[..received]);
        }
    }

    /// Goes on up to that point: 0 is when it has asked, 1 to 3 when it has got parts, 4 when it is
    /// ready, 5 when it was told that the memory is its.
    fn go_on_to(&mut self, point: usize) {
        for _ in 0..point.min(3) {
            assert_eq!(self.hear().kind, PART);
        }
        if point >= 4 {
            self.say(READY, Vec::new());
        }
        if point >= 5 {
            assert_eq!(self.hear().kind, YOURS);
        }
    }
}

/// Not a test by itself: the part of a child that asks for the memory, and goes on to a point.
pub fn ask_and_stay(socket: &std::path::Path, point: usize) {
    let site = Site { folder: tempfile::tempdir_in(socket.parent().unwrap()).unwrap() };
    std::os::unix::fs::symlink(socket, site.socket()).unwrap();
    let mut raw = Raw::ask(&site, VERSION, config(socket).memory.size);
    raw.go_on_to(point);
    println!("ready");
    std::thread::sleep(Duration::from_secs(120));
}

#[test]
fn what_is_in_memory_is_there_after_a_hand_over_and_not_a_byte_of_it_is_copied() {
    let site = Site::new();
    let old = Old::new(&site);
    let peer = filled(&site);
    let (before, file) = (old.node.instance(), fstat(old.node.store().arena_fd()).unwrap().st_ino);
    let (left, new) = taken_over(old, &site.config());
    let new = new.unwrap();
    assert!(left.is_none(), "the old node has ended");
    assert_eq!(fstat(new.store().arena_fd()).unwrap().st_ino, file, "the same memory");
    assert_eq!(new.inherited().unwrap().chunks, CHUNKS);
    all_hits(&peer, before);
    assert_eq!(peer.store(3), StoreEnd::AlreadyHere);
    // And once more: what was taken over is handed over.
    let (before, old) = (new.instance(), Old::of(new, site.config()));
    let (left, new) = taken_over(old, &site.config());
    assert!(left.is_none() && new.is_ok());
    all_hits(&peer, before);
}

#[test]
fn what_is_on_ssd_goes_over_too() {
    let site = Site::new();
    let mut config = site.config();
    let path = site.folder.path().join("log");
    config.ssd = vec![SsdConfig { path, size: 16 << 20, segment_size: 1 << 20, create: true }];
    config.write_back = WriteBackPolicy::All;
    let old = Old::of(Node::start(&config).unwrap(), config.clone());
    let (peer, before) = (filled(&site), old.node.instance());
    old.node.store().flush().unwrap();
    let (left, new) = taken_over(old, &config);
    let new = new.unwrap();
    assert!(left.is_none());
    all_hits(&peer, before);
    // Without memory all of it is still there.
    assert_eq!(new.drain(Duration::ZERO).map(drop).map_err(|error| error.to_string()), Ok(()));
    let node = Node::start(&config).unwrap();
    assert_eq!(node.store().locate(TenantId(0), &ids()), (0, CHUNKS));
}

#[test]
fn where_no_node_is_one_that_is_to_take_over_starts_empty() {
    let site = Site::new();
    let node = Node::take_over(&site.config()).unwrap();
    assert_eq!((node.inherited(), node.stat().chunks), (None, 0));
    assert_eq!(site.peer().store(0), StoreEnd::Stored { bytes: CHUNK_BYTES });
}

#[test]
fn clients_under_load_see_no_wrong_byte_and_every_hit_again() {
    let site = Site::new();
    let old = Old::new(&site);
    let (peer, before) = (filled(&site), old.node.instance());
    let (stop, others): (_, Vec<Peer>) = (AtomicBool::new(false), (0..3).map(|_| site.peer()).collect());
    let new = std::thread::scope(|scope| {
        for other in &others {
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    let lease = other.lease();
                    // A miss in between is no fault; `hit` sees that no hit is wrong.
                    (0..lease.len()).for_each(|number| _ = other.hit(&lease, number));
                    std::thread::sleep(Duration::from_millis(1));
                }
            });
        }
        std::thread::sleep(Duration::from_millis(50));
        let (left, new) = taken_over(old, &site.config());
        stop.store(true, Ordering::Relaxed);
        assert!(left.is_none());
        new.unwrap()
    });
    others.iter().chain([&peer]).for_each(|peer| all_hits(peer, before));
    assert_eq!(new.stat().corrupt, 0);
}

#[test]
fn a_successor_of_another_version_or_size_is_refused_and_the_node_goes_on() {
    let site = Site::new();
    let old = Old::new(&site);
    let (peer, instance) = (filled(&site), old.node.instance());
    let mut smaller = site.config();
    smaller.memory.size = 8 << 20;
    let why = Node::take_over(&smaller).unwrap_err().to_string();
    assert!(why.contains("memory.size is 8388608 there and 16777216 here"), "{why}");
    let refused = Raw::ask(&site, VERSION + 1, site.config().memory.size).hear();
    assert!(String::from_utf8_lossy(&refused.body).contains("has version 2 there and 1 here"));
    let unheard = Frame::new(TAKE_OVER, 0, vec![1, 0, 9]);
    let stream = socket::connect_to(&site.socket()).unwrap();
    socket::send_all(&stream, &unheard.encode()).unwrap();
    eventually("all three are counted", || old.node.successors_refused() == 3);
    assert!(old.successors.try_recv().is_err());
    assert_eq!(peer.client.instance(), Some(instance), "no client was disturbed");
    let lease = peer.lease();
    assert!((0..CHUNKS).all(|number| peer.hit(&lease, number)));
}

#[test]
fn nothing_is_handed_over_while_a_client_writes_and_the_node_goes_on() {
    let site = Site::new();
    let old = Old::new(&site);
    let (peer, instance) = (filled(&site), old.node.instance());
    let shape = ChunkShape::new([CHUNK_BYTES]).unwrap();
    let chunk = NewChunk { id: id(200), parent: None };
    let (sender, reserved) = channel();
    peer.client.reserve(&shape, &[chunk], move |_, end| drop(sender.send(end)));
    let Reserved::Slot(slot) = ended(&reserved) else { panic!("there is room") };
    let (back, new) = taken_over(old, &site.config());
    let why = new.unwrap_err().to_string();
    assert!(why.contains("clients still write 1 slots"), "{why}");
    let old = back.unwrap();
    assert_eq!(old.node.instance(), instance, "it has not even ended");
    assert_eq!(peer.client.lookup(&ids()), CHUNKS);
    drop(slot);
    eventually("the slot is given up", || old.node.stat().slots == 0);
    let (left, new) = taken_over(old, &site.config());
    assert!(left.is_none());
    all_hits(&peer, instance);
    drop(new.unwrap());
}

#[test]
fn wherever_a_successor_gives_up_the_node_goes_on_with_every_hit() {
    let site = Site::new();
    let mut old = Old::new(&site);
    let peer = filled(&site);
    for point in 0..=5 {
        let before = old.node.instance();
        let mut raw = Raw::ask(&site, VERSION, site.config().memory.size);
        old = std::thread::scope(|scope| {
            scope.spawn(move || {
                raw.go_on_to(point);
                // It closes the connection.
                drop(raw);
            });
            old.hand_over().expect("it goes on")
        });
        all_hits(&peer, before);
    }
}

#[test]
fn wherever_the_process_of_a_successor_is_killed_the_node_goes_on_with_every_hit() {
    let site = Site::new();
    let mut old = Old::new(&site);
    let peer = filled(&site);
    for point in [0, 2, 5] {
        let before = old.node.instance();
        old = std::thread::scope(|scope| {
            let (sender, asked) = channel();
            let handing = scope.spawn(move || {
                let successor = old.asked();
                sender.send(()).unwrap();
                old.hand_over_to(successor)
            });
            let child = site.child(&format!("successor {point}"));
            // Who is killed before the node has read its question is no successor.
            ended(&asked);
            child.kill();
            handing.join().unwrap().expect("it goes on")
        });
        all_hits(&peer, before);
    }
}
