//! An emulated inference engine: it speaks OpenAI's API, schedules like vLLM's V1 engine, takes the
//! time that a latency model says a GPU would take, and keeps KV bytes that can be checked.
//!
//! It knows what an engine does with tokens, blocks and time.

mod clock;
mod compute;
mod device;
mod engine;
pub mod events;
mod external;
mod http;
mod job;
pub mod latency;
mod load_policy;
pub mod profile;
pub mod scheduler;
pub mod stats;
pub mod text;
pub mod truth;
mod worker;

pub use engine::{Engine, EngineConfig, EngineHandle, SpawnError};
pub use external::StoreConnection;
