//! The one binary, `forebay`: it parses the command line and hands over to one module per command.
//! It knows the commands and how errors are shown; what a command does lives in its module and,
//! below that, in the crates.

#[macro_use]
extern crate forebay_results;

mod cmd;
mod decisions;
mod demo;
mod metrics_page;

use clap::{Parser, Subcommand};
use forebay_client::log::{self, Format, LevelFilter};
use forebay_results::output;
use std::process::ExitCode;

#[derive(Parser)]
#[command(
    name = "forebay",
    version,
    about = "Moves KV cache over every path and sends requests to where it is"
)]
struct Cli {
    /// End when the process with this id, which started this one, ends
    #[arg(long, global = true, hide = true, value_name = "PID")]
    end_with: Option<i32>,
    /// How log lines are written to stderr: text, or json with one object a line
    #[arg(long, global = true, value_name = "FORMAT", default_value = "text")]
    log_format: Format,
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Measure a running engine and write a profile of it, for the router and emulated engines
    Calibrate(cmd::calibrate::Args),
    /// Replay a trace through a router and emulated engines, once per routing policy, and report
    Demo(demo::Args),
    /// Say what is wrong with this installation, and what to do about it
    Doctor(cmd::doctor::Args),
    /// Run an emulated inference engine with an OpenAI API
    Engine(cmd::engine::Args),
    /// Pick an engine for each request that Envoy carries, as its ext_proc server
    Epp(Box<cmd::epp::Args>),
    /// Say why a prompt was no hit
    Explain(cmd::explain::Args),
    /// Keep, fetch, send away or forget single chunks of KV, or say where they are
    Kv(cmd::kv::Args),
    /// Run the daemon of a host, which keeps KV for its engines
    Node(cmd::node::Args),
    /// Check whether this host is fit for fast copies, and say what to do where it is not
    Preflight(cmd::preflight::Args),
    /// Say what was not computed, against the price of memory and SSDs
    Report(Box<cmd::report::Args>),
    /// Route OpenAI requests to engines, aware of their caches and load
    Route(Box<cmd::route::Args>),
    /// Decide again what a decision log of the router holds, by other policies
    RouteReplay(cmd::route_replay::Args),
    /// Run a program so that its large CUDA copies use every path
    Run(cmd::run::Args),
    /// Run a trace through simulated engines on a virtual clock, once per routing policy
    Simulate(cmd::simulate::Args),
    /// Make, look at, check and empty logs of the SSD tier
    Store(cmd::store::Args),
    /// Show live what nodes, routers and engines do
    Top(cmd::top::Args),
    /// Inspect, sample, generate and replay request traces
    Trace(cmd::trace::Args),
    /// Damage stores of KV, check that nothing wrong comes back, and compare the stores
    Torture(cmd::torture::Args),
    /// Run vLLM with the connector, and a node beside it
    Vllm(cmd::vllm::Args),
    /// Measure one part of the system against its ceiling
    #[cfg(feature = "bench")]
    Bench(forebay_bench::Args),
}

impl Command {
    /// The log lines that are shown if FOREBAY_LOG says nothing: a service tells what it does, any
    /// other command what goes wrong.
    fn usual_level(&self) -> LevelFilter {
        match self {
            Command::Engine(_) | Command::Epp(_) | Command::Node(_) | Command::Route(_) => LevelFilter::INFO,
            _ => LevelFilter::WARN,
        }
    }
}

fn main() -> ExitCode {
    let Cli { end_with, log_format, command } = Cli::parse();
    if let Some(parent) = end_with {
        end_with_parent(parent);
    }
    if let Err(error) = log::start(command.usual_level(), log_format) {
        eprintln!("forebay: {error}");
        return ExitCode::FAILURE;
    }
    let done = |()| ExitCode::SUCCESS;
    let outcome = match command {
        Command::Calibrate(args) => cmd::calibrate::run(args).map(done),
        Command::Demo(args) => demo::run(args).map(done),
        Command::Doctor(args) => cmd::doctor::run(args),
        Command::Engine(args) => cmd::engine::run(args).map(done),
        Command::Epp(args) => cmd::epp::run(*args).map(done),
        Command::Explain(args) => cmd::explain::run(args).map(done),
        Command::Kv(args) => cmd::kv::run(args).map(done),
        Command::Node(args) => cmd::node::run(args).map(done),
        Command::Preflight(args) => cmd::preflight::run(args),
        Command::Report(args) => cmd::report::run(*args).map(done),
        Command::Route(args) => cmd::route::run(*args).map(done),
        Command::RouteReplay(args) => cmd::route_replay::run(args).map(done),
        Command::Run(args) => cmd::run::run(args).map(done),
        Command::Simulate(args) => cmd::simulate::run(args).map(done),
        Command::Store(args) => cmd::store::run(args).map(done),
        Command::Top(args) => cmd::top::run(args).map(done),
        Command::Trace(args) => cmd::trace::run(args).map(done),
        Command::Torture(args) => cmd::torture::run(args).map(done),
        Command::Vllm(args) => cmd::vllm::run(args).map(done),
        #[cfg(feature = "bench")]
        Command::Bench(args) => forebay_bench::run(args).map(done),
    };
    match outcome {
        Ok(code) => match output::finish() {
            Ok(()) => code,
            Err(error) => {
                eprintln!("forebay: writing to stdout: {error}");
                ExitCode::FAILURE
            }
        },
        Err(error) => {
            eprintln!("forebay: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Lets the system kill this process when its parent, whose id is `parent`, ends, however that
/// ends.
fn end_with_parent(parent: i32) {
    use rustix::process::{Signal, getppid, set_parent_process_death_signal};
    let told = set_parent_process_death_signal(Some(Signal::KILL));
    // It may have ended already.
    if told.is_err() || getppid().is_none_or(|now| now.as_raw_nonzero().get() != parent) {
        std::process::exit(1);
    }
}
