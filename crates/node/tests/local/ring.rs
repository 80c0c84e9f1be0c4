//! Requests through memory that client and node share: what they bring, what they make visible, and
//! what becomes of them when either end dies or writes nonsense.

use crate::rig::*;
use forebay_client::protocol::answer::{Answer, Reservation};
use forebay_client::protocol::frame::{Frame, Inbox};
use forebay_client::protocol::request::{Hello, NewChunk, Request as Said};
use forebay_client::protocol::socket;
use forebay_client::{LayerCame, LayersRead, Lease, LeasedChunk, NotRead, Ring};
use forebay_node::Node;
use forebay_ring::memory::{self, RingMemory};
use forebay_ring::sleep::is_to_be_woken;
use forebay_ring::{
    Armed, Context, ContextStatus, Header, Layout, NotPosted, Op, Producer, Reaped, Request, Status,
};
use forebay_store::{ChunkShape, StoreEnd, TenantId, checksum};
use forebay_transfer::{Arena, Backing, Class, Span};
use rustix::process::Signal;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};
use testkit::{ended, eventually};

/// Bytes of an arena, which nobody writes now.
pub fn bytes_of(arena: &Arena, offset_bytes: u64, bytes: u64) -> &[u8] {
    assert!(offset_bytes + bytes <= arena.len() as u64);
    // SAFETY: inside of the mapping, and still as long as the lease lives.
    unsafe { std::slice::from_raw_parts(arena.as_ptr().add(offset_bytes as usize), bytes as usize) }
}

fn begin_read(
    ring: &Ring,
    lease: &Lease,
    layer: usize,
    chunks: &[usize],
) -> Result<Receiver<LayersRead>, NotRead> {
    let (sender, receiver) = channel();
    let on_end = move |layers| drop(sender.send(layers));
    ring.read(lease, layer, chunks, (Class::Demand, Some(PATIENCE)), on_end)?;
    Ok(receiver)
}

/// Reads a layer of all chunks, and sees that the bytes are those that were stored.
fn read_right(peer: &Peer, ring: &Ring, lease: &Lease, layer: usize) {
    let chunks: Vec<usize> = (0..CHUNKS).collect();
    let read = ended(&begin_read(ring, lease, layer, &chunks).unwrap());
    assert_eq!(read.bytes, CHUNKS as u64 * LAYER_BYTES);
    let layers = read.places;
    let arena = peer.client.arena().unwrap();
    assert_eq!(layers.len(), CHUNKS);
    for (number, place) in layers.into_iter().enumerate() {
        let place = place.unwrap();
        let there = bytes_of(arena.memory(), place.offset_bytes, LAYER_BYTES);
        let from = layer * LAYER_BYTES as usize;
        let stored = truth(number);
        // Layers were stored as two spans, the later part first.
        let stored = &stored[from..from + LAYER_BYTES as usize];
        assert!(there == [&stored[9000..], &stored[..9000]].concat(), "chunk {number}, layer {layer}");
        assert_eq!(place.checksum, checksum::of_pieces(&[there]));
    }
}

fn store_all(peer: &Peer) {
    assert!((0..CHUNKS).all(|number| peer.store(number) == StoreEnd::Stored { bytes: CHUNK_BYTES }));
}

/// A counter of the node's metrics.
fn counted(node: &Node) -> (u64, u64, u64, u64) {
    let stat = node.rings();
    (stat.done, stat.failed, stat.refused, stat.closed)
}

#[test]
fn layers_of_many_chunks_lie_in_the_arena_when_their_request_has_ended() {
    let site = Site::new();
    let node = site.node();
    let peer = site.peer();
    store_all(&peer);
    let (ring, lease) = (peer.client.ring().unwrap(), peer.lease());
    (0..LAYERS).for_each(|layer| read_right(&peer, &ring, &lease, layer));
    // One that is asked for twice is told twice.
    let twice = ended(&begin_read(&ring, &lease, 1, &[3, 3]).unwrap()).places;
    assert!(twice[0].is_ok() && twice[0] == twice[1]);
    let outside = ended(&begin_read(&ring, &lease, LAYERS, &[0, 1]).unwrap()).places;
    assert_eq!(outside, [Err(ContextStatus::Outside), Err(ContextStatus::Outside)]);
    let beyond = ended(&begin_read(&ring, &lease, 0, &[0, CHUNKS]).unwrap()).places;
    assert!(beyond[0].is_ok());
    assert_eq!(beyond[1], Err(ContextStatus::Gone));
    assert_eq!(counted(&node), ((LAYERS * CHUNKS + 2 + 1) as u64, 3, 0, 0));
    assert_eq!(ring.under_way(), 0);
    let none = begin_read(&ring, &lease, 0, &[]).unwrap_err();
    assert_eq!(none.to_string(), "0 chunks; a request names 1 to 256");
}

#[test]
fn more_requests_than_there_are_slots_wait_for_their_turn_and_end_once() {
    let site = Site::new();
    let node = site.node();
    let peer = site.peer();
    store_all(&peer);
    let (ring, lease) = (peer.client.ring().unwrap(), peer.lease());
    let reads: Vec<_> =
        (0..300).map(|n| begin_read(&ring, &lease, n % LAYERS, &[n % CHUNKS]).unwrap()).collect();
    for read in reads {
        assert!(ended(&read).places[0].is_ok());
        assert!(read.recv().is_err(), "once");
    }
    assert_eq!((counted(&node), ring.under_way()), ((300, 0, 0, 0), 0));
}

#[test]
fn chunks_on_disk_come_through_a_ring_in_whatever_order_their_layers_are_asked_for() {
    let site = Site::new();
    let mut config = site.config();
    let path = site.folder.path().join("log");
    config.ssd = vec![forebay_node::SsdConfig { path, size: 16 << 20, segment_size: 1 << 20, create: true }];
    config.write_back = forebay_node::WriteBackPolicy::All;
    let node = Node::start(&config).unwrap();
    let peer = site.peer();
    store_all(&peer);
    drop(peer);
    node.drain(PATIENCE).unwrap();
    let _node = Node::start(&config).unwrap();
    let peer = site.peer();
    let (ring, lease) = (peer.client.ring().unwrap(), peer.lease());
    assert_eq!(lease.on_disk(), CHUNKS);
    (0..LAYERS).rev().for_each(|layer| read_right(&peer, &ring, &lease, layer));
}

#[test]
fn a_client_has_one_ring_and_reads_nothing_without_a_lease() {
    let site = Site::new();
    let _node = site.node();
    let peer = site.peer();
    store_all(&peer);
    let ring = peer.client.ring().unwrap();
    read_right(&peer, &peer.client.ring().unwrap(), &peer.lease(), 1);
    let mut raw = Raw::connect(&site);
    let Answer::Refused(_, why) = raw.ask(&Said::OpenRing) else { panic!("a second one") };
    assert_eq!(why, "the client has a ring already");
    let lease = peer.lease();
    read_right(&peer, &ring, &lease, 0);
    let empty = peer.client.lease(&[id(CHUNKS + 1)], MINUTE_US);
    assert!(begin_read(&ring, &empty, 0, &[0]).is_err());
}

#[test]
fn who_waits_for_a_node_that_dies_or_is_stuck_is_told() {
    for dies in [true, false] {
        let site = Site::new();
        let node = site.child("node");
        let options = forebay_client::ClientOptions { answer_limit_us: 1_000_000, ..options(&site.socket()) };
        let peer = connect(options).unwrap();
        store_all(&peer);
        let (ring, lease) = (peer.client.ring().unwrap(), peer.lease());
        read_right(&peer, &ring, &lease, 0);
        // Nobody takes it from the ring any more.
        node.signal(Signal::STOP);
        let waiting = begin_read(&ring, &lease, 0, &[0, 1]).unwrap();
        if dies {
            node.signal(Signal::KILL);
        }
        let told = Instant::now();
        assert_eq!(ended(&waiting).places, [Err(ContextStatus::Gone), Err(ContextStatus::Gone)]);
        assert!(told.elapsed() < Duration::from_secs(30));
        assert!(begin_read(&ring, &lease, 0, &[0]).is_err());
    }
}

/// A client by hand, with its end of the ring.
pub struct Raw {
    socket: OwnedFd,
    inbox: Inbox,
    pub arena: Arena,
    pub memory: RingMemory,
    producer: Producer,
}

impl Raw {
    pub fn connect(site: &Site) -> Raw {
        let socket = socket::connect_to(&site.socket()).unwrap();
        let mut inbox = Inbox::default();
        let hello = Hello { token: Vec::new(), name: "by hand".into(), tenant: TenantId::default() };
        let (welcome, arena) = ask(&socket, &mut inbox, &Said::Hello(hello));
        assert!(matches!(welcome, Answer::Welcome { .. }));
        let arena = Arena::attach(arena.unwrap()).unwrap();
        let (answer, file) = ask(&socket, &mut inbox, &Said::OpenRing);
        assert_eq!(answer, Answer::Ring);
        let (memory, layout) = RingMemory::attach(file.unwrap()).unwrap();
        let producer = Producer::new(layout, &memory.header());
        Raw { socket, inbox, arena, memory, producer }
    }

    fn ask(&mut self, request: &Said) -> Answer {
        ask(&self.socket, &mut self.inbox, request).0
    }

    pub fn wake(&self) {
        let asleep = self.memory.header().consumer_asleep();
        if is_to_be_woken(asleep) {
            memory::wake(asleep);
        }
    }

    fn post(&mut self, request: Request, contexts: &[Context]) -> Result<u16, NotPosted> {
        let posted = self.producer.post(self.memory.words(), &request, contexts);
        self.wake();
        posted
    }

    pub fn layout(&self) -> Layout {
        Header::find(self.memory.words()).unwrap().1
    }

    /// As a GPU has it: it publishes what its host has written, and wakes nobody.
    pub fn arm(&mut self, request: Request) -> Armed {
        self.producer.arm(self.memory.words(), &request, &[]).unwrap()
    }

    /// A slot for a chunk, and where it lies in the arena.
    pub fn reserve(&mut self, number: usize, shape: ChunkShape) -> (u64, u64) {
        let chunks = vec![NewChunk { id: id(number), parent: number.checked_sub(1).map(id) }];
        let Answer::Reserved(reserved) = self.ask(&Said::Reserve { shape, chunks }) else {
            panic!("not reserved")
        };
        let [Reservation::Slot { slot, offset_bytes }] = reserved[..] else { panic!("{reserved:?}") };
        (slot, offset_bytes)
    }

    pub fn reap(&mut self) -> Reaped {
        let mut reaped = None;
        eventually("the request ends", || {
            reaped = self.producer.reap(self.memory.words()).unwrap();
            reaped.is_some()
        });
        reaped.unwrap()
    }

    fn is_closed(&self) -> bool {
        Header::of(self.memory.words()).is_closed()
    }
}

fn ask(socket: &OwnedFd, inbox: &mut Inbox, request: &Said) -> (Answer, Option<OwnedFd>) {
    socket::send_all(socket, &request.encode(1).encode()).unwrap();
    let (mut bytes, mut file) = ([0; 4096], None);
    let frame: Frame = loop {
        if let Some(frame) = inbox.next_frame().unwrap() {
            break frame;
        }
        let (received, came) = socket::receive_with(socket, &mut bytes).unwrap();
        assert_ne!(received, 0, "the node hung up");
        file = file.or(came);
        inbox.put(&bytes[..received]);
    };
    (Answer::decode(&frame).unwrap(), file)
}

pub fn request(op: Op, lease: u64, contexts: u16) -> Request {
    Request { user: 5, lease, op, class: 0, contexts, within_us: 0 }
}

/// What is done without the node's touching a byte: the layers are in the slot, and whoever has
/// filled them says what they sum up to.
#[test]
fn a_slot_that_is_committed_through_a_ring_is_visible_with_the_checksums_that_were_given() {
    let site = Site::new();
    let node = site.node();
    let mut raw = Raw::connect(&site);
    let (slot, offset_bytes) = raw.reserve(0, ChunkShape::new([LAYER_BYTES; LAYERS]).unwrap());
    let bytes = truth(0);
    // SAFETY: the slot is this client's, and inside of the arena.
    unsafe {
        let to = raw.arena.as_ptr().add(offset_bytes as usize);
        std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len());
    }
    let layers = bytes.chunks(LAYER_BYTES as usize).zip(0..);
    let contexts: Vec<Context> = layers
        .map(|(bytes, layer)| Context { extent: 0, layer, checksum: checksum::of_pieces(&[bytes]) })
        .collect();
    let commit = |slot| request(Op::Commit, slot, LAYERS as u16);
    let mut wrong = contexts.clone();
    wrong.swap(0, 1);
    raw.post(commit(slot), &wrong).unwrap();
    assert_eq!(raw.reap().completion.status, Status::Malformed, "layers are in order");
    raw.post(commit(slot + 1), &contexts).unwrap();
    assert_eq!(raw.reap().completion.status, Status::NoLease, "it is nobody's slot");
    // As a GPU does: it publishes what its host has written, and wakes nobody.
    let armed = raw.producer.arm(raw.memory.words(), &commit(slot), &contexts).unwrap();
    raw.wake();
    raw.memory.words()[armed.word].store(armed.value, Ordering::Release);
    let reaped = raw.reap();
    assert_eq!((reaped.completion.status, reaped.completion.contexts_done), (Status::Done, LAYERS as u32));
    let found = node.store().read_guard_by_id(TenantId(0), &id(0)).unwrap();
    assert!(found.check());
    assert!(bytes_of(&raw.arena, found.offset_bytes(), CHUNK_BYTES) == truth(0));
    assert_eq!(counted(&node), (LAYERS as u64, 0, 2, 0));
}

#[test]
fn a_lease_of_another_client_is_not_read_through_a_ring() {
    let site = Site::new();
    let node = site.node();
    let peer = site.peer();
    store_all(&peer);
    let _lease = peer.lease();
    let mut raw = Raw::connect(&site);
    for lease in 0..4 {
        let contexts = [Context { extent: 0, layer: 0, checksum: 0 }];
        raw.post(request(Op::Read, lease, 1), &contexts).unwrap();
        let reaped = raw.reap();
        assert_eq!(
            (reaped.completion.status, reaped.results[0].status),
            (Status::Partial, ContextStatus::Gone)
        );
    }
    assert_eq!(counted(&node).1, 4);
}

#[test]
fn a_client_that_writes_nonsense_loses_its_ring_and_disturbs_no_other() {
    let site = Site::new();
    let node = site.node();
    let peer = site.peer();
    store_all(&peer);
    let (ring, lease) = (peer.client.ring().unwrap(), peer.lease());
    let mut raw = Raw::connect(&site);
    let stray: Said = Said::Ping;
    assert_eq!(raw.ask(&stray), Answer::Pong);
    // The sequence word of the first slot.
    raw.memory.words()[512 + 7].store(77, Ordering::Release);
    raw.wake();
    eventually("its ring is closed", || raw.is_closed());
    assert_eq!(counted(&node).3, 1);
    let refused = raw.post(request(Op::Read, 1, 1), &[Context::default()]);
    assert_eq!(refused, Err(NotPosted::Closed));
    assert_eq!(raw.ask(&stray), Answer::Pong, "its connection goes on");
    for word in raw.memory.words() {
        word.store(u64::MAX, Ordering::Relaxed);
    }
    (0..LAYERS).for_each(|layer| read_right(&peer, &ring, &lease, layer));
    drop(raw);
    eventually("it is gone", || node.clients().len() == 1);
}

#[test]
fn a_request_that_is_none_is_counted_and_the_next_one_is_served() {
    let site = Site::new();
    let node = site.node();
    let mut raw = Raw::connect(&site);
    let slot = raw.post(request(Op::Nop, 0, 0), &[]).unwrap();
    assert_eq!(raw.reap().completion.status, Status::Done);
    let at = 512 + 8 * (usize::from(slot) + 1);
    raw.memory.words()[at + 3].store(9, Ordering::Relaxed);
    raw.memory.words()[at + 2].store(1, Ordering::Relaxed);
    raw.memory.words()[at + 7].store(2, Ordering::Release);
    raw.wake();
    eventually("it is counted", || counted(&node).2 == 1);
    assert!(!raw.is_closed());
}

/// Layers as an engine has them: they fill pages.
const LONG_LAYER_BYTES: usize = 64 << 10;

/// A node that has a chunk of such layers on its disk alone. All bytes of a layer are the same.
fn node_with_long_layers(site: &Site, layers: usize) -> Node {
    let mut config = site.config();
    let chunk_bytes = layers * LONG_LAYER_BYTES;
    config.memory.largest_chunk = chunk_bytes as u64;
    let path = site.folder.path().join("log");
    config.ssd = vec![forebay_node::SsdConfig { path, size: 64 << 20, segment_size: 8 << 20, create: true }];
    config.write_back = forebay_node::WriteBackPolicy::All;
    let node = Node::start(&config).unwrap();
    let writer = Writer::new(site, chunk_bytes);
    let bytes: Vec<u8> = (0..chunk_bytes).map(|at| (at / LONG_LAYER_BYTES) as u8 + 1).collect();
    assert!(writer.source.write(0, &bytes));
    let layer =
        |layer| vec![Span::new(writer.region, (layer * LONG_LAYER_BYTES) as u64, LONG_LAYER_BYTES as u64)];
    let layers: Vec<Vec<Span>> = (0..layers).map(layer).collect();
    let (sender, stored) = channel();
    let on_end = move |end| drop(sender.send(end));
    writer.client.store_chunk(id(0), None, &layers, Class::WriteBack, on_end).unwrap();
    assert!(matches!(ended(&stored), StoreEnd::Stored { .. }));
    drop(writer);
    node.drain(PATIENCE).unwrap();
    Node::start(&config).unwrap()
}

#[test]
fn the_first_layers_of_chunks_on_disk_are_told_before_the_last_ones_are_read() {
    const LAYERS: usize = 16;
    let site = Site::new();
    let node = node_with_long_layers(&site, LAYERS);
    let peer = site.peer();
    let ring = peer.client.ring().unwrap();
    let lease = peer.client.lease(&[id(0)], MINUTE_US);
    let arena = peer.client.arena().unwrap();
    let read = |layer: usize| {
        let place = ended(&begin_read(&ring, &lease, layer, &[0]).unwrap()).places[0].unwrap();
        let there = bytes_of(arena.memory(), place.offset_bytes, LONG_LAYER_BYTES as u64);
        assert!(
            there.iter().all(|byte| *byte == layer as u8 + 1)
                && place.checksum == checksum::of_pieces(&[there])
        );
    };
    (0..8).for_each(read);
    let is_in_memory = || node.store().read_guard_by_id(TenantId(0), &id(0)).is_some();
    assert!(!is_in_memory(), "half of it has been read");
    (8..LAYERS).rev().for_each(read);
    assert!(is_in_memory());
    (0..LAYERS).for_each(read);
}

/// The layers of the only chunk of a lease, all of which come.
fn bring_all(peer: &Peer, lease: &Arc<Lease>, layers: usize) -> Vec<LeasedChunk> {
    let shape = Arc::new(ChunkShape::new(vec![LONG_LAYER_BYTES as u64; layers]).unwrap());
    let (sender, came) = channel();
    let on_layer = move |layer: LayerCame| drop(sender.send(layer));
    assert!(peer.client.bring_layers(lease, &[0], &shape, (Class::Demand, None), on_layer));
    let mut all: Vec<LayerCame> = (0..layers).map(|_| ended(&came)).collect();
    all.sort_by_key(|came| came.layer);
    all.into_iter().map(|mut came| came.chunks.remove(0).1.unwrap()).collect()
}

#[test]
fn a_layer_that_changes_in_the_arena_behind_a_ring_is_counted_and_a_miss_for_all() {
    // Chunks that are read at once, and layer by layer.
    for layers in [1, 16] {
        let site = Site::new();
        let node = node_with_long_layers(&site, layers);
        let peer = site.peer();
        let lease = Arc::new(peer.client.lease(&[id(0)], MINUTE_US));
        let chunk = bring_all(&peer, &lease, layers).remove(0);
        let place = chunk.layer(0).unwrap();
        let sum = || {
            let arena = peer.client.arena().unwrap();
            Some(checksum::of_pieces(&[bytes_of(arena.memory(), place.offset, place.len)]))
        };
        chunk.verify_sum(0, sum()).unwrap();
        corrupt(&node, 0, 5);
        chunk.verify_sum(0, sum()).unwrap_err();
        eventually("the node counts it", || node.stat().corrupt == 1);
        assert!(node.store().read_guard_by_id(TenantId(0), &id(0)).is_none(), "{layers}");
        drop((chunk, lease));
        // What is on the disk is right.
        let lease = Arc::new(peer.client.lease(&[id(0)], MINUTE_US));
        let chunk = bring_all(&peer, &lease, layers).remove(0);
        let place = chunk.layer(0).unwrap();
        let arena = peer.client.arena().unwrap();
        assert!(bytes_of(arena.memory(), place.offset, place.len).iter().all(|byte| *byte == 1));
        assert_eq!(node.stat().corrupt, 1);
    }
}
