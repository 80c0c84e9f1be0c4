//! What the demo asks of the engines: a trace from a file, or a generated one.

use forebay_results::output::Error;
use forebay_trace::format::{ReadOptions, TraceReader};
use forebay_trace::generate::{Generator, Marginals, MarginalsError};
use forebay_trace::replay::Pacing;
use forebay_trace::request::{TraceRequest, sort_by_arrival};
use std::collections::HashSet;
use std::path::Path;

/// Requests to replay.
pub struct Workload {
    /// In the order of their arrival.
    pub requests: Vec<TraceRequest>,
    /// Closed loop where the trace records sessions, by its time stamps where it does not.
    pub pacing: Pacing,
    /// One line for people.
    pub description: String,
}

/// Why there is nothing to replay.
#[derive(Debug, thiserror::Error)]
#[error("{name}: no request could be read ({skipped} bad lines skipped)")]
pub struct EmptyTrace {
    name: String,
    skipped: u64,
}

impl Workload {
    /// Generates one of `marginals`, of which the first `limit` requests are kept.
    pub fn generate(marginals: &Marginals, limit: usize, seed: u64) -> Result<Workload, MarginalsError> {
        let requests: Vec<_> = Generator::new(marginals, seed)?.take(limit).collect();
        let description = format!(
            "Trace: {} requests of {} generated agent sessions (seed {seed}), closed loop with think times",
            requests.len(),
            marginals.sessions
        );
        Ok(Workload { requests, pacing: Pacing::Closed, description })
    }

    /// Reads the first `limit` requests of a trace. Sessions with a request of more than
    /// `context_tokens`, which no engine could take, are left out.
    pub fn read(path: &Path, limit: usize, context_tokens: usize) -> Result<Workload, Error> {
        let mut reader = TraceReader::open(path, ReadOptions::default())?;
        let mut requests = Vec::new();
        for request in reader.by_ref().take(limit) {
            requests.push(request?);
        }
        let too_long = leave_out_too_long(&mut requests, context_tokens);
        let (name, skipped) = (path.display().to_string(), reader.skipped().lines);
        if requests.is_empty() {
            return Err(EmptyTrace { name, skipped }.into());
        }
        let out_of_order = sort_by_arrival(&mut requests);
        let format = reader.format();
        let (pacing, how) = match format.records_sessions() {
            true => (Pacing::Closed, "closed loop with think times"),
            false => (Pacing::Open, "by their time stamps"),
        };
        let skipped = if skipped > 0 { format!(", {skipped} bad lines skipped") } else { String::new() };
        let sorted = match out_of_order {
            0 => String::new(),
            count => format!(", {count} out of order and sorted by arrival"),
        };
        let left_out = match too_long {
            0 => String::new(),
            count => format!(", {count} requests of sessions beyond {context_tokens} tokens left out"),
        };
        let description = format!(
            "Trace: {} requests of {name} ({format}), {how}{skipped}{sorted}{left_out}",
            requests.len()
        );
        Ok(Workload { requests, pacing, description })
    }
}

/// Removes sessions with a request that does not fit, and says how many requests that were.
fn leave_out_too_long(requests: &mut Vec<TraceRequest>, context_tokens: usize) -> usize {
    let tokens = |request: &TraceRequest| u64::from(request.input_tokens) + u64::from(request.output_tokens);
    let does_not_fit = requests.iter().filter(|request| tokens(request) > context_tokens as u64);
    let sessions: HashSet<String> = does_not_fit.map(|request| request.session.clone()).collect();
    let before = requests.len();
    requests.retain(|request| !sessions.contains(&request.session));
    before - requests.len()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_session_that_outgrows_the_context_is_left_out_whole() {
        let request = |session: &str, input_tokens| TraceRequest {
            session: session.into(),
            input_tokens,
            output_tokens: 10,
            ..TraceRequest::default()
        };
        let mut requests = vec![request("a", 80), request("b", 90), request("a", 91), request("b", 90)];
        assert_eq!(leave_out_too_long(&mut requests, 100), 2);
        assert!(requests.iter().all(|request| request.session == "b"));
    }
}
