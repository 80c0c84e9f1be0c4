//! What carries the bytes of a connection: a socket, or something that can stand in for one. This
//! file is the contract.

use super::error::Broken;
use super::tls::SpeaksFor;
use super::wake::WakeUp;
use rustix::fd::OwnedFd;
use std::io;
use std::time::Duration;

/// A stream of bytes that never waits: `WouldBlock` instead.
pub trait Wire: Send {
    /// Sends a prefix of the slices, at least a byte. After `WouldBlock` the next send has to begin
    /// with the same bytes.
    ///
    /// # Safety
    ///
    /// The slices must be readable.
    unsafe fn send(&mut self, slices: &[libc::iovec]) -> io::Result<usize>;

    /// Receives into the slices, in their order. Less than they hold: there is no more for now. 0:
    /// the peer sends nothing more.
    ///
    /// # Safety
    ///
    /// The slices must be writable.
    unsafe fn receive(&mut self, slices: &[libc::iovec]) -> io::Result<usize>;
}

/// What a wait has found.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Ready {
    /// There may be something to receive, if only the end.
    pub readable: bool,
    /// The peer has taken enough for more to be sent. Only where that was waited for.
    pub writable: bool,
    /// The peer is gone, and has thrown away what it had not received.
    pub reset: bool,
}

/// A wire that its thread can wait for, and end.
pub trait Carrier: Wire {
    /// Waits until there is something to receive, something can be sent (if `sending`), somebody
    /// calls `waker`, or `timeout` is over.
    fn wait(&mut self, waker: &WakeUp, sending: bool, timeout: Option<Duration>) -> io::Result<Ready>;

    /// A socket to wait for while another thread uses the carrier, if there is one.
    fn watch(&self) -> io::Result<Option<OwnedFd>> {
        Ok(None)
    }

    /// Brings up what has to be up before the first frame, within a limit. `stop`: asked whenever
    /// `waker` was called.
    fn shake_hands(
        &mut self,
        _waker: &WakeUp,
        _limit_us: u64,
        _stop: &dyn Fn() -> bool,
    ) -> Result<(), Broken> {
        Ok(())
    }

    /// The nodes that the peer may say it is.
    fn speaks_for(&self) -> SpeaksFor {
        SpeaksFor::Anybody
    }

    /// Ends the connection so that what the peer has not received is thrown away.
    fn reset(self: Box<Self>);

    /// Says one last thing, if it can be said at once, and ends the connection.
    fn part(self: Box<Self>, farewell: &[u8]);
}

/// Bytes as sends and receives name them.
pub(crate) fn slice(start: *mut u8, len: usize) -> libc::iovec {
    libc::iovec { iov_base: start.cast(), iov_len: len }
}

/// Slices that are filled from their start.
#[derive(Default)]
pub(crate) struct Scatter<'a> {
    slices: &'a [libc::iovec],
    /// Bytes of the first slice that are filled.
    within: usize,
    /// Bytes of all slices that are filled.
    pub placed: usize,
}

impl<'a> Scatter<'a> {
    /// # Safety
    ///
    /// The slices must be writable.
    pub unsafe fn over(slices: &'a [libc::iovec]) -> Scatter<'a> {
        Scatter { slices, within: 0, placed: 0 }
    }

    pub fn is_full(&self) -> bool {
        self.slices.is_empty()
    }

    /// Fills in as many of the bytes as there is room for, and says how many.
    ///
    /// # Safety
    ///
    /// The bytes must be readable, and lie in none of the slices.
    pub unsafe fn put(&mut self, start: *const u8, len: usize) -> usize {
        let mut taken = 0;
        while let Some((slice, rest)) = self.slices.split_first() {
            let now = (slice.iov_len - self.within).min(len - taken);
            // SAFETY: the caller says that the bytes are readable, and whoever named the slices
            // that they are writable; `now` bytes are left of both.
            unsafe {
                let to = slice.iov_base.cast::<u8>().add(self.within);
                std::ptr::copy_nonoverlapping(start.add(taken), to, now);
            }
            taken += now;
            self.within += now;
            if self.within < slice.iov_len {
                break;
            }
            (self.slices, self.within) = (rest, 0);
        }
        self.placed += taken;
        taken
    }
}
