//! The options that `forebay route` and `forebay epp` share: which engines there are, how one is
//! chosen, and how they are watched. It turns them into a router's configuration.

use super::values::{seconds, seconds_or_none, size};
use forebay_results::output::Error;
use forebay_router::elastic::KvNetwork;
use forebay_router::{
    AdminToken, ApiPlace, Backend, DecisionLogPlace, Discovery, EngineModel, EventAddress, EventAddressError,
    HandOverConfig, Limits, Policy, PoolName, Protocol, RouterConfig, SharedStore, TraceConfig,
};
use forebay_steps::{Launch, Profile};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

#[derive(clap::Args)]
pub struct RoutingArgs {
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
    /// Engines that are pods of an InferencePool of Kubernetes
    #[arg(long, value_name = "kubernetes://NAMESPACE/POOL")]
    discover: Option<PoolName>,
    /// For --discover: which pods share a store of KV: those of a host, or all of the pool
    #[arg(long, value_name = "host|pool", requires = "discover")]
    discover_store: Option<SharedStore>,
    /// For --discover: port at which a pod publishes KV events; its further data-parallel ranks use
    /// those behind it
    #[arg(long, value_name = "PORT", requires = "discover")]
    discover_events: Option<u16>,
    /// For --discover: an API server that asks for no token, such as `kubectl proxy` [default: that
    /// of the cluster in which this runs]
    #[arg(long, value_name = "http://HOST:PORT", requires = "discover")]
    kube_api: Option<String>,
    /// A file with the token of those who may add, drain and remove engines over HTTP; without it
    /// nobody may
    #[arg(long, value_name = "FILE")]
    admin_token_file: Option<PathBuf>,
    /// Where a data-parallel rank of an engine publishes KV events, and where missed ones can be
    /// asked for; repeat for each rank
    #[arg(long, value_name = "NAME=tcp://HOST:PORT[,replay=tcp://HOST:PORT]", value_parser = events)]
    backend_events: Vec<(String, EventAddress)>,
    /// Engines that share a store of KV, by their names: each can load what another one computed;
    /// repeat for each store
    #[arg(long, value_name = "NAME=ENGINE,ENGINE", value_parser = store)]
    store: Vec<Store>,
    /// How an engine is chosen: round-robin, least-loaded, session-sticky, linear, lmetric, lpwl,
    /// added-latency or elastic
    #[arg(long, default_value_t = Policy::AddedLatency)]
    pub policy: Policy,
    /// For elastic: how engines hand prompts over to each other, forebay or nixl: by which
    /// connector
    #[arg(long, value_name = "CONNECTOR")]
    hand_over: Option<Protocol>,
    /// For elastic: rate between engines, in 10^9 bytes per second
    #[arg(long, value_name = "GB/S", default_value_t = 25.0)]
    network: f64,
    /// For added-latency and elastic, and for loads from stores: GPU and model that the engines are
    /// taken for, a shipped profile or a file as `forebay calibrate` writes it
    #[arg(long, value_name = "NAME_OR_FILE", default_value = Profile::DEFAULT)]
    profile: String,
    /// For engines with a store: microseconds that a token takes from there to the GPU [default:
    /// the profile's, from host memory]
    #[arg(long, value_name = "MICROSECONDS")]
    load_us_per_token: Option<f64>,
    /// For added-latency and elastic: tokens whose KV fits the GPU of an engine whose metrics do
    /// not say it [default: the profile's]
    #[arg(long, value_name = "TOKENS")]
    pool_tokens: Option<u64>,
    /// For added-latency and elastic: most requests that an engine computes at once [default: the
    /// profile's]
    #[arg(long, value_name = "REQUESTS")]
    max_num_seqs: Option<u32>,
    /// Threads that serve connections [default: half the CPUs, 1 to 8]
    #[arg(long, value_name = "COUNT")]
    threads: Option<usize>,
    /// Longest time for connecting to an engine
    #[arg(long, value_name = "SECONDS", value_parser = seconds, default_value = "1")]
    connect_timeout: Duration,
    /// Longest time in which a client sends its body, or takes bytes that wait for it
    #[arg(long, value_name = "SECONDS", value_parser = seconds, default_value = "60")]
    client_timeout: Duration,
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
    /// Write a JSON line for each decision to this file, for `forebay route-replay`
    #[arg(long, value_name = "FILE")]
    decision_log: Option<PathBuf>,
    /// What the decision log may take: when the file has half of it, it becomes FILE.1
    #[arg(long, value_name = "SIZE", value_parser = size::<u64>, default_value = "1GiB", requires = "decision_log")]
    decision_log_size: u64,
    /// Send spans of requests to this OpenTelemetry collector, http://HOST:PORT, over OTLP/HTTP
    #[arg(long, value_name = "URL")]
    trace_collector: Option<String>,
    /// Of so many requests that come without a trace one is traced; 0 for none of them
    #[arg(long, value_name = "COUNT", default_value_t = 100, requires = "trace_collector")]
    trace_one_of: u32,
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

impl RoutingArgs {
    /// A router with these options that listens there. Limits that are no option here are the usual
    /// ones.
    pub fn into_config(mut self, listen: SocketAddr) -> Result<RouterConfig, Error> {
        share_stores(self.backend.iter_mut().chain(&mut self.backend_dns).collect(), &self.store)?;
        let backends = self.backend.iter_mut().chain(&mut self.backend_dns).collect();
        publish_events(backends, std::mem::take(&mut self.backend_events))?;
        // As vLLM launches its steps if it is told nothing.
        let profile = Profile::find(&self.profile)?;
        let mut engine_model = EngineModel::new(&profile, Launch::Graph);
        engine_model.load_us_per_token = self.load_us_per_token.unwrap_or(engine_model.load_us_per_token);
        engine_model.pool_tokens = self.pool_tokens.unwrap_or(engine_model.pool_tokens);
        engine_model.max_seqs = self.max_num_seqs.unwrap_or(engine_model.max_seqs);
        // An engine has a prompt's KV when all of it is computed.
        let network = KvNetwork { layers: 1, ..KvNetwork::new(&profile, self.network) };
        let bytes = self.decision_log_size;
        let discovery = self.discover.map(|pool| Discovery {
            api: self.kube_api.map_or(ApiPlace::Cluster, ApiPlace::Open),
            events_port: self.discover_events,
            store: self.discover_store,
            pool,
        });
        let usual = RouterConfig::new(listen, self.backend, self.policy, engine_model);
        Ok(RouterConfig {
            hand_over: self.hand_over.map(|protocol| HandOverConfig { protocol, network }),
            dns_backends: self.backend_dns,
            backends_file: self.backends_file,
            discovery,
            admin_token: self.admin_token_file.as_deref().map(read_token).transpose()?,
            threads: self.threads.unwrap_or(usual.threads),
            any_model: self.any_model,
            decision_log: self.decision_log.map(|path| DecisionLogPlace { path, bytes }),
            traces: self
                .trace_collector
                .map(|collector| TraceConfig { collector, one_of: self.trace_one_of }),
            limits: Limits {
                connect: self.connect_timeout,
                client_stall: self.client_timeout,
                probe_path: self.probe_path,
                probe_interval: self.probe_interval,
                reprobe_interval: self.reprobe_interval,
                probe_timeout: self.probe_timeout,
                metrics_interval: self.metrics_interval,
                eject_after: self.eject_after,
                readmit_after: self.readmit_after,
                shutdown_delay: self.shutdown_delay,
                drain: self.drain,
                max_body_bytes: self.max_body,
                max_in_flight: self.max_in_flight,
                ..usual.limits
            },
            ..usual
        })
    }
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
