//! Metrics as OTLP's JSON, for OTLP/HTTP. It does no I/O. Counters and histograms are cumulative.

use super::{Histogram, Kind, Metric, Value};
use forebay_otlp::Resource;
use forebay_otlp::json::{attributes, scope};
use serde_json::{Value as Json, json};
use std::collections::BTreeMap;

pub(super) fn metrics_body(resource: &Resource, metrics: &[Metric], now_unix_ns: u64) -> String {
    let mut families: BTreeMap<&str, Vec<&Metric>> = BTreeMap::new();
    for metric in metrics {
        families.entry(metric.family.name).or_default().push(metric);
    }
    let families: Vec<Json> = families.values().map(|of| family(resource, of, now_unix_ns)).collect();
    let scope = json!({"scope": scope(), "metrics": families});
    json!({"resourceMetrics": [{"resource": resource.json(), "scopeMetrics": [scope]}]}).to_string()
}

fn family(resource: &Resource, metrics: &[&Metric], now_unix_ns: u64) -> Json {
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
fn point(resource: &Resource, metric: &Metric, now_unix_ns: u64) -> Option<Json> {
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metrics::Family;

    const LOTS: Family = Family { name: "forebay_lots_total", help: "Lots.", kind: Kind::Counter };
    const WAIT: Family = Family { name: "forebay_wait_seconds", help: "Wait.", kind: Kind::Histogram };

    #[test]
    fn metrics_are_what_a_collector_reads() {
        let resource = Resource { service: "forebay-node", instance: "left".into(), start_unix_ns: 5 };
        let histogram = Histogram { bounds: vec![0.5], counts: vec![2, 1], sum: 3.25 };
        let metrics = [
            Metric::new(&LOTS, &[("peer", "a\"b")], 7.0),
            Metric::new(&LOTS, &[("peer", "nan")], f64::NAN),
            Metric { family: &WAIT, labels: Vec::new(), value: Value::Histogram(histogram) },
        ];
        let body: Json = serde_json::from_str(&metrics_body(&resource, &metrics, 9)).unwrap();
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
}
