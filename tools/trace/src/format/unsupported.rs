//! Files that people try and that no reader takes: what each of them is, and what to do with it. It
//! knows how to recognise them.

use super::error::TraceError;
use std::path::Path;

/// A kind of file that is known and not read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Unsupported {
    what: &'static str,
    advice: &'static str,
}

pub(super) const COMPRESSED_TWICE: Unsupported =
    Unsupported { what: "compressed twice", advice: "unpack it once, and read the result" };

const UNPACK: &str = "unpack it and pipe the text in, such as `COMMAND FILE | forebay trace info -`; gzip and zstd are \
                      read as they are";
const EXPORT: &str =
    "export its rows as JSON lines or CSV first; docs/traces.md lists the fields of each format";
const CONVERT: &str = "convert it with `iconv -t UTF-8`; trace files are UTF-8";

/// Files known by their first bytes, whatever they hold. Longer marks stand before those that they
/// begin with.
const MARKS: [(&[u8], Unsupported); 14] = [
    (
        b"version https://git-lfs",
        Unsupported {
            what: "a git-LFS pointer and not the trace",
            advice: "fetch the content with `git lfs pull` in the repository that it came from, or download the \
                 file by itself",
        },
    ),
    (b"\xfd7zXZ\0", Unsupported { what: "compressed with xz", advice: UNPACK }),
    (b"BZh", Unsupported { what: "compressed with bzip2", advice: UNPACK }),
    (b"\x04\x22\x4d\x18", Unsupported { what: "compressed with lz4", advice: UNPACK }),
    (b"PK\x03\x04", Unsupported { what: "a zip archive", advice: UNPACK }),
    (b"7z\xbc\xaf\x27\x1c", Unsupported { what: "a 7z archive", advice: UNPACK }),
    (b"PAR1", Unsupported { what: "a Parquet file", advice: EXPORT }),
    (b"ARROW1", Unsupported { what: "an Arrow file", advice: EXPORT }),
    (b"SQLite format 3\0", Unsupported { what: "a SQLite database", advice: EXPORT }),
    (b"\xff\xfe\0\0", Unsupported { what: "text in UTF-32", advice: CONVERT }),
    (b"\0\0\xfe\xff", Unsupported { what: "text in UTF-32", advice: CONVERT }),
    (b"\xff\xfe", UTF_16),
    (b"\xfe\xff", UTF_16),
    (b"\0{", UTF_16),
];
const UTF_16: Unsupported = Unsupported { what: "text in UTF-16", advice: CONVERT };
const TAR: Unsupported = Unsupported { what: "a tar archive", advice: UNPACK };
const DUCKDB: Unsupported = Unsupported { what: "a DuckDB database", advice: EXPORT };

const SHAREGPT: Unsupported = Unsupported {
    what: "a file of ShareGPT conversations",
    advice: "it holds text, and neither numbers of tokens nor times; count tokens with a tokenizer and write \
             JSON lines with `timestamp`, `input_length` and `output_length`, or use `forebay trace generate`",
};
const AIPERF_TURNS: Unsupported = Unsupported {
    what: "a multi-turn or prompt file of aiperf",
    advice: "it holds text, and neither numbers of tokens nor times; count tokens with a tokenizer and write \
             the lines of the forebay format (docs/traces.md), with `session`, `turn` and `think_us`",
};
const AIPERF_SESSIONS: Unsupported = Unsupported {
    what: "aiperf's form of a Mooncake trace, with several turns in a session",
    advice: "its turns have no arrival of their own; write the lines of the forebay format (docs/traces.md), \
             with `session`, `turn` and `think_us` in place of `session_id` and `delay`; where every line has its \
             `timestamp` and full `input_length`, `--format mooncake` reads each as a session of its own",
};
const TRACELAB_EVENTS: Unsupported = Unsupported {
    what: "TraceLab's record of events",
    advice: "export its session CSV with the repository's `trace_facts/csv_export`, which is read as tracelab",
};
const JSON_ARRAY: Unsupported = Unsupported {
    what: "one JSON array",
    advice: "write one object a line: `jq -c '.[]' FILE | forebay trace info -`",
};

/// What the file is, by its first bytes.
pub(super) fn of_bytes(beginning: &[u8]) -> Option<Unsupported> {
    let marked =
        MARKS.into_iter().find(|(mark, _)| beginning.starts_with(mark)).map(|(_, unsupported)| unsupported);
    let at = |offset: usize, mark: &[u8]| beginning.get(offset..).is_some_and(|rest| rest.starts_with(mark));
    // Text that begins with a letter or a bracket, each character in two bytes.
    let wide =
        matches!(beginning, [first, 0, second, 0, ..] if first.is_ascii() && *first > 0 && second.is_ascii());
    marked
        .or_else(|| at(257, b"ustar").then_some(TAR))
        .or_else(|| at(8, b"DUCK").then_some(DUCKDB))
        .or_else(|| wide.then_some(UTF_16))
}

/// What the file is, by its first lines.
pub(super) fn of_text(text: &str) -> Option<Unsupported> {
    let text = text.trim_start();
    let has = |name: &str| has_key(text, name);
    if !text.starts_with(['{', '[']) {
        return None;
    }
    if has("conversations") && (has("from") || has("role")) && (has("value") || has("content")) {
        return Some(SHAREGPT);
    }
    if has("timing_events") {
        return Some(TRACELAB_EVENTS);
    }
    if has("turns") || has("text_input") || has("messages") || (has("text") && !has("input_length")) {
        return Some(AIPERF_TURNS);
    }
    let is_array = text.strip_prefix('[').is_some_and(|rest| rest.trim_start().starts_with('{'));
    mooncake_with_sessions(text).or_else(|| is_array.then_some(JSON_ARRAY))
}

/// Lines like Mooncake's that are turns of sessions; read as Mooncake's they would lose what makes
/// them sessions.
pub(super) fn mooncake_with_sessions(text: &str) -> Option<Unsupported> {
    let has = |name: &str| has_key(text, name);
    let found = (has("session_id") || has("delay")) && has("input_length") && !has("chat_id");
    found.then_some(AIPERF_SESSIONS)
}

/// Whether a JSON text has a field of this name anywhere.
pub(super) fn has_key(text: &str, name: &str) -> bool {
    let quoted = format!("\"{name}\"");
    text.match_indices(&quoted).any(|(at, _)| text[at + quoted.len()..].trim_start().starts_with(':'))
}

impl Unsupported {
    /// The error of opening such a file.
    pub(super) fn error(self, file: &Path) -> TraceError {
        TraceError::Unsupported { file: file.into(), what: self.what, advice: self.advice }
    }
}

#[cfg(test)]
mod tests {
    use super::{of_bytes, of_text};

    #[test]
    fn files_that_no_reader_takes_are_named() {
        let mut tar = vec![b'x'; 257];
        tar.extend(b"ustar\0");
        let wide: Vec<u8> = "{\"a\"".encode_utf16().flat_map(u16::to_le_bytes).collect();
        let wide_and_big: Vec<u8> = "{\"a\"".encode_utf16().flat_map(u16::to_be_bytes).collect();
        let cases: [(&[u8], &str); 13] = [
            (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n", "git-LFS"),
            (b"\xfd7zXZ\0..", "xz"),
            (b"BZh91AY", "bzip2"),
            (b"PK\x03\x04..", "zip"),
            (b"PAR1..", "Parquet"),
            (b"SQLite format 3\0..", "SQLite"),
            (b"........DUCK....", "DuckDB"),
            (b"\xff\xfe{\0", "UTF-16"),
            (b"\xfe\xff\0{", "UTF-16"),
            (b"\xff\xfe\0\0{\0\0\0", "UTF-32"),
            (&tar, "tar"),
            (&wide, "UTF-16"),
            (&wide_and_big, "UTF-16"),
        ];
        for (bytes, what) in cases {
            let named = of_bytes(bytes).unwrap();
            assert!(named.what.contains(what) && !named.advice.is_empty(), "{bytes:?}: {named:?}");
        }
        for text in ["", "{", "{\"timestamp\": 0}", "TIMESTAMP,ContextTokens", "garbage\n"] {
            assert_eq!(of_bytes(text.as_bytes()), None, "{text}");
        }
    }

    #[test]
    fn texts_of_other_tools_are_named() {
        let cases = [
            (r#"[{"id": "a", "conversations": [{"from": "human", "value": "hello"}]}]"#, "ShareGPT"),
            (r#"{"id": "a", "conversations": [{"role": "user", "content": "hello"}]}"#, "ShareGPT"),
            (r#"{"session_id": "a", "turns": [{"text": "hello", "delay": 5}]}"#, "aiperf"),
            (r#"{"text": "hello"}"#, "aiperf"),
            (r#"{"session_id": "a", "messages": [], "output_length": 5, "timestamp": 0}"#, "aiperf"),
            (r#"{"session_id": "a", "input_length": 5, "output_length": 5, "delay": 9}"#, "aiperf"),
            (r#"[{"timestamp": 0, "input_length": 5}]"#, "one JSON array"),
        ];
        for (text, what) in cases {
            let named = of_text(text).unwrap();
            assert!(named.what.contains(what), "{text}: {named:?}");
        }
        let traces = [
            r#"{"timestamp": 0, "input_length": 6758, "output_length": 500, "hash_ids": [0, 1]}"#,
            r#"{"chat_id":1,"session_id":"x","timestamp":6,"input_length":4,"output_length":2}"#,
            r#"{"chat_id":1,"timestamp":6,"input_length":4,"output_length":2,"type":"text","turn":1}"#,
            r#"{"session":"a","turn":0,"arrival_us":5,"input_tokens":4,"output_tokens":2}"#,
            r#"{"id":"a","block_size":64,"requests":[{"t":1.5,"type":"n","input_types":["text"],"in":130}]}"#,
            "id,text\n",
        ];
        traces.into_iter().for_each(|text| assert_eq!(of_text(text), None, "{text}"));
    }
}
