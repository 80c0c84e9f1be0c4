//! `forebay bench copy`: copies between host memory and GPUs, beside the driver's own and the
//! ceiling of the same run; and, where there are no GPUs, copies in host memory. It measures what
//! callers get.
//!
//! `plan` is what is asked for, and `gpus` measures it. `rig` is all memory, `ends` that of one GPU
//! and a copy of it, `bytes` what is in it. `way` is who copies, with `gather` for a kernel that
//! does it alone; `ceiling` is what no one can exceed. `sweep`, `paged`, `break_even`, `costs` and
//! `victim` each make rows, and `plot` a picture of the first. `daemon` is about relays of another
//! process, and `host` is the benchmark of host memory.

mod break_even;
mod bytes;
mod ceiling;
mod costs;
mod daemon;
mod ends;
mod gather;
mod gpus;
mod host;
mod paged;
mod plan;
mod plot;
mod rig;
mod size;
mod sweep;
mod timing;
mod victim;
mod way;

pub use daemon::{NodeArgs, run_node};
pub use timing::cpu_s;

use crate::output::{CommandResult, Outcome, Output, finish};
use forebay_cuda::driver::Driver;
use forebay_results::Results;

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
        Some(driver) => gpus::measure(driver, &args.gpus, args.runs, &mut results)?,
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
