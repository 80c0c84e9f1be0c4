//! BurstGPT's CSV: a header, then Timestamp in seconds, Request tokens and Response tokens; other
//! columns are ignored. A response of no tokens is a request that failed. There is no prefix
//! information, and each row is a session of its own.

use super::check::{Names, check, micros};
use super::csv::{Columns, number_in, text_of, tokens_in};
use super::error::Problem;
use super::parser::LineParser;
use crate::request::TraceRequest;

const TIME: &str = "Timestamp";
const INPUT: &str = "Request tokens";
const OUTPUT: &str = "Response tokens";
const NAMES: Names = Names { input: INPUT, output: OUTPUT, blocks: "", other_size: "" };

pub(super) struct BurstGpt {
    unit_s: f64,
    columns: Option<Columns<3>>,
}

/// Whether a line is the header of this format.
pub(super) fn is_header(text: &str) -> bool {
    columns(text).is_ok()
}

fn columns(header: &str) -> Result<Columns<3>, Problem> {
    Columns::find(header, [TIME, INPUT, OUTPUT])
}

impl BurstGpt {
    /// Times are in units of `unit_s` seconds.
    pub(super) fn new(unit_s: f64) -> BurstGpt {
        BurstGpt { unit_s, columns: None }
    }
}

impl LineParser for BurstGpt {
    fn parse(&mut self, text: &[u8], number: u64) -> Result<Option<TraceRequest>, Problem> {
        let text = text_of(text)?;
        let Some(found) = &self.columns else {
            self.columns = Some(columns(text)?);
            return Ok(None);
        };
        let [time, input, output] = found.cells(text)?;
        let request = TraceRequest {
            session: format!("line-{number}"),
            arrival_us: micros(TIME, number_in(TIME, time)?, self.unit_s)?,
            input_tokens: tokens_in(INPUT, input)?,
            output_tokens: tokens_in(OUTPUT, output)?,
            ..TraceRequest::default()
        };
        check(request, &NAMES).map(Some)
    }
}
