//! `forebay node`: run the daemon of a host. It turns a file into a configuration and signals into
//! the node's end; what a node does is `forebay-node`'s.

use super::signals::Signals;
use forebay_node::{DrainError, Node, NodeConfig};
use forebay_results::output::CommandResult;
use std::fmt::Arguments;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::path::PathBuf;
use std::time::Duration;

/// Arguments of `forebay node`.
#[derive(clap::Args)]
pub struct Args {
    /// Configuration of the node, in TOML
    #[arg(long, value_name = "FILE")]
    config: PathBuf,
    /// Check all that a start checks, print the configuration that would be in effect, with every
    /// default, and exit
    #[arg(long)]
    check_config: bool,
}

/// Runs the command.
pub fn run(args: Args) -> CommandResult {
    let config = NodeConfig::read(&args.config)?;
    if args.check_config {
        Node::check(&config)?;
        print!("{}", config.effective().to_toml());
        return Ok(());
    }
    let node = Node::start(&config)?;
    let peers = node.peer_address().map_or(String::new(), |address| format!(", peers at {address}"));
    let relays = node.relays_stat().map_or(String::new(), |stat| format!(", {} GPUs relay", stat.gpus));
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let signals = runtime.block_on(async { Signals::listen() })?;
    say(format_args!("{} bytes behind {}{peers}{relays}", config.memory.size, config.socket.display()));
    notify_systemd("READY=1");
    runtime.block_on(serve(node, signals, Duration::from_secs(config.limits.drain_s)))
}

/// Says something to whoever reads.
fn say(line: Arguments<'_>) {
    println!("forebay node: {line}");
}

/// Serves until a signal, then ends in order. A second signal ends it at once, and so does its
/// limit.
async fn serve(node: Node, mut signals: Signals, limit: Duration) -> CommandResult {
    signals.next().await;
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
