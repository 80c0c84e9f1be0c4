//! An engine's paged KV cache, and its way to the node of the host.
//!
//! Knows pages, layers, chunks and streams: which bytes of a chunk belong into which page, when a layer is there, how many
//! tokens of a load may be used, and what is worth loading. Must never know an engine's scheduler, nor how the node finds, keeps
//! or fetches a chunk.
//!
//! The core is pure: [`cache`] and [`pages`] have the arithmetic, [`load`] the state of a load, [`cost_model`] what computing costs.
//! Who copies is behind [`copies`]: the mover in host memory, streams on a GPU. [`PagedCache`] holds it together.

/// The tests' rig, which is of the tests outside, is used inside too.
#[cfg(test)]
extern crate self as forebay_paged;

mod bubble;
pub mod cache;
pub mod copies;
pub mod cost_model;
mod door;
#[cfg(test)]
#[path = "../../cuda/tests/fake/mod.rs"]
mod fake;
mod gpu;
mod host;
mod jobs;
pub mod load;
mod loading;
mod paged;
pub mod pages;
mod patience;
mod stats;
mod storing;
mod window;
mod workers;

pub use bubble::Bubble;
pub use gpu::CudaCopies;
pub use host::HostCopies;
pub use jobs::{JobStored, LoadEnd, Measured};
pub use loading::Wish;
pub use paged::{CHUNKS_MAX, LOADS_MAX, NotBegun, NotOpened, PagedCache, PagedOptions, STORING_BYTES_MAX};
pub use stats::Stats;
pub use storing::NewChunk;
