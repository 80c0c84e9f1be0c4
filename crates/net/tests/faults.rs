//! Peers in processes of their own that die, freeze and come back.
#![allow(clippy::unwrap_used)]

mod common;

use common::busy::{self, BLOCK, BLOCKS, BYTES, busy, while_busy};
use common::*;
use forebay_net::{AgentConfig, End, Op, PeerError};
use forebay_transfer::SplitMix;
use rustix::process::Signal;
use std::time::{Duration, Instant};
use testkit::eventually;

/// How long a peer may stand still.
const LIMIT: Duration = Duration::from_secs(2);

fn limited(name: &str) -> AgentConfig {
    AgentConfig { progress_limit_us: LIMIT.as_micros() as u64, ..AgentConfig::named(name) }
}

/// Not a test: what [`busy::spawn`] starts.
#[test]
#[ignore = "started by other tests"]
fn the_other_process() {
    busy::run();
}

#[test]
fn a_killed_peer_is_reported_within_150_ms_and_every_later_request_fails_too() {
    for op in [Op::Write, Op::Read] {
        // The shortest of a few: on a busy machine this process may have to wait for its turn.
        let took = (0..5).map(|_| kill_and_time(op)).find(|took| *took < Duration::from_millis(150));
        assert!(took.is_some(), "{op:?}: never within 150 ms");
    }
}

/// How long it takes until the death of a peer is reported.
fn kill_and_time(op: Op) -> Duration {
    let one = end("one", BYTES);
    let (other, request) = busy(&one, op, &[]);
    let (end, took) = while_busy(&request, || other.signal(Signal::KILL));
    assert!(matches!(&end, End::Failed { why: PeerError::Lost { .. }, .. }), "{end:?}");
    let asked = Instant::now();
    let end = run(&request);
    assert!(matches!(&end, End::Failed { .. }) && asked.elapsed() < BELOW_OPERATIONS, "{end:?}");
    assert_eq!(one.agent.stats()[0].counts.in_flight_lots(), 0);
    took
}

#[test]
fn a_stopped_peer_is_reported_within_the_limit_and_writes_nothing_when_it_goes_on() {
    for op in [Op::Write, Op::Read] {
        // The peer's system takes a little more at first, and the machine may be busy. But what is
        // left in this system's buffers when the limit is over must not buy the peer another one:
        // the shortest of a few says so.
        let took = (0..3).map(|_| stop_and_time(op)).find(|took| *took < LIMIT * 19 / 10);
        assert!(took.is_some(), "{op:?}: never within one limit of {LIMIT:?}");
    }
}

/// How long it takes until a peer that stands still is reported.
fn stop_and_time(op: Op) -> Duration {
    let one = end_with(limited("one"), BYTES);
    let (other, request) = busy(&one, op, &[]);
    let (end, took) = while_busy(&request, || other.signal(Signal::STOP));
    assert!(matches!(&end, End::Failed { why: PeerError::Lost { .. }, .. }), "{end:?}");
    assert_eq!(one.agent.stats()[0].counts.faults.get("frozen"), Some(&1));
    let ours = fill(&one.memory, BYTES, 5);
    other.signal(Signal::CONT);
    std::thread::sleep(Duration::from_millis(100));
    assert!(bytes(&one.memory, BYTES) == ours, "{op:?}");
    // It is the same instance, so it may be spoken to again.
    eventually("the peer is back", || run(&request) == End::Done { bytes: BYTES as u64 });
    took
}

#[test]
fn a_cancel_while_the_peer_is_stopped_returns_within_the_limit() {
    let one = end_with(limited("one"), BYTES);
    let (other, request) = busy(&one, Op::Write, &[]);
    other.signal(Signal::STOP);
    let ended = post(&request);
    let asked = Instant::now();
    request.cancel();
    assert!(asked.elapsed() < BELOW_OPERATIONS, "{:?}", asked.elapsed());
    let end = ended.recv_timeout(LONG).unwrap();
    assert!(matches!(end, End::Cancelled { .. }), "{end:?}");
}

#[test]
fn peers_that_die_again_and_again_leave_nothing_behind() {
    let one = end("one", BYTES);
    let mut dice = SplitMix(3);
    let mut counts = Vec::new();
    for round in 0..12u64 {
        let other = busy::spawn(BYTES, &[]);
        one.agent.add_peer(&other.metadata()).unwrap();
        let request = scattered(
            &one,
            "other",
            other.base(),
            if round % 2 == 0 { Op::Write } else { Op::Read },
            BLOCK,
            BLOCKS,
        );
        let ended = post(&request);
        std::thread::sleep(Duration::from_micros(dice.draw() % 30_000));
        drop(other);
        let end = ended.recv_timeout(LONG).unwrap();
        assert!(matches!(end, End::Done { .. } | End::Failed { .. }), "{end:?}");
        eventually("its flows are gone", || one.agent.stats()[0].flows.is_empty());
        let links = one.agent.mover().telemetry().unwrap().links.len();
        let threads = std::fs::read_dir("/proc/self/task").unwrap().count();
        let descriptors = std::fs::read_dir("/proc/self/fd").unwrap().count();
        counts.push((links, threads, descriptors));
    }
    // The other tests of this process come and go, so only the links are exact.
    let links: Vec<usize> = counts.iter().map(|(links, ..)| *links).collect();
    assert!(links[11] <= 2 * 4, "each peer took new links: {counts:?}");
}
