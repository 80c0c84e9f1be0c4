//! Pinned host memory: a pool of it that is kept, because pinning costs more than copying, and
//! memory of others that is pinned where it lies.
//!
//! - [`PinnedPool`]: slabs that are pinned once, lent as [`PinnedBuffer`]s.
//! - [`PinnedBehind`]: memory that was there already, while it is in use.
//! - [`publish`]: says that memory may be mapped by other processes too, as that of a shared pool
//!   may.

mod behind;
mod error;
mod mapping;
mod pin;
mod pool;
mod published;
mod space;

pub use behind::{OnPinned, PinnedBehind};
pub use error::PinError;
pub use pin::{MOST_BYTES, PIECE_BYTES_MAX, Pin};
pub use pool::{PinnedBuffer, PinnedPool, PoolConfig, PoolCounters};
pub(crate) use published::{OnChange, on_change, published};
pub use published::{Published, Shareable, publish};
pub use space::Full;
