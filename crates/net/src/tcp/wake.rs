//! Wakes a thread that waits for descriptors, and the wait itself.

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::fd::{AsFd, OwnedFd};
use std::io;
use std::sync::Arc;
use std::time::Duration;

/// Interrupts a wait, from any thread. Kept for the next wait if there is none.
#[derive(Debug, Clone)]
pub struct WakeUp(pub(super) Arc<OwnedFd>);

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
        let mut fds = vec![PollFd::new(&self.0, PollFlags::IN)];
        fds.extend(other.map(|other| PollFd::from_borrowed_fd(other.as_fd(), PollFlags::IN)));
        poll_for(&mut fds, timeout)?;
        if !fds[0].revents().is_empty() {
            self.clear();
        }
        Ok(())
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

    pub(super) fn clear(&self) {
        // It fails only when somebody else has cleared it.
        let _ = rustix::io::read(&self.0, &mut [0; 8]);
    }
}

/// A wait that a signal cuts short has found nothing.
pub(super) fn poll_for(fds: &mut [PollFd<'_>], timeout: Option<Duration>) -> io::Result<()> {
    let timeout = timeout.map(|timeout| Timespec {
        tv_sec: timeout.as_secs().try_into().unwrap_or(i64::MAX),
        tv_nsec: timeout.subsec_nanos().into(),
    });
    match poll(fds, timeout.as_ref()) {
        Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
        Err(error) => Err(error.into()),
    }
}
