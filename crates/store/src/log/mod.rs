//! The log: chunks on disk in segments, and everything that brings them back after a crash.
//!
//! `format/` is the bytes. [`DiskTier`] is the state: `segments` gives slots to chunks,
//! `volume_state` holds what is not yet durable, `commit` makes it durable, `open` and `recovery`
//! bring it back, `reclaim` empties segments, `scrub` overwrites what is gone, `withdraw` gives
//! space back. None of it does I/O on chunks; [`Medium`] is the little that it asks of a disk when
//! it is opened. `offline` drives a tier for tools; `inspect` and `verify` look at a log without
//! changing it, `rebuild` helps one that lost its checkpoints, and `unreadable` one of which pages
//! can never be read.

mod commit;
mod format;
mod inspect;
mod medium;
mod offline;
mod open;
mod rebuild;
mod reclaim;
mod recovery;
mod scrub;
mod segments;
mod tier;
mod unreadable;
mod verify;
mod volume_state;
mod withdraw;

pub use crate::checksum::crc32c;
pub use commit::{Commit, Pages};
pub use format::*;
pub use inspect::{ChunkInLog, Inspection, SegmentCounts, TenantInLog, inspect};
pub use medium::{Medium, VolumeSpace};
pub use offline::{Offline, OfflineError};
pub use rebuild::{NotRebuilt, Rebuilt, rebuild};
pub use reclaim::{Relocation, RelocationEnd};
pub use recovery::{Recovered, read_superblock};
pub use scrub::Scrub;
pub use segments::{DiskPlace, LogSlot, Segments};
pub use tier::{DiskBegun, DiskRead, DiskStat, DiskTier, DiskTierConfig, DiskUse, DiskWrite};
pub use unreadable::{GivenUp, NotReopened, PageUse, Reopened, give_up_unreadable};
pub use verify::{ChunkFault, Verified, verify};
pub use withdraw::Withdrawal;
