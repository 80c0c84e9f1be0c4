//! `forebay epp`: pick an engine for each request that Envoy carries. It turns arguments into an
//! endpoint picker's configuration; picking is `forebay-router`'s.

use super::routing::RoutingArgs;
use super::signals::Signals;
use forebay_results::output::CommandResult;
use forebay_router::{Epp, EppConfig};
use std::net::SocketAddr;

/// Arguments of `forebay epp`.
#[derive(clap::Args)]
pub struct Args {
    /// Address to listen on for Envoy, over gRPC without TLS
    #[arg(long, value_name = "HOST:PORT", default_value = "127.0.0.1:9002")]
    listen: SocketAddr,
    /// Address for health checks over gRPC, which are answered at --listen as well
    #[arg(long, value_name = "HOST:PORT", default_value = "127.0.0.1:9003")]
    health_listen: SocketAddr,
    /// Address for /metrics, /health, /debug/decisions and the admin API
    #[arg(long, value_name = "HOST:PORT", default_value = "127.0.0.1:9090")]
    metrics_listen: SocketAddr,
    #[command(flatten)]
    routing: RoutingArgs,
}

pub fn run(args: Args) -> CommandResult {
    let policy = args.routing.policy;
    let router = args.routing.into_config(args.listen)?;
    let backends = router.backends.len();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let epp = Epp::spawn(EppConfig { router, health: args.health_listen, pages: args.metrics_listen })?;
    runtime.block_on(async {
        let mut signals = Signals::listen()?;
        let (grpc, health, metrics) = (epp.addr(), epp.health_addr(), epp.pages_addr());
        println!("forebay epp: grpc://{grpc} picks of {backends} engine(s), policy {policy}");
        println!("forebay epp: health grpc://{health}, metrics http://{metrics}/metrics");
        signals.next().await;
        epp.shutdown_or_hurry(signals.next()).await;
        Ok(())
    })
}
