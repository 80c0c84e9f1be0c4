//! One request as a trace records it, in the one form that every reader produces and everything
//! else consumes; and the order of arrival, which a replay needs and files may not have: some are
//! written when requests end.

use crate::number;
use serde::{Deserialize, Serialize};

/// One request of a trace. Times are microseconds of trace time. Its JSON, one object a line, is
/// the project's own trace format: absent options and an empty `blocks` are left out.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TraceRequest {
    /// Names the conversation; requests of a trace without conversations each have their own.
    pub session: String,
    /// For the session of a sub-agent: the top-level session that it works for, however deeply it
    /// is nested.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parent_session: Option<String>,
    /// Position within the session, from 0.
    pub turn: u32,
    /// Arrival, from the start of the trace.
    pub arrival_us: u64,
    /// Pause between the end of the previous turn's answer and this request, where the trace
    /// records it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub think_us: Option<u64>,
    /// How long the recorded service took to answer, where the trace records it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub service_us: Option<u64>,
    #[serde(deserialize_with = "number::tokens")]
    pub input_tokens: u32,
    #[serde(deserialize_with = "number::tokens")]
    pub output_tokens: u32,
    /// How many tokens at the start of the prompt are tool definitions and system prompt, where the
    /// trace records it.
    #[serde(default, deserialize_with = "number::optional_tokens", skip_serializing_if = "Option::is_none")]
    pub system_tokens: Option<u32>,
    /// Tokens per prefix block; 0 in traces without prefix information.
    #[serde(default, deserialize_with = "number::tokens")]
    pub block_tokens: u32,
    /// One id per prefix block, in order, unique over the whole trace: equal ids at equal positions
    /// after equal predecessors are the same KV. Some formats name only whole blocks, so that up to
    /// a block of the prompt has no id; in others the last block may be partial. Empty in traces
    /// without prefix information.
    #[serde(default, deserialize_with = "number::ids", skip_serializing_if = "Vec::is_empty")]
    pub blocks: Vec<u64>,
}

impl TraceRequest {
    /// The top-level session that the request belongs to: its own, or the one that its sub-agent
    /// works for.
    pub fn root_session(&self) -> &str {
        self.parent_session.as_deref().unwrap_or(&self.session)
    }
}

/// Counts requests that stand behind one that arrives later.
#[derive(Debug, Clone, Copy, Default)]
pub struct OutOfOrder {
    latest_us: u64,
    count: usize,
}

impl OutOfOrder {
    /// Takes the next request of the file.
    pub fn add(&mut self, request: &TraceRequest) {
        self.count += usize::from(request.arrival_us < self.latest_us);
        self.latest_us = self.latest_us.max(request.arrival_us);
    }

    pub fn count(self) -> usize {
        self.count
    }
}

/// Puts requests into the order of their arrival, and those that arrive together into the order of
/// the file. Says how many stood behind one that arrives later.
pub fn sort_by_arrival(requests: &mut [TraceRequest]) -> usize {
    let mut out_of_order = OutOfOrder::default();
    requests.iter().for_each(|request| out_of_order.add(request));
    if out_of_order.count() > 0 {
        requests.sort_by_key(|request| request.arrival_us);
    }
    out_of_order.count()
}

#[cfg(test)]
mod tests {
    use super::{TraceRequest, sort_by_arrival};

    #[test]
    fn sorting_keeps_the_order_of_what_arrives_together_and_says_how_much_it_moved() {
        let request =
            |(turn, arrival_us): (u32, u64)| TraceRequest { turn, arrival_us, ..TraceRequest::default() };
        let mut requests = [(0, 20), (1, 0), (2, 5), (3, 5), (4, 30)].map(request);
        assert_eq!(sort_by_arrival(&mut requests), 3);
        assert_eq!(requests.each_ref().map(|request| request.turn), [1, 2, 3, 0, 4]);
        assert_eq!(sort_by_arrival(&mut requests), 0);
    }
}
