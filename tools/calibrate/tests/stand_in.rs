//! Servers that are no engines to be calibrated: each is refused with what is wrong with it.
#![allow(clippy::unwrap_used)]

use axum::extract::Request;
use axum::http::{HeaderMap, HeaderValue, StatusCode};
use axum::middleware::{Next, from_fn};
use axum::response::IntoResponse;
use axum::routing::{get, post};
use axum::{Json, Router};
use forebay_calibrate::{Given, calibrate};
use forebay_steps::Profile;
use serde_json::{Value, json};
use std::time::Duration;

/// What is wrong with a server.
#[derive(Clone, Copy, PartialEq)]
enum Wrong {
    SaysCached,
    CountsHits,
    Status,
    NoIds,
    IsRouter,
    AnswersOthers,
    SeveralEngines,
    NoModels,
    WantsKey,
}

async fn server(wrong: Wrong) -> String {
    let models = move || async move {
        match wrong {
            Wrong::NoModels => StatusCode::NOT_FOUND.into_response(),
            _ => Json(json!({ "data": [{ "id": "m", "max_model_len": 2048 }] })).into_response(),
        }
    };
    let reads = std::sync::Arc::new(std::sync::atomic::AtomicU64::new(0));
    let metrics = move || {
        let read = reads.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        async move {
            let ended = if wrong == Wrong::AnswersOthers { read * 1_000 } else { 0 };
            let hits = if wrong == Wrong::CountsHits { read * 1_000 } else { 0 };
            let mut page = format!(
                "vllm:num_requests_running{{engine=\"0\"}} 0\nvllm:request_success_total {ended}\n\
                 vllm:prefix_cache_hits_total {hits}\n"
            );
            if wrong == Wrong::SeveralEngines {
                page += "vllm:num_requests_running{engine=\"1\"} 0\n";
            }
            page
        }
    };
    let complete = move |Json(body): Json<Value>| async move {
        if wrong == Wrong::Status {
            return (StatusCode::BAD_REQUEST, "token ids out of vocabulary").into_response();
        }
        let mut headers = HeaderMap::new();
        headers.insert("content-type", HeaderValue::from_static("text/event-stream"));
        if wrong == Wrong::IsRouter {
            headers.insert("x-forebay-backend", HeaderValue::from_static("e0"));
        }
        let count = body["max_tokens"].as_u64().unwrap();
        let ids: Vec<u64> = (0..count).collect();
        let ids = if wrong == Wrong::NoIds { Value::Null } else { json!(ids) };
        let cached = if wrong == Wrong::SaysCached { 16 } else { 0 };
        let event = json!({
            "choices": [{ "text": "x", "token_ids": ids, "finish_reason": "length" }],
            "usage": {
                "prompt_tokens": 1, "completion_tokens": count,
                "prompt_tokens_details": { "cached_tokens": cached },
            },
        });
        (headers, format!("data: {event}\n\ndata: [DONE]\n\n")).into_response()
    };
    let let_in = move |request: Request, next: Next| async move {
        match wrong == Wrong::WantsKey && !request.headers().contains_key("authorization") {
            true => StatusCode::UNAUTHORIZED.into_response(),
            false => next.run(request).await,
        }
    };
    let app = Router::new()
        .route("/v1/models", get(models))
        .route("/metrics", get(metrics))
        .route("/v1/completions", post(complete))
        .layer(from_fn(let_in));
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let target = format!("http://{}", listener.local_addr().unwrap());
    tokio::spawn(async move { axum::serve(listener, app).await });
    target
}

#[tokio::test]
async fn what_is_no_engine_to_be_calibrated_is_refused_with_its_reason() {
    let table = [
        (Wrong::SaysCached, "16 of 32 tokens were cached, of a prompt never sent before"),
        (Wrong::CountsHits, "tokens were cached, of a prompt never sent before"),
        (Wrong::Status, "a prompt of 32 tokens: HTTP status: 400 Bad Request: token ids out of vocabulary"),
        (Wrong::NoIds, "returns no token ids"),
        (Wrong::IsRouter, "a router answered for its engine \"e0\""),
        (Wrong::AnswersOthers, "requests of others ended during the measurement"),
        (Wrong::SeveralEngines, "2 engines share this address"),
        (Wrong::NoModels, "/v1/models of the server: 404 Not Found"),
    ];
    let like = Profile::shipped(Profile::DEFAULT).unwrap();
    for (wrong, reason) in table {
        let target = server(wrong).await;
        let given = Given { max_seqs: Some(1), ..Given::default() };
        let time = Duration::from_secs(20);
        let refused = calibrate(&target, &given, &like, time, |_| ()).await.unwrap_err().to_string();
        assert!(refused.contains(reason), "{refused}");
    }
}

#[tokio::test]
async fn an_address_at_which_nobody_listens_is_refused() {
    let like = Profile::shipped(Profile::DEFAULT).unwrap();
    for (target, reason) in
        [("http://127.0.0.1:9", "/v1/models of the server: "), ("127.0.0.1:9", "not a URL")]
    {
        let time = Duration::from_secs(20);
        let refused =
            calibrate(target, &Given::default(), &like, time, |_| ()).await.unwrap_err().to_string();
        assert!(refused.contains(reason), "{refused}");
    }
}

#[tokio::test]
async fn a_key_goes_with_every_page_that_is_asked_for() {
    let target = server(Wrong::WantsKey).await;
    let like = Profile::shipped(Profile::DEFAULT).unwrap();
    let mut given = Given { max_seqs: Some(1), ..Given::default() };
    let time = Duration::from_secs(20);
    let refused = calibrate(&target, &given, &like, time, |_| ()).await.unwrap_err().to_string();
    assert!(refused.contains("/v1/models of the server: 401"), "{refused}");
    given.headers.insert("authorization", HeaderValue::from_static("Bearer k"));
    let refused = calibrate(&target, &given, &like, time, |_| ()).await.unwrap_err().to_string();
    // Its tokens come all at once: it is no engine, but it let us in.
    assert!(refused.contains("seems to take no time"), "{refused}");
}
