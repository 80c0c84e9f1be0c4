//! The TCP link with two real ends: blocks large and small, peers that die, freeze or are none.
#![allow(clippy::unwrap_used)]

mod common;

use common::ends::{
    self, Asking, Direction, KEY, asking, cancel_again_and_again, identity, owner, scattered, server,
};
use common::other::{Other, order, say, wait_for_the_end};
use common::{BELOW_OPERATIONS, LONG};
use forebay_net::tcp::*;
use forebay_transfer::{End, SplitMix, Transfer};
use rustix::process::Signal;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::mpsc;
use std::time::{Duration, Instant};

fn both_ways(count: u64, block: u64, flows: usize) {
    ends::both_ways(count, block, flows, ServerOptions::default(), FlowOptions::default());
}

#[test]
fn ten_thousand_scattered_blocks_arrive_both_ways() {
    both_ways(10_000, 26_000, 1);
}

#[test]
fn several_flows_are_several_routes() {
    both_ways(5_000, 26_000, 3);
}

#[test]
fn a_million_descriptors_are_one_transfer() {
    both_ways(1_000_000, 40, 1);
}

/// Not a test: what [`busy_other`] starts.
#[test]
#[ignore = "started by other tests"]
fn the_other_process() {
    let Some(bytes) = order() else { return };
    let (server, _memory, _exports) = server(bytes.parse().unwrap(), ServerOptions::default());
    say(server.address());
    wait_for_the_end();
}

const MANY: u64 = 1_024;
const BLOCK: u64 = 64 << 10;

/// A peer that is in the middle of a long transfer.
fn busy_other(direction: Direction, options: FlowOptions) -> (Other, Asking, mpsc::Receiver<End>) {
    let other = Other::spawn("the_other_process", MANY * BLOCK);
    let asking = asking(other.said.parse().unwrap(), 1, options);
    let blocks: Vec<_> = scattered(MANY, 5).into_iter().cycle().take(40 * MANY as usize).collect();
    let end = asking.submit(asking.transfer(direction, &blocks, BLOCK));
    asking.wait_for_bytes();
    (other, asking, end)
}

#[test]
fn a_killed_peer_is_reported_within_150_ms() {
    for direction in [Direction::Write, Direction::Read] {
        // The shortest of a few: on a busy machine this process may have to wait for its turn.
        let took = (0..5).map(|_| kill_and_time(direction)).find(|took| *took < Duration::from_millis(150));
        assert!(took.is_some(), "never within 150 ms");
    }
}

/// How long it takes until the death of a peer is reported.
fn kill_and_time(direction: Direction) -> Duration {
    let (other, asking, end) = busy_other(direction, FlowOptions::default());
    let killed = Instant::now();
    other.signal(Signal::KILL);
    let end = end.recv_timeout(LONG).unwrap();
    let took = killed.elapsed();
    assert!(matches!(&end, End::Failed(_)), "not failed");
    assert_eq!(asking.flows[0].stats().broken, Some(Broken::Closed));
    // And so is every later operation.
    let asked = Instant::now();
    let end = asking.run(direction, &[(0, 0)], BLOCK);
    assert!(matches!(&end, End::Failed(_)) && asked.elapsed() < BELOW_OPERATIONS, "{end:?}");
    took
}

#[test]
fn a_stopped_peer_is_reported_within_the_limit() {
    for direction in [Direction::Write, Direction::Read] {
        let limit_us = 2_000_000;
        let options = FlowOptions { progress_limit_us: limit_us, ..FlowOptions::default() };
        let (other, asking, end) = busy_other(direction, options);
        let stopped = Instant::now();
        other.signal(Signal::STOP);
        let end = end.recv_timeout(LONG).unwrap();
        let took = stopped.elapsed();
        assert!(matches!(&end, End::Failed(_)), "{end:?}");
        // The peer's system goes on taking bytes until its buffers are full; the rest is for busy
        // machines.
        assert!(took < BELOW_OPERATIONS, "{took:?}");
        assert_eq!(asking.flows[0].stats().broken, Some(Broken::Frozen { limit_us }));
    }
}

#[test]
fn after_a_cancelled_transfer_has_ended_no_byte_of_it_is_written() {
    let owner = owner((MANY * BLOCK) as usize, Access::OPEN, ServerOptions::default());
    let asking = asking(owner.server.address(), 2, FlowOptions::default());
    cancel_again_and_again(&owner, &asking, MANY, BLOCK, 40, 5);
}

#[test]
fn a_cancelled_transfer_takes_no_other_with_it() {
    let len = (MANY * BLOCK) as usize;
    let (server, _theirs, _) = server(len, ServerOptions::default());
    let asking = asking(server.address(), 1, FlowOptions::default());
    let blocks = scattered(MANY, 5);
    let long: Vec<_> = blocks.iter().copied().cycle().take(20 * MANY as usize).collect();
    let survivor = asking.submit(asking.transfer(Direction::Read, &long, BLOCK));
    asking.wait_for_bytes();
    let mut cancelled = 0;
    for _ in 0..20 {
        let (sender, receiver) = mpsc::channel();
        let urgent = Transfer { deadline_us: Some(1), ..asking.transfer(Direction::Read, &blocks, BLOCK) };
        let submitted = asking.mover.submit(urgent, move |end| drop(sender.send(end))).unwrap();
        std::thread::sleep(Duration::from_millis(2));
        asking.mover.cancel(submitted);
        cancelled += u32::from(matches!(receiver.recv().unwrap(), End::Cancelled { .. }));
    }
    assert!(cancelled > 0);
    // A lot has one attempt only: had one of the survivor's been cancelled, it would have failed.
    assert_eq!(survivor.recv().unwrap(), End::Done { bytes: 20 * len as u64 });
}

/// What the port answers to bytes, until it closes.
fn said_to(address: SocketAddr, bytes: &[u8]) -> Vec<u8> {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(LONG)).unwrap();
    stream.write_all(bytes).unwrap();
    let mut answer = Vec::new();
    // A reset ends it as well.
    let _ = stream.read_to_end(&mut answer);
    answer
}

#[test]
fn garbage_on_the_port_is_refused_with_a_reason_and_harms_nobody() {
    let (server, _theirs, _) = ends::server(1 << 20, ServerOptions::default());
    let asking = asking(server.address(), 1, FlowOptions::default());
    let http = said_to(server.address(), b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n");
    assert!(http.starts_with(b"HTTP/1.1 400 "), "{}", String::from_utf8_lossy(&http));
    let tls =
        said_to(server.address(), b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03aaaaaaaaaaaaaaaaaaaaaa");
    assert!(String::from_utf8_lossy(&tls).contains("TLS"), "{tls:?}");
    let mut dice = SplitMix(1);
    for _ in 0..50 {
        let noise: Vec<u8> = (0..100).flat_map(|_| dice.draw().to_le_bytes()).collect();
        assert!(String::from_utf8_lossy(&said_to(server.address(), &noise)).contains("wrong CRC"));
    }
    assert_eq!(server.stats().refused[&RefusalCode::NotForebay], 51);
    assert_eq!(server.stats().refused[&RefusalCode::Encrypted], 1);
    // Whoever says nothing, or only a part, is not waited for.
    let options = ServerOptions { greeting_limit_us: 200_000, ..ServerOptions::default() };
    let (hasty, _memory, _) = ends::server(4096, options);
    assert!(String::from_utf8_lossy(&said_to(hasty.address(), b"")).contains("HELLO"));
    assert!(String::from_utf8_lossy(&said_to(hasty.address(), b"\x01")).contains("HELLO"));
    assert_eq!(hasty.stats().refused[&RefusalCode::NotForebay], 2);
    let end = asking.run(Direction::Write, &[(0, 1)], 4096);
    assert_eq!(end, End::Done { bytes: 4096 });
}

fn refusal(address: SocketAddr, options: FlowOptions) -> RefusalCode {
    match Flow::connect(address, identity(2), PeerRegions::default(), options) {
        Err(FlowError::Greeting { broken: Broken::Refused(refusal), .. }) => refusal.code,
        other => panic!("{other:?}"),
    }
}

#[test]
fn who_is_not_let_in_is_told_why() {
    let options = ServerOptions {
        token: b"secret".to_vec(),
        flows_per_peer_max: 2,
        flows_max: 3,
        ..ServerOptions::default()
    };
    let (server, _theirs, _) = server(4096, options);
    let right = FlowOptions { token: b"secret".to_vec(), ..FlowOptions::default() };
    assert_eq!(refusal(server.address(), FlowOptions::default()), RefusalCode::Token);
    let wrong = FlowOptions { token: b"secreT".to_vec(), ..FlowOptions::default() };
    assert_eq!(refusal(server.address(), wrong), RefusalCode::Token);
    let instance = FlowOptions { instance: Some([9; 16]), ..right.clone() };
    assert_eq!(refusal(server.address(), instance), RefusalCode::Instance);
    // A place is free as soon as the server has noticed.
    let wait_for_flows = |flows| {
        while server.stats().flows > flows {
            std::thread::sleep(Duration::from_millis(1));
        }
    };
    wait_for_flows(0);
    let two = asking(server.address(), 2, right.clone());
    assert_eq!(refusal(server.address(), right.clone()), RefusalCode::TooManyFlows);
    drop(two);
    wait_for_flows(0);
    drop(asking(server.address(), 2, right));
    assert_eq!(server.stats().let_in, 4);
}

#[test]
fn silent_connections_keep_no_peer_out_and_take_places_from_each_other() {
    let options = ServerOptions {
        token: b"secret".to_vec(),
        pending_max: 4,
        greeting_limit_us: 60_000_000,
        ..ServerOptions::default()
    };
    let (server, _theirs, _) = server(4096, options);
    let right = FlowOptions { token: b"secret".to_vec(), ..FlowOptions::default() };
    let before = asking(server.address(), 3, right.clone());
    let silent: Vec<_> = (0..12).map(|_| TcpStream::connect(server.address()).unwrap()).collect();
    // Each of these comes behind all that are silent.
    let let_in: Vec<_> = (0..4).map(|_| asking(server.address(), 2, right.clone())).collect();
    assert_eq!(server.stats().let_in, 3 + 4 * 2);
    let mut told = Vec::new();
    (&silent[0]).read_to_end(&mut told).unwrap();
    let told = String::from_utf8_lossy(&told);
    assert!(told.contains("4 connections have not said who they are"), "{told}");
    let stats = server.stats();
    assert!(stats.pending.pending <= 4 && stats.pending.evicted >= 8, "{:?}", stats.pending);
    assert!(stats.refused[&RefusalCode::TooManyFlows] >= 8);
    // Those that were let in are not in that room.
    for asking in let_in.iter().chain([&before]) {
        let end = asking.run(Direction::Write, &[(0, 0)], 4096);
        assert_eq!(end, End::Done { bytes: 4096 });
    }
}

#[test]
fn why_a_peer_is_not_reached_is_one_of_a_few_reasons() {
    let secret = |token: &str| ServerOptions { token: token.into(), ..ServerOptions::default() };
    let (server, _memory, _) = server(4096, secret("one"));
    let reason = |address| match Flow::connect(
        address,
        identity(2),
        PeerRegions::default(),
        FlowOptions { token: b"two".to_vec(), connect_limit_us: 300_000, ..FlowOptions::default() },
    ) {
        Err(error) => UnreachableReason::from(&error),
        Ok(_) => panic!("it was let in"),
    };
    assert_eq!(reason(server.address()), UnreachableReason::Token);
    let answering = |bytes: &'static [u8]| {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let _ = stream.read(&mut [0; 100]);
            stream.write_all(bytes).unwrap();
            let _ = stream.read_to_end(&mut Vec::new());
        });
        address
    };
    assert_eq!(reason(answering(b"HTTP/1.1 400 Bad Request\r\n\r\n")), UnreachableReason::NotForebay);
    assert_eq!(
        reason(answering(b"\x15\x03\x03\x00\x02\x02\x46SSH-2.0-whoever-and-more")),
        UnreachableReason::NotForebay
    );
    assert_eq!(reason(answering(b"")), UnreachableReason::TimedOut);
    let nobody = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    assert_eq!(reason(nobody), UnreachableReason::Refused);
}

#[test]
fn a_server_that_closes_lets_operations_end_and_flows_hear_of_it() {
    let len = (MANY * BLOCK) as usize;
    let (server, _theirs, _) = server(len, ServerOptions::default());
    let asking = asking(server.address(), 1, FlowOptions::default());
    let blocks: Vec<_> = scattered(MANY, 5).into_iter().cycle().take(40 * MANY as usize).collect();
    let end = asking.submit(asking.transfer(Direction::Write, &blocks, BLOCK));
    asking.wait_for_bytes();
    drop(server);
    let end = end.recv_timeout(LONG).unwrap();
    assert!(matches!(end, End::Failed(_)), "{end:?}");
}

#[test]
fn a_withdrawn_region_is_refused_and_the_flow_stays() {
    let (server, theirs, exports) = server(1 << 20, ServerOptions::default());
    let asking = asking(server.address(), 1, FlowOptions::default());
    assert!(exports.withdraw(KEY));
    exports.offer(KEY, theirs as _, Access::OPEN).unwrap();
    let end = asking.run(Direction::Read, &[(0, 0)], 4096);
    let End::Failed(failure) = end else { panic!("{end:?}") };
    assert!(failure.reason.to_string().contains("StaleGeneration"), "{}", failure.reason);
    assert_eq!(server.stats().faults[&FaultCode::StaleGeneration], 1);
    assert_eq!(asking.flows[0].stats().broken, None);
}
