//! How long something takes, on the clock and on processors.

use crate::output::Outcome;
use rustix::time::{ClockId, clock_gettime};
use std::sync::Barrier;
use std::time::Instant;

/// Wall and CPU seconds of something.
#[derive(Debug, Clone, Copy, Default)]
pub struct Cost {
    pub wall_s: f64,
    pub cpu_s: f64,
}

impl Cost {
    /// Processors that were busy.
    pub fn cores(self) -> f64 {
        self.cpu_s / self.wall_s
    }

    /// 10^9 bytes per second, where this is what so many bytes cost.
    pub fn gb_per_s(self, bytes: u64) -> f64 {
        bytes as f64 / 1e9 / self.wall_s
    }
}

/// What a piece of work costs the process.
pub fn cost(work: impl FnOnce() -> Outcome<()>) -> Outcome<Cost> {
    let (begin, cpu_before_s) = (Instant::now(), cpu_s());
    work()?;
    Ok(Cost { wall_s: begin.elapsed().as_secs_f64(), cpu_s: cpu_s() - cpu_before_s })
}

/// What it costs to do several things at once, each on a thread of its own: from when the first
/// begins until the last ends.
pub fn at_once<T: Sync>(
    jobs: &[T],
    ready: impl Fn(&T) -> Outcome<()> + Sync,
    work: impl Fn(&T) -> Outcome<()> + Sync,
) -> Outcome<Cost> {
    if let [job] = jobs {
        ready(job)?;
        return cost(|| work(job));
    }
    let (barrier, cpu_before_s) = (Barrier::new(jobs.len()), cpu_s());
    let one = |job: &T| {
        let prepared = ready(job);
        barrier.wait();
        prepared?;
        let begin = Instant::now();
        work(job)?;
        Ok((begin, Instant::now()))
    };
    let times: Vec<Outcome<(Instant, Instant)>> = std::thread::scope(|scope| {
        let one = &one;
        let threads: Vec<_> = jobs.iter().map(|job| scope.spawn(move || one(job))).collect();
        let ended = |thread: std::thread::ScopedJoinHandle<'_, _>| {
            thread.join().unwrap_or_else(|_| Err("a thread that copies has panicked".into()))
        };
        threads.into_iter().map(ended).collect()
    });
    let cpu_s = cpu_s() - cpu_before_s;
    let times: Vec<(Instant, Instant)> = times.into_iter().collect::<Outcome<_>>()?;
    let (begin, end) = (times.iter().map(|time| time.0).min(), times.iter().map(|time| time.1).max());
    let wall_s = begin.zip(end).map_or(0.0, |(begin, end)| (end - begin).as_secs_f64());
    Ok(Cost { wall_s, cpu_s })
}

/// CPU seconds of this process so far.
pub fn cpu_s() -> f64 {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

/// The median; 0 of nothing.
pub fn median(values: &[f64]) -> f64 {
    forebay_results::Row::of_runs("", "", values).value
}
