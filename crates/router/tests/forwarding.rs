//! What goes through the router besides plain completions: other paths, models, compressed streams,
//! old clients, and what the log and the metrics say of it.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod common;

use common::*;
use flate2::Compression;
use flate2::write::GzEncoder;
use forebay_router::{Failure, Policy, RequestLogPlace, RouterHandle};
use http_body_util::BodyExt;
use std::io::Write;
use std::sync::Arc;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::Semaphore;
use tokio::time::timeout;

const EVENT: &str = r#"data: {"choices":[{"index":0,"text":"a"}]}"#;

fn bytes_chunk(data: &[u8]) -> Step {
    Step::Bytes([format!("{:x}\r\n", data.len()).as_bytes(), data, b"\r\n"].concat())
}

#[tokio::test]
async fn events_go_on_as_they_come_however_their_lines_end() {
    for end in ["\r\r", "\n\r", "\r\n\r", "\r\n\r\n", "\n\r\n"] {
        let gate = Arc::new(Semaphore::new(0));
        let event = format!("{EVENT}{end}");
        let usage = format!("data: {{\"choices\":[],\"usage\":{}}}{end}", usage(10, 4));
        let done = format!("data: [DONE]{end}");
        let steps = vec![stream_head(), chunk(&event), Step::Gate(gate.clone()), chunk(&usage), chunk(&done)];
        let steps = [steps, vec![Step::Write("0\r\n\r\n".into())]].concat();
        let engine = Engine::start(only_probes(steps)).await;
        let router = router(Policy::Lpwl, &[engine.url()], |_| {});
        let mut client = Client::connect(&router).await;
        let mut answer = client.begin("POST", "/v1/completions", &[], STREAM).await.unwrap();
        let first = timeout(PATIENCE, answer.frame()).await.expect("the event is not held back");
        assert_eq!(first.unwrap().unwrap().into_data().unwrap(), event, "{end:?}");
        gate.add_permits(1);
        assert_eq!(Got::read(answer).await.body, done, "{end:?}");
        assert_eq!(router.stats().backends[0].cached_tokens, 4, "{end:?}");
    }
}

#[tokio::test]
async fn a_compressed_stream_is_passed_plain_and_in_time_without_the_usage_nobody_asked_for() {
    let gate = Arc::new(Semaphore::new(0));
    let mut encoder = GzEncoder::new(Vec::new(), Compression::default());
    let mut piece = |text: &str| {
        encoder.write_all(text.as_bytes()).unwrap();
        encoder.flush().unwrap();
        bytes_chunk(&std::mem::take(encoder.get_mut()))
    };
    let head = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-encoding: gzip\r\n\
                transfer-encoding: chunked\r\n\r\n";
    let event = format!("{EVENT}\n\n");
    let first = piece(&event);
    let rest = piece(&format!("data: {{\"choices\":[],\"usage\":{}}}\n\ndata: [DONE]\n\n", usage(10, 4)));
    let steps = vec![Step::Write(head.into()), first, Step::Gate(gate.clone()), rest];
    let steps = [steps, vec![Step::Write("0\r\n\r\n".into())]].concat();
    let engine = Engine::start(only_probes(steps)).await;
    let router = router(Policy::Lpwl, &[engine.url()], |_| {});
    let mut client = Client::connect(&router).await;
    let headers = [("accept-encoding", "gzip")];
    let mut answer = client.begin("POST", "/v1/completions", &headers, STREAM).await.unwrap();
    assert!(!answer.headers().contains_key("content-encoding"));
    let first = timeout(PATIENCE, answer.frame()).await.expect("the event is not held back");
    assert_eq!(first.unwrap().unwrap().into_data().unwrap(), event);
    gate.add_permits(1);
    assert_eq!(Got::read(answer).await.body, "data: [DONE]\n\n");
    assert_eq!(router.stats().backends[0].cached_tokens, 4);
}

#[tokio::test]
async fn a_compressed_document_is_passed_plain_and_its_usage_is_learned() {
    let text = format!("{{\"choices\":[{{}}],\"usage\":{}}}", usage(10, 4));
    let mut encoder = GzEncoder::new(Vec::new(), Compression::default());
    encoder.write_all(text.as_bytes()).unwrap();
    let body = encoder.finish().unwrap();
    let head = format!(
        "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-encoding: gzip\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    let engine = Engine::start(only_probes(vec![Step::Write(head), Step::Bytes(body)])).await;
    let router = router(Policy::Lpwl, &[engine.url()], |_| {});
    let got = Client::connect(&router).await.complete(PROMPT).await;
    assert_eq!((got.body, got.broken), (text, false));
    assert_eq!(router.stats().backends[0].cached_tokens, 4);
}

/// Sends a request of HTTP/1.0 and reads until the connection ends; was that in order?
async fn old_client(router: &RouterHandle, body: &str) -> (String, bool) {
    let mut stream = TcpStream::connect(router.addr()).await.unwrap();
    let length = body.len();
    let request =
        format!("POST /v1/completions HTTP/1.0\r\nhost: router\r\ncontent-length: {length}\r\n\r\n{body}");
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut answer = Vec::new();
    let ended = timeout(PATIENCE, stream.read_to_end(&mut answer)).await.expect("the connection ends");
    (String::from_utf8_lossy(&answer).into_owned(), ended.is_ok())
}

#[tokio::test]
async fn what_breaks_off_does_not_end_like_a_whole_answer_for_a_client_of_http_1_0() {
    let document = "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n";
    let broken = vec![Step::Write(document.into()), chunk("{\"half"), Step::Wait(50 * MS), Step::Reset];
    let engine = Engine::start(only_probes(broken)).await;
    let router_of_broken = router(Policy::Lpwl, &[engine.url()], |_| {});
    let (answer, in_order) = old_client(&router_of_broken, PROMPT).await;
    assert!(answer.ends_with("{\"half") && !in_order, "{answer}");

    let engine =
        Engine::start(only_probes(vec![stream_head(), event("a"), Step::Wait(50 * MS), Step::Reset])).await;
    let router_of_broken = router(Policy::Lpwl, &[engine.url()], |_| {});
    let (answer, in_order) = old_client(&router_of_broken, STREAM).await;
    assert!(answer.contains("\"error\"") && !in_order, "{answer}");

    let engine = Engine::start(well).await;
    let router_of_whole = router(Policy::Lpwl, &[engine.url()], |_| {});
    for body in [PROMPT, STREAM] {
        let (answer, in_order) = old_client(&router_of_whole, body).await;
        assert!(answer.starts_with("HTTP/1.0 200") && in_order, "{answer}");
    }
}

#[tokio::test]
async fn other_calls_pass_with_their_query_method_and_body() {
    let engine = Engine::start(well).await;
    let router = router(Policy::SessionSticky, &[engine.url()], |_| {});
    let mut client = Client::connect(&router).await;
    let calls = [
        ("POST", "/v1/embeddings", r#"{"input":["a"],"model":"m"}"#),
        ("POST", "/v1/rerank?top=1", r#"{"query":"a"}"#),
        ("POST", "/v1/score", "{}"),
        ("POST", "/tokenize", r#"{"prompt":"a"}"#),
        ("POST", "/detokenize", r#"{"tokens":[1]}"#),
        ("POST", "/v1/responses", r#"{"input":"a"}"#),
        ("POST", "/v1/messages", r#"{"messages":[]}"#),
        ("POST", "/v1/audio/transcriptions", "not json"),
        ("GET", "/version", ""),
        ("HEAD", "/version", ""),
        ("OPTIONS", "/v1/chat/completions", ""),
    ];
    for (number, (method, path, body)) in calls.into_iter().enumerate() {
        let got = Got::read(client.begin(method, path, &[], body).await.unwrap()).await;
        assert_eq!((got.status, got.backend()), (200, "e0"), "{method} {path}: {}", got.body);
        let seen = engine.seen.lock().unwrap();
        assert!(
            seen.heads[number].starts_with(&format!("{method} {path} HTTP/1.1")),
            "{}",
            seen.heads[number]
        );
        assert_eq!(seen.bodies[number], body);
    }
    let stats = router.stats();
    assert_eq!((stats.backends[0].answered, stats.backends[0].in_flight), (calls.len() as u64, 0));
}

#[tokio::test]
async fn what_manages_one_engine_is_not_reached_through_the_router() {
    let engine = Engine::start(well).await;
    let router = router(Policy::Lpwl, &[engine.url()], |_| {});
    let mut client = Client::connect(&router).await;
    for path in ["/sleep", "/reset_prefix_cache", "/v1/load_lora_adapter", "/collective_rpc", "/flush_cache"]
    {
        let got = client.post(path, &[], "{}").await;
        assert_eq!(got.status, 403, "{path}");
        assert!(got.json()["error"]["message"].as_str().unwrap().contains("ask that engine"), "{}", got.body);
    }
    for path in ["/v1/responses/resp_1", "/docs", "//sleep", "/v1/completions/../../sleep"] {
        assert_eq!(client.get(path).await.status, 404, "{path}");
    }
    assert_eq!(client.get("/v1/embeddings").await.status, 405);
    assert_eq!(engine.requests(), 0, "none of them reached the engine");
    let metrics = client.get("/metrics").await.body;
    assert!(metrics.contains("forebay_route_responses_total{backend=\"\",code=\"403\"} 5\n"), "{metrics}");
}

#[tokio::test]
async fn health_answers_to_all_its_names_and_head_and_options_are_answered() {
    let engine = Engine::start(well).await;
    let router = router(Policy::Lpwl, &[engine.url()], |_| {});
    let mut client = Client::connect(&router).await;
    for (method, path) in [("GET", "/ping"), ("POST", "/ping"), ("HEAD", "/health"), ("HEAD", "/v1/models")] {
        let got = Got::read(client.begin(method, path, &[], "").await.unwrap()).await;
        assert_eq!((got.status, got.body.is_empty()), (200, method == "HEAD"), "{method} {path}");
    }
    let got = Got::read(client.begin("OPTIONS", "/health", &[], "").await.unwrap()).await;
    assert_eq!((got.status, &got.headers["allow"]), (204, &"GET".parse().unwrap()));
}

#[tokio::test]
async fn a_request_goes_to_an_engine_that_serves_its_model_and_models_are_the_union() {
    let engines = [Engine::start(serving(&["m", "lora"])).await, Engine::start(serving(&["m", "n/1"])).await];
    let router = router(Policy::RoundRobin, &engines.each_ref().map(Engine::url), |_| {});
    let mut client = Client::connect(&router).await;
    let models = client.get("/v1/models").await.json();
    let ids: Vec<&str> =
        models["data"].as_array().unwrap().iter().map(|m| m["id"].as_str().unwrap()).collect();
    assert_eq!(ids, ["m", "lora", "n/1"]);
    for path in ["/v1/models/n/1", "/v1/models/n%2F1"] {
        assert_eq!(client.get(path).await.json()["id"], "n/1");
    }
    assert_eq!(client.get("/v1/models/x").await.status, 404);
    for _ in 0..4 {
        assert_eq!(client.complete(r#"{"model":"lora","prompt":"a"}"#).await.backend(), "e0");
        assert_eq!(client.post("/v1/embeddings", &[], r#"{"model":"n/1"}"#).await.backend(), "e1");
    }
    let got = client.complete(r#"{"model":"x","prompt":"a"}"#).await;
    let error = &got.json()["error"];
    assert_eq!(
        (got.status, &error["code"], &error["param"]),
        (404, &"model_not_found".into(), &"model".into())
    );
    assert_eq!(error["message"], "The model `x` does not exist");
}

#[tokio::test]
async fn a_model_is_unknown_only_when_all_lists_are_known_and_have_been_read_again() {
    let locked = |path: &str, body: &str| match path {
        "/v1/models" => document("401 Unauthorized", r#"{"error":"no key"}"#),
        _ => well(path, body),
    };
    let (listing, unlisted) = (Engine::start(serving(&["m"])).await, Engine::start(locked).await);
    let both = router(Policy::RoundRobin, &[listing.url(), unlisted.url()], |_| {});
    let mut client = Client::connect(&both).await;
    client.get("/v1/models").await;
    for _ in 0..4 {
        assert_eq!(client.complete(r#"{"model":"x","prompt":"a"}"#).await.backend(), "e1");
    }

    // An adapter that is loaded after the list was read is found when it is asked for.
    let loaded = Arc::new(std::sync::atomic::AtomicBool::new(false));
    let script = {
        let loaded = loaded.clone();
        move |path: &str, body: &str| {
            let models: &[&str] =
                if loaded.load(std::sync::atomic::Ordering::Relaxed) { &["m", "x"] } else { &["m"] };
            serving(if models.len() == 2 { &["m", "x"] } else { &["m"] })(path, body)
        }
    };
    let engine = Engine::start(script).await;
    let alone = router(Policy::RoundRobin, &[engine.url()], |_| {});
    let mut client = Client::connect(&alone).await;
    client.get("/v1/models").await;
    loaded.store(true, std::sync::atomic::Ordering::Relaxed);
    assert_eq!(client.complete(r#"{"model":"x","prompt":"a"}"#).await.status, 200);

    let any = configured(Policy::RoundRobin, &[listing.url()], |config| config.any_model = true);
    let mut client = Client::connect(&any).await;
    client.get("/v1/models").await;
    assert_eq!(client.complete(r#"{"model":"x","prompt":"a"}"#).await.status, 200);
}

#[tokio::test]
async fn engines_get_the_hints_of_headers_and_none_of_clients_if_the_router_is_told_so() {
    let (sender, bodies) = std::sync::mpsc::channel();
    let script = move |path: &str, body: &str| {
        if path == "/v1/completions" {
            sender.send(body.to_owned()).unwrap();
        }
        serving(&["m"])(path, body)
    };
    let engine = Engine::start(script).await;
    let told = configured(Policy::RoundRobin, &[engine.url()], |config| config.hints_from_headers = true);
    let not_told = configured(Policy::RoundRobin, &[engine.url()], |_| {});
    let asked = r#"{"model":"m","prompt":"a","kv_transfer_params":{"kv_hint":{"actions":[7]}}}"#;
    let mut client = Client::connect(&not_told).await;
    client.complete(asked).await;
    assert_eq!(bodies.recv().unwrap(), asked);
    let mut client = Client::connect(&told).await;
    client.complete(asked).await;
    assert_eq!(bodies.recv().unwrap(), r#"{"model":"m","prompt":"a"}"#);
    let metrics = client.get("/metrics").await.body;
    assert!(metrics.contains("forebay_route_hints_removed_total 1\n"), "the operator is told");
    client.post("/v1/completions", &[("x-kv-tenant", "acme")], asked).await;
    let got = bodies.recv().unwrap();
    assert!(got.contains(r#"{"tenant":"acme"}"#) && !got.contains("[7]"), "{got}");
    let refused = client.post("/v1/completions", &[("x-kv-pin-ms", "soon")], asked).await;
    assert_eq!(refused.status, 400);
    assert!(refused.body.contains("x-kv-pin-ms: 'soon'; a whole number of milliseconds is allowed, once"));
}

#[tokio::test]
async fn an_error_in_a_stream_of_status_200_is_no_answer_and_teaches_nothing() {
    let failing = chunk("data: {\"error\":{\"message\":\"out of blocks\",\"code\":500}}\n\n");
    let steps = vec![stream_head(), event("a"), failing, stream_end()];
    let engine = Engine::start(only_probes(steps)).await;
    let router = router(Policy::Lpwl, &[engine.url()], |_| {});
    let mut client = Client::connect(&router).await;
    let got = client.complete(STREAM).await;
    assert!(got.body.contains("out of blocks") && got.body.ends_with("data: [DONE]\n\n"), "{}", got.body);
    let stats = &router.stats().backends[0];
    assert_eq!((stats.answered, stats.failures[Failure::ErrorEvent as usize], stats.up), (0, 1, true));
    let metrics = client.get("/metrics").await.body;
    assert!(metrics.contains("forebay_route_attempts_total{backend=\"e0\",end=\"error-event\"} 1\n"));
}

#[tokio::test]
async fn the_request_log_says_of_each_request_where_it_went_and_how_it_ended() {
    let path = std::env::temp_dir().join(format!("forebay-request-log-{}", std::process::id()));
    let engine = Engine::start(serving(&["m"])).await;
    let router = configured(Policy::Lpwl, &[engine.url()], |config| {
        config.request_log = Some(RequestLogPlace::File(path.clone()));
    });
    let mut client = Client::connect(&router).await;
    client.get("/v1/models").await;
    client.complete(STREAM).await;
    client.complete(r#"{"model":"x","prompt":"a secret"}"#).await;
    client.post("/sleep", &[], "").await;
    drop(client);
    router.shutdown().await;
    let text = std::fs::read_to_string(&path).unwrap();
    std::fs::remove_file(&path).unwrap();
    let lines: Vec<serde_json::Value> =
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(lines.len(), 3, "{text}");
    let answered = &lines[0];
    for (field, value) in [
        ("method", serde_json::json!("POST")),
        ("path", serde_json::json!("/v1/completions")),
        ("model", serde_json::json!("m")),
        ("engine", serde_json::json!("e0")),
        ("attempts", serde_json::json!(1)),
        ("status", serde_json::json!(200)),
        ("end", serde_json::json!("answered")),
        ("prompt_tokens", serde_json::json!(10)),
        ("cached_tokens", serde_json::json!(4)),
        ("completion_tokens", serde_json::json!(1)),
    ] {
        assert_eq!(answered[field], value, "{field}");
    }
    assert!(answered["total_s"].as_f64() >= answered["first_byte_s"].as_f64());
    assert_eq!((&lines[1]["status"], &lines[1]["end"]), (&404.into(), &"refused".into()));
    assert_eq!((&lines[2]["status"], &lines[2]["path"]), (&403.into(), &"/sleep".into()));
    assert!(!text.contains("secret") && !text.contains("Once upon"), "{text}");
}

#[tokio::test]
async fn an_engine_that_does_not_report_cached_tokens_is_counted() {
    let silent = r#"{"choices":[{}],"usage":{"prompt_tokens":10,"completion_tokens":1}}"#;
    let engine = Engine::start(only_probes(document("200 OK", silent))).await;
    let router = router(Policy::Lpwl, &[engine.url()], |_| {});
    let mut client = Client::connect(&router).await;
    client.complete(PROMPT).await;
    let metrics = client.get("/metrics").await.body;
    assert!(metrics.contains("forebay_route_answers_without_cached_tokens_total{backend=\"e0\"} 1\n"));
}
