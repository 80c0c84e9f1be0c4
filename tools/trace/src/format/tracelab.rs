//! TraceLab's session CSV: a round has the tokens that it keeps of the session so far
//! (`prefix_len`), those that it adds (`input_len`), those of its answer (`output_len`) and the
//! wait after it. It knows how kept tokens become prefix blocks, with a bounded memory of sessions.

use super::check::{FieldNames, MAX_TOKENS, check, micros};
use super::csv::{Columns, number_in, position_of, text_of, tokens_in};
use super::error::Problem;
use super::lines::LineParser;
use crate::latest::Latest;
use crate::request::TraceRequest;
use std::hash::RandomState;
use xxhash_rust::xxh3::xxh3_64_with_seed;

/// Kept tokens are rounded down to blocks of this size.
pub(super) const BLOCK_TOKENS: u32 = 64;
/// How many sessions are remembered. A round of an older one shares nothing with the rounds before
/// it.
const REMEMBERED_SESSIONS: usize = 1 << 16;
/// JSON readers that keep numbers as doubles would lose higher ids than 2^53.
const SPARE_BITS: u32 = 11;
/// Enough for the blocks of the longest prompt with its answer.
const POSITION_BITS: u32 = (2 * MAX_TOKENS / BLOCK_TOKENS).ilog2() + 1;

const SESSIONS: [&str; 2] = ["session_id", "id"];
const ROUND: &str = "round_idx";
const PREFIX: &str = "prefix_len";
const INPUT: &str = "input_len";
const OUTPUT: &str = "output_len";
const WAIT: &str = "tool_wait_after_ms";
const ARRIVAL: &str = "arrival_time";
const NAMES: FieldNames =
    FieldNames { input: "prefix_len + input_len", output: OUTPUT, blocks: "", other_size: "" };
const MILLIS_S: f64 = 1e-3;

pub(super) struct TraceLab {
    header: Option<Header>,
    sessions: Latest<String, Session, RandomState>,
}

struct Header {
    required: Columns<5>,
    wait: Option<Columns<1>>,
    arrival: Option<Columns<1>>,
}

/// What a session has said so far, as runs of blocks that one round added.
#[derive(Default)]
struct Session {
    wait_us: Option<u64>,
    /// The block after the last one of each run, ascending, and the line that added it.
    runs: Vec<(u32, u64)>,
}

/// Whether a line is the header of this format.
pub(super) fn is_header(text: &str) -> bool {
    Header::find(text).is_ok()
}

impl Header {
    fn find(header: &str) -> Result<Header, Problem> {
        let session = SESSIONS.into_iter().find(|name| position_of(header, name).is_some());
        let session = session.unwrap_or(SESSIONS[0]);
        let optional = |name| Columns::find(header, [name]).ok();
        let required = Columns::find(header, [session, ROUND, PREFIX, INPUT, OUTPUT])?;
        Ok(Header { required, wait: optional(WAIT), arrival: optional(ARRIVAL) })
    }
}

impl TraceLab {
    pub(super) fn new() -> TraceLab {
        TraceLab { header: None, sessions: Latest::new(REMEMBERED_SESSIONS) }
    }
}

impl LineParser for TraceLab {
    fn parse(&mut self, text: &[u8], number: u64) -> Result<Option<TraceRequest>, Problem> {
        let text = text_of(text)?;
        let Some(header) = &self.header else {
            self.header = Some(Header::find(text)?);
            return Ok(None);
        };
        let [name, turn, kept, added, answer] = header.required.cells(text)?;
        let millis = |column: &Option<Columns<1>>, field: &str| {
            let Some(column) = column else { return Ok(None) };
            let [cell] = column.cells(text)?;
            micros(field, number_in(field, cell)?, MILLIS_S).map(Some)
        };
        let (arrival_us, wait_us) = (millis(&header.arrival, ARRIVAL)?, millis(&header.wait, WAIT)?);
        let (kept, output_tokens) = (tokens_in(PREFIX, kept)?, tokens_in(OUTPUT, answer)?);
        let request = TraceRequest {
            session: name.to_owned(),
            turn: tokens_in(ROUND, turn)?,
            arrival_us: arrival_us.unwrap_or(0),
            input_tokens: kept.saturating_add(tokens_in(INPUT, added)?),
            output_tokens,
            block_tokens: BLOCK_TOKENS,
            ..TraceRequest::default()
        };
        let mut request = check(request, &NAMES)?;
        let session = self.sessions.or_default(name.to_owned());
        request.think_us = session.wait_us;
        session.wait_us = wait_us;
        request.blocks = session.blocks(number, kept, &request);
        Ok(Some(request))
    }
}

impl Session {
    /// The whole blocks of the prompt on this line, which keeps `kept` tokens of the session.
    fn blocks(&mut self, line: u64, kept: u32, request: &TraceRequest) -> Vec<u64> {
        let kept = kept / BLOCK_TOKENS;
        self.runs.iter_mut().for_each(|(end, _)| *end = (*end).min(kept));
        self.runs.dedup_by_key(|(end, _)| *end);
        self.runs.retain(|(end, _)| *end > 0);
        // Both are at most 2^24.
        self.runs.push(((request.input_tokens + request.output_tokens) / BLOCK_TOKENS, line));
        let (mut runs, mut ids) = (self.runs.iter().peekable(), Vec::new());
        for position in 0..request.input_tokens / BLOCK_TOKENS {
            while runs.next_if(|(end, _)| *end <= position).is_some() {}
            let Some((_, line)) = runs.peek() else { break };
            let seed = line << POSITION_BITS | u64::from(position);
            ids.push(xxh3_64_with_seed(request.session.as_bytes(), seed) >> SPARE_BITS);
        }
        ids
    }
}

#[cfg(test)]
mod tests {
    use super::{Latest, LineParser, TraceLab, TraceRequest};

    fn read(rows: &[&str]) -> Vec<TraceRequest> {
        let mut parser = TraceLab::new();
        (1..).zip(rows).filter_map(|(line, row)| parser.parse(row.as_bytes(), line).unwrap()).collect()
    }

    fn common(one: &TraceRequest, other: &TraceRequest) -> usize {
        one.blocks.iter().zip(&other.blocks).take_while(|(one, other)| one == other).count()
    }

    #[test]
    fn a_round_shares_what_it_keeps_and_waits_as_the_one_before_it_says() {
        let requests = read(&[
            "session_id,round_idx,prefix_len,input_len,output_len,tool_wait_after_ms",
            "a,0,0,640,64,1500",
            "b,0,0,640,64,0",
            "a,1,704,128,10,2000.5",
            "a,2,320,100,5,0",
        ]);
        let shown: Vec<_> =
            requests.iter().map(|r| (r.session.as_str(), r.turn, r.input_tokens, r.think_us)).collect();
        assert_eq!(
            shown,
            [
                ("a", 0, 640, None),
                ("b", 0, 640, None),
                ("a", 1, 832, Some(1_500_000)),
                ("a", 2, 420, Some(2_000_500)),
            ]
        );
        assert_eq!(requests.iter().map(|r| r.blocks.len()).collect::<Vec<_>>(), [10, 10, 13, 6]);
        assert_eq!(common(&requests[0], &requests[1]), 0, "sessions share nothing");
        assert_eq!(common(&requests[0], &requests[2]), 10);
        assert_eq!(common(&requests[2], &requests[3]), 5, "320 tokens are kept, and the rest is new");
    }

    #[test]
    fn a_prefix_from_before_the_trace_is_a_prefix_of_its_own() {
        let requests = read(&[
            "id,input_len,output_len,arrival_time,round_idx,tool_wait_after_ms,prefix_len",
            "a,100,10,250,5,100,6400",
            "a,100,10,250,6,100,6510",
        ]);
        assert_eq!((requests[0].arrival_us, requests[0].input_tokens, requests[0].turn), (250_000, 6_500, 5));
        assert_eq!((requests[0].blocks.len(), common(&requests[0], &requests[1])), (101, 101));
    }

    #[test]
    fn the_memory_of_sessions_is_bounded() {
        let mut parser = TraceLab { sessions: Latest::new(2), ..TraceLab::new() };
        let mut line = 0;
        let mut read = |row: &str| {
            line += 1;
            parser.parse(row.as_bytes(), line).unwrap()
        };
        read("id,round_idx,prefix_len,input_len,output_len");
        let first = read("a,0,0,640,0").unwrap();
        read("b,0,0,640,0");
        read("c,0,0,640,0");
        let later = read("a,1,640,640,0").unwrap();
        assert_eq!((common(&first, &later), later.blocks.len()), (0, 20));
        assert_eq!(parser.sessions.lengths(), (2, 2));
    }
}
