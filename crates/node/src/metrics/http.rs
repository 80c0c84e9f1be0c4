//! The port on which the node shows itself: `GET /metrics` for Prometheus, `/healthz` and `/readyz`
//! for whoever starts and stops it. It runs on a thread of its own and lets nobody stay: a
//! connection that has not sent its request gives way to the next, few read numbers at a time, and
//! health is answered to all, so that nobody keeps others from it.

use super::{Metrics, prometheus};
use forebay_transfer::LogGate;
use forebay_transfer::listen::{Room, RoomPlace};
use forebay_transfer::lock::Mutex;
use http::{Method, Request, Response, StatusCode, header};
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use std::convert::Infallible;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore};
use tokio::time::{sleep, timeout};

/// A connection is closed after so long, whatever it does.
const CONNECTION_LIMIT: Duration = Duration::from_secs(15);
/// How long the port rests when the system has no descriptors left.
const REST: Duration = Duration::from_millis(100);
/// A port whose places are all taken looks this often for one.
const LOOK_EVERY: Duration = Duration::from_millis(5);

type Ready = dyn Fn() -> Result<String, String> + Send + Sync;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HttpLimits {
    /// Connections at a time that have not sent their request. Of more the oldest gives way.
    pub pending_max: usize,
    /// How long a connection may take to send its request.
    pub request_limit: Duration,
    /// Requests for `/metrics` that are answered at a time.
    pub metrics_max: usize,
}

impl Default for HttpLimits {
    fn default() -> HttpLimits {
        HttpLimits { pending_max: 64, request_limit: Duration::from_secs(2), metrics_max: 16 }
    }
}

/// Shows the node until it is dropped.
pub struct MetricsServer {
    address: SocketAddr,
    room: Arc<Room<IpAddr>>,
    closing: Arc<Notify>,
    thread: Option<JoinHandle<()>>,
}

impl MetricsServer {
    /// Listens. `ready` says whether the node takes work, with what is to be said about it, or why
    /// not.
    pub fn listen(
        address: SocketAddr,
        metrics: Arc<Metrics>,
        limits: HttpLimits,
        ready: impl Fn() -> Result<String, String> + Send + Sync + 'static,
    ) -> io::Result<MetricsServer> {
        let listener = std::net::TcpListener::bind(address)?;
        listener.set_nonblocking(true)?;
        let address = listener.local_addr()?;
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let closing = Arc::new(Notify::new());
        let room = Room::new("the port for metrics", limits.pending_max);
        let shown = Shown {
            metrics,
            ready: Box::new(ready),
            limits,
            room: Arc::clone(&room),
            readers: Arc::new(Semaphore::new(limits.metrics_max)),
            gate: LogGate::new(),
        };
        let (shown, closed) = (Arc::new(shown), Arc::clone(&closing));
        let thread = std::thread::Builder::new().name("forebay-metrics".into()).spawn(move || {
            runtime.block_on(async {
                let Ok(listener) = TcpListener::from_std(listener) else { return };
                tokio::select! {
                    () = accept(listener, shown) => {}
                    () = closed.notified() => {}
                }
            });
        })?;
        Ok(MetricsServer { address, room, closing, thread: Some(thread) })
    }

    /// Connections that have not sent their request.
    pub fn pending(&self) -> Arc<Room<IpAddr>> {
        Arc::clone(&self.room)
    }

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
    limits: HttpLimits,
    room: Arc<Room<IpAddr>>,
    /// Those who may still read numbers.
    readers: Arc<Semaphore>,
    gate: LogGate,
}

async fn accept(listener: TcpListener, shown: Arc<Shown>) {
    loop {
        match listener.accept().await {
            Ok((stream, from)) => {
                let evicted = Arc::new(Notify::new());
                let place = enter(&shown.room, from.ip(), &evicted).await;
                tokio::spawn(visit(stream, from.ip(), Arc::clone(&shown), place, evicted));
            }
            Err(_) => sleep(REST).await,
        }
    }
}

/// A place for a connection that has not sent its request. Those after it wait in the system's
/// queue meanwhile.
async fn enter(room: &Arc<Room<IpAddr>>, from: IpAddr, evicted: &Arc<Notify>) -> RoomPlace<IpAddr> {
    loop {
        let evict = Arc::clone(evicted);
        match room.try_enter(&from, move || evict.notify_one()) {
            Ok(place) => return place,
            Err(wait) => sleep(wait.min(LOOK_EVERY)).await,
        }
    }
}

async fn visit(
    stream: TcpStream,
    from: IpAddr,
    shown: Arc<Shown>,
    place: RoomPlace<IpAddr>,
    evicted: Arc<Notify>,
) {
    let serve = timeout(CONNECTION_LIMIT, serve(stream, Arc::clone(&shown), place));
    // Whether it ended well, gave way or was cut off, nothing is left to do but to tell of what was
    // no request.
    let ended = tokio::select! {
        ended = serve => ended,
        () = evicted.notified() => return,
    };
    if let Ok(Err(error)) = ended
        && error.is_parse()
        && let Some(repeated) = shown.gate.pass()
    {
        tracing::warn!(peer = %from, reason = %error, repeated, "no HTTP on the metrics port");
    }
}

async fn serve(stream: TcpStream, shown: Arc<Shown>, place: RoomPlace<IpAddr>) -> hyper::Result<()> {
    // Kept until the answer is sent.
    let reading = Arc::new(Mutex::new(None));
    let (limit, kept) = (shown.limits.request_limit, Arc::clone(&reading));
    let service = service_fn(move |request| {
        place.leave();
        let response = shown.answer(&request, &reading);
        async move { Ok::<_, Infallible>(response) }
    });
    let served = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(limit)
        .keep_alive(false)
        .serve_connection(TokioIo::new(stream), service)
        .await;
    drop(kept);
    served
}

type Reading = Mutex<Option<OwnedSemaphorePermit>>;

impl Shown {
    fn answer(&self, request: &Request<Incoming>, reading: &Reading) -> Response<String> {
        if request.method() != Method::GET {
            return plain(StatusCode::METHOD_NOT_ALLOWED, "allowed: GET\n".into());
        }
        match request.uri().path() {
            "/metrics" => {
                let Ok(permit) = Arc::clone(&self.readers).try_acquire_owned() else {
                    let most = self.limits.metrics_max;
                    let why = format!("{most} requests for /metrics are being answered; no more may be\n");
                    return plain(StatusCode::SERVICE_UNAVAILABLE, why);
                };
                *reading.lock() = Some(permit);
                let mut response = plain(StatusCode::OK, prometheus::render(self.metrics.gather()));
                let kind = header::HeaderValue::from_static(prometheus::CONTENT_TYPE);
                response.headers_mut().insert(header::CONTENT_TYPE, kind);
                response
            }
            "/healthz" => plain(StatusCode::OK, "ok\n".into()),
            "/readyz" => match (self.ready)() {
                Ok(notes) => plain(StatusCode::OK, format!("ready\n{notes}")),
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
