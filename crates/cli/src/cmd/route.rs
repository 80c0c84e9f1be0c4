//! `forebay route`: route requests to engines. It turns arguments into a router's configuration;
//! routing itself is `forebay-router`'s.

use super::signals::Signals;
use super::values::{seconds, seconds_or_none, size};
use forebay_results::output::CommandResult;
use forebay_router::elastic::KvNetwork;
use forebay_router::{
    AdminToken, Backend, DecisionLogPlace, EngineModel, EventAddress, EventAddressError, HandOverConfig,
    Limits, Policy, Protocol, RequestLogPlace, Router, RouterConfig,
};
use forebay_steps::{Launch, Profile};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Arguments of `forebay route`.
#[derive(clap::Args)]
pub struct Args {
    /// Address to listen on
    #[arg(long, value_name = "HOST:PORT", default_value = "127.0.0.1:8080")]
    listen: SocketAddr,
    /// An engine with an OpenAI API; repeat for each
    #[arg(long, value_name = "NAME=URL", value_parser = backend)]
    backend: Vec<Backend>,
    /// Engines behind a host name with several addresses, each of them an engine; the name is
    /// resolved every 5 s; repeat for each
    #[arg(long, value_name = "NAME=URL", value_parser = backend)]
    backend_dns: Vec<Backend>,
    /// A file that lists engines, read every second
    #[arg(long, value_name = "FILE")]
    backends_file: Option<PathBuf>,
    /// A file with the token of those who may add, drain and remove engines over HTTP; without it
    /// nobody may
    #[arg(long, value_name = "FILE")]
    admin_token_file: Option<PathBuf>,
    /// Where a data-parallel rank of an engine publishes KV events, and where missed ones can be asked
    /// for; repeat for each rank
    #[arg(long, value_name = "NAME=tcp://HOST:PORT[,replay=tcp://HOST:PORT]", value_parser = events)]
    backend_events: Vec<(String, EventAddress)>,
    /// Engines that share a store of KV, by their names: each can load what another one computed;
    /// repeat for each store
    #[arg(long, value_name = "NAME=ENGINE,ENGINE", value_parser = store)]
    store: Vec<Store>,
    /// How an engine is chosen: round-robin, least-loaded, session-sticky, linear, lmetric, lpwl,
    /// added-latency or elastic
    #[arg(long, default_value_t = Policy::Lpwl)]
    policy: Policy,
    /// For elastic: how engines hand prompts over to each other, forebay or nixl: by which connector
    #[arg(long, value_name = "CONNECTOR")]
    hand_over: Option<Protocol>,
    /// For elastic: rate between engines, in 10^9 bytes per second
    #[arg(long, value_name = "GB/S", default_value_t = 25.0)]
    network: f64,
    /// For added-latency and elastic, and for loads from stores: GPU and model that the engines are
    /// taken for, a shipped profile or a file as `forebay calibrate` writes it
    #[arg(long, value_name = "NAME_OR_FILE", default_value = Profile::DEFAULT)]
    profile: String,
    /// For engines with a store: microseconds that a token takes from there to the GPU [default: the
    /// profile's, from host memory]
    #[arg(long, value_name = "MICROSECONDS")]
    load_us_per_token: Option<f64>,
    /// For added-latency and elastic: tokens whose KV fits the GPU of an engine whose metrics do not
    /// say it [default: the profile's]
    #[arg(long, value_name = "TOKENS")]
    pool_tokens: Option<u64>,
    /// For added-latency and elastic: most requests that an engine computes at once [default: the profile's]
    #[arg(long, value_name = "REQUESTS")]
    max_num_seqs: Option<u32>,
    /// Threads that serve connections [default: half the CPUs, 1 to 8]
    #[arg(long, value_name = "COUNT")]
    threads: Option<usize>,
    /// Longest time for connecting to an engine
    #[arg(long, value_name = "SECONDS", value_parser = seconds, default_value = "1")]
    connect_timeout: Duration,
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
    /// Longest time in which a client sends its body, or takes bytes that wait for it
    #[arg(long, value_name = "SECONDS", value_parser = seconds, default_value = "60")]
    client_timeout: Duration,
    /// Most engines tried for one request; two of them at most receive it
    #[arg(long, value_name = "COUNT", default_value_t = Limits::default().attempts)]
    attempts: u32,
    /// Path that engines are probed at; an answer with a status below 500 means that the engine is
    /// well
    #[arg(long, value_name = "PATH", default_value = "/health")]
    probe_path: String,
    /// Time between two probes of an engine that answers them
    #[arg(long, value_name = "SECONDS", value_parser = seconds, default_value = "1")]
    probe_interval: Duration,
    /// Time between two probes of an engine that does not answer them
    #[arg(long, value_name = "SECONDS", value_parser = seconds, default_value = "0.25")]
    reprobe_interval: Duration,
    /// Longest time for the answer to a probe
    #[arg(long, value_name = "SECONDS", value_parser = seconds, default_value = "1")]
    probe_timeout: Duration,
    /// Time between two readings of an engine's own metrics
    #[arg(long, value_name = "SECONDS", value_parser = seconds, default_value = "1")]
    metrics_interval: Duration,
    /// Failures in a row, of probes or of requests, after which an engine gets no requests
    #[arg(long, value_name = "COUNT", default_value_t = Limits::default().eject_after)]
    eject_after: u32,
    /// Answered probes in a row after which such an engine gets requests again
    #[arg(long, value_name = "COUNT", default_value_t = Limits::default().readmit_after)]
    readmit_after: u32,
    /// Longest time that a connection to an engine is kept idle for the next request; it must be
    /// shorter than the engines keep theirs
    #[arg(long, value_name = "SECONDS", value_parser = seconds, default_value = "4")]
    keep_idle: Duration,
    /// How long requests are still accepted after SIGTERM, while /health answers 503
    #[arg(long, value_name = "SECONDS", value_parser = seconds_or_none, default_value = "5")]
    shutdown_delay: Duration,
    /// How long requests under way may then take; after that their streams end with an error
    #[arg(long, value_name = "SECONDS", value_parser = seconds_or_none, default_value = "20")]
    drain: Duration,
    /// Longest body of a request, such as 4MiB or 200000
    #[arg(long, value_name = "SIZE", value_parser = size::<usize>, default_value = "16MiB")]
    max_body: usize,
    /// Most requests under way at once; more are refused
    #[arg(long, value_name = "COUNT", default_value_t = Limits::default().max_in_flight)]
    max_in_flight: usize,
    /// Send requests for models that no engine lists to any engine, instead of answering 404
    #[arg(long)]
    any_model: bool,
    /// Write a JSON line for each request to this file, or to stderr with '-'
    #[arg(long, value_name = "FILE", value_parser = request_log)]
    request_log: Option<RequestLogPlace>,
    /// Write a JSON line for each decision to this file, for `forebay route-replay`
    #[arg(long, value_name = "FILE")]
    decision_log: Option<PathBuf>,
    /// What the decision log may take: when the file has half of it, it becomes FILE.1
    #[arg(long, value_name = "SIZE", value_parser = size::<u64>, default_value = "1GiB", requires = "decision_log")]
    decision_log_size: u64,
}

/// A store, and the names of the engines that share it.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Store {
    name: String,
    engines: Vec<String>,
}

/// Events of an engine that is not there.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("KV events: no engine is named '{0}'")]
struct UnknownPublisher(String);

/// A store that is not described in a way that makes sense.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
enum StoreError {
    #[error("store {store}: no engine is named '{engine}'")]
    UnknownEngine { store: String, engine: String },
    #[error("engine {engine} is in the stores {first} and {second}; one is allowed")]
    TwoStores { engine: String, first: String, second: String },
}

pub fn run(mut args: Args) -> CommandResult {
    share_stores(args.backend.iter_mut().chain(&mut args.backend_dns).collect(), &args.store)?;
    let backends = args.backend.iter_mut().chain(&mut args.backend_dns).collect();
    publish_events(backends, std::mem::take(&mut args.backend_events))?;
    // As vLLM launches its steps if it is told nothing.
    let profile = Profile::find(&args.profile)?;
    let mut engine_model = EngineModel::new(&profile, Launch::Graph);
    engine_model.load_us_per_token = args.load_us_per_token.unwrap_or(engine_model.load_us_per_token);
    engine_model.pool_tokens = args.pool_tokens.unwrap_or(engine_model.pool_tokens);
    engine_model.max_seqs = args.max_num_seqs.unwrap_or(engine_model.max_seqs);
    let mut config = RouterConfig::new(args.listen, args.backend, args.policy, engine_model);
    // An engine has a prompt's KV when all of it is computed.
    let network = KvNetwork { layers: 1, ..KvNetwork::new(&profile, args.network) };
    config.hand_over = args.hand_over.map(|protocol| HandOverConfig { protocol, network });
    config.dns_backends = args.backend_dns;
    config.backends_file = args.backends_file;
    config.admin_token = args.admin_token_file.as_deref().map(read_token).transpose()?;
    config.threads = args.threads.unwrap_or(config.threads);
    config.any_model = args.any_model;
    config.request_log = args.request_log;
    let bytes = args.decision_log_size;
    config.decision_log = args.decision_log.map(|path| DecisionLogPlace { path, bytes });
    config.limits = Limits {
        connect: args.connect_timeout,
        first_byte: args.first_byte_timeout,
        answer: args.answer_timeout,
        progress: args.progress_timeout,
        client_stall: args.client_timeout,
        attempts: args.attempts,
        probe_path: args.probe_path,
        probe_interval: args.probe_interval,
        reprobe_interval: args.reprobe_interval,
        probe_timeout: args.probe_timeout,
        metrics_interval: args.metrics_interval,
        eject_after: args.eject_after,
        readmit_after: args.readmit_after,
        keep_idle: args.keep_idle,
        shutdown_delay: args.shutdown_delay,
        drain: args.drain,
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
        router.shutdown_or_hurry(signals.next()).await;
        Ok(())
    })
}

fn backend(text: &str) -> Result<Backend, String> {
    let (name, url) = text.split_once('=').ok_or_else(|| format!("'{text}' is not of the form NAME=URL"))?;
    Ok(Backend::new(name, url))
}

fn store(text: &str) -> Result<Store, String> {
    let (name, engines) =
        text.split_once('=').ok_or_else(|| format!("'{text}' is not of the form NAME=ENGINE,ENGINE"))?;
    Ok(Store { name: name.to_owned(), engines: engines.split(',').map(str::to_owned).collect() })
}

/// Why a file is no token.
#[derive(Debug, thiserror::Error)]
enum TokenError {
    #[error("{path}: {error}")]
    Io { path: PathBuf, error: std::io::Error },
    #[error("{path}: the token has {bytes} bytes, 1 to {TOKEN_BYTES_MAX} are allowed")]
    Length { path: PathBuf, bytes: usize },
    #[error("{path}: the token has a byte that no header may have; printable ASCII is allowed")]
    Byte { path: PathBuf },
}

const TOKEN_BYTES_MAX: usize = 4096;

/// A token, without the end of the line that editors write behind it.
fn read_token(path: &Path) -> Result<AdminToken, TokenError> {
    let path = path.to_path_buf();
    let token = std::fs::read(&path).map_err(|error| TokenError::Io { path: path.clone(), error })?;
    let token = token.trim_ascii_end().to_vec();
    match token.len() {
        _ if token.iter().any(|byte| !(b' '..=b'~').contains(byte)) => Err(TokenError::Byte { path }),
        1..=TOKEN_BYTES_MAX => Ok(AdminToken::new(token)),
        bytes => Err(TokenError::Length { path, bytes }),
    }
}

/// Tells each engine which store it shares.
fn share_stores(mut backends: Vec<&mut Backend>, stores: &[Store]) -> Result<(), StoreError> {
    for (store, engine) in stores.iter().flat_map(|store| store.engines.iter().map(move |name| (store, name)))
    {
        let backend = backends.iter_mut().find(|backend| backend.name == *engine);
        let backend = backend
            .ok_or_else(|| StoreError::UnknownEngine { store: store.name.clone(), engine: engine.clone() })?;
        if let Some(first) = backend.store.replace(store.name.clone()) {
            let (engine, second) = (engine.clone(), store.name.clone());
            return Err(StoreError::TwoStores { engine, first, second });
        }
    }
    Ok(())
}

/// Tells each engine where its ranks publish, in the order in which they were given.
fn publish_events(
    mut backends: Vec<&mut Backend>,
    events: Vec<(String, EventAddress)>,
) -> Result<(), UnknownPublisher> {
    for (name, address) in events {
        let backend = backends.iter_mut().find(|backend| backend.name == name);
        backend.ok_or(UnknownPublisher(name))?.events.push(address);
    }
    Ok(())
}

fn events(text: &str) -> Result<(String, EventAddress), String> {
    let (name, address) =
        text.split_once('=').ok_or_else(|| format!("'{text}' is not of the form NAME=tcp://HOST:PORT"))?;
    Ok((name.to_owned(), address.parse().map_err(|error: EventAddressError| error.to_string())?))
}

fn request_log(text: &str) -> Result<RequestLogPlace, String> {
    Ok(if text == "-" { RequestLogPlace::Stderr } else { RequestLogPlace::File(text.into()) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn engines_are_told_their_store_and_mistakes_are_named() {
        let shared = |stores: &[&str]| {
            let mut backends = ["a", "b", "c"].map(|name| Backend::new(name, "http://h:1"));
            let stores: Vec<Store> = stores.iter().map(|text| store(text).unwrap()).collect();
            share_stores(backends.iter_mut().collect(), &stores).map_err(|error| error.to_string())?;
            Ok(backends.map(|backend| backend.store.unwrap_or_default()))
        };
        assert_eq!(shared(&["x=a,c"]), Ok(["x", "", "x"].map(str::to_owned)));
        assert_eq!(shared(&["x=a,d"]), Err("store x: no engine is named 'd'".to_owned()));
        let twice = "engine a is in the stores x and y; one is allowed".to_owned();
        assert_eq!(shared(&["x=a", "y=a"]), Err(twice));
        assert!(store("x").unwrap_err().contains("NAME=ENGINE,ENGINE"));
    }

    #[test]
    fn engines_are_told_where_their_ranks_publish_and_mistakes_are_named() {
        let published = |options: &[&str]| {
            let mut backends = ["a", "b"].map(|name| Backend::new(name, "http://h:1"));
            let events = options.iter().map(|text| events(text)).collect::<Result<_, _>>()?;
            publish_events(backends.iter_mut().collect(), events).map_err(|error| error.to_string())?;
            Ok(backends.map(|backend| backend.events.into_iter().map(|at| at.publish).collect::<Vec<_>>()))
        };
        let ranks = ["b=tcp://h:1,replay=tcp://h:3", "b=tcp://h:2"];
        assert_eq!(published(&ranks), Ok([vec![], vec!["tcp://h:1".to_owned(), "tcp://h:2".to_owned()]]));
        assert_eq!(published(&["c=tcp://h:1"]), Err("KV events: no engine is named 'c'".to_owned()));
        assert!(published(&["tcp://h:1"]).unwrap_err().contains("NAME=tcp://HOST:PORT"));
        assert!(published(&["a=tcp://h:1,tcp://h:2"]).unwrap_err().contains("replay=tcp://HOST:PORT"));
    }

    #[test]
    fn a_token_is_a_line_that_is_not_empty() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("token");
        let read = |text: &str| {
            std::fs::write(&path, text).unwrap();
            read_token(&path).map_err(|error| error.to_string())
        };
        assert!(read("secret\n").unwrap().is(b"secret"));
        assert!(read("\n").unwrap_err().contains("has 0 bytes, 1 to 4096 are allowed"));
        assert!(read(&"x".repeat(5_000)).unwrap_err().contains("has 5000 bytes"));
    }

    #[test]
    fn a_backend_is_a_name_and_a_url() {
        assert!(backend("a").unwrap_err().contains("NAME=URL"));
        assert_eq!(backend("a=http://h:1").map(|backend| backend.url), Ok("http://h:1".into()));
    }
}
