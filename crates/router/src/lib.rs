//! Where requests go: the router in front of several engines.
//!
//! It passes OpenAI's HTTP API on as bytes, and chooses engines by their load and by what their
//! caches presumably hold. It has no tokenizer: prompts are bytes, and what was cached is what
//! answers say.
//!
//! Three layers:
//! * Pure: `policy` (who gets a request, by a `view`, an `engine_model` and `added_latency`),
//!   `prediction` (how long it will take), `decision_replay` (of a log, by other policies),
//!   `prefix` (who is believed to hold what), `tokens`, `health`, `models`, `dispatcher` (all of that as one state, with time as an argument), `routes` (what is done
//!   with which path), and `json`, `request`, `media`, `sse`, `encoding`, `usage` (bodies and streams as
//!   bytes).
//! * Drivers: `upstream` (connections to engines), `stall` (a guard on clients' sockets), `probe`,
//!   `listing` (of models), `request_log` and `decision_log` (by `line_log` and `rotating_file`).
//! * Glue: `proxy` (the journey of a request), `attempts` (at engines), `relay` (of an answer),
//!   `local`
//!   (the router's own pages), `engines`, `state`, `log_lines`, `server`.
//!
//! [`Router::spawn`] starts a router in this process. [`policy::choose`] needs none of it.

mod added_latency;
mod attempts;
mod config;
mod decision_log;
mod decision_replay;
mod decisions;
mod dispatcher;
mod encoding;
mod engine_model;
mod engines;
mod generations;
mod health;
mod json;
mod line_log;
mod listing;
mod local;
mod log_lines;
mod media;
mod metrics;
mod models;
pub mod policy;
mod prediction;
mod prefix;
mod probe;
mod proxy;
mod refusal;
mod relay;
mod request;
mod request_log;
mod respond;
mod rotating_file;
mod routes;
mod server;
mod sse;
mod stall;
mod state;
mod stats;
mod tokens;
mod upstream;
mod usage;
mod view;

pub use config::{Backend, ConfigError, Limits, RouterConfig};
pub use decision_log::{DecisionLogPlace, Line, LineError};
pub use decision_replay::{Accuracy, Figures, Replay, ReplayError, Replayed};
pub use decisions::{CandidateRecord, DecisionRecord, Outcome};
pub use engine_model::EngineModel;
pub use health::Failure;
pub use policy::Policy;
pub use prediction::Prediction;
pub use request_log::RequestLogPlace;
pub use server::{Router, RouterHandle, StartError};
pub use stats::{BackendStats, RouterStats};
