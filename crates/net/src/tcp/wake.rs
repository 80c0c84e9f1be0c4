//! Wakes a thread that waits for descriptors, and the wait itself. Programs with an event loop of
//! their own have an [`Event`].

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use std::io;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

/// Interrupts a wait, from any thread. Kept for the next wait if there is none.
#[derive(Debug, Clone)]
pub struct WakeUp(Arc<OwnedFd>);

impl WakeUp {
    pub fn new() -> io::Result<WakeUp> {
        let fd = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(WakeUp(Arc::new(fd)))
    }

    pub fn wake(&self) {
        // It fails only when 2^64 - 2 wake-ups wait, and then the waiter is awake.
        let _ = rustix::io::write(&self.0, &1u64.to_ne_bytes());
    }

    /// Waits for a wake-up, or for `other` to be readable if there is one, or for the end of
    /// `timeout`.
    pub fn wait(&self, other: Option<&dyn AsFd>, timeout: Option<Duration>) -> io::Result<()> {
        let other = other.map(|other| PollFd::from_borrowed_fd(other.as_fd(), PollFlags::IN));
        self.wait_beside(&mut other.into_iter().collect(), timeout).map(drop)
    }

    /// Waits as [`wait`](WakeUp::wait) does, for whatever is to happen to `others`. Says whether
    /// there was a wake-up.
    pub fn wait_beside<'a>(
        &'a self,
        others: &mut Vec<PollFd<'a>>,
        timeout: Option<Duration>,
    ) -> io::Result<bool> {
        others.push(PollFd::new(&self.0, PollFlags::IN));
        poll_for(others, timeout)?;
        let woken = others.pop().is_some_and(|fd| !fd.revents().is_empty());
        if woken {
            self.clear();
        }
        Ok(woken)
    }

    fn clear(&self) {
        // It fails only when somebody else has cleared it.
        let _ = rustix::io::read(&self.0, &mut [0; 8]);
    }
}

/// A wait that a signal cuts short has found nothing.
fn poll_for(fds: &mut [PollFd<'_>], timeout: Option<Duration>) -> io::Result<()> {
    let timeout = timeout.map(|timeout| Timespec {
        tv_sec: timeout.as_secs().try_into().unwrap_or(i64::MAX),
        tv_nsec: timeout.subsec_nanos().into(),
    });
    match poll(fds, timeout.as_ref()) {
        Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

/// A descriptor that becomes readable when something has happened. It does not exist, and costs
/// nothing, until somebody asks for it.
#[derive(Debug, Default)]
pub(crate) struct Event(OnceLock<WakeUp>);

impl Event {
    /// The descriptor. Readable at once when it is new, since something may have happened before.
    pub fn fd(&self) -> io::Result<BorrowedFd<'_>> {
        let wake = match self.0.get() {
            Some(wake) => wake,
            None => {
                let new = WakeUp::new()?;
                new.wake();
                self.0.get_or_init(|| new)
            }
        };
        Ok(wake.0.as_fd())
    }

    /// Something has happened.
    pub fn set(&self) {
        self.0.get().into_iter().for_each(WakeUp::wake);
    }

    /// Everything that happened before is being looked at.
    pub fn clear(&self) {
        self.0.get().into_iter().for_each(WakeUp::clear);
    }
}
