//! `forebay bench`: each benchmark measures one part beside its ceiling and writes the results object. This file knows the
//! benchmarks by name and shows what they measured; how they measure is theirs.

#[macro_use]
extern crate forebay_results;

mod copy;
mod disk;
mod net;
mod node;
mod route;
mod store;
mod tiers;

use forebay_results::{Results, Row};
use std::path::PathBuf;

/// The error is printed on stderr, and the process exits with 1.
type CommandResult = Result<(), Box<dyn std::error::Error + Send + Sync>>;

/// Arguments of `forebay bench`.
#[derive(clap::Args)]
pub struct Args {
    #[command(subcommand)]
    bench: Bench,
}

#[derive(clap::Subcommand)]
enum Bench {
    /// Scattered copies in host memory through the mover, against plain memcpy
    Copy(copy::Args),
    /// The other process of `copy --daemon`
    #[command(hide = true)]
    CopyNode(copy::NodeArgs),
    /// Objects through the disk link, against bare io_uring on the same file
    Disk(disk::Args),
    /// Memory of another process through an agent, against plain sockets between the same processes
    Net(net::Args),
    /// The other process of `net`
    #[command(hide = true)]
    NetOwner(net::OwnerArgs),
    /// What it costs to store and load a long prompt by way of a node: time, CPU and messages
    Node(node::Args),
    /// What the router adds to requests, in CPU and in time
    Route(route::Args),
    /// Lookups and leases in a full memory tier
    Store(store::Args),
    /// What admission to the SSD makes of traces, memory 2 % and SSD 20 % of their distinct blocks
    Tiers(tiers::Args),
}

/// Where results go.
#[derive(clap::Args)]
struct Output {
    /// Write the results object to this file
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// Runs the command.
pub fn run(args: Args) -> CommandResult {
    match args.bench {
        Bench::Copy(args) => copy::run(args),
        Bench::CopyNode(args) => copy::run_node(args),
        Bench::Disk(args) => disk::run(args),
        Bench::Net(args) => net::run(args),
        Bench::NetOwner(args) => net::run_owner(args),
        Bench::Node(args) => node::run(args),
        Bench::Route(args) => route::run(args),
        Bench::Store(args) => store::run(args),
        Bench::Tiers(args) => tiers::run(args),
    }
}

/// Prints the rows, and writes them where that was asked for.
fn finish(results: &Results, output: &Output) -> crate::CommandResult {
    println!(
        "{:<28} {:>10} {:>10} {:>10} {:>10} {:>6} {:>10}  peer",
        "row", "median", "min", "max", "ceiling", "ratio", "cpu_s/GB"
    );
    results.rows.iter().for_each(print_row);
    match &output.json {
        Some(file) => Ok(results.write(file)?),
        None => Ok(()),
    }
}

fn print_row(row: &Row) {
    let number = |value: Option<f64>| value.map_or_else(|| "-".into(), |value| format!("{value:.3}"));
    let peer = row.peer.as_ref();
    println!(
        "{:<28} {:>10.3} {:>10.3} {:>10.3} {:>10} {:>6} {:>10}  {} [{}]",
        row.name,
        row.value,
        row.min,
        row.max,
        number(row.ceiling),
        number(row.ratio),
        number(row.cpu_s_per_gb),
        peer.map_or_else(|| "-".into(), |peer| format!("{} {} {:.3}", peer.name, peer.version, peer.value)),
        row.unit,
    );
}
