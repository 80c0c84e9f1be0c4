//! An emulated inference engine: it speaks OpenAI's API, schedules like vLLM's V1 engine, takes the
//! time that the step model says a GPU would take, and keeps KV bytes that can be checked.
//!
//! It knows what an engine does with tokens, blocks and time.

mod arrivals;
mod clock;
mod compute;
mod device;
mod engine;
pub mod events;
mod external;
pub mod hand_over;
mod handing;
mod http;
mod job;
mod load_policy;
pub mod scheduler;
pub mod stats;
pub mod text;
pub mod truth;
mod worker;

pub use engine::{Engine, EngineConfig, EngineHandle, SpawnError, namespace};
pub use external::StoreConnection;
