//! A router as threads: each accepts from the one listening socket and serves its connections on a
//! runtime of its own, so that a request never changes threads. It knows threads, accepting and
//! shutting down; what is done with a request is the proxy's business.

use crate::asking::Worker;
use crate::config::{Backend, ConfigError, RouterConfig};
use crate::decision_log::DecisionLog;
use crate::decisions::DecisionRecord;
use crate::engines::{AddError, Comers, MembershipError};
use crate::kv_events;
use crate::listing;
use crate::probe;
use crate::proxy;
use crate::request_log::{RequestLog, RequestLogPlace};
use crate::scrape;
use crate::sources::{self, FileError};
use crate::stall::StallGuard;
use crate::state::{Phase, RouterState};
use crate::stats::RouterStats;
use crate::upstream::Pool;
use http::header::CONNECTION;
use http::{HeaderValue, Request, Version};
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use std::convert::Infallible;
use std::io;
use std::net::{SocketAddr, TcpListener as StdListener};
use std::path::PathBuf;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::thread::JoinHandle;
use std::time::Duration;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::oneshot;
use tokio::task::JoinSet;

/// A client connection without a request is closed after this time.
const IDLE_CLIENT: Duration = Duration::from_secs(75);

/// For the last lines of the request log to be written.
const LOG_FLUSH: Duration = Duration::from_secs(2);
/// For the last events and answers, once all answers must end.
const LAST_BYTES: Duration = Duration::from_secs(1);

/// After an error of `accept` (no more file descriptors, say) the next is tried after this time.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// Why a router did not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    #[error(transparent)]
    Config(#[from] ConfigError),
    #[error(transparent)]
    Engine(#[from] MembershipError),
    #[error(transparent)]
    BackendsFile(#[from] FileError),
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
    /// A thread or its runtime could not be made.
    #[error("start a thread: {0}")]
    Thread(#[source] io::Error),
}

#[derive(Debug)]
pub struct Router;

/// What one thread of a router does beside serving clients: it watches engines, and where they come
/// from.
struct Arrivals {
    comers: Comers,
    file: Option<PathBuf>,
    names: Vec<Backend>,
}

/// A running router. Dropping it stops it without waiting for requests under way.
#[derive(Debug)]
pub struct RouterHandle {
    addr: SocketAddr,
    router: Arc<RouterState>,
    threads: Vec<(JoinHandle<()>, oneshot::Receiver<()>)>,
}

impl Router {
    /// Starts a router on threads of its own. Needs no runtime.
    ///
    /// ```
    /// use forebay_router::{Backend, EngineModel, Policy, Router, RouterConfig};
    /// use forebay_steps::{Launch, Profile};
    ///
    /// let engine_model = EngineModel::new(&Profile::shipped(Profile::DEFAULT)?, Launch::Graph);
    /// let engine = Backend::new("engine-0", "http://127.0.0.1:8000");
    /// let listen = ([127, 0, 0, 1], 0).into();
    /// let router = Router::spawn(RouterConfig::new(listen, vec![engine], Policy::Lpwl, engine_model))?;
    /// assert_ne!(router.addr().port(), 0);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn spawn(config: RouterConfig) -> Result<RouterHandle, StartError> {
        let targets = config.check()?;
        let address = config.listen;
        let listen = |source| StartError::Listen { address, source };
        let listener = StdListener::bind(address).map_err(listen)?;
        listener.set_nonblocking(true).map_err(listen)?;
        let addr = listener.local_addr().map_err(listen)?;
        let log = config.request_log.as_ref().map(open_log).transpose()?;
        let decision_log = open_decision_log(&config)?;
        let thread_count = config.threads;
        if let Some(path) = &config.backends_file {
            sources::read_file(path)?;
        }
        let (file, names) = (config.backends_file.clone(), config.dns_backends.clone());
        let (router, comers) = RouterState::new(config, log, decision_log);
        for target in &targets {
            router.engines.add(target)?;
        }
        let mut arrivals = Some(Arrivals { comers, file, names });
        let mut threads = Vec::new();
        for number in 0..thread_count {
            let listener = listener.try_clone().map_err(listen)?;
            let (router, arrivals) = (router.clone(), arrivals.take());
            let runtime = tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build()
                .map_err(StartError::Thread)?;
            let (done, ended) = oneshot::channel();
            let run = move || {
                runtime.block_on(run_thread(listener, router, arrivals));
                // A file or a name server that hangs must not hold up the end.
                runtime.shutdown_background();
                drop(done);
            };
            let name = format!("route-{number}");
            let thread = std::thread::Builder::new().name(name).spawn(run).map_err(StartError::Thread)?;
            threads.push((thread, ended));
        }
        Ok(RouterHandle { addr, router, threads })
    }
}

impl RouterHandle {
    /// Where it listens.
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// Its figures.
    pub fn stats(&self) -> RouterStats {
        self.router.engines.stats()
    }

    /// Why each of the last requests went where it went, oldest first.
    pub fn decisions(&self) -> Vec<DecisionRecord> {
        self.router.engines.decisions()
    }

    /// An engine comes, or serves again if it is draining or about to leave.
    pub fn add(&self, backend: &Backend) -> Result<(), AddError> {
        self.router.engines.add_backend(backend).map(|_| ())
    }

    /// An engine gets no new requests until it is added again.
    pub fn drain(&self, name: &str) -> Result<(), MembershipError> {
        self.router.engines.drain(name)
    }

    /// An engine gets no new requests, and is gone when those that it has have ended.
    pub fn remove(&self, name: &str) -> Result<(), MembershipError> {
        self.router.engines.remove(name)
    }

    /// Ends in four steps: `/health` says 503 while requests are still taken, for
    /// `limits.shutdown_delay`; no more connections are accepted and requests under way may end,
    /// for `limits.drain`; streams that remain get an error as their last event, and requests that
    /// have no answer 503; all threads have ended, and this returns.
    pub async fn shutdown(self) {
        self.shutdown_or_hurry(std::future::pending()).await;
    }

    /// The same, but when `hurry` ends requests under way end as well.
    pub async fn shutdown_or_hurry(mut self, hurry: impl Future<Output = ()>) {
        let mut hurry = pin!(hurry);
        let router = self.router.clone();
        router.enter(Phase::Leaving);
        let mut hurried = false;
        if !router.limits.shutdown_delay.is_zero() {
            tokio::select! {
                () = tokio::time::sleep(router.limits.shutdown_delay) => {}
                () = &mut hurry => hurried = true,
            }
        }
        router.enter(if hurried { Phase::Cut } else { Phase::Draining });
        for (thread, ended) in self.threads.drain(..) {
            let mut ended = pin!(ended);
            // Resolves, with an error, when the thread drops its end; after that joining does not
            // wait.
            tokio::select! {
                _ = &mut ended => {}
                () = &mut hurry, if !hurried => {
                    hurried = true;
                    router.enter(Phase::Cut);
                    let _ = ended.await;
                }
            }
            let _ = thread.join();
        }
        tracing::info!(in_flight = router.in_flight(), "drain ends");
        if let Some(log) = &self.router.log {
            log.flush(LOG_FLUSH);
        }
        if let Some(log) = self.router.engines.decision_log() {
            log.flush(LOG_FLUSH);
        }
    }
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

fn open_decision_log(config: &RouterConfig) -> Result<Option<DecisionLog>, StartError> {
    let Some(place) = &config.decision_log else { return Ok(None) };
    DecisionLog::open(place, config.policy, config.engine_model)
        .map(Some)
        .map_err(|source| StartError::DecisionLog { path: place.path.clone(), source })
}

impl Drop for RouterHandle {
    fn drop(&mut self) {
        self.router.enter(Phase::Draining);
    }
}

/// Serves clients. One thread of a router also watches the engines that come.
async fn run_thread(listener: StdListener, router: Arc<RouterState>, arrivals: Option<Arrivals>) {
    let Ok(listener) = TcpListener::from_std(listener) else { return };
    let limits = &router.limits;
    let pool = Arc::new(Pool::new(limits.max_idle_connections, limits.keep_idle));
    let worker = Arc::new(Worker { router: router.clone(), pool: pool.clone() });
    if let Some(Arrivals { comers, file, names }) = arrivals {
        tokio::spawn(watch_engines(router.clone(), comers));
        if let Some(file) = file {
            tokio::spawn(sources::watch_file(router.engines.clone(), file));
        }
        for named in names {
            tokio::spawn(sources::watch_name(router.engines.clone(), named));
        }
    }
    tokio::spawn(probe::sweep(pool, router.limits.clone()));
    let mut connections = JoinSet::new();
    let mut phases = router.phases();
    while *phases.borrow_and_update() < Phase::Draining {
        tokio::select! {
            accepted = listener.accept(), if connections.len() < limits.max_connections => match accepted {
                Ok((stream, _)) => {
                    connections.spawn(serve(worker.clone(), stream));
                }
                Err(_) => tokio::time::sleep(ACCEPT_PAUSE).await,
            },
            Some(_) = connections.join_next() => {}
            _ = phases.changed() => {}
        }
    }
    drop(listener);
    let mut drained = pin!(async { while connections.join_next().await.is_some() {} });
    tokio::select! {
        () = &mut drained => return,
        () = tokio::time::sleep(router.limits.drain) => router.enter(Phase::Cut),
        _ = phases.wait_for(|&phase| phase == Phase::Cut) => {}
    }
    let _ = tokio::time::timeout(LAST_BYTES, drained).await;
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

/// Serves one client connection until either side has had enough.
async fn serve(worker: Arc<Worker>, stream: TcpStream) {
    // Without it the end of a small answer waits for the client's delayed acknowledgement, 40 ms
    // and more.
    if stream.set_nodelay(true).is_err() {
        return;
    }
    let router = worker.router.clone();
    let reset = Arc::new(AtomicBool::new(false));
    let io = TokioIo::new(StallGuard::new(stream, router.limits.client_stall, reset.clone()));
    let service = service_fn(move |request: Request<Incoming>| {
        let worker = worker.clone();
        // To a client of HTTP/1.0 an answer without a length ends like its connection: in order, or
        // not.
        let reset = (request.version() == Version::HTTP_10).then(|| reset.clone());
        async move {
            let router = worker.router.clone();
            let mut answer = proxy::answer(worker, request, reset).await;
            // So that no request is on its way when the connection is closed.
            if router.phase() != Phase::Serving {
                answer.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
            }
            Ok::<_, Infallible>(answer)
        }
    });
    let mut connection = pin!(
        http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(IDLE_CLIENT)
            .serve_connection(io, service)
    );
    let mut phases = router.phases();
    // A broken client connection concerns nobody else: what it meant for its request is recorded
    // there. When the phase changes the connection is polled, and with it whatever answer it waits
    // for.
    while tokio::select! {
        biased;
        _ = connection.as_mut() => false,
        _ = phases.changed() => true,
    } {
        if *phases.borrow_and_update() >= Phase::Draining {
            connection.as_mut().graceful_shutdown();
        }
    }
}
