//! The fault matrix of a node's log: a test makes a fault, and exactly one line names it; beside it
//! no line is a warning or an error. `docs/reference/logs.md` says what each line means. Faults of
//! disks, of connections between nodes and of etcd are with the crates and files that log them.
#![allow(clippy::unwrap_used)]

#[path = "../peers/neighbours.rs"]
mod neighbours;
mod raw;
#[path = "../local/rig.rs"]
mod rig;

use forebay_client::protocol::request::{NewChunk, Request};
use forebay_client::{Client, ClientOptions};
use forebay_net::{Agent, AgentConfig};
use forebay_node::directory::node_of_name;
use forebay_node::{MetricsConfig, Node, NodeConfig};
use forebay_store::{ChunkShape, StoreEnd};
use neighbours::*;
use raw::Raw;
use rig::*;
use std::io::Write;
use std::net::TcpStream;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;
use testkit::{Log, ended, eventually};

/// Not a test by itself: the children of the others.
#[test]
fn a_child_is_what_it_is_told_to_be() {
    let Some((role, socket)) = role() else { return };
    let _node = (role == "node").then(|| Node::start(&config(&socket)).unwrap());
    let _slot = (role == "reserver").then(|| reserve(&socket));
    println!("ready");
    std::thread::sleep(Duration::from_secs(120));
}

/// A client that has reserved a slot.
fn reserve(socket: &Path) -> Raw {
    let mut raw = Raw::connect(socket, "reserver");
    let shape = ChunkShape::new([1000]).unwrap();
    raw.ask(&Request::Reserve { shape, chunks: vec![NewChunk { id: id(0), parent: None }] });
    raw
}

#[test]
fn a_node_that_starts_and_each_client_that_comes_or_goes_are_a_line_each() {
    let log = Log::alone();
    let site = Site::new();
    let node = site.node();
    let socket = site.socket().display().to_string();
    assert_eq!(log.lines(&["INFO", "node started", &socket, r#"slots_per_client\":1024"#]).len(), 1);
    let peer = connect(ClientOptions { name: "engine".into(), ..options(&site.socket()) }).unwrap();
    let connected = ["INFO", "client connected", "client=\"engine\""];
    eventually("it is let in", || log.lines(&connected).len() == 1);
    peer.client.close();
    drop(peer);
    let gone = ["INFO", "client gone", "client=\"engine\"", "it said goodbye"];
    eventually("it is gone", || log.lines(&gone).len() == 1);
    log.expect_faults(&[]);
    drop(node);
}

#[test]
fn a_client_that_is_refused_over_and_over_is_told_once() {
    let log = Log::alone();
    let site = Site::new();
    let node = site.node();
    for _ in 0..3 {
        let mut raw = UnixStream::connect(site.socket()).unwrap();
        raw.write_all(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n").unwrap();
        let _ = std::io::Read::read_to_end(&mut raw, &mut Vec::new());
    }
    eventually("all are refused", || node.stat().refused == 3);
    log.expect_faults(&[&["client refused", "kind=NotAllowed", "the hello: a frame of"]]);
}

#[test]
fn connections_that_say_nothing_are_told_once() {
    let log = Log::alone();
    let site = Site::new();
    let mut config = site.config();
    (config.limits.unauthenticated, config.limits.authentication_ms) = (2, 60_000);
    let node = Node::start(&config).unwrap();
    let _silent: Vec<_> = (0..5).map(|_| UnixStream::connect(site.socket()).unwrap()).collect();
    eventually("the oldest gave way", || node.stat().refused == 3);
    log.expect_faults(&[&["silent connections give way", "listener=\"the clients' socket\"", "places=2"]]);
}

#[test]
fn a_client_that_goes_without_a_word_is_named_and_so_are_its_slots_until_its_process_exits() {
    let log = Log::alone();
    let site = Site::new();
    let node = site.node();
    let reserver = site.child("reserver");
    assert_eq!(node.stat().slots, 1);
    reserver.kill();
    let free = ["INFO", "client's process exited; its slots are free", "client=\"reserver\""];
    eventually("its slots are free", || log.lines(&free).len() == 1);
    log.expect_faults(&[
        &["client gone", "client=\"reserver\"", "slots=1"],
        &["slots kept until the client's process has exited", "client=\"reserver\" slots=1"],
    ]);
}

#[test]
fn leases_that_their_client_does_not_renew_are_one_line_that_names_it() {
    let log = Log::alone();
    let site = Site::new();
    let node = site.node();
    let peer = site.peer();
    assert_eq!(peer.store(0), StoreEnd::Stored { bytes: CHUNK_BYTES });
    let mut stuck = Raw::connect(&site.socket(), "stuck");
    for _ in 0..3 {
        stuck.ask(&Request::Lease { ttl_us: 1000, to_load: true, ids: vec![id(0)] });
        eventually("it has ended", || node.stat().leases == 0);
    }
    log.expect_faults(&[&["leases expired", "client=\"stuck\" leases=1 repeated=0"]]);
    stuck.tell(&Request::Bye);
}

#[test]
fn a_chunk_that_a_client_finds_corrupt_is_one_line_that_names_it() {
    let log = Log::alone();
    let site = Site::new();
    let node = site.node();
    let peer = connect(ClientOptions { name: "engine".into(), ..options(&site.socket()) }).unwrap();
    store_all(&peer);
    let lease = peer.lease();
    corrupt(&node, 1, 777);
    assert!(!peer.hit(&lease, 1));
    eventually("the node has looked for itself", || node.stat().corrupt == 1);
    log.expect_faults(&[&["ERROR", "corrupt chunk in memory", "client=\"engine\""]]);
}

#[test]
fn a_chunk_that_is_corrupt_on_disk_is_one_line_that_names_its_log() {
    let log = Log::alone();
    let site = Site::new();
    write(&site, &site.config());
    store_all_on_disk(&site);
    log.forget();
    let path = neighbours::log(&site);
    let mut bytes = std::fs::read(&path).unwrap();
    // Chunks begin nearly alike.
    let part = &truth(3)[10_000..14_000];
    let start = bytes.windows(part.len()).position(|window| window == part).unwrap();
    bytes[start] ^= 1;
    std::fs::write(&path, bytes).unwrap();
    let _node = site.node();
    let peer = site.peer();
    let lease = peer.lease();
    assert_eq!(lease.on_disk(), CHUNKS);
    assert!((0..3).all(|number| peer.hit(&lease, number)) && !peer.hit(&lease, 3));
    let volume = format!("volume={}", path.display());
    log.expect_faults(&[&["ERROR", "chunk on SSD is corrupt", &volume]]);
}

#[test]
fn a_chunk_that_a_peer_finds_corrupt_is_one_line_at_each_end() {
    let log = Log::alone();
    let pair = Pair::new();
    let (left, _right) = (pair.left.node(), pair.right.node());
    let (writer, reader) = (pair.left.peer(), pair.right.peer());
    store_all(&writer);
    corrupt(&left, 2, 777);
    eventually("the peer is found", || reader.client.lookup(&ids()) == CHUNKS);
    // Until then a node may have looked for the other one before that was there.
    log.forget();
    let lease = reader.lease();
    assert!(reader.hit(&lease, 0) && reader.hit(&lease, 1) && !reader.hit(&lease, 2));
    eventually("its owner has looked for itself", || left.peering_stat().unwrap().wrong == 1);
    let node = format!("node=\"{}\"", hex::encode(node_of_name("right")));
    log.expect_faults(&[
        &["ERROR", "corrupt chunk from a peer", "peer=\"left\""],
        &["ERROR", "corrupt chunk in memory, found by a peer", &node],
    ]);
}

#[test]
fn a_chunk_for_which_another_peer_is_asked_is_a_line_beside_that_of_its_fault() {
    let log = Log::alone();
    let [one, two, three] = neighbours(["a", "b", "c"]);
    let (first, _second, reader) = (one.node(), two.node(), three.node());
    [&one, &two].iter().for_each(|site| store_all(&site.peer()));
    corrupt(&first, 0, 777);
    let peer = three.peer();
    let both_are_up = || reader.peering_stat().unwrap().peers.iter().all(|peer| peer.state == "up");
    eventually("both peers are found", || peer.client.lookup(&ids()) == CHUNKS && both_are_up());
    assert_eq!(peer.client.lookup(&ids()), CHUNKS);
    log.forget();
    assert!(peer.hit(&peer.lease(), 0), "the other one has it");
    eventually("its owner has looked for itself", || first.peering_stat().unwrap().wrong == 1);
    log.expect_faults(&[
        &["ERROR", "corrupt chunk from a peer", "peer=\"a\""],
        &["ERROR", "corrupt chunk in memory, found by a peer"],
        &["chunk of a peer did not come; another peer is asked", "peer=\"a\""],
    ]);
}

#[test]
fn a_node_that_ends_says_so_once_and_what_it_cut_off() {
    let log = Log::alone();
    let site = Site::new();
    let node = site.node();
    let peer = site.peer();
    assert_eq!(peer.store(0), StoreEnd::Stored { bytes: CHUNK_BYTES });
    peer.client.close();
    let mut holder = Raw::connect(&site.socket(), "holder");
    holder.ask(&Request::Lease { ttl_us: MINUTE_US, to_load: true, ids: vec![id(0)] });
    let drained = std::thread::spawn(move || node.drain(Duration::from_secs(2)).unwrap());
    eventually("nobody is let in", || connect(options(&site.socket())).is_err());
    assert_eq!(drained.join().unwrap().cut_off, 1);
    assert_eq!(log.lines(&["INFO", "node drains", "limit_s=2"]).len(), 1);
    assert_eq!(log.lines(&["INFO", "node ended", "cut_off_by_clients=1 cut_off_by_peers=0"]).len(), 1);
    log.expect_faults(&[
        &["client refused", "kind=Draining"],
        &["client gone", "client=\"holder\" reason=the node stops leases=1"],
    ]);
}

#[test]
fn a_client_says_once_that_its_node_is_gone_and_not_reached_and_once_that_it_is_back() {
    let log = Log::alone();
    let site = Site::new();
    let node = site.child("node");
    let peer = site.peer();
    let socket = format!("socket=\"{}\"", site.socket().display());
    let connected = || log.lines(&["INFO", "node connected", &socket]).len();
    assert_eq!(connected(), 1);
    node.kill();
    let not_reached = format!("socket={}", site.socket().display());
    let faults: [&[&str]; 2] = [&["node gone", &socket], &["node not reached", &not_reached]];
    log.expect_faults(&faults);
    std::thread::sleep(Duration::from_millis(300));
    let _node = site.child("node");
    eventually("it is back", || peer.client.is_connected());
    assert_eq!(connected(), 2);
    log.expect_faults(&faults);
}

#[test]
fn a_client_of_a_node_that_is_not_there_says_so_once() {
    let log = Log::alone();
    let site = Site::new();
    let peer = connect_by(options(&site.socket()), Client::connect_or_wait).unwrap();
    std::thread::sleep(Duration::from_millis(200));
    assert!(!peer.client.is_connected());
    log.expect_faults(&[&["node not reached", "repeated=0"]]);
}

#[test]
fn nodes_that_join_and_leave_the_directory_and_lists_that_are_none_are_a_line_each() {
    let log = Log::alone();
    let pair = Pair::new();
    let (_left, _right) = (pair.left.node(), pair.right.node());
    let (list, reader) = (pair.right.folder.path().join("nodes.toml"), pair.right.peer());
    let looked = |parts: &[&str]| {
        reader.client.lookup(&ids());
        log.lines(parts).len() == 1
    };
    eventually("it has joined", || {
        looked(&["INFO", "peer joined the directory", "peer=\"left\" address=127"])
    });
    log.forget();
    let both = std::fs::read_to_string(&list).unwrap();
    std::fs::write(&list, "no list").unwrap();
    let path = format!("path={}", list.display());
    eventually("the list is refused", || looked(&["WARN", "node list not read", &path]));
    std::fs::write(&list, both.replace("left", "other")).unwrap();
    eventually("it has left", || looked(&["INFO", "peer left the directory", "peer=\"left\""]));
    eventually("another has joined", || looked(&["INFO", "peer joined the directory", "peer=\"other\""]));
    assert_eq!(log.lines(&["INFO", "node list read", &path, "nodes=2"]).len(), 1);
    log.expect_faults(&[&["node list not read", &path]]);
}

#[test]
fn a_notification_that_is_refused_is_a_line_where_it_is_refused_and_one_where_it_is_lost() {
    let log = Log::alone();
    let two = Agent::start(AgentConfig::named("two")).unwrap();
    let one = Agent::start(AgentConfig { listen: None, ..AgentConfig::named("one") }).unwrap();
    one.add_peer(&two.metadata()).unwrap();
    let (sender, receiver) = std::sync::mpsc::channel();
    // More than may wait to be taken, and nobody takes any.
    for _ in 0..140 {
        let sender = sender.clone();
        one.notify_when_room("two", vec![7; 500_000], move |end| sender.send(end).unwrap()).unwrap();
    }
    let lost = (0..140).filter(|_| ended(&receiver).is_err()).count();
    assert!(lost > 1, "some do not fit");
    log.expect_faults(&[&["notification refused", "repeated=0"], &["notification lost", "peer=\"two\""]]);
}

#[test]
fn a_notification_to_a_peer_that_is_not_there_is_a_line_beside_that_of_the_peer() {
    let log = Log::alone();
    let nobody = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let one = Agent::start(AgentConfig { listen: None, ..AgentConfig::named("one") }).unwrap();
    one.add_address("nowhere", nobody).unwrap();
    let (sender, receiver) = std::sync::mpsc::channel();
    for _ in 0..3 {
        let sender = sender.clone();
        one.notify("nowhere", vec![7], move |end| sender.send(end).unwrap()).unwrap();
        assert!(ended(&receiver).is_err());
    }
    log.expect_faults(&[
        &["peer not reached", "peer=\"nowhere\"", "reason=\"refused\""],
        &["notification lost", "peer=\"nowhere\""],
    ]);
}

#[test]
fn memory_that_takes_no_more_is_one_line_with_the_tenant_and_the_reason() {
    let log = Log::alone();
    let site = Site::new();
    let mut config = site.config();
    config.tenants.memory = Some(CHUNK_BYTES + 40_000);
    let _node = Node::start(&config).unwrap();
    let peer = site.peer();
    assert_eq!(peer.store(0), StoreEnd::Stored { bytes: CHUNK_BYTES });
    let _lease = peer.lease();
    assert!((1..4).all(|number| matches!(peer.store(number), StoreEnd::Failed(_))));
    log.expect_faults(&[&["memory takes no more chunks", "tenant=0", "repeated=0"]]);
}

#[test]
fn a_token_that_every_user_may_read_is_one_line_that_names_its_file() {
    let log = Log::alone();
    let site = Site::new();
    let (file, token) = (site.folder.path().join("node.toml"), site.folder.path().join("token"));
    std::fs::write(&token, "secret").unwrap();
    std::fs::set_permissions(&token, std::fs::Permissions::from_mode(0o644)).unwrap();
    let config = NodeConfig { token_file: Some(token.clone()), ..NodeConfig::new(site.socket(), 16 << 20) };
    std::fs::write(&file, config.to_toml()).unwrap();
    NodeConfig::read(&file).unwrap();
    let path = format!("path={} mode=\"0644\"", token.display());
    log.expect_faults(&[&["every user may read a token", &path]]);
}

#[test]
fn what_is_no_http_on_the_metrics_port_is_one_line_that_names_its_host() {
    let log = Log::alone();
    let site = Site::new();
    let mut config = site.config();
    config.metrics = Some(MetricsConfig::new(([127, 0, 0, 1], 0).into()));
    let node = Node::start(&config).unwrap();
    for _ in 0..3 {
        let mut stream = TcpStream::connect(node.metrics_address().unwrap()).unwrap();
        stream.write_all(&[0x16; 64]).unwrap();
        let _ = std::io::Read::read_to_end(&mut stream, &mut Vec::new());
    }
    log.expect_faults(&[&["no HTTP on the metrics port", "peer=127.0.0.1", "repeated=0"]]);
}
