//! What can be wrong with a trace, said so that a person can mend it: the file, the place in it,
//! the field, what was found and what is allowed.

use serde::Deserialize;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Why a trace could not be read, in whole or at one place.
#[derive(Debug, thiserror::Error)]
pub enum TraceError {
    /// The file or directory could not be read.
    #[error("{}: {source}", file.display())]
    Io {
        /// What was being read.
        file: PathBuf,
        source: std::io::Error,
    },
    /// The file is of a known kind that no reader takes.
    #[error("{}: this is {what}: {advice}", file.display())]
    Unsupported {
        file: PathBuf,
        what: &'static str,
        /// What to do with it.
        advice: &'static str,
    },
    /// An option of the reading is given for a format that it says nothing about.
    #[error(
        "{}: {option} is given, and the {format} format states it or has none: allowed with {allowed}",
        file.display()
    )]
    Option {
        file: PathBuf,
        option: &'static str,
        format: String,
        /// The names of the formats that it is for.
        allowed: String,
    },
    /// Tokens per block that nothing could have.
    #[error("--block-tokens: {given}, allowed 1 to {most}")]
    BlockTokens { given: u32, most: u32 },
    /// A row arrives before all those among which the earliest was looked for.
    #[error(
        "{}: {row} arrives before each of the first {window_rows} rows, from the earliest of which times count: sort the \
         file by time first",
        file.display()
    )]
    FarOutOfOrder {
        file: PathBuf,
        row: String,
        /// Among how many rows the earliest was looked for.
        window_rows: usize,
    },
    /// No known format fits the beginning of the file.
    #[error("{}: no known trace format fits its first lines; name one with --format ({known})", file.display())]
    Unrecognised {
        file: PathBuf,
        /// The names of all formats.
        known: String,
    },
    /// A directory without session files, or with too many.
    #[error("{}: {found} session files (*.json); a directory may hold 1 to {limit}", file.display())]
    SessionFiles {
        /// The directory.
        file: PathBuf,
        found: usize,
        limit: usize,
    },
    /// A directory has a session file twice, in compressed form and not.
    #[error("{} and {} are one session twice: a directory may hold one of them", one.display(), other.display())]
    SessionTwice {
        /// One of the files.
        one: PathBuf,
        other: PathBuf,
    },
    /// One line, or one recorded request, is bad; the rest of the trace can still be read.
    #[error(transparent)]
    Line(#[from] LineError),
}

/// One bad line, or one bad request of a session file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LineError {
    pub file: Arc<Path>,
    pub place: Place,
    pub problem: Problem,
}

impl std::error::Error for LineError {}

impl fmt::Display for LineError {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{}: {}: {}", self.file.display(), self.place, self.problem)
    }
}

/// A place in a trace file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    /// A line, from 1.
    Line(u64),
    /// A session file before its requests begin.
    Header,
    /// A request of a session file, from 1.
    Request(u64),
}

impl fmt::Display for Place {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Place::Line(number) => write!(out, "line {number}"),
            Place::Header => write!(out, "before the requests"),
            Place::Request(number) => write!(out, "request {number}"),
        }
    }
}

/// What is wrong at one place.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Problem {
    /// More bytes than a reader is willing to hold at once.
    #[error("longer than {limit_bytes} bytes")]
    TooLong { limit_bytes: usize },
    /// Not JSON, or not CSV, at all.
    #[error("malformed: {0}")]
    Malformed(String),
    /// A field that the format requires is absent.
    #[error("{field}: missing")]
    Missing { field: String },
    /// A field has a wrong type or a value outside of what is allowed.
    #[error("{field}: {problem}")]
    Field {
        /// The field, with the index within it where there is one, such as `hash_ids[3]`.
        field: String,
        /// What was found and what is allowed.
        problem: String,
    },
}

impl Problem {
    pub(super) fn field(field: &str, problem: impl Into<String>) -> Problem {
        Problem::Field { field: field.into(), problem: problem.into() }
    }

    pub(super) fn missing(field: &str) -> Problem {
        Problem::Missing { field: field.into() }
    }
}

/// Parses one JSON object. Serde would also take an array with the fields in order.
pub(super) fn parse_object<'text, T: Deserialize<'text>>(text: &'text [u8]) -> Result<T, Problem> {
    match text.trim_ascii_start().first() {
        Some(b'{') => parse_json(text),
        _ => Err(Problem::Malformed("not a JSON object".into())),
    }
}

/// Parses one JSON text. Only a bad text is parsed a second time, to learn which field is to blame.
pub(super) fn parse_json<'text, T: Deserialize<'text>>(text: &'text [u8]) -> Result<T, Problem> {
    serde_json::from_slice(text).map_err(|error| explain::<T>(text, &error))
}

fn explain<'text, T: Deserialize<'text>>(text: &'text [u8], error: &serde_json::Error) -> Problem {
    let mut json = serde_json::Deserializer::from_slice(text);
    let path = match serde_path_to_error::deserialize::<_, T>(&mut json) {
        Err(blamed) => blamed.path().to_string(),
        Ok(_) => ".".into(),
    };
    let inside = (path != ".").then_some(path.as_str());
    // serde_json ends its messages with the position, whose line is always 1 here.
    let message = error.to_string();
    let message = message.split(" at line ").next().unwrap_or(&message);
    if !error.is_data() {
        return Problem::Malformed(format!("{message} at column {}", error.column()));
    }
    if let Some(field) = message.strip_prefix("missing field `").and_then(|rest| rest.strip_suffix('`')) {
        return Problem::missing(
            &inside.map_or_else(|| field.to_owned(), |outer| format!("{outer}.{field}")),
        );
    }
    Problem::field(inside.unwrap_or("line"), message)
}

#[cfg(test)]
mod tests {
    use super::{Problem, parse_object};
    use serde::Deserialize;

    #[derive(Debug, Deserialize)]
    #[expect(dead_code, reason = "only the parsing matters")]
    struct Row {
        timestamp: f64,
        hash_ids: Vec<u64>,
    }

    fn message(text: &str) -> String {
        parse_object::<Row>(text.as_bytes()).unwrap_err().to_string()
    }

    #[test]
    fn a_bad_line_names_the_field() {
        assert_eq!(message(r#"{"hash_ids":[]}"#), "timestamp: missing");
        assert_eq!(
            message(r#"{"timestamp":"x","hash_ids":[]}"#),
            "timestamp: invalid type: string \"x\", expected f64"
        );
        assert_eq!(
            message(r#"{"timestamp":1,"hash_ids":[1,-2]}"#),
            "hash_ids[1]: invalid value: integer `-2`, expected u64"
        );
    }

    #[test]
    fn what_is_not_json_says_where() {
        assert_eq!(message(r#"{"timestamp":1,"#), "malformed: EOF while parsing a value at column 15");
        assert!(matches!(parse_object::<Row>(b"\xff").unwrap_err(), Problem::Malformed(_)));
        assert_eq!(
            message(r#"{"timestamp":1,"hash_ids":[]} trailing"#),
            "malformed: trailing characters at column 31"
        );
    }

    #[test]
    fn another_kind_of_json_is_refused() {
        assert_eq!(message("[1,[]]"), "malformed: not a JSON object");
        assert_eq!(message("7"), "malformed: not a JSON object");
    }
}
