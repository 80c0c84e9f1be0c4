//! What the tests of a whole engine share: small engines with a fast clock, and a client.
#![allow(dead_code, reason = "each test binary uses its part of this")]

use bytes::Bytes;
use forebay_emulator::truth::Oracle;
use forebay_emulator::{Engine, EngineConfig, EngineHandle};
use forebay_kv::NamespaceKey;
use forebay_steps::Profile;
use http::{Method, Request, Response, StatusCode};
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper_util::client::legacy::Client as HyperClient;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use serde_json::{Value, json};
use std::net::SocketAddr;

/// A clock so fast that a step of the H20 takes some 25 us.
pub const FAST: f64 = 2_000.0;

/// A small engine of the shipped profile: 4,096 tokens of KV.
pub fn config() -> EngineConfig {
    let mut profile = Profile::shipped(Profile::DEFAULT).expect("shipped");
    profile.memory.pool_tokens = 4_096;
    let namespace = NamespaceKey::from_bytes([42; 32]);
    EngineConfig { clock_ratio: FAST, ..EngineConfig::new(profile, namespace) }
}

pub fn oracle(config: &EngineConfig) -> Oracle {
    Oracle::new(config.truth().expect("a possible shape"), config.profile.model.vocab, 10_000)
}

pub async fn spawn(config: &EngineConfig) -> (EngineHandle, Client) {
    let engine = Engine::spawn(config.clone(), None).await.expect("it starts");
    let client = Client::new(engine.address());
    (engine, client)
}

pub fn tokens(count: u32, seed: u32) -> Vec<u32> {
    (0..count)
        .map(|position| position.wrapping_mul(2_654_435_761).wrapping_add(seed * 77) % 151_936)
        .collect()
}

/// Speaks to one engine.
pub struct Client {
    base: String,
    http: HyperClient<HttpConnector, Full<Bytes>>,
}

impl Client {
    pub fn new(address: SocketAddr) -> Client {
        let http = HyperClient::builder(TokioExecutor::new()).build_http();
        Client { base: format!("http://{address}"), http }
    }

    pub async fn send(&self, method: Method, path: &str, body: impl Into<Bytes>) -> Response<Incoming> {
        let request = Request::builder()
            .method(method)
            .uri(format!("{}{path}", self.base))
            .header("content-type", "application/json")
            .body(Full::new(body.into()))
            .expect("a request");
        self.http.request(request).await.expect("an answer")
    }

    pub async fn get(&self, path: &str) -> (StatusCode, String) {
        text(self.send(Method::GET, path, "").await).await
    }

    pub async fn post_raw(&self, path: &str, body: impl Into<Bytes>) -> (StatusCode, Value) {
        let (status, text) = text(self.send(Method::POST, path, body).await).await;
        (status, serde_json::from_str(&text).unwrap_or_else(|_| panic!("not JSON: {text}")))
    }

    pub async fn post(&self, path: &str, body: Value) -> (StatusCode, Value) {
        self.post_raw(path, body.to_string()).await
    }

    /// The ids that the engine answers to a prompt of ids, and the usage.
    pub async fn complete(&self, prompt: &[u32], max_tokens: usize) -> (Vec<u32>, Value) {
        let body = json!({ "prompt": prompt, "max_tokens": max_tokens, "return_token_ids": true });
        let (status, answer) = self.post("/v1/completions", body).await;
        assert_eq!(status, StatusCode::OK, "{answer}");
        (ids(&answer["choices"][0]["token_ids"]), answer["usage"].clone())
    }

    /// The data of all events of a streamed answer.
    pub async fn stream(&self, path: &str, body: Value) -> Vec<String> {
        let (status, text) = text(self.send(Method::POST, path, body.to_string()).await).await;
        assert_eq!(status, StatusCode::OK, "{text}");
        assert!(text.ends_with("\n\n"), "{text}");
        text.trim_end()
            .split("\n\n")
            .map(|event| event.strip_prefix("data: ").expect("data").to_owned())
            .collect()
    }
}

async fn text(response: Response<Incoming>) -> (StatusCode, String) {
    let status = response.status();
    let body = response.into_body().collect().await.expect("a body").to_bytes();
    (status, String::from_utf8(body.to_vec()).expect("UTF-8"))
}

pub fn ids(value: &Value) -> Vec<u32> {
    let list = value.as_array().unwrap_or_else(|| panic!("no list of ids: {value}"));
    list.iter().map(|id| id.as_u64().expect("an id") as u32).collect()
}
