//! Where requests go: the router in front of several engines.
//!
//! It passes OpenAI's HTTP API on as bytes, and chooses engines by their load and by what their
//! caches presumably hold. It has no tokenizer: prompts are bytes, and what was cached is what
//! answers say.
//!
//! Three layers:
//! * Pure: `policy` (who gets a request, by a `view`, an `engine_model`, `prefill` and
//!   `added_latency`), `prediction` (how long it will take), `slo` (how long it may),
//!   `decision_replay` (of a log, by other policies), `chain`, `shadow_cache`, `prefix` and
//!   `store_index` (who is believed to hold what), `tokens`, `health`, `engine_metrics` (by
//!   `prometheus_text`) and `reported_load` (what engines say of their load), `kv_event_batch`,
//!   `live_blocks`, `rank_events` and `reported_cache` (what they say of their caches), `slots`,
//!   `models`, `dispatcher` (all of that as one state, with time as an argument), `membership`
//!   (which engines come and go), `routes` (what is done with which path), `json`, `request`,
//!   `media`, `sse`, `encoding`, `usage`, `reader` (bodies and streams as bytes), and
//!   `ext_proc::stream` (a request as Envoy tells it).
//! * Drivers: `upstream` (connections to engines), `stall` (a guard on clients' sockets), `body`
//!   (of a request), `probe`, `scrape` (of metrics), `zmtp` and `kv_events`, `listing` (of models),
//!   `sources` and `kubernetes` (of engines), `request_log` and `decision_log` (by `line_log` and
//!   `rotating_file`).
//! * Glue: `proxy` (the journey of a request), `prepare` (what is made of it), `attempts` (at
//!   engines), `asking` (one of them), `relay` (of an answer), `request_trace` (its spans),
//!   `pages`: `local` (the router's own) and `admin` (by an `admin_token`), `engine`, `engines`,
//!   `state`, `log_lines`, `starting`, `threads`, `clients`, `server`.
//! * `ext_proc`: the same choice for an Envoy that carries the requests itself.
//!
//! [`Router::spawn`] starts a router in this process, [`Epp::spawn`] an endpoint picker.
//! [`policy::choose`] needs neither.

mod added_latency;
mod admin;
mod admin_token;
mod asking;
mod attempts;
mod body;
mod chain;
mod clients;
mod config;
mod decision_log;
mod decision_replay;
mod decisions;
mod dispatcher;
pub mod distinct_chunks;
pub mod elastic;
mod encoding;
mod engine;
mod engine_metrics;
mod engine_model;
mod engines;
mod event_address;
mod ext_proc;
mod generations;
mod hand_over;
mod health;
mod json;
mod kubernetes;
mod kv_event_batch;
mod kv_events;
mod kv_hints;
mod line_log;
mod listing;
mod live_blocks;
mod local;
mod log_lines;
mod media;
mod membership;
mod metrics;
mod models;
mod pages;
pub mod policy;
mod prediction;
pub mod prefill;
mod prefix;
mod prepare;
mod probe;
pub mod prometheus_text;
mod proxy;
mod rank_events;
mod reader;
mod refusal;
mod relay;
mod reported_cache;
mod reported_load;
mod request;
mod request_log;
mod request_trace;
mod respond;
mod rewrite;
mod rotating_file;
mod routes;
mod scrape;
mod server;
mod shadow_cache;
mod slo;
mod slots;
mod sources;
mod sse;
mod stall;
mod starting;
mod state;
mod stats;
mod store_index;
mod threads;
mod tokens;
pub mod transfers;
mod upstream;
mod usage;
mod view;
mod zmtp;

pub use admin_token::AdminToken;
pub use config::{Backend, ConfigError, Limits, RouterConfig};
pub use decision_log::{DecisionLine, DecisionLogPlace, Line, LineError};
pub use decision_replay::{Accuracy, Figures, Judgement, Replay, ReplayError, Replayed, judge};
pub use decisions::{CandidateRecord, DecisionRecord, Outcome};
pub use decisions::{HandOverRecord, HandedRecord, OptionRecord, PrefilledRecord};
pub use dispatcher::HandOverConfig;
pub use engine_model::EngineModel;
pub use engines::{AddError, MembershipError};
pub use event_address::{EventAddress, EventAddressError};
pub use ext_proc::{Epp, EppConfig, EppHandle};
pub use hand_over::{HandOverEnd, Protocol};
pub use health::Failure;
pub use kubernetes::{ApiError, ApiPlace, Discovery, DiscoveryError, PoolName, SharedStore};
pub use policy::Policy;
pub use prediction::Prediction;
pub use request_log::RequestLogPlace;
pub use request_trace::TraceConfig;
pub use server::{Router, RouterHandle};
pub use slo::{RefusalReason, Slo};
pub use sources::FileError;
pub use starting::StartError;
pub use stats::{BackendStats, RouterStats, StoreStats};
pub use tokens::AnswerTokens;
