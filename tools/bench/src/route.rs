//! `forebay bench route`: what a router adds to requests, in CPU and in time to the first token,
//! beside a direct connection and, if asked for, another router. It measures from outside, as a
//! client and by `/proc`.
//!
//! Fake engines answer at once with 16 events, each in a write of its own; they and the load run on
//! one CPU, the routers on another. Router and peer are measured in turn, and the one that is not
//! is stopped: it may have work of its own in the background. Added time: requests arrive at random
//! (open loop) and go directly to an engine and through the router by turns, so that both see the
//! same disturbances. CPU: a closed loop, user and system time of the router's processes over
//! requests; this does not depend on how busy the rest of the machine is.

mod choose;
mod engine;
mod load;
mod process;

use crate::output::{CommandResult, Output, finish};
use crate::timing::median;
use forebay_results::{Peer, Results, Row};
use forebay_trace::quantile::Quantiles;
use load::Prompts;
use process::{Pinned, Priority, free_port};
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::Duration;

const ENGINES: usize = 4;

/// Requests under way in the closed loop.
const CLOSED_LOOP: usize = 32;

/// Before each measurement, so that connections are open.
const WARM_UP: Duration = Duration::from_secs(1);

/// Longer answers count as stalled: fake engines answer in well under a millisecond, and a router
/// that lets Nagle's algorithm meet delayed acknowledgements adds 40 ms.
const STALL_MS: f64 = 30.0;

/// Arguments of `forebay bench route`.
#[derive(clap::Args)]
pub struct Args {
    /// Number of runs of each kind
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=100))]
    runs: u32,
    /// Length of a run, in seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 5, value_parser = clap::value_parser!(u64).range(1..=600))]
    run_seconds: u64,
    /// Requests per second to each arm when added time is measured
    #[arg(long, default_value_t = 30, value_parser = clap::value_parser!(u32).range(1..=1000))]
    rate: u32,
    /// Policy of the router
    #[arg(long, default_value_t = forebay_router::Policy::Lpwl)]
    policy: forebay_router::Policy,
    /// Another router to run beside it; {p0} to {p3} become the engines' ports and {rp} the port to
    /// listen on
    #[arg(long, value_name = "NAME@VERSION=COMMAND")]
    peer: Option<PeerCommand>,
    #[command(flatten)]
    output: Output,
}

/// How another router is started.
#[derive(Debug, Clone)]
struct PeerCommand {
    name: String,
    version: String,
    command: String,
}

impl std::str::FromStr for PeerCommand {
    type Err = String;

    fn from_str(text: &str) -> Result<PeerCommand, String> {
        let parts = text.split_once('=').and_then(|(peer, command)| {
            let (name, version) = peer.split_once('@')?;
            Some((name, version, command))
        });
        match parts {
            Some((name, version, command)) if !command.trim().is_empty() => {
                Ok(PeerCommand { name: name.into(), version: version.into(), command: command.into() })
            }
            _ => Err(format!("'{text}' is not of the form NAME@VERSION=COMMAND")),
        }
    }
}

/// A router under test.
struct Arm {
    address: SocketAddr,
    process: Pinned,
}

pub fn run(args: Args) -> CommandResult {
    let cpus = process::cpus()?;
    let (Some(&router_cpu), Some(&load_cpu)) = (cpus.first(), cpus.last()) else {
        return Err("no CPU to run on".into());
    };
    if router_cpu == load_cpu {
        eprintln!("forebay bench route: one CPU only: added times include waiting for engines and load");
    }
    let mut results = Results::new("route");
    results.rows.extend(choose::rows(args.policy, args.runs)?);
    process::pin_this_thread(load_cpu)?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(measure(args, results, router_cpu))
}

async fn measure(args: Args, mut results: Results, router_cpu: usize) -> CommandResult {
    let engines = engine::start(ENGINES).await?;
    let router = start_router(&engines, args.policy, router_cpu)?;
    let peer = args.peer.as_ref().map(|peer| start_peer(peer, &engines, router_cpu)).transpose()?;
    let mut arms = vec![router];
    arms.extend(peer);
    for arm in &mut arms {
        arm.process.wait_until_well(arm.address).await?;
        arm.process.pause();
    }
    for (size, prompt_bytes) in [("1kb", 1 << 10), ("100kb", 100 << 10)] {
        let mut prompts = Prompts::new(prompt_bytes);
        let mut figures: Vec<Figures> = arms.iter().map(|_| Figures::default()).collect();
        for run in 0..args.runs {
            for (arm, figures) in arms.iter().zip(&mut figures) {
                arm.process.resume();
                load::closed_loop(arm.address, &mut prompts, CLOSED_LOOP, WARM_UP).await?;
                figures.add_cpu(arm, &mut prompts, &args).await?;
                figures.add_times(engines[0], arm, &mut prompts, &args, run).await?;
                arm.process.pause();
            }
        }
        results.rows.extend(rows(size, &figures, args.peer.as_ref()));
    }
    finish(&results, &args.output)
}

/// What was measured of one arm, an entry for each run.
#[derive(Default)]
struct Figures {
    cpu_ms: Vec<f64>,
    /// The same for each program that is part of the arm.
    program_cpu_ms: BTreeMap<String, Vec<f64>>,
    added_p50_ms: Vec<f64>,
    added_p99_ms: Vec<f64>,
    stalled_share: Vec<f64>,
}

impl Figures {
    /// CPU time per request in a closed loop.
    async fn add_cpu(&mut self, arm: &Arm, prompts: &mut Prompts, args: &Args) -> Result<(), load::Failure> {
        let before = arm.process.cpu_seconds()?;
        let length = Duration::from_secs(args.run_seconds);
        let requests = load::closed_loop(arm.address, prompts, CLOSED_LOOP, length).await?;
        let mut sum = 0.0;
        for (program, after) in arm.process.cpu_seconds()? {
            let used = after - before.get(&program).unwrap_or(&0.0);
            let cpu_ms = used * 1e3 / requests as f64;
            self.program_cpu_ms.entry(program).or_default().push(cpu_ms);
            sum += cpu_ms;
        }
        self.cpu_ms.push(sum);
        Ok(())
    }

    async fn add_times(
        &mut self,
        engine: SocketAddr,
        arm: &Arm,
        prompts: &mut Prompts,
        args: &Args,
        run: u32,
    ) -> Result<(), load::Failure> {
        let length = Duration::from_secs(args.run_seconds);
        let rate = 2.0 * f64::from(args.rate);
        let priority = Priority::raise(arm.process.ids()?);
        let times = load::open_loop([engine, arm.address], prompts, rate, length, u64::from(run)).await?;
        drop(priority);
        let [direct, routed] = times;
        let [direct_ms, routed_ms] = [direct.first_ms, routed.first_ms].map(Quantiles::of);
        let added = |routed: Option<f64>, direct: Option<f64>| routed.unwrap_or(0.0) - direct.unwrap_or(0.0);
        self.added_p50_ms.push(added(routed_ms.p50, direct_ms.p50));
        self.added_p99_ms.push(added(routed_ms.p99, direct_ms.p99));
        let stalled = routed.end_ms.iter().filter(|&&time| time > STALL_MS).count();
        self.stalled_share.push(stalled as f64 / routed.end_ms.len().max(1) as f64);
        Ok(())
    }
}

fn rows(size: &str, figures: &[Figures], peer: Option<&PeerCommand>) -> Vec<Row> {
    type Pick = fn(&Figures) -> &[f64];
    let kinds: [(&str, &'static str, Pick); 4] = [
        ("cpu_ms", "ms", |figures| &figures.cpu_ms),
        ("added_ttft_ms", "ms", |figures| &figures.added_p50_ms),
        ("added_ttft_p99_ms", "ms", |figures| &figures.added_p99_ms),
        ("stalled_share", "1", |figures| &figures.stalled_share),
    ];
    let row = |(name, unit, pick): (&str, &'static str, Pick)| {
        let mut row = Row::of_runs(format!("route.{name}.{size}"), unit, pick(&figures[0]));
        row.peer = peer.zip(figures.get(1)).map(|(peer, figures)| Peer {
            name: peer.name.clone(),
            version: peer.version.clone(),
            value: median(pick(figures)),
        });
        row
    };
    let parts = peer.zip(figures.get(1)).into_iter().flat_map(|(peer, figures)| {
        // What a peer of several programs takes in each of them.
        let parts = figures.program_cpu_ms.iter().filter(|_| figures.program_cpu_ms.len() > 1);
        parts.map(move |(program, cpu_ms)| {
            Row::of_runs(format!("route.cpu_ms.{size}.{}.{program}", peer.name), "ms", cpu_ms)
        })
    });
    kinds.into_iter().map(row).chain(parts).collect()
}

fn start_router(
    engines: &[SocketAddr],
    policy: forebay_router::Policy,
    cpu: usize,
) -> Result<Arm, Box<dyn std::error::Error + Send + Sync>> {
    let port = free_port()?;
    let program = std::env::current_exe()?;
    let mut command = vec![program.display().to_string(), "route".into(), "--listen".into()];
    command.extend([format!("127.0.0.1:{port}"), "--policy".into(), policy.to_string()]);
    for (index, engine) in engines.iter().enumerate() {
        command.extend(["--backend".into(), format!("engine-{index}=http://{engine}")]);
    }
    Ok(Arm { address: ([127, 0, 0, 1], port).into(), process: Pinned::start(&command, cpu)? })
}

fn start_peer(
    peer: &PeerCommand,
    engines: &[SocketAddr],
    cpu: usize,
) -> Result<Arm, Box<dyn std::error::Error + Send + Sync>> {
    let port = free_port()?;
    let mut command = peer.command.replace("{rp}", &port.to_string());
    for (index, engine) in engines.iter().enumerate() {
        command = command.replace(&format!("{{p{index}}}"), &engine.port().to_string());
    }
    let words: Vec<String> = command.split_whitespace().map(str::to_owned).collect();
    Ok(Arm { address: ([127, 0, 0, 1], port).into(), process: Pinned::start(&words, cpu)? })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_peer_has_a_name_a_version_and_a_command() {
        let peer: PeerCommand = "smg@1.13.0=smg launch --port {rp} --env A=B".parse().unwrap();
        assert_eq!((&peer.name[..], &peer.version[..]), ("smg", "1.13.0"));
        assert!(peer.command.ends_with("--env A=B"));
        for bad in ["smg", "smg=x", "smg@1= "] {
            assert!(bad.parse::<PeerCommand>().is_err(), "{bad}");
        }
    }
}
