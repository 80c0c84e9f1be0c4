//! `forebay route`: route requests to engines. It turns arguments into a router's configuration;
//! routing itself is `forebay-router`'s.

use super::routing::RoutingArgs;
use super::signals::Signals;
use super::values::seconds;
use forebay_results::output::CommandResult;
use forebay_router::{Limits, RequestLogPlace, Router, RouterConfig};
use std::net::SocketAddr;
use std::time::Duration;

/// Arguments of `forebay route`.
#[derive(clap::Args)]
pub struct Args {
    /// Address to listen on
    #[arg(long, value_name = "HOST:PORT", default_value = "127.0.0.1:8080")]
    listen: SocketAddr,
    #[command(flatten)]
    routing: RoutingArgs,
    /// Make hints about KV of the headers x-kv-tenant, x-kv-share-tokens, x-kv-pin-ms and
    /// x-kv-back-in-ms, and take those out that clients put into bodies
    #[arg(long)]
    kv_hints_from_headers: bool,
    /// Longest time from sending a request to the first byte of a streamed answer; after that one
    /// other engine is tried
    #[arg(long, value_name = "SECONDS", value_parser = seconds, default_value = "120")]
    first_byte_timeout: Duration,
    /// Longest time for an answer that is not streamed and comes when all of it is computed; after
    /// that the client gets 504
    #[arg(long, value_name = "SECONDS", value_parser = seconds, default_value = "1800")]
    answer_timeout: Duration,
    /// Longest time between two pieces of an answer; after that the client is told and disconnected
    #[arg(long, value_name = "SECONDS", value_parser = seconds, default_value = "60")]
    progress_timeout: Duration,
    /// Most engines tried for one request; two of them at most receive it
    #[arg(long, value_name = "COUNT", default_value_t = Limits::default().attempts)]
    attempts: u32,
    /// Longest time that a connection to an engine is kept idle for the next request; it must be
    /// shorter than the engines keep theirs
    #[arg(long, value_name = "SECONDS", value_parser = seconds, default_value = "4")]
    keep_idle: Duration,
    /// Write a JSON line for each request to this file, or to stderr with '-'
    #[arg(long, value_name = "FILE", value_parser = request_log)]
    request_log: Option<RequestLogPlace>,
}

pub fn run(args: Args) -> CommandResult {
    let policy = args.routing.policy;
    let config = args.routing.into_config(args.listen)?;
    let limits = Limits {
        first_byte: args.first_byte_timeout,
        answer: args.answer_timeout,
        progress: args.progress_timeout,
        attempts: args.attempts,
        keep_idle: args.keep_idle,
        ..config.limits
    };
    let hints_from_headers = args.kv_hints_from_headers;
    let config = RouterConfig { request_log: args.request_log, limits, hints_from_headers, ..config };
    let backends = config.backends.len();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let router = Router::spawn(config)?;
    runtime.block_on(async {
        let mut signals = Signals::listen()?;
        println!("forebay route: http://{} to {backends} engine(s), policy {policy}", router.addr());
        signals.next().await;
        router.shutdown_or_hurry(signals.next()).await;
        Ok(())
    })
}

fn request_log(text: &str) -> Result<RequestLogPlace, String> {
    Ok(if text == "-" { RequestLogPlace::Stderr } else { RequestLogPlace::File(text.into()) })
}
