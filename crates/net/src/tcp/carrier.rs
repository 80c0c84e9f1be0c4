//! What carries the bytes of a connection: a socket, or something that can stand in for one. This file is the contract; it
//! must never know what the bytes say.

use super::connection::{Broken, Wire};
use super::socket::{Ready, WakeUp, Watch};
use super::tls::SpeaksFor;
use std::io;
use std::time::Duration;

/// A wire that its thread can wait for, and end.
pub trait Carrier: Wire + std::fmt::Debug {
    /// Waits until there is something to receive, something can be sent (if `sending`), somebody calls `waker`, or
    /// `timeout` is over.
    fn wait(&mut self, waker: &WakeUp, sending: bool, timeout: Option<Duration>) -> io::Result<Ready>;

    /// What waits for it while another thread uses it, if that can be.
    fn watch(&self) -> io::Result<Option<Watch>> {
        Ok(None)
    }

    /// Brings up what has to be up before the first frame, within a limit. `stop`: asked whenever `waker` was called.
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
