//! A real network between two agents: two network namespaces and a cable between them that is
//! pulled out and put back. Needs root and `ip`; says so loudly where it is skipped.
#![allow(clippy::unwrap_used)]

mod common;

use common::busy::while_busy;
use common::other::{Other, introduce, order, wait_for_the_end};
use common::*;
use forebay_net::{AgentConfig, End, Op, PeerError};
use std::process::Command;
use std::time::{Duration, Instant};
use testkit::eventually;

const BLOCK: u64 = 64 << 10;
const BLOCKS: u64 = 512;
const BYTES: usize = (BLOCK * BLOCKS) as usize;
const LIMIT_US: u64 = 2_000_000;
const ASKS: &str = "FOREBAY_TEST_ASKING_NET";

/// Runs a command and says whether it succeeded.
fn does(command: &str) -> bool {
    let mut words = command.split(' ');
    let output = Command::new(words.next().unwrap()).args(words).output();
    output.is_ok_and(|output| output.status.success())
}

fn must(command: &str) {
    assert!(does(command), "{command}");
}

/// Two namespaces with a cable between them.
struct Net {
    name: String,
}

impl Net {
    const ENDS: [&str; 2] = ["a", "b"];
    const ADDRESSES: [&str; 2] = ["198.18.77.1", "198.18.77.2"];

    /// `None`: it may not be done here.
    fn lay() -> Option<Net> {
        let net = Net { name: format!("fb{}", std::process::id()) };
        let [a, b] = Net::ENDS.map(|end| net.space(end));
        if !does(&format!("ip netns add {a}")) {
            return None;
        }
        must(&format!("ip netns add {b}"));
        must(&format!("ip -n {a} link add cable type veth peer name cable netns {b}"));
        for (end, address) in Net::ENDS.iter().zip(Net::ADDRESSES) {
            let space = net.space(end);
            must(&format!("ip -n {space} link set lo up"));
            must(&format!("ip -n {space} address add {address}/30 dev cable"));
            net.plug(end, true);
        }
        Some(net)
    }

    fn space(&self, end: &str) -> String {
        format!("{}{end}", self.name)
    }

    fn plug(&self, end: &str, is_in: bool) {
        let state = if is_in { "up" } else { "down" };
        must(&format!("ip -n {} link set cable {state}", self.space(end)));
    }

    /// This test binary at one end.
    fn at(&self, end: &str) -> Command {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &self.space(end)]).arg(std::env::current_exe().unwrap());
        command
    }
}

fn config(name: &str, end: usize) -> AgentConfig {
    AgentConfig {
        listen: Some(format!("{}:0", Net::ADDRESSES[end]).parse().unwrap()),
        plain_beyond_loopback: true,
        progress_limit_us: LIMIT_US,
        connect_limit_us: LIMIT_US,
        ..AgentConfig::named(name)
    }
}

/// Not a test: the end that is asked.
#[test]
#[ignore = "started by other tests"]
fn the_far_end() {
    if order().is_some() {
        let far = end_with(config("far", 1), BYTES);
        introduce(&far);
        wait_for_the_end();
    }
}

#[test]
fn a_cable_that_is_pulled_is_reported_in_time_and_one_that_is_put_back_carries_again() {
    let Some(net) = Net::lay() else {
        testkit::skipped("no network namespace can be made here; this test needs root and `ip`");
        return;
    };
    let mut asking = net.at("a");
    asking.args(["--exact", "the_near_end", "--ignored", "--nocapture"]).env(ASKS, &net.name);
    let asked = asking.output();
    for end in Net::ENDS {
        does(&format!("ip netns del {}", net.space(end)));
    }
    let asked = asked.unwrap();
    assert!(asked.status.success(), "{}", String::from_utf8_lossy(&[asked.stdout, asked.stderr].concat()));
}

/// Not a test by itself: the end that asks, in a namespace of its own.
#[test]
#[ignore = "started by other tests"]
fn the_near_end() {
    let Ok(name) = std::env::var(ASKS) else { return };
    let net = Net { name };
    let other = Other::spawn_by(net.at("b"), "the_far_end", "go");
    let near = end_with(config("near", 0), BYTES);
    near.agent.add_peer(&other.metadata()).unwrap();
    assert!(there_and_back(&near, other.base(), 1));
    for (op, end) in [(Op::Write, "b"), (Op::Read, "a")] {
        let request = scattered(&near, "far", other.base(), op, BLOCK, BLOCKS);
        let (end_of_request, took) = while_busy(&request, || net.plug(end, false));
        assert!(
            matches!(&end_of_request, End::Failed { why: PeerError::Lost { .. }, .. }),
            "{end_of_request:?}"
        );
        // The limit, what was still on its way, and a busy machine.
        assert!(took < BELOW_OPERATIONS, "{took:?}");
        let unplugged = run(&request);
        assert!(matches!(&unplugged, End::Failed { .. }), "{unplugged:?}");
        net.plug(end, true);
        eventually("the cable carries again", || run(&request) == End::Done { bytes: BYTES as u64 });
        assert!(there_and_back(&near, other.base(), 3));
    }
    a_loose_contact(&net, &near, other.base());
}

/// The cable loses what is on it again and again. Whether that lasts longer than the limit is up to
/// the system's patience; what is said to have arrived has.
fn a_loose_contact(net: &Net, near: &common::End, base: u64) {
    let until = Instant::now() + Duration::from_secs(3);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while Instant::now() < until {
                net.plug("b", false);
                std::thread::sleep(Duration::from_millis(15));
                net.plug("b", true);
                std::thread::sleep(Duration::from_millis(60));
            }
        });
        for seed in (10..).step_by(2).take_while(|_| Instant::now() < until) {
            there_and_back(near, base, seed);
        }
    });
    eventually("the cable carries again", || there_and_back(near, base, 1_000));
}

/// Moves all blocks there and back. Says whether they were moved, and compares them if so.
fn there_and_back(near: &common::End, base: u64, seed: u64) -> bool {
    let written = fill(&near.memory, BYTES, seed);
    let moves =
        |op| run(&scattered(near, "far", base, op, BLOCK, BLOCKS)) == End::Done { bytes: BYTES as u64 };
    if !moves(Op::Write) {
        return false;
    }
    fill(&near.memory, BYTES, seed + 1);
    let is_back = moves(Op::Read);
    assert!(!is_back || bytes(&near.memory, BYTES) == written, "other bytes came back");
    is_back
}
