//! What carries the bytes of a connection: a socket, or something that can stand in for one. This file is the contract; it
//! must never know what the bytes say.

use super::connection::Wire;
use super::socket::{Ready, WakeUp};
use std::io;
use std::time::Duration;

/// A wire that its thread can wait for, and end.
pub(crate) trait Carrier: Wire + std::fmt::Debug {
    /// Waits until there is something to receive, something can be sent (if `sending`), somebody calls `waker`, or
    /// `timeout` is over.
    fn wait(&mut self, waker: &WakeUp, sending: bool, timeout: Option<Duration>) -> io::Result<Ready>;

    /// Ends the connection so that what the peer has not received is thrown away.
    fn reset(self: Box<Self>);

    /// Says one last thing, if it can be said at once, and ends the connection.
    fn part(self: Box<Self>, farewell: &[u8]);
}
