//! A peer in a process of its own, in the middle of a request when something happens to it.

use super::other::{Other, introduce, order, wait_for_the_end};
use super::{LONG, end_with, on_rails, post, run as done, scattered};
use forebay_net::{AgentConfig, End, Op, Request};
use std::time::{Duration, Instant};

pub const BLOCK: u64 = 64 << 10;
pub const BLOCKS: u64 = 1_024;
pub const BYTES: usize = (BLOCK * BLOCKS) as usize;

/// A peer with so much memory. The test's file has a test `the_other_process`, ignored, that calls
/// [`run`].
pub fn spawn(bytes: usize, rails: &[&str]) -> Other {
    Other::spawn("the_other_process", format!("{bytes} {}", rails.join(",")))
}

/// What [`spawn`] starts.
pub fn run() {
    let Some(order) = order() else { return };
    let (bytes, names) = order.split_once(' ').unwrap();
    let rails: Vec<_> = names.split(',').filter(|name| !name.is_empty()).collect();
    let config = AgentConfig { rails: on_rails(&rails), ..AgentConfig::named("other") };
    let other = end_with(config, bytes.parse().unwrap());
    introduce(&other);
    wait_for_the_end();
}

/// A peer in the middle of a request that is posted again and again.
pub fn busy(one: &super::End, op: Op, rails: &[&str]) -> (Other, Request) {
    let other = spawn(BYTES, rails);
    one.agent.add_peer(&other.metadata()).unwrap();
    let request = scattered(one, "other", other.base(), op, BLOCK, BLOCKS);
    assert_eq!(done(&request), End::Done { bytes: BYTES as u64 });
    (other, request)
}

/// Has something happen while a request is under way, and says what came of that and how long it
/// took.
pub fn while_busy(request: &Request, happen: impl Fn()) -> (End, Duration) {
    for round in 0u64.. {
        let ended = post(request);
        std::thread::sleep(Duration::from_millis(round % 8));
        if ended.try_recv().is_ok() {
            continue;
        }
        happen();
        let since = Instant::now();
        let end = match ended.recv_timeout(LONG).unwrap() {
            // It was done a moment before; the next one meets the same.
            End::Done { .. } => done(request),
            end => end,
        };
        return (end, since.elapsed());
    }
    unreachable!()
}
