//! What a router is made of before it serves: its sockets listen, its logs are opened, and it gets
//! the first engines. Whoever serves, in whatever protocol, begins with this.

use crate::config::{Backend, ConfigError, RouterConfig, Target};
use crate::decision_log::DecisionLog;
use crate::engines::{Comers, MembershipError};
use crate::kubernetes::{self, Api, ApiError, Discovery};
use crate::kv_events;
use crate::listing;
use crate::probe;
use crate::request_log::{RequestLog, RequestLogPlace};
use crate::request_trace::Tracing;
use crate::scrape;
use crate::sources::{self, FileError};
use crate::state::RouterState;
use forebay_otlp::PushError;
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::path::PathBuf;
use std::sync::Arc;

/// Why a router did not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    #[error(transparent)]
    Config(#[from] ConfigError),
    #[error(transparent)]
    Engine(#[from] MembershipError),
    #[error(transparent)]
    BackendsFile(#[from] FileError),
    #[error(transparent)]
    Kubernetes(#[from] ApiError),
    /// The address cannot be listened on.
    #[error("listen on {address}: {source}")]
    Listen { address: SocketAddr, source: io::Error },
    /// The decision log cannot be opened.
    #[error("open the decision log {}: {source}", path.display())]
    DecisionLog { path: PathBuf, source: io::Error },
    /// The request log cannot be opened.
    #[error("open the request log {place}: {source}")]
    RequestLog {
        /// Where it should be.
        place: String,
        source: io::Error,
    },
    #[error("traces: {0}")]
    Traces(#[from] PushError),
    /// A thread or its runtime could not be made.
    #[error("start a thread: {0}")]
    Thread(#[source] io::Error),
}

/// The engines that come, and where they come from.
pub struct Arrivals {
    comers: Comers,
    file: Option<PathBuf>,
    names: Vec<Backend>,
    pool: Option<(Discovery, Api)>,
}

/// A socket that waits for connections.
pub fn listen(address: SocketAddr) -> Result<TcpListener, StartError> {
    let bind = || {
        let listener = TcpListener::bind(address)?;
        listener.set_nonblocking(true)?;
        Ok(listener)
    };
    bind().map_err(|source| StartError::Listen { address, source })
}

/// The state of a router with the engines that are there at the start.
pub(crate) fn open(
    config: RouterConfig,
    targets: &[Target],
) -> Result<(Arc<RouterState>, Arrivals), StartError> {
    let log = config.request_log.as_ref().map(open_log).transpose()?;
    let decision_log = open_decision_log(&config)?;
    if let Some(path) = &config.backends_file {
        sources::read_file(path)?;
    }
    let discovery = config.discovery.clone();
    let pool = discovery.map(|of| Api::new(&of.api).map(|api| (of, api))).transpose()?;
    let (file, names) = (config.backends_file.clone(), config.dns_backends.clone());
    let tracing = start_tracing(&config)?;
    let (router, comers) = RouterState::new(config, log, decision_log, tracing);
    for target in targets {
        router.engines.add(target)?;
    }
    Ok((router, Arrivals { comers, file, names, pool }))
}

fn open_log(place: &RequestLogPlace) -> Result<RequestLog, StartError> {
    RequestLog::open(place).map_err(|source| {
        let place = match place {
            RequestLogPlace::Stderr => "stderr".to_owned(),
            RequestLogPlace::File(path) => path.display().to_string(),
        };
        StartError::RequestLog { place, source }
    })
}

fn start_tracing(config: &RouterConfig) -> Result<Tracing, StartError> {
    let Some(traces) = &config.traces else { return Ok(Tracing::default()) };
    let service = if config.by_address { "forebay-epp" } else { "forebay-route" };
    Ok(Tracing::start(traces, service, config.listen.to_string())?)
}

fn open_decision_log(config: &RouterConfig) -> Result<Option<DecisionLog>, StartError> {
    let Some(place) = &config.decision_log else { return Ok(None) };
    DecisionLog::open(place, config.policy, config.engine_model)
        .map(Some)
        .map_err(|source| StartError::DecisionLog { path: place.path.clone(), source })
}

impl Arrivals {
    /// Watches engines, and where they come from, in this runtime.
    pub fn watch(self, router: &Arc<RouterState>) {
        tokio::spawn(watch_engines(router.clone(), self.comers));
        if let Some(file) = self.file {
            tokio::spawn(sources::watch_file(router.engines.clone(), file));
        }
        for named in self.names {
            tokio::spawn(sources::watch_name(router.engines.clone(), named));
        }
        if let Some((discovery, api)) = self.pool {
            tokio::spawn(kubernetes::watch_pool(router.engines.clone(), discovery, api));
        }
    }
}

/// Watches each engine from when it comes until it is gone.
async fn watch_engines(router: Arc<RouterState>, mut comers: Comers) {
    while let Some(engine) = comers.recv().await {
        let router = router.clone();
        tokio::spawn(async move {
            tokio::select! {
                () = engine.left() => {}
                () = probe::watch(router.clone(), engine.clone()) => {}
                () = listing::watch(router.clone(), engine.clone()) => {}
                () = scrape::watch(router.clone(), engine.clone()) => {}
                () = kv_events::watch(router.clone(), engine.clone()) => {}
            }
        });
    }
}
