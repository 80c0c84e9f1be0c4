//! `forebay bench checksum`: CRC-32C of GPU memory where it is, beside what the memory gives, and
//! what it costs a load to be checked. It measures the kernel and the copy stream that loads use;
//! sums are compared with those of the host.

use crate::output::{CommandResult, Outcome, Output, finish};
use crate::timing::{Cost, cost, median};
use forebay_cuda::checksum::{Checksums, Range, SumList, Width};
use forebay_cuda::device::{DeviceMemory, Event, HostMemory, Stream};
use forebay_cuda::driver::Driver;
use forebay_cuda::kernels::Piece;
use forebay_cuda::links::Direction;
use forebay_cuda::start_stream_copies;
use forebay_cuda::stream_copy::{Batch, CopyStream, Sent, StreamCopies};
use forebay_results::{Peer, Results, Row};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

/// What has one checksum: a layer of a chunk, in pages.
const EXTENT_BYTES: u64 = 128 << 10;
const PAGE_BYTES: u64 = 32 << 10;
/// What a load has copied and checked at a time.
const BATCH_BYTES: u64 = 64 << 20;
/// Blocks of the kernel, each of which has an SM to itself, and as many as no GPU has.
const BLOCKS: [(&str, u32); 3] = [("4sm", 4), ("8sm", 8), ("all", 1024)];
const THREADS: u32 = 1024;

/// Arguments of `forebay bench checksum`.
#[derive(clap::Args)]
pub struct Args {
    /// The GPU
    #[arg(long, default_value_t = 0)]
    gpu: u16,
    /// MiB that are summed up, or copied, by one run
    #[arg(long, default_value_t = 1024, value_parser = clap::value_parser!(u64).range(1..=8192))]
    mib: u64,
    /// Runs of each kind
    #[arg(long, default_value_t = 9, value_parser = clap::value_parser!(u32).range(1..=1000))]
    runs: u32,
    #[command(flatten)]
    output: Output,
}

/// Runs the benchmark.
pub fn run(args: Args) -> CommandResult {
    let rig = Rig::start(args.gpu, args.mib << 20)?;
    let mut results = Results::new("checksum");
    results.gpus(vec![rig.stream.device().name()?]);
    results.rows = rig.sums(args.runs)?;
    results.rows.push(rig.loads(args.runs)?);
    finish(&results, &args.output)
}

/// The same bytes in host memory and on the GPU.
struct Rig {
    stream: Stream,
    checksums: Arc<Checksums>,
    host: HostMemory,
    memory: DeviceMemory,
    /// Where memory is copied to.
    other: DeviceMemory,
    /// Of each extent.
    right: Vec<u32>,
    bytes: u64,
    copies: StreamCopies,
    copy_stream: CopyStream,
}

impl Rig {
    fn start(gpu: u16, bytes: u64) -> Outcome<Rig> {
        let copies = start_stream_copies(Driver::load()?, Some(&[gpu]))?;
        let copy_stream =
            copies.copy_stream(gpu, Direction::HostToDevice).ok_or("there is no such GPU")??;
        let device = Arc::clone(copy_stream.device());
        let (stream, checksums) = (Stream::new(&device)?, Checksums::load(&device)?);
        let host = HostMemory::new(&device, bytes as usize)?;
        let (memory, other) = (DeviceMemory::new(&device, bytes)?, DeviceMemory::new(&device, bytes)?);
        // SAFETY: the memory is ours, and nothing is copied yet.
        let filled = unsafe { std::slice::from_raw_parts_mut(host.start(), bytes as usize) };
        fill(filled);
        let right = filled.chunks(EXTENT_BYTES as usize).map(sum).collect();
        Ok(Rig { stream, checksums, host, memory, other, right, bytes, copies, copy_stream })
    }

    /// Rows of sums by so many blocks. No more can be read than a copy within the memory reads and
    /// writes.
    fn sums(&self, runs: u32) -> Outcome<Vec<Row>> {
        self.load(true)?;
        let list = self.list(0, self.bytes)?;
        let (mut costs, mut read) = (vec![Vec::new(); BLOCKS.len()], Vec::new());
        let mut on_host = Vec::new();
        for _ in 0..runs {
            read.push(2.0 * cost(|| self.copy_within())?.gb_per_s(self.bytes));
            on_host.push(cost(|| self.sum_on_host())?.gb_per_s(self.bytes));
            for ((_, blocks), costs) in BLOCKS.iter().zip(&mut costs) {
                costs.push(cost(|| self.sum(&list, *blocks))?);
                self.check(&list, 0)?;
            }
        }
        let row = |((name, _), costs): (&(&str, u32), &Vec<Cost>)| {
            let row = self.row(format!("gpu.crc.{name}"), costs, median(&read));
            let (name, version) = ("crc-fast on one processor".into(), "1".into());
            Row { peer: Some(Peer { name, version, value: median(&on_host) }), ..row }
        };
        Ok(BLOCKS.iter().zip(&costs).map(row).collect())
    }

    /// A load whose layers are checked, beside one whose layers are not.
    fn loads(&self, runs: u32) -> Outcome<Row> {
        let (mut checked, mut alone) = (Vec::new(), Vec::new());
        for _ in 0..runs {
            alone.push(cost(|| self.load(false))?.gb_per_s(self.bytes));
            checked.push(cost(|| self.load(true))?);
        }
        Ok(self.row("gpu.copy_crc.h2d".into(), &checked, median(&alone)))
    }

    fn row(&self, name: String, costs: &[Cost], ceiling: f64) -> Row {
        let rates: Vec<f64> = costs.iter().map(|cost| cost.gb_per_s(self.bytes)).collect();
        let cpu_s: f64 = costs.iter().map(|cost| cost.cpu_s).sum();
        let mut row = Row::of_runs(name, "GB/s", &rates).with_ceiling(ceiling);
        row.cpu_s_per_gb = Some(cpu_s / (self.bytes as f64 / 1e9 * costs.len() as f64));
        row
    }

    fn copy_within(&self) -> Outcome<()> {
        let _current = self.stream.device().enter()?;
        // SAFETY: both are as long as stated, and nothing else uses them.
        unsafe { self.stream.copy(self.memory.address(), self.other.address(), self.bytes)? };
        Ok(self.stream.synchronize()?)
    }

    fn sum_on_host(&self) -> Outcome<()> {
        // SAFETY: nothing writes it.
        let bytes = unsafe { std::slice::from_raw_parts(self.host.start(), self.bytes as usize) };
        std::hint::black_box(sum(bytes));
        Ok(())
    }

    fn sum(&self, list: &SumList, blocks: u32) -> Outcome<()> {
        // SAFETY: the ranges are the rig's memory, which nothing writes until this has waited.
        unsafe { list.queue(&self.stream, Width { blocks, threads: THREADS })? };
        Ok(self.stream.synchronize()?)
    }

    /// Loads batch behind batch and compares, as an engine's cache does.
    fn load(&self, is_checked: bool) -> Outcome<()> {
        let mut under_way = Vec::new();
        for from in (0..self.bytes).step_by(BATCH_BYTES as usize) {
            let bytes = BATCH_BYTES.min(self.bytes - from);
            let list = is_checked.then(|| self.list(from, bytes)).transpose()?;
            let event = self.send(from, bytes, list.as_ref())?;
            under_way.push((from, event, list));
        }
        for (from, event, list) in under_way {
            event.synchronize()?;
            list.map_or(Ok(()), |list| self.check(&list, from))?;
        }
        Ok(())
    }

    /// Sends pages of a batch, again while there is no room.
    fn send(&self, from: u64, bytes: u64, sums: Option<&SumList>) -> Outcome<Event> {
        let event = Event::to_sleep_for(self.stream.device())?;
        let host = self.host.start() as u64;
        let piece = |at: u64| Piece { from: host + at, to: self.page(at), bytes: PAGE_BYTES };
        let pieces: Vec<_> = pages(from, bytes).map(piece).collect();
        let batch = Batch { pieces: &pieces, after: None, is_open: true, awaited_bytes: None, sums };
        loop {
            // SAFETY: the memory is the rig's, and whoever sends waits for the event.
            match unsafe { self.copies.send(&self.copy_stream, &batch, &event)? } {
                Sent::Queued(queued) => return Ok(queued.map(|_| event)?),
                Sent::Later => thread::sleep(Duration::from_micros(50)),
            }
        }
    }

    /// Lists the extents of a part of the GPU's memory.
    fn list(&self, from: u64, bytes: u64) -> Outcome<SumList> {
        let range = |at: u64| Range { at: self.page(at), bytes: PAGE_BYTES };
        let extents = (from..from + bytes).step_by(EXTENT_BYTES as usize);
        let extents: Vec<Vec<Range>> =
            extents.map(|at| pages(at, EXTENT_BYTES).map(range).collect()).collect();
        Ok(self.checksums.list(&extents)?)
    }

    /// Where the GPU has a page: neighbours have changed places, so that no two are one.
    fn page(&self, at: u64) -> u64 {
        self.memory.address() + (at ^ PAGE_BYTES)
    }

    fn check(&self, list: &SumList, from: u64) -> Outcome<()> {
        let (sums, first) = (list.sums(), (from / EXTENT_BYTES) as usize);
        match sums[..] == self.right[first..first + sums.len()] {
            true => Ok(()),
            false => Err(format!("sums of what begins at {from} are wrong").into()),
        }
    }
}

/// Where pages of a range begin.
fn pages(from: u64, bytes: u64) -> impl Iterator<Item = u64> {
    (from..from + bytes).step_by(PAGE_BYTES as usize)
}

/// Bytes that no two extents share.
fn fill(memory: &mut [u8]) {
    for (nth, word) in (1_u64..).zip(memory.chunks_exact_mut(8)) {
        word.copy_from_slice(&nth.wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(17).to_le_bytes());
    }
}

fn sum(bytes: &[u8]) -> u32 {
    crc_fast::checksum(crc_fast::CrcAlgorithm::Crc32Iscsi, bytes) as u32
}
