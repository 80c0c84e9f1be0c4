//! `forebay bench net`: memory of another process, written and read through an agent, beside plain sockets between the same
//! two processes. The other process is this program again, started by it; every byte of every run is compared.
//!
//! `blocks` is which block lies where and what is in it, `owner` the other process, `pair` the two together; `rate`, `small`
//! and `faults` measure; `raw` is the ceiling, `peers` are other systems' programs, run on the same blocks.

mod blocks;
mod certificates;
mod faults;
mod owner;
mod pair;
mod peers;
mod rate;
mod raw;
mod small;

use super::{Output, finish};
use crate::results::Results;
use forebay_agent::Op;
use pair::Way;

pub use owner::Args as OwnerArgs;
pub use owner::run as run_owner;

/// Arguments of `forebay bench net`.
#[derive(clap::Args)]
pub struct Args {
    /// What to measure [default: all]
    #[arg(long, value_enum, value_delimiter = ',')]
    only: Vec<Part>,
    /// Operations
    #[arg(long, value_enum, value_delimiter = ',', default_values_t = [OpName::Write, OpName::Read])]
    op: Vec<OpName>,
    /// Bytes of a block, such as 26KB or 1MiB; several with commas
    #[arg(long, value_name = "SIZE", value_delimiter = ',', value_parser = blocks::size, default_values_t = [blocks::Size(26_000), blocks::Size(1_000_000)])]
    block_size: Vec<blocks::Size>,
    /// Blocks of a transfer [default: about 1 GB, at most 10000]
    #[arg(long, value_name = "BLOCKS", value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    batch: Option<u32>,
    /// Connections to the other process at most; the ceiling has as many
    #[arg(long, value_name = "FLOWS", default_value_t = 2, value_parser = clap::value_parser!(u16).range(1..=64))]
    flows: u16,
    /// Runs of each kind
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=1000))]
    runs: u32,
    /// A program that measures another system in the same way (see bench/peers); several times for several
    #[arg(long, value_name = "COMMAND")]
    peer: Vec<String>,
    #[command(flatten)]
    output: Output,
}

/// What is measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Part {
    /// Bytes per second
    Rate,
    /// The same encrypted
    Tls,
    /// Round trips, posting, starting, idling
    Small,
    /// How soon a dead or frozen process is reported
    Faults,
}

/// An operation by name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum OpName {
    /// From this process to the other
    Write,
    /// From the other process to this
    Read,
}

impl OpName {
    fn op(self) -> Op {
        match self {
            OpName::Write => Op::Write,
            OpName::Read => Op::Read,
        }
    }

    fn name(self) -> &'static str {
        match self {
            OpName::Write => "write",
            OpName::Read => "read",
        }
    }
}

type Error = Box<dyn std::error::Error + Send + Sync>;

/// Runs the benchmark.
pub fn run(args: Args) -> crate::CommandResult {
    let wanted = |part| args.only.is_empty() || args.only.contains(&part);
    let mut results = Results::new("net");
    let way = Way { flows: args.flows.into(), tls: None };
    if wanted(Part::Rate) {
        for op in &args.op {
            for block in &args.block_size {
                let shape = blocks::Shape::new(block.0, args.batch.map(|batch| batch as usize));
                results.rows.extend(rate::measure(&way, *op, shape, args.runs, &args.peer)?);
            }
        }
    }
    if wanted(Part::Tls) {
        results.rows.extend(rate::measure_tls(&way, args.runs)?);
    }
    if wanted(Part::Small) {
        results.rows.extend(small::measure(&way, args.runs)?);
    }
    if wanted(Part::Faults) {
        results.rows.extend(faults::measure(args.runs)?);
    }
    finish(&results, &args.output)
}
