//! Batches of cache events as msgpack. This file knows vLLM's field names.

use crate::scheduler::CacheEvent;
use rmpv::Value;

/// Where vLLM says that blocks are which an engine itself holds.
const MEDIUM: &str = "GPU";

/// A batch as a payload: `[timestamp_s, [events], data_parallel_rank 0]`.
pub fn encode(timestamp_s: f64, events: &[CacheEvent], block_tokens: usize) -> Vec<u8> {
    let events = events.iter().map(|event| encode_event(event, block_tokens)).collect();
    payload(timestamp_s, events)
}

/// A batch that says that everything stored before is gone.
pub fn encode_cleared(timestamp_s: f64) -> Vec<u8> {
    payload(timestamp_s, vec![map(vec![("type", "AllBlocksCleared".into())])])
}

fn payload(timestamp_s: f64, events: Vec<Value>) -> Vec<u8> {
    let batch = Value::Array(vec![timestamp_s.into(), Value::Array(events), 0.into()]);
    let mut bytes = Vec::new();
    // Writing to a Vec cannot fail.
    let _ = rmpv::encode::write_value(&mut bytes, &batch);
    bytes
}

fn encode_event(event: &CacheEvent, block_tokens: usize) -> Value {
    match event {
        CacheEvent::Stored { hashes, parent, tokens } => map(vec![
            ("type", "BlockStored".into()),
            ("block_hashes", array(hashes.iter().map(|hash| hash.low_u64().into()))),
            ("parent_block_hash", parent.map_or(Value::Nil, |parent| parent.low_u64().into())),
            ("token_ids", array(tokens.iter().map(|token| (*token).into()))),
            ("block_size", (block_tokens as u64).into()),
            ("lora_id", Value::Nil),
            ("medium", MEDIUM.into()),
            ("lora_name", Value::Nil),
            ("group_idx", 0.into()),
        ]),
        CacheEvent::Removed { hashes } => map(vec![
            ("type", "BlockRemoved".into()),
            ("block_hashes", array(hashes.iter().map(|hash| hash.low_u64().into()))),
            ("medium", MEDIUM.into()),
            ("group_idx", 0.into()),
        ]),
    }
}

fn map(fields: Vec<(&str, Value)>) -> Value {
    Value::Map(fields.into_iter().map(|(name, value)| (name.into(), value)).collect())
}

fn array(values: impl Iterator<Item = Value>) -> Value {
    Value::Array(values.collect())
}
