//! `forebay preflight`: whether a host is fit, before anything depends on it: `gpu` for fast
//! copies, `net` for moving KV between hosts.

mod gpu;
mod net;

use clap::Subcommand;
use forebay_results::output::Error;
use std::process::ExitCode;

/// Arguments of the command.
#[derive(clap::Args)]
pub struct Args {
    #[command(subcommand)]
    what: What,
}

#[derive(Subcommand)]
enum What {
    /// Check GPUs, their links and the host's memory; the exit code is 1 after warnings and 2 after
    /// faults, otherwise 0
    Gpu(gpu::Args),
    /// Check the network between this host and others, and what the host allows; the exit code is 1
    /// after warnings and after what could not be found out, 2 after faults, otherwise 0
    Net(Box<net::Args>),
}

/// Runs the command. The exit code is the worst finding's.
pub fn run(args: Args) -> Result<ExitCode, Error> {
    match args.what {
        What::Gpu(args) => gpu::run(args),
        What::Net(args) => net::run(*args),
    }
}
