//! Copies over several links of which one is loaded by somebody of whom the copier knows nothing:
//! plain copies of another process, to the GPU whose link it is. Beside ours stand copies whose
//! shares follow nothing, and, as the ceiling, what all links together have left.

use super::other::Other;
use super::plan::Plan;
use super::rig::Rig;
use super::way::Way;
use crate::output::{CommandResult, Outcome};
use crate::timing::{cost, median};
use forebay_cuda::device::{Device, DeviceMemory, Event, HostMemory, Stream};
use forebay_cuda::driver::Driver;
use forebay_cuda::links::Direction;
use forebay_results::Row;
use std::ffi::OsStr;
use std::io::Read;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// Bytes of a copy that is measured at most.
const BYTES_MAX: u64 = 256 << 20;
/// Copies before those that are measured, by which the shares find to where they belong, ...
const COPIES_BEFORE: u32 = 4;
/// ... and these.
const COPIES: u32 = 8;
/// Bytes of a plain copy, and how many of them are in a stream at a time.
const LOT_BYTES: u64 = 4 << 20;
const LOTS: u64 = 4;
/// How long what is left is measured.
const LEFT: Duration = Duration::from_millis(200);
const DIRECTION: Direction = Direction::HostToDevice;

/// A row for us, and one for shares that follow nothing.
pub fn rows(rig: &Rig, plan: &Plan) -> Outcome<Vec<Row>> {
    let target = plan.first();
    let relay = (0..rig.ends.len()).find(|gpu| *gpu != target).ok_or("there is no relay")?;
    let ways = [("copy.adaptive.slowed_link", Way::Chain), ("copy.adaptive.slowed_link.fixed", Way::Fixed)];
    let (mut ceilings, mut rates) = (Vec::new(), [Vec::new(), Vec::new()]);
    for run in 0..plan.runs as usize {
        beside(relay, || {
            ceilings.push(left(rig)?);
            for nth in [run % 2, (run + 1) % 2] {
                rates[nth].push(rate(rig, target, ways[nth].1)?);
            }
            Ok(())
        })?;
    }
    let row = |((name, _), rates): (&(&str, Way), &Vec<f64>)| {
        Row::of_runs(*name, "GB/s", rates).with_ceiling(median(&ceilings))
    };
    Ok(ways.iter().zip(&rates).map(row).collect())
}

/// 10^9 bytes per second of copies that follow each other. Every byte of the last one is looked at.
fn rate(rig: &Rig, target: usize, way: Way) -> Outcome<f64> {
    let bytes = rig.ends[target].bytes().min(BYTES_MAX);
    let jobs = [rig.whole(target, DIRECTION, bytes)];
    rig.clear(&jobs)?;
    let copy = |times: u32| (0..times).try_for_each(|_| rig.ways().copy(way, &rig.ends[target], &jobs[0]));
    copy(COPIES_BEFORE)?;
    let cost = cost(|| copy(COPIES))?;
    rig.check(&jobs)?;
    Ok(cost.gb_per_s(bytes * u64::from(COPIES)))
}

/// Does something while another process loads a GPU's link.
fn beside<T>(gpu: usize, work: impl FnOnce() -> Outcome<T>) -> Outcome<T> {
    let folder = tempfile::tempdir()?;
    let ordinal = gpu.to_string();
    let load = Other::start("copy-load", &folder.path().join("loads"), &[OsStr::new(&ordinal)])?;
    let done = work()?;
    load.end()?;
    Ok(done)
}

/// Arguments of the process that loads a link.
#[derive(clap::Args)]
pub struct LoadArgs {
    /// Is made when it has begun
    file: PathBuf,
    /// Whose link it is: the ordinal
    gpu: u16,
}

/// That process: copies to the GPU until its standard input ends.
pub fn run_load(args: LoadArgs) -> CommandResult {
    let device = Device::open(Driver::load()?, args.gpu)?;
    let memory = DeviceMemory::new(&device, LOT_BYTES)?;
    let host = HostMemory::new(&device, LOT_BYTES as usize)?;
    let is_over = &AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            // It ends, or cannot be read: both mean that nobody measures any more.
            let _ = std::io::stdin().read_to_end(&mut Vec::new());
            is_over.store(true, Ordering::Relaxed);
        });
        std::fs::write(&args.file, [])?;
        let ranges = (host.start() as u64, memory.address(), LOT_BYTES);
        carry(&device, ranges, || is_over.load(Ordering::Relaxed))
    })?;
    Ok(())
}

/// 10^9 bytes per second that all links carry together now.
fn left(rig: &Rig) -> Outcome<f64> {
    thread::scope(|scope| {
        let each = |gpu: usize| {
            scope.spawn(move || -> Outcome<f64> {
                let begin = Instant::now();
                let ends = &rig.ends[gpu];
                let (from, to) = ends.addresses(DIRECTION);
                let ranges = (from, to, LOT_BYTES.min(ends.bytes()));
                let bytes = carry(&ends.device, ranges, || begin.elapsed() > LEFT)?;
                Ok(bytes as f64 / 1e9 / begin.elapsed().as_secs_f64())
            })
        };
        let threads: Vec<_> = (0..rig.ends.len()).map(each).collect();
        let joined = threads
            .into_iter()
            .map(|thread| thread.join().unwrap_or_else(|_| Err("a thread that copies has panicked".into())));
        joined.sum::<Outcome<f64>>()
    })
}

/// Copies from host memory to a GPU's over its own link, until that is over; how many bytes.
fn carry(
    device: &Arc<Device>,
    (from, to, bytes): (u64, u64, u64),
    is_over: impl Fn() -> bool,
) -> Outcome<u64> {
    let (_current, stream) = (device.enter()?, Stream::new(device)?);
    let passed = [Event::to_sleep_for(device)?, Event::to_sleep_for(device)?];
    let (mut turn, mut carried) = (0, 0);
    while !is_over() {
        let passed = &passed[turn];
        // Those of the turn before go on meanwhile.
        passed.synchronize()?;
        for _ in 0..LOTS {
            // SAFETY: the ranges are the caller's; nobody looks at what is written there.
            unsafe { stream.copy(from, to, bytes)? };
        }
        passed.record(&stream)?;
        (turn, carried) = (1 - turn, carried + LOTS * bytes);
    }
    stream.synchronize()?;
    Ok(carried)
}
