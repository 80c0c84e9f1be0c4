//! Peers that ask and do not take what they asked for, and a node that has no descriptors left. A
//! process of its own, since descriptors are limited for the whole process.
#![allow(clippy::unwrap_used)]

mod common;

use common::ends::{Direction, asking, identity, server};
use common::relay::Relay;
use forebay_net::tcp::*;
use forebay_transfer::End;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::net::TcpStream;
use std::sync::Mutex;
use std::time::{Duration, Instant};
use testkit::eventually;

const LIMIT: Duration = Duration::from_secs(30);

/// Descriptors belong to the process, so its tests take turns.
static TURN: Mutex<()> = Mutex::new(());

#[test]
fn a_peer_that_stops_taking_answers_is_cut_off_in_time_and_others_do_not_notice() {
    let _turn = TURN.lock().unwrap();
    let limit_us = 300_000;
    // Buffers of the system hold less than what is asked for.
    let options = ServerOptions {
        progress_limit_us: limit_us,
        socket_buffer_bytes: Some(64 << 10),
        ..ServerOptions::default()
    };
    let len = 32 << 20;
    let (server, _theirs, _) = server(len, options);
    let patient = FlowOptions { progress_limit_us: 20_000_000, ..FlowOptions::default() };
    let relay = Relay::taking(server.address(), 200_000);
    let slow = asking(relay.address, 1, patient);
    let good = asking(server.address(), 1, FlowOptions::default());
    assert_eq!(server.stats().flows, 2);
    let blocks: Vec<_> = (0..(len >> 20) as u64).map(|block| (block, block)).collect();
    let began = Instant::now();
    let _never = slow.submit(slow.transfer(Direction::Read, &blocks, 1 << 20));
    while server.stats().flows == 2 {
        let end = good.mover.run(good.transfer(Direction::Read, &[(0, 0)], 4096)).unwrap();
        assert_eq!(end, End::Done { bytes: 4096 });
        assert!(began.elapsed() < LIMIT, "the slow peer is still served");
    }
    assert!(began.elapsed() >= Duration::from_micros(limit_us));
    assert_eq!(good.flows[0].stats().broken, None);
    slow.flows[0].sever();
}

#[test]
fn a_node_without_descriptors_lets_nobody_new_in_and_recovers() {
    let _turn = TURN.lock().unwrap();
    let (server, _theirs, _) = server(4096, ServerOptions::default());
    let before = asking(server.address(), 1, FlowOptions::default());
    let old = getrlimit(Resource::Nofile);
    let open = std::fs::read_dir("/proc/self/fd").unwrap().count() as u64;
    // Enough for the asking ends of some flows, but not for both ends of all.
    setrlimit(Resource::Nofile, Rlimit { current: Some(open + 12), ..old }).unwrap();
    let strangers: Vec<_> = (0..20).filter_map(|_| TcpStream::connect(server.address()).ok()).collect();
    assert!(strangers.len() < 20, "there were descriptors for all");
    let end = before.mover.run(before.transfer(Direction::Write, &[(0, 0)], 4096)).unwrap();
    assert_eq!(end, End::Done { bytes: 4096 }, "who was let in before is served");
    let options = FlowOptions { connect_limit_us: 100_000, ..FlowOptions::default() };
    let refused = Flow::connect(server.address(), identity(3), PeerRegions::default(), options);
    assert!(refused.is_err(), "{refused:?}");
    drop(strangers);
    setrlimit(Resource::Nofile, old).unwrap();
    eventually("somebody is let in again", || {
        Flow::connect(server.address(), identity(4), PeerRegions::default(), FlowOptions::default()).is_ok()
    });
    let end = before.mover.run(before.transfer(Direction::Read, &[(0, 0)], 4096)).unwrap();
    assert_eq!(end, End::Done { bytes: 4096 });
}
