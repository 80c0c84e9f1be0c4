//! `forebay route-replay`: decide again what a router's decision log holds, by other policies. It
//! reads the log and prints a table; deciding is `forebay-router`'s.

use crate::decisions::read_lines;
use forebay_results::output::CommandResult;
use forebay_results::{Results, Row};
use forebay_router::{EngineModel, Figures, Line, Policy, Replay, Replayed};
use forebay_steps::{Launch, Profile};
use std::path::{Path, PathBuf};

/// Arguments of `forebay route-replay`.
#[derive(clap::Args)]
pub struct Args {
    /// Log that `forebay route --decision-log` wrote
    #[arg(value_name = "LOG")]
    log: PathBuf,
    /// A policy to decide by; repeat for each [default: all]
    #[arg(long, value_name = "NAME")]
    policy: Vec<Policy>,
    /// GPU and model that the engines are taken for, a shipped profile or a file [default: what the
    /// router took them for]
    #[arg(long, value_name = "NAME_OR_FILE")]
    profile: Option<String>,
    /// Write the figures to a file as JSON too
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// Reads a log and decides again.
struct Replaying {
    replay: Replay,
    /// Given, or what the log says last.
    engine_model: Option<EngineModel>,
    is_given: bool,
    /// The router's, as the log says last.
    policy: Option<Policy>,
    decisions: u64,
    /// Decisions about requests that go by load under every policy.
    by_load: u64,
    /// Requests that were refused, which no policy would have sent anywhere.
    refused: u64,
    unread: u64,
}

pub fn run(args: Args) -> CommandResult {
    let policies = if args.policy.is_empty() { Policy::ALL.to_vec() } else { args.policy };
    let profile = args.profile.as_deref().map(Profile::find).transpose()?;
    let engine_model = profile.map(|profile| EngineModel::new(&profile, Launch::Graph));
    let mut replaying = Replaying {
        replay: Replay::new(&policies),
        is_given: engine_model.is_some(),
        engine_model,
        policy: None,
        decisions: 0,
        by_load: 0,
        refused: 0,
        unread: 0,
    };
    replaying.read(&args.log)?;
    if replaying.decisions == 0 {
        return Err(format!("{}: no decisions", args.log.display()).into());
    }
    replaying.show();
    if let Some(path) = &args.json {
        replaying.results().write(path)?;
    }
    Ok(())
}

impl Replaying {
    fn read(&mut self, path: &Path) -> CommandResult {
        self.unread = read_lines(path, |_, line| self.take(line))?;
        Ok(())
    }

    fn take(&mut self, line: Line) -> Result<(), String> {
        match line {
            Line::Router(router) => {
                self.policy = Some(router.policy);
                if !self.is_given {
                    self.engine_model = Some(router.engine_model);
                }
            }
            Line::Decision(decision)
                if self.policy.is_some_and(|policy| policy != decision.record.policy) =>
            {
                self.by_load += 1;
            }
            Line::Decision(decision) if decision.record.is_refused() => self.refused += 1,
            Line::Decision(decision) => {
                let engine_model = self
                    .engine_model
                    .as_ref()
                    .ok_or("no line before it says what the router took its engines for: give a --profile")?;
                self.replay.add(engine_model, &decision).map_err(|error| error.to_string())?;
                self.decisions += 1;
            }
        }
        Ok(())
    }

    fn show(&self) {
        println!("{} decisions; {} lines could not be read", self.decisions, self.unread);
        if self.by_load > 0 {
            println!("{} more went by load, as under every policy, and are left out", self.by_load);
        }
        if self.refused > 0 {
            println!(
                "{} more were refused for their SLO, as under every policy, and are left out",
                self.refused
            );
        }
        let accuracy = self.replay.accuracy();
        for (name, errors) in [("first byte", &accuracy.first_byte_s), ("output", &accuracy.output_s)] {
            let [low, middle, high] = [0.1, 0.5, 0.9].map(|share| errors.quantile(share));
            println!(
                "{name}, predicted less realised, {} answers: median {middle:+.3} s, p10 {low:+.3}, p90 {high:+.3}",
                errors.count()
            );
        }
        println!(
            "\n{:<15} {:>9} {:>14} {:>14} {:>11} {:>13}",
            "", "different", "added s, mean", "regret s, mean", "regret, p99", "first byte s"
        );
        for replayed in self.replay.replayed() {
            println!(
                "{:<15} {:>9} {:>14.3} {:>14.3} {:>11.3} {:>13.3}",
                name(replayed),
                replayed.different,
                replayed.cost_s.mean(),
                replayed.regret_s.mean(),
                replayed.regret_s.quantile(0.99),
                replayed.first_byte_s.mean(),
            );
        }
    }

    fn results(&self) -> Results {
        let mut results = Results::new("route-replay");
        let mut row = |name: String, unit, value: f64| {
            results.rows.push(Row::of_runs(format!("replay.{name}"), unit, &[value]));
        };
        row("decisions".into(), "decisions", self.decisions as f64);
        row("unread".into(), "lines", self.unread as f64);
        let accuracy = self.replay.accuracy();
        let mut errors = |name: &str, errors: &Figures| {
            row(format!("{name}_error_p50"), "s", errors.quantile(0.5));
            row(format!("{name}_error_p90"), "s", errors.quantile(0.9));
        };
        errors("first_byte", &accuracy.first_byte_s);
        errors("output", &accuracy.output_s);
        for replayed in self.replay.replayed() {
            let name = name(replayed);
            row(format!("{name}.different"), "decisions", replayed.different as f64);
            row(format!("{name}.added_mean"), "s", replayed.cost_s.mean());
            row(format!("{name}.regret_mean"), "s", replayed.regret_s.mean());
            row(format!("{name}.regret_p99"), "s", replayed.regret_s.quantile(0.99));
            row(format!("{name}.first_byte_mean"), "s", replayed.first_byte_s.mean());
        }
        results
    }
}

fn name(replayed: &Replayed) -> &'static str {
    replayed.policy.map_or("as-logged", Policy::name)
}
