//! The thread that pushes metrics and spans to an OpenTelemetry collector. What goes wrong with it
//! is counted and logged, and matters to nobody else: what could not be pushed is lost, the next
//! push has the newer numbers anyway.

use super::otlp::{self, Resource};
use super::{Family, Kind, Metric, Metrics};
use crate::endpoint::{self, Poster};
use forebay_transfer::LogGate;
use http_body_util::{BodyExt, Limited};
use hyper::Uri;
use std::ops::RangeInclusive;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use thiserror::Error;
use tokio::sync::Notify;
use tokio::time::{sleep, timeout};

/// Bytes of a collector's answer that are read.
const ANSWER_BYTES_MAX: usize = 64 * 1024;
/// How often may be pushed.
pub(crate) const EVERY_S: RangeInclusive<u32> = 1..=3600;

/// Where to, and how often.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PushConfig {
    /// `http://host:port` of the collector.
    pub endpoint: String,
    pub node: String,
    /// Seconds between pushes.
    pub every_s: u32,
    /// How long an answer may take.
    pub limit_us: u64,
}

/// Why nothing can be pushed. That the collector is down is no reason.
#[derive(Debug, Error)]
pub enum PushError {
    #[error("endpoint is {value:?}; allowed: http://host:port")]
    Endpoint { value: String },
    #[error("every_s is {value}; allowed: {} to {}", EVERY_S.start(), EVERY_S.end())]
    Every { value: u32 },
    #[error("the pushing thread: {0}")]
    Thread(std::io::Error),
}

/// Pushes until it is dropped.
#[derive(Debug)]
pub struct Push {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug, Default)]
struct Shared {
    closing: AtomicBool,
    stirred: Notify,
    pushed: AtomicU64,
    failed: AtomicU64,
    is_failing: AtomicBool,
    gate: LogGate,
}

const PUSHES: Family = Family {
    name: "forebay_metrics_pushes_total",
    help: "Pushes to the collector, by how they ended.",
    kind: Kind::Counter,
};
const SPANS_DROPPED: Family = Family {
    name: "forebay_metrics_spans_dropped_total",
    help: "Spans that were dropped because too many waited to be pushed.",
    kind: Kind::Counter,
};

impl Push {
    /// Begins; the first push is after `every_s`.
    pub fn start(config: &PushConfig, metrics: Arc<Metrics>) -> Result<Push, PushError> {
        let endpoint = endpoint::parse(&config.endpoint)
            .ok_or_else(|| PushError::Endpoint { value: config.endpoint.clone() })?;
        if !EVERY_S.contains(&config.every_s) {
            return Err(PushError::Every { value: config.every_s });
        }
        let shared = Arc::new(Shared::default());
        let (of_push, of_metrics) = (Arc::clone(&shared), Arc::downgrade(&metrics));
        metrics.add("push", move |out: &mut Vec<Metric>| {
            of_push.collect(out);
            if let Some(metrics) = of_metrics.upgrade() {
                out.push(Metric::new(&SPANS_DROPPED, &[], metrics.spans().dropped() as f64));
            }
        });
        let runtime =
            tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(PushError::Thread)?;
        let pusher = Pusher::new(config, endpoint, Arc::clone(&shared), metrics);
        let thread = std::thread::Builder::new()
            .name("forebay-push".into())
            .spawn(move || {
                runtime.block_on(pusher.run());
                // A name that is being looked up keeps nobody from closing.
                runtime.shutdown_background();
            })
            .map_err(PushError::Thread)?;
        Ok(Push { shared, thread: Some(thread) })
    }
}

impl Drop for Push {
    fn drop(&mut self) {
        self.shared.closing.store(true, Ordering::Release);
        self.shared.stirred.notify_one();
        if let Some(thread) = self.thread.take() {
            // A panic of the thread has already been printed.
            let _ = thread.join();
        }
    }
}

impl Shared {
    /// Counts and logs how a push ended.
    fn note(&self, endpoint: &Uri, taken: Result<(), String>) {
        let count = if taken.is_ok() { &self.pushed } else { &self.failed };
        count.fetch_add(1, Ordering::Relaxed);
        let was_failing = self.is_failing.swap(taken.is_err(), Ordering::Relaxed);
        match taken {
            Ok(()) if was_failing => {
                self.gate.reset();
                tracing::info!(%endpoint, "metrics collector takes pushes again");
            }
            Ok(()) => {}
            Err(reason) => {
                if let Some(repeated) = self.gate.pass() {
                    tracing::warn!(%endpoint, reason, repeated, "metrics collector took no push");
                }
            }
        }
    }

    fn collect(&self, out: &mut Vec<Metric>) {
        for (end, count) in [("taken", &self.pushed), ("failed", &self.failed)] {
            out.push(Metric::new(&PUSHES, &[("end", end)], count.load(Ordering::Relaxed) as f64));
        }
    }
}

struct Pusher {
    shared: Arc<Shared>,
    metrics: Arc<Metrics>,
    poster: Poster,
    endpoint: Uri,
    node: String,
    start_unix_ns: u64,
    every: Duration,
    limit: Duration,
}

impl Pusher {
    fn new(config: &PushConfig, endpoint: Uri, shared: Arc<Shared>, metrics: Arc<Metrics>) -> Pusher {
        let limit = Duration::from_micros(config.limit_us);
        Pusher {
            shared,
            metrics,
            poster: Poster::new(limit),
            endpoint,
            node: config.node.clone(),
            start_unix_ns: unix_ns(),
            every: Duration::from_secs(config.every_s.into()),
            limit,
        }
    }

    async fn run(self) {
        while !self.shared.closing.load(Ordering::Acquire) {
            tokio::select! {
                () = self.shared.stirred.notified() => {}
                () = self.push_after_a_while() => {}
            }
        }
    }

    async fn push_after_a_while(&self) {
        sleep(self.every).await;
        let resource = Resource { node: &self.node, start_unix_ns: self.start_unix_ns };
        self.post("/v1/metrics", otlp::metrics_body(resource, &self.metrics.gather(), unix_ns())).await;
        let spans = self.metrics.spans().take();
        if !spans.is_empty() {
            self.post("/v1/traces", otlp::spans_body(resource, &spans)).await;
        }
    }

    async fn post(&self, path: &'static str, body: String) {
        let late = |_| Err(format!("no answer within {} ms", self.limit.as_millis()));
        let taken = timeout(self.limit, self.exchange(path, body)).await.unwrap_or_else(late);
        self.shared.note(&self.endpoint, taken);
    }

    /// Why the collector did not take it. The answer is read, so that the connection can be used
    /// again.
    async fn exchange(&self, path: &'static str, body: String) -> Result<(), String> {
        let answer = self.poster.post(&self.endpoint, path, None, body).await?;
        let status = answer.status();
        let body = Limited::new(answer.into_body(), ANSWER_BYTES_MAX).collect().await;
        body.map_err(|error| error.to_string())?;
        status.is_success().then_some(()).ok_or_else(|| status.to_string())
    }
}

/// Now, by the wall clock. A collector wants that; nothing else here depends on it.
pub(super) fn unix_ns() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use testkit::logged;

    #[test]
    fn a_collector_that_takes_nothing_is_one_line_and_one_when_it_takes_again() {
        let (shared, endpoint) = (Shared::default(), Uri::from_static("http://a:4318/"));
        let note = |taken: Result<(), &str>| logged(|| shared.note(&endpoint, taken.map_err(Into::into)));
        assert!(note(Ok(())).is_empty());
        let line = note(Err("429 Too Many Requests"));
        let fields = r#"endpoint=http://a:4318/ reason="429 Too Many Requests" repeated=0"#;
        assert!(line.contains(&format!("metrics collector took no push {fields}")), "{line}");
        assert!(note(Err("no answer within 300 ms")).is_empty());
        assert!(note(Ok(())).contains("metrics collector takes pushes again"));
        assert!(note(Ok(())).is_empty());
    }
}
