//! `forebay bench`: each benchmark measures one part beside its ceiling and writes the results
//! object. This file knows the benchmarks by name and shows what they measured; how they measure is
//! theirs.

#[macro_use]
extern crate forebay_results;

mod burst;
mod checksum;
mod copy;
mod disk;
mod layers;
mod net;
mod node;
mod nvme;
mod output;
mod ring;
mod route;
mod slack;
mod store;
mod tiers;
mod timing;

use output::CommandResult;

/// Arguments of `forebay bench`.
#[derive(clap::Args)]
pub struct Args {
    #[command(subcommand)]
    bench: Bench,
}

#[derive(clap::Subcommand)]
enum Bench {
    /// What routing policies make of many requests with one prompt
    Burst(burst::Args),
    /// CRC-32C of GPU memory by the GPU, and of loads while they are copied
    Checksum(checksum::Args),
    /// Scattered copies in host memory through the mover, against plain memcpy
    Copy(copy::Args),
    /// The process that loads a link while `copy` measures
    #[command(hide = true)]
    CopyLoad(copy::LoadArgs),
    /// The other process of `copy --daemon`
    #[command(hide = true)]
    CopyNode(copy::NodeArgs),
    /// Objects through the disk link, against bare io_uring on the same file
    Disk(disk::Args),
    /// How soon an engine can begin with a prompt on SSD: by its layers, and by its chunks
    Layers(layers::Args),
    /// Memory of another process through an agent, against plain sockets between the same processes
    Net(net::Args),
    /// The other process of `net`
    #[command(hide = true)]
    NetOwner(net::OwnerArgs),
    /// What it costs to store and load a long prompt by way of a node: time, CPU and messages
    Node(node::Args),
    /// What it costs to encode commands for an NVMe drive, without one
    Nvme(nvme::Args),
    /// Requests in shared memory, by a thread and by a GPU: round trips, and contexts a second
    Ring(ring::Args),
    /// What the router adds to requests, in CPU and in time
    Route(route::Args),
    /// What reads of an SSD lose to write-back that begins at once, in windows, or on an idle disk
    Slack(slack::Args),
    /// Lookups and leases in a full memory tier
    Store(store::Args),
    /// What admission to the SSD makes of traces, memory 2 % and SSD 20 % of their distinct blocks
    Tiers(tiers::Args),
}

/// Runs the command.
pub fn run(args: Args) -> CommandResult {
    match args.bench {
        Bench::Burst(args) => burst::run(args),
        Bench::Checksum(args) => checksum::run(args),
        Bench::Copy(args) => copy::run(args),
        Bench::CopyLoad(args) => copy::run_load(args),
        Bench::CopyNode(args) => copy::run_node(args),
        Bench::Disk(args) => disk::run(args),
        Bench::Layers(args) => layers::run(args),
        Bench::Net(args) => net::run(args),
        Bench::NetOwner(args) => net::run_owner(args),
        Bench::Node(args) => node::run(args),
        Bench::Nvme(args) => nvme::run(args),
        Bench::Ring(args) => ring::run(args),
        Bench::Route(args) => route::run(args),
        Bench::Slack(args) => slack::run(args),
        Bench::Store(args) => store::run(args),
        Bench::Tiers(args) => tiers::run(args),
    }
}
