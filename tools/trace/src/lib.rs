//! What the traffic was: trace formats, the sampler, the generator, the replayer and the report.
//!
//! This crate knows requests as traces record them (lengths, arrival times, prefix blocks) and what
//! came of replaying them.

pub mod format;
pub mod generate;
pub mod info;
mod latest;
mod number;
pub mod prefix;
pub mod quantile;
pub mod record;
pub mod replay;
pub mod report;
pub mod request;
pub mod reuse;
pub mod roofline;
pub mod sample;
pub mod tiers;
pub mod tokens;
mod units;
