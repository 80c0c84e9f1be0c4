//! Spans of sampled transfers, until they are pushed: a bounded number of them.

use forebay_transfer::lock::Mutex;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// Spans that wait at most; those after are dropped.
const SPANS_MAX: usize = 2048;

/// Something that took time, for a trace.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Span {
    /// All spans of one trace have it.
    pub trace: [u8; 16],
    pub id: [u8; 8],
    /// The span that it is part of.
    pub parent: Option<[u8; 8]>,
    pub name: &'static str,
    /// From when, by the wall clock.
    pub start_unix_ns: u64,
    pub end_unix_ns: u64,
    /// What tells it from others.
    pub attributes: Vec<(&'static str, String)>,
    pub error: Option<String>,
}

#[derive(Debug, Default)]
pub struct Spans {
    /// One of so many is sampled; 0: none.
    every: AtomicU32,
    asked: AtomicU32,
    dropped: AtomicU64,
    waiting: Mutex<VecDeque<Span>>,
}

impl Spans {
    /// Samples one of `every` from now on; 0: none.
    pub fn sample_one_of(&self, every: u32) {
        self.every.store(every, Ordering::Relaxed);
    }

    pub fn samples(&self) -> bool {
        self.every.load(Ordering::Relaxed) != 0
    }

    /// Whether this one is sampled.
    pub fn wants(&self) -> bool {
        let every = self.every.load(Ordering::Relaxed);
        every != 0 && self.asked.fetch_add(1, Ordering::Relaxed).is_multiple_of(every)
    }

    /// Keeps a span until it is pushed, or drops and counts it when too many wait.
    pub fn put(&self, span: Span) {
        let mut waiting = self.waiting.lock();
        if waiting.len() < SPANS_MAX {
            waiting.push_back(span);
        } else {
            self.dropped.fetch_add(1, Ordering::Relaxed);
        }
    }

    pub fn dropped(&self) -> u64 {
        self.dropped.load(Ordering::Relaxed)
    }

    pub(super) fn take(&self) -> Vec<Span> {
        self.waiting.lock().drain(..).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_of_so_many_is_sampled_and_too_many_are_dropped() {
        let spans = Spans::default();
        assert_eq!((0..10).filter(|_| spans.wants()).count(), 0);
        spans.sample_one_of(5);
        assert_eq!((0..10).filter(|_| spans.wants()).count(), 2);
        let span = Span {
            trace: [1; 16],
            id: [2; 8],
            parent: None,
            name: "read",
            start_unix_ns: 1,
            end_unix_ns: 2,
            attributes: Vec::new(),
            error: None,
        };
        (0..SPANS_MAX + 3).for_each(|_| spans.put(span.clone()));
        assert_eq!((spans.take().len(), spans.dropped(), spans.take().len()), (SPANS_MAX, 3, 0));
    }
}
