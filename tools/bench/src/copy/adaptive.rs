//! Copies over several links of which one is loaded by somebody of whom the copier knows nothing:
//! plain copies of another thread, to the GPU whose link it is. Beside ours stand copies whose shares
//! follow nothing, and, as the ceiling, what all links together have left.

use super::plan::Plan;
use super::rig::Rig;
use super::way::Way;
use crate::output::Outcome;
use crate::timing::{cost, median};
use forebay_cuda::device::{Event, Stream};
use forebay_cuda::links::Direction;
use forebay_results::Row;
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
        beside(rig, relay, || {
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

/// Does something while a GPU's link is loaded.
fn beside<T>(rig: &Rig, gpu: usize, work: impl FnOnce() -> Outcome<T>) -> Outcome<T> {
    let stop = &AtomicBool::new(false);
    thread::scope(|scope| {
        let load = scope.spawn(move || carry(rig, gpu, 1, || stop.load(Ordering::Relaxed)));
        let done = work();
        stop.store(true, Ordering::Relaxed);
        load.join().unwrap_or_else(|_| Err("the thread that loads a link has panicked".into()))?;
        done
    })
}

/// 10^9 bytes per second that all links carry together now.
fn left(rig: &Rig) -> Outcome<f64> {
    thread::scope(|scope| {
        let each = |gpu| {
            scope.spawn(move || -> Outcome<f64> {
                let begin = Instant::now();
                let bytes = carry(rig, gpu, 0, || begin.elapsed() > LEFT)?;
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

/// Copies over a GPU's own link into one half of its memory, until that is over; how many bytes.
fn carry(rig: &Rig, gpu: usize, half: u64, is_over: impl Fn() -> bool) -> Outcome<u64> {
    let ends = &rig.ends[gpu];
    let (_current, stream) = (rig.enter(gpu)?, Stream::new(&ends.device)?);
    let passed = [Event::to_sleep_for(&ends.device)?, Event::to_sleep_for(&ends.device)?];
    let (from, to) = ends.addresses(DIRECTION);
    let bytes = LOT_BYTES.min(ends.bytes() / 2);
    let (mut turn, mut carried, at) = (0, 0, half * (ends.bytes() / 2));
    while !is_over() {
        let passed = &passed[turn];
        // Those of the turn before go on meanwhile.
        passed.synchronize()?;
        for _ in 0..LOTS {
            // SAFETY: the ranges are the rig's; nobody else writes this half meanwhile.
            unsafe { stream.copy(from + at, to + at, bytes)? };
        }
        passed.record(&stream)?;
        (turn, carried) = (1 - turn, carried + LOTS * bytes);
    }
    stream.synchronize()?;
    Ok(carried)
}
