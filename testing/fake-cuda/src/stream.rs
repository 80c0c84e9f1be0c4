//! Streams (the explicit ones, each GPU's legacy stream and each thread's own), events, and
//! captures of streams.

use crate::clock::Clock;
use crate::op::What;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

/// What kind of stream it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sort {
    /// The legacy default stream: ordered with every blocking stream of its context.
    Legacy,
    /// Made by the program or a thread's default; ordered with the legacy stream.
    Blocking,
    /// Ordered with nothing.
    NonBlocking,
}

pub struct Stream {
    pub gpu: usize,
    pub sort: Sort,
    /// Made by cuStreamCreate and not yet destroyed.
    pub explicit: bool,
    /// Destroyed; it stays until its last operation has ended.
    pub retired: bool,
    /// The last operation, ended or not.
    pub last: u64,
    /// How many operations there have been.
    pub number: u64,
    /// What lies before the end of the last operation that has ended.
    pub clock: Clock,
    /// The capture that it takes part in.
    pub capture: Option<u64>,
}

impl Stream {
    pub fn new(gpu: usize, sort: Sort, explicit: bool) -> Stream {
        Stream {
            gpu,
            sort,
            explicit,
            retired: false,
            last: 0,
            number: 0,
            clock: Clock::default(),
            capture: None,
        }
    }
}

/// A point in a stream for which others wait.
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

/// An operation of a graph. All of a graph run in the order of capture.
pub type Recorded = (&'static str, What);

/// A capture under way.
pub struct Capture {
    pub id: u64,
    pub origin: usize,
    pub mode: u32,
    pub thread: usize,
    pub ops: Vec<Recorded>,
    pub broken: bool,
}

thread_local! {
    /// A number for this thread, for as long as the process lives.
    static THREAD: usize = {
        static NEXT: AtomicUsize = AtomicUsize::new(1);
        NEXT.fetch_add(1, Ordering::Relaxed)
    };
}

/// The calling thread's number.
pub fn this_thread() -> usize {
    THREAD.with(|thread| *thread)
}
