//! OpenAI's API, as vLLM serves it. This module knows HTTP, JSON and server-sent events.
//!
//! Differences to vLLM: the model never ends an answer by itself, so `finish_reason` is always
//! `length` and `stop` has no effect; sampling parameters are checked and have no effect;
//! `max_tokens` defaults to 16 for chats too; with `return_token_ids` the prompt's ids come back
//! only where the prompt was text.

mod answer;
mod chat;
mod error;
mod fields;
mod generate;
mod metrics;
mod prompt;
#[cfg(test)]
mod tests;
mod wait;

use crate::job::Intake;
use crate::stats::Stats;
use axum::extract::{DefaultBodyLimit, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use error::ApiError;
use parking_lot::Mutex;
use prometheus_client::encoding::prometheus_text::CONTENT_TYPE;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

/// What all handlers share.
#[derive(Debug)]
pub struct App {
    /// Where jobs go.
    pub intake: Arc<Intake>,
    /// Served name of the model.
    pub model: String,
    /// Size of the vocabulary.
    pub vocab: u32,
    /// Tokens per streamed chunk after the first.
    pub stream_interval: usize,
    /// Tokens of a KV block.
    pub block_tokens: usize,
    /// What the engine counts, written by its thread.
    pub stats: Arc<Mutex<Stats>>,
}

/// The routes. Bodies of more than `max_body_bytes` are refused with 413.
pub fn router(app: Arc<App>, max_body_bytes: usize) -> Router {
    Router::new()
        .route("/v1/completions", post(generate::completions))
        .route("/v1/chat/completions", post(generate::chat_completions))
        .route("/v1/models", get(models))
        .route("/health", get(health))
        .route("/metrics", get(metrics))
        .fallback(unknown_path)
        .method_not_allowed_fallback(wrong_method)
        .layer(DefaultBodyLimit::max(max_body_bytes))
        .with_state(app)
}

async fn models(State(app): State<Arc<App>>) -> Response {
    let model = serde_json::json!({
        "id": app.model,
        "object": "model",
        "created": now_s(),
        "owned_by": "forebay",
        "root": app.model,
        "parent": null,
        "max_model_len": app.intake.limit_tokens,
    });
    Json(serde_json::json!({ "object": "list", "data": [model] })).into_response()
}

/// 200 while requests are accepted, else 503.
async fn health(State(app): State<Arc<App>>) -> StatusCode {
    if app.intake.is_open() { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE }
}

async fn metrics(State(app): State<Arc<App>>) -> Response {
    let stats = app.stats.lock().clone();
    let text = metrics::render(stats, &app.model, app.block_tokens);
    ([(axum::http::header::CONTENT_TYPE, CONTENT_TYPE)], text).into_response()
}

/// Seconds of Unix time.
fn now_s() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

async fn unknown_path(uri: axum::http::Uri) -> ApiError {
    ApiError::not_found(format!("there is nothing at {}", uri.path()))
}

async fn wrong_method(method: axum::http::Method, uri: axum::http::Uri) -> ApiError {
    ApiError::wrong_method(format!("{} does not take {method}", uri.path()))
}
