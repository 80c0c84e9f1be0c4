//! Which format a file is in, by its first bytes.

use super::error::TraceError;
use super::kind::Format;
use super::{mooncake, rows, tracelab, unsupported};
use serde_json::Value;
use std::path::Path;

/// The format of what errors call `name`, or what else it is.
pub(super) fn format_of(name: &Path, beginning: &[u8]) -> Result<Format, TraceError> {
    let text = String::from_utf8_lossy(beginning);
    let text = text.trim_start_matches('\u{FEFF}');
    let format = detect(text);
    let unsupported = match format {
        Some(Format::Mooncake) => unsupported::mooncake_with_sessions(text),
        Some(_) => None,
        None => unsupported::of_text(text),
    };
    if let Some(unsupported) = unsupported {
        return Err(unsupported.error(name));
    }
    format.ok_or_else(|| TraceError::Unrecognised { file: name.into(), known: Format::names() })
}

/// The format of the first line that is in any, so that a bad line at the top does not hide a good
/// trace.
fn detect(text: &str) -> Option<Format> {
    // A session file may be one line or many; its first fields are at its beginning in any case.
    if is_session(text) {
        return Some(Format::Weka);
    }
    text.lines().find_map(detect_line)
}

fn is_session(text: &str) -> bool {
    let head = text.split("\"requests\"").next().unwrap_or(text);
    text.trim_start().starts_with('{') && head.len() < text.len() && head.contains("\"block_size\"")
}

fn detect_line(line: &str) -> Option<Format> {
    if rows::is_azure(line) {
        return Some(Format::Azure);
    }
    if rows::is_burstgpt(line) {
        return Some(Format::BurstGpt);
    }
    if tracelab::is_header(line) {
        return Some(Format::TraceLab);
    }
    // The last line that was looked at may be cut off; its first fields are enough.
    let has = |name: &str| line.contains(&format!("\"{name}\""));
    if !line.trim_start().starts_with('{') {
        return None;
    }
    if has("arrival_us") && has("input_tokens") {
        return Some(Format::Forebay);
    }
    if has("chat_id") && has("input_length") {
        return Some(chat_format(line));
    }
    (has("timestamp") && has("input_length")).then_some(Format::Mooncake)
}

/// The two formats with chats differ in fields that only one has or, without these, in how many
/// blocks cover a prompt.
fn chat_format(line: &str) -> Format {
    let Ok(row) = serde_json::from_str::<Value>(line) else { return Format::Bailian };
    if row.get("session_id").is_some() || row.get("time_to_parent_chat").is_some() {
        return Format::AgenticKv;
    }
    // As a double: it may be written as `512.0`.
    let input = row.get("input_length").and_then(Value::as_f64).unwrap_or(0.0) as u64;
    let blocks = row.get("hash_ids").and_then(Value::as_array).map_or(0, Vec::len) as u64;
    let covers = |block_tokens: u32| {
        let whole = input / u64::from(block_tokens);
        blocks > 0 && (whole..=whole + 1).contains(&blocks)
    };
    let is_agentic = covers(mooncake::AGENTIC_BLOCK_TOKENS) && !covers(mooncake::BAILIAN_BLOCK_TOKENS);
    if is_agentic { Format::AgenticKv } else { Format::Bailian }
}

#[cfg(test)]
mod tests {
    use super::{Format, Path, format_of};

    fn detect(text: &[u8]) -> Option<Format> {
        format_of(Path::new("t"), text).ok()
    }

    #[test]
    fn each_format_is_known_by_its_content() {
        let cases = [
            (
                r#"{"timestamp": 0, "input_length": 6758, "output_length": 500, "hash_ids": [0, 1]}"#,
                Format::Mooncake,
            ),
            (r#"{"id":"trace_0004","block_size":64,"requests":[{"t":0.0"#, Format::Weka),
            ("{\n  \"id\": \"a\",\n  \"block_size\": 64,\n  \"requests\": [\n", Format::Weka),
            (
                r#"{"chat_id":1,"parent_chat_id":-1,"timestamp":61.1,"input_length":40,"output_length":2,"type":"text","turn":1,"hash_ids":[1,2,3]}"#,
                Format::Bailian,
            ),
            (
                r#"{"chat_id":1,"parent_chat_id":-1,"timestamp":61.1,"input_length":1200,"output_length":2,"type":"coder","turn":1,"hash_ids":[1,2]}"#,
                Format::AgenticKv,
            ),
            // Blocks that cover the prompt in neither size decide nothing.
            (
                r#"{"chat_id":1,"timestamp":6,"input_length":9000,"output_length":2,"hash_ids":[1]}"#,
                Format::Bailian,
            ),
            (
                r#"{"chat_id":1,"session_id":"x","timestamp":6,"input_length":4,"output_length":2}"#,
                Format::AgenticKv,
            ),
            ("TIMESTAMP,ContextTokens,GeneratedTokens\r\n2023", Format::Azure),
            (
                "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n5,ChatGPT,472",
                Format::BurstGpt,
            ),
            (
                "id,input_len,output_len,arrival_time,round_idx,tool_wait_after_ms,prefix_len\n",
                Format::TraceLab,
            ),
            (
                r#"{"session":"a","turn":0,"arrival_us":5,"input_tokens":4,"output_tokens":2}"#,
                Format::Forebay,
            ),
        ];
        for (text, format) in cases {
            assert_eq!(detect(text.as_bytes()), Some(format), "{text}");
            assert_eq!(detect(format!("\u{FEFF}\n{text}").as_bytes()), Some(format), "{text}");
        }
    }

    #[test]
    fn a_bad_first_line_does_not_hide_the_format() {
        let text = "garbage\n{\"timestamp\": 0, \"input_length\": 1, \"output_length\": 2}";
        assert_eq!(detect(text.as_bytes()), Some(Format::Mooncake));
    }

    #[test]
    fn other_files_are_in_no_format() {
        for text in ["", "hello", "{}", "[1,2]", r#"{"requests": []}"#, "a,b,c\n1,2,3"] {
            assert_eq!(detect(text.as_bytes()), None, "{text}");
        }
    }
}
