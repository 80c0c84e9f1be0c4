//! What an engine reports of a finished request. It knows the `usage` object of OpenAI's API with vLLM's and OpenAI's
//! `prompt_tokens_details`; it must never know streams or routing.

use serde::Deserialize;

/// Token counts of one finished request, as its engine counted them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Usage {
    /// Tokens of the prompt.
    pub prompt_tokens: u64,
    /// Tokens produced.
    pub completion_tokens: u64,
    /// Tokens of the prompt whose KV was already there; `None` where the engine does not say.
    pub cached_tokens: Option<u64>,
}

#[derive(Deserialize)]
struct Answer {
    #[serde(default)]
    usage: Option<Counts>,
    #[serde(default)]
    choices: Option<Vec<serde::de::IgnoredAny>>,
}

#[derive(Deserialize)]
struct Counts {
    prompt_tokens: u64,
    #[serde(default)]
    completion_tokens: u64,
    #[serde(default)]
    prompt_tokens_details: Option<Details>,
}

#[derive(Deserialize)]
struct Details {
    #[serde(default)]
    cached_tokens: Option<u64>,
}

/// The usage in an answer or in one event of a stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Report {
    /// The counts, `None` where `usage` is absent or null.
    pub usage: Option<Usage>,
    /// True of the event that exists only to carry the usage: its `choices` are empty.
    pub without_choices: bool,
}

/// Reads the JSON of an answer; `None` when it is not an answer (no JSON, other types).
pub fn read(json: &[u8]) -> Option<Report> {
    let answer: Answer = serde_json::from_slice(json).ok()?;
    let usage = answer.usage.map(|counts| Usage {
        prompt_tokens: counts.prompt_tokens,
        completion_tokens: counts.completion_tokens,
        cached_tokens: counts.prompt_tokens_details.and_then(|details| details.cached_tokens),
    });
    Some(Report { usage, without_choices: answer.choices.is_some_and(|choices| choices.is_empty()) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_are_read_with_and_without_details() {
        let full = br#"{"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":2,"total_tokens":11,
            "prompt_tokens_details":{"cached_tokens":8,"external_cached_tokens":4}}}"#;
        let usage = Usage { prompt_tokens: 9, completion_tokens: 2, cached_tokens: Some(8) };
        assert_eq!(read(full), Some(Report { usage: Some(usage), without_choices: true }));
        let plain = br#"{"choices":[{"text":"x"}],"usage":{"prompt_tokens":9,"prompt_tokens_details":null}}"#;
        let usage = Usage { prompt_tokens: 9, completion_tokens: 0, cached_tokens: None };
        assert_eq!(read(plain), Some(Report { usage: Some(usage), without_choices: false }));
    }

    #[test]
    fn null_usage_is_no_usage_and_garbage_no_answer() {
        assert_eq!(read(br#"{"usage":null}"#), Some(Report { usage: None, without_choices: false }));
        for garbage in [&b"[DONE]"[..], b"", b"{", br#"{"usage":7}"#, br#"{"usage":{"prompt_tokens":-1}}"#] {
            assert_eq!(read(garbage), None);
        }
    }
}
