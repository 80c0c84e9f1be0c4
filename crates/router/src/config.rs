//! What a router is told at its start, and the limits it keeps to.

use crate::admin_token::AdminToken;
use crate::decision_log::{BYTES_MIN, DecisionLogPlace};
use crate::dispatcher::HandOverConfig;
use crate::engine_model::EngineModel;
use crate::event_address::{EventAddress, EventAddressError, EventTarget};
use crate::kubernetes::Discovery;
use crate::policy::Policy;
use crate::reported_load::FRESH_US;
use crate::request_log::RequestLogPlace;
use crate::request_trace::TraceConfig;
use crate::slots::MAX_ENGINES;
use http::HeaderValue;
use http::uri::{Authority, PathAndQuery, Uri};
use std::collections::HashSet;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

/// Two readings of metrics are compared, so the one before must still be believed.
const METRICS_INTERVAL_MAX: Duration = Duration::from_micros(FRESH_US / 2);

/// Data-parallel ranks of one engine.
const RANKS_MAX: usize = 1024;

/// An engine to route to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Backend {
    /// Its name in headers, metrics and decisions: letters, digits, `-`, `_` and `.`.
    pub name: String,
    /// Where it listens: `http://HOST:PORT`.
    pub url: String,
    /// The store of KV that it shares with all engines that name the same one.
    pub store: Option<String>,
    /// Where its data-parallel ranks publish KV events; none if they do not.
    pub events: Vec<EventAddress>,
}

/// All that a router is told.
#[derive(Debug, Clone)]
pub struct RouterConfig {
    /// Address to listen on; port 0 takes a free one.
    pub listen: SocketAddr,
    /// The engines that are there at the start: at least one, if others cannot come later.
    pub backends: Vec<Backend>,
    /// A file that lists more of them. It is read again and again.
    pub backends_file: Option<PathBuf>,
    /// Engines whose host is a name that stands for several addresses, each an engine. It is asked
    /// for again and again.
    pub dns_backends: Vec<Backend>,
    /// Engines that a Kubernetes cluster knows.
    pub discovery: Option<Discovery>,
    /// Who shows it may add, drain and remove engines; nobody may without it.
    pub admin_token: Option<AdminToken>,
    /// How to choose among them.
    pub policy: Policy,
    /// How engines hand prompts over to each other: with `elastic`, and with no other policy.
    pub hand_over: Option<HandOverConfig>,
    /// What the engines are taken for, all alike.
    pub engine_model: EngineModel,
    /// Threads that serve connections, at least 1.
    pub threads: usize,
    /// Send requests for models that no engine lists to any engine, instead of refusing them.
    pub any_model: bool,
    /// Engines whose hosts are names are refused: others are told their addresses.
    pub by_address: bool,
    /// Hints about KV come from headers, and are taken out of what clients send.
    pub hints_from_headers: bool,
    /// Where requests are logged, if they are.
    pub request_log: Option<RequestLogPlace>,
    /// Where decisions are logged, if they are.
    pub decision_log: Option<DecisionLogPlace>,
    /// Who is told of traces, if somebody is.
    pub traces: Option<TraceConfig>,
    /// Times and sizes.
    pub limits: Limits,
}

/// The numbers that bound everything the router does. All must be positive.
#[derive(Debug, Clone)]
pub struct Limits {
    /// For connecting to a backend.
    pub connect: Duration,
    /// From sending a request for a stream to the first byte of its answer's body. Then another
    /// backend is tried, once.
    pub first_byte: Duration,
    /// The same for a request for an answer without a stream, whose first byte comes when all has
    /// been computed. Then the client is told.
    pub answer: Duration,
    /// Between two pieces of an answer. Then the client is told and disconnected.
    pub progress: Duration,
    /// For a client to send a request's body, or to take any byte of an answer that waits for it.
    pub client_stall: Duration,
    /// Between the probes of a backend that is up.
    pub probe_interval: Duration,
    /// Between the probes of a backend that failed or is ejected.
    pub reprobe_interval: Duration,
    /// Between two readings of an engine's metrics.
    pub metrics_interval: Duration,
    /// For the answer to a probe.
    pub probe_timeout: Duration,
    /// What probes ask for: a path.
    pub probe_path: String,
    /// Failures in a row that eject a backend (a refused connection ejects at once).
    pub eject_after: u32,
    /// Answered probes in a row that bring it back.
    pub readmit_after: u32,
    /// Backends that are tried for one request. Two of them at most get to see it.
    pub attempts: u32,
    /// Bytes of a request's body.
    pub max_body_bytes: usize,
    /// Requests under way at once; more are refused with 503.
    pub max_in_flight: usize,
    /// Client connections per thread; more wait to be accepted.
    pub max_connections: usize,
    /// Idle connections kept per backend and thread.
    pub max_idle_connections: usize,
    /// How long an idle connection to a backend is used again: less than the backend keeps it.
    pub keep_idle: Duration,
    /// How long a router that is shut down still takes requests, while `/health` already says 503.
    /// May be 0.
    pub shutdown_delay: Duration,
    /// For requests under way when it takes no more. Then streams end with an error.
    pub drain: Duration,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits {
            connect: Duration::from_secs(1),
            first_byte: Duration::from_secs(120),
            answer: Duration::from_secs(30 * 60),
            progress: Duration::from_secs(60),
            client_stall: Duration::from_secs(60),
            probe_interval: Duration::from_secs(1),
            reprobe_interval: Duration::from_millis(250),
            probe_timeout: Duration::from_secs(1),
            metrics_interval: Duration::from_secs(1),
            probe_path: "/health".into(),
            eject_after: 3,
            readmit_after: 1,
            attempts: 3,
            max_body_bytes: 16 * 1024 * 1024,
            max_in_flight: 1024,
            max_connections: 4096,
            max_idle_connections: 256,
            keep_idle: Duration::from_secs(4),
            shutdown_delay: Duration::ZERO,
            drain: Duration::from_secs(20),
        }
    }
}

#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum ConfigError {
    /// Too few or too many backends.
    #[error("backends: {0} given, 1 to {MAX_ENGINES} are allowed")]
    BackendCount(usize),
    /// A name with other characters than are allowed.
    #[error("backend name '{0}': letters, digits, '-', '_' and '.' are allowed")]
    BackendName(String),
    /// The same for a store.
    #[error("store name '{0}': letters, digits, '-', '_' and '.' are allowed")]
    StoreName(String),
    /// Two backends of one name.
    #[error("backend name '{0}' is given twice")]
    RepeatedName(String),
    /// An address that is not of the form `http://HOST:PORT`.
    #[error("backend {name}: '{url}' is not of the form http://HOST:PORT")]
    BackendUrl { name: String, url: String },
    /// A policy that cannot do what it is for, or that has no use for a setting.
    #[error("hand-over: policy {0} {1}")]
    HandOver(Policy, &'static str),
    /// A network that moves nothing, or at once.
    #[error("network: {0} us for a token's KV; a finite number above 0 is allowed")]
    Network(f64),
    /// An address of KV events that is none.
    #[error("backend {name}, KV events: {error}")]
    Events { name: String, error: EventAddressError },
    /// More addresses of KV events than an engine has ranks.
    #[error("backend {name}, KV events: {count} addresses, at most {RANKS_MAX} are allowed")]
    EventCount { name: String, count: usize },
    /// A limit of zero.
    #[error("{0}: must be above 0")]
    Zero(&'static str),
    /// An admin token that everybody knows.
    #[error("admin token: it is empty")]
    NoToken,
    /// A time that no load takes.
    #[error("load us per token: {0} is no time; 0 and more are allowed")]
    LoadTime(f64),
    /// Every reading of metrics would be stale before the next one.
    #[error("metrics interval: {0:?}, at most {METRICS_INTERVAL_MAX:?} are allowed")]
    MetricsInterval(Duration),
    /// Next to nothing would fit the decision log.
    #[error("decision log: {0} bytes, at least {BYTES_MIN} are allowed")]
    DecisionLogBytes(u64),
    /// What probes ask for is no path.
    #[error("probe path: '{0}' is not a path such as /health")]
    ProbePath(String),
}

/// A backend after checking.
#[derive(Debug, Clone)]
pub(crate) struct Target {
    pub name: String,
    /// The name, for the response header.
    pub header: HeaderValue,
    /// Host and port, to connect to.
    pub authority: String,
    /// The same, where the host is no name.
    pub address: Option<SocketAddr>,
    pub store: Option<String>,
    /// Where each rank publishes KV events.
    pub events: Vec<EventTarget>,
    /// Host and port, for the `Host` header.
    pub host: HeaderValue,
}

impl Target {
    /// Is it the same engine at the same place?
    pub fn is_same(&self, other: &Target) -> bool {
        self.name == other.name
            && self.authority == other.authority
            && self.store == other.store
            && self.events == other.events
    }
}

impl RouterConfig {
    /// A router with the default limits, and a thread for every two CPUs, at most 8: engines need
    /// the others.
    pub fn new(
        listen: SocketAddr,
        backends: Vec<Backend>,
        policy: Policy,
        engine_model: EngineModel,
    ) -> RouterConfig {
        let cpus = std::thread::available_parallelism().map_or(1, usize::from);
        RouterConfig {
            listen,
            backends,
            backends_file: None,
            dns_backends: Vec::new(),
            discovery: None,
            admin_token: None,
            policy,
            hand_over: None,
            engine_model,
            threads: (cpus / 2).clamp(1, 8),
            any_model: false,
            by_address: false,
            hints_from_headers: false,
            request_log: None,
            decision_log: None,
            traces: None,
            limits: Limits::default(),
        }
    }

    /// Checks everything.
    pub(crate) fn check(&self) -> Result<Vec<Target>, ConfigError> {
        let others_come = self.backends_file.is_some()
            || !self.dns_backends.is_empty()
            || self.discovery.is_some()
            || self.admin_token.is_some();
        if self.backends.is_empty() && !others_come {
            return Err(ConfigError::BackendCount(0));
        }
        if self.admin_token.as_ref().is_some_and(AdminToken::is_empty) {
            return Err(ConfigError::NoToken);
        }
        check_backends(&self.dns_backends)?;
        if self.threads == 0 {
            return Err(ConfigError::Zero("threads"));
        }
        if self.engine_model.pool_tokens == 0 {
            return Err(ConfigError::Zero("pool tokens"));
        }
        self.check_hand_over()?;
        let load_us = self.engine_model.load_us_per_token;
        if !load_us.is_finite() || load_us < 0.0 {
            return Err(ConfigError::LoadTime(load_us));
        }
        if self.engine_model.max_seqs == 0 {
            return Err(ConfigError::Zero("max num seqs"));
        }
        if let Some(log) = self.decision_log.as_ref().filter(|log| log.bytes < BYTES_MIN) {
            return Err(ConfigError::DecisionLogBytes(log.bytes));
        }
        self.limits.check()?;
        check_backends(&self.backends)
    }

    fn check_hand_over(&self) -> Result<(), ConfigError> {
        match (self.policy, &self.hand_over) {
            (Policy::Elastic, None) => {
                Err(ConfigError::HandOver(self.policy, "needs to know how: forebay or nixl"))
            }
            (Policy::Elastic, Some(HandOverConfig { network, .. }))
                if !(network.us_per_token.is_finite() && network.us_per_token > 0.0) =>
            {
                Err(ConfigError::Network(network.us_per_token))
            }
            (Policy::Elastic, Some(_)) | (_, None) => Ok(()),
            (policy, Some(_)) => Err(ConfigError::HandOver(policy, "hands nothing over; elastic is allowed")),
        }
    }
}

/// Checks each, and that no two have one name.
pub(crate) fn check_backends(backends: &[Backend]) -> Result<Vec<Target>, ConfigError> {
    if backends.len() > MAX_ENGINES {
        return Err(ConfigError::BackendCount(backends.len()));
    }
    let mut names = HashSet::new();
    if let Some(repeated) = backends.iter().find(|backend| !names.insert(&backend.name)) {
        return Err(ConfigError::RepeatedName(repeated.name.clone()));
    }
    backends.iter().map(Backend::check).collect()
}

impl Backend {
    /// An engine that shares no store and publishes no events.
    pub fn new(name: impl Into<String>, url: impl Into<String>) -> Backend {
        Backend { name: name.into(), url: url.into(), store: None, events: Vec::new() }
    }

    pub(crate) fn check(&self) -> Result<Target, ConfigError> {
        let bad_name = || ConfigError::BackendName(self.name.clone());
        if !is_name(&self.name) {
            return Err(bad_name());
        }
        if let Some(store) = self.store.as_ref().filter(|store| !is_name(store)) {
            return Err(ConfigError::StoreName(store.clone()));
        }
        let header = HeaderValue::from_str(&self.name).map_err(|_| bad_name())?;
        let bad_url = || ConfigError::BackendUrl { name: self.name.clone(), url: self.url.clone() };
        let uri: Uri = self.url.parse().map_err(|_| bad_url())?;
        let plain = uri.scheme_str() == Some("http") && uri.path() == "/" && uri.query().is_none();
        let authority = uri.authority().filter(|authority| plain && is_host_and_port(authority));
        let authority = authority.ok_or_else(bad_url)?.as_str().to_owned();
        let host = HeaderValue::from_str(&authority).map_err(|_| bad_url())?;
        let (name, store, events) = (self.name.clone(), self.store.clone(), self.check_events()?);
        let address = authority.parse().ok();
        Ok(Target { name, header, authority, address, store, events, host })
    }

    fn check_events(&self) -> Result<Vec<EventTarget>, ConfigError> {
        let (name, count) = (|| self.name.clone(), self.events.len());
        if count > RANKS_MAX {
            return Err(ConfigError::EventCount { name: name(), count });
        }
        let events = self.events.iter().map(EventAddress::check);
        events.collect::<Result<_, _>>().map_err(|error| ConfigError::Events { name: name(), error })
    }
}

fn is_name(text: &str) -> bool {
    let allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
    !text.is_empty() && text.bytes().all(allowed)
}

fn is_host_and_port(authority: &Authority) -> bool {
    authority.port_u16().is_some_and(|port| port > 0) && !authority.as_str().contains('@')
}

impl Limits {
    fn check(&self) -> Result<(), ConfigError> {
        let path = &self.probe_path;
        if !path.starts_with('/') || path.parse::<PathAndQuery>().is_err() {
            return Err(ConfigError::ProbePath(path.clone()));
        }
        let durations = [
            ("connect timeout", self.connect),
            ("first-byte timeout", self.first_byte),
            ("answer timeout", self.answer),
            ("progress timeout", self.progress),
            ("client stall timeout", self.client_stall),
            ("probe interval", self.probe_interval),
            ("reprobe interval", self.reprobe_interval),
            ("probe timeout", self.probe_timeout),
            ("metrics interval", self.metrics_interval),
            ("idle time of connections", self.keep_idle),
        ];
        let counts = [
            ("eject after", self.eject_after as usize),
            ("readmit after", self.readmit_after as usize),
            ("attempts", self.attempts as usize),
            ("maximum body", self.max_body_bytes),
            ("maximum in flight", self.max_in_flight),
            ("maximum connections", self.max_connections),
        ];
        if self.metrics_interval > METRICS_INTERVAL_MAX {
            return Err(ConfigError::MetricsInterval(self.metrics_interval));
        }
        let zero_duration = durations.iter().find(|(_, duration)| duration.is_zero()).map(|(name, _)| *name);
        let zero_count = counts.iter().find(|(_, count)| *count == 0).map(|(name, _)| *name);
        zero_duration.or(zero_count).map_or(Ok(()), |name| Err(ConfigError::Zero(name)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use forebay_steps::{Launch, Profile};

    fn config(backends: &[(&str, &str)]) -> RouterConfig {
        let backends = backends.iter().map(|&(name, url)| Backend::new(name, url));
        let profile = Profile::shipped(Profile::DEFAULT).unwrap();
        let engine_model = EngineModel::new(&profile, Launch::Graph);
        RouterConfig::new(([127, 0, 0, 1], 0).into(), backends.collect(), Policy::Lpwl, engine_model)
    }

    #[test]
    fn good_backends_become_targets() {
        let targets =
            config(&[("a", "http://127.0.0.1:8000"), ("b.c-d_1", "http://[::1]:80/")]).check().unwrap();
        assert_eq!((&targets[0].authority[..], &targets[1].authority[..]), ("127.0.0.1:8000", "[::1]:80"));
    }

    #[test]
    fn who_hands_prompts_over_says_how_and_nobody_else_does() {
        let engines = [("a", "http://h:1"), ("b", "http://h:2")];
        let profile = Profile::shipped(Profile::DEFAULT).unwrap();
        let how = |gb_per_s| {
            let network = crate::elastic::KvNetwork::new(&profile, gb_per_s);
            Some(HandOverConfig { protocol: crate::hand_over::Protocol::Nixl, network })
        };
        let refused = |policy, hand_over| {
            RouterConfig { policy, hand_over, ..config(&engines) }.check().unwrap_err().to_string()
        };
        assert_eq!(
            refused(Policy::Elastic, None),
            "hand-over: policy elastic needs to know how: forebay or nixl"
        );
        assert_eq!(
            refused(Policy::Lpwl, how(25.0)),
            "hand-over: policy lpwl hands nothing over; elastic is allowed"
        );
        for gb_per_s in [0.0, -1.0, f64::NAN, f64::INFINITY] {
            assert!(refused(Policy::Elastic, how(gb_per_s)).starts_with("network: "), "{gb_per_s}");
        }
        let config = RouterConfig { policy: Policy::Elastic, hand_over: how(25.0), ..config(&engines) };
        assert!(config.check().is_ok());
    }

    #[test]
    fn the_admin_token_is_not_shown_with_the_configuration() {
        let token = Some(AdminToken::new(b"secret".to_vec()));
        let config = RouterConfig { admin_token: token, ..config(&[("a", "http://h:1")]) };
        let shown = format!("{config:?} {config:#?}");
        assert!(shown.contains("[hidden]") && !shown.contains("secret"), "{shown}");
        assert!(!shown.contains(&format!("{:?}", b"secret")), "{shown}");
    }

    #[test]
    fn what_is_not_allowed_is_refused_with_its_name_and_value() {
        let table = [
            (vec![], "backends: 0 given, 1 to 4096 are allowed"),
            (vec![("", "http://h:1")], "backend name '': letters, digits, '-', '_' and '.' are allowed"),
            (
                vec![("a\"", "http://h:1")],
                "backend name 'a\"': letters, digits, '-', '_' and '.' are allowed",
            ),
            (vec![("a", "http://h:1"), ("a", "http://h:2")], "backend name 'a' is given twice"),
            (vec![("a", "h:1")], "backend a: 'h:1' is not of the form http://HOST:PORT"),
            (vec![("a", "http://h")], "backend a: 'http://h' is not of the form http://HOST:PORT"),
            (vec![("a", "http://h:0")], "backend a: 'http://h:0' is not of the form http://HOST:PORT"),
            (vec![("a", "https://h:1")], "backend a: 'https://h:1' is not of the form http://HOST:PORT"),
            (vec![("a", "http://h:1/v1")], "backend a: 'http://h:1/v1' is not of the form http://HOST:PORT"),
            (vec![("a", "http://u@h:1")], "backend a: 'http://u@h:1' is not of the form http://HOST:PORT"),
        ];
        for (backends, message) in table {
            assert_eq!(config(&backends).check().unwrap_err().to_string(), message);
        }
        let mut store = config(&[("a", "http://h:1")]);
        store.backends[0].store = Some("s/1".into());
        let message = "store name 's/1': letters, digits, '-', '_' and '.' are allowed";
        assert_eq!(store.check().unwrap_err().to_string(), message);
        let mut zero = config(&[("a", "http://h:1")]);
        zero.limits.progress = Duration::ZERO;
        assert_eq!(zero.check().unwrap_err().to_string(), "progress timeout: must be above 0");
        zero = config(&[("a", "http://h:1")]);
        zero.limits.max_body_bytes = 0;
        assert_eq!(zero.check().unwrap_err().to_string(), "maximum body: must be above 0");
        for (tokens, seqs, message) in
            [(0, 1, "pool tokens: must be above 0"), (1, 0, "max num seqs: must be above 0")]
        {
            let mut bad = config(&[("a", "http://h:1")]);
            (bad.engine_model.pool_tokens, bad.engine_model.max_seqs) = (tokens, seqs);
            assert_eq!(bad.check().unwrap_err().to_string(), message);
        }
        for load_us in [-1.0, f64::NAN, f64::INFINITY] {
            let mut bad = config(&[("a", "http://h:1")]);
            bad.engine_model.load_us_per_token = load_us;
            let message = format!("load us per token: {load_us} is no time; 0 and more are allowed");
            assert_eq!(bad.check().unwrap_err().to_string(), message);
        }
        let mut slow = config(&[("a", "http://h:1")]);
        slow.limits.metrics_interval = Duration::from_secs(3);
        let message = "metrics interval: 3s, at most 2.5s are allowed";
        assert_eq!(slow.check().unwrap_err().to_string(), message);
        let place = DecisionLogPlace { path: "log".into(), bytes: 1_000 };
        let small = RouterConfig { decision_log: Some(place), ..config(&[("a", "http://h:1")]) };
        let message = "decision log: 1000 bytes, at least 1048576 are allowed";
        assert_eq!(small.check().unwrap_err().to_string(), message);
        for path in ["", "health", "http://h/health", "/a b"] {
            let mut bad = config(&[("a", "http://h:1")]);
            bad.limits.probe_path = path.into();
            let message = format!("probe path: '{path}' is not a path such as /health");
            assert_eq!(bad.check().unwrap_err().to_string(), message);
        }
    }
}
