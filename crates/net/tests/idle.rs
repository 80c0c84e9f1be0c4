//! Agents with nothing to do cost next to nothing. A process of its own, since CPU time is counted
//! for the whole process.
#![allow(clippy::unwrap_used)]

mod common;

use common::*;
use forebay_net::{AgentConfig, End, Op};
use std::time::Duration;
use testkit::eventually;

fn cpu_time() -> Duration {
    let usage = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    Duration::new(usage.tv_sec as u64, usage.tv_nsec as u32)
}

#[test]
fn an_idle_agent_costs_nothing() {
    idle(&[]);
    if ucx_is_here() {
        idle(&["memory"]);
    }
}

fn idle(rails: &[&str]) {
    let config = |name| AgentConfig { rails: on_rails(rails), ..AgentConfig::named(name) };
    let (one, two) = (end_with(config("one"), 1 << 20), end_with(config("two"), 1 << 20));
    one.agent.add_peer(&two.agent.metadata()).unwrap();
    let request = scattered(&one, "two", two.registration.base(), Op::Read, 1024, 1024);
    assert_eq!(run(&request), End::Done { bytes: 1 << 20 });
    for fabric in rails {
        let taken = || one.agent.stats()[0].flows.iter().any(|flow| flow.path == format!("ucx_{fabric}"));
        eventually("the rail is taken", taken);
    }
    assert_eq!(run(&request), End::Done { bytes: 1 << 20 });
    // 0.5 % of a core, for both ends together, while they are connected. One window of a few has to
    // be quiet: in the first one the work before may still end.
    let mut used = Vec::new();
    while used.last().is_none_or(|last| *last > Duration::from_millis(10)) {
        assert!(used.len() < 5, "CPU time of two seconds: {used:?}");
        let before = cpu_time();
        std::thread::sleep(Duration::from_secs(2));
        used.push(cpu_time() - before);
    }
}
