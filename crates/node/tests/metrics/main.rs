//! The node shows itself over real sockets: whoever reads slowly, and collectors that are dead,
//! slow or refuse, change nothing for anybody else.

#![allow(clippy::unwrap_used)]

mod http;

use forebay_node::metrics::{Family, HttpLimits, Kind, Metric, Metrics, MetricsServer, push, sources};
use forebay_otlp::{Push, PushConfig, PushError, Span, SpanKind};
use http::*;
use std::io::Write;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};
use testkit::eventually;

const LOTS: Family = Family { name: "forebay_test_lots_total", help: "Lots.", kind: Kind::Counter };

fn metrics() -> Arc<Metrics> {
    let metrics = Arc::new(Metrics::new());
    metrics.add("test", |out: &mut Vec<Metric>| out.push(Metric::new(&LOTS, &[("peer", "a\"b")], 7.0)));
    metrics.add("process", sources::process::source());
    metrics
}

/// With patience for a loaded machine: what is answered soon is not answered because others were
/// timed out.
fn limits() -> HttpLimits {
    HttpLimits { request_limit: LIMIT, ..HttpLimits::default() }
}

fn listen(metrics: &Arc<Metrics>, ready: bool) -> MetricsServer {
    let address = SocketAddr::from(([127, 0, 0, 1], 0));
    let ready = move || if ready { Ok(String::new()) } else { Err("draining".to_owned()) };
    MetricsServer::listen(address, Arc::clone(metrics), limits(), ready).unwrap()
}

/// The value of the line that begins like this.
fn value(metrics: &Metrics, line: &str) -> f64 {
    let text = forebay_node::metrics::render(metrics.gather());
    let line = text.lines().find_map(|candidate| candidate.strip_prefix(line)).unwrap();
    line.trim().parse().unwrap()
}

#[test]
fn the_node_shows_its_metrics_and_whether_it_is_ready() {
    let metrics = metrics();
    let server = listen(&metrics, false);
    let (status, body) = get(server.address(), "GET", "/metrics");
    assert_eq!(status, "HTTP/1.1 200 OK");
    assert!(
        body.contains("# TYPE forebay_test_lots_total counter\nforebay_test_lots_total{peer=\"a\\\"b\"} 7\n")
    );
    assert!(body.contains("forebay_process_cpu_seconds_total{mode=\"user\"}"));
    assert_eq!(get(server.address(), "GET", "/healthz").0, "HTTP/1.1 200 OK");
    let (status, body) = get(server.address(), "GET", "/readyz");
    assert_eq!((status.as_str(), body.as_str()), ("HTTP/1.1 503 Service Unavailable", "draining\n"));
    assert_eq!(get(listen(&metrics, true).address(), "GET", "/readyz").1, "ready\n");
    assert_eq!(get(server.address(), "GET", "/else").0, "HTTP/1.1 404 Not Found");
    assert_eq!(get(server.address(), "POST", "/metrics").0, "HTTP/1.1 405 Method Not Allowed");
}

#[test]
fn health_is_answered_whoever_sends_slowly_or_reads_slowly() {
    let metrics = metrics();
    metrics.add("large", |out: &mut Vec<Metric>| {
        let many = (0..3_000).map(|number| Metric::new(&LOTS, &[("peer", &format!("{number:0>2000}"))], 1.0));
        out.extend(many);
    });
    let server = listen(&metrics, true);
    let connect = || TcpStream::connect(server.address()).unwrap();
    // More of each than may be at a time, and none of them ends by itself within the test's time.
    let readers: Vec<_> = (0..20)
        .map(|_| {
            let mut reader = connect();
            reader.write_all(b"GET /metrics HTTP/1.1\r\nhost: node\r\n\r\n").unwrap();
            reader
        })
        .collect();
    let silent: Vec<_> = (0..200)
        .map(|number| {
            let mut slow = connect();
            slow.write_all(&b"GET /he"[..number % 7]).unwrap();
            slow
        })
        .collect();
    let start = Instant::now();
    for path in ["/healthz", "/readyz"] {
        assert_eq!(get(server.address(), "GET", path).0, "HTTP/1.1 200 OK");
    }
    assert!(start.elapsed() < Duration::from_secs(10), "{:?}", start.elapsed());
    let stat = server.pending().stat();
    assert!(stat.pending <= limits().pending_max && stat.evicted > 0, "{stat:?}");
    let (status, body) = get(server.address(), "GET", "/metrics");
    assert_eq!(status, "HTTP/1.1 503 Service Unavailable");
    assert_eq!(body, "16 requests for /metrics are being answered; no more may be\n");
    drop(readers);
    eventually("room for readers", || get(server.address(), "GET", "/metrics").0 == "HTTP/1.1 200 OK");
    let mut garbage = TcpStream::connect(server.address()).unwrap();
    garbage.write_all(&[0xFF; 4096]).unwrap();
    assert_eq!(get(server.address(), "GET", "/healthz").0, "HTTP/1.1 200 OK");
    drop(silent);
    let start = Instant::now();
    drop(server);
    assert!(start.elapsed() < Duration::from_secs(20), "closing waits for nobody");
}

fn config(endpoint: &str, limit: Duration) -> PushConfig {
    PushConfig { endpoint: endpoint.into(), service: "forebay-node", instance: "left".into(), limit }
}

fn push_to(endpoint: &str, metrics: &Arc<Metrics>, limit_ms: u64) -> Push {
    push(&config(endpoint, Duration::from_millis(limit_ms)), Duration::from_secs(1), metrics).unwrap()
}

#[test]
fn a_collector_receives_metrics_and_spans() {
    let metrics = metrics();
    let (endpoint, received) = collector(TAKEN);
    metrics.spans().put(Span {
        trace: [1; 16],
        id: [2; 8],
        parent: None,
        name: "read",
        kind: SpanKind::Internal,
        start_unix_ns: 1,
        end_unix_ns: 2,
        attributes: vec![("peer", "right".into())],
        events: Vec::new(),
        error: None,
    });
    let _push = push_to(&endpoint, &metrics, 20_000);
    let (path, body) = received.recv_timeout(LIMIT).unwrap();
    assert_eq!(path, "/v1/metrics");
    let sent = &body["resourceMetrics"][0]["scopeMetrics"][0]["metrics"];
    let lots = sent.as_array().unwrap().iter().find(|metric| metric["name"] == LOTS.name).unwrap();
    assert_eq!(lots["sum"]["dataPoints"][0]["asDouble"], 7.0);
    let next = || received.recv_timeout(LIMIT).unwrap();
    let (_, body) = std::iter::repeat_with(next).find(|(path, _)| path == "/v1/traces").unwrap();
    assert_eq!(body["resourceSpans"][0]["scopeSpans"][0]["spans"][0]["name"], "read");
    eventually("the count", || value(&metrics, "forebay_metrics_pushes_total{end=\"taken\"}") >= 2.0);
}

#[test]
fn a_collector_that_is_dead_slow_or_refuses_is_counted_and_changes_nothing() {
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let slow = format!("http://{}", silent.local_addr().unwrap());
    // Nobody listens there.
    let dead = "http://127.0.0.1:1".to_owned();
    let (refusing, _received) = collector(REFUSED);
    for (endpoint, limit_ms) in [(slow, 300), (dead, 300), (refusing, 20_000)] {
        let metrics = metrics();
        let server = listen(&metrics, true);
        let push = push_to(&endpoint, &metrics, limit_ms);
        eventually("a failure", || value(&metrics, "forebay_metrics_pushes_total{end=\"failed\"}") >= 2.0);
        assert_eq!(value(&metrics, "forebay_metrics_pushes_total{end=\"taken\"}"), 0.0);
        assert_eq!(get(server.address(), "GET", "/metrics").0, "HTTP/1.1 200 OK");
        let start = Instant::now();
        drop(push);
        assert!(start.elapsed() < Duration::from_secs(20), "closing waits for no collector");
    }
}

#[test]
fn a_bad_push_is_refused_with_what_is_allowed() {
    let bad = config("collector:4318", Duration::from_secs(1));
    let error = push(&bad, Duration::from_secs(10), &metrics()).unwrap_err();
    assert!(matches!(error, PushError::Endpoint { .. }));
    assert!(
        error.to_string().starts_with("endpoint is \"collector:4318\"; allowed: http://host:port"),
        "{error}"
    );
}
