//! Relays across processes: an engine sees one GPU, the node's process sees all of them and relays
//! for it. The engine's mover has one more path for each relay. Its hop between host memory and the
//! relay's staging is a request to the node ([`ring`]); the hop between staging and its own GPU is
//! its own, so whatever allocator the GPU's memory came from will do.
//!
//! - [`Relays`] is the node's side, [`Attachment`] the engine's.
//! - `ring`, `wire`: what they say to each other. `shared`, `socket`: memory and sockets that both
//!   have.

mod atomics;
mod attach;
mod control;
mod error;
mod handler;
mod link;
mod link_priority;
mod memory;
mod nonce;
mod pinned_files;
mod relay_paths;
mod relays_at;
pub mod ring;
mod serve;
mod server;
mod session;
mod shared;
mod socket;
mod staging;
mod supervisor;
#[cfg(test)]
pub(crate) mod tests;
mod wire;

pub use attach::Attachment;
pub use error::NotAttached;
pub(crate) use relay_paths::Ground;
pub use relays_at::{NodeRelays, RELAYS_VARIABLE, RelaysAt, TOKEN_VARIABLE};
pub use serve::{Relays, RelaysStat};
pub use server::{RelayError, RelaysConfig};
pub use session::OwnCopy;
pub use shared::{NotShared, SharedFile};
pub use supervisor::Status;
pub use wire::{Hex, Uuid};
