//! `forebay preflight net`: whether KV can move between this host and others, before anything
//! depends on it. This file knows the arguments and the order: check, print, pause, go on.
//!
//! | file | what |
//! |---|---|
//! | `finding`, `report` | a result, and all of a run as a table, JSON and metrics |
//! | `checks/` | what is looked at, and pure judgements over it |
//! | `checker`, `look` | one run; everything that is asked of one peer |
//! | `peers`, `way` | who the peers are; how the kernel reaches an address |
//! | `line`, `questions`, `responder` | preflights of two hosts with each other |
//! | `measure/` | one pair, all pairs in rounds, a baseline |
//! | `pause` | waiting for somebody who says that it may go on |

mod checker;
mod checks;
mod finding;
mod line;
mod look;
mod measure;
mod pause;
mod peers;
mod questions;
mod report;
mod responder;
mod way;

use crate::cmd::findings::exit_code;
use crate::cmd::values::{seconds, seconds_or_none};
use checker::Checker;
use checks::route::Listening;
use checks::versions::Versions;
use forebay_cuda::preflight::Severity;
use forebay_cuda::topology::Root;
use forebay_node::NodeConfig;
use forebay_node::directory::node_of_name;
use forebay_results::output::Error;
use line::Credentials;
use look::Here;
use peers::{HostPort, Listed, Own};
use report::Report;
use responder::{Host, Responder};
use std::ffi::OsString;
use std::net::SocketAddr;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Command, ExitCode};
use std::time::Duration;

/// llm-d's variable: with `pause` a pod waits before its engine starts. And the one with the
/// engine's port, which is where llm-d expects the one that waits.
const LLMD: &str = "LLMD_PREFLIGHT_CHECKS";
const LLMD_PORT: &str = "VLLM_INFERENCE_PORT";
const LLMD_PORT_USUAL: u16 = 8000;

/// Arguments of the command.
#[derive(clap::Args)]
pub struct Args {
    /// Configuration of the node: its peers, token, TLS and what it needs of this host
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// A peer; may be given several times
    #[arg(long = "peer", value_name = "HOST:PORT")]
    peer: Vec<HostPort>,
    /// A list of nodes, as `directory.file` of the configuration is one
    #[arg(long, value_name = "FILE")]
    peers: Option<PathBuf>,
    /// An address where ZeroMQ has to answer, such as that of an engine's KV events; may be given
    /// several times
    #[arg(long, value_name = "HOST:PORT")]
    zmq: Vec<HostPort>,
    /// Measure how fast all pairs of hosts are where a preflight answers; give it on one host
    #[arg(long)]
    measure: bool,
    /// Compare what is measured with this file; it is written if it is not there
    #[arg(long, value_name = "FILE", requires = "measure")]
    baseline: Option<PathBuf>,
    /// Where other preflights connect while this one pauses or waits [default: the
    /// configuration's peers.listen]
    #[arg(long, value_name = "ADDRESS:PORT")]
    listen: Option<SocketAddr>,
    /// Wait so many seconds for peers that do not answer yet
    #[arg(long, value_name = "SECONDS", value_parser = seconds_or_none, default_value = "0")]
    wait: Duration,
    /// Then wait for POST /exit at this address; POST /run checks again, with ?measure measures
    /// too, GET /status tells
    #[arg(long, value_name = "ADDRESS:PORT")]
    pause: Option<SocketAddr>,
    /// Go on by itself after so many seconds of pause
    #[arg(long, value_name = "SECONDS", value_parser = seconds, default_value = "1800")]
    pause_limit: Duration,
    /// Do not run the command behind `--` after faults
    #[arg(long, requires = "command")]
    gate: bool,
    /// Write everything that was found to a file as JSON too
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Write metrics to a file too, as Prometheus' textfile collector reads them
    #[arg(long, value_name = "FILE.prom")]
    metrics: Option<PathBuf>,
    /// Tell peers another time, by so many milliseconds
    #[arg(long, hide = true, allow_hyphen_values = true, default_value_t = 0)]
    clock_offset_ms: i64,
    /// A command that this process becomes in the end
    #[arg(last = true, value_name = "COMMAND")]
    command: Vec<OsString>,
}

/// Runs the command. The exit code is the worst finding's, unless this process becomes another.
pub fn run(args: Args) -> Result<ExitCode, Error> {
    let pause = args.pause_address()?;
    let checker = args.checker()?;
    let responder = match pause.is_some() || !args.wait.is_zero() {
        true => args.responder(&checker)?,
        false => None,
    };
    let mut report = checker.run(args.measure)?;
    report.print();
    args.write(&report)?;
    if let Some(address) = pause {
        let again = |measures| {
            let report = checker.run(measures || args.measure)?;
            args.write(&report)?;
            Ok(report)
        };
        report = pause::until_told(address, args.pause_limit, report, &again)?;
    }
    // Its port is the node's from now on.
    drop(responder);
    args.go_on(&report)
}

impl Args {
    /// Where to pause, if at all.
    fn pause_address(&self) -> Result<Option<SocketAddr>, Error> {
        let told = std::env::var(LLMD).is_ok_and(|value| value.trim().eq_ignore_ascii_case("pause"));
        if self.pause.is_some() || !told {
            return Ok(self.pause);
        }
        let port = match std::env::var(LLMD_PORT) {
            Ok(text) => text.parse().map_err(|_| format!("{LLMD_PORT} is '{text}'; allowed is a port"))?,
            Err(_) => LLMD_PORT_USUAL,
        };
        Ok(Some(([0, 0, 0, 0], port).into()))
    }

    fn checker(&self) -> Result<Checker, Error> {
        let root = Root::default();
        let config = self.config.as_deref().map(NodeConfig::read).transpose()?;
        let peers = config.as_ref().and_then(|config| config.peers.as_ref());
        let listen = self.listen.or(peers.map(|peers| peers.listen));
        let advertised = peers.map(|peers| peers.advertised());
        let node = config.as_ref().map_or([0; 16], |config| node_of_name(&config.name));
        let own = Own {
            at: advertised.into_iter().chain(listen).collect(),
            addresses: way::local_addresses()
                .map_err(|error| format!("the addresses of this host: {error}"))?,
        };
        let listens_at =
            own.addresses.iter().find(|local| listen.is_some_and(|listen| listen.ip() == local.address));
        let listens_at = listens_at.map(|local| Listening::new(local.address, &local.device, &root));
        let here = Here {
            credentials: Credentials::new(node, peers)?,
            versions: Versions::here(config.as_ref()),
            listens_at,
            root,
        };
        Ok(Checker {
            listed: Listed::read(config.as_ref(), self.peers.as_ref(), &self.peer)?,
            here,
            own,
            config,
            zmq: self.zmq.clone(),
            wait: self.wait,
            baseline: self.baseline.clone(),
        })
    }

    /// What answers other preflights. A node that has the port already answers what it can.
    fn responder(&self, checker: &Checker) -> Result<Option<Responder>, Error> {
        let of_config = || Some(checker.config.as_ref()?.peers.as_ref()?.listen);
        let Some(listen) = self.listen.or_else(of_config) else {
            println!("no other preflight can ask this one: give --listen, or a --config with [peers]");
            return Ok(None);
        };
        let host = Host {
            root: checker.here.root.clone(),
            credentials: checker.here.credentials.clone(),
            versions: checker.here.versions.clone(),
            peers: checker.peers().0.into_iter().map(|peer| peer.address).collect(),
            clock_offset_us: self.clock_offset_ms.saturating_mul(1000),
        };
        match Responder::start(listen, host) {
            Ok(responder) => {
                let token = if checker.here.credentials.token.is_empty() { ", without a token" } else { "" };
                println!("other preflights can ask this one at {}{token}", responder.address());
                Ok(Some(responder))
            }
            Err(error) if error.kind() == std::io::ErrorKind::AddrInUse => {
                println!(
                    "another process has {listen}: other preflights ask that, which a node answers in part"
                );
                Ok(None)
            }
            Err(error) => Err(format!("listen on {listen}: {error}").into()),
        }
    }

    fn write(&self, report: &Report) -> Result<(), Error> {
        self.json.as_deref().map_or(Ok(()), |file| report.write_json(file))?;
        self.metrics.as_deref().map_or(Ok(()), |file| report.write_metrics(file))
    }

    /// Becomes the command, unless it is held back.
    fn go_on(&self, report: &Report) -> Result<ExitCode, Error> {
        let Some((program, arguments)) = self.command.split_first() else {
            return Ok(exit_code(report.severity));
        };
        if self.gate && report.severity == Severity::Fault {
            eprintln!("forebay: {} is not run, because of the faults", program.display());
            return Ok(exit_code(report.severity));
        }
        let error = Command::new(program).args(arguments).exec();
        Err(format!("{}: {error}", program.display()).into())
    }
}
