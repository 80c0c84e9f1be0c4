//! `forebay bench slack`: the same loads and stores through a store with an SSD, with write-back
//! that begins at once, in windows between reads, or only on an idle disk, and without any stores
//! as the ceiling. Before that, what reads and writes of bare io_uring take from each other on the
//! same file. This file knows what is compared with what and which rows follow.
//!
//! All timings get the same trace in each run, in an order that is drawn anew. Loads come when
//! the trace says, however long those before them take, and their time counts from then.

mod mix;
mod rig;
mod trace;

use crate::disk::file::TestFiles;
use crate::output::{CommandResult, Outcome, Output, finish};
use crate::timing::median;
use forebay_results::{Results, Row};
use forebay_store::Timing;
use rand::SeedableRng;
use rand::rngs::StdRng;
use rand::seq::SliceRandom;
use rig::{Figures, play, store_all};
use std::path::PathBuf;
use trace::{CHUNK_BYTES, MIB, Trace};

/// Arguments of `forebay bench slack`.
#[derive(clap::Args)]
pub struct Args {
    /// Directory on the disk under test, whose file system must allow direct I/O
    #[arg(long, value_name = "DIR")]
    dir: PathBuf,
    /// Number of runs; each plays the trace four times
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=100))]
    runs: u32,
    /// Run everything for a few seconds: shows that it works, and measures nothing
    #[arg(long, conflicts_with = "runs")]
    quick: bool,
    #[command(flatten)]
    output: Output,
}

/// Who writes when. Nobody writes in the last one.
const ARMS: [(&str, Option<Timing>); 4] = [
    ("at_once", Some(Timing::AtOnce)),
    ("windows", Some(Timing::InWindows)),
    ("idle", Some(Timing::WhenIdle)),
    ("reads_alone", None),
];

/// Runs the benchmark.
pub fn run(mut args: Args) -> CommandResult {
    if args.quick {
        args.runs = 1;
    }
    let trace = Trace::new(if args.quick { 3 } else { 25 });
    let bytes = (trace.chunks() as u64 + 2 * trace.stores() as u64) * CHUNK_BYTES;
    let files = TestFiles::make(std::slice::from_ref(&args.dir), bytes)?;
    let [file] = &files.0[..] else { return Err("a file in one directory".into()) };
    let mut results = Results::new("slack");
    results.rows.extend(mix::rows(file, args.runs)?);
    store_all(file, &trace)?;
    let mut figures: [Vec<Figures>; ARMS.len()] = std::array::from_fn(|_| Vec::new());
    let (mut order, mut random) =
        (std::array::from_fn::<_, { ARMS.len() }, _>(|arm| arm), StdRng::seed_from_u64(1));
    for _ in 0..args.runs {
        // What the one before left behind is not always for the same.
        order.shuffle(&mut random);
        for arm in order {
            figures[arm].push(play(file, &trace, ARMS[arm].1)?);
        }
    }
    results.rows.extend(rows(&figures)?);
    finish(&results, &args.output)
}

fn rows(figures: &[Vec<Figures>; ARMS.len()]) -> Outcome<Vec<Row>> {
    let alone = figures.last().ok_or("no runs")?;
    let mut rows = Vec::new();
    for ((name, timing), runs) in ARMS.iter().zip(figures) {
        let values = |value: &dyn Fn(&Figures) -> f64| runs.iter().map(value).collect::<Vec<f64>>();
        let row = |figure: &str, unit, value: &dyn Fn(&Figures) -> f64| {
            Row::of_runs(format!("slack.{name}.{figure}"), unit, &values(value))
        };
        let slowed = |figure: &str, value: &dyn Fn(&Figures) -> f64| {
            let ceiling = median(&alone.iter().map(value).collect::<Vec<f64>>());
            row(figure, "ms", value).with_ceiling(ceiling)
        };
        rows.push(slowed("read_p50_ms", &|figures| percentile(&figures.read_ms, 50)));
        rows.push(slowed("read_p99_ms", &|figures| percentile(&figures.read_ms, 99)));
        rows.push(slowed("load_p50_ms", &|figures| percentile(&figures.load_ms, 50)));
        rows.push(slowed("load_p90_ms", &|figures| percentile(&figures.load_ms, 90)));
        let mut cpu = row("cpu_cores", "cores", &|figures| figures.cost.cores());
        cpu.cpu_s_per_gb = Some(median(&values(&|figures| figures.cpu_s_per_gb())));
        rows.push(cpu);
        if timing.is_none() {
            continue;
        }
        rows.push(row("stored_mean_ms", "ms", &|figures| figures.stored_mean_ms()));
        rows.push(row("stored_max_ms", "ms", &|figures| figures.end.written_after_us_max as f64 / 1e3));
        rows.push(row("waiting_mib_max", "MiB", &|figures| figures.waiting_bytes_max as f64 / MIB as f64));
        rows.push(row("write_mib_per_s", "MiB/s", &|figures| figures.write_mib_per_s()));
        rows.push(row("not_written", "chunks", &|figures| figures.not_written() as f64));
        rows.push(row("begun_in_window", "chunks", &|figures| figures.end.begun.window as f64));
        rows.push(row("begun_best_effort", "chunks", &|figures| figures.end.begun.best_effort as f64));
        rows.push(row("begun_due", "chunks", &|figures| figures.end.begun.due as f64));
    }
    Ok(rows)
}

fn percentile(values: &[f64], percent: usize) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted.get((sorted.len().saturating_sub(1)) * percent / 100).copied().unwrap_or(0.0)
}
