//! `forebay bench nvme`: what it costs to tell a drive where the memory of a command is, by PRPs
//! and by scatter gather lists. Lists are built for each command, or once for a region of which
//! commands use slices. There is no drive, and no data moves.

use crate::output::{CommandResult, Outcome, Output, finish};
use crate::timing::{Cost, cost, median};
use forebay_results::{Results, Row};
use forebay_ring::nvme::{Command, DataPointer, ListPage, PrpRegion, Segment, SglRegion, prp, sgl};
use std::hint::black_box;

const MIB: u64 = 1 << 20;
const REGION_MIB: u64 = 1024;
/// A GPU's memory is lent to other devices in such pieces.
const SEGMENT_BYTES: u64 = 64 << 10;
const PAGE_BYTES: u64 = 4096;
/// Commands that are outstanding, each with a page for its list.
const DEPTH: u64 = 256;
/// How often one run encodes the whole region.
const PASSES: u64 = 50;
/// No eight bytes of a list are all ones.
const UNUSED: u8 = 0xff;

/// Arguments of `forebay bench nvme`.
#[derive(clap::Args)]
pub struct Args {
    /// Runs of each kind
    #[arg(long, default_value_t = 15, value_parser = clap::value_parser!(u32).range(1..=1000))]
    runs: u32,
    #[command(flatten)]
    output: Output,
}

/// Runs the benchmark.
pub fn run(args: Args) -> CommandResult {
    let rig = Rig { segments: segments(), runs: args.runs };
    let mut results = Results::new("nvme");
    rig.each_time(&mut results.rows)?;
    rig.built_once(&mut results.rows)?;
    rig.sliced(&mut results.rows)?;
    finish(&results, &args.output)
}

/// The region in segments of which no two follow each other in memory.
fn segments() -> Vec<Segment> {
    let place = |at: u64| Segment { address: (at ^ 1) * SEGMENT_BYTES, bytes: SEGMENT_BYTES };
    (0..REGION_MIB * MIB / SEGMENT_BYTES).map(place).collect()
}

struct Rig {
    segments: Vec<Segment>,
    runs: u32,
}

impl Rig {
    /// Commands of 1 MiB, each with a list of its own.
    fn each_time(&self, rows: &mut Vec<Row>) -> Outcome<()> {
        let per_command = (MIB / SEGMENT_BYTES) as usize;
        let part = |at: u64| &self.segments[at as usize * per_command..][..per_command];
        self.commands(rows, "prp", "each_time", |at, list| {
            Ok(DataPointer::Prp(prp::encode(part(at), PAGE_BYTES, list)?.0))
        })?;
        self.commands(rows, "sgl", "each_time", |at, list| {
            Ok(DataPointer::Sgl(sgl::encode(part(at), true, list)?.0))
        })
    }

    /// The lists of the region, without commands.
    fn built_once(&self, rows: &mut Vec<Row>) -> Outcome<()> {
        self.lists(rows, "prp", |lists| {
            black_box(PrpRegion::build(&self.segments, PAGE_BYTES, lists)?);
            Ok(())
        })?;
        self.lists(rows, "sgl", |lists| {
            black_box(SglRegion::build(&self.segments, lists)?);
            Ok(())
        })
    }

    /// Commands of 1 MiB that use slices of the region's lists.
    fn sliced(&self, rows: &mut Vec<Row>) -> Outcome<()> {
        let (mut prp_memory, mut sgl_memory) = (Memory::of_region(), Memory::of_region());
        let prps = PrpRegion::build(&self.segments, PAGE_BYTES, prp_memory.pages())?;
        let sgls = SglRegion::build(&self.segments, sgl_memory.pages())?;
        self.commands(rows, "prp", "sliced", |at, _| Ok(DataPointer::Prp(prps.slice(at * MIB, MIB)?)))?;
        self.commands(rows, "sgl", "sliced", |at, _| Ok(DataPointer::Sgl(sgls.slice(at * MIB, MIB)?)))
    }

    /// Reads of the whole region, and beside them the writing of as many bytes.
    fn commands(
        &self,
        rows: &mut Vec<Row>,
        format: &str,
        way: &str,
        mut data: impl FnMut(u64, &mut [ListPage<'_>]) -> Outcome<DataPointer>,
    ) -> Outcome<()> {
        let mut memory = Memory::new(DEPTH);
        data(0, &mut memory.pages())?;
        let list_bytes = memory.used_bytes();
        let mut encode = |at: u64, list: &mut ListPage<'_>| {
            let data = data(at, std::slice::from_mut(list))?;
            let read = Command::Read { namespace: 1, first_block: at * 2048, blocks: 2048, data };
            black_box(read.encode(at as u16)?);
            Ok(())
        };
        let mut write = |at: u64, list: &mut ListPage<'_>| {
            list.bytes[..list_bytes as usize].fill(at as u8);
            black_box(&mut list.bytes);
            black_box([at as u8; 64]);
            Ok(())
        };
        let mut lists = memory.pages();
        let (mut costs, mut written) = (Vec::new(), Vec::new());
        for _ in 0..self.runs {
            written.push(cost(|| for_each_command(&mut lists, &mut write))?);
            costs.push(cost(|| for_each_command(&mut lists, &mut encode))?);
        }
        rows.push(time_row(format!("nvme.{format}.encode_ns.{way}"), &costs, &written));
        rows.push(Row::of_runs(format!("nvme.{format}.bytes.{way}"), "B/MiB", &[list_bytes as f64]));
        Ok(())
    }

    /// Lists of the whole region, and beside them the writing of as many bytes.
    fn lists(
        &self,
        rows: &mut Vec<Row>,
        format: &str,
        mut build: impl FnMut(Vec<ListPage<'_>>) -> Outcome<()>,
    ) -> Outcome<()> {
        let mut memory = Memory::of_region();
        build(memory.pages())?;
        let list_bytes = memory.used_bytes();
        let (mut costs, mut written) = (Vec::new(), Vec::new());
        for _ in 0..self.runs {
            written.push(cost(|| (0..PASSES).try_for_each(|pass| memory.fill(list_bytes, pass as u8)))?);
            costs.push(cost(|| (0..PASSES).try_for_each(|_| build(memory.pages())))?);
        }
        rows.push(time_row(format!("nvme.{format}.encode_ns.built_once"), &costs, &written));
        let per_mib = list_bytes as f64 / REGION_MIB as f64;
        rows.push(Row::of_runs(format!("nvme.{format}.bytes.built_once"), "B/MiB", &[per_mib]));
        Ok(())
    }
}

/// Memory for lists.
struct Memory(Vec<u8>);

impl Memory {
    fn new(pages: u64) -> Memory {
        Memory(vec![UNUSED; (pages * PAGE_BYTES) as usize])
    }

    /// Room for the PRPs of the region, and so for its shorter scatter gather list.
    fn of_region() -> Memory {
        Memory::new(REGION_MIB * MIB / PAGE_BYTES * prp::ENTRY_BYTES / PAGE_BYTES)
    }

    fn pages(&mut self) -> Vec<ListPage<'_>> {
        let page = |(at, bytes)| ListPage { address: (1 << 40) + at * PAGE_BYTES, bytes };
        (0..).zip(self.0.chunks_mut(PAGE_BYTES as usize)).map(page).collect()
    }

    /// Bytes that were written since this was made.
    fn used_bytes(&self) -> u64 {
        let is_used = |entry: &&[u8]| entry.iter().any(|byte| *byte != UNUSED);
        8 * self.0.chunks_exact(8).filter(is_used).count() as u64
    }

    fn fill(&mut self, bytes: u64, with: u8) -> Outcome<()> {
        self.0[..bytes as usize].fill(with);
        black_box(&mut self.0);
        Ok(())
    }
}

/// Goes through the region so many times, MiB by MiB; each has the next page for its list.
fn for_each_command(
    lists: &mut [ListPage<'_>],
    mut command: impl FnMut(u64, &mut ListPage<'_>) -> Outcome<()>,
) -> Outcome<()> {
    let commands = (0..PASSES).flat_map(|_| 0..REGION_MIB);
    commands.into_iter().try_for_each(|at| command(at, &mut lists[(at % DEPTH) as usize]))
}

/// Nanoseconds of processor time a MiB; the ceiling is what the writing of as many bytes takes.
/// Nothing here waits, so that is the time on the clock wherever a processor is free.
fn time_row(name: String, costs: &[Cost], written: &[Cost]) -> Row {
    let ns = |cost: &Cost| cost.cpu_s * 1e9 / (PASSES * REGION_MIB) as f64;
    let ceiling = median(&written.iter().map(ns).collect::<Vec<_>>());
    let mut row =
        Row::of_runs(name, "ns/MiB", &costs.iter().map(ns).collect::<Vec<_>>()).with_ceiling(ceiling);
    let cpu_s: f64 = costs.iter().map(|cost| cost.cpu_s).sum();
    let bytes = PASSES * REGION_MIB * MIB * costs.len() as u64;
    row.cpu_s_per_gb = Some(cpu_s / (bytes as f64 / 1e9));
    row
}
