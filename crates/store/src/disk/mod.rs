//! The disk link: a preallocated file or raw partition, read and written directly (`O_DIRECT`) by
//! io_uring, or by threads where io_uring is forbidden.
//!
//! Pure parts: `plan` turns an operation into vectored I/Os, `progress` judges results, `flights`
//! keeps operations until every I/O of theirs has ended, [`pacer`](WriteBackPacer) bounds
//! write-back by the latency that reads see. Drivers:
//! [`Uring`] and [`Threads`], behind [`Kernel`]. Glue: [`DiskLink`] and its thread. Knows files and
//! system calls; must never know what is kept in a file, or who waits for which bytes.

mod file;
mod flights;
mod kernel;
mod link;
mod pacer;
mod pinned;
mod plan;
mod progress;
mod regions;
mod stats;
mod threads;
mod uring;
mod worker;

pub use file::{DiskError, DiskFile, sync_directory};
pub use flights::DiskFault;
pub use kernel::{Action, Completed, Kernel, Request};
pub use link::{DISK_DEPTH_MAX, DiskHandle, DiskLink, DiskOptions, Driver, IO_BYTES_MAX};
pub use pacer::{PacerLimits, WriteBackPacer};
pub use plan::{DISK_ALIGN_BYTES, SLICES_MAX};
pub use progress::{Errno, FaultKind, IDLE_RESULTS_MAX};
pub use stats::DiskStats;
pub use threads::{DISK_THREADS_MAX, Threads};
pub use uring::Uring;
