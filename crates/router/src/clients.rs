//! Connections of HTTP/1 clients: they are accepted, served, and ended in order when the router
//! ends. What is answered to a request is the caller's business.

use crate::relay::Reply;
use crate::stall::StallGuard;
use crate::state::{Phase, RouterState};
use http::header::CONNECTION;
use http::{HeaderValue, Request, Response, Version};
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use std::convert::Infallible;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;

/// A client connection without a request is closed after this time.
const IDLE_CLIENT: Duration = Duration::from_secs(75);

/// For the last events and answers, once all answers must end.
const LAST_BYTES: Duration = Duration::from_secs(1);

/// After an error of `accept` (no more file descriptors, say) the next is tried after this time.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// Set where the end of the connection is the end of an answer, and that did not come whole.
pub type Reset = Option<Arc<AtomicBool>>;

/// Serves clients until the router is cut off.
pub async fn serve_all<A, F>(listener: TcpListener, router: Arc<RouterState>, answer: A)
where
    A: Fn(Request<Incoming>, Reset) -> F + Clone + Send + Sync + 'static,
    F: Future<Output = Response<Reply>> + Send + 'static,
{
    let mut connections = JoinSet::new();
    let mut phases = router.phases();
    while *phases.borrow_and_update() < Phase::Draining {
        let has_room = connections.len() < router.limits.max_connections;
        tokio::select! {
            accepted = listener.accept(), if has_room => match accepted {
                Ok((stream, _)) => {
                    connections.spawn(serve(router.clone(), stream, answer.clone()));
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

/// Serves one client connection until either side has had enough.
async fn serve<A, F>(router: Arc<RouterState>, stream: TcpStream, answer: A)
where
    A: Fn(Request<Incoming>, Reset) -> F,
    F: Future<Output = Response<Reply>>,
{
    // Without it the end of a small answer waits for the client's delayed acknowledgement, 40 ms
    // and more.
    if stream.set_nodelay(true).is_err() {
        return;
    }
    let reset = Arc::new(AtomicBool::new(false));
    let io = TokioIo::new(StallGuard::new(stream, router.limits.client_stall, reset.clone()));
    let service = service_fn(|request: Request<Incoming>| {
        // To a client of HTTP/1.0 an answer without a length ends like its connection: in order, or
        // not.
        let reset = (request.version() == Version::HTTP_10).then(|| reset.clone());
        let (answer, router) = (answer(request, reset), &router);
        async move {
            let mut answer = answer.await;
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
