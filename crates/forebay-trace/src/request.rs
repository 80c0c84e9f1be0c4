//! One request as a trace records it, in the one form that every reader produces and everything else consumes.
//! It knows lengths, times and prefix blocks; it must never know which format a request came from.

/// One request of a trace. Times are microseconds of trace time.
#[derive(Debug, Clone, PartialEq)]
pub struct TraceRequest {
    /// Names the conversation; requests of a trace without conversations each have their own.
    pub session: String,
    /// Position within the session, from 0.
    pub turn: u32,
    /// Arrival, from the start of the trace.
    pub arrival_us: u64,
    /// Pause between the end of the previous turn's answer and this request, where the trace records it.
    pub think_us: Option<u64>,
    /// Length of the prompt in tokens.
    pub input_tokens: u32,
    /// Length of the answer in tokens.
    pub output_tokens: u32,
    /// Tokens per prefix block; 0 in traces without prefix information.
    pub block_tokens: u32,
    /// One id per prefix block, in order, unique over the whole trace: equal ids at equal positions after equal
    /// predecessors are the same KV. The last block may be partial. Empty in traces without prefix information.
    pub blocks: Vec<u64>,
}
