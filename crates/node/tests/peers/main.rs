//! Two nodes: what one has, clients of the other get, with every byte right or not at all.
#![allow(clippy::unwrap_used)]

mod etcd;
mod forget;
#[path = "../metrics/http.rs"]
mod http;
mod neighbours;
#[path = "../local/rig.rs"]
mod rig;
mod telemetry;
mod ways;

use forebay_client::{NewChunk, Reserved, fetch};
use forebay_node::{DirectoryConfig, MetricsConfig, Node};
use forebay_store::{ChunkShape, StoreEnd, TenantId};
use forebay_transfer::{Class, End, Span};
use neighbours::*;
use rig::*;
use rustix::process::Signal;
use std::sync::Arc;
use std::time::{Duration, Instant};
use testkit::{ended, eventually};

/// Not a test by itself: the children of the others.
#[test]
fn a_child_is_what_it_is_told_to_be() {
    let Some((_, socket)) = role() else { return };
    let _node = Node::start(&config(&socket)).unwrap();
    println!("ready");
    std::thread::sleep(Duration::from_secs(120));
}

#[test]
fn what_a_peer_has_in_memory_is_a_hit_here_and_stays() {
    let pair = Pair::new();
    let (left, right) = (pair.left.node(), pair.right.node());
    let (writer, reader) = (pair.left.peer(), pair.right.peer());
    store_all(&writer);
    eventually("the peer is found", || reader.client.lookup(&ids()) == CHUNKS);
    let lease = reader.lease();
    assert_eq!((lease.in_memory(), lease.on_disk(), lease.on_peers()), (0, 0, CHUNKS));
    assert!((0..CHUNKS).all(|number| reader.hit(&lease, number)));
    drop(lease);
    let stat = right.peering_stat().unwrap();
    assert_eq!((stat.pulled, stat.not_pulled, stat.corrupt, stat.denied), (CHUNKS as u64, 0, 0, 0));
    assert_eq!(reader.lease().in_memory(), CHUNKS, "what was pulled is here now");
    // A chunk may be lent again where the first loan was late.
    assert!(left.peering_stat().unwrap().lent >= CHUNKS as u64);
    // Every loan was given back: the owner may drop its chunks, and their memory is free at once.
    let all = ids();
    eventually("all loans are back", || {
        left.store().delete(TenantId(0), &all);
        left.store().stat().arena.draining_bytes == 0
    });
}

#[test]
fn what_is_fetched_is_in_memory_before_anybody_loads_it() {
    let pair = Pair::new();
    let (_left, right) = (pair.left.node(), pair.right.node());
    let (writer, reader) = (pair.left.peer(), pair.right.peer());
    store_all(&writer);
    eventually("the peer is found", || reader.client.lookup(&ids()) == CHUNKS);
    let lease = Arc::new(reader.lease());
    fetch(&lease);
    eventually("all of it is here", || right.store().locate(TenantId(0), &ids()).0 == CHUNKS);
    assert!((0..CHUNKS).all(|number| reader.hit(&lease, number)));
    // A chunk is here before it is counted.
    eventually("each came once", || {
        let stat = right.peering_stat().unwrap();
        (stat.pulled, stat.not_pulled) == (CHUNKS as u64, 0)
    });
    fetch(&Arc::new(reader.lease()));
    fetch(&Arc::new(reader.client.lease(&[], 1_000_000)));
    assert_eq!(right.peering_stat().unwrap().pulled, CHUNKS as u64, "what is here is not fetched");
}

#[test]
fn a_sequence_whose_chunks_lie_with_several_peers_is_a_hit_as_a_whole() {
    // The one that is asked first, by its name, has the least.
    let [few, all, reader] = neighbours(["a", "b", "c"]);
    let (_few, _all, node) = (few.node(), all.node(), reader.node());
    let (few, all, reader) = (few.peer(), all.peer(), reader.peer());
    assert_eq!(few.store(0), StoreEnd::Stored { bytes: CHUNK_BYTES });
    store_all(&all);
    let both_are_known = || {
        // Whoever is up before it is asked has answered after.
        let up = node.peering_stat().unwrap().peers.iter().all(|peer| peer.state == "up");
        reader.client.lookup(&ids()) == CHUNKS && up
    };
    eventually("both peers are found", both_are_known);
    let lease = reader.lease();
    let loads: Vec<_> = (0..CHUNKS).map(|number| reader.begin_load(&lease, number).unwrap()).collect();
    for (number, load) in loads.iter().enumerate() {
        let end = ended(load);
        assert!(matches!(end, forebay_transfer::End::Done { .. }), "chunk {number}: {end:?}");
        reader.verify(&lease, number).unwrap();
    }
    let stat = node.peering_stat().unwrap();
    assert_eq!((stat.pulled, stat.not_pulled, stat.denied), (CHUNKS as u64, 0, 0));
}

#[test]
fn a_peer_that_lends_little_at_a_time_gives_everything_in_turn() {
    let pair = Pair::new();
    let mut config = pair.left.config();
    // Two chunks, and a bit.
    config.peers.as_mut().unwrap().lent_per_peer = 2 * CHUNK_BYTES + 1000;
    let (_left, right) = (Node::start(&config).unwrap(), pair.right.node());
    let (writer, readers) = (pair.left.peer(), [pair.right.peer(), pair.right.peer()]);
    store_all(&writer);
    eventually("the peer is found", || readers[0].client.lookup(&ids()) == CHUNKS);
    let leases = [readers[0].lease(), readers[1].lease()];
    // From the front and, for all that are not on their way by then, one by one from the other.
    let loads: Vec<_> = (0..CHUNKS)
        .flat_map(|number| [(0, number), (1, number)])
        .map(|(at, number)| (at, number, readers[at].begin_load(&leases[at], number).unwrap()))
        .collect();
    for (at, number, load) in &loads {
        let end = ended(load);
        assert!(matches!(end, forebay_transfer::End::Done { .. }), "chunk {number}: {end:?}");
        readers[*at].verify(&leases[*at], *number).unwrap();
    }
    let stat = right.peering_stat().unwrap();
    assert_eq!((stat.pulled, stat.not_pulled, stat.denied), (CHUNKS as u64, 0, 0));
}

#[test]
fn a_long_sequence_comes_whole_from_a_peer_that_lends_parts_of_batches() {
    const COUNT: usize = 160;
    const BYTES: u64 = 4096;
    let pair = Pair::new();
    let mut config = pair.left.config();
    config.memory.largest_chunk = BYTES;
    config.peers.as_mut().unwrap().lent_per_peer = 40 * BYTES;
    let (_left, _right) = (Node::start(&config).unwrap(), pair.right.node());
    let all: Vec<_> = (0..COUNT).map(id).collect();
    let (writer, reader) =
        [&pair.left, &pair.right].map(|site| Writer::new(site, COUNT * BYTES as usize)).into();
    let layer = |of: &Writer, number: usize| vec![Span::new(of.region, number as u64 * BYTES, BYTES)];
    for number in 0..COUNT {
        let parent = number.checked_sub(1).map(id);
        let (told, stored) = std::sync::mpsc::channel();
        let on_end = move |end| told.send(end).unwrap();
        let from = [layer(&writer, number)];
        writer.client.store_chunk(id(number), parent, &from, Class::WriteBack, on_end).unwrap();
        assert_eq!(ended(&stored), StoreEnd::Stored { bytes: BYTES });
    }
    eventually("the peer is found", || reader.client.lookup(&all) == COUNT);
    let lease = reader.client.lease(&all, MINUTE_US);
    let (told, loaded) = std::sync::mpsc::channel();
    for number in 0..COUNT {
        let (told, to) = (told.clone(), [layer(&reader, number)]);
        let on_end = move |end| told.send(end).unwrap();
        reader.client.load_chunk(&lease, number, &to, Class::Demand, None, on_end).unwrap();
    }
    assert!((0..COUNT).all(|_| ended(&loaded) == End::Done { bytes: BYTES }));
}

#[test]
fn a_chunk_that_is_too_long_for_this_node_is_found_once_and_those_before_it_are_hits() {
    const COUNT: usize = 4;
    const SHORT: u64 = 4096;
    const LONG: u64 = 4 * SHORT;
    let pair = Pair::new();
    let mut config = pair.right.config();
    config.memory.largest_chunk = 2 * SHORT;
    let (_left, right) = (pair.left.node(), Node::start(&config).unwrap());
    let all: Vec<_> = (0..COUNT).map(id).collect();
    let [writer, reader] = [&pair.left, &pair.right].map(|site| Writer::new(site, COUNT * LONG as usize));
    let layer = |of: &Writer, number: usize| {
        let bytes = if number < 2 { SHORT } else { LONG };
        [vec![Span::new(of.region, number as u64 * LONG, bytes)]]
    };
    for number in 0..COUNT {
        let parent = number.checked_sub(1).map(id);
        let (told, stored) = std::sync::mpsc::channel();
        let on_end = move |end| told.send(end).unwrap();
        let from = layer(&writer, number);
        writer.client.store_chunk(id(number), parent, &from, Class::WriteBack, on_end).unwrap();
        assert!(matches!(ended(&stored), StoreEnd::Stored { .. }));
    }
    let load = |lease: &_, number: usize| {
        let (told, loaded) = std::sync::mpsc::channel();
        let (to, on_end) = (layer(&reader, number), move |end| told.send(end).unwrap());
        reader.client.load_chunk(lease, number, &to, Class::Demand, None, on_end).unwrap();
        matches!(ended(&loaded), End::Done { .. })
    };
    eventually("the peer is found", || reader.client.lookup(&all) == COUNT);
    let lease = reader.client.lease(&all, MINUTE_US);
    assert_eq!([0, 1, 2, 3].map(|number| load(&lease, number)), [true, true, false, false]);
    let not_pulled = || right.peering_stat().unwrap().not_pulled;
    let (found, failed) = (reader.client.lookup(&all), not_pulled());
    assert_eq!(found, 2, "nothing that does not fit is promised again");
    right.store().delete(TenantId(0), &all);
    eventually("the peer is asked again", || reader.client.lookup(&all) == 2);
    for _ in 0..3 {
        assert_eq!((reader.client.lookup(&all), reader.client.lookup(&all[2..])), (2, 0));
        assert_eq!(reader.client.lease(&all, MINUTE_US).len(), 2);
    }
    let lease = reader.client.lease(&all, MINUTE_US);
    assert!(load(&lease, 0) && load(&lease, 1));
    assert_eq!(not_pulled(), failed);
}

#[test]
fn what_a_peer_has_on_disk_is_a_hit_here() {
    let pair = Pair::new();
    store_all_on_disk(&pair.left);
    let (left, _right) = (pair.left.node(), pair.right.node());
    assert_eq!(left.store().stat().chunks, 0, "all of them are on disk");
    let reader = pair.right.peer();
    eventually("the peer is found", || reader.client.lookup(&ids()) == CHUNKS);
    let lease = reader.lease();
    assert!((0..CHUNKS).all(|number| reader.hit(&lease, number)));
}

#[test]
fn requests_for_a_tenant_have_its_chunks_from_peers_and_others_learn_of_none() {
    let pair = Pair::new();
    let (_left, _right) = (pair.left.node(), pair.right.node());
    let for_tenant = |mut peer: Peer| {
        peer.client = peer.client.for_tenant(Some(TenantId(3)));
        peer
    };
    let (own, tenant) = (pair.right.peer(), for_tenant(pair.right.peer()));
    store_all(&for_tenant(pair.left.peer()));
    eventually("the peer is found", || tenant.client.lookup(&ids()) == CHUNKS);
    assert_eq!((own.client.lookup(&ids()), own.lease().len()), (0, 0));
    let lease = tenant.lease();
    assert!((0..CHUNKS).all(|number| tenant.hit(&lease, number)));
    assert_eq!(own.client.lookup(&ids()), 0, "nor here, where they are now");
}

#[test]
fn a_chunk_of_a_peer_is_a_hit_although_another_engine_here_stores_it_anew() {
    let pair = Pair::new();
    let (_left, right) = (pair.left.node(), pair.right.node());
    let (writer, reader, other) = (pair.left.peer(), pair.right.peer(), pair.right.peer());
    store_all(&writer);
    eventually("the peer is found", || reader.client.lookup(&ids()) == CHUNKS);
    let lease = reader.lease();
    // One that computed it and is about to copy it there.
    let (sender, reserved) = std::sync::mpsc::channel();
    let shape = ChunkShape::new([LAYER_BYTES; LAYERS]).unwrap();
    let new = NewChunk { id: id(0), parent: None };
    other.client.reserve(&shape, &[new], move |_, slot| sender.send(slot).unwrap());
    let Reserved::Slot(slot) = ended(&reserved) else { panic!("there is room") };
    assert!((0..CHUNKS).all(|number| reader.hit(&lease, number)));
    let (sender, stored) = std::sync::mpsc::channel();
    let sums = slot.sums(&[]);
    slot.commit(sums, move |end| sender.send(end).unwrap());
    assert_eq!(ended(&stored), StoreEnd::Deleted);
    assert!(reader.hit(&reader.lease(), 0) && right.peering_stat().unwrap().not_pulled == 0);
}

#[test]
fn a_peer_whose_disk_has_others_to_serve_first_is_waited_for() {
    let pair = Pair::new();
    store_all_on_disk(&pair.left);
    // The peer answers all the while: it is no frozen one.
    let mut config = pair.right.config();
    config.peers.as_mut().unwrap().progress_limit_ms = 1000;
    let (left, right) = (pair.left.node(), Node::start(&config).unwrap());
    let reader = pair.right.peer();
    eventually("the peer is found", || reader.client.lookup(&ids()) == CHUNKS);
    // Whoever has the last chunk has nothing else read for so long.
    let held = left.store().lease(TenantId(0), &ids(), MINUTE_US);
    left.store()
        .fetch(&held, CHUNKS - 1, Class::Demand, None, |_| std::thread::sleep(Duration::from_secs(5)));
    std::thread::sleep(Duration::from_millis(500));
    assert!(reader.hit(&reader.lease(), 0));
    let stat = right.peering_stat().unwrap();
    assert_eq!((stat.denied, stat.not_pulled), (0, 0));
}

#[test]
fn what_is_lent_to_a_peer_that_went_while_the_disk_was_busy_is_back_at_once() {
    let pair = Pair::new();
    store_all_on_disk(&pair.left);
    let (left, right) = (pair.left.node(), pair.right.child("node"));
    let reader = pair.right.peer();
    eventually("the peer is found", || reader.client.lookup(&ids()) == CHUNKS);
    let held = left.store().lease(TenantId(0), &ids(), MINUTE_US);
    left.store()
        .fetch(&held, CHUNKS - 1, Class::Demand, None, |_| std::thread::sleep(Duration::from_secs(3)));
    std::thread::sleep(Duration::from_millis(500));
    let _load = reader.begin_load(&reader.lease(), 0);
    std::thread::sleep(Duration::from_millis(500));
    right.kill();
    drop(held);
    eventually("they could be lent", || left.store().locate(TenantId(0), &ids()).0 == CHUNKS);
    left.store().delete(TenantId(0), &ids());
    // Leases last 20 s.
    let (since, lent) = (Instant::now(), || left.store().stat().arena.draining_bytes);
    while lent() > 0 && since.elapsed() < Duration::from_secs(10) {
        std::thread::sleep(Duration::from_millis(50));
    }
    assert_eq!(lent(), 0, "{:?}", left.peering_stat());
}

#[test]
fn what_is_lent_when_nobody_waits_for_it_any_more_is_back_at_once() {
    let pair = Pair::new();
    store_all_on_disk(&pair.left);
    let (left, _right) = (pair.left.node(), pair.right.node());
    let reader = pair.right.peer();
    eventually("the peer is found", || reader.client.lookup(&ids()) == CHUNKS);
    let held = left.store().lease(TenantId(0), &ids(), MINUTE_US);
    left.store()
        .fetch(&held, CHUNKS - 1, Class::Demand, None, |_| std::thread::sleep(Duration::from_secs(33)));
    std::thread::sleep(Duration::from_millis(500));
    let _load = reader.begin_load(&reader.lease(), 0);
    std::thread::sleep(Duration::from_secs(33));
    drop(held);
    eventually("it was lent", || left.peering_stat().unwrap().lent > 0);
    left.store().delete(TenantId(0), &ids());
    let since = Instant::now();
    eventually("it is back", || left.store().stat().arena.draining_bytes == 0);
    assert!(since.elapsed() < Duration::from_secs(3), "{:?}", since.elapsed());
}

#[test]
fn a_peer_that_is_killed_under_a_pull_is_a_miss_and_nothing_is_wrong() {
    for delay_us in [0, 300, 1000, 3000] {
        let pair = Pair::new();
        let (left, right) = (pair.left.child("node"), pair.right.node());
        let reader = pair.right.peer();
        store_all(&pair.left.peer());
        eventually("the peer is found", || reader.client.lookup(&ids()) == CHUNKS);
        let lease = reader.lease();
        let loads: Vec<_> = (0..CHUNKS).map(|number| reader.begin_load(&lease, number).unwrap()).collect();
        std::thread::sleep(Duration::from_micros(delay_us));
        left.kill();
        for (number, load) in loads.iter().enumerate() {
            // `hit` checks bytes by itself; here it is enough that everything ends and what ended
            // well verifies.
            let done = matches!(ended(load), forebay_transfer::End::Done { .. });
            assert!(!done || reader.verify(&lease, number).is_ok(), "chunk {number}");
        }
        drop(lease);
        assert_eq!(right.peering_stat().unwrap().corrupt, 0);
        eventually("no slot is left over", || right.store().stat().rows == right.store().stat().chunks);
        let again = reader.store(0);
        assert!(matches!(again, StoreEnd::Stored { .. } | StoreEnd::AlreadyHere), "{again:?}");
    }
}

#[test]
fn a_frozen_peer_costs_a_limit_and_is_a_miss() {
    let pair = Pair::new();
    let mut config = pair.right.config();
    config.peers.as_mut().unwrap().progress_limit_ms = 500;
    let (left, _right) = (pair.left.child("node"), Node::start(&config).unwrap());
    let reader = pair.right.peer();
    store_all(&pair.left.peer());
    eventually("the peer is found", || reader.client.lookup(&ids()) == CHUNKS);
    let lease = reader.lease();
    left.signal(Signal::STOP);
    assert!(!reader.hit(&lease, 0), "the peer gives nothing");
    assert_eq!(reader.store(0), StoreEnd::Stored { bytes: CHUNK_BYTES });
    assert!(reader.hit(&reader.lease(), 0));
    left.signal(Signal::CONT);
    eventually("it is asked again", || reader.client.lookup(&ids()) == CHUNKS);
}

#[test]
fn a_peer_that_no_longer_has_what_it_said_costs_one_refusal() {
    let pair = Pair::new();
    let (left, right) = (pair.left.node(), pair.right.node());
    let reader = pair.right.peer();
    store_all(&pair.left.peer());
    eventually("the peer is found", || reader.client.lookup(&ids()) == CHUNKS);
    let lease = reader.lease();
    left.store().delete(TenantId(0), &ids());
    assert!(!reader.hit(&lease, 0));
    let stat = right.peering_stat().unwrap();
    assert_eq!((stat.pulled, stat.denied, left.peering_stat().unwrap().refused), (0, 1, 1));
    assert_eq!(reader.lease().len(), 0, "what was denied is not promised again");
}

#[test]
fn a_peer_without_the_token_is_no_peer() {
    let pair = Pair::new();
    let (mut left, mut right) = (pair.left.config(), pair.right.config());
    left.peers.as_mut().unwrap().token = b"one".to_vec();
    right.peers.as_mut().unwrap().token = b"other".to_vec();
    let (_left, right) = (Node::start(&left).unwrap(), Node::start(&right).unwrap());
    let reader = pair.right.peer();
    store_all(&pair.left.peer());
    let faults = || {
        assert_eq!(reader.client.lookup(&ids()), 0);
        right
            .peering_stat()
            .unwrap()
            .peers
            .iter()
            .any(|peer| peer.state == "resting" || !peer.counts.faults.is_empty())
    };
    eventually("it was tried", faults);
    assert_eq!(reader.client.lookup(&ids()), 0);
}

#[test]
fn why_a_peer_is_not_reached_is_told_on_both_sides() {
    let pair = Pair::new();
    let (mut left, mut right) = (pair.left.config(), pair.right.config());
    left.peers.as_mut().unwrap().token = b"one".to_vec();
    right.peers.as_mut().unwrap().token = b"other".to_vec();
    for config in [&mut left, &mut right] {
        config.metrics = Some(MetricsConfig::new(([127, 0, 0, 1], 0).into()));
    }
    let (left, right) = (Node::start(&left).unwrap(), Node::start(&right).unwrap());
    let reader = pair.right.peer();
    let page = |node: &Node, path| http::get(node.metrics_address().unwrap(), "GET", path);
    let has = |node: &Node, line: &str| page(node, "/metrics").1.lines().any(|shown| shown.starts_with(line));
    eventually("the one that is refused says why", || {
        reader.client.lookup(&ids());
        has(&right, "forebay_peer_unreached{peer=\"left\",reason=\"token\"} 1")
    });
    assert!(has(&right, "forebay_peer_unreached_total{peer=\"left\",reason=\"token\"}"));
    assert!(has(&left, "forebay_peer_connections_refused_total{reason=\"token\"}"));
    let (status, body) = page(&right, "/readyz");
    assert_eq!(status, "HTTP/1.1 200 OK", "it serves its own clients all the same");
    let line = body.lines().nth(1).unwrap_or_default();
    assert!(line.starts_with("peer left is not reached (token): "), "{body}");
    drop(left);
    eventually("another reason replaces it", || {
        reader.client.lookup(&ids());
        has(&right, "forebay_peer_unreached{peer=\"left\",reason=\"refused\"} 1")
    });
}

#[test]
fn after_a_peer_has_lent_and_failed_the_next_holder_is_asked() {
    let [one, two, reader] = neighbours(["a", "b", "c"]);
    let (first, second, node) = (one.node(), two.node(), reader.node());
    let reader = reader.peer();
    [&one, &two].iter().for_each(|site| store_all(&site.peer()));
    // Whichever is asked first has one chunk that the other one has whole.
    corrupt(&first, 2, 777);
    corrupt(&second, 5, 777);
    eventually("both peers are found", || {
        let up = node.peering_stat().unwrap().peers.iter().all(|peer| peer.state == "up");
        reader.client.lookup(&ids()) == CHUNKS && up
    });
    // Both have answered this one.
    assert_eq!(reader.client.lookup(&ids()), CHUNKS);
    let lease = reader.lease();
    let loads: Vec<_> = (0..CHUNKS).map(|number| reader.begin_load(&lease, number).unwrap()).collect();
    for (number, load) in loads.iter().enumerate() {
        let end = ended(load);
        assert!(matches!(end, End::Done { .. }), "chunk {number}: {end:?}");
        reader.verify(&lease, number).unwrap();
        assert!(reader.hit(&lease, number), "chunk {number}");
    }
    let stat = node.peering_stat().unwrap();
    assert!(stat.corrupt >= 1 && stat.retried >= stat.corrupt && stat.not_pulled == 0, "{stat:?}");
    eventually("no slot is left over", || node.store().stat().rows == node.store().stat().chunks);
}

#[test]
fn two_nodes_of_one_name_are_a_fault_that_both_say() {
    let Some(etcd) = etcd::Etcd::start() else { return };
    let sites = neighbours(["same", "same too"]);
    let nodes = sites.each_ref().map(|site| {
        let mut config = site.config();
        config.name = "same".into();
        let etcd = vec![etcd.url.clone()];
        let directory = DirectoryConfig::of_file("");
        config.directory = Some(DirectoryConfig { file: None, etcd, ttl_s: 2, ..directory });
        config.metrics = Some(MetricsConfig::new(([127, 0, 0, 1], 0).into()));
        Node::start(&config).unwrap()
    });
    for node in &nodes {
        let page = |path| http::get(node.metrics_address().unwrap(), "GET", path);
        eventually("it is not ready", || page("/readyz").0 == "HTTP/1.1 503 Service Unavailable");
        let why = page("/readyz").1;
        assert!(why.contains("is called \"same\" as this one is"), "{why}");
        assert!(page("/metrics").1.contains("forebay_directory_name_conflict 1\n"));
    }
}

#[test]
fn nodes_find_each_others_chunks_in_etcd_without_asking_and_forget_the_dead() {
    let Some(etcd) = etcd::Etcd::start() else { return };
    let pair = Pair::new();
    for site in [&pair.left, &pair.right] {
        let mut config = site.config();
        config.directory = Some(DirectoryConfig {
            file: None,
            etcd: vec![etcd.url.clone()],
            ttl_s: 10,
            ..DirectoryConfig::of_file("")
        });
        write(site, &config);
    }
    let (left, right) = (pair.left.child("node"), pair.right.node());
    let reader = pair.right.peer();
    store_all(&pair.left.peer());
    eventually("etcd says where they are", || reader.client.lookup(&ids()) == CHUNKS);
    let lease = reader.lease();
    assert_eq!(lease.on_peers(), CHUNKS);
    assert!((0..CHUNKS / 2).all(|number| reader.hit(&lease, number)));
    drop(lease);
    right.store().delete(TenantId(0), &ids());
    eventually("the other one still has them", || reader.client.lookup(&ids()) == CHUNKS);
    left.kill();
    eventually("the dead node's chunks are gone", || reader.client.lookup(&ids()) == 0);
}

#[test]
fn a_byte_that_is_wrong_at_its_owner_never_becomes_a_chunk_here() {
    let pair = Pair::new();
    let (left, right) = (pair.left.node(), pair.right.node());
    let reader = pair.right.peer();
    store_all(&pair.left.peer());
    corrupt(&left, 2, 777);
    eventually("the peer is found", || reader.client.lookup(&ids()) == CHUNKS);
    let lease = reader.lease();
    assert!(reader.hit(&lease, 0) && reader.hit(&lease, 1) && !reader.hit(&lease, 2));
    assert_eq!(right.peering_stat().unwrap().corrupt, 1);
    assert_eq!(right.store().lookup(TenantId(0), &ids()), 2, "the prefix ends before it");
    eventually("its owner was told, looked for itself, and dropped it", || {
        let stat = left.peering_stat().unwrap();
        (stat.complaints, stat.wrong, left.store().lookup(TenantId(0), &ids())) == (1, 1, 2)
    });
}
