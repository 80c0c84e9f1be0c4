//! What nodes show of what goes on between them, and that nothing of it depends on whoever looks.

use crate::http::{LIMIT, TAKEN, collector, get};
use crate::neighbours::{Pair, store_all, store_all_on_disk, write};
use crate::rig::*;
use forebay_client::protocol::control::{Verb, Verdict};
use forebay_node::{CollectorConfig, MetricsConfig, Node, NodeConfig};
use forebay_store::TenantId;
use forebay_transfer::End;
use rustix::process::Signal;
use serde_json::Value;
use std::net::{SocketAddr, TcpListener};
use std::path::Path;
use std::time::Instant;
use testkit::{ended, eventually};

/// Has a node tell this collector of everything, every second. A push that is late is lost, and its
/// spans with it.
fn tell(site: &Site, endpoint: &str, limit_ms: u64) {
    let mut config = site.config();
    let push = CollectorConfig { every_s: 1, limit_ms, trace_one_of: 1, ..CollectorConfig::new(endpoint) };
    let listen = SocketAddr::from(([127, 0, 0, 1], 0));
    config.metrics = Some(MetricsConfig { push: Some(push), ..MetricsConfig::new(listen) });
    write(site, &config);
}

/// A number on a node's page.
fn shown(node: &Node, line: &str) -> f64 {
    let (_, page) = get(node.metrics_address().unwrap(), "GET", "/metrics");
    let value = page.lines().find_map(|shown| shown.strip_prefix(line)?.strip_prefix(' '));
    value.unwrap_or_else(|| panic!("{line} is not in\n{page}")).parse().unwrap()
}

fn attribute(span: &Value, key: &str) -> Option<String> {
    let attribute = span["attributes"].as_array()?.iter().find(|attribute| attribute["key"] == key)?;
    Some(attribute["value"]["stringValue"].as_str()?.to_owned())
}

#[test]
fn pulls_and_clients_are_shown_in_numbers_and_told_to_a_collector_in_their_stages() {
    let pair = Pair::new();
    let (endpoint, received) = collector(TAKEN);
    tell(&pair.right, &endpoint, 20_000);
    let (_left, right) = (pair.left.node(), pair.right.node());
    let (writer, reader) = (pair.left.peer(), pair.right.peer());
    store_all(&writer);
    eventually("the peer is found", || reader.client.lookup(&ids()) == CHUNKS);
    let lease = reader.lease();
    assert!((0..CHUNKS).all(|number| reader.hit(&lease, number)));
    let name = right.clients()[0].name.clone();
    for (line, number) in [
        (format!("forebay_clients{{client=\"{name}\"}}"), 1),
        (format!("forebay_client_leases{{client=\"{name}\"}}"), 1),
        ("forebay_client_leased_chunks_total{tier=\"peers\"}".into(), CHUNKS),
        ("forebay_peering_pulls_total{end=\"pulled\"}".into(), CHUNKS),
        ("forebay_peering_pulls_total{end=\"failed\"}".into(), 0),
    ] {
        assert_eq!(shown(&right, &line), number as f64, "{line}");
    }
    let (_, page) = get(right.metrics_address().unwrap(), "GET", "/metrics");
    let promised = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/metrics/metrics.txt");
    testkit::metrics::assert_promises_no_more(&page, &promised);
    let (mut spans, start) = (Vec::new(), Instant::now());
    let has = |spans: &[Value], name: &str| spans.iter().any(|span| span["name"] == name);
    while !["lookup", "lease", "bring", "pull"].iter().all(|name| has(&spans, name)) {
        let (path, body) = received.recv_timeout(LIMIT.saturating_sub(start.elapsed())).unwrap();
        if path == "/v1/traces" {
            let more = body["resourceSpans"][0]["scopeSpans"][0]["spans"].as_array().unwrap().clone();
            spans.extend(more);
        }
    }
    let pull = spans.iter().find(|span| span["name"] == "pull").unwrap();
    assert_eq!(
        (attribute(pull, "peer").as_deref(), &pull["status"]["code"]),
        (Some("left"), &Value::from(1))
    );
    let stages = spans.iter().filter(|span| span["parentSpanId"] == pull["spanId"]);
    let stages: Vec<&str> = stages.map(|span| span["name"].as_str().unwrap()).collect();
    assert_eq!(stages, ["lent", "queued", "posted", "verified"]);
    let bring = spans.iter().find(|span| span["name"] == "bring").unwrap();
    assert_eq!(attribute(bring, "client"), Some(name));
}

#[test]
fn a_peer_reads_its_disk_as_urgently_as_who_asks_it() {
    let pair = Pair::new();
    store_all_on_disk(&pair.left);
    let mut config = pair.left.config();
    config.metrics = Some(MetricsConfig::new(SocketAddr::from(([127, 0, 0, 1], 0))));
    write(&pair.left, &config);
    let (left, _right) = (pair.left.node(), pair.right.node());
    let reader = pair.right.peer();
    eventually("the peer is found", || reader.client.lookup(&ids()) == CHUNKS);
    let read = |class: &str| shown(&left, &format!("forebay_transfer_bytes_total{{class=\"{class}\"}}"));
    assert_eq!((read("demand"), read("prefetch")), (0.0, 0.0));
    let lease = std::sync::Arc::new(reader.lease());
    forebay_client::fetch(&lease);
    eventually("it is read ahead", || read("prefetch") >= CHUNK_BYTES as f64);
    assert_eq!(read("demand"), 0.0, "nobody waits for it");
}

#[test]
fn what_comes_ahead_from_a_peer_comes_at_once_when_a_request_waits_for_it() {
    let pair = Pair::new();
    let mut config = pair.right.config();
    config.metrics = Some(MetricsConfig::new(SocketAddr::from(([127, 0, 0, 1], 0))));
    write(&pair.right, &config);
    let (left, right) = (pair.left.child("node"), pair.right.node());
    let client = pair.right.peer();
    store_all(&pair.left.peer());
    eventually("the peer is found", || client.client.lookup(&ids()) == CHUNKS);
    let moved = |class: &str| shown(&right, &format!("forebay_transfer_bytes_total{{class=\"{class}\"}}"));
    let lease = client.lease();
    // The peer lends nothing before all have asked.
    left.signal(Signal::STOP);
    let told = client.client.control(Verb::Prefetch, &ids()[..2]).unwrap().unwrap();
    assert!(told.iter().all(|report| report.verdict == Verdict::Accepted));
    let load = client.begin_load(&lease, 0).unwrap();
    // The node answers in turn: it has begun the load by then.
    drop(client.lease());
    left.signal(Signal::CONT);
    assert!(matches!(ended(&load), End::Done { .. }));
    eventually("both have come", || right.store().lookup(TenantId(0), &ids()) == 2);
    assert_eq!((moved("demand"), moved("prefetch")), (CHUNK_BYTES as f64, CHUNK_BYTES as f64));
}

#[test]
fn a_node_that_tells_a_collector_needs_no_port_to_be_asked_at() {
    let pair = Pair::new();
    let (endpoint, received) = collector(TAKEN);
    let mut config = pair.left.config();
    config.metrics = None;
    let text = format!("{}[metrics.push]\nendpoint = '{endpoint}'\nevery_s = 1\n", config.to_toml());
    let node = Node::start(&NodeConfig::from_toml(&text).unwrap()).unwrap();
    assert_eq!(received.recv_timeout(LIMIT).unwrap().0, "/v1/metrics");
    assert_eq!(node.metrics_address(), None);
}

#[test]
fn collectors_that_are_dead_or_silent_fail_no_transfer_and_fill_no_memory() {
    let pair = Pair::new();
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    // Nobody listens there.
    tell(&pair.left, "http://127.0.0.1:1", 300);
    tell(&pair.right, &format!("http://{}", silent.local_addr().unwrap()), 300);
    let (left, right) = (pair.left.node(), pair.right.node());
    let (writer, reader) = (pair.left.peer(), pair.right.peer());
    store_all(&writer);
    eventually("the peer is found", || reader.client.lookup(&ids()) == CHUNKS);
    let lease = reader.lease();
    assert!((0..CHUNKS).all(|number| reader.hit(&lease, number)));
    for node in [&left, &right] {
        let client = if std::ptr::eq(node, &left) { &writer } else { &reader };
        // More spans than may wait, faster than they are tried to be pushed.
        eventually("spans are dropped and pushes fail", || {
            assert!((0..500).all(|_| client.client.lookup(&ids()) == CHUNKS));
            let dropped = shown(node, "forebay_metrics_spans_dropped_total") > 0.0;
            dropped && shown(node, "forebay_metrics_pushes_total{end=\"failed\"}") > 0.0
        });
        assert_eq!(shown(node, "forebay_metrics_pushes_total{end=\"taken\"}"), 0.0);
    }
    let stat = right.peering_stat().unwrap();
    assert_eq!((stat.pulled, stat.not_pulled), (CHUNKS as u64, 0));
    assert!((0..CHUNKS).all(|number| reader.hit(&lease, number)));
}
