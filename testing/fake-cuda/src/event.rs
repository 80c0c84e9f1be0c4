//! Events: points in streams that others wait for.

use crate::clock::Clock;
use std::time::Instant;

/// An event.
#[derive(Default)]
pub struct Event {
    pub gpu: usize,
    pub flags: u32,
    /// The operation that records it last, once there was one.
    pub record: u64,
    /// What lies before the record, once it has ended.
    pub clock: Clock,
    pub at: Option<Instant>,
    /// The capture in which it was recorded last, and the operation's place in it.
    pub capture: Option<u64>,
}
