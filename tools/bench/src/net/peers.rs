//! Other systems, measured by programs of their own on the same blocks (bench/peers): each is
//! called with the operation, the size and the number of blocks and the number of runs, and prints
//! one line of JSON. This file knows that line.

use super::blocks::Shape;
use crate::output::Error;
use crate::timing::median;
use forebay_results::{Peer, Row};
use serde::Deserialize;
use std::process::{Command, Stdio};

/// What such a program prints last.
#[derive(Debug, Deserialize)]
struct Line {
    name: String,
    version: String,
    gbps: Vec<f64>,
    cpu_s_per_gb: f64,
    bad_blocks: u64,
}

/// What each of the programs measured. A program that fails fails the benchmark.
pub fn measure(commands: &[String], op: &str, shape: Shape, runs: u32) -> Result<Vec<(System, Peer)>, Error> {
    commands.iter().map(|command| measure_one(command, op, shape, runs)).collect()
}

/// More about another system than fits a peer.
#[derive(Debug)]
pub struct System {
    gbps: Vec<f64>,
    cpu_s_per_gb: f64,
}

fn measure_one(command: &str, op: &str, shape: Shape, runs: u32) -> Result<(System, Peer), Error> {
    let mut words = command.split_whitespace();
    let program = words.next().ok_or("--peer is empty")?;
    let mut call = Command::new(program);
    call.args(words).args(["--op", op, "--block-bytes", &shape.block_bytes.to_string()]);
    call.args(["--blocks", &shape.blocks.to_string(), "--runs", &runs.to_string()]);
    let output = call.stdin(Stdio::null()).stderr(Stdio::inherit()).output()?;
    let text = String::from_utf8_lossy(&output.stdout);
    let last =
        text.lines().rfind(|line| line.starts_with('{')).ok_or_else(|| format!("{command}: no result"))?;
    let Line { name, version, gbps, cpu_s_per_gb, bad_blocks } = serde_json::from_str(last)?;
    if bad_blocks > 0 {
        return Err(format!("{name}: {bad_blocks} blocks are wrong").into());
    }
    let value = median(&gbps);
    Ok((System { gbps, cpu_s_per_gb }, Peer { name, version, value }))
}

/// A row of its own for another system.
pub fn row(name: &str, system: &System, peer: &Peer) -> Row {
    let mut row = Row::of_runs(format!("{name}.{}", peer.name.to_ascii_lowercase()), "GB/s", &system.gbps);
    row.cpu_s_per_gb = Some(system.cpu_s_per_gb);
    row
}
