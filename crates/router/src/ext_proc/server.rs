//! An endpoint picker as threads and sockets: threads that each serve gRPC on one address, and one
//! that watches the engines and serves health checks and pages on addresses of their own.

use super::health::HealthService;
use super::service::Services;
use crate::clients;
use crate::config::RouterConfig;
use crate::decisions::DecisionRecord;
use crate::pages;
use crate::refusal::Refusal;
use crate::relay::Reply;
use crate::respond;
use crate::routes;
use crate::starting::{self, Arrivals, StartError};
use crate::state::{Phase, RouterState};
use crate::stats::RouterStats;
use crate::threads::Threads;
use http::{Request, Response, StatusCode};
use hyper::body::Incoming;
use std::convert::Infallible;
use std::net::{SocketAddr, TcpListener as StdListener};
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpListener;
use tonic::body::Body;
use tonic::codegen::Service;
use tonic::transport::Server;
use tonic::transport::server::TcpIncoming;
use tonic_health::pb::health_server::HealthServer;

/// An Envoy that says nothing for so long is asked whether it lives, and given up after as long
/// again.
const SILENCE: Duration = Duration::from_secs(10);

/// All that an endpoint picker is told.
#[derive(Debug, Clone)]
pub struct EppConfig {
    /// What a router is told; it listens there for gRPC. Its engines are at addresses, not names.
    pub router: RouterConfig,
    /// Address for health checks over gRPC; port 0 takes a free one.
    pub health: SocketAddr,
    /// Address for metrics and the router's other pages; port 0 takes a free one.
    pub pages: SocketAddr,
}

#[derive(Debug)]
pub struct Epp;

/// A running endpoint picker. Dropping it stops it without waiting for requests under way.
#[derive(Debug)]
pub struct EppHandle {
    addr: SocketAddr,
    health: SocketAddr,
    pages: SocketAddr,
    threads: Threads,
}

impl Epp {
    /// Starts an endpoint picker on threads of its own. Needs no runtime.
    pub fn spawn(config: EppConfig) -> Result<EppHandle, StartError> {
        let EppConfig { router: config, health, pages } = config;
        let config = RouterConfig { by_address: true, ..config };
        let thread_count = config.threads;
        let targets = config.check()?;
        let (grpc, addr) = listen(config.listen)?;
        let ((health, health_addr), (pages, pages_addr)) = (listen(health)?, listen(pages)?);
        let (router, arrivals) = starting::open(config, &targets)?;
        let mut threads = Threads::new(router.clone());
        for number in 0..thread_count {
            let source = |source| StartError::Listen { address: addr, source };
            let (listener, router) = (grpc.try_clone().map_err(source)?, router.clone());
            threads.spawn(format!("epp-{number}"), move || async move {
                let services = Services::new(router.clone());
                serve(listener, router, services).await;
            })?;
        }
        threads.spawn("epp-watch".to_owned(), move || watch(router, arrivals, health, pages))?;
        Ok(EppHandle { addr, health: health_addr, pages: pages_addr, threads })
    }
}

fn listen(address: SocketAddr) -> Result<(StdListener, SocketAddr), StartError> {
    let listener = starting::listen(address)?;
    let own = listener.local_addr().map_err(|source| StartError::Listen { address, source })?;
    Ok((listener, own))
}

impl EppHandle {
    /// Where it listens for gRPC.
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// Where it listens for health checks alone.
    pub fn health_addr(&self) -> SocketAddr {
        self.health
    }

    /// Where its pages are.
    pub fn pages_addr(&self) -> SocketAddr {
        self.pages
    }

    /// Its figures.
    pub fn stats(&self) -> RouterStats {
        self.threads.router.engines.stats()
    }

    /// The same as Prometheus text, with all else that is counted.
    pub fn metrics(&self) -> String {
        self.threads.router.metrics()
    }

    /// Why each of the last requests went where it went, oldest first.
    pub fn decisions(&self) -> Vec<DecisionRecord> {
        self.threads.router.engines.decisions()
    }

    /// Ends: it is not ready while requests are still taken, for `limits.shutdown_delay`; Envoy is
    /// told to go elsewhere and requests under way may end, for `limits.drain`; their streams break
    /// off. When `hurry` ends they do at once.
    pub async fn shutdown_or_hurry(self, hurry: impl Future<Output = ()>) {
        self.threads.shutdown_or_hurry(hurry).await;
    }
}

/// Watches engines, and serves what is not for each request.
async fn watch(router: Arc<RouterState>, arrivals: Arrivals, health: StdListener, pages: StdListener) {
    let Ok(pages) = TcpListener::from_std(pages) else { return };
    arrivals.watch(&router);
    let checks = HealthServer::new(HealthService::new(router.clone()));
    let own = router.clone();
    let answer = move |request, _| page(own.clone(), request);
    tokio::join!(serve(health, router.clone(), checks), clients::serve_all(pages, router, answer));
}

/// Serves gRPC until the picker is cut off.
async fn serve<S>(listener: StdListener, router: Arc<RouterState>, service: S)
where
    S: Service<Request<Body>, Response = Response<Body>, Error = Infallible> + Clone + Send + 'static,
    S::Future: Send,
{
    let Ok(listener) = TcpListener::from_std(listener) else { return };
    let incoming = TcpIncoming::from(listener).with_nodelay(Some(true));
    let (mut phases, mut later_phases) = (router.phases(), router.phases());
    let draining = async move {
        let _ = phases.wait_for(|&phase| phase >= Phase::Draining).await;
    };
    let serving = Server::builder()
        .http2_keepalive_interval(Some(SILENCE))
        .http2_keepalive_timeout(Some(SILENCE))
        // What bounds requests is `limits.max_in_flight`, and they are told so.
        .max_concurrent_streams(u32::MAX)
        .serve_with_incoming_shutdown(service, incoming, draining);
    let cut = async {
        let _ = later_phases.wait_for(|&phase| phase >= Phase::Draining).await;
        tokio::select! {
            () = tokio::time::sleep(router.limits.drain) => router.enter(Phase::Cut),
            _ = later_phases.wait_for(|&phase| phase == Phase::Cut) => {}
        }
    };
    tokio::select! {
        _ = serving => {}
        () = cut => {}
    }
}

/// Answers a request for a page of the picker's own.
async fn page(router: Arc<RouterState>, request: Request<Incoming>) -> Response<Reply> {
    let group = routes::find(request.uri().path());
    pages::answer(&router, group, request).await.unwrap_or_else(|request| {
        let path = request.uri().path();
        let message =
            format!("{path} is not here; /metrics, /health, /debug/decisions and /admin/engines are");
        respond::refuse(&Refusal::of_client(StatusCode::NOT_FOUND, message))
    })
}
