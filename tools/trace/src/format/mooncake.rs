//! Mooncake's JSONL (the FAST'25 release): arrival in milliseconds, lengths, and one id per block
//! of 512 tokens, the last of which may be partial; files of this form with other blocks or times
//! exist. Conversations are not recorded, so each request is a session of its own.

use super::check::{LENGTH_NAMES, check, micros};
use super::error::{Problem, parse_object};
use super::parser::LineParser;
use crate::number::{ids, tokens};
use crate::request::TraceRequest;
use serde::Deserialize;

/// Tokens per block, unless it is said otherwise.
pub(super) const BLOCK_TOKENS: u32 = 512;

pub(super) struct Mooncake {
    /// Tokens per block.
    pub block_tokens: u32,
    /// Times are in units of so many seconds.
    pub unit_s: f64,
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

impl LineParser for Mooncake {
    fn parse(&mut self, text: &[u8], number: u64) -> Result<Option<TraceRequest>, Problem> {
        let row: Row = parse_object(text)?;
        let request = TraceRequest {
            session: format!("line-{number}"),
            arrival_us: micros("timestamp", row.timestamp, self.unit_s)?,
            input_tokens: row.input_length,
            output_tokens: row.output_length,
            block_tokens: self.block_tokens,
            blocks: row.hash_ids,
            ..TraceRequest::default()
        };
        check(request, &LENGTH_NAMES).map(Some)
    }
}
