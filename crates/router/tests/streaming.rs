//! What passes through the router, byte for byte and in time.

mod common;

use common::*;
use forebay_router::Policy;
use http_body_util::BodyExt;
use std::sync::Arc;
use std::time::Instant;
use tokio::sync::Semaphore;
use tokio::time::timeout;

const ASKING: &str = r#"{"prompt":"Once upon a time","stream":true,"stream_options":{"include_usage":true}}"#;
const EVENTS: &str = "data: {\"choices\":[{\"index\":0,\"text\":\"a\"}]}\n\ndata: {\"choices\":[{\"index\":0,\"text\":\"b\"}]}\n\n";

#[tokio::test]
async fn usage_is_asked_for_behind_the_clients_back_and_never_shown() {
    let engine = Engine::start(well).await;
    let router = router(Policy::Lpwl, &[engine.url()], |_| {});
    let mut client = Client::connect(&router).await;
    let got = client.complete(STREAM).await;
    assert_eq!((&got.body[..], got.broken), (&format!("{EVENTS}data: [DONE]\n\n")[..], false));
    let sent = engine.seen.lock().unwrap().bodies[0].clone();
    let expected =
        r#"{"stream_options":{"include_usage":true},"model":"m","prompt":"Once upon a time","stream":true}"#;
    assert_eq!(sent, expected);
    assert_eq!(router.stats().backends[0].cached_tokens, 4, "the router did get it");
}

#[tokio::test]
async fn a_client_that_asked_for_usage_gets_it() {
    let engine = Engine::start(well).await;
    let router = router(Policy::Lpwl, &[engine.url()], |_| {});
    let got = Client::connect(&router).await.complete(ASKING).await;
    let usage = usage(10, 4);
    assert_eq!(got.body, format!("{EVENTS}data: {{\"choices\":[],\"usage\":{usage}}}\n\ndata: [DONE]\n\n"));
    assert_eq!(engine.seen.lock().unwrap().bodies[0], ASKING);
    assert_eq!(router.stats().backends[0].cached_tokens, 4);
}

#[tokio::test]
async fn documents_pass_unchanged_and_teach_too() {
    let engine = Engine::start(well).await;
    let router = router(Policy::Lpwl, &[engine.url()], |_| {});
    let got = Client::connect(&router).await.complete(PROMPT).await;
    assert_eq!(got.body, format!("{{\"choices\":[{{}}],\"usage\":{}}}", usage(10, 4)));
    assert_eq!(got.headers["content-length"], got.body.len().to_string());
    assert_eq!(router.stats().backends[0].prompt_tokens, 10);
}

#[tokio::test]
async fn each_event_arrives_before_the_next_is_made() {
    let made = Arc::new(Semaphore::new(0));
    let next = || Step::Gate(made.clone());
    let steps = vec![stream_head(), event("a"), next(), event("b"), next(), stream_end()];
    let engine = Engine::start(only_probes(steps)).await;
    let router = router(Policy::Lpwl, &[engine.url()], |_| {});
    let mut client = Client::connect(&router).await;
    let asking = client.begin("POST", "/v1/completions", &[], STREAM);
    let answer = timeout(PATIENCE, asking).await.expect("the answer begins with its first event");
    let mut body = answer.unwrap().into_body();
    for text in ["a", "b", "[DONE]"] {
        let frame = timeout(PATIENCE, body.frame()).await.expect("nothing else is made until it is here");
        let event = String::from_utf8(frame.unwrap().unwrap().into_data().unwrap().to_vec()).unwrap();
        assert!(event.contains(text) && event.ends_with("\n\n"), "{event:?}");
        made.add_permits(1);
    }
    assert!(body.frame().await.is_none());
}

#[tokio::test]
async fn keep_alive_streams_do_not_stall() {
    let steps = |path: &str, body: &str| {
        if path == "/health" {
            return well(path, body);
        }
        let mut steps = vec![stream_head()];
        steps.extend((0..16).map(|_| event("token")));
        steps.push(stream_end());
        steps
    };
    let engine = Engine::start(steps).await;
    let router = router(Policy::Lpwl, &[engine.url()], |_| {});
    let mut client = Client::connect(&router).await;
    let mut slow = 0;
    for _ in 0..300 {
        let start = Instant::now();
        assert!(!client.complete(STREAM).await.broken);
        slow += usize::from(start.elapsed() >= 30 * MS);
    }
    // Without TCP_NODELAY on the accepted socket a quarter to a half of them wait 40 ms; a busy
    // machine delays some.
    assert!(slow <= 30, "{slow} of 300 took 30 ms and more");
    assert_eq!(engine.seen.lock().unwrap().connections, 1, "the connection to the engine is kept as well");
}

#[tokio::test]
async fn headers_about_connections_stay_on_their_connection() {
    let answer = "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\nx-request-id: 7\r\nkeep-alive: timeout=5\r\n\
                  connection: x-private\r\nx-private: 1\r\ncontent-length: 2\r\n\r\n{}";
    let engine = Engine::start(only_probes(vec![Step::Write(answer.into())])).await;
    let router = router(Policy::Lpwl, &[engine.url()], |_| {});
    let mut client = Client::connect(&router).await;
    let headers = [
        ("authorization", "Bearer t"),
        ("connection", "x-hop"),
        ("x-hop", "1"),
        ("accept-encoding", "gzip"),
        ("te", "trailers"),
    ];
    let answer = client.begin("POST", "/v1/completions", &headers, PROMPT).await.unwrap();
    let got = Got::read(answer).await;
    assert_eq!((&got.headers["x-request-id"], got.backend()), (&"7".parse().unwrap(), "e0"));
    assert!(!got.headers.contains_key("x-private") && !got.headers.contains_key("keep-alive"));
    let head = engine.seen.lock().unwrap().heads[0].to_lowercase();
    assert!(
        head.contains("authorization: bearer t") && head.contains(&format!("host: {}", engine.address)),
        "{head}"
    );
    for gone in ["x-hop", "gzip", "te:", "connection"] {
        assert!(!head.contains(gone), "{gone} in {head}");
    }
    assert!(head.contains("accept-encoding: identity"), "{head}");
}
