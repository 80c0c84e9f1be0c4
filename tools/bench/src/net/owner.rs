//! The other process: it owns memory that the benchmark writes and reads, and does what it is told
//! on its standard input, a line at a time, with one line of answer each.

use super::blocks::{Shape, fill_all, wrong_blocks};
use super::gpu::GpuWay;
use super::pair::Way;
use super::rail::{self, Rail};
use super::raw;
use super::segment::{End, Memory, Segment};
use crate::output::{CommandResult, Error};
use crate::timing::cpu_s;
use forebay_net::Agent;
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
pub fn run(args: Args) -> CommandResult {
    let shape = Shape { block_bytes: args.block_bytes, blocks: args.blocks };
    let memory = Memory::new(args.segment, End::Owner, shape.bytes())?;
    // The asking end says which way its bytes go: here both are open.
    let gpu_way = GpuWay::Ipc;
    let way = Way { flows: args.flows, tls: args.tls, segment: args.segment, gpu_way, rails: args.rail };
    let agent = Agent::start(way.config("owner")?)?;
    let registration = memory.register(&agent, way.gpu_way)?;
    println!("{} {}", hex::encode(agent.metadata()), registration.base());
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
        "export" => return memory.gpu().ok_or("it is in host memory")?.export(),
        "raw" => return Ok(raw::serve(number.parse()?, shape.bytes())?.to_string()),
        "echo" => return Ok(raw::echo(number.parse()?)?.to_string()),
        other => return Err(format!("'{other}' is not known here").into()),
    }
    Ok("ok".into())
}
