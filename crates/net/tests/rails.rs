//! Agents with rails: bytes take the best one that both ends have, and TCP wherever there is none.
//! Over UCX's shared memory and its `tcp`; tests say so and pass where the library is missing.
#![allow(clippy::unwrap_used)]

mod common;

use common::busy::{self, BYTES, busy, while_busy};
use common::*;
use forebay_net::{AgentConfig, FlowStat, Op, PeerError, RailOptions, TCP, WhyIdle};
use rustix::process::Signal;
use std::time::Duration;
use testkit::eventually;

const MEMORY: &str = "ucx_memory";

/// Not a test: what `Other` runs.
#[test]
#[ignore = "started by other tests"]
fn the_other_process() {
    busy::run();
}

fn named(name: &str, rails: Vec<RailOptions>) -> AgentConfig {
    AgentConfig { rails, ..AgentConfig::named(name) }
}

/// Two agents with these rails, connected by the first bytes.
fn connected(ours: Vec<RailOptions>, theirs: Vec<RailOptions>, len: usize) -> (End, End) {
    let (one, two) = (end_with(named("one", ours), len), end_with(named("two", theirs), len));
    one.agent.add_peer(&two.agent.metadata()).unwrap();
    one.agent.connect("two").unwrap();
    (one, two)
}

fn flows(one: &End) -> Vec<FlowStat> {
    one.agent.stats()[0].flows.clone()
}

fn paths(one: &End) -> Vec<(&'static str, bool)> {
    flows(one).iter().map(|flow| (flow.path, flow.stands_by)).collect()
}

/// Why the rails of the first end carry nothing, once that is known.
fn idle(one: &End) -> Vec<WhyIdle> {
    eventually("rails were tried", || !one.agent.stats()[0].idle_rails.is_empty());
    one.agent.stats()[0].idle_rails.iter().map(|idle| idle.why.clone()).collect()
}

/// Moves scattered blocks both ways and compares every byte.
fn bytes_arrive_both_ways(one: &End, two: &End, block: u64, count: u64) {
    let len = (block * count) as usize;
    let order = shuffled(count);
    for (op, seed) in [(Op::Write, 1), (Op::Read, 3)] {
        let (ours, theirs) = (fill(&one.memory, len, seed), fill(&two.memory, len, seed + 1));
        let request = scattered(one, "two", two.registration.base(), op, block, count);
        assert_eq!(run(&request), forebay_net::End::Done { bytes: len as u64 });
        let (ours_now, theirs_now) = (bytes(&one.memory, len), bytes(&two.memory, len));
        for (nth, other) in order.iter().enumerate() {
            let [here, there] = [nth, *other as usize].map(|nth| nth * block as usize);
            let piece = |bytes: &[u8], at: usize| bytes[at..at + block as usize].to_vec();
            match op {
                Op::Write => assert!(piece(&ours, here) == piece(&theirs_now, there), "{nth}"),
                Op::Read => assert!(piece(&theirs, there) == piece(&ours_now, here), "{nth}"),
            }
        }
    }
}

#[test]
fn bytes_take_the_best_rail_that_both_ends_have_and_the_stats_name_it() {
    if !ucx_is_here() {
        return;
    }
    let fabrics = ["tcp", "rdma", "memory"];
    let (one, two) = connected(on_rails(&fabrics), on_rails(&fabrics), 26_000 * 500);
    let idle = idle(&one);
    assert_eq!(paths(&one), [(TCP, true), (MEMORY, false)]);
    bytes_arrive_both_ways(&one, &two, 26_000, 500);
    let stat = &one.agent.stats()[0];
    assert_eq!(stat.counts.paths[MEMORY].moved_bytes, 2 * 26_000 * 500);
    assert!(stat.counts.paths.keys().all(|path| *path == MEMORY), "{:?}", stat.counts.paths);
    let report = stat.flows[1].report.as_ref().unwrap();
    assert!(
        report.contains("fabric Memory") && report.contains("taken") && report.contains("left"),
        "{report}"
    );
    // The machine may have RDMA or not; in either case it is said why that carries nothing.
    assert_eq!(idle.len(), 2);
    assert_eq!(idle[0], WhyIdle::NotNeeded("memory"));
    assert_eq!(stat.idle_rails[0].rail, on_rails(&["tcp"])[0]);
    assert!(stat.counts.faults.is_empty(), "{:?}", stat.counts.faults);
}

#[test]
fn several_rails_of_a_fabric_carry_a_flow_each() {
    if !ucx_is_here() {
        return;
    }
    let (ours, theirs) = (on_rails(&["memory"; 3]), on_rails(&["memory"; 2]));
    let (one, two) = connected(ours, theirs, 1 << 20);
    eventually("all rails are taken", || flows(&one).len() == 4);
    bytes_arrive_both_ways(&one, &two, 4096, 256);
    assert_eq!(paths(&one), [(TCP, true), (MEMORY, false), (MEMORY, false), (MEMORY, false)]);
}

#[test]
fn a_rail_that_cannot_be_opened_leaves_tcp_working_and_says_why() {
    if !ucx_is_here() {
        return;
    }
    let nowhere = RailOptions::named("tcp", vec!["nosuch0".into()]).unwrap();
    let (one, two) = connected(vec![nowhere], on_rails(&["tcp"]), 1 << 20);
    let idle = idle(&one);
    assert!(matches!(&idle[..], [WhyIdle::Unopened(why)] if why.to_string().contains("nosuch0")), "{idle:?}");
    bytes_arrive_both_ways(&one, &two, 4096, 256);
    let stat = &one.agent.stats()[0];
    assert_eq!(paths(&one), [(TCP, false)]);
    assert_eq!((stat.counts.faults["rail_unopened"], stat.counts.paths[TCP].moved_bytes), (1, 2 << 20));
}

#[test]
fn an_agent_without_rails_and_one_with_speak_tcp() {
    let (one, two) = connected(on_rails(&["memory"]), Vec::new(), 1 << 20);
    assert_eq!(idle(&one), [WhyIdle::NotThere]);
    bytes_arrive_both_ways(&one, &two, 4096, 256);
    two.agent.add_peer(&one.agent.metadata()).unwrap();
    two.agent.connect("one").unwrap();
    for end in [&one, &two] {
        let stat = &end.agent.stats()[0];
        assert!(paths(end) == [(TCP, false)] && stat.counts.faults.is_empty(), "{stat:?}");
    }
}

#[test]
fn a_peer_that_is_killed_or_stopped_on_a_rail_is_reported_and_writes_nothing_after() {
    if !ucx_is_here() {
        return;
    }
    for (op, signal) in [(Op::Write, Signal::KILL), (Op::Read, Signal::KILL), (Op::Read, Signal::STOP)] {
        let config = AgentConfig { progress_limit_us: 2_000_000, ..named("one", on_rails(&["memory"])) };
        let one = end_with(config, BYTES);
        let (other, request) = busy(&one, op, &["memory"]);
        eventually("the rail is taken", || paths(&one).contains(&(MEMORY, false)));
        assert_eq!(run(&request), forebay_net::End::Done { bytes: BYTES as u64 });
        let (end, took) = while_busy(&request, || other.signal(signal));
        let lost = matches!(&end, forebay_net::End::Failed { why: PeerError::Lost { .. }, .. });
        assert!(lost && took < BELOW_OPERATIONS, "{op:?} {signal:?} {took:?} {end:?}");
        eventually("its flows are gone", || flows(&one).is_empty());
        let ours = fill(&one.memory, BYTES, 5);
        other.signal(Signal::CONT);
        std::thread::sleep(Duration::from_millis(100));
        assert!(bytes(&one.memory, BYTES) == ours, "{op:?}");
        assert_eq!(one.agent.stats()[0].counts.in_flight_lots(), 0);
    }
}
