//! The seam between the disk link and the system: what an I/O is, and who carries it out. This file
//! knows requests and results as the kernel states them.
//!
//! There are two drivers in production, [`uring`](super::uring) and [`threads`](super::threads).
//! Tests put a third in front of them, which fails on purpose, so that no code in production knows
//! of injected faults.

use forebay_transfer::Waker;
use std::io;
use std::ptr::NonNull;

/// What an I/O does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    /// From the file into the slices.
    Read,
    /// From the slices into the file.
    Write,
}

/// One I/O.
#[derive(Debug, Clone, Copy)]
pub struct Request {
    /// What to do.
    pub action: Action,
    /// First byte in the file.
    pub offset: u64,
    /// The memory, in the order of the file's bytes.
    pub slices: *const libc::iovec,
    /// How many slices there are, at most [`SLICES_MAX`](super::SLICES_MAX).
    pub slice_count: u32,
}

// SAFETY: whoever starts a request promises that its slices are valid until it completed, on
// whichever thread.
unsafe impl Send for Request {}

/// How an I/O ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Completed {
    /// As given to [`Kernel::start`].
    pub key: u64,
    /// Bytes, or a negated `errno`.
    pub result: i32,
}

/// Carries out I/Os on one file. Owned by one thread.
///
/// # Safety
///
/// A request must complete exactly once, only after nothing can touch its slices any more, and its
/// result must not claim more bytes than were transferred. Dropping the kernel must wait until all
/// requests are quiet.
pub unsafe trait Kernel: Send {
    /// Takes a request in. It may start at once or with the next [`wait`](Kernel::wait).
    ///
    /// # Safety
    ///
    /// The slices, the memory behind them and the file must stay valid until `key` completed or the
    /// kernel was dropped. No more requests may be under way than the kernel was made for.
    unsafe fn start(&mut self, key: u64, request: Request);

    /// Starts what was taken in, sleeps until something completed or somebody used the [`Waker`],
    /// and appends what completed. An error means that the system call for waiting failed; requests
    /// are under way as before.
    fn wait(&mut self, completed: &mut Vec<Completed>) -> io::Result<()>;

    /// Has the system pin `len` bytes at `start` once, so that requests of one slice inside of them
    /// need not. An error leaves everything working as before, or some of the bytes pinned.
    ///
    /// # Safety
    ///
    /// The memory must stay valid, and the same, until the kernel was dropped.
    unsafe fn pin(&mut self, start: NonNull<u8>, len: usize) -> io::Result<()> {
        let _ = (start, len);
        Err(io::ErrorKind::Unsupported.into())
    }

    /// What interrupts a wait.
    fn waker(&self) -> Waker;

    /// The driver's name, for logs and reports.
    fn name(&self) -> &'static str;
}
