//! The TCP link with two real ends: blocks large and small, peers that die, freeze or are none.
#![allow(clippy::unwrap_used)]

mod ends;

use ends::{Asking, Direction, KEY, asking, bytes, fill, identity, scattered, server};
use forebay_net::tcp::*;
use forebay_transfer::SplitMix;
use forebay_transfer::{End, Transfer};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

const PEER: &str = "FOREBAY_TEST_PEER_BYTES";

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

/// A peer in a process of its own.
struct Other {
    child: Child,
    address: SocketAddr,
}

impl Other {
    fn spawn(bytes: usize) -> Other {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "the_other_process", "--ignored", "--nocapture"])
            .env(PEER, bytes.to_string())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let port =
            lines.find_map(|line| line.unwrap().split_once("PORT ").map(|(_, port)| port.parse().unwrap()));
        Other { child, address: ([127, 0, 0, 1], port.unwrap()).into() }
    }

    fn signal(&self, signal: rustix::process::Signal) {
        let pid = rustix::process::Pid::from_raw(self.child.id() as i32).unwrap();
        rustix::process::kill_process(pid, signal).unwrap();
    }
}

impl Drop for Other {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Not a test: what [`Other`] runs. Ends with its input.
#[test]
#[ignore = "started by other tests"]
fn the_other_process() {
    let Ok(bytes) = std::env::var(PEER) else { return };
    let (server, _memory, _exports) = server(bytes.parse().unwrap(), ServerOptions::default());
    println!("PORT {}", server.address().port());
    std::io::stdout().flush().unwrap();
    let _ = std::io::stdin().read(&mut [0]);
}

const MANY: u64 = 1_024;
const BLOCK: u64 = 64 << 10;

/// Patience with a busy machine.
const LONG: Duration = Duration::from_secs(60);
/// Well below the 30 s that the mover gives an operation: what is over by then was ended by the
/// flow.
const BELOW_OPERATIONS: Duration = Duration::from_secs(15);

/// Waits until the first operation is done.
fn wait_for_bytes(asking: &Asking) {
    while asking.flows[0].stats().done == 0 {
        assert_eq!(asking.flows[0].stats().broken, None);
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// A peer that is in the middle of a long transfer.
fn busy_other(direction: Direction, options: FlowOptions) -> (Other, Asking, mpsc::Receiver<End>) {
    let other = Other::spawn((MANY * BLOCK) as usize);
    let asking = asking(other.address, 1, options);
    let blocks: Vec<_> = scattered(MANY, 5).into_iter().cycle().take(40 * MANY as usize).collect();
    let end = asking.submit(asking.transfer(direction, &blocks, BLOCK));
    wait_for_bytes(&asking);
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
    other.signal(rustix::process::Signal::KILL);
    let end = end.recv_timeout(LONG).unwrap();
    let took = killed.elapsed();
    assert!(matches!(&end, End::Failed(_)), "not failed");
    assert_eq!(asking.flows[0].stats().broken, Some(Broken::Closed));
    // And so is every later operation.
    let asked = Instant::now();
    let end = asking.mover.run(asking.transfer(direction, &[(0, 0)], BLOCK)).unwrap();
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
        other.signal(rustix::process::Signal::STOP);
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
    let len = (MANY * BLOCK) as usize;
    let (server, theirs, _) = server(len, ServerOptions::default());
    let asking = asking(server.address(), 2, FlowOptions::default());
    let blocks = scattered(MANY, 5);
    let mut cancelled = 0;
    for round in 0..40 {
        let direction = if round % 2 == 0 { Direction::Write } else { Direction::Read };
        let (sender, receiver) = mpsc::channel();
        let transfer = asking.transfer(direction, &blocks, BLOCK);
        let submitted = asking.mover.submit(transfer, move |end| drop(sender.send(end))).unwrap();
        std::thread::sleep(Duration::from_micros(round * 250));
        asking.mover.cancel(submitted);
        cancelled += u32::from(matches!(receiver.recv().unwrap(), End::Cancelled { .. }));
        // The source changes and the target is used for something else.
        let ours_after = fill(&asking.memory, 1 << 20, round);
        let theirs_after = fill(&theirs, 1 << 20, round + 100);
        std::thread::sleep(Duration::from_millis(5));
        assert!(bytes(&asking.memory, 1 << 20) == ours_after);
        assert!(bytes(&theirs, 1 << 20) == theirs_after);
    }
    assert!(cancelled >= 5, "{cancelled} transfers were cancelled before their end");
    let end = asking.mover.run(asking.transfer(Direction::Read, &blocks, BLOCK)).unwrap();
    assert_eq!(end, End::Done { bytes: len as u64 }, "the flows are still good");
}

#[test]
fn a_cancelled_transfer_takes_no_other_with_it() {
    let len = (MANY * BLOCK) as usize;
    let (server, _theirs, _) = server(len, ServerOptions::default());
    let asking = asking(server.address(), 1, FlowOptions::default());
    let blocks = scattered(MANY, 5);
    let long: Vec<_> = blocks.iter().copied().cycle().take(20 * MANY as usize).collect();
    let survivor = asking.submit(asking.transfer(Direction::Read, &long, BLOCK));
    wait_for_bytes(&asking);
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
    let end = asking.mover.run(asking.transfer(Direction::Write, &[(0, 1)], 4096)).unwrap();
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
        let end = asking.mover.run(asking.transfer(Direction::Write, &[(0, 0)], 4096)).unwrap();
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
        Err(error) => Unreached::from(&error),
        Ok(_) => panic!("it was let in"),
    };
    assert_eq!(reason(server.address()), Unreached::Token);
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
    assert_eq!(reason(answering(b"HTTP/1.1 400 Bad Request\r\n\r\n")), Unreached::NotForebay);
    assert_eq!(
        reason(answering(b"\x15\x03\x03\x00\x02\x02\x46SSH-2.0-whoever-and-more")),
        Unreached::NotForebay
    );
    assert_eq!(reason(answering(b"")), Unreached::TimedOut);
    let nobody = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    assert_eq!(reason(nobody), Unreached::Refused);
}

#[test]
fn a_server_that_closes_lets_operations_end_and_flows_hear_of_it() {
    let len = (MANY * BLOCK) as usize;
    let (server, _theirs, _) = server(len, ServerOptions::default());
    let asking = asking(server.address(), 1, FlowOptions::default());
    let blocks: Vec<_> = scattered(MANY, 5).into_iter().cycle().take(40 * MANY as usize).collect();
    let end = asking.submit(asking.transfer(Direction::Write, &blocks, BLOCK));
    wait_for_bytes(&asking);
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
    let end = asking.mover.run(asking.transfer(Direction::Read, &[(0, 0)], 4096)).unwrap();
    let End::Failed(failure) = end else { panic!("{end:?}") };
    assert!(failure.reason.to_string().contains("StaleGeneration"), "{}", failure.reason);
    assert_eq!(server.stats().faults[&FaultCode::StaleGeneration], 1);
    assert_eq!(asking.flows[0].stats().broken, None);
}
