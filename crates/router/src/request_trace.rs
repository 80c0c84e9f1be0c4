//! What is traced of requests: which ones, whose part they are, and what engines are told of it, as
//! W3C's Trace Context has it. It knows headers; spans and their way to a collector are
//! `forebay_otlp`'s.

use crate::decisions::DecisionRecord;
use forebay_otlp::{ActiveSpan, Push, PushConfig, PushError, SpanKind, Spans};
use forebay_transfer::TraceContext;
use forebay_transfer::lock::Mutex;
use http::{HeaderMap, HeaderName, HeaderValue};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

pub const TRACEPARENT: HeaderName = HeaderName::from_static("traceparent");
const TRACESTATE: HeaderName = HeaderName::from_static("tracestate");

/// How long a collector may take to answer.
const PUSH_LIMIT: Duration = Duration::from_secs(2);

/// Who is told of traces, and of how many.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TraceConfig {
    /// `http://host:port` of an OpenTelemetry collector.
    pub collector: String,
    /// Of so many requests that come without a trace one is traced; 0: none.
    pub one_of: u32,
}

/// The traces of a router.
#[derive(Debug, Default)]
pub struct Tracing {
    spans: Arc<Spans>,
    /// Requests whose `traceparent` was ignored.
    ignored: AtomicU64,
    push: Mutex<Option<Push>>,
}

/// What is counted of traces.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct TracingCounts {
    pub ignored: u64,
    pub spans_dropped: u64,
    pub pushes_taken: u64,
    pub pushes_failed: u64,
}

impl Tracing {
    /// Traces from now on. `service` and `instance`: who the collector is told that this is.
    pub fn start(
        config: &TraceConfig,
        service: &'static str,
        instance: String,
    ) -> Result<Tracing, PushError> {
        let tracing = Tracing::default();
        let endpoint = config.collector.clone();
        let to = PushConfig { endpoint, service, instance, limit: PUSH_LIMIT };
        let push = Push::start(&to, Arc::clone(&tracing.spans), None)?;
        tracing.spans.export_one_of(config.one_of);
        *tracing.push.lock() = Some(push);
        Ok(tracing)
    }

    /// A request has come with these headers, of which those that must be ignored are removed. Its
    /// span, if it is traced.
    pub fn begin(&self, headers: &mut HeaderMap) -> Option<Box<ActiveSpan>> {
        if !self.spans.is_exported() {
            return None;
        }
        let parent = parent(headers);
        if parent.is_none() {
            if headers.remove(TRACEPARENT).is_some() {
                self.ignored.fetch_add(1, Ordering::Relaxed);
            }
            // It says nothing without a parent.
            headers.remove(TRACESTATE);
        }
        ActiveSpan::begin(&self.spans, parent, "request", SpanKind::Server).map(Box::new)
    }

    pub fn counts(&self) -> TracingCounts {
        let counts = self.push.lock().as_ref().map(Push::counts);
        let [(_, pushes_taken), (_, pushes_failed)] = counts.map(|counts| counts.ends()).unwrap_or_default();
        let ignored = self.ignored.load(Ordering::Relaxed);
        TracingCounts { ignored, spans_dropped: self.spans.dropped(), pushes_taken, pushes_failed }
    }

    /// What has ended is pushed, and nothing after that.
    pub fn stop(&self) {
        let push = self.push.lock().take();
        drop(push);
    }
}

/// What engines are told who do a part of this.
pub fn traceparent(span: &ActiveSpan) -> Option<HeaderValue> {
    HeaderValue::from_str(&span.context().traceparent()).ok()
}

/// Says on a span why a request goes where it goes, and what else was weighed.
pub fn explain(choice: &mut ActiveSpan, record: DecisionRecord) {
    choice.note("policy", record.policy);
    choice.note("engine", record.backend);
    choice.note("reason", record.reason.name());
    choice.note("prompt_tokens.estimated", record.input_tokens);
    choice.note("first_byte_us.predicted", record.predicted.first_byte_us);
    let scores = record.candidates.iter().filter_map(|of| Some(format!("{}={}", of.backend, of.score?)));
    choice.note("scores", scores.collect::<Vec<_>>().join(" "));
    if let Some(hand_over) = record.hand_over {
        choice.note("prefill_engine", hand_over.prefill_backend);
    }
}

/// Whose part a request is, if exactly one header says it as the standard allows.
fn parent(headers: &HeaderMap) -> Option<TraceContext> {
    let mut said = headers.get_all(TRACEPARENT).iter();
    let only = said.next().filter(|_| said.next().is_none())?;
    TraceContext::parse(only.to_str().ok()?.trim())
}

#[cfg(test)]
mod tests {
    use super::*;

    const PARENT: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";

    fn headers(parents: &[&'static str]) -> HeaderMap {
        let mut headers = HeaderMap::new();
        headers.insert(TRACESTATE, HeaderValue::from_static("a=b"));
        for parent in parents {
            headers.append(TRACEPARENT, HeaderValue::from_static(parent));
        }
        headers
    }

    fn tracing() -> Tracing {
        let tracing = Tracing::default();
        tracing.spans.export_one_of(0);
        tracing
    }

    #[test]
    fn a_sampled_parent_is_followed_and_its_state_goes_on() {
        let (tracing, mut headers) = (tracing(), headers(&[PARENT]));
        let span = tracing.begin(&mut headers).unwrap();
        assert_eq!(traceparent(&span).unwrap().to_str().unwrap()[..36], PARENT[..36]);
        assert_ne!(span.context().traceparent(), PARENT);
        assert!(headers.contains_key(TRACESTATE));
    }

    #[test]
    fn a_parent_that_is_not_sampled_passes_and_is_not_traced() {
        let mut headers = headers(&["00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00"]);
        assert!(tracing().begin(&mut headers).is_none());
        assert!(headers.contains_key(TRACEPARENT) && headers.contains_key(TRACESTATE));
    }

    #[test]
    fn parents_that_the_standard_does_not_allow_are_removed_and_counted() {
        let tracing = tracing();
        for parents in [&["nonsense"][..], &[PARENT, PARENT]] {
            let mut headers = headers(parents);
            assert!(tracing.begin(&mut headers).is_none());
            assert!(headers.is_empty(), "{parents:?}");
        }
        assert!(tracing.begin(&mut headers(&[])).is_none());
        assert_eq!(tracing.counts().ignored, 2);
    }

    #[test]
    fn who_traces_nothing_passes_all_headers() {
        let (tracing, mut headers) = (Tracing::default(), headers(&["nonsense"]));
        assert!(tracing.begin(&mut headers).is_none());
        assert!(headers.contains_key(TRACEPARENT) && tracing.counts() == TracingCounts::default());
    }
}
