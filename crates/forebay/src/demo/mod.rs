//! `forebay demo`: a trace through a router and emulated engines that keep their KV in one memory tier, and on an SSD below
//! it if they are given one, once for each routing policy. Each time memory is cold, and the SSD has what the same policy
//! left there. This file knows the order of events; `workload` says what is asked, `system` what runs, in this process
//! (`host`, `ssd`) or in many (`cluster`, made of `processes`), `arm` how one policy is replayed, `kill` what may happen to a
//! node meanwhile, `rows` what is kept of it.

mod arm;
mod cluster;
mod fault;
mod figures;
mod host;
mod kill;
mod node_config;
mod processes;
mod rows;
mod ssd;
mod system;
mod workload;

use crate::CommandResult;
use crate::cmd::route::wait_for_signal;
use cluster::ClusterShape;
use fault::Fault;
use forebay_engine::profile::Profile;
use forebay_router::Policy;
use forebay_trace::record::{RecordLog, RecordWriter};
use forebay_trace::report;
use host::HostShape;
use ssd::SsdShape;
use std::path::PathBuf;
use system::Shape;
use tokio_util::sync::CancellationToken;

/// GPU and model that the engines emulate.
const PROFILE: &str = "h20-qwen3-coder-30b-a3b";

/// Arguments of `forebay demo`.
#[derive(clap::Args)]
pub struct Args {
    /// Trace to replay, a file or a directory in any format that `forebay trace info` reads; generated if not given
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
    /// Take only the first N requests of the trace
    #[arg(long, value_name = "N")]
    requests: Option<usize>,
    /// Routing policies to compare, each from a cold start
    #[arg(long, value_delimiter = ',', default_values_t = Policy::ALL)]
    policies: Vec<Policy>,
    /// Engines behind the router
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u16).range(1..=16))]
    engines: u16,
    /// KV pool of each engine, in tokens [default: the profile's for a given trace; 120000 for the generated one, so
    /// that it does not fit]
    #[arg(long, value_name = "TOKENS")]
    pool_tokens: Option<usize>,
    /// Host memory tier that the engines share, or of all nodes together, in tokens
    #[arg(long, value_name = "TOKENS", default_value_t = 1_000_000)]
    memory_tokens: u64,
    /// Keep KV on an SSD too: a log for each policy (and node) in this directory, made if missing and kept afterwards, so
    /// that the next run starts with what this one left
    #[arg(long, value_name = "DIR")]
    ssd: Option<PathBuf>,
    /// Size of a new log
    #[arg(long, value_name = "SIZE", value_parser = crate::cmd::route::size, default_value = "1GiB", requires = "ssd")]
    ssd_size: usize,
    /// Run the node and each engine as a process of its own
    #[arg(long)]
    node: bool,
    /// The same with N nodes that are each other's peers; the engines are spread over them
    #[arg(long, value_name = "N", conflicts_with = "node", value_parser = clap::value_parser!(u16).range(1..=8))]
    nodes: Option<u16>,
    /// Kill one of the nodes when half of the requests have ended
    #[arg(long, requires = "nodes")]
    kill_one: bool,
    /// Model seconds per real second; arrivals, think times and steps are scaled alike
    #[arg(long, default_value_t = 20.0)]
    clock_ratio: f64,
    /// Damage what the store's links move: flip-bit:P flips a bit in each byte with probability P
    #[arg(long, value_name = "FAULT", conflicts_with_all = ["node", "nodes"])]
    fault: Option<Fault>,
    /// Seed of the generated trace and of faults
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Directory for report.html, records.jsonl and summary.json
    #[arg(long, value_name = "DIR", default_value = "demo-out")]
    out: PathBuf,
    /// Also write the results object that benchmarks write
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// Runs the command.
pub fn run(args: Args) -> CommandResult {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    runtime.block_on(compare(args))
}

async fn compare(args: Args) -> CommandResult {
    let profile = Profile::shipped(PROFILE)?;
    let usual_pool_tokens = args.trace.as_ref().map_or(120_000, |_| profile.memory.pool_tokens);
    let pool_tokens = args.pool_tokens.unwrap_or(usual_pool_tokens);
    let context_tokens = profile.model.max_model_tokens.min(pool_tokens);
    let workload = workload::load(args.trace.as_deref(), args.requests, args.seed, context_tokens)?;
    let nodes = args.nodes.or(args.node.then_some(1));
    let host = HostShape {
        profile,
        engines: args.engines,
        pool_tokens,
        memory_tokens: args.memory_tokens,
        ssd: args.ssd.map(|directory| SsdShape { directory, bytes: args.ssd_size as u64 }),
        clock_ratio: args.clock_ratio,
        fault: args.fault,
        seed: args.seed,
    };
    let shape = match nodes {
        Some(nodes) => Shape::Cluster(ClusterShape { host, nodes, kill_one: args.kill_one }),
        None => Shape::Host(host),
    };
    std::fs::create_dir_all(&args.out)?;
    let records = args.out.join("records.jsonl");
    // A demo is one comparison: what an earlier one left would be mixed into it.
    std::fs::write(&records, "")?;
    let writer = RecordWriter::append(&records)?;
    let cancel = cancelled_by_signal();

    println!("{}", workload.description);
    println!("{}", shape.description());
    let mut said = Vec::new();
    for policy in &args.policies {
        said.extend(arm::run(*policy, &workload, &shape, &writer, &cancel).await?);
        if cancel.is_cancelled() {
            eprintln!("interrupted: the report covers what ran until now");
            break;
        }
    }

    let log = RecordLog::read(&records)?;
    let summary = report::summarize(&log);
    let page = args.out.join("report.html");
    std::fs::write(&page, report::html(&summary, &log))?;
    std::fs::write(args.out.join("summary.json"), serde_json::to_string_pretty(&summary)?)?;
    if let Some(file) = &args.json {
        rows::results(&summary).write(file)?;
    }
    println!("\n{}", report::terminal(&summary));
    said.iter().for_each(|words| println!("{words}"));
    println!("Report: {}", page.display());
    Ok(())
}

fn cancelled_by_signal() -> CancellationToken {
    let cancel = CancellationToken::new();
    let trigger = cancel.clone();
    tokio::spawn(async move {
        if wait_for_signal().await.is_ok() {
            trigger.cancel();
        }
    });
    cancel
}
