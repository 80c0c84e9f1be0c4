//! Chats as prompts: the messages in ChatML, the template of the Qwen models. This file knows roles
//! and parts of content.
//!
//! Each message is tokenised on its own between marks, so that an answer that comes back as a
//! message is the tokens that it was, and a longer chat starts with the tokens of a shorter one.

use super::error::ApiError;
use super::fields::{Fields, explain};
use super::prompt::Prompt;
use crate::text::encode;
use serde::Deserialize;
use serde_json::value::RawValue;

/// Messages of a chat at most.
const MAX_MESSAGES: usize = 10_000;

#[derive(Deserialize)]
struct Message<'a> {
    role: String,
    #[serde(borrow)]
    content: Option<&'a RawValue>,
    #[serde(borrow)]
    tool_calls: Option<&'a RawValue>,
}

#[derive(Deserialize)]
struct Part {
    r#type: String,
    text: Option<String>,
}

/// The prompt of the fields `messages` and `tools`.
pub fn parse(fields: &Fields<'_>, vocab: u32) -> Result<Prompt, ApiError> {
    let messages: Vec<&RawValue> = fields.need("messages")?;
    if !(1..=MAX_MESSAGES).contains(&messages.len()) {
        let message = format_args!("{} are given; 1 to {MAX_MESSAGES} are allowed", messages.len());
        return Err(ApiError::field("messages", message));
    }
    let mut tokens = Vec::new();
    if let Some(tools) = fields.raw("tools") {
        push_message(&mut tokens, "tools", &[tools.get()], vocab);
    }
    for (index, message) in messages.into_iter().enumerate() {
        let field = format!("messages[{index}]");
        let message: Message =
            serde_json::from_str(message.get()).map_err(|error| ApiError::field(&field, explain(&error)))?;
        let content = content(message.content, &format!("{field}.content"))?;
        let calls = message.tool_calls.map_or("", RawValue::get);
        push_message(&mut tokens, &message.role, &[&content, calls], vocab);
    }
    tokens.extend(encode("<|im_start|>", vocab));
    tokens.extend(encode("assistant\n", vocab));
    Ok(Prompt { tokens, was_text: true })
}

fn push_message(tokens: &mut Vec<u32>, role: &str, texts: &[&str], vocab: u32) {
    tokens.extend(encode("<|im_start|>", vocab));
    tokens.extend(encode(role, vocab));
    tokens.extend(encode("\n", vocab));
    texts.iter().for_each(|text| tokens.extend(encode(text, vocab)));
    tokens.extend(encode("<|im_end|>", vocab));
    tokens.extend(encode("\n", vocab));
}

/// A message's content: a text, a list of text parts, or nothing.
fn content(value: Option<&RawValue>, field: &str) -> Result<String, ApiError> {
    let Some(json) = value.map(RawValue::get) else { return Ok(String::new()) };
    let wrong = |error: serde_json::Error| {
        ApiError::field(field, format_args!("{}; a text or a list of parts is expected", explain(&error)))
    };
    if !json.starts_with('[') {
        return serde_json::from_str(json).map_err(wrong);
    }
    let parts: Vec<Part> = serde_json::from_str(json).map_err(wrong)?;
    let mut text = String::new();
    for (index, part) in parts.into_iter().enumerate() {
        match (part.r#type.as_str(), part.text) {
            ("text", Some(part)) => text.push_str(&part),
            ("text", None) => {
                return Err(ApiError::field(
                    &format!("{field}[{index}]"),
                    "a part of type text needs `text`",
                ));
            }
            (other, _) => {
                let message = format_args!("parts of type `{other}` are not supported; only `text` is");
                return Err(ApiError::field(&format!("{field}[{index}].type"), message));
            }
        }
    }
    Ok(text)
}
