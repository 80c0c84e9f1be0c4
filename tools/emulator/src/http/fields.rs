//! Reads requests field by field, so that an error names the field. This file knows JSON and the
//! fields that both endpoints share.

use super::error::ApiError;
use crate::hand_over::{RequestParams, Role};
use forebay_transfer::TraceContext;
use serde::{Deserialize, Deserializer};
use serde_json::value::RawValue;
use std::collections::HashMap;

/// Tokens of output where a request does not say: OpenAI's default for completions.
const DEFAULT_MAX_TOKENS: u32 = 16;

/// A JSON object whose fields have not been read yet. A field that is `null` counts as absent.
#[derive(Debug, Deserialize)]
pub struct Fields<'a>(#[serde(borrow)] HashMap<String, &'a RawValue>);

impl<'a> Fields<'a> {
    /// The object in a body.
    pub fn parse(body: &'a [u8]) -> Result<Fields<'a>, ApiError> {
        serde_json::from_slice(body)
            .map_err(|error| ApiError::bad_request(format!("the body is not a JSON object: {error}")))
    }

    /// A field's text, unless it is absent.
    pub fn raw(&self, name: &str) -> Option<&'a RawValue> {
        self.0.get(name).copied().filter(|value| value.get() != "null")
    }

    /// A field's value, unless it is absent.
    pub fn get<T: Deserialize<'a>>(&self, name: &str) -> Result<Option<T>, ApiError> {
        let Some(value) = self.raw(name) else { return Ok(None) };
        let read = serde_json::from_str(value.get());
        read.map(Some).map_err(|error| ApiError::field(name, explain(&error)))
    }

    /// The value of a field that must be there.
    pub fn need<T: Deserialize<'a>>(&self, name: &str) -> Result<T, ApiError> {
        self.get(name)?.ok_or_else(|| ApiError::field(name, "this field is needed"))
    }

    /// A field that must be absent or `allowed`, because nothing else is supported.
    fn only<T: Deserialize<'a> + PartialEq>(
        &self,
        name: &str,
        allowed: T,
        text: &str,
    ) -> Result<(), ApiError> {
        match self.get::<T>(name)? {
            Some(value) if value != allowed => {
                Err(ApiError::field(name, format_args!("only {text} is supported")))
            }
            _ => Ok(()),
        }
    }

    /// A field that must be absent.
    fn none(&self, name: &str) -> Result<(), ApiError> {
        match self.raw(name) {
            Some(_) => Err(ApiError::field(name, "this field is not supported")),
            None => Ok(()),
        }
    }
}

/// serde's message without its position, which is one inside the field.
pub fn explain(error: &serde_json::Error) -> String {
    let text = error.to_string();
    match text.rfind(" at line ") {
        Some(position) => text[..position].to_owned(),
        None => text,
    }
}

/// How an answer is wanted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    /// Served name, if given.
    pub model: Option<String>,
    /// Tokens of output.
    pub max_tokens: usize,
    /// As server-sent events.
    pub stream: bool,
    /// With a last event that carries the usage.
    pub include_usage: bool,
    /// With the ids of all output tokens.
    pub return_token_ids: bool,
    /// Its part in a hand-over.
    pub role: Option<Role>,
    /// The span that it is part of, which a header says.
    pub trace: Option<TraceContext>,
}

#[derive(Deserialize)]
struct StreamOptions {
    #[serde(default, deserialize_with = "or_default")]
    include_usage: bool,
}

fn or_default<'a, D: Deserializer<'a>>(value: D) -> Result<bool, D::Error> {
    Option::<bool>::deserialize(value).map(Option::unwrap_or_default)
}

impl Options {
    /// Reads the fields that completions and chats share. `max_names` are those that may hold the
    /// length of the output, the one that counts first.
    pub fn parse(fields: &Fields<'_>, max_names: &[&str]) -> Result<Options, ApiError> {
        check_unsupported(fields)?;
        check_sampling(fields)?;
        let stream = fields.get("stream")?.unwrap_or(false);
        let stream_options: Option<StreamOptions> = fields.get("stream_options")?;
        if stream_options.is_some() && !stream {
            return Err(ApiError::field("stream_options", "this field needs `stream` to be true"));
        }
        let max_tokens = max_tokens(fields, max_names)?;
        if let Some(min_tokens) = fields.get::<u32>("min_tokens")?
            && min_tokens > max_tokens
        {
            let message = format_args!("{min_tokens} is more than max_tokens, {max_tokens}");
            return Err(ApiError::field("min_tokens", message));
        }
        fields.get::<bool>("ignore_eos")?;
        Ok(Options {
            model: fields.get("model")?,
            max_tokens: max_tokens as usize,
            stream,
            include_usage: stream_options.is_some_and(|options| options.include_usage),
            return_token_ids: fields.get("return_token_ids")?.unwrap_or(false),
            role: fields.get("kv_transfer_params")?.and_then(RequestParams::role),
            trace: None,
        })
    }
}

fn max_tokens(fields: &Fields<'_>, names: &[&str]) -> Result<u32, ApiError> {
    for name in names {
        match fields.get(name)? {
            Some(0) => return Err(ApiError::field(name, "0 is given; at least 1 is needed")),
            Some(tokens) => return Ok(tokens),
            None => {}
        }
    }
    Ok(DEFAULT_MAX_TOKENS)
}

/// Refuses what would change the answer and is not there.
fn check_unsupported(fields: &Fields<'_>) -> Result<(), ApiError> {
    fields.only("n", 1u32, "1")?;
    fields.only("best_of", 1u32, "1")?;
    fields.only("echo", false, "false")?;
    // A number for completions, a flag for chats.
    match fields.raw("logprobs").map(RawValue::get) {
        None | Some("false") => {}
        Some(_) => return Err(ApiError::field("logprobs", "this field is not supported")),
    }
    ["top_logprobs", "suffix", "cache_salt", "prompt_embeds"].iter().try_for_each(|name| fields.none(name))
}

/// Checks the types of parameters that have no effect on an emulated model.
fn check_sampling(fields: &Fields<'_>) -> Result<(), ApiError> {
    for name in
        ["temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"]
    {
        fields.get::<f64>(name)?;
    }
    for name in ["top_k", "seed"] {
        fields.get::<i64>(name)?;
    }
    fields.get::<String>("user")?;
    Ok(())
}
