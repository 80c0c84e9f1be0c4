//! `forebay route`: route requests to engines. It turns arguments into a router's configuration; routing itself is
//! `forebay-router`'s.

use super::signals::Signals;
use forebay_router::{Backend, Limits, Policy, RequestLogPlace, Router, RouterConfig};
use std::net::SocketAddr;
use std::time::Duration;

/// Arguments of `forebay route`.
#[derive(clap::Args)]
pub struct Args {
    /// Address to listen on
    #[arg(long, value_name = "HOST:PORT", default_value = "127.0.0.1:8080")]
    listen: SocketAddr,
    /// An engine with an OpenAI API; repeat for each
    #[arg(long, value_name = "NAME=URL", required = true, value_parser = backend)]
    backend: Vec<Backend>,
    /// How to choose: round-robin, least-loaded, session-sticky, linear, lmetric or lpwl
    #[arg(long, default_value_t = Policy::Lpwl)]
    policy: Policy,
    /// Threads that serve connections [default: half the CPUs, 1 to 8]
    #[arg(long)]
    threads: Option<usize>,
    /// For connecting to an engine
    #[arg(long, value_name = "SECONDS", value_parser = seconds, default_value = "1")]
    connect_timeout: Duration,
    /// From sending a request to the first byte of its answer; then another engine is tried
    #[arg(long, value_name = "SECONDS", value_parser = seconds, default_value = "120")]
    first_byte_timeout: Duration,
    /// Between two pieces of an answer; then the client is told and disconnected
    #[arg(long, value_name = "SECONDS", value_parser = seconds, default_value = "60")]
    progress_timeout: Duration,
    /// For a client to send a body, or to take bytes that wait for it
    #[arg(long, value_name = "SECONDS", value_parser = seconds, default_value = "60")]
    client_timeout: Duration,
    /// Engines tried for one request
    #[arg(long, default_value_t = Limits::default().attempts)]
    attempts: u32,
    /// Longest body, such as 4MiB or 200000
    #[arg(long, value_name = "SIZE", value_parser = size, default_value = "16MiB")]
    max_body: usize,
    /// Requests under way at once; more are refused
    #[arg(long, default_value_t = Limits::default().max_in_flight)]
    max_in_flight: usize,
    /// Send requests for models that no engine lists to any engine, instead of answering 404
    #[arg(long)]
    any_model: bool,
    /// Write a JSON line for each request to this file, or to stderr with '-'
    #[arg(long, value_name = "FILE", value_parser = request_log)]
    request_log: Option<RequestLogPlace>,
}

/// Runs the command.
pub fn run(args: Args) -> crate::CommandResult {
    let mut config = RouterConfig::new(args.listen, args.backend, args.policy);
    config.threads = args.threads.unwrap_or(config.threads);
    config.any_model = args.any_model;
    config.request_log = args.request_log;
    config.limits = Limits {
        connect: args.connect_timeout,
        first_byte: args.first_byte_timeout,
        progress: args.progress_timeout,
        client_stall: args.client_timeout,
        attempts: args.attempts,
        max_body_bytes: args.max_body,
        max_in_flight: args.max_in_flight,
        ..Limits::default()
    };
    let backends = config.backends.len();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let router = Router::spawn(config)?;
    runtime.block_on(async {
        let mut signals = Signals::listen()?;
        println!("forebay route: http://{} to {backends} engine(s), policy {}", router.addr(), args.policy);
        signals.next().await;
        router.shutdown().await;
        Ok(())
    })
}

fn backend(text: &str) -> Result<Backend, String> {
    let (name, url) = text.split_once('=').ok_or_else(|| format!("'{text}' is not of the form NAME=URL"))?;
    Ok(Backend { name: name.to_owned(), url: url.to_owned() })
}

fn request_log(text: &str) -> Result<RequestLogPlace, String> {
    Ok(if text == "-" { RequestLogPlace::Stderr } else { RequestLogPlace::File(text.into()) })
}

fn seconds(text: &str) -> Result<Duration, String> {
    let number: f64 = text.parse().map_err(|_| format!("'{text}' is not a number of seconds"))?;
    if number > 0.0 { Duration::try_from_secs_f64(number).ok() } else { None }
        .ok_or_else(|| format!("{text} s is not allowed: above 0"))
}

pub fn size(text: &str) -> Result<usize, String> {
    let digits = text.trim_end_matches(|letter: char| letter.is_ascii_alphabetic());
    let unit: usize = match &text[digits.len()..] {
        "" | "B" => 1,
        "KiB" => 1 << 10,
        "MiB" => 1 << 20,
        "GiB" => 1 << 30,
        unit => return Err(format!("'{unit}' in '{text}' is none of B, KiB, MiB, GiB")),
    };
    let number: usize =
        digits.parse().map_err(|_| format!("'{digits}' in '{text}' is not a whole number"))?;
    number.checked_mul(unit).filter(|&bytes| bytes > 0).ok_or_else(|| format!("{text} is not allowed"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_and_seconds_are_read_or_refused_with_their_text() {
        assert_eq!((size("4MiB"), size("200000")), (Ok(4 << 20), Ok(200_000)));
        assert_eq!(size("4MB").unwrap_err(), "'MB' in '4MB' is none of B, KiB, MiB, GiB");
        assert_eq!(size("x").unwrap_err(), "'x' in 'x' is none of B, KiB, MiB, GiB");
        assert_eq!(size("0").unwrap_err(), "0 is not allowed");
        assert_eq!(seconds("0.5"), Ok(Duration::from_millis(500)));
        for bad in ["0", "-1", "NaN", "1e300"] {
            assert!(seconds(bad).unwrap_err().contains("not allowed"), "{bad}");
        }
        assert!(backend("a").unwrap_err().contains("NAME=URL"));
    }
}
