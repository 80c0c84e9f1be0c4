//! Metrics and spans as OTLP's JSON, for OTLP/HTTP. It does no I/O.
//!
//! Ids are hexadecimal and 64-bit integers are strings, as the encoding has it. Counters and
//! histograms are cumulative.

use super::{Histogram, Kind, Metric, Span, Value};
use serde_json::{Value as Json, json};
use std::collections::BTreeMap;

#[derive(Debug, Clone, Copy)]
pub(super) struct Resource<'a> {
    pub node: &'a str,
    /// When it started, by the wall clock.
    pub start_unix_ns: u64,
}

pub(super) fn metrics_body(resource: Resource<'_>, metrics: &[Metric], now_unix_ns: u64) -> String {
    let mut families: BTreeMap<&str, Vec<&Metric>> = BTreeMap::new();
    for metric in metrics {
        families.entry(metric.family.name).or_default().push(metric);
    }
    let families: Vec<Json> = families.values().map(|of| family(resource, of, now_unix_ns)).collect();
    let scope = json!({"scope": scope(), "metrics": families});
    json!({"resourceMetrics": [{"resource": attributes_of(resource), "scopeMetrics": [scope]}]}).to_string()
}

pub(super) fn spans_body(resource: Resource<'_>, spans: &[Span]) -> String {
    let spans: Vec<Json> = spans.iter().map(span).collect();
    let scope = json!({"scope": scope(), "spans": spans});
    json!({"resourceSpans": [{"resource": attributes_of(resource), "scopeSpans": [scope]}]}).to_string()
}

fn scope() -> Json {
    json!({"name": "forebay", "version": env!("CARGO_PKG_VERSION")})
}

fn attributes_of(resource: Resource<'_>) -> Json {
    let attributes = [("service.name", "forebay-node"), ("service.instance.id", resource.node)];
    json!({"attributes": attributes.map(|(key, value)| attribute(key, value))})
}

fn attribute(key: &str, value: &str) -> Json {
    json!({"key": key, "value": {"stringValue": value}})
}

fn attributes(pairs: &[(&str, String)]) -> Vec<Json> {
    pairs.iter().map(|(key, value)| attribute(key, value)).collect()
}

fn family(resource: Resource<'_>, metrics: &[&Metric], now_unix_ns: u64) -> Json {
    let points = metrics.iter().filter_map(|metric| point(resource, metric, now_unix_ns));
    let points: Vec<Json> = points.collect();
    let family = metrics[0].family;
    let cumulative = 2;
    let (key, data) = match family.kind {
        Kind::Counter => {
            ("sum", json!({"aggregationTemporality": cumulative, "isMonotonic": true, "dataPoints": points}))
        }
        Kind::Gauge => ("gauge", json!({"dataPoints": points})),
        Kind::Histogram => ("histogram", json!({"aggregationTemporality": cumulative, "dataPoints": points})),
    };
    json!({"name": family.name, "description": family.help, key: data})
}

/// A number; none where JSON has none for it.
fn point(resource: Resource<'_>, metric: &Metric, now_unix_ns: u64) -> Option<Json> {
    let mut point = match &metric.value {
        Value::Number(number) => number.is_finite().then(|| json!({"asDouble": number}))?,
        Value::Histogram(histogram) => histogram_point(histogram)?,
    };
    point["attributes"] = attributes(&metric.labels).into();
    point["startTimeUnixNano"] = resource.start_unix_ns.to_string().into();
    point["timeUnixNano"] = now_unix_ns.to_string().into();
    Some(point)
}

fn histogram_point(histogram: &Histogram) -> Option<Json> {
    let is_finite = histogram.sum.is_finite() && histogram.bounds.iter().all(|bound| bound.is_finite());
    let counts: Vec<String> = histogram.counts.iter().map(u64::to_string).collect();
    let count: u64 = histogram.counts.iter().sum();
    is_finite.then(|| {
        json!({
            "count": count.to_string(),
            "sum": histogram.sum,
            "bucketCounts": counts,
            "explicitBounds": histogram.bounds,
        })
    })
}

fn span(span: &Span) -> Json {
    let internal = 1;
    let status = match &span.error {
        Some(error) => json!({"code": 2, "message": error}),
        None => json!({"code": 1}),
    };
    json!({
        "traceId": hex::encode(span.trace),
        "spanId": hex::encode(span.id),
        "parentSpanId": span.parent.map(hex::encode).unwrap_or_default(),
        "name": span.name,
        "kind": internal,
        "startTimeUnixNano": span.start_unix_ns.to_string(),
        "endTimeUnixNano": span.end_unix_ns.to_string(),
        "attributes": attributes(&span.attributes),
        "status": status,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metrics::Family;

    const LOTS: Family = Family { name: "forebay_lots_total", help: "Lots.", kind: Kind::Counter };
    const WAIT: Family = Family { name: "forebay_wait_seconds", help: "Wait.", kind: Kind::Histogram };
    const RESOURCE: Resource<'_> = Resource { node: "left", start_unix_ns: 5 };

    #[test]
    fn metrics_are_what_a_collector_reads() {
        let histogram = Histogram { bounds: vec![0.5], counts: vec![2, 1], sum: 3.25 };
        let metrics = [
            Metric::new(&LOTS, &[("peer", "a\"b")], 7.0),
            Metric::new(&LOTS, &[("peer", "nan")], f64::NAN),
            Metric { family: &WAIT, labels: Vec::new(), value: Value::Histogram(histogram) },
        ];
        let body: Json = serde_json::from_str(&metrics_body(RESOURCE, &metrics, 9)).unwrap();
        let of = &body["resourceMetrics"][0];
        let names = &of["resource"]["attributes"];
        assert_eq!(names[1], json!({"key": "service.instance.id", "value": {"stringValue": "left"}}));
        let metrics = &of["scopeMetrics"][0]["metrics"];
        let point = json!({
            "asDouble": 7.0,
            "attributes": [{"key": "peer", "value": {"stringValue": "a\"b"}}],
            "startTimeUnixNano": "5",
            "timeUnixNano": "9",
        });
        let sum = json!({"aggregationTemporality": 2, "isMonotonic": true, "dataPoints": [point]});
        let lots = json!({"name": "forebay_lots_total", "description": "Lots.", "sum": sum});
        assert_eq!(metrics[0], lots, "what is not a number is left out");
        let point = &metrics[1]["histogram"]["dataPoints"][0];
        assert_eq!(point["count"], "3");
        assert_eq!(point["bucketCounts"], json!(["2", "1"]));
        assert_eq!(point["explicitBounds"], json!([0.5]));
    }

    #[test]
    fn spans_are_what_a_collector_reads() {
        let read = Span {
            trace: [0xAB; 16],
            id: [1; 8],
            parent: Some([2; 8]),
            name: "read",
            start_unix_ns: 10,
            end_unix_ns: 20,
            attributes: vec![("peer", "b".into())],
            error: Some("the peer is frozen".into()),
        };
        let body: Json = serde_json::from_str(&spans_body(RESOURCE, &[read])).unwrap();
        let span = &body["resourceSpans"][0]["scopeSpans"][0]["spans"][0];
        assert_eq!(span["traceId"], "ab".repeat(16));
        assert_eq!(span["parentSpanId"], "02".repeat(8));
        assert_eq!(span["endTimeUnixNano"], "20");
        assert_eq!(span["status"], json!({"code": 2, "message": "the peer is frozen"}));
    }
}
