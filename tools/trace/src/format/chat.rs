//! Two JSONL formats whose conversations are chains of chat ids: Qwen-Bailian's (blocks of 16
//! tokens) and that of the agentic-kvc traces (blocks of 512, with an optional session name and an
//! optional pause before the request). It knows how a chain becomes a session, with a bounded
//! memory of past chats.

use super::check::{LENGTH_NAMES, check, micros};
use super::error::{Problem, parse_object};
use super::parser::LineParser;
use crate::number::{ids, tokens};
use crate::request::TraceRequest;
use serde::Deserialize;
use serde::de::{self, Deserializer, Visitor};
use std::collections::{HashMap, VecDeque};
use std::fmt;

/// Tokens per block in Qwen-Bailian's traces.
pub(super) const BAILIAN_BLOCK_TOKENS: u32 = 16;
/// Tokens per block in agentic-kvc's traces.
pub(super) const AGENTIC_BLOCK_TOKENS: u32 = 512;

/// How many of the latest chats are remembered. A turn whose parent is older begins a session of
/// its own.
const REMEMBERED_CHATS: usize = 1 << 20;

pub(super) struct Chat {
    block_tokens: u32,
    unit_s: f64,
    roots: Roots,
}

#[derive(Deserialize)]
struct Row {
    chat_id: i64,
    #[serde(default = "no_parent")]
    parent_chat_id: i64,
    timestamp: f64,
    #[serde(deserialize_with = "tokens")]
    input_length: u32,
    #[serde(deserialize_with = "tokens")]
    output_length: u32,
    #[serde(default = "first_turn")]
    turn: u32,
    #[serde(default, deserialize_with = "ids")]
    hash_ids: Vec<u64>,
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

impl Chat {
    /// A reader of blocks of so many tokens, and of times in units of so many seconds.
    pub(super) fn new(block_tokens: u32, unit_s: f64) -> Chat {
        Chat { block_tokens, unit_s, roots: Roots::new(REMEMBERED_CHATS) }
    }
}

impl LineParser for Chat {
    fn parse(&mut self, text: &[u8], _number: u64) -> Result<Option<TraceRequest>, Problem> {
        let row: Row = parse_object(text)?;
        let think_us =
            row.time_to_parent_chat.map(|pause_s| micros("time_to_parent_chat", pause_s, self.unit_s));
        let root = self.roots.root_of(row.chat_id, row.parent_chat_id);
        let request = TraceRequest {
            session: row.session_id.unwrap_or_else(|| format!("chat-{root}")),
            turn: row.turn.saturating_sub(1),
            arrival_us: micros("timestamp", row.timestamp, self.unit_s)?,
            think_us: think_us.transpose()?,
            input_tokens: row.input_length,
            output_tokens: row.output_length,
            block_tokens: self.block_tokens,
            blocks: row.hash_ids,
            ..TraceRequest::default()
        };
        check(request, &LENGTH_NAMES).map(Some)
    }
}

/// The first chat of each conversation, for the latest chats.
struct Roots {
    root_of_chat: HashMap<i64, i64>,
    oldest_first: VecDeque<i64>,
    limit: usize,
}

impl Roots {
    fn new(limit: usize) -> Roots {
        Roots { root_of_chat: HashMap::new(), oldest_first: VecDeque::new(), limit }
    }

    /// The root of `chat`, which is remembered for the chats that follow it. A parent that was
    /// never seen, because the trace begins after it, stands for the conversation.
    fn root_of(&mut self, chat: i64, parent: i64) -> i64 {
        let root = match parent {
            ..0 => chat,
            _ => self.root_of_chat.get(&parent).copied().unwrap_or(parent),
        };
        if self.root_of_chat.insert(chat, root).is_none() {
            self.oldest_first.push_back(chat);
        }
        if self.oldest_first.len() > self.limit
            && let Some(oldest) = self.oldest_first.pop_front()
        {
            self.root_of_chat.remove(&oldest);
        }
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
    use super::Roots;

    #[test]
    fn a_chain_of_chats_is_one_session() {
        let mut roots = Roots::new(100);
        assert_eq!(roots.root_of(1, -1), 1);
        assert_eq!(roots.root_of(2, 1), 1);
        assert_eq!(roots.root_of(3, -1), 3);
        assert_eq!(roots.root_of(4, 2), 1);
    }

    #[test]
    fn turns_whose_parent_came_before_the_trace_stay_together() {
        let mut roots = Roots::new(100);
        assert_eq!(roots.root_of(12, 7), 7);
        assert_eq!(roots.root_of(13, 12), 7);
        assert_eq!(roots.root_of(14, 7), 7);
    }

    #[test]
    fn the_memory_of_past_chats_is_bounded() {
        let mut roots = Roots::new(2);
        (0..10).for_each(|chat| assert_eq!(roots.root_of(chat, -1), chat));
        assert_eq!((roots.root_of_chat.len(), roots.oldest_first.len()), (2, 2));
        assert_eq!(roots.root_of(10, 9), 9);
        assert_eq!(roots.root_of(11, 3), 3);
    }
}
