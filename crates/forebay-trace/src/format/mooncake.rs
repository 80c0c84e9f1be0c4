//! Mooncake's JSONL (the FAST'25 release): arrival in milliseconds, lengths, and one id per block of 512 tokens, the last
//! of which may be partial. Conversations are not recorded, so each request is a session of its own.

use super::LineParser;
use super::check::{LENGTH_NAMES, check, micros};
use super::error::{Problem, parse_object};
use crate::request::TraceRequest;
use serde::Deserialize;

const BLOCK_TOKENS: u32 = 512;

pub(super) struct Mooncake;

#[derive(Deserialize)]
struct Row {
    timestamp: f64,
    input_length: u32,
    output_length: u32,
    #[serde(default)]
    hash_ids: Vec<u64>,
}

impl LineParser for Mooncake {
    fn parse(&mut self, text: &[u8], number: u64) -> Result<Option<TraceRequest>, Problem> {
        let row: Row = parse_object(text)?;
        let request = TraceRequest {
            session: format!("line-{number}"),
            arrival_us: micros("timestamp", row.timestamp, 1e-3)?,
            input_tokens: row.input_length,
            output_tokens: row.output_length,
            block_tokens: BLOCK_TOKENS,
            blocks: row.hash_ids,
            ..TraceRequest::default()
        };
        check(request, &LENGTH_NAMES).map(Some)
    }
}
