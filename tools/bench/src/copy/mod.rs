//! `forebay bench copy`: copies between host memory and GPUs, beside the driver's own and the ceiling of the same run; and,
//! where there are no GPUs, copies in host memory. It measures what callers get; it must never reach around it.
//!
//! `gpus` is what is measured on GPUs and how that is asked for; `rig` is the memory and what must be in it, `bytes` the bytes
//! themselves; `way` is who copies, with `batch` and `gather` for those who are not ours; `ceiling` is what no one can exceed.
//! `sweep`, `paged`, `break_even`, `costs` and `victim` each make rows, and `plot` a picture of the first. `daemon` is about relays of another
//! process, and `host` is the benchmark of host memory.

mod break_even;
mod bytes;
mod ceiling;
mod costs;
mod daemon;
mod gather;
mod gpus;
mod host;
mod paged;
mod plot;
mod rig;
mod size;
mod sweep;
mod timing;
mod victim;
mod way;

pub use daemon::{NodeArgs, run_node};
pub use timing::cpu_s;

use super::{Output, finish};
use forebay_cuda::driver::Driver;
use forebay_cuda::links::Direction;
use forebay_results::Results;

/// Arguments of `forebay bench copy`.
#[derive(clap::Args)]
pub struct Args {
    /// Copies in host memory through the mover, against plain memcpy; what is measured where there are no GPUs
    #[arg(long, conflicts_with = "gpus")]
    host: bool,
    /// Runs of each kind; three times as many of copies below 16 MiB
    #[arg(long, default_value_t = 9, value_parser = clap::value_parser!(u32).range(1..=1000))]
    runs: u32,
    /// Threads that copy in host memory
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=64))]
    threads: u32,
    #[command(flatten)]
    gpus: gpus::Args,
    #[command(flatten)]
    output: Output,
}

type Failure = Box<dyn std::error::Error + Send + Sync>;
type Outcome<T> = Result<T, Failure>;

/// Which way bytes go.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Course {
    /// From the host to GPUs
    H2d,
    /// From GPUs to the host
    D2h,
    /// Both at once
    Both,
}

impl Course {
    fn directions(self) -> &'static [Direction] {
        match self {
            Course::H2d => &[Direction::HostToDevice],
            Course::D2h => &[Direction::DeviceToHost],
            Course::Both => &Direction::BOTH,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Course::H2d => "h2d",
            Course::D2h => "d2h",
            Course::Both => "both",
        }
    }
}

/// Runs the benchmark.
pub fn run(args: Args) -> crate::CommandResult {
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
