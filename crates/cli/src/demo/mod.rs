//! `forebay demo`: a trace through a router and emulated engines that keep their KV in one memory
//! tier, and on an SSD below it if they are given one, once for each routing policy. Each time
//! memory is cold, and the SSD has what the same policy left there. This file knows the order of
//! events; `workload` says what is asked, `spec` what is to run, `system` runs it, in this process
//! (`host`) or in many (`cluster`, made of `processes`; `vllm` if the engines are real),
//! `arm` how one policy is replayed, `kill` what may happen to a node meanwhile, `rows` what is
//! kept of it.

mod arm;
mod cluster;
mod host;
mod kill;
mod node_config;
mod processes;
mod rows;
mod spec;
mod system;
mod vllm;
mod workload;

use crate::cmd::signals::Signals;
use arm::Arm;
use forebay_results::output::{CommandResult, Error};
use forebay_router::Policy;
use forebay_steps::Profile;
use forebay_trace::generate::Marginals;
use forebay_trace::record::{RecordLog, RecordWriter};
use forebay_trace::report;
use spec::{ClusterSpec, Fault, HostSpec, SsdSpec};
use std::path::PathBuf;
use system::Spec;
use tokio_util::sync::CancellationToken;
use vllm::Vllm;
use workload::Workload;

/// GPU and model that the engines emulate.
const PROFILE: &str = "h20-qwen3-coder-30b-a3b";
/// The usual memory tier.
const MEMORY_TOKENS: u64 = 1_000_000;
/// The same for vLLMs, whose tokens have all their bytes, and pools in which not all sessions of
/// the generated trace fit.
const VLLM_MEMORY_TOKENS: u64 = 100_000;
const VLLM_POOL_TOKENS: usize = 6_400;

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum EngineKind {
    /// Compute nothing, take the time that a GPU would, and keep KV that can be checked
    Emulated,
    /// Real vLLMs with Forebay's connector, on the CPU or on the GPU that they find
    Vllm,
}

/// Arguments of `forebay demo`.
#[derive(clap::Args)]
pub struct Args {
    /// Trace to replay, a file or a directory in any format that `forebay trace info` reads;
    /// generated if not given
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
    /// Take only the first N requests of the trace [default: all]
    #[arg(long, value_name = "N")]
    requests: Option<usize>,
    /// Routing policies to compare, each from a cold start
    #[arg(long, value_delimiter = ',', default_values_t = Policy::ALL)]
    policies: Vec<Policy>,
    /// Kind of the engines; vLLMs are processes of their own, with a node
    #[arg(long, value_enum, default_value = "emulated")]
    engine: EngineKind,
    /// With --engine vllm: the Python interpreter that has vLLM and Forebay installed
    #[arg(long, value_name = "PYTHON", required_if_eq("engine", "vllm"))]
    vllm: Option<PathBuf>,
    /// With --engine vllm: the directory of the model that they serve
    #[arg(long, value_name = "DIR", required_if_eq("engine", "vllm"))]
    model: Option<PathBuf>,
    /// Number of engines behind the router [default: 4; 2 for vLLM]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=16))]
    engines: Option<u16>,
    /// KV pool of each engine, in tokens [default: the profile's for a given trace; 120000 for the
    /// generated one, so that it does not fit; 6400 for vLLM]
    #[arg(long, value_name = "TOKENS")]
    pool_tokens: Option<usize>,
    /// Host memory tier that the engines share, or of all nodes together, in tokens [default:
    /// 1000000; 100000 for vLLM]
    #[arg(long, value_name = "TOKENS")]
    memory_tokens: Option<u64>,
    /// Keep KV on an SSD too: a log for each policy (and node) in this directory, made if missing
    /// and kept afterwards, so that the next run starts with what this one left
    #[arg(long, value_name = "DIR")]
    ssd: Option<PathBuf>,
    /// Size of a new log
    #[arg(long, value_name = "SIZE", value_parser = crate::cmd::values::size::<usize>, default_value = "1GiB", requires = "ssd")]
    ssd_size: usize,
    /// Run the node and each engine as a process of its own
    #[arg(long)]
    node: bool,
    /// Run N nodes that are peers of each other, and each engine, as processes of their own; the
    /// engines are spread over the nodes
    #[arg(long, value_name = "N", conflicts_with = "node", value_parser = clap::value_parser!(u16).range(1..=8))]
    nodes: Option<u16>,
    /// Kill one of the nodes when half of the requests have ended
    #[arg(long, requires = "nodes")]
    kill_one: bool,
    /// Seconds of the trace in a real second; arrivals, think times and steps are scaled alike
    /// [default: 20; always 1 for vLLM]
    #[arg(long, value_name = "RATIO")]
    clock_ratio: Option<f64>,
    /// Damage the bytes that the store's links move: flip-bit:P flips a bit in each byte with
    /// probability P
    #[arg(long, value_name = "FAULT", conflicts_with_all = ["node", "nodes"])]
    fault: Option<Fault>,
    /// Seed of the generated trace and of faults
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Directory for report.html, records.jsonl, summary.json and a decision log for each policy
    #[arg(long, value_name = "DIR", default_value = "demo-out")]
    out: PathBuf,
    /// Write the results object to this file, in the form that benchmarks write
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// Runs the command.
pub fn run(args: Args) -> CommandResult {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    runtime.block_on(compare(args))
}

async fn compare(args: Args) -> CommandResult {
    let spec = args.spec()?;
    let host = spec.host();
    let context_tokens = host.profile.model.max_model_tokens.min(host.pool_tokens);
    let preset = match args.engine {
        EngineKind::Emulated => Marginals::DEMO,
        EngineKind::Vllm => Marginals::DEMO_SMALL,
    };
    let marginals: Marginals = preset.parse()?;
    let limit = args.requests.unwrap_or(usize::MAX);
    let workload = match &args.trace {
        Some(path) => Workload::read(path, limit, context_tokens)?,
        None => Workload::generate(&marginals, limit, args.seed)?,
    };
    std::fs::create_dir_all(&args.out)?;
    let records = args.out.join("records.jsonl");
    // A demo is one comparison: what an earlier one left would be mixed into it.
    std::fs::write(&records, "")?;
    let writer = RecordWriter::append(&records)?;
    let cancel = cancelled_by_signal()?;

    println!("{}", workload.description);
    println!("{}", spec.description());
    let mut said = Vec::new();
    for policy in &args.policies {
        let (workload, spec, records, cancel) = (&workload, &spec, &writer, &cancel);
        let decision_log = args.out.join(format!("decisions-{policy}.jsonl"));
        let arm = Arm { policy: *policy, workload, spec, records, cancel, decision_log };
        said.extend(arm.run().await?);
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

impl Args {
    /// What is to run.
    fn spec(&self) -> Result<Spec, Error> {
        let vllm = match (self.engine, &self.vllm, &self.model) {
            (EngineKind::Vllm, Some(python), Some(model)) => {
                // A relative path would be another one's in the engine's own directory.
                Some(Vllm { python: python.clone(), model: std::path::absolute(model)? })
            }
            _ => None,
        };
        let mut profile = Profile::shipped(PROFILE)?;
        let usual_pool_tokens = self.trace.as_ref().map_or(120_000, |_| profile.memory.pool_tokens);
        let (engines, usual_pool_tokens, memory_tokens, usual_clock_ratio) = match vllm {
            Some(_) => (2, VLLM_POOL_TOKENS, VLLM_MEMORY_TOKENS, 1.0),
            None => (4, usual_pool_tokens, MEMORY_TOKENS, 20.0),
        };
        let pool_tokens = self.pool_tokens.unwrap_or(usual_pool_tokens);
        let clock_ratio = self.clock_ratio.unwrap_or(usual_clock_ratio);
        if let Some(vllm) = &vllm {
            if clock_ratio != 1.0 || self.fault.is_some() {
                let fault = if self.fault.is_some() { ", and --fault is given" } else { "" };
                let allowed = "with --engine vllm only 1, and no fault, are allowed";
                return Err(format!("--clock-ratio is {clock_ratio}{fault}; {allowed}").into());
            }
            profile.model = vllm.facts(pool_tokens)?;
        }
        let ssd_bytes = self.ssd_size as u64;
        let host = HostSpec {
            profile,
            engines: self.engines.unwrap_or(engines),
            pool_tokens,
            memory_tokens: self.memory_tokens.unwrap_or(memory_tokens),
            ssd: self.ssd.clone().map(|directory| SsdSpec { directory, bytes: ssd_bytes }),
            clock_ratio,
            fault: self.fault,
            seed: self.seed,
        };
        let processes = self.node || vllm.is_some();
        Ok(match self.nodes.or(processes.then_some(1)) {
            Some(nodes) => Spec::Cluster(ClusterSpec { host, nodes, kill_one: self.kill_one, vllm }),
            None => Spec::Host(host),
        })
    }
}

/// Listens before this returns: what is started then must not outlive us.
fn cancelled_by_signal() -> std::io::Result<CancellationToken> {
    let mut signals = Signals::listen()?;
    let cancel = CancellationToken::new();
    let trigger = cancel.clone();
    tokio::spawn(async move {
        signals.next().await;
        trigger.cancel();
    });
    Ok(cancel)
}
