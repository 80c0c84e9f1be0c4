//! A router as threads: each accepts from the one listening socket and serves its connections on a
//! runtime of its own, so that a request never changes threads. What is done with a request is the
//! proxy's business.

use crate::asking::Worker;
use crate::clients;
use crate::config::{Backend, RouterConfig};
use crate::decisions::DecisionRecord;
use crate::engines::{AddError, MembershipError};
use crate::probe;
use crate::proxy;
use crate::starting::{self, Arrivals, StartError};
use crate::state::RouterState;
use crate::stats::RouterStats;
use crate::threads::Threads;
use crate::upstream::Pool;
use std::net::{SocketAddr, TcpListener as StdListener};
use std::sync::Arc;
use tokio::net::TcpListener;

#[derive(Debug)]
pub struct Router;

/// A running router. Dropping it stops it without waiting for requests under way.
#[derive(Debug)]
pub struct RouterHandle {
    addr: SocketAddr,
    threads: Threads,
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
        let (address, thread_count) = (config.listen, config.threads);
        let targets = config.check()?;
        let listener = starting::listen(address)?;
        let failed = |source| StartError::Listen { address, source };
        let addr = listener.local_addr().map_err(failed)?;
        let (router, arrivals) = starting::open(config, &targets)?;
        let mut arrivals = Some(arrivals);
        let mut threads = Threads::new(router.clone());
        for number in 0..thread_count {
            let listener = listener.try_clone().map_err(failed)?;
            let (router, arrivals) = (router.clone(), arrivals.take());
            threads.spawn(format!("route-{number}"), move || run_thread(listener, router, arrivals))?;
        }
        Ok(RouterHandle { addr, threads })
    }
}

impl RouterHandle {
    /// Where it listens.
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// Its figures.
    pub fn stats(&self) -> RouterStats {
        self.threads.router.engines.stats()
    }

    /// Why each of the last requests went where it went, oldest first.
    pub fn decisions(&self) -> Vec<DecisionRecord> {
        self.threads.router.engines.decisions()
    }

    /// An engine comes, or serves again if it is draining or about to leave.
    pub fn add(&self, backend: &Backend) -> Result<(), AddError> {
        self.threads.router.engines.add_backend(backend).map(|_| ())
    }

    /// An engine gets no new requests until it is added again.
    pub fn drain(&self, name: &str) -> Result<(), MembershipError> {
        self.threads.router.engines.drain(name)
    }

    /// An engine gets no new requests, and is gone when those that it has have ended.
    pub fn remove(&self, name: &str) -> Result<(), MembershipError> {
        self.threads.router.engines.remove(name)
    }

    /// Ends in four steps: `/health` says 503 while requests are still taken, for
    /// `limits.shutdown_delay`; no more connections are accepted and requests under way may end,
    /// for `limits.drain`; streams that remain get an error as their last event, and requests that
    /// have no answer 503; all threads have ended, and this returns.
    pub async fn shutdown(self) {
        self.shutdown_or_hurry(std::future::pending()).await;
    }

    /// The same, but when `hurry` ends requests under way end as well.
    pub async fn shutdown_or_hurry(self, hurry: impl Future<Output = ()>) {
        self.threads.shutdown_or_hurry(hurry).await;
    }
}

/// Serves clients. One thread of a router also watches the engines that come.
async fn run_thread(listener: StdListener, router: Arc<RouterState>, arrivals: Option<Arrivals>) {
    let Ok(listener) = TcpListener::from_std(listener) else { return };
    let limits = &router.limits;
    let pool = Arc::new(Pool::new(limits.max_idle_connections, limits.keep_idle));
    let worker = Arc::new(Worker { router: router.clone(), pool: pool.clone() });
    if let Some(arrivals) = arrivals {
        arrivals.watch(&router);
    }
    tokio::spawn(probe::sweep(pool, router.limits.clone()));
    let answer = move |request, reset| proxy::answer(worker.clone(), request, reset);
    clients::serve_all(listener, router, answer).await;
}
