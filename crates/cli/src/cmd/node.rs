//! `forebay node`: run the daemon of a host. It turns a file or options into a configuration, and
//! signals into the node's end; what a node does is `forebay-node`'s.

use super::node_socket;
use super::signals::Signals;
use super::values::size;
use clap::ArgGroup;
use forebay_node::{DrainError, HandedOver, Node, NodeConfig, SsdConfig, Successor};
use forebay_results::output::{CommandResult, Error};
use std::fmt::Arguments;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::path::PathBuf;
use std::time::Duration;

/// The name of a log in a directory that was given for it.
const LOG: &str = "forebay.log";
/// How long a hand-over may take beside the end of a node: until another one is ready, or this one
/// has gone on.
const HAND_OVER_LIMIT: Duration = Duration::from_secs(90);

/// Arguments of `forebay node`.
#[derive(clap::Args)]
#[command(group(ArgGroup::new("from").required(true).args(["config", "memory"])))]
pub struct Args {
    /// Configuration of the node, in TOML
    #[arg(long, value_name = "FILE", conflicts_with_all = ["socket", "ssd"])]
    config: Option<PathBuf>,
    /// Without a file: memory for KV, such as 8GiB
    #[arg(long, value_name = "SIZE", value_parser = size::<u64>)]
    memory: Option<u64>,
    /// With --memory: where clients connect [default: /run/forebay/node.sock for root; for other
    /// users forebay/node.sock in XDG_RUNTIME_DIR, or else /tmp/forebay-UID/node.sock]
    #[arg(long, value_name = "PATH")]
    socket: Option<PathBuf>,
    /// With --memory: a log on an SSD, and the length with which it is made if it is missing, such
    /// as /mnt/nvme0:500GiB; of a directory, forebay.log in it. Repeat for each
    #[arg(long, value_name = "FILE_OR_DIR:SIZE", value_parser = ssd)]
    ssd: Vec<SsdConfig>,
    /// Take over the memory, with all that is in it, from the node that has the socket, and end
    /// that one. Where no node has it, start as usual
    #[arg(long)]
    take_over: bool,
    /// Check all that a start checks, print the configuration that would be in effect, with every
    /// default, and exit
    #[arg(long)]
    check_config: bool,
}

/// Runs the command.
pub fn run(args: Args) -> CommandResult {
    let config = args.config()?;
    if args.check_config {
        Node::check(&config)?;
        print!("{}", config.effective().to_toml());
        return Ok(());
    }
    let node = if args.take_over { Node::take_over(&config)? } else { Node::start(&config)? };
    let peers = node.peer_address().map_or(String::new(), |address| format!(", peers at {address}"));
    let relays = node.relays_stat().map_or(String::new(), |stat| format!(", {} GPUs relay", stat.gpus));
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let signals = runtime.block_on(async { Signals::listen() })?;
    say(format_args!("{} bytes behind {}{peers}{relays}", config.memory.size, config.socket.display()));
    notify_systemd("READY=1");
    runtime.block_on(serve(node, &config, signals))
}

impl Args {
    /// What the node is told: by a file, or by options.
    fn config(&self) -> Result<NodeConfig, Error> {
        let Some(memory) = self.memory else {
            let file = self.config.as_deref().ok_or("neither --config nor --memory was given")?;
            return Ok(NodeConfig::read(file)?);
        };
        let socket = match &self.socket {
            Some(socket) => socket.clone(),
            None => node_socket::of_user()?,
        };
        let mut config = NodeConfig::new(socket, memory);
        config.ssd.clone_from(&self.ssd);
        config.check()?;
        Ok(config)
    }
}

/// Reads `FILE_OR_DIR:SIZE`.
fn ssd(text: &str) -> Result<SsdConfig, String> {
    let parts = text.rsplit_once(':').filter(|(path, _)| !path.is_empty());
    let (path, length) =
        parts.ok_or_else(|| format!("'{text}' is not FILE_OR_DIR:SIZE, such as /mnt/nvme0:500GiB"))?;
    let path = PathBuf::from(path);
    let path = if path.is_dir() { path.join(LOG) } else { path };
    Ok(SsdConfig { path, size: size(length)?, segment_size: 0, create: true })
}

/// Says something to whoever reads.
fn say(line: Arguments<'_>) {
    println!("forebay node: {line}");
}

/// Serves until a signal, or until another node has its memory.
async fn serve(mut node: Node, config: &NodeConfig, mut signals: Signals) -> CommandResult {
    let (sender, mut successors) = tokio::sync::mpsc::channel(1);
    loop {
        let sender = sender.clone();
        // One beyond the first sees that its connection ends.
        node.on_successor(config, move |successor| drop(sender.try_send(successor)));
        let successor = tokio::select! {
            () = signals.next() => break end(node, config, signals).await,
            successor = successors.recv() => successor,
        };
        let Some(successor) = successor else { continue };
        match hand_over(node, config, successor).await? {
            HandedOver::Back(back) => node = *back,
            HandedOver::Gone { chunks, took } => {
                say(format_args!(
                    "another node has {chunks} chunks of this one, after {} ms",
                    took.as_millis()
                ));
                return Ok(());
            }
        }
    }
}

/// Hands the memory over, within the limit of an end and that of a start.
async fn hand_over(node: Node, config: &NodeConfig, successor: Successor) -> Result<HandedOver, Error> {
    let limit = node.end_limit(HAND_OVER_LIMIT);
    let config = config.clone();
    let handed_over = tokio::task::spawn_blocking(move || node.hand_over(&config, successor));
    match tokio::time::timeout(limit, handed_over).await {
        Ok(handed_over) => Ok(handed_over??),
        // The thread may never end.
        Err(_) => {
            eprintln!("{}", DrainError::Late { limit });
            std::process::exit(1)
        }
    }
}

/// Ends in order. A second signal ends it at once, and so does its limit.
async fn end(node: Node, config: &NodeConfig, mut signals: Signals) -> CommandResult {
    let limit = Duration::from_secs(config.limits.drain_s);
    notify_systemd("STOPPING=1");
    say(format_args!("ending; what is leased may be read for {} s", limit.as_secs()));
    let whole = node.end_limit(limit);
    let (sender, ended) = tokio::sync::oneshot::channel();
    // Whoever waited may have gone on.
    node.end(limit, move |result| drop(sender.send(result)));
    tokio::select! {
        ended = tokio::time::timeout(whole, ended) => {
            let ended = ended.map_err(|_| DrainError::Late { limit: whole })?;
            let cut_off = ended.map_err(|_| DrainError::Gone)??.cut_off;
            say(format_args!("ended, {cut_off} leases and slots cut off"));
            Ok(())
        }
        () = signals.next() => std::process::exit(1),
    }
}

/// Tells systemd, if it started this. Nobody else is told, and nothing depends on it.
fn notify_systemd(state: &str) {
    let Some(path) = std::env::var_os("NOTIFY_SOCKET") else { return };
    let address = match path.as_encoded_bytes().strip_prefix(b"@") {
        Some(name) => SocketAddr::from_abstract_name(name),
        None => SocketAddr::from_pathname(&path),
    };
    if let (Ok(socket), Ok(address)) = (UnixDatagram::unbound(), address) {
        // A supervisor that does not listen does not matter.
        let _ = socket.send_to_addr(state.as_bytes(), &address);
    }
}
