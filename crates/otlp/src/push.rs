//! The thread that pushes spans, and what else its owner tells, to an OpenTelemetry collector. What
//! goes wrong with it is counted and logged, and matters to nobody else. Metrics that could not be
//! pushed are lost, the next push has the newer numbers anyway; spans wait for the next push.

use super::endpoint::{self, Poster};
use super::json::{self, Resource};
use super::spans::Spans;
use forebay_transfer::LogGate;
use http::StatusCode;
use http_body_util::{BodyExt, Limited};
use hyper::Uri;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use thiserror::Error;
use tokio::sync::Notify;
use tokio::time::{Instant, sleep_until, timeout};

/// Bytes of a collector's answer that are read.
const ANSWER_BYTES_MAX: usize = 64 * 1024;
/// Time between two looks at what spans wait: short, so that there is room for the next ones.
const SPANS_EVERY: Duration = Duration::from_secs(1);
/// How long the last push may take: whoever closes waits for it.
const LAST_LIMIT: Duration = Duration::from_secs(1);

/// Where to, and who tells.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PushConfig {
    /// `http://host:port` of the collector.
    pub endpoint: String,
    /// What the process is, `forebay-node` for example.
    pub service: &'static str,
    /// Which one of them.
    pub instance: String,
    /// How long an answer may take.
    pub limit: Duration,
}

/// The body with all metrics of now, and how often it is pushed.
pub struct MetricsBody {
    pub every: Duration,
    pub body: Box<dyn Fn(&Resource) -> String + Send>,
}

/// Why nothing can be pushed. That the collector is down is no reason.
#[derive(Debug, Error)]
pub enum PushError {
    #[error("endpoint is {value:?}; allowed: {}", endpoint::ALLOWED)]
    Endpoint { value: String },
    #[error("the pushing thread: {0}")]
    Thread(std::io::Error),
}

/// Pushes until it is dropped; then what spans still wait are pushed once.
#[derive(Debug)]
pub struct Push {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

/// Pushes by how they ended.
#[derive(Debug, Default)]
pub struct PushCounts {
    taken: AtomicU64,
    failed: AtomicU64,
}

impl PushCounts {
    /// All of them, by name.
    pub fn ends(&self) -> [(&'static str, u64); 2] {
        [("taken", self.taken.load(Ordering::Relaxed)), ("failed", self.failed.load(Ordering::Relaxed))]
    }
}

#[derive(Debug, Default)]
struct Shared {
    closing: AtomicBool,
    stirred: Notify,
    counts: Arc<PushCounts>,
    is_failing: AtomicBool,
    gate: LogGate,
}

/// Why a collector did not take something.
struct NotTaken {
    reason: String,
    /// It may take the same later.
    may_later: bool,
}

impl Push {
    /// Begins; spans are pushed each second.
    pub fn start(
        config: &PushConfig,
        spans: Arc<Spans>,
        metrics: Option<MetricsBody>,
    ) -> Result<Push, PushError> {
        let endpoint = endpoint::parse(&config.endpoint)
            .ok_or_else(|| PushError::Endpoint { value: endpoint::without_user(&config.endpoint) })?;
        let shared = Arc::new(Shared::default());
        let runtime =
            tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(PushError::Thread)?;
        let resource =
            Resource { service: config.service, instance: config.instance.clone(), start_unix_ns: unix_ns() };
        let poster = Poster::new(config.limit);
        let pusher =
            Pusher { shared: Arc::clone(&shared), spans, poster, endpoint, resource, limit: config.limit };
        let thread = std::thread::Builder::new()
            .name("forebay-push".into())
            .spawn(move || {
                runtime.block_on(pusher.run(metrics));
                // A name that is being looked up keeps nobody from closing.
                runtime.shutdown_background();
            })
            .map_err(PushError::Thread)?;
        Ok(Push { shared, thread: Some(thread) })
    }

    pub fn counts(&self) -> Arc<PushCounts> {
        Arc::clone(&self.shared.counts)
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
    fn note(&self, endpoint: &Uri, reason: Option<&str>) {
        let count = if reason.is_none() { &self.counts.taken } else { &self.counts.failed };
        count.fetch_add(1, Ordering::Relaxed);
        let was_failing = self.is_failing.swap(reason.is_some(), Ordering::Relaxed);
        match reason {
            None if was_failing => {
                self.gate.reset();
                tracing::info!(%endpoint, "collector takes pushes again");
            }
            None => {}
            Some(reason) => {
                if let Some(repeated) = self.gate.pass() {
                    tracing::warn!(%endpoint, reason, repeated, "collector took no push");
                }
            }
        }
    }
}

struct Pusher {
    shared: Arc<Shared>,
    spans: Arc<Spans>,
    poster: Poster,
    endpoint: Uri,
    resource: Resource,
    limit: Duration,
}

impl Pusher {
    async fn run(self, metrics: Option<MetricsBody>) {
        let begin = Instant::now();
        let mut spans_at = begin + SPANS_EVERY;
        let mut metrics_at = metrics.as_ref().map(|metrics| begin + metrics.every);
        while !self.shared.closing.load(Ordering::Acquire) {
            let wake_at = metrics_at.map_or(spans_at, |at| at.min(spans_at));
            tokio::select! {
                () = self.shared.stirred.notified() => continue,
                () = sleep_until(wake_at) => {}
            }
            let now = Instant::now();
            if let (Some(metrics), Some(at)) = (&metrics, &mut metrics_at)
                && now >= *at
            {
                self.or_closing(self.push_metrics(metrics)).await;
                *at = Instant::now() + metrics.every;
            }
            if now >= spans_at {
                self.or_closing(self.push_spans()).await;
                spans_at = Instant::now() + SPANS_EVERY;
            }
        }
        // What does not go now is lost, as is what came after.
        let _ = timeout(LAST_LIMIT, self.push_spans()).await;
    }

    /// Does this, unless it is time to close.
    async fn or_closing(&self, work: impl Future<Output = ()>) {
        tokio::select! {
            () = self.shared.stirred.notified() => {}
            () = work => {}
        }
    }

    async fn push_metrics(&self, metrics: &MetricsBody) {
        // The next push has the newer numbers.
        let _ = self.post("/v1/metrics", (metrics.body)(&self.resource)).await;
    }

    async fn push_spans(&self) {
        let spans = self.spans.take();
        if spans.is_empty() {
            return;
        }
        let body = json::spans_body(&self.resource, &spans);
        let mut taken = Taken { spans: &self.spans, under_way: spans };
        match self.post("/v1/traces", body).await {
            Ok(()) => taken.under_way.clear(),
            Err(NotTaken { may_later: true, .. }) => {}
            Err(NotTaken { may_later: false, .. }) => {
                self.spans.lose(taken.under_way.len());
                taken.under_way.clear();
            }
        }
    }

    async fn post(&self, path: &'static str, body: String) -> Result<(), NotTaken> {
        let late = |_| Err(NotTaken::for_now(format!("no answer within {} ms", self.limit.as_millis())));
        let taken = timeout(self.limit, self.exchange(path, body)).await.unwrap_or_else(late);
        self.shared.note(&self.endpoint, taken.as_ref().err().map(|not| not.reason.as_str()));
        taken
    }

    /// The answer is read, so that the connection can be used again.
    async fn exchange(&self, path: &'static str, body: String) -> Result<(), NotTaken> {
        let answer = self.poster.post(&self.endpoint, path, None, body).await.map_err(NotTaken::for_now)?;
        let status = answer.status();
        let body = Limited::new(answer.into_body(), ANSWER_BYTES_MAX).collect().await;
        body.map_err(|error| NotTaken::for_now(error.to_string()))?;
        let may_later = is_of_now(status);
        status.is_success().then_some(()).ok_or_else(|| NotTaken { reason: status.to_string(), may_later })
    }
}

impl NotTaken {
    fn for_now(reason: String) -> NotTaken {
        NotTaken { reason, may_later: true }
    }
}

/// Statuses after which OTLP has a client send the same again.
fn is_of_now(status: StatusCode) -> bool {
    matches!(
        status,
        StatusCode::TOO_MANY_REQUESTS
            | StatusCode::BAD_GATEWAY
            | StatusCode::SERVICE_UNAVAILABLE
            | StatusCode::GATEWAY_TIMEOUT
    )
}

/// Spans under way to the collector: they wait again unless it has taken them.
struct Taken<'a> {
    spans: &'a Spans,
    under_way: Vec<super::Span>,
}

impl Drop for Taken<'_> {
    fn drop(&mut self) {
        self.spans.keep(self.under_way.drain(..));
    }
}

/// Now, by the wall clock. A collector wants that; nothing else here depends on it.
pub fn unix_ns() -> u64 {
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
        let note = |reason: Option<&str>| logged(|| shared.note(&endpoint, reason));
        assert!(note(None).is_empty());
        let line = note(Some("429 Too Many Requests"));
        let fields = r#"endpoint=http://a:4318/ reason="429 Too Many Requests" repeated=0"#;
        assert!(line.contains(&format!("collector took no push {fields}")), "{line}");
        assert!(note(Some("no answer within 300 ms")).is_empty());
        assert!(note(None).contains("collector takes pushes again"));
        assert!(note(None).is_empty());
    }
}
