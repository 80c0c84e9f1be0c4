//! What does not depend on the number of bytes: posting, round trips, starting and doing nothing.

use super::blocks::Shape;
use super::pair::{Pair, Way, run};
use super::raw;
use crate::output::Error;
use crate::timing::{cpu_s, median};
use forebay_net::{Access, Agent, Descriptors, Op, Run, Select};
use forebay_results::Row;
use forebay_transfer::HostBuffer;
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

/// Round trips of a run.
const ROUND_TRIPS: usize = 1_000;
/// Descriptors of a posted transfer.
const POSTED: usize = 10_000;
/// How long nothing is done.
const IDLE: Duration = Duration::from_secs(5);

pub fn measure(way: &Way, runs: u32) -> Result<Vec<Row>, Error> {
    let mut rows = vec![post(way, runs)?];
    for (name, bytes) in [("net.rtt_us.4kib", 4 << 10), ("net.rtt_us.64kib", 64 << 10)] {
        rows.push(round_trip(way, name, bytes, runs)?);
    }
    rows.push(start(runs)?);
    rows.push(idle(way)?);
    Ok(rows)
}

/// Time in the call that posts a transfer of strided blocks, for each of them.
fn post(way: &Way, runs: u32) -> Result<Row, Error> {
    let shape = Shape { block_bytes: 256, blocks: POSTED * 2 };
    let pair = Pair::start(way, shape)?;
    let every_other = |base: u64| {
        let run = Run { address: base, len: 256, count: POSTED as u64, stride: 512 };
        Descriptors::from_runs([run])
    };
    let (local, remote) = pair.prepare(every_other)?;
    let mut us = Vec::new();
    for _ in 0..=runs {
        let request =
            pair.agent.request(Op::Write, (&local, Select::All), (&remote, Select::All), None, None)?;
        let (sender, receiver) = mpsc::sync_channel(1);
        let begin = Instant::now();
        request.post(move |end| drop(sender.send(end)))?;
        us.push(begin.elapsed().as_secs_f64() * 1e6 / POSTED as f64);
        receiver.recv()?;
    }
    // The first one has found cold memory.
    Ok(Row::of_runs("net.post_us_per_desc", "us", &us[1..]))
}

/// The median of many WRITEs of one block, each seen by the caller, beside a message and its answer
/// over a plain socket.
fn round_trip(way: &Way, name: &str, bytes: usize, runs: u32) -> Result<Row, Error> {
    let mut pair = Pair::start(way, Shape { block_bytes: bytes, blocks: 1 })?;
    let request = pair.request(Op::Write)?;
    let port: u16 = pair.ask(&format!("echo {bytes}"))?.parse()?;
    let mut ours = Vec::new();
    let trips = || -> Result<f64, Error> {
        let one = |_| {
            let begin = Instant::now();
            run(&request).map(|()| begin.elapsed().as_secs_f64() * 1e6)
        };
        Ok(median(&(0..ROUND_TRIPS).map(one).collect::<Result<Vec<f64>, Error>>()?))
    };
    let plain = median(&raw::round_trips(port, bytes, ROUND_TRIPS)?);
    for _ in 0..runs {
        ours.push(trips()?);
    }
    Ok(Row::of_runs(name, "us", &ours).with_ceiling(plain))
}

/// How long it takes until there is an agent that listens.
fn start(runs: u32) -> Result<Row, Error> {
    let one = |_| {
        let begin = Instant::now();
        let agent = Agent::start(Way::plain(2).config("short")?)?;
        agent.register(Arc::new(HostBuffer::new(4096)), Access::OPEN)?;
        Ok(begin.elapsed().as_secs_f64() * 1e3)
    };
    let ms = (0..runs).map(one).collect::<Result<Vec<f64>, Error>>()?;
    Ok(Row::of_runs("net.start_ms", "ms", &ms))
}

/// The part of a core that both processes take while nothing is asked for, after something was.
fn idle(way: &Way) -> Result<Row, Error> {
    let mut pair = Pair::start(way, Shape { block_bytes: 4096, blocks: 16 })?;
    run(&pair.request(Op::Write)?)?;
    let (mine_s, both_s) = (cpu_s(), pair.cpu_s()?);
    std::thread::sleep(IDLE);
    let mine = (cpu_s() - mine_s) / IDLE.as_secs_f64();
    let both = (pair.cpu_s()? - both_s) / IDLE.as_secs_f64();
    Ok(Row::of_runs("net.idle.cpu_core", "cores", &[mine, both - mine]))
}
