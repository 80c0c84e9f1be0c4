//! Guarantees of the API: right tokens over HTTP, the shapes that clients of vLLM expect, and clear
//! refusals.

mod common;

use common::{Client, config, ids, oracle, spawn, tokens};
use forebay_emulator::text;
use http::{Method, StatusCode};
use http_body_util::BodyExt;
use serde_json::{Value, json};
use std::time::{Duration, Instant};
use testkit::eventually_async;

const SECONDS: Duration = Duration::from_secs(1);

#[tokio::test]
async fn cold_and_warm_answers_are_the_oracles() {
    let config = config();
    let oracle = oracle(&config);
    let (engine, client) = spawn(&config).await;
    let prompt = tokens(1_000, 1);
    let (cold, usage) = client.complete(&prompt, 20).await;
    assert_eq!(cold, oracle.predict(&prompt, 20));
    let nothing = json!({
        "cached_tokens": 0, "external_cached_tokens": 0, "ssd_cached_tokens": 0, "peer_cached_tokens": 0,
    });
    assert_eq!(usage["prompt_tokens_details"], nothing);
    assert_eq!(
        (&usage["prompt_tokens"], &usage["completion_tokens"], &usage["total_tokens"]),
        (&json!(1000), &json!(20), &json!(1020))
    );

    let (warm, usage) = client.complete(&prompt, 20).await;
    assert_eq!(warm, cold);
    assert_eq!(
        usage["prompt_tokens_details"]["cached_tokens"], 992,
        "62 whole blocks; the last token is computed"
    );

    // The next turn: the answer is part of the prompt, and all of it but the last token is cached.
    let turn = [&prompt[..], &cold[..], &tokens(5, 2)[..]].concat();
    let (answer, usage) = client.complete(&turn, 8).await;
    assert_eq!(answer, oracle.predict(&turn, 8));
    assert_eq!(usage["prompt_tokens_details"]["cached_tokens"], 1_008);
    engine.shutdown(SECONDS).await;
}

#[tokio::test]
async fn concurrent_answers_under_preemption_are_the_oracles() {
    let mut config = config();
    config.profile.memory.pool_tokens = 1_024;
    let oracle = oracle(&config);
    let (engine, client) = spawn(&config).await;
    let prompts: Vec<Vec<u32>> =
        (0..12).map(|seed| [tokens(64, seed % 3), tokens(150 + 40 * seed, seed)].concat()).collect();
    let answers =
        futures_util::future::join_all(prompts.iter().map(|prompt| client.complete(prompt, 100))).await;
    for (prompt, (answer, _)) in prompts.iter().zip(answers) {
        assert_eq!(oracle.wrong_tokens(prompt, &answer), 0);
        assert_eq!(answer.len(), 100);
    }
    let stats = engine.stats();
    assert!(stats.scheduler.preemptions > 0, "a pool this small preempts");
    eventually_async("all blocks are free", || engine.stats().blocks_used == 0).await;
    engine.shutdown(SECONDS).await;
}

#[tokio::test]
async fn a_stream_carries_the_same_tokens_in_pieces() {
    let mut config = config();
    config.stream_interval = 4;
    let oracle = oracle(&config);
    let (engine, client) = spawn(&config).await;
    let prompt = tokens(50, 3);
    let body = json!({ "prompt": prompt, "max_tokens": 10, "stream": true, "return_token_ids": true, "stream_options": { "include_usage": true } });
    let events = client.stream("/v1/completions", body).await;
    let (done, pieces) = events.split_last().expect("events");
    assert_eq!(done, "[DONE]");
    let pieces: Vec<Value> = pieces.iter().map(|piece| serde_json::from_str(piece).unwrap()).collect();
    let (usage, pieces) = pieces.split_last().expect("pieces");
    assert_eq!((&usage["choices"], &usage["usage"]["completion_tokens"]), (&json!([]), &json!(10)));
    let lengths: Vec<usize> =
        pieces.iter().map(|piece| ids(&piece["choices"][0]["token_ids"]).len()).collect();
    assert_eq!(lengths, [1, 4, 4, 1], "the first token at once, then four at a time");
    let streamed: Vec<u32> = pieces.iter().flat_map(|piece| ids(&piece["choices"][0]["token_ids"])).collect();
    assert_eq!(streamed, oracle.predict(&prompt, 10));
    let text: String = pieces.iter().map(|piece| piece["choices"][0]["text"].as_str().unwrap()).collect();
    assert_eq!(text, text::decode(&streamed));
    let reasons: Vec<&Value> = pieces.iter().map(|piece| &piece["choices"][0]["finish_reason"]).collect();
    assert_eq!(reasons, [&Value::Null, &Value::Null, &Value::Null, &json!("length")]);
    assert!(pieces.iter().all(|piece| piece["usage"].is_null() && piece["object"] == "text_completion"));

    let plain =
        client.stream("/v1/completions", json!({ "prompt": prompt, "max_tokens": 2, "stream": true })).await;
    assert!(plain.iter().all(|event| !event.contains("usage") && !event.contains("token_ids")), "{plain:?}");
    engine.shutdown(SECONDS).await;
}

#[tokio::test]
async fn a_chat_that_comes_back_is_cached_with_its_answers() {
    let config = config();
    let (engine, client) = spawn(&config).await;
    let mut messages = vec![
        json!({ "role": "system", "content": "You are an agent with tools. ".repeat(30) }),
        json!({ "role": "user", "content": [{ "type": "text", "text": "What is in the file?" }] }),
    ];
    let (status, answer) = client
        .post("/v1/chat/completions", json!({ "messages": messages, "max_completion_tokens": 40 }))
        .await;
    assert_eq!(status, StatusCode::OK, "{answer}");
    let message = &answer["choices"][0]["message"];
    assert_eq!((&answer["object"], &message["role"]), (&json!("chat.completion"), &json!("assistant")));
    let first_turn_tokens = answer["usage"]["total_tokens"].as_u64().unwrap();

    messages.push(message.clone());
    messages.push(json!({ "role": "user", "content": "And in the other one?" }));
    let (_, second) =
        client.post("/v1/chat/completions", json!({ "messages": messages, "max_tokens": 4 })).await;
    let cached = second["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap();
    // All whole blocks of the first turn but for its last token, whose KV was never computed.
    assert_eq!(cached, (first_turn_tokens - 1) / 16 * 16);
    engine.shutdown(SECONDS).await;
}

#[tokio::test]
async fn a_streamed_chat_begins_with_its_role() {
    let config = config();
    let (engine, client) = spawn(&config).await;
    let body =
        json!({ "messages": [{ "role": "user", "content": "Hello" }], "max_tokens": 3, "stream": true });
    let events = client.stream("/v1/chat/completions", body).await;
    let pieces: Vec<Value> =
        events[..events.len() - 1].iter().map(|piece| serde_json::from_str(piece).unwrap()).collect();
    assert_eq!(pieces.len(), 3);
    assert_eq!(pieces[0]["object"], "chat.completion.chunk");
    assert_eq!(pieces[0]["choices"][0]["delta"]["role"], "assistant");
    assert!(pieces[1]["choices"][0]["delta"]["role"].is_null());
    assert!(pieces[2]["choices"][0]["delta"]["content"].as_str().unwrap().starts_with(" t"));
    engine.shutdown(SECONDS).await;
}

#[tokio::test]
async fn every_prompt_of_a_list_is_answered_at_its_place() {
    let config = config();
    let oracle = oracle(&config);
    let (engine, client) = spawn(&config).await;
    let prompts = [tokens(40, 1), tokens(90, 2), tokens(3, 3)];
    let (_, answer) = client
        .post("/v1/completions", json!({ "prompt": prompts, "max_tokens": 5, "return_token_ids": true }))
        .await;
    for (index, prompt) in prompts.iter().enumerate() {
        let choice = &answer["choices"][index];
        assert_eq!(
            (choice["index"].as_u64(), ids(&choice["token_ids"])),
            (Some(index as u64), oracle.predict(prompt, 5))
        );
    }
    assert_eq!(
        (&answer["usage"]["prompt_tokens"], &answer["usage"]["completion_tokens"]),
        (&json!(133), &json!(15))
    );

    let (_, answer) = client
        .post("/v1/completions", json!({ "prompt": ["a text", "another"], "return_token_ids": true }))
        .await;
    let prompt = ids(&answer["choices"][1]["prompt_token_ids"]);
    assert_eq!(prompt, text::encode("another", 151_936));
    assert_eq!(ids(&answer["choices"][1]["token_ids"]), oracle.predict(&prompt, 16));
    engine.shutdown(SECONDS).await;
}

#[tokio::test]
async fn wrong_requests_are_refused_and_the_field_is_named() {
    let config = config();
    let (engine, client) = spawn(&config).await;
    let ok = json!({ "prompt": [1, 2, 3] });
    let wrong = [
        (json!({ "max_tokens": 3 }), "prompt"),
        (json!({ "prompt": 7 }), "prompt"),
        (json!({ "prompt": [] }), "prompt"),
        (json!({ "prompt": "" }), "prompt"),
        (json!({ "prompt": [1, "a"] }), "prompt"),
        (json!({ "prompt": [1, -2] }), "prompt"),
        (json!({ "prompt": [[1], []] }), "prompt"),
        (json!({ "prompt": [999_999] }), "prompt"),
        (json!({ "prompt": vec!["a"; 200] }), "prompt"),
        (json!({ "prompt": [1], "max_tokens": "3" }), "max_tokens"),
        (json!({ "prompt": [1], "max_tokens": 0 }), "max_tokens"),
        (json!({ "prompt": [1], "max_tokens": -1 }), "max_tokens"),
        (json!({ "prompt": [1], "max_tokens": 2, "min_tokens": 3 }), "min_tokens"),
        (json!({ "prompt": [1], "stream": "yes" }), "stream"),
        (json!({ "prompt": [1], "stream_options": {} }), "stream_options"),
        (
            json!({ "prompt": [1], "stream": true, "stream_options": { "include_usage": 1 } }),
            "stream_options",
        ),
        (json!({ "prompt": [1], "n": 2 }), "n"),
        (json!({ "prompt": [1], "echo": true }), "echo"),
        (json!({ "prompt": [1], "logprobs": 3 }), "logprobs"),
        (json!({ "prompt": [1], "temperature": "hot" }), "temperature"),
        (json!({ "prompt": [1], "model": 5 }), "model"),
    ];
    for (body, field) in wrong {
        let (status, answer) = client.post("/v1/completions", body.clone()).await;
        let error = &answer["error"];
        assert_eq!(
            (status, error["param"].as_str()),
            (StatusCode::BAD_REQUEST, Some(field)),
            "{body}: {answer}"
        );
        assert_eq!(error["type"], "invalid_request_error");
        assert!(error["message"].as_str().unwrap().contains(field) || field == "prompt", "{answer}");
    }
    let chats = [
        (json!({}), "messages"),
        (json!({ "messages": [] }), "messages"),
        (json!({ "messages": "hello" }), "messages"),
        (json!({ "messages": [{ "content": "no role" }] }), "messages[0]"),
        (json!({ "messages": [{ "role": "user", "content": 3 }] }), "messages[0].content"),
        (
            json!({ "messages": [{ "role": "user", "content": [{ "type": "image_url" }] }] }),
            "messages[0].content[0].type",
        ),
    ];
    for (body, field) in chats {
        let (status, answer) = client.post("/v1/chat/completions", body.clone()).await;
        assert_eq!(
            (status, answer["error"]["param"].as_str()),
            (StatusCode::BAD_REQUEST, Some(field)),
            "{body}: {answer}"
        );
    }
    for garbage in ["", "{", "[1]", "\u{0}", "{\"prompt\": [1}"] {
        let (status, answer) = client.post_raw("/v1/completions", garbage).await;
        assert_eq!(status, StatusCode::BAD_REQUEST, "{garbage}: {answer}");
    }
    assert_eq!(client.post("/v1/completions", ok).await.0, StatusCode::OK, "and the engine still answers");
    engine.shutdown(SECONDS).await;
}

#[tokio::test]
async fn what_is_too_long_unknown_or_elsewhere_has_its_own_code() {
    let mut config = config();
    config.max_body_bytes = 100_000;
    let (engine, client) = spawn(&config).await;
    let (status, answer) =
        client.post("/v1/completions", json!({ "prompt": tokens(4_000, 1), "max_tokens": 97 })).await;
    assert_eq!(
        (status, &answer["error"]["code"]),
        (StatusCode::BAD_REQUEST, &json!("context_length_exceeded"))
    );
    let (status, answer) = client.post("/v1/completions", json!({ "prompt": "a", "model": "gpt-5" })).await;
    assert_eq!((status, &answer["error"]["code"]), (StatusCode::NOT_FOUND, &json!("model_not_found")));
    let (status, answer) = client.post("/v1/completions", json!({ "prompt": "a".repeat(200_000) })).await;
    assert_eq!(status, StatusCode::PAYLOAD_TOO_LARGE, "{answer}");
    let (status, answer) = client.post("/v1/nothing", json!({})).await;
    assert_eq!((status, answer["error"]["message"].is_string()), (StatusCode::NOT_FOUND, true));
    let (status, _) = client.get("/v1/completions").await;
    assert_eq!(status, StatusCode::METHOD_NOT_ALLOWED);
    engine.shutdown(SECONDS).await;
}

#[tokio::test]
async fn a_client_that_goes_away_frees_its_blocks() {
    let mut config = config();
    config.clock_ratio = 10.0;
    let (engine, client) = spawn(&config).await;
    let body = json!({ "prompt": tokens(500, 1), "max_tokens": 3_000, "stream": true }).to_string();
    let mut response = client.send(Method::POST, "/v1/completions", body).await;
    response.body_mut().frame().await.expect("a first piece").expect("which is good");
    assert!(engine.stats().blocks_used > 0);
    drop(response);
    drop(client);
    eventually_async("the request is aborted", || {
        engine.stats().aborted == 1 && engine.stats().blocks_used == 0
    })
    .await;
    engine.shutdown(SECONDS).await;
}

#[tokio::test]
async fn a_full_engine_and_a_draining_one_answer_503() {
    let mut config = config();
    config.clock_ratio = 1.0;
    config.max_requests = 1;
    let (engine, client) = spawn(&config).await;
    let body = json!({ "prompt": tokens(16, 1), "max_tokens": 1_000, "stream": true }).to_string();
    let first = client.send(Method::POST, "/v1/completions", body).await;
    assert_eq!(first.status(), StatusCode::OK, "a stream begins at once");
    let (status, answer) = client.post("/v1/completions", json!({ "prompt": [1] })).await;
    assert_eq!((status, &answer["error"]["code"]), (StatusCode::SERVICE_UNAVAILABLE, &json!("overloaded")));
    let address = engine.address();
    let shutdown = tokio::spawn(engine.shutdown(Duration::from_secs(3)));
    // It answers until the time is over; then nobody would.
    while Client::new(address).get("/health").await.0 != StatusCode::SERVICE_UNAVAILABLE {}
    let text = first.into_body().collect().await.expect("it ends").to_bytes();
    let text = String::from_utf8_lossy(&text);
    assert!(text.contains("the engine is shutting down") && text.ends_with("data: [DONE]\n\n"), "{text}");
    shutdown.await.unwrap();
}

#[tokio::test]
async fn model_time_is_what_the_step_model_says() {
    let mut config = config();
    config.clock_ratio = 50.0;
    let (engine, client) = spawn(&config).await;
    let start = Instant::now();
    // 21 steps of 50 ms at 50 times real time, and the prefill of 100 tokens is one of them.
    client.complete(&tokens(100, 1), 21).await;
    let took = start.elapsed();
    assert!(took >= Duration::from_millis(20), "{took:?}");
    let stats = engine.stats();
    let times = (stats.times.ttft.count(), stats.times.tpot.count());
    assert_eq!((stats.steps, times), (21, (1, 1)));
    // The floor of each step, and what 21 shares behind 2,190 tokens of context cost beside it.
    let beside_s = 21.0 * 50e-6 + 2_190.0 * 24.576e-9 + (5_000.0 + 2_190.0 + 10.0) * 5.904e-9;
    assert!((stats.busy_s - 21.0 * 0.05 - beside_s).abs() < 1e-9, "{}", stats.busy_s);
    engine.shutdown(SECONDS).await;
}

#[tokio::test]
async fn the_api_delays_a_prompt_and_keeps_no_step_waiting() {
    let mut config = config();
    config.clock_ratio = 50.0;
    config.profile.api.us_per_request = 5e6;
    let (engine, client) = spawn(&config).await;
    let start = Instant::now();
    client.complete(&tokens(100, 1), 1).await;
    // 5 s at 50 times real time before the only step, of which the GPU knows nothing.
    assert!(start.elapsed() >= Duration::from_millis(100), "{:?}", start.elapsed());
    let stats = engine.stats();
    assert!(stats.steps == 1 && stats.busy_s < 0.1, "{} steps, {} s", stats.steps, stats.busy_s);
    // Whoever is stopped in the API is told so.
    let body = json!({"model": config.model, "prompt": tokens(100, 2), "max_tokens": 1});
    let (answer, ()) = futures_util::future::join(client.post("/v1/completions", body), async {
        tokio::time::sleep(Duration::from_millis(20)).await;
        engine.shutdown(Duration::ZERO).await;
    })
    .await;
    assert!(answer.1.to_string().contains("shutting down"), "{answer:?}");
}

#[tokio::test]
async fn metrics_have_vllms_names() {
    let config = config();
    let (engine, client) = spawn(&config).await;
    client.complete(&tokens(100, 1), 3).await;
    client.complete(&tokens(100, 1), 3).await;
    let (status, text) = client.get("/metrics").await;
    assert_eq!(status, StatusCode::OK);
    let value = |name: &str| -> f64 {
        let labelled = format!("{name}{{engine=\"0\",model_name=\"Qwen/Qwen3-Coder-30B-A3B-Instruct\"");
        let line = text
            .lines()
            .find(|line| line.starts_with(&labelled))
            .unwrap_or_else(|| panic!("no {name} in {text}"));
        line.rsplit(' ').next().unwrap().parse().unwrap()
    };
    let promised = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/metrics.txt");
    testkit::metrics::assert_promises(&text, &promised);
    assert_eq!(value("vllm:num_requests_running"), 0.0);
    assert_eq!(value("vllm:num_requests_waiting"), 0.0);
    assert_eq!(value("vllm:kv_cache_usage_perc"), 0.0);
    assert_eq!(value("vllm:prefix_cache_queries_total"), 200.0);
    assert_eq!(value("vllm:prefix_cache_hits_total"), 96.0);
    assert_eq!(value("vllm:external_prefix_cache_hits_total"), 0.0);
    assert_eq!(value("vllm:prompt_tokens_total"), 200.0);
    assert_eq!(value("vllm:generation_tokens_total"), 6.0);
    assert_eq!(value("vllm:num_preemptions_total"), 0.0);
    assert_eq!(value("vllm:request_success_total"), 2.0);
    assert_eq!(value("vllm:time_to_first_token_seconds_count"), 2.0);
    assert!(value("vllm:time_to_first_token_seconds_sum") > 0.0);
    let (status, models) = client.get("/v1/models").await;
    assert_eq!(status, StatusCode::OK);
    let models: Value = serde_json::from_str(&models).unwrap();
    assert_eq!(models["data"][0]["id"], "Qwen/Qwen3-Coder-30B-A3B-Instruct");
    engine.shutdown(SECONDS).await;
}

#[tokio::test]
async fn kept_connections_never_stall() {
    let config = config();
    let (engine, client) = spawn(&config).await;
    let body = json!({ "prompt": tokens(20, 1), "max_tokens": 4, "stream": true });
    let mut slow = 0;
    for _ in 0..100 {
        let start = Instant::now();
        client.stream("/v1/completions", body.clone()).await;
        slow += usize::from(start.elapsed() >= Duration::from_millis(38));
    }
    // Nagle's algorithm against delayed acknowledgements would make about half of them wait for 40
    // ms; a busy machine delays some.
    assert!(slow <= 12, "{slow} of 100 streams took 38 ms and more");
    engine.shutdown(SECONDS).await;
}

#[tokio::test]
async fn impossible_configurations_are_refused_by_field() {
    let refused = async |change: fn(&mut forebay_emulator::EngineConfig)| {
        let mut config = config();
        change(&mut config);
        forebay_emulator::Engine::spawn(config, None).await.expect_err("it must not start").to_string()
    };
    assert!(refused(|config| config.clock_ratio = 0.0).await.contains("clock_ratio is 0"));
    assert!(refused(|config| config.chunk_tokens = 100).await.contains("chunk_tokens is 100"));
    assert!(
        refused(|config| config.kv_bytes_per_token_layer = 6).await.contains("kv_bytes_per_token_layer is 6")
    );
    assert!(
        refused(|config| config.profile.memory.pool_tokens = 3).await.contains("memory.pool_tokens is 3")
    );
    let budget = refused(|config| config.profile.scheduler.max_batched_tokens = 0).await;
    assert!(budget.contains("scheduler.max_batched_tokens is 0"), "{budget}");
    assert!(refused(|config| config.stream_interval = 0).await.contains("stream_interval is 0"));
    assert!(refused(|config| config.listen = ([8, 8, 8, 8], 80).into()).await.contains("8.8.8.8:80"));
}
