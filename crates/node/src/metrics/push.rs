//! What the node tells a collector by itself: its metrics, and its spans.

use super::{Family, Kind, Metric, Metrics, otlp};
use forebay_otlp::{MetricsBody, Push, PushConfig, PushError, unix_ns};
use std::sync::Arc;
use std::time::Duration;

const PUSHES: Family = Family {
    name: "forebay_metrics_pushes_total",
    help: "Pushes to the collector, by how they ended.",
    kind: Kind::Counter,
};
const SPANS_DROPPED: Family = Family {
    name: "forebay_metrics_spans_dropped_total",
    help: "Spans that were dropped because too many waited to be pushed, or the collector refuses them.",
    kind: Kind::Counter,
};

/// Pushes metrics every so often, and spans each second, until what is returned is dropped.
pub fn push(config: &PushConfig, every: Duration, metrics: &Arc<Metrics>) -> Result<Push, PushError> {
    let told = Arc::clone(metrics);
    let body = Box::new(move |resource: &_| otlp::metrics_body(resource, &told.gather(), unix_ns()));
    let push = Push::start(config, Arc::clone(metrics.spans()), Some(MetricsBody { every, body }))?;
    let (counts, spans) = (push.counts(), Arc::clone(metrics.spans()));
    metrics.add("push", move |out: &mut Vec<Metric>| {
        let ends = counts.ends().map(|(end, count)| Metric::new(&PUSHES, &[("end", end)], count as f64));
        out.extend(ends);
        out.push(Metric::new(&SPANS_DROPPED, &[], spans.dropped() as f64));
    });
    Ok(push)
}
