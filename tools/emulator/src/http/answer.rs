//! Answers as OpenAI's API gives them, whole and in pieces. This file knows the shapes of the JSON.

use crate::hand_over::PrefillParams;
use crate::scheduler::CacheHit;
use crate::text;
use serde::Serialize;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Endpoint {
    /// `/v1/completions`.
    Completions,
    /// `/v1/chat/completions`.
    Chat,
}

impl Endpoint {
    /// What the ids of answers start with.
    pub fn id_prefix(self) -> &'static str {
        match self {
            Endpoint::Completions => "cmpl",
            Endpoint::Chat => "chatcmpl",
        }
    }

    fn object(self, piece: bool) -> &'static str {
        match (self, piece) {
            (Endpoint::Completions, _) => "text_completion",
            (Endpoint::Chat, false) => "chat.completion",
            (Endpoint::Chat, true) => "chat.completion.chunk",
        }
    }
}

/// What all pieces of an answer have in common.
#[derive(Clone, Debug)]
pub struct Head {
    pub endpoint: Endpoint,
    /// The answer's id.
    pub id: String,
    /// Seconds of Unix time.
    pub created_s: u64,
    /// Served name of the model.
    pub model: String,
    /// Whether output tokens are named by id too.
    pub return_token_ids: bool,
    /// What another engine needs to say the rest.
    pub kv_transfer_params: Option<PrefillParams>,
}

#[derive(Serialize)]
struct Answer<'a> {
    id: &'a str,
    object: &'static str,
    created: u64,
    model: &'a str,
    choices: Vec<Choice<'a>>,
    /// Absent, null or there.
    #[serde(skip_serializing_if = "Option::is_none")]
    usage: Option<Option<Usage>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    kv_transfer_params: Option<&'a PrefillParams>,
}

#[derive(Serialize)]
struct Choice<'a> {
    index: u32,
    #[serde(flatten)]
    content: Content,
    logprobs: Option<()>,
    finish_reason: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    token_ids: Option<&'a [u32]>,
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_token_ids: Option<&'a [u32]>,
}

#[derive(Serialize)]
#[serde(rename_all = "snake_case")]
enum Content {
    Text(String),
    Message(ChatText),
    Delta(ChatText),
}

#[derive(Serialize)]
struct ChatText {
    #[serde(skip_serializing_if = "Option::is_none")]
    role: Option<&'static str>,
    content: String,
}

/// Tokens of a request and its answers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Usage {
    prompt_tokens: usize,
    completion_tokens: usize,
    total_tokens: usize,
    prompt_tokens_details: PromptDetails,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
struct PromptDetails {
    /// Prompt tokens that were not computed, from all sources.
    cached_tokens: usize,
    /// Of these, the ones that came from the store.
    external_cached_tokens: usize,
    /// Of these, the ones that the store had on disk.
    ssd_cached_tokens: usize,
    /// Of those from the store, the ones that its peers had.
    peer_cached_tokens: usize,
}

impl Usage {
    pub fn add_prompt(&mut self, tokens: usize) {
        self.prompt_tokens += tokens;
        self.total_tokens += tokens;
    }

    pub fn add_output(&mut self, tokens: usize) {
        self.completion_tokens += tokens;
        self.total_tokens += tokens;
    }

    /// Counts what of a prompt was cached.
    pub fn add_hit(&mut self, hit: CacheHit) {
        self.prompt_tokens_details.cached_tokens += hit.tokens();
        self.prompt_tokens_details.external_cached_tokens += hit.store_tokens;
        self.prompt_tokens_details.ssd_cached_tokens += hit.disk_tokens;
        self.prompt_tokens_details.peer_cached_tokens += hit.peer_tokens;
    }
}

/// One answer, or a piece of it.
#[derive(Clone, Debug, Default)]
pub struct Output {
    /// Position of the prompt in the request.
    pub index: u32,
    /// Whether this is the first piece.
    pub first: bool,
    /// Whether this is the last piece.
    pub last: bool,
    pub tokens: Vec<u32>,
    /// The prompt's tokens, if they are to be told.
    pub prompt_token_ids: Option<Vec<u32>>,
}

impl Head {
    /// All answers, whole.
    pub fn whole(&self, outputs: &[Output], usage: Usage) -> String {
        let choices = outputs.iter().map(|output| self.choice(output, Content::Message)).collect();
        self.to_json(false, choices, Some(Some(usage)))
    }

    /// A piece of an answer. `with_usage` says whether a last piece with the usage will follow.
    pub fn piece(&self, output: &Output, with_usage: bool) -> String {
        self.to_json(true, vec![self.choice(output, Content::Delta)], with_usage.then_some(None))
    }

    /// The piece behind all others that carries the usage.
    pub fn usage(&self, usage: Usage) -> String {
        self.to_json(true, Vec::new(), Some(Some(usage)))
    }

    fn choice<'a>(&self, output: &'a Output, chat: impl Fn(ChatText) -> Content) -> Choice<'a> {
        let text = text::decode(&output.tokens);
        Choice {
            index: output.index,
            content: match self.endpoint {
                Endpoint::Completions => Content::Text(text),
                Endpoint::Chat => chat(ChatText { role: output.first.then_some("assistant"), content: text }),
            },
            logprobs: None,
            finish_reason: output.last.then_some("length"),
            token_ids: self.return_token_ids.then_some(&output.tokens),
            prompt_token_ids: output.prompt_token_ids.as_deref(),
        }
    }

    fn to_json(&self, piece: bool, choices: Vec<Choice<'_>>, usage: Option<Option<Usage>>) -> String {
        let object = self.endpoint.object(piece);
        let answer = Answer {
            id: &self.id,
            object,
            created: self.created_s,
            model: &self.model,
            choices,
            usage,
            kv_transfer_params: self.kv_transfer_params.as_ref().filter(|_| !piece),
        };
        // Plain numbers and texts: serialising them cannot fail.
        serde_json::to_string(&answer).unwrap_or_default()
    }
}
