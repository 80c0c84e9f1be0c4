//! The other process: it owns memory that the benchmark writes and reads, and does what it is told
//! on its standard input, a line at a time, with one line of answer each.

use super::Error;
use super::blocks::{End, Shape, fill, is_right};
use super::pair::{Way, cpu_s};
use super::rail::{self, Rail};
use super::raw;
use super::segment::{Memory, Segment};
use forebay_net::{Access, Agent};
use std::io::BufRead;
use std::path::PathBuf;

/// Arguments of the other process.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[arg(long)]
    block_bytes: usize,
    #[arg(long)]
    blocks: usize,
    #[arg(long)]
    flows: usize,
    #[arg(long)]
    tls: Option<PathBuf>,
    #[arg(long, value_enum)]
    segment: Segment,
    #[arg(long, value_parser = rail::rail)]
    rail: Vec<Rail>,
}

/// Runs until the standard input ends.
pub fn run(args: Args) -> crate::CommandResult {
    let shape = Shape { block_bytes: args.block_bytes, blocks: args.blocks };
    let memory = Memory::new(args.segment, shape.bytes())?;
    let way = Way { flows: args.flows, tls: args.tls, segment: args.segment, rails: args.rail };
    let agent = Agent::start(way.config("owner")?)?;
    let registration = agent.register(memory.backing(), Access::OPEN)?;
    println!("{} {}", hex(&agent.metadata()), registration.base());
    for line in std::io::stdin().lock().lines() {
        println!("{}", answer(&line?, shape, &memory)?);
    }
    Ok(())
}

fn answer(line: &str, shape: Shape, memory: &Memory) -> Result<String, Error> {
    let (word, number) = line.split_once(' ').unwrap_or((line, "0"));
    match word {
        "fill" => fill_all(shape, End::Owner, memory, number.parse()?),
        "check" => return Ok(wrong_blocks(shape, End::Owner, memory, number.parse()?).to_string()),
        "cpu" => return Ok(cpu_s().to_string()),
        "huge" => return Ok(memory.huge_bytes()?.to_string()),
        "raw" => return Ok(raw::serve(number.parse()?, shape.bytes())?.to_string()),
        "echo" => return Ok(raw::echo(number.parse()?)?.to_string()),
        other => return Err(format!("'{other}' is not known here").into()),
    }
    Ok("ok".into())
}

/// Writes what every block has in a run.
pub fn fill_all(shape: Shape, end: End, memory: &Memory, run: u64) {
    let mut bytes = vec![0; shape.block_bytes];
    for block in 0..shape.blocks {
        fill(&mut bytes, run, block);
        memory.write(shape.offset(end, block), &bytes);
    }
}

/// Blocks that do not have what they should have after a run.
pub fn wrong_blocks(shape: Shape, end: End, memory: &Memory, run: u64) -> usize {
    let mut bytes = vec![0; shape.block_bytes];
    let wrong = |block: &usize| {
        !(memory.read(shape.offset(end, *block), &mut bytes) && is_right(&bytes, run, *block))
    };
    (0..shape.blocks).filter(wrong).count()
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
