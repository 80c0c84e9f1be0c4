//! Streams: the explicit ones, each GPU's legacy stream and each thread's own.

use crate::abi::{Code, Outcome, STREAM_LEGACY, STREAM_PER_THREAD};
use crate::clock::Clock;
use crate::driver::State;
use std::sync::atomic::{AtomicUsize, Ordering};

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
    pub priority: i32,
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
    pub fn new(gpu: usize, sort: Sort, explicit: bool, priority: i32) -> Stream {
        Stream {
            gpu,
            sort,
            explicit,
            retired: false,
            priority,
            last: 0,
            number: 0,
            clock: Clock::default(),
            capture: None,
        }
    }
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

impl State {
    /// The stream that a caller means, in the context of `gpu`. `per_thread`: 0 is the thread's
    /// own.
    pub fn resolve_stream(&mut self, given: usize, gpu: usize, per_thread: bool) -> Outcome<usize> {
        match given {
            0 if per_thread => Ok(self.default_stream(gpu, Some(this_thread()))),
            STREAM_PER_THREAD => Ok(self.default_stream(gpu, Some(this_thread()))),
            0 | STREAM_LEGACY => Ok(self.default_stream(gpu, None)),
            handle if self.streams.get(&handle).is_some_and(|stream| stream.explicit) => Ok(handle),
            _ => {
                self.misuse.report(format!("{}: a stream that does not exist", self.calling));
                Err(Code::INVALID_HANDLE)
            }
        }
    }

    /// A GPU's legacy stream, or a thread's own stream there.
    fn default_stream(&mut self, gpu: usize, thread: Option<usize>) -> usize {
        if let Some(&handle) = self.default_streams.get(&(gpu, thread)) {
            return handle;
        }
        let sort = if thread.is_some() { Sort::Blocking } else { Sort::Legacy };
        let handle = self.new_handle();
        self.streams.insert(handle, Stream::new(gpu, sort, false, 0));
        self.default_streams.insert((gpu, thread), handle);
        handle
    }

    /// A stream takes nothing more. What it has been given still runs.
    pub fn retire_stream(&mut self, handle: usize) {
        let Some(stream) = self.streams.get_mut(&handle) else { return };
        (stream.explicit, stream.retired) = (false, true);
        if !self.ops.contains_key(&stream.last) {
            self.remove_stream(handle);
        }
    }

    /// A retired stream is gone.
    pub fn remove_stream(&mut self, handle: usize) {
        self.streams.remove(&handle);
        self.order.forget_stream(handle);
    }

    /// Streams that have nothing left to do when `stream` has not: the legacy stream stands for all
    /// that block with it.
    pub fn waited_for_with(&self, stream: usize) -> Vec<usize> {
        let legacy = self.streams.get(&stream).is_some_and(|stream| stream.sort == Sort::Legacy);
        if legacy { self.streams_before(stream) } else { vec![stream] }
    }

    /// Streams whose last operation the next one of `stream` comes after: itself, and what the
    /// legacy rule adds.
    pub fn streams_before(&self, stream: usize) -> Vec<usize> {
        let mut before = vec![stream];
        let Some(Stream { gpu, sort, .. }) = self.streams.get(&stream) else { return before };
        let other = match sort {
            Sort::Legacy => Sort::Blocking,
            Sort::Blocking => Sort::Legacy,
            Sort::NonBlocking => return before,
        };
        let others = self.streams.iter().filter(|(_, stream)| stream.gpu == *gpu && stream.sort == other);
        before.extend(others.map(|(&handle, _)| handle));
        before
    }
}
