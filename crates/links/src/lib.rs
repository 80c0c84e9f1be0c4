//! Links that need no GPU: how bytes move over resources that every machine has.
//!
//! Knows system calls, instructions and threads that copy. Must never know what is scheduled when, or what the bytes mean:
//! operations come from the mover, with spans that only its memory table can resolve.

pub mod disk;
mod flips;
mod host;
mod log_gate;
pub mod mapped;
mod pending;
mod room;
pub mod tcp;
pub mod ucx;

pub use flips::{BitFlips, ChanceError};
pub use host::{HostLink, MAX_COPY_THREADS};
pub use log_gate::LogGate;
pub use pending::{Entry, GRACE_US, Pending};
pub use room::{Room, RoomPlace, RoomStat};
