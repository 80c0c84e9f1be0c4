//! Engines with their tiers and a router on a virtual clock: what a policy would do with a trace,
//! without a GPU and within seconds.
//!
//! The router decides with `forebay_router::policy::choose` on its own bookkeeping; engines
//! schedule as vLLM does and take the time of `forebay_steps::StepModel`. `docs/simulate.md` says
//! how it is used, and how far it is right.

pub mod arm;
mod cache;
pub mod cluster;
mod decoding;
pub mod engine;
mod link;
pub mod prefixes;
pub mod report;
pub mod router;
pub mod scenario;
mod sent;
pub mod sessions;
pub mod workload;
