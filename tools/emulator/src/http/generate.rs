//! The two endpoints that generate: a request in, an answer out, whole or as server-sent events.

use super::answer::{Endpoint, Head, Output, Usage};
use super::app::App;
use super::error::ApiError;
use super::fields::{Fields, Options};
use super::prompt::Prompt;
use super::{chat, handed, prompt};
use crate::job::{Delivery, End, Handed, Intake, NewJob, Ticket, Update};
use crate::scheduler::CacheHit;
use axum::body::{Body, Bytes};
use axum::extract::State;
use axum::extract::rejection::BytesRejection;
use axum::http::HeaderMap;
use axum::http::header::{CACHE_CONTROL, CONTENT_TYPE};
use axum::response::{IntoResponse, Response};
use forebay_transfer::TraceContext;
use futures_util::stream;
use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};
use xxhash_rust::xxh3::xxh3_64_with_seed;

/// `POST /v1/completions`.
pub async fn completions(
    State(app): State<Arc<App>>,
    headers: HeaderMap,
    body: Result<Bytes, BytesRejection>,
) -> Result<Response, ApiError> {
    let body = read(body)?;
    let fields = Fields::parse(&body)?;
    let options = Options { trace: trace(&headers), ..Options::parse(&fields, &["max_tokens"])? };
    check_model(&app, &options)?;
    let prompt = fields.raw("prompt").ok_or_else(|| ApiError::field("prompt", "this field is needed"))?;
    let prompts = prompt::parse(prompt, app.vocab)?;
    answer(app, Endpoint::Completions, options, prompts).await
}

/// `POST /v1/chat/completions`.
pub async fn chat_completions(
    State(app): State<Arc<App>>,
    headers: HeaderMap,
    body: Result<Bytes, BytesRejection>,
) -> Result<Response, ApiError> {
    let body = read(body)?;
    let fields = Fields::parse(&body)?;
    let options = Options::parse(&fields, &["max_completion_tokens", "max_tokens"])?;
    let options = Options { trace: trace(&headers), ..options };
    check_model(&app, &options)?;
    let prompt = chat::parse(&fields, app.vocab)?;
    answer(app, Endpoint::Chat, options, vec![prompt]).await
}

fn read(body: Result<Bytes, BytesRejection>) -> Result<Bytes, ApiError> {
    body.map_err(|rejection| ApiError::body(rejection.status(), rejection.body_text()))
}

/// The span that a request is part of, if somebody records it.
fn trace(headers: &HeaderMap) -> Option<TraceContext> {
    let said = headers.get("traceparent")?.to_str().ok()?;
    TraceContext::parse(said).filter(|trace| trace.sampled)
}

fn check_model(app: &App, options: &Options) -> Result<(), ApiError> {
    match &options.model {
        Some(model) if *model != app.model => Err(ApiError::unknown_model(model, &app.model)),
        _ => Ok(()),
    }
}

async fn answer(
    app: Arc<App>,
    endpoint: Endpoint,
    options: Options,
    prompts: Vec<Prompt>,
) -> Result<Response, ApiError> {
    let mut usage = Usage::default();
    prompts.iter().for_each(|prompt| usage.add_prompt(prompt.tokens.len()));
    let told = |prompt: &Prompt| (options.return_token_ids && prompt.was_text).then(|| prompt.tokens.clone());
    let outputs: Vec<Output> = prompts
        .iter()
        .zip(0..)
        .map(|(prompt, index)| Output {
            index,
            first: true,
            prompt_token_ids: told(prompt),
            ..Output::default()
        })
        .collect();
    let id = new_id(endpoint);
    let (handed, kv_transfer_params) = handed::part(&app, options.role.clone(), &id, &prompts).await?;
    let head = Head {
        endpoint,
        id,
        created_s: now_s(),
        model: app.model.clone(),
        return_token_ids: options.return_token_ids,
        kv_transfer_params,
    };
    let answers = Answers::submit(&app.intake, prompts, &options, app.stream_interval, handed)?;
    let streamed = Streamed { head, answers, outputs, usage, include_usage: options.include_usage };
    if options.stream { Ok(streamed.into_events()) } else { streamed.into_whole().await }
}

/// Ids that differ within an engine and, in all likelihood, between engines.
fn new_id(endpoint: Endpoint) -> String {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    let seed = now_s() ^ u64::from(std::process::id()) << 32;
    format!("{}-{:016x}{number:08x}", endpoint.id_prefix(), xxh3_64_with_seed(&number.to_le_bytes(), seed))
}

/// Answers on their way to a client.
struct Streamed {
    head: Head,
    answers: Answers,
    /// What of each answer is to be sent next.
    outputs: Vec<Output>,
    usage: Usage,
    include_usage: bool,
}

impl Streamed {
    /// Waits for all answers.
    async fn into_whole(mut self) -> Result<Response, ApiError> {
        while let Some(update) = self.answers.next().await {
            if let Some(End::Failed(reason)) = update.end {
                return Err(ApiError::failed(reason));
            }
            self.usage.add_output(update.tokens.len());
            self.usage.add_hit(update.hit);
            if let Some(output) = self.outputs.get_mut(update.index as usize) {
                output.tokens.extend(update.tokens);
                output.last = true;
            }
        }
        let body = self.head.whole(&self.outputs, self.usage);
        Ok(([(CONTENT_TYPE, "application/json")], body).into_response())
    }

    /// One event per update, then the usage if it was asked for, then the end mark.
    fn into_events(self) -> Response {
        let frames = stream::unfold(Some(self), |state| async move {
            let mut state = state?;
            match state.next_frame().await {
                Some(frame) => Some((Ok::<_, Infallible>(frame), Some(state))),
                None => Some((Ok(state.last_frame()), None)),
            }
        });
        let headers = [(CONTENT_TYPE, "text/event-stream; charset=utf-8"), (CACHE_CONTROL, "no-cache")];
        (headers, Body::from_stream(frames)).into_response()
    }

    async fn next_frame(&mut self) -> Option<String> {
        let update = self.answers.next().await?;
        if let Some(End::Failed(reason)) = update.end {
            let error = serde_json::to_string(&ApiError::failed(reason)).unwrap_or_default();
            return Some(event(&error));
        }
        self.usage.add_output(update.tokens.len());
        let output = self.outputs.get_mut(update.index as usize)?;
        if output.first {
            self.usage.add_hit(update.hit);
        }
        output.tokens = update.tokens;
        output.last = update.end.is_some();
        let piece = self.head.piece(output, self.include_usage);
        output.first = false;
        output.prompt_token_ids = None;
        Some(event(&piece))
    }

    fn last_frame(&self) -> String {
        let end = event("[DONE]");
        if self.include_usage { event(&self.head.usage(self.usage)) + &end } else { end }
    }
}

fn event(data: &str) -> String {
    format!("data: {data}\n\n")
}

/// Seconds of Unix time.
pub fn now_s() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

/// The answers under way. Dropped before their end, when the client goes away, they are aborted.
#[derive(Debug)]
struct Answers {
    updates: UnboundedReceiver<Update>,
    tickets: Vec<Option<Ticket>>,
}

impl Answers {
    /// Hands all prompts over, or none.
    fn submit(
        intake: &Arc<Intake>,
        prompts: Vec<Prompt>,
        options: &Options,
        stream_interval: usize,
        handed: Option<Handed>,
    ) -> Result<Answers, ApiError> {
        let (sender, updates) = unbounded_channel();
        let delivery = if options.stream { Delivery::Every(stream_interval) } else { Delivery::AtEnd };
        let tickets = prompts.into_iter().zip(0..).map(|(prompt, index)| {
            let (handed, trace) = (handed.clone(), options.trace);
            let new = NewJob {
                index,
                prompt: prompt.tokens,
                max_tokens: options.max_tokens,
                delivery,
                handed,
                trace,
            };
            let ticket = intake.submit(new, sender.clone())?;
            Ok(Some(ticket))
        });
        Ok(Answers { tickets: tickets.collect::<Result<_, ApiError>>()?, updates })
    }

    /// The next piece of an answer; `None` when all answers have ended.
    async fn next(&mut self) -> Option<Update> {
        let open = self.tickets.iter().position(Option::is_some)?;
        let update = self.updates.recv().await.unwrap_or_else(|| Update {
            index: open as u32,
            tokens: Vec::new(),
            hit: CacheHit::default(),
            end: Some(End::Failed("the engine has stopped".into())),
        });
        if update.end.is_some()
            && let Some(mut ticket) = self.tickets.get_mut(update.index as usize).and_then(Option::take)
        {
            ticket.ended();
        }
        Some(update)
    }
}
