//! What the node shows of itself: numbers for Prometheus and OpenTelemetry, spans of sampled
//! transfers.
//!
//! Nothing is registered and nothing is counted here: a source is asked when somebody looks, and
//! answers with what its owner counts anyway. A source that panics, a collector that is down
//! and a client that reads slowly harm nobody; they are counted.

mod http;
mod otlp;
mod prometheus;
mod push;
pub mod sources;

pub use http::{HttpLimits, MetricsServer};
pub use prometheus::render;
pub use push::push;

use forebay_otlp::Spans;
use forebay_transfer::LogGate;
use forebay_transfer::lock::RwLock;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Numbers of one source at most; those after are left out.
const METRICS_MAX: usize = 10_000;

/// A name that numbers are shown under. There is one constant per name, so that a name has one kind
/// and one help.
#[derive(Debug, PartialEq, Eq)]
pub struct Family {
    /// Letters, digits and underscores; what it counts, with its unit. Counters end in `_total`.
    pub name: &'static str,
    /// One sentence.
    pub help: &'static str,
    pub kind: Kind,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    Counter,
    Gauge,
    Histogram,
}

#[derive(Debug, Clone, PartialEq)]
pub struct Metric {
    pub family: &'static Family,
    /// What tells it from others of that name.
    pub labels: Vec<(&'static str, String)>,
    pub value: Value,
}

#[derive(Debug, Clone, PartialEq)]
pub enum Value {
    Number(f64),
    Histogram(Histogram),
}

#[derive(Debug, Clone, PartialEq, Default)]
pub struct Histogram {
    /// Upper bounds, rising. An observation is at most its bound.
    pub bounds: Vec<f64>,
    /// Observations up to each bound and above the one before; one more for those above all bounds.
    pub counts: Vec<u64>,
    pub sum: f64,
}

impl Metric {
    pub fn new(family: &'static Family, labels: &[(&'static str, &str)], value: f64) -> Metric {
        let labels = labels.iter().map(|&(name, value)| (name, value.to_owned())).collect();
        Metric { family, labels, value: Value::Number(value) }
    }
}

/// Adds the numbers of one part of the node.
type Source = dyn Fn(&mut Vec<Metric>) + Send + Sync;

const SOURCE_FAULTS: Family = Family {
    name: "forebay_metrics_source_faults_total",
    help: "Times a source of metrics failed; its numbers were left out.",
    kind: Kind::Counter,
};

/// All that the node shows.
#[derive(Default)]
pub struct Metrics {
    sources: RwLock<Vec<Arc<Named>>>,
    spans: Arc<Spans>,
}

struct Named {
    name: &'static str,
    source: Box<Source>,
    faults: AtomicU64,
    gate: LogGate,
}

impl Metrics {
    pub fn new() -> Metrics {
        Metrics::default()
    }

    /// Asks this source too, from now on, which adds its numbers of now. It is quick: whoever looks
    /// waits for it. The name is for the count of its faults.
    pub fn add(&self, name: &'static str, source: impl Fn(&mut Vec<Metric>) + Send + Sync + 'static) {
        let named = Named { name, source: Box::new(source), faults: AtomicU64::new(0), gate: LogGate::new() };
        self.sources.write().push(Arc::new(named));
    }

    /// Shows a part of the node as long as it is there.
    pub(crate) fn add_part<T: Send + Sync + 'static>(
        &self,
        name: &'static str,
        part: &Arc<T>,
        show: impl Fn(&T, &mut Vec<Metric>) + Send + Sync + 'static,
    ) {
        let part = Arc::downgrade(part);
        self.add(name, move |out| {
            if let Some(part) = part.upgrade() {
                show(&part, out);
            }
        });
    }

    /// Spans that wait to be pushed.
    pub fn spans(&self) -> &Arc<Spans> {
        &self.spans
    }

    pub fn gather(&self) -> Vec<Metric> {
        let sources = self.sources.read().clone();
        let mut metrics: Vec<Metric> = sources.iter().flat_map(|named| named.collect()).collect();
        metrics.extend(sources.iter().map(|named| {
            let faults = named.faults.load(Ordering::Relaxed);
            Metric::new(&SOURCE_FAULTS, &[("source", named.name)], faults as f64)
        }));
        metrics
    }
}

impl Named {
    /// The numbers of this source; none if it panics.
    fn collect(&self) -> Vec<Metric> {
        let collected = catch_unwind(AssertUnwindSafe(|| {
            let mut metrics = Vec::new();
            (self.source)(&mut metrics);
            metrics.truncate(METRICS_MAX);
            metrics
        }));
        collected.unwrap_or_else(|_| {
            self.faults.fetch_add(1, Ordering::Relaxed);
            if let Some(repeated) = self.gate.pass() {
                tracing::error!(source = self.name, repeated, "metrics source failed");
            }
            Vec::new()
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const UP: Family = Family { name: "forebay_up", help: "Whether it is.", kind: Kind::Gauge };

    #[test]
    fn a_source_that_panics_is_left_out_and_counted() {
        let metrics = Metrics::new();
        metrics.add("bad", |out: &mut Vec<Metric>| {
            out.push(Metric::new(&UP, &[("of", "bad")], 1.0));
            panic!("a source that panics, as the test wants");
        });
        metrics.add("good", |out: &mut Vec<Metric>| out.push(Metric::new(&UP, &[("of", "good")], 1.0)));
        let line = testkit::logged(|| drop(metrics.gather()));
        assert!(line.contains(r#"metrics source failed source="bad" repeated=0"#), "{line}");
        let gathered = metrics.gather();
        assert!(gathered.contains(&Metric::new(&UP, &[("of", "good")], 1.0)));
        assert!(!gathered.contains(&Metric::new(&UP, &[("of", "bad")], 1.0)));
        assert!(gathered.contains(&Metric::new(&SOURCE_FAULTS, &[("source", "bad")], 2.0)));
        assert!(gathered.contains(&Metric::new(&SOURCE_FAULTS, &[("source", "good")], 0.0)));
    }

    #[test]
    fn a_source_shows_no_more_than_its_limit() {
        let metrics = Metrics::new();
        metrics.add("many", |out: &mut Vec<Metric>| {
            out.extend((0..2 * METRICS_MAX).map(|_| Metric::new(&UP, &[], 1.0)));
        });
        assert_eq!(metrics.gather().len(), METRICS_MAX + 1);
    }
}
