//! The project's own JSONL, as `sample` and `generate` write it: each line is a [`TraceRequest`],
//! field by field.

use super::check::{Names, check, check_micros};
use super::error::{Problem, parse_object};
use super::parser::LineParser;
use crate::request::TraceRequest;
use std::io::{self, Write};

const NAMES: Names =
    Names { input: "input_tokens", output: "output_tokens", blocks: "blocks", other_size: "" };

pub(super) struct Own;

impl LineParser for Own {
    fn parse(&mut self, text: &[u8], _number: u64) -> Result<Option<TraceRequest>, Problem> {
        let request: TraceRequest = parse_object(text)?;
        check_micros("arrival_us", Some(request.arrival_us))?;
        check_micros("think_us", request.think_us)?;
        check_micros("service_us", request.service_us)?;
        check(request, &NAMES).map(Some)
    }
}

/// Writes one request as one line of the project's own format.
pub fn write_line(out: &mut impl Write, request: &TraceRequest) -> io::Result<()> {
    serde_json::to_writer(&mut *out, request)?;
    out.write_all(b"\n")
}
