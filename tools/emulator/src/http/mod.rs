//! OpenAI's API, as vLLM serves it. This module knows HTTP, JSON and server-sent events.
//!
//! Differences to vLLM: the model never ends an answer by itself, so `finish_reason` is always
//! `length` and `stop` has no effect; sampling parameters are checked and have no effect;
//! `max_tokens` defaults to 16 for chats too; with `return_token_ids` the prompt's ids come back
//! only where the prompt was text.

mod answer;
mod app;
mod chat;
mod error;
mod fields;
mod generate;
mod handed;
mod metrics;
mod prompt;
#[cfg(test)]
mod tests;

pub use app::App;

use axum::extract::{DefaultBodyLimit, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use error::ApiError;
use generate::now_s;
use prometheus_client::encoding::prometheus_text::CONTENT_TYPE;
use std::sync::Arc;

/// The routes. Bodies of more than `max_body_bytes` are refused with 413.
pub fn router(app: Arc<App>, max_body_bytes: usize) -> Router {
    Router::new()
        .route("/v1/completions", post(generate::completions))
        .route("/v1/chat/completions", post(generate::chat_completions))
        .route("/v1/models", get(models))
        .route("/kv/{key}", get(handed::kv))
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

async fn unknown_path(uri: axum::http::Uri) -> ApiError {
    ApiError::not_found(format!("there is nothing at {}", uri.path()))
}

async fn wrong_method(method: axum::http::Method, uri: axum::http::Uri) -> ApiError {
    ApiError::wrong_method(format!("{} does not take {method}", uri.path()))
}
