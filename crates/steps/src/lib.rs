//! How long an engine's steps take: the step model, and profiles with its constants for models on
//! GPUs. It knows tokens, contexts and constants. It knows no engine, no clock and no request.
//!
//! The emulator takes its time from here, and the router weighs its choices by it.

mod model;
mod profile;

pub use model::{Launch, StepModel, StepShare};
pub use profile::{
    ApiCosts, HostLinkFacts, MemoryFacts, ModelFacts, Profile, ProfileError, SchedulerFacts, StepCosts,
};
