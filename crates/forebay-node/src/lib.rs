//! The node: the process of each host that holds KV for the engines of that host and for other nodes.
//!
//! Knows which chunks are where, on this host and elsewhere, and who may have them. Must never know what KV means, or
//! how bytes are moved: copies are transfers that the mover carries out.

mod bytes;
pub mod client;
pub mod directory;
mod endpoint;
mod hex;
#[expect(dead_code, reason = "the end of the node follows")]
mod local;
pub mod metrics;
