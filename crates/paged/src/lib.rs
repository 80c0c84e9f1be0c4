//! An engine's paged KV cache, and its way to the node of the host. Connectors are made of it.
//!
//! [`PagedCache`] begins loads and stores and says what has ended. [`load`] is one load, `store`
//! one store. [`cache`] and [`pages`] say which bytes of a chunk belong into which page,
//! [`cost_model`] what is worth loading. [`copies`] is the contract of whoever copies: the mover in
//! host memory, streams on a GPU. [`direct`] hands over past the node.

/// The tests' rig, which is of the tests outside, is used inside too.
#[cfg(test)]
extern crate self as forebay_paged;

mod access;
mod busy_time;
pub mod cache;
pub mod copies;
pub mod cost_model;
pub mod direct;
mod errors;
mod gpu;
mod host;
mod jobs;
mod limiter;
pub mod load;
pub mod page_tables;
mod paged;
pub mod pages;
mod shared;
mod stats;
mod store;
mod thread_pool;
mod verify;

pub use errors::{NotBegun, NotOpened};
pub use gpu::CudaCopies;
pub use host::HostCopies;
pub use jobs::{JobStored, Measured};
pub use load::{LoadEnd, LoadRequest, LoadStall};
pub use paged::{CHUNKS_MAX, LOADS_MAX, PagedCache, PagedOptions, STORING_BYTES_MAX};
pub use stats::Stats;
pub use store::NewChunk;
pub use verify::{BadVerify, Verify};
