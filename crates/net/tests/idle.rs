//! Agents with nothing to do cost next to nothing. A process of its own, since CPU time is counted
//! for the whole process.
#![allow(clippy::unwrap_used)]

mod common;

use common::*;
use forebay_net::{AgentConfig, End, Op};
use std::time::Duration;
use testkit::eventually;
use testkit::idle::{assert_idle, cpu_of_two_seconds};

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
    // 0.5 % of a core, for both ends together, while they are connected.
    assert_idle("CPU time of two seconds", Duration::from_millis(10), cpu_of_two_seconds);
}
