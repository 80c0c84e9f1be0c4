//! The engine over HTTP: its pages, and prompts that are sent to it and timed. It knows no plan and
//! no fit.

use crate::error::CalibrateError;
use crate::facts::Given;
use crate::page::{Metrics, Model, Models};
use forebay_trace::replay::{Call, Client, Options, ReplayError, Reply, Transport};
use futures_util::future::join_all;
use http::{HeaderMap, Uri};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use tokio::time::Instant;

/// Token ids of prompts. Every vocabulary has them, and special tokens are seldom among them.
const TOKEN_IDS: std::ops::Range<u32> = 100..1_000;

/// The engine's account of itself may lag behind its last answer by this.
const SETTLE: Duration = Duration::from_secs(2);
const SETTLE_STEP: Duration = Duration::from_millis(50);

/// An engine that prompts are sent to.
pub struct Engine {
    server: Uri,
    headers: HeaderMap,
    client: Client,
    transport: Transport,
    model: String,
    random: StdRng,
    /// Requests that it has answered to us.
    answered: u64,
}

/// A first token.
pub struct FirstToken {
    pub us: f64,
    /// Prompt tokens that the engine had cached, if it says so.
    pub cached_tokens: Option<usize>,
}

impl Engine {
    /// The engine at `target`, such as `http://127.0.0.1:8000`. Nothing is sent yet.
    pub fn new(target: &str, given: &Given) -> Result<Engine, CalibrateError> {
        let (headers, ca) = (given.headers.clone(), given.ca.clone());
        let options = Options { headers: headers.clone(), ca, ..Options::default() };
        let transport = Transport::new(options.ca.as_deref(), options.timeouts.connect)?;
        let client = Client::new(target, &options, transport.clone())?;
        let server = target.parse().map_err(|_| ReplayError::Target { target: target.to_owned() })?;
        // Not the same twice: the prompts of an earlier calibration may be cached still.
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let random = StdRng::seed_from_u64(now.as_nanos() as u64);
        Ok(Engine { server, headers, client, transport, model: String::new(), random, answered: 0 })
    }

    /// Prompts go to this model from now on.
    pub fn use_model(&mut self, model: &str) {
        self.model = model.to_owned();
    }

    pub async fn models(&self) -> Result<Vec<Model>, CalibrateError> {
        let path = "/v1/models";
        let wrong = |reason: String| CalibrateError::Page { path, reason };
        let page = self.transport.page(&self.server, path, &self.headers).await.map_err(wrong)?;
        let models: Models = serde_json::from_str(&page).map_err(|error| wrong(error.to_string()))?;
        Ok(models.data)
    }

    /// What the engine says of itself; `None` where it has no page of metrics that is vLLM's.
    pub async fn metrics(&self) -> Option<Metrics> {
        Metrics::parse(&self.transport.page(&self.server, "/metrics", &self.headers).await.ok()?)
    }

    /// Refuses an engine that others use, or one of several behind the address.
    pub async fn check_idle(&self) -> Result<Option<Metrics>, CalibrateError> {
        let deadline = Instant::now() + SETTLE;
        loop {
            let Some(metrics) = self.metrics().await else { return Ok(None) };
            match () {
                () if metrics.engines > 1 => {
                    return Err(CalibrateError::SeveralEngines { count: metrics.engines });
                }
                () if metrics.is_idle() => return Ok(Some(metrics)),
                () if Instant::now() >= deadline => {
                    let (running, waiting) = (metrics.running as u64, metrics.waiting as u64);
                    return Err(CalibrateError::Busy { running, waiting });
                }
                () => tokio::time::sleep(SETTLE_STEP).await,
            }
        }
    }

    /// Refuses an engine that has answered others since `before`, or does so now.
    pub async fn check_alone_since(&self, before: Option<&Metrics>) -> Result<(), CalibrateError> {
        let after = self.check_idle().await?;
        let ended = |metrics: Option<&Metrics>| metrics.and_then(|metrics| metrics.ended).unwrap_or(0.0);
        let all = (ended(after.as_ref()) - ended(before)).max(0.0) as u64;
        match all.saturating_sub(self.answered) {
            0 => Ok(()),
            count => Err(CalibrateError::Others { count }),
        }
    }

    /// A prompt that nobody has ever sent.
    pub fn prompt(&mut self, tokens: usize) -> Vec<u32> {
        (0..tokens).map(|_| self.random.random_range(TOKEN_IDS)).collect()
    }

    /// Sends one prompt and waits for the only token of its answer.
    pub async fn first_token(&mut self, prompt: &[u32]) -> Result<FirstToken, CalibrateError> {
        let reply = self.send(prompt, 1).await?;
        let details = reply.answer.usage.and_then(|usage| usage.prompt_tokens_details);
        let cached_tokens = details.and_then(|details| details.cached_tokens).map(|tokens| tokens as usize);
        let us = reply.answer.first_token_us.unwrap_or(reply.ended_us) as f64;
        Ok(FirstToken { us, cached_tokens })
    }

    /// Sends prompts at once. For each: when its tokens came, in microseconds since all were sent.
    pub async fn tokens_of(
        &mut self,
        prompts: &[Vec<u32>],
        output_tokens: usize,
    ) -> Result<Vec<Vec<u64>>, CalibrateError> {
        let sent = Instant::now();
        let calls = prompts.iter().map(|prompt| call(&self.client, &self.model, prompt, output_tokens));
        let replies = join_all(calls).await;
        let mut times = Vec::new();
        for (reply, prompt) in replies.into_iter().zip(prompts) {
            let reply = self.checked(reply, prompt.len())?;
            if reply.answer.token_times_us.is_empty() {
                return Err(CalibrateError::NoTokenIds);
            }
            let start_us = reply.started.duration_since(sent).as_micros() as u64;
            times.push(reply.answer.token_times_us.iter().map(|at| start_us + at).collect());
        }
        Ok(times)
    }

    async fn send(&mut self, prompt: &[u32], output_tokens: usize) -> Result<Reply, CalibrateError> {
        let reply = call(&self.client, &self.model, prompt, output_tokens).await;
        self.checked(reply, prompt.len())
    }

    /// A whole answer of the engine itself.
    fn checked(&mut self, reply: Reply, prompt_tokens: usize) -> Result<Reply, CalibrateError> {
        self.answered += 1;
        if let Some(engine) = reply.backend {
            return Err(CalibrateError::Router { engine });
        }
        match reply.failure {
            Some(failure) => {
                Err(CalibrateError::Request { what: format!("a prompt of {prompt_tokens} tokens"), failure })
            }
            None => Ok(reply),
        }
    }
}

async fn call(client: &Client, model: &str, prompt: &[u32], output_tokens: usize) -> Reply {
    let output_tokens = u32::try_from(output_tokens).unwrap_or(u32::MAX);
    client.call(Call { model, session: "calibrate", prompt, output_tokens }).await
}
