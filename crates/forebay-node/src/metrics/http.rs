//! The port on which the node shows itself: `GET /metrics` for Prometheus, `/healthz` and `/readyz` for whoever starts
//! and stops it. It runs on a thread of its own and lets nobody stay: connections are few and short, so slow readers
//! keep only each other from looking.

use super::{Metrics, prometheus};
use http::{Method, Request, Response, StatusCode, header};
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use std::convert::Infallible;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Notify, Semaphore};
use tokio::time::{sleep, timeout};

/// Connections at a time; those after wait in the system's queue.
const CONNECTIONS_MAX: usize = 32;
/// A connection that has not sent a request for so long is closed.
const HEADER_LIMIT: Duration = Duration::from_secs(5);
/// A connection is closed after so long, whatever it does.
const CONNECTION_LIMIT: Duration = Duration::from_secs(15);
/// How long the port rests when the system has no descriptors left.
const REST: Duration = Duration::from_millis(100);

type Ready = dyn Fn() -> Result<(), String> + Send + Sync;

/// Shows the node until it is dropped.
pub struct MetricsServer {
    address: SocketAddr,
    closing: Arc<Notify>,
    thread: Option<JoinHandle<()>>,
}

impl MetricsServer {
    /// Listens. `ready` says whether the node takes work, or why not.
    pub fn listen(
        address: SocketAddr,
        metrics: Arc<Metrics>,
        ready: impl Fn() -> Result<(), String> + Send + Sync + 'static,
    ) -> io::Result<MetricsServer> {
        let listener = std::net::TcpListener::bind(address)?;
        listener.set_nonblocking(true)?;
        let address = listener.local_addr()?;
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let closing = Arc::new(Notify::new());
        let (shown, closed) = (Arc::new(Shown { metrics, ready: Box::new(ready) }), Arc::clone(&closing));
        let thread = std::thread::Builder::new().name("forebay-metrics".into()).spawn(move || {
            runtime.block_on(async {
                let Ok(listener) = TcpListener::from_std(listener) else { return };
                tokio::select! {
                    () = accept(listener, shown) => {}
                    () = closed.notified() => {}
                }
            });
        })?;
        Ok(MetricsServer { address, closing, thread: Some(thread) })
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }
}

impl Drop for MetricsServer {
    fn drop(&mut self) {
        self.closing.notify_one();
        if let Some(thread) = self.thread.take() {
            // A panic of the thread has already been printed.
            let _ = thread.join();
        }
    }
}

struct Shown {
    metrics: Arc<Metrics>,
    ready: Box<Ready>,
}

async fn accept(listener: TcpListener, shown: Arc<Shown>) {
    let places = Arc::new(Semaphore::new(CONNECTIONS_MAX));
    loop {
        let Ok(place) = Arc::clone(&places).acquire_owned().await else { return };
        match listener.accept().await {
            Ok((stream, _)) => {
                let shown = Arc::clone(&shown);
                tokio::spawn(async move {
                    // Whether it ended well or was cut off, nothing is left to do.
                    let _ = timeout(CONNECTION_LIMIT, serve(stream, shown)).await;
                    drop(place);
                });
            }
            Err(_) => sleep(REST).await,
        }
    }
}

async fn serve(stream: TcpStream, shown: Arc<Shown>) -> hyper::Result<()> {
    let service = service_fn(move |request| {
        let response = shown.answer(&request);
        async move { Ok::<_, Infallible>(response) }
    });
    http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEADER_LIMIT)
        .serve_connection(TokioIo::new(stream), service)
        .await
}

impl Shown {
    fn answer(&self, request: &Request<Incoming>) -> Response<String> {
        if request.method() != Method::GET {
            return plain(StatusCode::METHOD_NOT_ALLOWED, "allowed: GET\n".into());
        }
        match request.uri().path() {
            "/metrics" => {
                let mut response = plain(StatusCode::OK, prometheus::render(&self.metrics.gather()));
                let kind = header::HeaderValue::from_static(prometheus::CONTENT_TYPE);
                response.headers_mut().insert(header::CONTENT_TYPE, kind);
                response
            }
            "/healthz" => plain(StatusCode::OK, "ok\n".into()),
            "/readyz" => match (self.ready)() {
                Ok(()) => plain(StatusCode::OK, "ready\n".into()),
                Err(why) => plain(StatusCode::SERVICE_UNAVAILABLE, format!("{why}\n")),
            },
            _ => plain(StatusCode::NOT_FOUND, "here are: /metrics /healthz /readyz\n".into()),
        }
    }
}

fn plain(status: StatusCode, text: String) -> Response<String> {
    let mut response = Response::new(text);
    *response.status_mut() = status;
    response
}
