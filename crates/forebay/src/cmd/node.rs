//! `forebay node`: run the daemon of a host. It turns a file into a configuration and signals into the node's end; what a
//! node does is `forebay-node`'s.

use forebay_node::{Node, NodeConfig};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::path::PathBuf;
use std::time::Duration;
use tokio::signal::unix::{Signal, SignalKind, signal};

/// Arguments of `forebay node`.
#[derive(clap::Args)]
pub struct Args {
    /// What the node is told, in TOML
    #[arg(long, value_name = "FILE")]
    config: PathBuf,
    /// Print the effective configuration and exit, with an error if it is not allowed
    #[arg(long)]
    check_config: bool,
}

/// Runs the command.
pub fn run(args: Args) -> crate::CommandResult {
    let config = NodeConfig::read(&args.config)?;
    if args.check_config {
        print!("{}", config.to_toml());
        return Ok(());
    }
    let node = Node::start(&config)?;
    let peers = node.peer_address().map_or(String::new(), |address| format!(", peers at {address}"));
    let relays = node.relays_stat().map_or(String::new(), |stat| format!(", {} GPUs relay", stat.gpus));
    println!("forebay node: {} bytes behind {}{peers}{relays}", config.memory.size, config.socket.display());
    tell_systemd("READY=1");
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(serve(node, Duration::from_secs(config.limits.drain_s)))
}

/// Serves until a signal, then ends in order. A second signal ends it at once.
async fn serve(node: Node, limit: Duration) -> crate::CommandResult {
    let (mut terminate, mut interrupt) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
    either(&mut terminate, &mut interrupt).await;
    tell_systemd("STOPPING=1");
    println!("forebay node: ending; what is leased may be read for {} s", limit.as_secs());
    let drain = tokio::task::spawn_blocking(move || node.drain(limit));
    tokio::select! {
        drained = drain => {
            let cut_off = drained??.cut_off;
            println!("forebay node: ended, {cut_off} leases and slots cut off");
            Ok(())
        }
        () = either(&mut terminate, &mut interrupt) => std::process::exit(1),
    }
}

async fn either(terminate: &mut Signal, interrupt: &mut Signal) {
    tokio::select! {
        _ = terminate.recv() => {}
        _ = interrupt.recv() => {}
    }
}

/// Tells systemd, if it started this. Nobody else is told, and nothing depends on it.
fn tell_systemd(state: &str) {
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
