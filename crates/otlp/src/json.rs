//! Spans as OTLP's JSON, and the parts of it that metrics share. It does no I/O.
//!
//! Ids are hexadecimal and 64-bit integers are strings, as the encoding has it.

use super::spans::{Span, SpanKind};
use serde_json::{Value as Json, json};

/// Who tells.
#[derive(Debug, Clone)]
pub struct Resource {
    /// What it is, `forebay-node` for example.
    pub service: &'static str,
    /// Which one of them.
    pub instance: String,
    /// When it started, by the wall clock.
    pub start_unix_ns: u64,
}

impl Resource {
    pub fn json(&self) -> Json {
        let attributes = [("service.name", self.service), ("service.instance.id", &self.instance)];
        json!({"attributes": attributes.map(|(key, value)| attribute(key, value))})
    }
}

pub fn scope() -> Json {
    json!({"name": "forebay", "version": env!("CARGO_PKG_VERSION")})
}

pub fn attributes(pairs: &[(&str, String)]) -> Vec<Json> {
    pairs.iter().map(|(key, value)| attribute(key, value)).collect()
}

fn attribute(key: &str, value: &str) -> Json {
    json!({"key": key, "value": {"stringValue": value}})
}

pub(super) fn spans_body(resource: &Resource, spans: &[Span]) -> String {
    let spans: Vec<Json> = spans.iter().map(span).collect();
    let scope = json!({"scope": scope(), "spans": spans});
    json!({"resourceSpans": [{"resource": resource.json(), "scopeSpans": [scope]}]}).to_string()
}

fn span(span: &Span) -> Json {
    let kind = match span.kind {
        SpanKind::Internal => 1,
        SpanKind::Server => 2,
        SpanKind::Client => 3,
    };
    let status = match &span.error {
        Some(error) => json!({"code": 2, "message": error}),
        None => json!({"code": 1}),
    };
    let event = |(name, unix_ns): &(&str, u64)| json!({"name": name, "timeUnixNano": unix_ns.to_string()});
    json!({
        "traceId": hex::encode(span.trace),
        "spanId": hex::encode(span.id),
        "parentSpanId": span.parent.map(hex::encode).unwrap_or_default(),
        "name": span.name,
        "kind": kind,
        "startTimeUnixNano": span.start_unix_ns.to_string(),
        "endTimeUnixNano": span.end_unix_ns.to_string(),
        "attributes": attributes(&span.attributes),
        "events": span.events.iter().map(event).collect::<Vec<Json>>(),
        "status": status,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spans_are_what_a_collector_reads() {
        let read = Span {
            trace: [0xAB; 16],
            id: [1; 8],
            parent: Some([2; 8]),
            name: "read",
            kind: SpanKind::Client,
            start_unix_ns: 10,
            end_unix_ns: 20,
            attributes: vec![("peer", "b".into())],
            events: vec![("first-byte", 15)],
            error: Some("the peer is frozen".into()),
        };
        let resource = Resource { service: "forebay-node", instance: "left".into(), start_unix_ns: 5 };
        let body: Json = serde_json::from_str(&spans_body(&resource, &[read])).unwrap();
        let of = &body["resourceSpans"][0];
        let instance = json!({"key": "service.instance.id", "value": {"stringValue": "left"}});
        assert_eq!(of["resource"]["attributes"][1], instance);
        let span = &of["scopeSpans"][0]["spans"][0];
        assert_eq!(span["traceId"], "ab".repeat(16));
        assert_eq!(span["parentSpanId"], "02".repeat(8));
        assert_eq!((&span["kind"], &span["endTimeUnixNano"]), (&json!(3), &json!("20")));
        assert_eq!(span["events"], json!([{"name": "first-byte", "timeUnixNano": "15"}]));
        assert_eq!(span["status"], json!({"code": 2, "message": "the peer is frozen"}));
    }
}
