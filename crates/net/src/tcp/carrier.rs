//! What carries the bytes of a connection: a socket, or something that can stand in for one. This
//! file is the contract.

use super::broken::Broken;
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
pub trait Carrier: Wire + std::fmt::Debug {
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
