//! The node and its clients through the real socket, in one process and in several: what clients
//! get, what becomes of the dead, and what the node makes of the hostile.
#![allow(clippy::unwrap_used)]

mod control;
mod hand_over;
mod hostile;
mod rig;
mod ring;
mod ring_gpu;
mod tenants;
mod together;
mod watch;

use forebay_client::{Client, ClientOptions, ConnectError, NewChunk, NodeStat, Reserved};
use forebay_kv::ChunkId;
use forebay_node::Node;
use forebay_store::{ChunkShape, NotVerified, StoreEnd};
use forebay_transfer::{Class, Span};
use rig::*;
use rustix::process::Signal;
use std::time::{Duration, Instant};
use testkit::{ended, eventually};

/// Not a test by itself: the children of the others.
#[test]
fn a_child_is_what_it_is_told_to_be() {
    let Some((role, socket)) = role() else { return };
    if let Some(point) = role.strip_prefix("successor ") {
        hand_over::ask_and_stay(&socket, point.parse().unwrap());
    }
    let _node = (role == "node").then(|| Node::start(&config(&socket)).unwrap());
    let _slot = (role == "reserver").then(|| hostile::raw_reservation(&socket));
    let _client = (role == "writer" || role == "parent").then(|| {
        let peer = connect(options(&socket)).unwrap();
        assert!((0..CHUNKS).all(|number| peer.store(number) == StoreEnd::Stored { bytes: CHUNK_BYTES }));
        let lease = peer.lease();
        (peer, lease)
    });
    let _lease_of_no_time = (role == "hasty").then(|| {
        let peer = connect(options(&socket)).unwrap();
        assert_eq!(peer.store(0), StoreEnd::Stored { bytes: CHUNK_BYTES });
        let lease = peer.client.lease(&ids(), 0);
        (peer, lease)
    });
    if role == "parent" {
        hostile::leave_sockets_to_a_child();
    }
    println!("ready");
    std::thread::sleep(Duration::from_secs(120));
}

#[test]
fn what_one_process_stores_another_loads_with_every_byte_right() {
    let site = Site::new();
    let _node = site.child("node");
    let writer = site.child("writer");
    writer.kill();
    let peer = site.peer();
    assert_eq!(peer.client.lookup(&ids()), CHUNKS);
    let lease = peer.lease();
    assert_eq!((lease.len(), lease.in_memory()), (CHUNKS, CHUNKS));
    assert!((0..CHUNKS).all(|number| peer.hit(&lease, number)));
    assert_eq!(peer.store(3), StoreEnd::AlreadyHere);
}

#[test]
fn a_killed_client_gives_back_its_leases_at_once_and_its_slots_when_it_has_exited() {
    let site = Site::new();
    let node = site.node();
    let holder = site.child("writer");
    assert_eq!((node.stat().leases, node.stat().chunks), (1, CHUNKS as u64));
    assert_eq!(node.clients().len(), 1);
    holder.kill();
    eventually("the lease has ended", || node.stat().leases == 0 && node.stat().clients == 0);
    // Nothing of it holds a chunk any more: all of memory can be taken by others.
    assert_eq!(node.store().stat().leases, 0);
    assert_eq!(node.store().stat().arena.draining_bytes, 0);
}

#[test]
fn a_killed_client_gives_back_its_leases_although_a_child_of_it_has_its_socket() {
    let site = Site::new();
    let node = site.node();
    let holder = site.child("parent");
    assert_eq!(node.stat().leases, 1);
    let since = Instant::now();
    holder.kill();
    eventually("the lease has ended", || node.stat().leases == 0 && node.stat().clients == 0);
    assert!(since.elapsed() < hostile::CHILD_LIVES / 2, "not with the child");
}

#[test]
fn a_slot_of_a_client_that_went_without_a_word_is_nobodys_until_its_process_has_exited() {
    let site = Site::new();
    let node = site.node();
    let reserver = site.child("reserver");
    // This process goes on after its connection has ended.
    drop(hostile::raw_reservation(&site.socket()));
    eventually("both slots are there", || node.stat().slots == 2 || node.stat().orphans == 1);
    eventually("one has no connection", || node.stat().orphans == 1);
    reserver.kill();
    eventually("the dead one's slot is free", || node.stat().slots == 1);
    std::thread::sleep(Duration::from_millis(50));
    assert_eq!((node.stat().slots, node.store().stat().rows), (1, 1), "the living one's is not");
}

#[test]
fn slots_that_a_frozen_node_gave_to_a_connection_that_had_ended_are_free_while_their_client_lives() {
    let site = Site::new();
    let node = site.child("node");
    let peer = connect(ClientOptions { answer_limit_us: 1_000_000, ..options(&site.socket()) }).unwrap();
    node.signal(Signal::STOP);
    let mut asked = 0;
    while peer.client.is_connected() {
        let (id, shape) = (ChunkId::from_bytes([asked as u8; 32]), ChunkShape::new([1000]).unwrap());
        let is_refused = |_, reserved| assert!(matches!(reserved, Reserved::Refused(_)));
        peer.client.reserve(&shape, &[NewChunk { id, parent: None }], is_refused);
        asked += 1;
    }
    assert!(asked > 1, "some are on their way to it");
    // By then no thread has the connection any more.
    std::thread::sleep(Duration::from_millis(1_500));
    node.signal(Signal::CONT);
    let mut last = None;
    let is_free = |last: &mut Option<NodeStat>| {
        *last = peer.client.stat().or(*last);
        last.is_some_and(|stat| (stat.clients, stat.slots) == (1, 0))
    };
    eventually("their slots are free", || is_free(&mut last));
    assert_eq!(last.unwrap().orphans, 0);
}

#[test]
fn a_goodbye_behind_answers_that_nobody_takes_is_heard() {
    let site = Site::new();
    let node = site.node();
    let stream = hostile::raw_reservation(&site.socket());
    eventually("it has a slot", || node.stat().slots == 1);
    hostile::leave_unheard(stream);
    eventually("the slot is free", || (node.stat().clients, node.stat().slots) == (0, 0));
    assert_eq!(node.stat().orphans, 0);
}

#[test]
fn a_lease_of_no_time_keeps_nobody_busy() {
    let site = Site::new();
    let node = site.child("node");
    let client = site.child("hasty");
    let worked = || node.worked() + client.worked();
    let before = worked();
    std::thread::sleep(Duration::from_secs(1));
    let hundredths = worked() - before;
    assert!(hundredths < 20, "{hundredths} hundredths of a second");
}

#[test]
fn nothing_reads_what_a_chunk_is_stored_from_once_its_mover_has_ended_and_the_client_has_settled() {
    // So many spans that a checksum takes milliseconds.
    const BYTES: u64 = 4 << 20;
    const SPAN_BYTES: u64 = 32;
    let site = Site::new();
    let mut config = site.config();
    config.memory.largest_chunk = BYTES;
    let _node = Node::start(&config).unwrap();
    let reader = site.peer();
    let Writer { client, mover, source, region } = Writer::new(&site, BYTES as usize);
    let spans = (0..BYTES / SPAN_BYTES).map(|nth| Span::new(region, nth * SPAN_BYTES, SPAN_BYTES));
    let (told, stored) = std::sync::mpsc::channel();
    let on_end = move |end| told.send(end).unwrap();
    client.store_chunk(id(0), None, &[spans.collect()], Class::WriteBack, on_end).unwrap();
    let handle = mover.handle();
    eventually("it is copied", || handle.telemetry().unwrap().classes.iter().any(|class| class.done == 1));
    drop(mover);
    client.settle();
    assert!(source.write(BYTES as usize - 1, &[1]));
    assert_eq!(ended(&stored), StoreEnd::Stored { bytes: BYTES });
    let lease = reader.lease();
    let chunk = reader.client.leased_chunk(&lease, 0).unwrap();
    chunk.verify(0, &[chunk.layer(0).unwrap()]).expect("the sum is of what was stored");
}

#[test]
fn a_killed_node_is_seen_at_once_and_the_next_one_is_found() {
    let site = Site::new();
    let node = site.child("node");
    let peer = site.peer();
    assert_eq!(peer.store(0), StoreEnd::Stored { bytes: CHUNK_BYTES });
    let (lease, instance) = (peer.lease(), peer.client.instance().unwrap());
    assert!(peer.hit(&lease, 0));
    node.kill();
    eventually("the death is seen, long before anything is late", || !peer.client.is_connected());
    assert!(!lease.is_alive() && peer.begin_load(&lease, 0).is_err());
    assert!(matches!(peer.verify(&lease, 0), Err(NotVerified::Unreadable(_))));
    assert_eq!((peer.client.lookup(&ids()), peer.lease().len()), (0, 0));

    let _node = site.child("node");
    eventually("the next node is found", || peer.client.is_connected());
    assert_ne!(peer.client.instance(), Some(instance));
    assert!(!lease.is_alive(), "a lease of the old node never lives again");
    assert_eq!(peer.store(0), StoreEnd::Stored { bytes: CHUNK_BYTES });
    let lease = peer.lease();
    assert!(peer.hit(&lease, 0));
}

#[test]
fn a_frozen_node_is_found_by_the_limit_and_is_used_again_when_it_thaws() {
    let site = Site::new();
    let node = site.child("node");
    let peer = connect(ClientOptions { answer_limit_us: 3_000_000, ..options(&site.socket()) }).unwrap();
    node.signal(Signal::STOP);
    let stored = peer.begin_store(0);
    assert!(matches!(ended(&stored), StoreEnd::Failed(_)), "the node never answers");
    assert!(!peer.client.is_connected());
    assert_eq!(peer.client.lookup(&ids()), 0);
    node.signal(Signal::CONT);
    eventually("it is found again", || peer.client.is_connected());
    eventually("its slots are free", || peer.client.stat().is_some_and(|stat| stat.slots == 0));
}

#[test]
fn a_frozen_node_is_found_while_copies_still_use_the_arena_of_the_one_before_it() {
    let site = Site::new();
    let first = site.child("node");
    let limit = ClientOptions { answer_limit_us: 3_000_000, ..options(&site.socket()) };
    let (peer, begun) = connect_stuck(limit);
    let _stored = peer.begin_store(0);
    let _copy = ended(&begun);
    first.kill();
    let second = site.child("node");
    eventually("it is found", || peer.client.is_connected());
    second.signal(Signal::STOP);
    let (told, heard) = std::sync::mpsc::channel();
    peer.client.hold_then(&ids(), MINUTE_US, move |lease| told.send(lease.is_ok()).unwrap());
    assert!(!ended(&heard), "nobody answers");
    assert!(!peer.client.is_connected());
}

#[test]
fn a_corrupt_byte_in_the_arena_is_never_a_hit() {
    let site = Site::new();
    let node = site.node();
    let peer = site.peer();
    assert!((0..2).all(|number| peer.store(number) == StoreEnd::Stored { bytes: CHUNK_BYTES }));
    let lease = peer.lease();
    corrupt(&node, 1, 777);
    assert!(peer.hit(&lease, 0) && !peer.hit(&lease, 1));
    eventually("the node has looked for itself", || node.stat().corrupt == 1);
    assert_eq!(peer.client.lookup(&ids()), 1, "nobody finds it any more");
}

#[test]
fn bytes_that_a_client_got_wrong_by_itself_cost_nobody_else_the_chunk() {
    let site = Site::new();
    let node = site.node();
    let peer = site.peer();
    assert_eq!(peer.store(0), StoreEnd::Stored { bytes: CHUNK_BYTES });
    let lease = peer.lease();
    assert!(peer.hit(&lease, 0));
    let wrong = vec![0; LAYER_BYTES as usize];
    assert!(matches!(peer.client.verify(&lease, 0, 0, &[&wrong]), Err(NotVerified::Corrupt { .. })));
    assert!(peer.client.stat().is_some(), "what was told before is answered before");
    assert_eq!((node.stat().corrupt, peer.client.lookup(&ids())), (0, 1));
}

#[test]
fn limits_refuse_with_reasons() {
    let site = Site::new();
    let mut config = site.config();
    config.limits.clients = 1;
    config.limits.leases_per_client = 1;
    config.token = b"secret".to_vec();
    let node = Node::start(&config).unwrap();
    let refused = connect(options(&site.socket())).err().unwrap().to_string();
    assert!(refused.contains("the token is wrong"), "{refused}");
    eventually("its place is free", || node.stat().refused == 1);
    let with_token = ClientOptions { token: b"secret".to_vec(), ..options(&site.socket()) };
    let mut peer = None;
    eventually("there is room again", || {
        peer = connect(with_token.clone()).ok();
        peer.is_some()
    });
    let peer = peer.unwrap();
    let refused = connect(with_token).err().unwrap().to_string();
    assert!(refused.contains("1 clients are connected; no more may be"), "{refused}");
    assert_eq!(peer.store(0), StoreEnd::Stored { bytes: CHUNK_BYTES });
    let first = peer.lease();
    assert!(peer.lease().is_empty(), "a second lease is one too many");
    drop(first);
    assert_eq!(peer.lease().len(), 1);
    let second = Node::start(&config).unwrap_err().to_string();
    assert!(second.contains("another node answers on this socket"), "{second}");
}

#[test]
fn whoever_is_not_let_in_is_counted_whatever_the_reason() {
    let site = Site::new();
    let mut config = site.config();
    config.limits.clients = 1;
    config.token = b"secret".to_vec();
    let node = Node::start(&config).unwrap();
    assert!(connect(options(&site.socket())).is_err(), "the token is wrong");
    eventually("that is counted", || node.stat().refused == 1);
    let with_token = || ClientOptions { token: b"secret".to_vec(), ..options(&site.socket()) };
    let mut first = None;
    eventually("there is room again", || {
        first = connect(with_token()).ok();
        first.is_some()
    });
    let before = node.stat().refused;
    assert!(connect(with_token()).is_err(), "the node is full");
    assert_eq!(node.stat().refused, before + 1);
}

#[test]
fn a_client_that_a_node_cannot_see_is_refused_and_told_why() {
    let site = Site::new();
    let Some(_node) = site.child_apart("node") else { return };
    let refused = connect(options(&site.socket())).err().unwrap().to_string();
    let why = "the client's process cannot be watched: its number is not known here; is it in another process namespace?";
    assert!(refused.ends_with(why), "{refused}");
}

#[test]
fn a_full_node_is_waited_for_and_one_that_refuses_this_client_is_not() {
    let site = Site::new();
    let mut config = site.config();
    config.limits.clients = 1;
    config.token = b"secret".to_vec();
    let _node = Node::start(&config).unwrap();
    let refused = connect_by(options(&site.socket()), Client::connect_or_wait).err().unwrap();
    assert!(matches!(refused, ConnectError::Refused(_)), "{refused}");
    let with_token = || ClientOptions { token: b"secret".to_vec(), ..options(&site.socket()) };
    let mut first = None;
    eventually("there is room again", || {
        first = connect(with_token()).ok();
        first.is_some()
    });
    let second = connect_by(with_token(), Client::connect_or_wait).unwrap();
    assert!(!second.client.is_connected());
    let why = second.client.why_gone().unwrap();
    assert!(why.contains("1 clients are connected; no more may be"), "{why}");
    let (told, heard) = std::sync::mpsc::channel();
    second.client.lease_then(&ids(), MINUTE_US, move |lease| told.send(lease.err()).unwrap());
    assert_eq!(ended(&heard).as_ref(), Some(&why), "whoever asks is told");
    drop(first);
    eventually("it is let in", || second.client.is_connected());
    assert_eq!(second.client.why_gone(), None);
}

#[test]
fn a_client_that_names_too_many_chunks_is_told_so_and_loses_nothing() {
    let site = Site::new();
    let _node = site.node();
    let peer = site.peer();
    assert_eq!(peer.store(0), StoreEnd::Stored { bytes: CHUNK_BYTES });
    let (lease, many) = (peer.lease(), vec![id(0); 65_537]);
    let (told, heard) = std::sync::mpsc::channel();
    peer.client.hold_then(&many, MINUTE_US, move |lease| told.send(lease.err()).unwrap());
    let why = ended(&heard).unwrap();
    assert!(why.contains("the number of chunk ids") && why.contains("65537"), "{why}");
    let (told, heard) = std::sync::mpsc::channel();
    peer.client.watch_then(&many, move |absent| told.send(absent.len()).unwrap());
    assert_eq!(
        (ended(&heard), peer.client.lookup(&many), peer.client.lease(&many, MINUTE_US).len()),
        (65_537, 0, 0)
    );
    peer.client.used(&many, CHUNK_BYTES);
    assert!(peer.hit(&lease, 0), "the connection lives");
}

#[test]
fn a_lease_that_is_not_renewed_ends_and_one_that_is_held_lives_on() {
    let site = Site::new();
    let node = site.node();
    let peer = site.peer();
    assert_eq!(peer.store(0), StoreEnd::Stored { bytes: CHUNK_BYTES });
    let held = peer.client.lease(&ids(), 4_000_000);
    std::thread::sleep(Duration::from_secs(5));
    assert!(held.is_alive() && peer.hit(&held, 0), "the client renews it");
    drop(held);
    eventually("it is let go", || node.stat().leases == 0);
}

#[test]
fn chunks_on_disk_are_loaded_and_a_drained_node_leaves_them_for_the_next() {
    let site = Site::new();
    let mut config = site.config();
    config.ssd = vec![forebay_node::SsdConfig {
        path: site.folder.path().join("log"),
        size: 16 << 20,
        segment_size: 1 << 20,
        create: true,
    }];
    config.write_back = forebay_node::WriteBackPolicy::All;
    let node = Node::start(&config).unwrap();
    let peer = site.peer();
    assert!((0..CHUNKS).all(|number| peer.store(number) == StoreEnd::Stored { bytes: CHUNK_BYTES }));
    let lease = peer.lease();
    let drained = std::thread::spawn(move || node.drain(Duration::from_secs(60)).unwrap());
    eventually("nothing new is granted", || peer.lease().is_empty());
    assert!(peer.hit(&lease, 1), "what was held may be read to the end");
    drop(lease);
    assert_eq!(drained.join().unwrap().cut_off, 0);

    let _node = Node::start(&config).unwrap();
    eventually("the next node is found", || peer.client.is_connected());
    let lease = peer.lease();
    assert_eq!((lease.in_memory(), lease.on_disk()), (0, CHUNKS));
    assert!((0..CHUNKS).all(|number| peer.hit(&lease, number)));
    drop(lease);
    assert_eq!(peer.lease().in_memory(), CHUNKS, "what was loaded is in memory now");
}

#[test]
fn of_several_logs_a_node_names_the_one_that_it_cannot_open() {
    let site = Site::new();
    let paths = ["log0", "log1"].map(|name| site.folder.path().join(name));
    let ssd = |path: &std::path::PathBuf| forebay_node::SsdConfig {
        path: path.clone(),
        size: 16 << 20,
        segment_size: 1 << 20,
        create: true,
    };
    let config = forebay_node::NodeConfig { ssd: paths.iter().map(ssd).collect(), ..site.config() };
    drop(Node::start(&config).unwrap());
    std::fs::write(&paths[1], vec![b'#'; 16 << 20]).unwrap();
    let refused = Node::start(&config).unwrap_err().to_string();
    let start = format!("ssd: {}: the file is not a Forebay log", paths[1].display());
    assert!(refused.starts_with(&start), "{refused}");
}

#[test]
fn what_is_only_kept_is_no_hit() {
    let site = Site::new();
    let node = site.node();
    let peer = site.peer();
    assert_eq!(peer.store(0), StoreEnd::Stored { bytes: CHUNK_BYTES });
    let (sender, held) = std::sync::mpsc::channel();
    peer.client.hold_then(&ids(), MINUTE_US, move |lease| drop(sender.send(lease)));
    let held = ended(&held).unwrap();
    assert_eq!((held.len(), node.stat().leases, node.stat().hits), (1, 1, [0, 0, 0]));
    assert!(peer.hit(&peer.lease(), 0));
    assert_eq!(node.stat().hits, [1, 0, 0]);
    assert!(peer.hit(&held, 0), "it can be loaded all the same");
}
