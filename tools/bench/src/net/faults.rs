//! How soon an asking end is told that the other process has died or is frozen, in the middle of a
//! transfer.

use super::blocks::Shape;
use super::pair::{Pair, Way};
use crate::output::Error;
use forebay_net::{End, Op};
use forebay_results::Row;
use rustix::process::Signal;
use std::sync::mpsc;
use std::time::{Duration, Instant};

/// A transfer that takes long enough to be hit in its middle.
const SHAPE: Shape = Shape { block_bytes: 1 << 20, blocks: 1024 };
/// How far it gets before.
const HEAD_START: Duration = Duration::from_millis(30);

/// Each fault, so many times.
pub fn measure(runs: u32) -> Result<Vec<Row>, Error> {
    let mut rows = Vec::new();
    for (name, signal) in [("net.detect_ms.sigkill", Signal::KILL), ("net.detect_ms.sigstop", Signal::STOP)] {
        let ms = (0..runs).map(|_| detect(signal)).collect::<Result<Vec<f64>, Error>>()?;
        rows.push(Row::of_runs(name, "ms", &ms));
    }
    Ok(rows)
}

fn detect(signal: Signal) -> Result<f64, Error> {
    let pair = Pair::start(&Way::plain(2), SHAPE)?;
    let request = pair.request(Op::Write)?;
    let (sender, receiver) = mpsc::sync_channel(1);
    request.post(move |end| drop(sender.send(end)))?;
    std::thread::sleep(HEAD_START);
    pair.signal(signal)?;
    let begin = Instant::now();
    match receiver.recv_timeout(Duration::from_secs(60))? {
        End::Done { .. } => Err("the transfer was over before the fault".into()),
        _ => Ok(begin.elapsed().as_secs_f64() * 1e3),
    }
}
