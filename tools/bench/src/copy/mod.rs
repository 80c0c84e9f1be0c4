//! `forebay bench copy`: copies between host memory and GPUs, beside the driver's own and the
//! ceiling of the same run; and, where there are no GPUs, copies in host memory. It measures what
//! callers get.
//!
//! `plan` is what is asked for. `rig` is all memory, `ends` that of one GPU and a copy of it,
//! `bytes` what is in it. `way` is who copies; `ceiling` is what no one can exceed. `sweep`,
//! `paged`, `adaptive`, `break_even`, `costs` and `victim` each make rows, and `plot` a picture of
//! the first. `daemon` is about relays of another process, and `host` is the benchmark of host
//! memory.

mod adaptive;
mod break_even;
mod bytes;
mod ceiling;
mod costs;
mod daemon;
mod ends;
mod host;
mod other;
mod paged;
mod plan;
mod plot;
mod rig;
mod size;
mod sweep;
mod victim;
mod way;

pub use adaptive::{LoadArgs, run_load};
pub use daemon::{NodeArgs, run_node};

use crate::output::{CommandResult, Outcome, Output, finish};
use forebay_cuda::device::Device;
use forebay_cuda::driver::Driver;
use forebay_results::Results;
use rig::Rig;
use std::time::Duration;

/// Arguments of `forebay bench copy`.
#[derive(clap::Args)]
pub struct Args {
    /// Copies in host memory through the mover, against plain memcpy; what is measured where there
    /// are no GPUs
    #[arg(long, conflicts_with = "gpus")]
    host: bool,
    /// Runs of each kind; three times as many of copies below 16 MiB
    #[arg(long, default_value_t = 9, value_parser = clap::value_parser!(u32).range(1..=1000))]
    runs: u32,
    /// Threads that copy in host memory
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=64))]
    threads: u32,
    #[command(flatten)]
    gpus: plan::Args,
    #[command(flatten)]
    output: Output,
}

/// Runs the benchmark.
pub fn run(args: Args) -> CommandResult {
    let mut results = Results::new("copy");
    match driver(&args)? {
        Some(driver) => measure(driver, &args.gpus, args.runs, &mut results)?,
        None => results.rows = host::rows(args.runs, args.threads)?,
    }
    finish(&results, &args.output)
}

/// The driver, unless host memory is to be measured. Whoever says something about GPUs wants GPUs.
fn driver(args: &Args) -> Outcome<Option<&'static Driver>> {
    if args.host {
        return Ok(None);
    }
    match Driver::load() {
        Ok(driver) => Ok(Some(driver)),
        Err(error) if !args.gpus.are_given() => {
            eprintln!("{error}; host memory is measured instead");
            Ok(None)
        }
        Err(error) => Err(error.into()),
    }
}

/// Measures everything.
fn measure(driver: &'static Driver, args: &plan::Args, runs: u32, results: &mut Results) -> Outcome<()> {
    let count = Device::count(driver)?;
    if count == 0 {
        return Err("no GPU is visible; --host measures host memory".into());
    }
    let plan = args.plan(runs, count)?;
    let rig = Rig::start(driver, count, |gpu| plan.bytes_of(gpu))?;
    results.gpus(rig.ends.iter().map(|ends| ends.device.name()).collect::<Result<_, _>>()?);
    let relays = rig.has_relays(plan.first());
    if !relays {
        eprintln!("no other GPU reaches GPU {}: what needs relays is left out", plan.first());
    }
    // First copies come first.
    results.rows.extend(costs::of_starting(&rig, &plan, relays)?);
    let mut swept = sweep::sweep(&rig, &plan)?;
    results.rows.append(&mut swept.rows);
    results.rows.push(swept.cores);
    // GPUs that have just copied at the same time, as in the sweep, leave each other alone for a
    // second.
    std::thread::sleep(Duration::from_millis(1_500));
    results.rows.extend(paged::rows(&rig, &plan)?);
    if relays {
        results.rows.extend(break_even::rows(&rig, &plan)?);
        results.rows.extend(victim::rows(&rig, &plan)?);
        results.rows.extend(adaptive::rows(&rig, &plan)?);
        if args.daemon {
            results.rows.extend(daemon::rows(&rig, plan.runs)?);
        }
    }
    results.rows.push(costs::of_idling()?);
    if let Some(file) = &args.plot {
        let picture = plot::svg(&swept.points);
        std::fs::write(file, picture).map_err(|error| format!("{}: {error}", file.display()))?;
    }
    Ok(())
}
