//! What an engine reports of a request: the `usage` objects of OpenAI's Completions and Responses
//! APIs and of Anthropic's Messages API, and error objects.

use serde::Deserialize;
use serde::de::IgnoredAny;

/// Token counts of one finished request, as its engine counted them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Usage {
    pub prompt_tokens: u64,
    /// Tokens produced.
    pub completion_tokens: u64,
    /// Tokens of the prompt whose KV was already there; `None` where the engine does not say.
    pub cached_tokens: Option<u64>,
    /// How many of those were loaded from a store; `None` where the engine does not say.
    pub loaded_tokens: Option<u64>,
}

#[derive(Deserialize)]
struct Answer {
    #[serde(default)]
    r#type: Option<Name>,
    #[serde(default)]
    object: Option<Name>,
    #[serde(default)]
    usage: Option<Counts>,
    #[serde(default)]
    choices: Option<Vec<IgnoredAny>>,
    #[serde(default)]
    error: Option<IgnoredAny>,
    /// The Responses API's events carry the answer in here, the Messages API's in `message`.
    #[serde(default)]
    response: Option<Inner>,
    #[serde(default)]
    message: Option<Inner>,
}

/// `type` and `object` may be of any JSON type where the answer is none of these APIs'.
#[derive(Deserialize)]
#[serde(untagged)]
enum Name {
    Text(String),
    Other(IgnoredAny),
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Inner {
    Object(InnerAnswer),
    Other(IgnoredAny),
}

#[derive(Deserialize)]
struct InnerAnswer {
    #[serde(default)]
    usage: Option<Counts>,
}

/// The counts as the Completions API names them, or as the Responses and Messages APIs do.
#[derive(Deserialize)]
struct Counts {
    #[serde(default)]
    prompt_tokens: Option<u64>,
    #[serde(default)]
    completion_tokens: Option<u64>,
    #[serde(default)]
    prompt_tokens_details: Option<Details>,
    #[serde(default)]
    input_tokens: Option<u64>,
    #[serde(default)]
    output_tokens: Option<u64>,
    #[serde(default)]
    input_tokens_details: Option<Details>,
    /// The Messages API does not count these among its `input_tokens`.
    #[serde(default)]
    cache_read_input_tokens: Option<u64>,
    #[serde(default)]
    cache_creation_input_tokens: Option<u64>,
}

#[derive(Deserialize)]
struct Details {
    #[serde(default)]
    cached_tokens: Option<u64>,
    #[serde(default)]
    external_cached_tokens: Option<u64>,
}

impl Counts {
    fn output_tokens(&self) -> Option<u64> {
        self.completion_tokens.or(self.output_tokens)
    }

    fn usage(&self) -> Option<Usage> {
        let details = self.prompt_tokens_details.as_ref().or(self.input_tokens_details.as_ref());
        let apart = [self.cache_read_input_tokens, self.cache_creation_input_tokens];
        let apart: u64 = apart.iter().flatten().fold(0, |sum, tokens| sum.saturating_add(*tokens));
        let prompt_tokens = self.prompt_tokens.or(self.input_tokens)?.saturating_add(apart);
        Some(Usage {
            prompt_tokens,
            completion_tokens: self.output_tokens().unwrap_or(0),
            cached_tokens: details.and_then(|details| details.cached_tokens).or(self.cache_read_input_tokens),
            loaded_tokens: details.and_then(|details| details.external_cached_tokens),
        })
    }
}

/// What an answer or one event of a stream says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Report {
    /// The counts, `None` where `usage` is absent, null or without the prompt's tokens.
    pub usage: Option<Usage>,
    /// The tokens produced, where only they are said: they follow a usage that was said before.
    pub more_output_tokens: Option<u64>,
    /// True of the event that exists only to carry the usage: its `choices` are empty.
    pub without_choices: bool,
    /// It says that the engine failed.
    pub failed: bool,
}

/// Reads the JSON of an answer; `None` when it is not an answer (no JSON, other types).
pub fn read(json: &[u8]) -> Option<Report> {
    let answer: Answer = serde_json::from_slice(json).ok()?;
    let inner = |inner: Option<Inner>| match inner {
        Some(Inner::Object(inner)) => inner.usage,
        Some(Inner::Other(_)) | None => None,
    };
    let counts = answer.usage.or_else(|| inner(answer.response)).or_else(|| inner(answer.message));
    let usage = counts.as_ref().and_then(Counts::usage);
    let names_failure = [&answer.r#type, &answer.object].into_iter().any(|name| match name {
        Some(Name::Text(name)) => name == "error" || name == "response.failed",
        Some(Name::Other(_)) | None => false,
    });
    Some(Report {
        usage,
        more_output_tokens: counts.filter(|_| usage.is_none()).and_then(|counts| counts.output_tokens()),
        without_choices: answer.choices.is_some_and(|choices| choices.is_empty()),
        failed: answer.error.is_some() || names_failure,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(usage: Option<Usage>) -> Report {
        Report { usage, more_output_tokens: None, without_choices: false, failed: false }
    }

    #[test]
    fn counts_are_read_with_and_without_details() {
        let full = br#"{"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":2,"total_tokens":11,
            "prompt_tokens_details":{"cached_tokens":8,"external_cached_tokens":4}}}"#;
        let usage =
            Usage { prompt_tokens: 9, completion_tokens: 2, cached_tokens: Some(8), loaded_tokens: Some(4) };
        assert_eq!(read(full), Some(Report { without_choices: true, ..report(Some(usage)) }));
        let plain = br#"{"choices":[{"text":"x"}],"usage":{"prompt_tokens":9,"prompt_tokens_details":null}}"#;
        let usage =
            Usage { prompt_tokens: 9, completion_tokens: 0, cached_tokens: None, loaded_tokens: None };
        assert_eq!(read(plain), Some(report(Some(usage))));
    }

    #[test]
    fn the_responses_and_messages_apis_name_the_same_counts_otherwise() {
        let usage =
            Usage { prompt_tokens: 9, completion_tokens: 2, cached_tokens: Some(8), loaded_tokens: None };
        for json in [
            &br#"{"object":"response","error":null,"usage":{"input_tokens":9,"output_tokens":2,
                "input_tokens_details":{"cached_tokens":8}}}"#[..],
            br#"{"type":"response.completed","response":{"usage":{"input_tokens":9,"output_tokens":2,
                "input_tokens_details":{"cached_tokens":8}}}}"#,
            br#"{"type":"message_start","message":{"usage":{"input_tokens":1,"output_tokens":2,
                "cache_read_input_tokens":8}}}"#,
        ] {
            assert_eq!(read(json), Some(report(Some(usage))), "{}", String::from_utf8_lossy(json));
        }
        let delta = br#"{"type":"message_delta","usage":{"output_tokens":15}}"#;
        assert_eq!(read(delta), Some(Report { more_output_tokens: Some(15), ..report(None) }));
    }

    #[test]
    fn null_usage_is_no_usage_and_garbage_no_answer() {
        assert_eq!(read(br#"{"usage":null}"#), Some(report(None)));
        for other in [&br#"{"message":"text","type":7}"#[..], br#"{"response":[1]}"#] {
            assert_eq!(read(other), Some(report(None)));
        }
        for garbage in [&b"[DONE]"[..], b"", b"{", br#"{"usage":7}"#, br#"{"usage":{"prompt_tokens":-1}}"#] {
            assert_eq!(read(garbage), None);
        }
    }
}
