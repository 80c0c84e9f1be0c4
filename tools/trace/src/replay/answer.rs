//! One answer of the completions API as it streams in: its tokens, its usage and when they came. It
//! knows the JSON of the events. Time is passed in: microseconds since any one moment.

use crate::record::{Failure, FailureKind};
use serde::Deserialize;
use serde_json::Value;
use std::borrow::Cow;

/// What has arrived of one answer.
#[derive(Debug, Clone, PartialEq)]
pub struct Answer {
    /// Token ids in order, if the engine returns them.
    pub tokens: Vec<u32>,
    /// When each of them came.
    pub token_times_us: Vec<u64>,
    /// When the first token came.
    pub first_token_us: Option<u64>,
    /// When the latest token came.
    pub last_token_us: Option<u64>,
    /// The engine's account, once it has come.
    pub usage: Option<Usage>,
    tokens_max: u32,
    /// Events with text, for servers that say neither ids nor usage.
    text_events: u32,
    finished: bool,
    done: bool,
}

/// The engine's account of a request.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
pub struct Usage {
    /// Tokens produced.
    pub completion_tokens: u32,
    /// Where the prompt's tokens came from; engines report it when they are asked to.
    #[serde(default)]
    pub prompt_tokens_details: Option<PromptTokensDetails>,
}

/// Where the prompt's tokens came from.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
pub struct PromptTokensDetails {
    /// Tokens whose KV existed already.
    #[serde(default)]
    pub cached_tokens: Option<u32>,
    /// Those of them whose KV came from outside the GPU's own cache.
    #[serde(default)]
    pub external_cached_tokens: Option<u32>,
    /// Those of the latter whose KV came from an SSD.
    #[serde(default)]
    pub ssd_cached_tokens: Option<u32>,
    /// Those of the external ones whose KV came from another node.
    #[serde(default)]
    pub peer_cached_tokens: Option<u32>,
}

#[derive(Deserialize)]
struct Event<'a> {
    #[serde(default, borrow)]
    choices: Vec<Choice<'a>>,
    #[serde(default)]
    usage: Option<Usage>,
    #[serde(default)]
    error: Option<Value>,
    #[serde(default, borrow)]
    object: Option<Cow<'a, str>>,
    #[serde(default, borrow)]
    message: Option<Cow<'a, str>>,
}

#[derive(Deserialize)]
struct Choice<'a> {
    #[serde(default, borrow)]
    text: Option<Cow<'a, str>>,
    #[serde(default, borrow)]
    delta: Option<Delta<'a>>,
    #[serde(default)]
    token_ids: Option<Vec<u32>>,
    #[serde(default)]
    finish_reason: Option<Value>,
}

/// What the chat endpoint has in place of the text.
#[derive(Deserialize)]
struct Delta<'a> {
    #[serde(default, borrow)]
    content: Option<Cow<'a, str>>,
    /// Thoughts, under the names that engines have for them.
    #[serde(default, borrow)]
    reasoning_content: Option<Cow<'a, str>>,
    #[serde(default, borrow)]
    reasoning: Option<Cow<'a, str>>,
}

impl Choice<'_> {
    fn has_text(&self) -> bool {
        let delta = self.delta.as_ref();
        let parts = delta.map(|delta| [&delta.content, &delta.reasoning_content, &delta.reasoning]);
        let parts = parts.into_iter().flatten().chain([&self.text]);
        parts.flatten().any(|text| !text.is_empty())
    }
}

impl Answer {
    /// An answer of at most `tokens_max` tokens of which nothing has arrived.
    pub fn new(tokens_max: u32) -> Answer {
        Answer {
            tokens: Vec::new(),
            token_times_us: Vec::new(),
            first_token_us: None,
            last_token_us: None,
            usage: None,
            tokens_max,
            text_events: 0,
            finished: false,
            done: false,
        }
    }

    /// Takes the data of one event that came at `now_us`.
    pub fn event(&mut self, data: &[u8], now_us: u64) -> Result<(), Failure> {
        let data = data.trim_ascii();
        if data.is_empty() || self.done {
            return Ok(());
        }
        if data == b"[DONE]" {
            self.done = true;
            return Ok(());
        }
        let event: Event = serde_json::from_slice(data).map_err(|error| {
            Failure::new(FailureKind::Garbage, format!("{error} in event {}", shown(data)))
        })?;
        if let Some(error) = event.error {
            return Err(Failure::new(FailureKind::EngineError, error.to_string()));
        }
        if event.object.as_deref() == Some("error") {
            let detail = event.message.unwrap_or(Cow::Borrowed("without a message"));
            return Err(Failure::new(FailureKind::EngineError, detail));
        }
        for choice in event.choices {
            self.choice(choice, now_us)?;
        }
        self.usage = event.usage.or(self.usage);
        Ok(())
    }

    /// The stream ended: the answer is whole if it said so itself, and it has at least one token.
    pub fn end(&self) -> Result<(), Failure> {
        if !(self.done || self.finished) {
            let detail = format!("the stream ended after {} tokens", self.output_tokens());
            return Err(Failure::new(FailureKind::Truncated, detail));
        }
        if self.output_tokens() == 0 {
            let detail = format!("no tokens of the {} that were asked for", self.tokens_max);
            return Err(Failure::new(FailureKind::Empty, detail));
        }
        Ok(())
    }

    /// Tokens of the answer: those that came, or the engine's count where it returns no ids, or the
    /// events with text where it says nothing.
    pub fn output_tokens(&self) -> u32 {
        if !self.tokens.is_empty() {
            return self.tokens.len() as u32;
        }
        self.counted_tokens().unwrap_or(self.text_events)
    }

    /// The number of tokens is that of events with text, because the engine said neither ids nor a
    /// count.
    pub fn is_estimated(&self) -> bool {
        self.tokens.is_empty() && self.counted_tokens().is_none() && self.text_events > 0
    }

    /// The engine's count; none at all and some text contradict each other.
    fn counted_tokens(&self) -> Option<u32> {
        let counted = self.usage?.completion_tokens;
        (counted > 0 || self.text_events == 0).then_some(counted)
    }

    /// Nothing more is to come.
    pub fn is_done(&self) -> bool {
        self.done
    }

    fn choice(&mut self, choice: Choice, now_us: u64) -> Result<(), Failure> {
        let has_text = choice.has_text();
        let token_ids = choice.token_ids.unwrap_or_default();
        if self.tokens.len() + token_ids.len() > self.tokens_max as usize {
            let detail = format!("more than the {} tokens that were asked for", self.tokens_max);
            return Err(Failure::new(FailureKind::Garbage, detail));
        }
        if !token_ids.is_empty() || has_text {
            self.first_token_us.get_or_insert(now_us);
            self.last_token_us = Some(now_us);
        }
        self.text_events = self.text_events.saturating_add(has_text.into());
        self.tokens.extend(token_ids);
        self.token_times_us.resize(self.tokens.len(), now_us);
        self.finished |= choice.finish_reason.is_some();
        match choice.finish_reason.as_ref().and_then(failed_finish) {
            Some(reason) => {
                let detail = format!("finish reason {reason:?} after {} tokens", self.output_tokens());
                Err(Failure::new(FailureKind::Aborted, detail))
            }
            None => Ok(()),
        }
    }
}

/// A finish reason with which engines end requests that they give up. SGLang's own API has it as an
/// object with a type.
fn failed_finish(reason: &Value) -> Option<&str> {
    let name = reason.as_str().or_else(|| reason.get("type").and_then(Value::as_str))?;
    ["abort", "error"].contains(&name).then_some(name)
}

/// The start of something that should have been text.
pub(super) fn shown(bytes: &[u8]) -> String {
    String::from_utf8_lossy(&bytes[..bytes.len().min(80)]).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn answer(events: &[(&str, u64)]) -> Answer {
        let mut answer = Answer::new(3);
        events.iter().for_each(|(data, at_us)| answer.event(data.as_bytes(), *at_us).unwrap());
        answer
    }

    #[test]
    fn tokens_times_and_usage_are_gathered() {
        let answer = answer(&[
            (r#"{"choices":[{"index":0,"text":"","token_ids":null,"prompt_token_ids":[1,2]}]}"#, 5),
            (r#"{"choices":[{"text":" t7","token_ids":[7],"finish_reason":null}],"usage":null}"#, 10),
            (r#"{"choices":[{"text":" \u00e4","token_ids":[8,9],"finish_reason":"length"}]}"#, 30),
            (
                r#"{"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":3,"total_tokens":12,
                    "prompt_tokens_details":{"cached_tokens":4,"external_cached_tokens":1}}}"#,
                31,
            ),
            ("[DONE]", 32),
            ("ignored after the end", 33),
        ]);
        assert_eq!(answer.tokens, [7, 8, 9]);
        assert_eq!(answer.token_times_us, [10, 30, 30]);
        assert_eq!((answer.first_token_us, answer.last_token_us), (Some(10), Some(30)));
        let details = answer.usage.unwrap().prompt_tokens_details.unwrap();
        assert_eq!((details.cached_tokens, details.external_cached_tokens), (Some(4), Some(1)));
        assert_eq!(answer.output_tokens(), 3);
        assert_eq!(answer.end(), Ok(()));
    }

    #[test]
    fn an_engine_without_token_ids_is_counted_by_its_usage() {
        let answer = answer(&[
            (r#"{"choices":[{"text":"a b"}]}"#, 1),
            (r#"{"choices":[{"text":"","finish_reason":"length"}],"usage":{"completion_tokens":2}}"#, 2),
        ]);
        assert_eq!(answer.output_tokens(), 2);
        assert_eq!(answer.usage.unwrap().prompt_tokens_details, None);
        assert_eq!(answer.end(), Ok(()));
    }

    #[test]
    fn the_deltas_of_a_chat_are_tokens_and_its_first_empty_one_is_none() {
        let answer = answer(&[
            (r#"{"choices":[{"delta":{"role":"assistant","content":""}}]}"#, 1),
            (r#"{"choices":[{"delta":{"reasoning_content":"hm"}}]}"#, 2),
            (r#"{"choices":[{"delta":{"content":"a"}}]}"#, 3),
            (r#"{"choices":[{"delta":{"content":null},"finish_reason":"length"}]}"#, 4),
            (r#"{"choices":[],"usage":{"completion_tokens":2}}"#, 5),
        ]);
        assert_eq!((answer.first_token_us, answer.last_token_us), (Some(2), Some(3)));
        assert_eq!((answer.output_tokens(), answer.end()), (2, Ok(())));
    }

    #[test]
    fn a_stream_that_ends_before_its_answer_is_a_failure() {
        let answer = answer(&[(r#"{"choices":[{"text":" t7","token_ids":[7]}]}"#, 1)]);
        assert_eq!(answer.end().unwrap_err().kind, FailureKind::Truncated);
    }

    #[test]
    fn an_error_event_and_garbage_are_failures_with_their_own_reason() {
        let kind = |data: &str| Answer::new(3).event(data.as_bytes(), 0).unwrap_err().kind;
        assert_eq!(kind(r#"{"error":{"message":"out of blocks","code":500}}"#), FailureKind::EngineError);
        let old_vllm = r#"{"object":"error","message":"too long","type":"BadRequestError","code":400}"#;
        assert_eq!(kind(old_vllm), FailureKind::EngineError);
        assert_eq!(kind("<html>"), FailureKind::Garbage);
        assert_eq!(kind(r#"{"choices":[{"token_ids":["x"]}]}"#), FailureKind::Garbage);
        assert_eq!(kind(r#"{"choices":[{"token_ids":[-1]}]}"#), FailureKind::Garbage);
        assert_eq!(kind(r#"{"choices":[{"token_ids":[1,2,3,4]}]}"#), FailureKind::Garbage);
    }

    #[test]
    fn an_answer_without_tokens_is_a_failure() {
        for events in [
            &[("[DONE]", 1)][..],
            &[(r#"{"choices":[{"text":"","finish_reason":"stop"}]}"#, 1), ("[DONE]", 2)],
            &[(r#"{"choices":[],"usage":{"completion_tokens":0}}"#, 1), ("[DONE]", 2)],
        ] {
            assert_eq!(answer(events).end().unwrap_err().kind, FailureKind::Empty, "{events:?}");
        }
    }

    #[test]
    fn an_answer_that_the_engine_gave_up_is_a_failure_although_it_ends_well() {
        for reason in [r#""abort""#, r#""error""#, r#"{"type":"abort","message":"out of memory"}"#] {
            let event = format!(r#"{{"choices":[{{"text":" a","finish_reason":{reason}}}]}}"#);
            let failure = Answer::new(3).event(event.as_bytes(), 0).unwrap_err();
            assert_eq!(failure.kind, FailureKind::Aborted, "{reason}");
        }
        for reason in [r#""stop""#, r#""length""#, "null", r#"{"type":"length","length":3}"#] {
            let event = format!(r#"{{"choices":[{{"text":" a","finish_reason":{reason}}}]}}"#);
            assert_eq!(Answer::new(3).event(event.as_bytes(), 0), Ok(()), "{reason}");
        }
    }

    #[test]
    fn a_server_that_counts_nothing_is_counted_by_its_events() {
        let silent = answer(&[
            (r#"{"choices":[{"text":" a"}]}"#, 1),
            (r#"{"choices":[{"text":" b"}]}"#, 2),
            ("[DONE]", 3),
        ]);
        assert_eq!((silent.output_tokens(), silent.is_estimated(), silent.end()), (2, true, Ok(())));
        let counting = answer(&[
            (r#"{"choices":[{"text":" a b"}]}"#, 1),
            (r#"{"choices":[],"usage":{"completion_tokens":2}}"#, 2),
        ]);
        assert_eq!((counting.output_tokens(), counting.is_estimated()), (2, false));
    }

    proptest! {
        #[test]
        fn arbitrary_events_never_panic(data in prop::collection::vec(any::<u8>(), 0..200)) {
            let _ = Answer::new(3).event(&data, 0);
        }
    }
}
