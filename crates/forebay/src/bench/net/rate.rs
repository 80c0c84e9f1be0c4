//! Bytes per second of whole transfers, plain and encrypted. Each run moves the same bytes by plain sockets and by an agent,
//! one after the other, so that both see the same minute of the machine.

use super::blocks::Shape;
use super::pair::{Pair, Way, run};
use super::raw::Raw;
use super::{Error, OpName, peers};
use crate::results::Row;
use forebay_agent::Op;
use std::path::Path;
use std::time::Instant;

/// Transfers before the first that counts: the number of flows is found meanwhile.
const WARM_UPS: u64 = 4;
/// Bytes of a block in the encrypted rows.
const TLS_BLOCK_BYTES: usize = 1_000_000;

/// What one kind of transfer gave.
struct Figures {
    gbps: Vec<f64>,
    raw_gbps: Vec<f64>,
    cpu_s_per_gb: f64,
}

/// One operation on blocks of one size, and the same by other systems.
pub fn measure(
    way: &Way,
    op: OpName,
    shape: Shape,
    runs: u32,
    commands: &[String],
) -> Result<Vec<Row>, Error> {
    let name = format!("net.{}.{}", op.name(), shape.name());
    let figures = transfers(way, op.op(), shape, runs)?;
    let raw = Row::of_runs("", "GB/s", &figures.raw_gbps);
    let mut row = Row::of_runs(&name, "GB/s", &figures.gbps).with_ceiling(raw.value);
    row.cpu_s_per_gb = Some(figures.cpu_s_per_gb);
    let mut rows = Vec::new();
    for (system, peer) in peers::measure(commands, op.name(), shape, runs)? {
        rows.push(peers::row(&name, &system, &peer));
        if row.peer.as_ref().is_none_or(|best| best.value < peer.value) {
            row.peer = Some(peer);
        }
    }
    rows.insert(0, row);
    Ok(rows)
}

/// Encrypted WRITEs of large blocks, beside plain ones.
pub fn measure_tls(way: &Way, dir: Option<&Path>, runs: u32) -> Result<Vec<Row>, Error> {
    let shape = Shape::new(TLS_BLOCK_BYTES, None);
    let plain = transfers(way, Op::Write, shape, runs)?;
    let plain = Row::of_runs("", "GB/s", &plain.gbps);
    let scratch = std::env::temp_dir().join(format!("forebay-bench-net-{}", std::process::id()));
    let encrypted = Way { tls: Some(dir.map_or(scratch, Path::to_path_buf)), ..way.clone() };
    let figures = transfers(&encrypted, Op::Write, shape, runs)?;
    let mut row = Row::of_runs("net.tls.write.1mb", "GB/s", &figures.gbps).with_ceiling(plain.value);
    row.cpu_s_per_gb = Some(figures.cpu_s_per_gb);
    Ok(vec![row])
}

fn transfers(way: &Way, op: Op, shape: Shape, runs: u32) -> Result<Figures, Error> {
    let mut pair = Pair::start(way, shape)?;
    let request = pair.request(op)?;
    for _ in 0..WARM_UPS {
        run(&request)?;
    }
    let streams = pair.flows().max(1);
    let port = pair.ask(&format!("raw {streams}"))?.parse()?;
    let mut raw = Raw::connect(port, streams, shape.bytes())?;
    raw.run(op == Op::Write)?;
    let gb = shape.bytes() as f64 / 1e9;
    let mut figures = Figures { gbps: Vec::new(), raw_gbps: Vec::new(), cpu_s_per_gb: 0.0 };
    for number in 1..=u64::from(runs) {
        figures.raw_gbps.push(gb / raw.run(op == Op::Write)?.as_secs_f64());
        pair.fill(op, number)?;
        let cpu_before_s = pair.cpu_s()?;
        let begin = Instant::now();
        run(&request)?;
        figures.gbps.push(gb / begin.elapsed().as_secs_f64());
        figures.cpu_s_per_gb += (pair.cpu_s()? - cpu_before_s) / (gb * f64::from(runs));
        pair.check(op, number)?;
    }
    Ok(figures)
}
