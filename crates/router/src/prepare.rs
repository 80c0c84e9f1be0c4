//! What the router makes of a request before it chooses an engine: what the request says, which
//! engines may serve it, and the facts that routing needs. It sends nothing anywhere.

use crate::chain::Chain;
use crate::dispatcher::RoutingFacts;
use crate::listing;
use crate::media;
use crate::refusal::Refusal;
use crate::request::{self, Edit, Endpoint, PromptKind, RequestFacts};
use crate::routes::{Group, Rule};
use crate::slo::Slo;
use crate::slots::Serving;
use crate::state::RouterState;
use crate::tokens::Length;
use http::{HeaderMap, HeaderValue, Method, StatusCode, header};
use std::borrow::Cow;
use std::sync::Arc;
use xxhash_rust::xxh3::xxh3_64_with_seed;

/// Headers that name a session, the first that is there counts. The second is sent by Claude Code.
const SESSION_HEADERS: [&str; 2] = ["x-session-id", "x-claude-code-session-id"];

/// A request as far as it can be understood alone.
#[derive(Debug)]
pub struct ReadRequest {
    /// What its KV depends on; `None` where it goes by load alone.
    facts: Option<(Endpoint, RequestFacts)>,
    slo: Slo,
}

/// A request for which an engine can be chosen.
#[derive(Debug)]
pub struct Prepared {
    pub routing: Arc<RoutingFacts>,
    /// The client asked for a stream: its first byte comes when the prompt is computed.
    pub stream: bool,
    /// The change to its body that makes the engine report usage in a stream.
    pub ask_for_usage: Option<Edit>,
    /// Another engine may compute its prompt.
    pub may_hand_over: bool,
}

/// The call that a request belongs to, by the group of its path; `None` where it goes by load
/// alone.
pub fn endpoint(group: Option<&Group>, method: &Method, path: &str) -> Result<Option<Endpoint>, Refusal> {
    let group = group.ok_or_else(|| Refusal::of_path(path))?;
    if let Rule::Refuse(status, reason) = group.rule {
        return Err(Refusal::of_client(status, format!("{path} is not routed: {reason}")));
    }
    if !group.takes(method) && method != Method::OPTIONS {
        return Err(Refusal::of_method(path, group));
    }
    Ok(match group.rule {
        // A browser asks what it may send: the engine knows, and it is no completion.
        Rule::Cache(endpoint) if method != Method::OPTIONS => Some(endpoint),
        _ => None,
    })
}

/// Reads a request. Without an endpoint it goes by load alone, and its body is not looked at.
pub fn read(endpoint: Option<Endpoint>, headers: &HeaderMap, body: &[u8]) -> Result<ReadRequest, Refusal> {
    let slo = Slo::read(headers).map_err(|bad| Refusal::of_bad_slo(&bad))?;
    let facts = endpoint.map(|endpoint| Ok((endpoint, read_facts(endpoint, headers, body)?))).transpose()?;
    Ok(ReadRequest { facts, slo })
}

fn read_facts(endpoint: Endpoint, headers: &HeaderMap, body: &[u8]) -> Result<RequestFacts, Refusal> {
    let coding = headers.get(header::CONTENT_ENCODING).filter(|coding| *coding != "identity");
    if let Some(coding) = coding {
        let message = format!("content-encoding {coding:?}: the body must not be compressed");
        return Err(Refusal::of_client(StatusCode::UNSUPPORTED_MEDIA_TYPE, message));
    }
    request::read(endpoint, body).map_err(|bad| Refusal {
        field: bad.field(),
        ..Refusal::of_client(StatusCode::BAD_REQUEST, bad.to_string())
    })
}

/// The engines that may serve a model.
pub async fn serving(
    router: &Arc<RouterState>,
    model: &str,
    headers: &HeaderMap,
) -> Result<Serving, Refusal> {
    if router.any_model {
        let serving = router.engines.models.serving(model);
        return Ok((!serving.is_empty()).then_some(serving));
    }
    let serving = listing::serving(router, model, headers.get(header::AUTHORIZATION)).await;
    match serving.is_empty() {
        false => Ok(Some(serving)),
        // Nobody can say that there is no such model.
        true if router.engines.models.is_empty() => Ok(None),
        true => Err(Refusal::of_model(model)),
    }
}

impl ReadRequest {
    /// The model that the body names, if it names one.
    pub fn model<'a>(&self, body: &'a [u8]) -> Option<Cow<'a, str>> {
        match &self.facts {
            Some((_, facts)) => facts.model(body),
            None => request::model_of(body),
        }
    }

    /// The same with the engines that may serve it.
    pub fn prepare(
        self,
        router: &RouterState,
        headers: &HeaderMap,
        body: &[u8],
        serving: Serving,
    ) -> Prepared {
        let Some((endpoint, facts)) = self.facts else { return by_load(serving) };
        let root = prefix_hash_seed(router, endpoint, headers, body, &facts);
        let prompt = &body[facts.prompt.clone()];
        let media = if facts.has_media { media::find(prompt) } else { Vec::new() };
        let stood_in = (!media.is_empty()).then(|| media::with_stand_ins(prompt, &media));
        let prompt = stood_in.as_deref().unwrap_or(prompt);
        let chain = Chain::new(root, prompt);
        let named = SESSION_HEADERS.iter().find_map(|name| headers.get(*name)).map(HeaderValue::as_bytes);
        let named = named.or_else(|| facts.user.clone().map(|user| &body[user]));
        let session = match named {
            Some(name) => xxh3_64_with_seed(name, router.hash_seed),
            None => chain.first().unwrap_or_else(|| xxh3_64_with_seed(prompt, root)),
        };
        let endpoint = (!prompt.is_empty()).then_some(endpoint);
        let preamble_bytes = facts.preamble_bytes;
        let length = Length { kind: facts.kind, bytes: preamble_bytes + prompt.len(), media: media.len() };
        let slo = self.slo;
        let routing = RoutingFacts { length, preamble_bytes, chain, session, endpoint, serving, slo };
        Prepared {
            routing: Arc::new(routing),
            stream: facts.stream,
            ask_for_usage: facts.ask_for_usage,
            may_hand_over: router.hand_over.is_some() && facts.may_hand_over && endpoint.is_some(),
        }
    }
}

/// A request that goes by load alone, as it came.
fn by_load(serving: Serving) -> Prepared {
    let routing = RoutingFacts {
        length: Length { kind: PromptKind::TokenIds, bytes: 0, media: 0 },
        preamble_bytes: 0,
        chain: Chain::new(0, &[]),
        session: 0,
        endpoint: None,
        serving,
        slo: Slo::default(),
    };
    Prepared { routing: Arc::new(routing), stream: false, ask_for_usage: None, may_hand_over: false }
}

/// What the hashes of a prompt's chunks start from: prompts that can share no KV have different
/// ones.
fn prefix_hash_seed(
    router: &RouterState,
    endpoint: Endpoint,
    headers: &HeaderMap,
    body: &[u8],
    facts: &RequestFacts,
) -> u64 {
    let mut root = xxh3_64_with_seed(&[endpoint as u8], router.hash_seed);
    for (number, at) in &facts.separators {
        root = xxh3_64_with_seed(&body[at.clone()], root.wrapping_add(u64::from(*number) + 1));
    }
    // vLLM: the rank that is to serve a request. Ranks share no KV.
    if let Some(rank) = headers.get("x-data-parallel-rank") {
        root = xxh3_64_with_seed(rank.as_bytes(), !root);
    }
    root
}
