//! The span that a caller works for, as Python has it: a `traceparent`.

use forebay_transfer::TraceContext;

/// The span, if somebody records it. What the standard does not allow is ignored, as it says.
pub fn within(traceparent: Option<&str>) -> Option<TraceContext> {
    TraceContext::parse(traceparent?).filter(|trace| trace.sampled)
}
