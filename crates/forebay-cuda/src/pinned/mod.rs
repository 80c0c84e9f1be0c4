//! Pinned host memory: a pool of it that is kept, because pinning costs more than copying, and memory of others that is
//! pinned where it lies. This folder knows pages and registrations; it must never know what is copied or why.
//!
//! - [`PinnedPool`]: slabs that are pinned once, lent as [`PinnedBuffer`]s.
//! - [`Registered`]: memory that was there already.

mod error;
mod mapping;
mod pin;
mod pool;
mod space;

pub use error::PinError;
pub use pin::{MOST_BYTES, Pin, Registered};
pub use pool::{PinnedBuffer, PinnedPool, PoolConfig, PoolCounters};
pub use space::Full;
