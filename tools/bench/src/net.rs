//! `forebay bench net`: memory of another process, written and read through an agent, beside plain
//! sockets between the same two processes. The other process is this program again, started by it;
//! every byte of every run is compared.
//!
//! `blocks` is which block lies where and what is in it, `segment` the memory that they lie in, of
//! which `gpu` is one kind; `rail` is what carries them instead of TCP; `owner` is the other
//! process, `pair` the two together; `rate`, `small` and `faults` measure; `raw` is the ceiling,
//! `gpu_raw` that between GPUs; `peers` are other systems' programs, run on the same blocks.

mod blocks;
mod certificates;
mod faults;
mod gpu;
mod gpu_raw;
mod owner;
mod pair;
mod peers;
mod rail;
mod rate;
mod raw;
mod segment;
mod small;

use crate::output::{CommandResult, Error, Output, finish};
use forebay_results::Results;
use gpu::GpuWay;
use pair::Way;
use rate::{Case, OpName};
use segment::Segment;

pub use owner::Args as OwnerArgs;
pub use owner::run as run_owner;

/// Arguments of `forebay bench net`.
#[derive(clap::Args)]
pub struct Args {
    /// What to measure [default: all; only rates with --threads, --segment or --rail]
    #[arg(long, value_enum, value_delimiter = ',')]
    only: Vec<Part>,
    /// Which operations to measure
    #[arg(long, value_enum, value_delimiter = ',', default_values_t = [OpName::Write, OpName::Read])]
    op: Vec<OpName>,
    /// Bytes of a block, such as 26KB or 1MiB; several with commas
    #[arg(long, value_name = "SIZE", value_delimiter = ',', value_parser = blocks::size, default_values_t = [blocks::Size(26_000), blocks::Size(1_000_000)])]
    block_size: Vec<blocks::Size>,
    /// Blocks in a transfer [default: about 1 GB, at most 10000]
    #[arg(long, value_name = "BLOCKS", value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    batch: Option<u32>,
    /// Most connections to the other process; the ceiling is measured with as many
    #[arg(long, value_name = "FLOWS", default_value_t = 2, value_parser = clap::value_parser!(u16).range(1..=64))]
    flows: u16,
    /// Number of threads that read or write, each its part of the blocks; several with commas
    #[arg(long, value_name = "THREADS", value_delimiter = ',', default_values_t = [1], value_parser = clap::value_parser!(u16).range(1..=64))]
    threads: Vec<u16>,
    /// Memory that the blocks lie in at both ends; several with commas; what this machine does not
    /// have is named and left out
    #[arg(long, value_enum, value_delimiter = ',', default_values_t = [Segment::Heap])]
    segment: Vec<Segment>,
    /// How bytes go between GPUs, with --segment gpu; both with a comma; over rails only tcp
    #[arg(long, value_enum, value_delimiter = ',', default_values_t = [GpuWay::Ipc, GpuWay::Tcp])]
    gpu_way: Vec<GpuWay>,
    /// UCX rail that carries the blocks instead of TCP: memory, rdma or tcp, on all of its devices
    /// or on some, as in tcp=lo; repeat for each
    #[arg(long, value_name = "FABRIC[=DEVICE,...]", value_parser = rail::rail)]
    rail: Vec<rail::Rail>,
    /// Number of runs of each kind
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=1000))]
    runs: u32,
    /// Program that measures another system in the same way (see bench/peers); repeat for each
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

impl Args {
    /// What is to be measured. An axis that only rates have leaves the rest out.
    fn parts(&self) -> Result<Vec<Part>, Error> {
        let axes = [
            ("--threads", self.threads != [1]),
            ("--segment", self.segment != [Segment::Heap]),
            ("--rail", !self.rail.is_empty()),
        ];
        let Some((axis, _)) = axes.into_iter().find(|(_, used)| *used) else {
            let all = vec![Part::Rate, Part::Tls, Part::Small, Part::Faults];
            return Ok(if self.only.is_empty() { all } else { self.only.clone() });
        };
        if self.only.iter().any(|part| *part != Part::Rate) {
            return Err(format!("{axis} is an axis of rates; allowed beside it: --only rate").into());
        }
        // Whoever names such a program says with it where its blocks lie.
        let peers_have_it = axis == "--segment" && self.segment == [Segment::Gpu] && self.rail.is_empty();
        if !self.peer.is_empty() && !peers_have_it {
            return Err(
                format!("{axis} says nothing to the programs of --peer; allowed is one of both").into()
            );
        }
        Ok(vec![Part::Rate])
    }

    /// The transfers whose rates are measured, but for the way that they take.
    fn cases(&self) -> Result<Vec<Case>, Error> {
        let mut cases = Vec::new();
        for op in &self.op {
            for block in &self.block_size {
                let shape = blocks::Shape::new(block.0, self.batch.map(|batch| batch as usize));
                for threads in self.threads.iter().map(|threads| usize::from(*threads)) {
                    if threads > shape.blocks {
                        let blocks = shape.blocks;
                        return Err(
                            format!("--threads {threads}: allowed are as many as blocks, {blocks}").into()
                        );
                    }
                    cases.push(Case { op: *op, shape, threads });
                }
            }
        }
        Ok(cases)
    }

    /// The ways over which rates are measured: one for each kind of memory that this machine has.
    fn ways(&self) -> Result<Vec<Way>, Error> {
        let plain = Way { rails: self.rail.clone(), ..Way::plain(self.flows.into()) };
        let mut ways = Vec::new();
        for segment in &self.segment {
            match segment.check() {
                Ok(()) if *segment == Segment::Gpu && self.rail.is_empty() => {
                    let gpu =
                        |gpu_way: &GpuWay| Way { segment: *segment, gpu_way: *gpu_way, ..plain.clone() };
                    ways.extend(self.gpu_way.iter().map(gpu));
                }
                Ok(()) => ways.push(Way { segment: *segment, ..plain.clone() }),
                Err(why) => eprintln!("--segment {segment} is left out: {why}"),
            }
        }
        if ways.is_empty() { Err("--segment: this machine has none of them".into()) } else { Ok(ways) }
    }
}

pub fn run(args: Args) -> CommandResult {
    let (parts, cases) = (args.parts()?, args.cases()?);
    let wanted = |part| parts.contains(&part);
    let mut results = Results::new("net");
    let plain = Way::plain(args.flows.into());
    if wanted(Part::Rate) {
        for way in args.ways()? {
            for case in &cases {
                results.rows.extend(rate::measure(&way, *case, args.runs, &args.peer)?);
            }
        }
    }
    if wanted(Part::Tls) {
        results.rows.extend(rate::measure_tls(&plain, args.runs)?);
    }
    if wanted(Part::Small) {
        results.rows.extend(small::measure(&plain, args.runs)?);
    }
    if wanted(Part::Faults) {
        results.rows.extend(faults::measure(args.runs)?);
    }
    finish(&results, &args.output)
}
