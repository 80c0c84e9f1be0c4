//! Waiting, over HTTP, for somebody who says that it may go on: an operator, or a tool of llm-d's,
//! who looks at what was found and has it checked again. Ends by itself after a limit.

use super::report::Report;
use crate::cmd::signals::Signals;
use axum::extract::{RawQuery, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use forebay_results::output::Error;
use forebay_transfer::lock::Mutex;
use serde_json::json;
use std::net::SocketAddr;
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};
use tokio::sync::oneshot;

/// For the last answers to leave.
const FAREWELL: Duration = Duration::from_secs(1);

/// Checks again, and measures if that is wanted.
type Again<'a> = &'a dyn Fn(bool) -> Result<Report, Error>;

/// What those who answer requests tell the one who waits.
enum Told {
    Run {
        measures: bool,
        done: oneshot::Sender<Result<Report, String>>,
    },
    Exit,
    /// A signal: it does not go on.
    End,
}

/// What is told to whoever asks.
struct Shared {
    state: Mutex<Paused>,
    told: mpsc::Sender<Told>,
}

struct Paused {
    report: Report,
    runs: u64,
    is_running: bool,
}

/// Waits, and returns what was found last.
pub fn until_told(
    address: SocketAddr,
    limit: Duration,
    report: Report,
    again: Again<'_>,
) -> Result<Report, Error> {
    let (sender, told) = mpsc::channel();
    let state = Mutex::new(Paused { report, runs: 1, is_running: false });
    let shared = Arc::new(Shared { state, told: sender.clone() });
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
    let listener = runtime.block_on(tokio::net::TcpListener::bind(address));
    let listener = listener.map_err(|error| format!("--pause {address}: {error}"))?;
    let address = listener.local_addr()?;
    let mut signals = runtime.block_on(async { Signals::listen() })?;
    println!("paused: POST http://{address}/exit goes on; so does it after {limit:?}");
    let (stop, stopped) = oneshot::channel();
    let served = runtime.spawn(serve(listener, Arc::clone(&shared), stopped));
    runtime.spawn(async move {
        signals.next().await;
        let _ = sender.send(Told::End);
    });
    let ended = wait(&shared, &told, limit, again);
    drop(stop);
    // The port is the command's from now on.
    let _ = runtime.block_on(async { tokio::time::timeout(FAREWELL, served).await });
    ended
}

async fn serve(listener: tokio::net::TcpListener, shared: Arc<Shared>, stopped: oneshot::Receiver<()>) {
    let routes = Router::new()
        .route("/health", get(|| async { "paused\n" }))
        .route("/status", get(status))
        .route("/run", post(run))
        // llm-d's own tools say GET.
        .route("/exit", post(exit).get(exit))
        .with_state(shared);
    let stopped = async {
        let _ = stopped.await;
    };
    // Without its port this waits for its limit.
    let _ = axum::serve(listener, routes).with_graceful_shutdown(stopped).await;
}

/// Does what is told until it is told to go on.
fn wait(
    shared: &Shared,
    told: &mpsc::Receiver<Told>,
    limit: Duration,
    again: Again<'_>,
) -> Result<Report, Error> {
    let begin = Instant::now();
    let last = || shared.state.lock().report.clone();
    loop {
        match told.recv_timeout(limit.saturating_sub(begin.elapsed())) {
            Ok(Told::Exit) => return Ok(last()),
            Ok(Told::End) => return Err("a signal ended the pause".into()),
            Ok(Told::Run { measures, done }) => {
                let ran = again(measures).map_err(|error| error.to_string());
                let mut state = shared.state.lock();
                state.is_running = false;
                if let Ok(report) = &ran {
                    report.print();
                    state.report = report.clone();
                    state.runs += 1;
                }
                drop(state);
                // Whoever asked may have gone.
                let _ = done.send(ran);
            }
            Err(_) => {
                println!("nobody has ended the pause within {limit:?}: it goes on");
                return Ok(last());
            }
        }
    }
}

async fn status(State(shared): State<Arc<Shared>>) -> Response {
    let state = shared.state.lock();
    let is = if state.is_running { "running" } else { "paused" };
    Json(json!({"state": is, "runs": state.runs, "report": state.report.to_json()})).into_response()
}

async fn run(State(shared): State<Arc<Shared>>, RawQuery(query): RawQuery) -> Response {
    let refuse = |status, why: &str| (status, Json(json!({"error": why}))).into_response();
    let measures = match query.as_deref() {
        None | Some("") => false,
        Some("measure") => true,
        Some(other) => {
            let why = format!("the query is '{other}'; allowed is 'measure', or none");
            return refuse(StatusCode::BAD_REQUEST, &why);
        }
    };
    if std::mem::replace(&mut shared.state.lock().is_running, true) {
        return refuse(StatusCode::CONFLICT, "the checks run already");
    }
    let (done, ended) = oneshot::channel();
    // Without an answer the pause has ended.
    let _ = shared.told.send(Told::Run { measures, done });
    match ended.await {
        Ok(Ok(report)) => Json(report.to_json()).into_response(),
        Ok(Err(error)) => refuse(StatusCode::INTERNAL_SERVER_ERROR, &error),
        Err(_) => refuse(StatusCode::SERVICE_UNAVAILABLE, "the pause has ended"),
    }
}

async fn exit(State(shared): State<Arc<Shared>>) -> Response {
    // Whoever was faster has ended it.
    let _ = shared.told.send(Told::Exit);
    Json(json!({"state": "going on"})).into_response()
}
