//! Spans of sampled work, and their way to an OpenTelemetry collector over OTLP/HTTP.
//!
//! Whoever works has an [`ActiveSpan`], if its work is sampled. [`Spans`] keeps what has ended, a
//! bounded number, until [`Push`] has sent it. A collector that is down harms nobody: its spans
//! wait, and those for which there is no room are dropped and counted.

mod active_span;
pub mod endpoint;
pub mod json;
mod push;
mod spans;

pub use active_span::ActiveSpan;
pub use json::Resource;
pub use push::{MetricsBody, Push, PushConfig, PushCounts, PushError, unix_ns};
pub use spans::{Span, SpanKind, Spans};
