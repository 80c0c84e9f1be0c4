//! Prompts as OpenAI's API allows them: a text, token ids, or a list of either. This file knows
//! their forms and limits.

use super::error::ApiError;
use super::fields::explain;
use crate::text;
use serde::Deserialize;
use serde_json::value::RawValue;

/// Prompts in one request at most; OpenAI's limit is higher, but each is a request to the
/// scheduler.
const MAX_PROMPTS: usize = 128;

/// One prompt, as tokens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Prompt {
    pub tokens: Vec<u32>,
    /// Whether the client gave text, and thus does not know the tokens.
    pub was_text: bool,
}

impl Prompt {
    pub fn text(text: &str, vocab: u32) -> Prompt {
        Prompt { tokens: text::encode(text, vocab), was_text: true }
    }

    fn ids(tokens: Vec<u32>, vocab: u32) -> Result<Prompt, ApiError> {
        match tokens.iter().find(|token| **token >= vocab) {
            Some(token) => {
                let message = format_args!("token id {token} is not below the vocabulary's size, {vocab}");
                Err(ApiError::field("prompt", message))
            }
            None => Ok(Prompt { tokens, was_text: false }),
        }
    }
}

/// The prompts of the field `prompt`.
pub fn parse(value: &RawValue, vocab: u32) -> Result<Vec<Prompt>, ApiError> {
    let json = value.get();
    let prompts = match list_of(json) {
        None => vec![Prompt::text(&read::<String>(json)?, vocab)],
        Some(b'"') => read::<Vec<String>>(json)?.iter().map(|text| Prompt::text(text, vocab)).collect(),
        Some(b'[') => {
            let lists = read::<Vec<Vec<u32>>>(json)?;
            lists.into_iter().map(|tokens| Prompt::ids(tokens, vocab)).collect::<Result<_, _>>()?
        }
        Some(_) => vec![Prompt::ids(read(json)?, vocab)?],
    };
    match prompts.len() {
        1..=MAX_PROMPTS => Ok(prompts),
        count => {
            let message =
                format_args!("{count} prompts are given; at least 1 and at most {MAX_PROMPTS} are allowed");
            Err(ApiError::field("prompt", message))
        }
    }
}

/// The first byte of a list's first element; `None` for what is not a list.
fn list_of(json: &str) -> Option<u8> {
    json.strip_prefix('[')?.trim_ascii_start().bytes().next()
}

fn read<'a, T: Deserialize<'a>>(json: &'a str) -> Result<T, ApiError> {
    serde_json::from_str(json).map_err(|error| {
        let expected = "a text, a list of token ids, or a list of either is expected";
        ApiError::field("prompt", format_args!("{}; {expected}", explain(&error)))
    })
}
