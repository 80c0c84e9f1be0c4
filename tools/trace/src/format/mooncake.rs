//! Mooncake's JSONL (the FAST'25 release): arrival in milliseconds, lengths, and one id per block
//! of 512 tokens, the last of which may be partial; files of this form with other blocks or times
//! exist. Conversations are not recorded, so each request is a session of its own.
//!
//! Two formats add conversations as chains of chat ids: Qwen-Bailian's (blocks of 16 tokens) and
//! that of the agentic-kvc traces (blocks of 512, with an optional session name and an optional
//! pause before the request). A chain becomes a session, with a bounded memory of past chats.

use super::check::{LENGTH_NAMES, check, micros};
use super::error::{Problem, parse_json, parse_object};
use super::lines::LineParser;
use crate::latest::Latest;
use crate::number::{ids, tokens};
use crate::request::TraceRequest;
use serde::Deserialize;
use serde::de::{self, Deserializer, Visitor};
use std::fmt;
use std::hash::RandomState;

/// Tokens per block in Mooncake's traces, unless it is said otherwise.
pub(super) const BLOCK_TOKENS: u32 = 512;
/// Tokens per block in Qwen-Bailian's traces.
pub(super) const BAILIAN_BLOCK_TOKENS: u32 = 16;
/// Tokens per block in agentic-kvc's traces.
pub(super) const AGENTIC_BLOCK_TOKENS: u32 = 512;

/// How many of the latest chats are remembered. A turn whose parent is older begins a session of
/// its own.
const REMEMBERED_CHATS: usize = 1 << 20;

pub(super) struct Mooncake {
    block_tokens: u32,
    unit_s: f64,
    /// The conversations, in the formats that record them.
    roots: Option<Roots>,
}

#[derive(Deserialize)]
struct Row {
    timestamp: f64,
    #[serde(deserialize_with = "tokens")]
    input_length: u32,
    #[serde(deserialize_with = "tokens")]
    output_length: u32,
    #[serde(default, deserialize_with = "ids")]
    hash_ids: Vec<u64>,
}

/// What a row says of its conversation.
#[derive(Deserialize)]
struct Chat {
    chat_id: i64,
    #[serde(default = "no_parent")]
    parent_chat_id: i64,
    #[serde(default = "first_turn")]
    turn: u32,
    #[serde(default, deserialize_with = "name")]
    session_id: Option<String>,
    #[serde(default)]
    time_to_parent_chat: Option<f64>,
}

fn no_parent() -> i64 {
    -1
}

fn first_turn() -> u32 {
    1
}

impl Mooncake {
    /// A reader of blocks of so many tokens, and of times in units of so many seconds.
    pub(super) fn new(block_tokens: u32, unit_s: f64, has_chats: bool) -> Mooncake {
        let roots = has_chats.then(|| Roots(Latest::new(REMEMBERED_CHATS)));
        Mooncake { block_tokens, unit_s, roots }
    }
}

impl LineParser for Mooncake {
    fn parse(&mut self, text: &[u8], number: u64) -> Result<Option<TraceRequest>, Problem> {
        let row: Row = parse_object(text)?;
        let mut request = TraceRequest {
            input_tokens: row.input_length,
            output_tokens: row.output_length,
            block_tokens: self.block_tokens,
            blocks: row.hash_ids,
            ..TraceRequest::default()
        };
        match &mut self.roots {
            None => request.session = format!("line-{number}"),
            Some(roots) => {
                let chat: Chat = parse_json(text)?;
                let root = roots.root_of(chat.chat_id, chat.parent_chat_id);
                request.session = chat.session_id.unwrap_or_else(|| format!("chat-{root}"));
                request.turn = chat.turn.saturating_sub(1);
                let pause = |pause_s| micros("time_to_parent_chat", pause_s, self.unit_s);
                request.think_us = chat.time_to_parent_chat.map(pause).transpose()?;
            }
        }
        request.arrival_us = micros("timestamp", row.timestamp, self.unit_s)?;
        check(request, &LENGTH_NAMES).map(Some)
    }
}

/// The first chat of each conversation, for the latest chats.
struct Roots(Latest<i64, i64, RandomState>);

impl Roots {
    /// The root of `chat`, which is remembered for the chats that follow it. A parent that was
    /// never seen, because the trace begins after it, stands for the conversation.
    fn root_of(&mut self, chat: i64, parent: i64) -> i64 {
        let root = match parent {
            ..0 => chat,
            _ => self.0.get(&parent).copied().unwrap_or(parent),
        };
        self.0.insert(chat, root);
        root
    }
}

/// A session name that may be written as a string or as an integer.
fn name<'text, D: Deserializer<'text>>(json: D) -> Result<Option<String>, D::Error> {
    struct Name;
    impl Visitor<'_> for Name {
        type Value = Option<String>;
        fn expecting(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
            out.write_str("a string, an integer or null")
        }
        fn visit_str<E: de::Error>(self, text: &str) -> Result<Option<String>, E> {
            Ok(Some(text.into()))
        }
        fn visit_i64<E: de::Error>(self, number: i64) -> Result<Option<String>, E> {
            Ok(Some(number.to_string()))
        }
        fn visit_u64<E: de::Error>(self, number: u64) -> Result<Option<String>, E> {
            Ok(Some(number.to_string()))
        }
        fn visit_unit<E: de::Error>(self) -> Result<Option<String>, E> {
            Ok(None)
        }
    }
    json.deserialize_any(Name)
}

#[cfg(test)]
mod tests {
    use super::{Latest, Roots};

    #[test]
    fn a_chain_of_chats_is_one_session() {
        let mut roots = Roots(Latest::new(100));
        assert_eq!(roots.root_of(1, -1), 1);
        assert_eq!(roots.root_of(2, 1), 1);
        assert_eq!(roots.root_of(3, -1), 3);
        assert_eq!(roots.root_of(4, 2), 1);
    }

    #[test]
    fn turns_whose_parent_came_before_the_trace_stay_together() {
        let mut roots = Roots(Latest::new(100));
        assert_eq!(roots.root_of(12, 7), 7);
        assert_eq!(roots.root_of(13, 12), 7);
        assert_eq!(roots.root_of(14, 7), 7);
    }

    #[test]
    fn the_memory_of_past_chats_is_bounded() {
        let mut roots = Roots(Latest::new(2));
        (0..10).for_each(|chat| assert_eq!(roots.root_of(chat, -1), chat));
        assert_eq!(roots.0.lengths(), (2, 2));
        assert_eq!(roots.root_of(10, 9), 9);
        assert_eq!(roots.root_of(11, 3), 3);
    }
}
