//! A descriptor that becomes readable when there is something to look at, for programs with an
//! event loop. It does not exist, and costs nothing, until somebody asks for it.

use rustix::event::{EventfdFlags, eventfd};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use std::io;
use std::sync::OnceLock;

/// Something may have happened.
#[derive(Debug, Default)]
pub(crate) struct Event(OnceLock<OwnedFd>);

impl Event {
    /// The descriptor. Readable at once when it is new, since something may have happened before.
    pub fn fd(&self) -> io::Result<BorrowedFd<'_>> {
        if let Some(fd) = self.0.get() {
            return Ok(fd.as_fd());
        }
        let fd = eventfd(1, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(self.0.get_or_init(|| fd).as_fd())
    }

    /// Something has happened.
    pub fn set(&self) {
        if let Some(fd) = self.0.get() {
            // It fails only when 2^64 - 2 events wait, and then it is readable.
            let _ = rustix::io::write(fd, &1u64.to_ne_bytes());
        }
    }

    /// Everything that happened before is being looked at.
    pub fn clear(&self) {
        if let Some(fd) = self.0.get() {
            // It fails only when nothing has happened.
            let _ = rustix::io::read(fd, &mut [0; 8]);
        }
    }
}
