//! Where requests go, and what the router says about it, over real sockets.

mod common;

use common::*;
use forebay_router::Policy;
use std::sync::{Arc, Mutex};
use testkit::eventually_async;
use tokio::sync::Semaphore;

/// A prompt of a session that has had some turns: about 4,000 bytes a turn.
fn turn(session: usize, turns: usize) -> String {
    let text: String =
        (0..turns).map(|turn| format!("session {session} turn {turn:04} ").repeat(160)).collect();
    format!(r#"{{"model":"m","messages":[{{"role":"user","content":"{text}"}}]}}"#)
}

/// A file that lies beside the tests.
fn beside(name: &str) -> std::path::PathBuf {
    std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests").join(name)
}

async fn chat(client: &mut Client, headers: &[(&str, &str)], body: &str) -> Got {
    client.post("/v1/chat/completions", headers, body).await
}

#[tokio::test]
async fn turns_of_a_session_go_where_its_prefix_is_without_any_session_header() {
    for policy in [Policy::Linear, Policy::Lmetric, Policy::Lpwl, Policy::AddedLatency] {
        let engines = [Engine::start(well).await, Engine::start(well).await, Engine::start(well).await];
        let router = router(policy, &engines.each_ref().map(Engine::url), |_| {});
        let mut client = Client::connect(&router).await;
        let mut homes = vec![String::new(); 5];
        for turns in 1..5 {
            for (session, home) in homes.iter_mut().enumerate() {
                let got = chat(&mut client, &[], &turn(session, turns)).await;
                if turns > 1 {
                    assert_eq!(got.backend(), *home, "{policy}");
                }
                *home = got.backend().to_owned();
            }
        }
        assert!(homes.iter().any(|home| *home != homes[0]), "{policy}: all sessions at {}", homes[0]);
    }
}

#[tokio::test]
async fn a_session_is_known_by_its_header_its_user_or_its_beginning() {
    let engines = [Engine::start(well).await, Engine::start(well).await];
    let router = router(Policy::SessionSticky, &engines.each_ref().map(Engine::url), |_| {});
    let mut client = Client::connect(&router).await;
    let user = |name: &str, n: usize| format!(r#"{{"messages":[{n}],"user":"{name}"}}"#);
    let mut asked = 0;
    for headers in [&[("x-session-id", "s1")][..], &[("x-claude-code-session-id", "s2")], &[]] {
        let first = chat(&mut client, headers, &user("u3", asked)).await.backend().to_owned();
        for _ in 0..4 {
            asked += 1;
            assert_eq!(chat(&mut client, headers, &user("u3", asked)).await.backend(), first, "{headers:?}");
        }
    }
    let first = chat(&mut client, &[], &turn(1, 1)).await.backend().to_owned();
    for turns in 2..6 {
        assert_eq!(chat(&mut client, &[], &turn(1, turns)).await.backend(), first);
    }
}

#[tokio::test]
async fn an_engine_that_keeps_less_than_believed_is_found_out_by_its_answers() {
    // The engine has nothing cached, ever.
    let forgetful = |path: &str, body: &str| {
        if path == "/health" {
            return well(path, body);
        }
        let tokens = body.len() as u64 / 4;
        document("200 OK", &format!("{{\"choices\":[{{}}],\"usage\":{}}}", usage(tokens, 0)))
    };
    let engine = Engine::start(forgetful).await;
    let router = router(Policy::Lpwl, &[engine.url()], |_| {});
    let mut client = Client::connect(&router).await;
    let mut over = Vec::new();
    for turns in 1..12 {
        let before = router.stats().backends[0].over_predicted_tokens;
        for session in 0..3 {
            chat(&mut client, &[], &turn(session, turns)).await;
        }
        over.push(router.stats().backends[0].over_predicted_tokens - before);
    }
    assert!(over[1] > 500, "{over:?}");
    assert!(over[6..].iter().all(|&tokens| tokens < over[1] / 10), "{over:?}");
}

#[tokio::test]
async fn decisions_metrics_models_and_health_say_what_happened() {
    let engines = [Engine::start(well).await, Engine::start(well).await];
    let urls = engines.each_ref().map(Engine::url);
    let router = configured(Policy::Lpwl, &urls, |config| config.backends[0].store = Some("s".into()));
    let mut client = Client::connect(&router).await;
    let answered = client.complete_as("s", PROMPT).await;
    let decisions = client.get("/debug/decisions").await.json();
    let decision = &decisions[0];
    assert_eq!(decisions.as_array().unwrap().len(), 1);
    assert_eq!((&decision["backend"], &decision["attempt"]), (&answered.backend().into(), &1.into()));
    assert_eq!(decision["candidates"].as_array().unwrap().len(), 2);
    assert!(decision["candidates"][0]["score"].as_f64().unwrap() > 0.0);
    let outcome = &decision["outcome"];
    assert_eq!((&outcome["status"], &outcome["cached_tokens"]), (&200.into(), &4.into()));
    let metrics = client.get("/metrics").await;
    assert!(metrics.headers["content-type"].to_str().unwrap().starts_with("text/plain"));
    let line =
        format!("forebay_route_attempts_total{{backend=\"{}\",end=\"answered\"}} 1\n", answered.backend());
    assert!(metrics.body.contains(&line), "{}", metrics.body);
    testkit::metrics::assert_promises(&metrics.body, &beside("metrics.txt"));
    let models = client.get("/v1/models").await;
    assert_eq!((models.status, models.json()["object"].as_str()), (200, Some("list")));
    assert_eq!(client.get("/health").await.json()["backends_up"], 2);
    assert_eq!(router.decisions().len(), 1);
}

#[tokio::test]
async fn traffic_that_others_send_is_seen_while_an_engine_tells_its_load() {
    let running = Arc::new(Mutex::new("7"));
    let page = running.clone();
    let engine = Engine::start(move |path: &str, body: &str| match path {
        "/metrics" => {
            let running = page.lock().unwrap();
            let pool = r#"vllm:cache_config_info{block_size="16",num_gpu_blocks="100"} 1"#;
            let page = format!("vllm:num_requests_running {running}\nvllm:num_requests_waiting 0\n{pool}\n");
            document("200 OK", &page)
        }
        _ => well(path, body),
    });
    let (busy, idle) = (engine.await, Engine::start(well).await);
    let urls = [busy.url(), idle.url()];
    let router = router(Policy::LeastLoaded, &urls, |limits| limits.metrics_interval = 20 * MS);
    let of_busy = || router.stats().backends.swap_remove(0);
    eventually_async("the load is seen", || of_busy().others_in_flight == 7).await;
    assert_eq!(of_busy().pool_tokens, 1_600);
    let mut client = Client::connect(&router).await;
    for _ in 0..6 {
        assert_eq!(client.complete(PROMPT).await.backend(), "e1");
    }
    *running.lock().unwrap() = "-1";
    eventually_async("nonsense is unknown", || of_busy().others_in_flight == 0).await;
    assert_ne!(of_busy().pool_tokens, 1_600);
    assert!(of_busy().unread_metrics[2] > 0, "{:?}", of_busy().unread_metrics);
    let served: Vec<String> = [client.complete(PROMPT).await, client.complete(PROMPT).await]
        .iter()
        .map(Got::backend)
        .map(str::to_owned)
        .collect();
    assert!(served.contains(&"e0".to_owned()), "{served:?}");
}

#[tokio::test]
async fn shutdown_lets_requests_end_and_then_nobody_listens() {
    let slow = |path: &str, body: &str| {
        let mut steps = vec![Step::Wait(if path == "/health" { MS } else { 200 * MS })];
        steps.extend(well(path, body));
        steps
    };
    let engine = Engine::start(slow).await;
    let router = router(Policy::Lpwl, &[engine.url()], |limits| limits.drain = PATIENCE);
    let address = router.addr();
    let mut client = Client::connect(&router).await;
    let asking = tokio::spawn(async move { client.complete(STREAM).await });
    eventually_async("the engine has the request", || engine.requests() == 1).await;
    router.shutdown().await;
    let got = asking.await.unwrap();
    assert_eq!((got.status, got.broken), (200, false));
    assert!(tokio::net::TcpStream::connect(address).await.is_err());
}

#[tokio::test]
async fn shutdown_does_not_wait_longer_than_it_says_and_cuts_no_stream_without_a_word() {
    let streaming = vec![stream_head(), event("a"), Step::Hang];
    for (steps, body) in [(vec![Step::Hang], PROMPT), (vec![Step::Hang], STREAM), (streaming, STREAM)] {
        let engine = Engine::start(only_probes(steps)).await;
        let router = router(Policy::Lpwl, &[engine.url()], |limits| limits.drain = 100 * MS);
        let mut client = Client::connect(&router).await;
        let asking = tokio::spawn(async move { client.complete(body).await });
        eventually_async("the engine has the request", || engine.requests() == 1).await;
        let start = std::time::Instant::now();
        router.shutdown().await;
        assert!(start.elapsed() < PATIENCE, "{:?}", start.elapsed());
        let got = asking.await.unwrap();
        // A stream that has begun ends with an error event; what has not is 503.
        let last = got.body.trim_end().rsplit("\n\n").next().unwrap();
        let error: serde_json::Value =
            serde_json::from_str(last.strip_prefix("data: ").unwrap_or(last)).unwrap();
        assert_eq!(error["error"]["code"], 503, "{got:?}");
        let begun = got.body.contains(r#""text":"a""#);
        assert_eq!((got.status, got.broken), if begun { (200, true) } else { (503, false) }, "{got:?}");
    }
}

#[tokio::test]
async fn shutdown_tells_load_balancers_first_and_serves_meanwhile() {
    let engine = Engine::start(well).await;
    let router = router(Policy::Lpwl, &[engine.url()], |limits| {
        limits.shutdown_delay = PATIENCE;
        limits.drain = PATIENCE;
    });
    let mut kept = Client::connect(&router).await;
    assert_eq!(kept.get("/health").await.status, 200);
    let address = router.addr();
    let (hurry, hurried) = tokio::sync::oneshot::channel::<()>();
    let stopping = tokio::spawn(router.shutdown_or_hurry(async move {
        let _ = hurried.await;
    }));
    tokio::task::yield_now().await;
    let got = Client::connect_to(address).await.get("/health").await;
    assert_eq!(
        (got.status, got.json()["error"]["message"].as_str()),
        (503, Some("the router is shutting down"))
    );
    let got = kept.complete(PROMPT).await;
    assert_eq!((got.status, got.headers["connection"].to_str().unwrap()), (200, "close"));
    assert_eq!(Client::connect_to(address).await.complete(STREAM).await.status, 200);
    // Long before the delay is over.
    hurry.send(()).unwrap();
    stopping.await.unwrap();
    assert!(tokio::net::TcpStream::connect(address).await.is_err());
}

#[tokio::test]
async fn headers_that_are_about_one_connection_stay_there_wherever_they_are_named() {
    let engine = Engine::start(well).await;
    let router = router(Policy::RoundRobin, &[engine.url()], |_| {});
    let mut client = Client::connect(&router).await;
    let named = [("connection", "x-one"), ("connection", "x-two, x-three")];
    let headers = [("x-one", "1"), ("x-two", "2"), ("x-three", "3"), ("x-four", "4")];
    chat(&mut client, &[&named[..], &headers[..]].concat(), &turn(1, 1)).await;
    let head = engine.seen.lock().unwrap().heads[0].to_ascii_lowercase();
    let sent: Vec<&str> =
        headers.iter().map(|(name, _)| *name).filter(|name| head.contains(&format!("{name}:"))).collect();
    assert_eq!(sent, ["x-four"], "{head}");
}

#[tokio::test]
async fn what_separates_kv_in_engines_separates_it_in_the_prediction() {
    let separators = [
        r#""cache_salt":"s""#,
        r#""extra_key":"k""#,
        r#""extra_key":["k"]"#,
        r#""lora_path":"l""#,
        r#""chat_template_kwargs":{"enable_thinking":false}"#,
        r#""chat_template":"{{ x }}""#,
        r#""documents":[{"title":"t"}]"#,
        r#""tools":[{"type":"function"}]"#,
        r#""reasoning_effort":"high""#,
        r#""mm_processor_kwargs":{"fps":1}"#,
        r#""add_special_tokens":false"#,
        r#""truncate_prompt_tokens":900"#,
        r#""data_parallel_rank":1"#,
        r#""model":"other""#,
    ];
    let kept = std::sync::Arc::new(Separating::default());
    let engine = Engine::start(move |path: &str, body: &str| kept.run(path, body)).await;
    let router = router(Policy::Lpwl, &[engine.url()], |_| {});
    let mut client = Client::connect(&router).await;
    let text = "a prompt that all of them share ".repeat(200);
    for separator in separators {
        let body = format!(r#"{{"prompt":"{text}",{separator}}}"#);
        for wanted in [0, text.len() as u64 / 4] {
            assert_eq!(client.complete(&body).await.status, 200);
            let outcome = router.decisions().pop().unwrap().outcome.unwrap();
            assert_eq!(outcome.cached_tokens, Some(wanted), "the engine: {separator}");
            let predicted = outcome.predicted_tokens.unwrap();
            assert!(predicted.abs_diff(wanted) < 200, "{separator}: {predicted}");
        }
    }
    let null = format!(r#"{{"prompt":"{text}","model":"other","cache_salt":null}}"#);
    client.complete(&null).await;
    let outcome = router.decisions().pop().unwrap().outcome.unwrap();
    assert!(outcome.predicted_tokens.unwrap() > 1_000, "null is as if it were not there");
    let ranked = format!(r#"{{"prompt":"{text}","model":"other"}}"#);
    client.post("/v1/completions", &[("x-data-parallel-rank", "1")], &ranked).await;
    let outcome = router.decisions().pop().unwrap().outcome.unwrap();
    assert_eq!(outcome.predicted_tokens, Some(0), "ranks share no KV");
}

#[tokio::test]
async fn images_are_no_text_and_teach_no_ratio() {
    let counting = |path: &str, body: &str| {
        if path == "/health" {
            return well(path, body);
        }
        let tokens = if body.contains("image_url") { 1_003 } else { 10_000 };
        document("200 OK", &format!("{{\"choices\":[{{}}],\"usage\":{}}}", usage(tokens, 0)))
    };
    let engine = Engine::start(counting).await;
    let router = router(Policy::Lpwl, &[engine.url()], |_| {});
    let mut client = Client::connect(&router).await;
    let text = |number: usize| {
        let words = "word ".repeat(8_000);
        format!(r#"{{"messages":[{{"role":"user","content":"q{number} {words}"}}]}}"#)
    };
    let image = |url: &str| {
        format!(
            r#"{{"messages":[{{"role":"user","content":[{{"type":"text","text":"what is this"}},
            {{"type":"image_url","image_url":{{"url":"{url}"}}}}]}}]}}"#
        )
    };
    let estimated = || router.decisions().pop().unwrap().input_tokens;
    for number in 0..10 {
        chat(&mut client, &[], &text(number)).await;
    }
    let before = estimated();
    assert!(before.abs_diff(10_000) < 200, "{before}");
    let chunks = router.stats().backends[0].index_chunks;
    for number in 0..3 {
        let data = format!("data:image/png;base64,{number}{}", "iVBORw0K".repeat(500_000));
        for url in [&data[..], "https://example.com/a.png"] {
            chat(&mut client, &[], &image(url)).await;
            assert!(estimated().abs_diff(1_003) < 200, "{} for {} bytes", estimated(), url.len());
        }
    }
    let chunks = router.stats().backends[0].index_chunks - chunks;
    assert!(chunks < 60, "images fill the index: {chunks}");
    chat(&mut client, &[], &text(99)).await;
    assert!(estimated().abs_diff(before) < 50, "{} after {before}", estimated());
}

#[tokio::test]
async fn a_request_that_no_engine_can_serve_in_time_is_refused_and_only_if_it_asks_for_that() {
    let gate = Arc::new(Semaphore::new(0));
    let engine = Engine::start(held(gate.clone(), well)).await;
    // One request fills it.
    let router = configured(Policy::Lpwl, &[engine.url()], |config| config.engine_model.max_seqs = 1);
    let mut client = Client::connect(&router).await;
    let hurried = [("x-llm-d-slo-ttft-ms", "1")];
    let got = client.post("/v1/completions", &hurried, PROMPT).await;
    assert_eq!(got.status, 200, "an engine that has room is worth a try");
    let mut other = Client::connect(&router).await;
    let asking = tokio::spawn(async move { other.complete(HELD).await.status });
    eventually_async("the engine is full", || engine.requests_of(HELD) == 1).await;

    let got = client.post("/v1/completions", &hurried, PROMPT).await;
    let error = &got.json()["error"];
    assert_eq!(
        (got.status, error["code"].as_str(), error["param"].as_str()),
        (429, Some("ttft_slo"), Some(hurried[0].0))
    );
    let after_s: u64 = got.headers["retry-after"].to_str().unwrap().parse().unwrap();
    assert!((1..=60).contains(&after_s), "{after_s}");
    assert!(got.body.contains("x-llm-d-slo-ttft-ms is 1: all engines are full"), "{}", got.body);
    assert_eq!(engine.requests(), 2, "it did not go there");
    let last = client.get("/debug/decisions").await.json().as_array().unwrap().last().unwrap().clone();
    assert_eq!((&last["outcome"]["refused"], &last["slo"]["ttft_us"]), (&"ttft-slo".into(), &1_000.into()));
    let metrics = client.get("/metrics").await.body;
    for line in ["{reason=\"ttft-slo\"} 1\n", "{reason=\"bad-request\"} 0\n"] {
        assert!(metrics.contains(&format!("forebay_route_refused_total{line}")), "{metrics}");
    }
    for fine in [&[][..], &[("x-llm-d-slo-ttft-ms", "600000")]] {
        assert_eq!(client.post("/v1/completions", fine, PROMPT).await.status, 200, "{fine:?}");
    }
    let got = client.post("/v1/completions", &[("x-llm-d-slo-tpot-ms", "soon")], PROMPT).await;
    assert_eq!((got.status, got.json()["error"]["param"].as_str()), (400, Some("x-llm-d-slo-tpot-ms")));
    assert!(got.body.contains("'soon'; one number of milliseconds from 0.001"), "{}", got.body);
    gate.add_permits(1);
    assert_eq!(asking.await.unwrap(), 200);
}
