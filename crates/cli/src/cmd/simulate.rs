//! `forebay simulate`: what policies would do with a trace on engines of a profile, on a virtual
//! clock. It turns arguments into runs of `forebay-simulate`, a trace or a seed each, and prints
//! what came of them.

use super::reading::{micros, show_notes};
use super::trace::Source;
use forebay_results::output::{CommandResult, Error};
use forebay_results::{Results, Row};
use forebay_router::policy::Policy;
use forebay_simulate::arm::{Arm, TransferKinds};
use forebay_simulate::report::{Figures, METRICS, Unit};
use forebay_simulate::router::ViewErrors;
use forebay_simulate::scenario::Scenario;
use forebay_simulate::sessions::{Pacing, WarmUp};
use forebay_simulate::workload::Workload;
use forebay_steps::{Launch, Profile};
use forebay_trace::format::{ReadOptions, TraceReader};
use forebay_trace::generate::Generator;
use std::convert::Infallible;
use std::path::{Path, PathBuf};

/// Arguments of `forebay simulate`.
#[derive(clap::Args)]
pub struct Args {
    /// Traces in any format that `forebay trace info` reads; each is a run
    #[arg(required_unless_present_any = ["preset", "marginals"])]
    trace: Vec<PathBuf>,
    #[command(flatten)]
    source: Source,
    /// With --preset or --marginals: so many runs, each of a trace of its own
    #[arg(
        long,
        value_name = "N",
        default_value_t = 1,
        conflicts_with = "trace",
        value_parser = clap::value_parser!(u64).range(1..)
    )]
    seeds: u64,
    /// What is compared: the router's policies; elastic, which also moves KV by cost
    /// (elastic-pulls, elastic-hand-overs: in one way only); threshold, which hands long prompts
    /// over; migrate-TURNS, which moves sessions now and then
    #[arg(
        long,
        value_name = "POLICY,..",
        value_delimiter = ',',
        default_values_t = [Arm::Policy(Policy::Lpwl), Arm::Policy(Policy::AddedLatency), Arm::Elastic(TransferKinds::Both)]
    )]
    policies: Vec<Arm>,
    /// Of these --policies, say what part of their figures the others' are: rows
    /// sim.NAME.POLICY.METRIC.of_OTHER, the median of the runs' ratios
    #[arg(long, value_name = "POLICY,..", value_delimiter = ',')]
    against: Vec<Arm>,
    #[command(flatten)]
    cluster: ClusterArgs,
    #[command(flatten)]
    view: ViewArgs,
    /// Name of the rows in the JSON file: sim.NAME.POLICY.METRIC
    #[arg(long, value_name = "NAME", default_value = "run")]
    name: String,
    /// Write the figures to a file as JSON too
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// What is simulated.
#[derive(clap::Args)]
struct ClusterArgs {
    /// Number of engines
    #[arg(long, value_name = "N", default_value_t = 8)]
    engines: usize,
    /// GPU and model of the engines: a shipped profile, or a .toml file of forebay calibrate
    #[arg(long, value_name = "NAME_OR_FILE", default_value = Profile::DEFAULT)]
    profile: String,
    /// Tokens whose KV fits an engine's GPU [default: the profile's]
    #[arg(long, value_name = "TOKENS")]
    pool_tokens: Option<usize>,
    /// Most tokens of a step [default: the profile's]
    #[arg(long, value_name = "TOKENS")]
    max_num_batched_tokens: Option<usize>,
    /// Most requests that an engine computes at once [default: the profile's]
    #[arg(long, value_name = "REQUESTS")]
    max_num_seqs: Option<usize>,
    /// Host memory for KV of each engine
    #[arg(long, value_name = "SIZE", value_parser = forebay_transfer::size::parse, default_value = "0")]
    tier: u64,
    /// Let all engines read what one's host has
    #[arg(long, requires = "tier")]
    shared_tier: bool,
    /// Rate between hosts, in 10^9 bytes per second
    #[arg(long, value_name = "GB/S", default_value_t = 25.0)]
    network: f64,
    /// Sessions at a time, of all engines together
    #[arg(long, value_name = "N", default_value_t = 64)]
    at_once: usize,
    /// Send every request at its time in the trace, however many are under way
    #[arg(long, conflicts_with_all = ["at_once", "fill", "ramp", "warm_up"])]
    open: bool,
    /// Answer the first turns of the first sessions before anything else, and count all answers
    /// after that
    #[arg(long, conflicts_with_all = ["ramp", "warm_up"])]
    fill: bool,
    /// The first sessions begin within this time
    #[arg(long, value_name = "SECONDS", default_value_t = 20.0)]
    ramp: f64,
    /// The first answers that are not counted, as a share of all
    #[arg(long, value_name = "SHARE", default_value_t = 0.2)]
    warm_up: f64,
    /// End after so many counted answers [default: no limit]
    #[arg(long, value_name = "N", default_value_t = usize::MAX, hide_default_value = true)]
    answers: usize,
}

/// What the router knows.
#[derive(clap::Args)]
struct ViewArgs {
    /// How late the router hears of first tokens and answers
    #[arg(long, value_name = "SECONDS", default_value_t = 0.0)]
    view_delay: f64,
    /// How wrong the router is about what engines hold: the largest relative error
    #[arg(long, value_name = "SHARE", default_value_t = 0.0)]
    hit_error: f64,
    /// GPU and model that the router takes the engines for [default: what they are]
    #[arg(long, value_name = "NAME_OR_FILE")]
    router_profile: Option<String>,
    /// Let the router know what engines hold, as no router can
    #[arg(long)]
    true_hits: bool,
}

/// The runs of one policy.
struct Runs {
    arm: Arm,
    figures: Vec<Figures>,
}

pub fn run(args: Args) -> CommandResult {
    let scenario = args.scenario()?;
    scenario.check()?;
    args.check_against()?;
    let mut runs: Vec<Runs> = args.policies.iter().map(|&arm| Runs { arm, figures: Vec::new() }).collect();
    let count = if args.trace.is_empty() { args.seeds } else { args.trace.len() as u64 };
    for index in 0..count {
        let workload = args.workload(index, scenario.most_tokens())?;
        let (turns, sessions) = (workload.turns(), workload.sessions.len());
        eprintln!("run {} of {count}: {turns} requests in {sessions} sessions", index + 1);
        for runs in &mut runs {
            let figures = Figures::of(&scenario.run(runs.arm, &workload, index + 1)?);
            if figures.answers == 0 {
                let arm = runs.arm;
                let error = format!(
                    "{arm}: none of {turns} answers was counted: counting begins after --warm-up and ends \
                     when no session is left to begin; allow fewer with --at-once, or ask for more"
                );
                return Err(error.into());
            }
            runs.figures.push(figures);
        }
    }
    print_table(&runs);
    if let Some(file) = &args.json {
        let write = results(&args, &runs).write(file);
        write.map_err(|error| format!("--json {}: {error}", file.display()))?;
    }
    Ok(())
}

impl Args {
    fn scenario(&self) -> Result<Scenario, Error> {
        let ClusterArgs { engines, tier, shared_tier, at_once, open, fill, answers, .. } = self.cluster;
        let warm_up = match fill {
            true => WarmUp::FirstTurns,
            false => {
                WarmUp::Ramp { over_us: micros("--ramp", self.cluster.ramp)?, share: self.cluster.warm_up }
            }
        };
        let pacing = if open { Pacing::Open } else { Pacing::Closed { at_once, warm_up } };
        let delay_us = micros("--view-delay", self.view.view_delay)?;
        let profile = self.cluster.profile()?;
        let router_profile = match &self.view.router_profile {
            Some(name) => Profile::find(name)?,
            None => profile.clone(),
        };
        Ok(Scenario {
            profile,
            router_profile,
            launch: Launch::Graph,
            engines,
            pacing,
            tier_bytes: tier,
            shared_tier,
            network_gb_per_s: self.cluster.network,
            errors: ViewErrors { delay_us, hits: self.view.hit_error },
            knows_hits: self.view.true_hits,
            most_answers: answers,
        })
    }

    /// Refuses to compare with what is not run.
    fn check_against(&self) -> Result<(), Error> {
        match self.against.iter().find(|other| !self.policies.contains(other)) {
            Some(other) => Err(format!("--against {other}: allowed are those of --policies").into()),
            None => Ok(()),
        }
    }

    /// What the run with this index asks.
    fn workload(&self, index: u64, most_tokens: u32) -> Result<Workload, Error> {
        if let Some(trace) = self.trace.get(index as usize) {
            return read(trace, most_tokens);
        }
        let marginals = self.source.marginals()?;
        let requests = Generator::new(&marginals, index + 1)?;
        Ok(Workload::new(requests.map(Ok::<_, Infallible>), most_tokens)?)
    }
}

impl ClusterArgs {
    fn profile(&self) -> Result<Profile, Error> {
        let mut profile = Profile::find(&self.profile)?;
        let set = |place: &mut usize, given: Option<usize>| *place = given.unwrap_or(*place);
        set(&mut profile.memory.pool_tokens, self.pool_tokens);
        set(&mut profile.scheduler.max_batched_tokens, self.max_num_batched_tokens);
        set(&mut profile.scheduler.max_seqs, self.max_num_seqs);
        profile.check()?;
        Ok(profile)
    }
}

fn read(trace: &Path, most_tokens: u32) -> Result<Workload, Error> {
    let mut reader = TraceReader::open(trace, ReadOptions::default())?;
    let workload = Workload::new(&mut reader, most_tokens);
    show_notes(&reader);
    let workload = workload?;
    match workload.turns() {
        0 => Err(format!("{}: no requests", trace.display()).into()),
        _ => Ok(workload),
    }
}

fn print_table(runs: &[Runs]) {
    print!("{:<16}", "policy");
    METRICS.iter().for_each(|metric| print!("{:>12}", metric.title));
    println!();
    for Runs { arm, figures } in runs {
        print!("{:<16}", arm.to_string());
        for metric in &METRICS {
            let row = Row::of_runs("", "", &figures.iter().map(metric.value).collect::<Vec<_>>());
            print!("{:>12}", shown(row.value, metric.unit));
        }
        println!();
    }
}

fn shown(value: f64, unit: Unit) -> String {
    match unit {
        Unit::Seconds => format!("{value:.3}"),
        Unit::Millis => format!("{:.1}", value * 1e3),
        Unit::PerSecond => format!("{value:.0}"),
        Unit::Share => format!("{value:.3}"),
        Unit::Count => format!("{value:.0}"),
    }
}

fn results(args: &Args, runs: &[Runs]) -> Results {
    let mut results = Results::new("simulate");
    for Runs { arm, figures } in runs {
        for metric in &METRICS {
            let values: Vec<f64> = figures.iter().map(metric.value).collect();
            let name = format!("sim.{}.{arm}.{}", args.name, metric.name);
            results.rows.push(Row::of_runs(&name, metric.unit.name(), &values));
            if metric.unit == Unit::Count {
                continue;
            }
            for other in runs.iter().filter(|other| other.arm != *arm && args.against.contains(&other.arm)) {
                let others = other.figures.iter().map(metric.value);
                let ratios: Vec<f64> =
                    values.iter().zip(others).filter(|(_, other)| *other > 0.0).map(|(a, b)| a / b).collect();
                if !ratios.is_empty() {
                    let name = format!("{name}.of_{}", other.arm);
                    results.rows.push(Row::of_runs(name, Unit::Share.name(), &ratios));
                }
            }
        }
    }
    results
}
