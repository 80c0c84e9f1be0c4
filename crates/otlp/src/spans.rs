//! Which work is sampled, and the spans of what was, until they are pushed: a bounded number.

use forebay_transfer::TraceContext;
use forebay_transfer::lock::Mutex;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

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
    pub kind: SpanKind,
    /// From when, by the wall clock.
    pub start_unix_ns: u64,
    pub end_unix_ns: u64,
    /// What tells it from others.
    pub attributes: Vec<(&'static str, String)>,
    /// What happened at one moment, and when.
    pub events: Vec<(&'static str, u64)>,
    pub error: Option<String>,
}

/// Which side of a question it is, as OpenTelemetry has it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SpanKind {
    Internal,
    /// It answers somebody.
    Server,
    /// It asks somebody.
    Client,
}

#[derive(Debug, Default)]
pub struct Spans {
    is_exported: AtomicBool,
    /// One of so many is sampled where nobody has decided yet; 0: none.
    every: AtomicU32,
    asked: AtomicU32,
    dropped: AtomicU64,
    waiting: Mutex<VecDeque<Span>>,
}

impl Spans {
    /// They go somewhere from now on. One of `every` is sampled where no parent decides; 0: none.
    pub fn export_one_of(&self, every: u32) {
        self.every.store(every, Ordering::Relaxed);
        self.is_exported.store(true, Ordering::Relaxed);
    }

    /// Whether any work can be sampled.
    pub fn is_exported(&self) -> bool {
        self.is_exported.load(Ordering::Relaxed)
    }

    /// Whether this piece of work is sampled: its parent has decided, if it has one.
    pub fn wants(&self, parent: Option<TraceContext>) -> bool {
        if !self.is_exported() {
            return false;
        }
        if let Some(parent) = parent {
            return parent.sampled;
        }
        let every = self.every.load(Ordering::Relaxed);
        every != 0 && self.asked.fetch_add(1, Ordering::Relaxed).is_multiple_of(every)
    }

    /// Keeps a span until it is pushed, or drops and counts it when too many wait.
    pub fn put(&self, span: Span) {
        self.keep([span]);
    }

    /// Keeps spans that nobody has taken, as far as there is room.
    pub(super) fn keep(&self, spans: impl IntoIterator<Item = Span>) {
        let mut waiting = self.waiting.lock();
        for span in spans {
            if waiting.len() < SPANS_MAX {
                waiting.push_back(span);
            } else {
                self.dropped.fetch_add(1, Ordering::Relaxed);
            }
        }
    }

    /// Counts spans that a collector will never take.
    pub(super) fn lose(&self, spans: usize) {
        self.dropped.fetch_add(spans as u64, Ordering::Relaxed);
    }

    pub fn dropped(&self) -> u64 {
        self.dropped.load(Ordering::Relaxed)
    }

    /// All that wait.
    pub fn take(&self) -> Vec<Span> {
        self.waiting.lock().drain(..).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sampled(spans: &Spans, parent: Option<TraceContext>) -> usize {
        (0..10).filter(|_| spans.wants(parent)).count()
    }

    #[test]
    fn one_of_so_many_is_sampled_unless_a_parent_has_decided() {
        let parent = |sampled| Some(TraceContext { trace: [1; 16], span: [2; 8], sampled });
        let spans = Spans::default();
        assert_eq!((sampled(&spans, None), sampled(&spans, parent(true))), (0, 0), "nobody would take them");
        spans.export_one_of(5);
        assert_eq!(sampled(&spans, None), 2);
        assert_eq!((sampled(&spans, parent(true)), sampled(&spans, parent(false))), (10, 0));
        spans.export_one_of(0);
        assert_eq!((sampled(&spans, None), sampled(&spans, parent(true))), (0, 10));
    }

    #[test]
    fn too_many_spans_are_dropped_and_counted() {
        let spans = Spans::default();
        let span = Span {
            trace: [1; 16],
            id: [2; 8],
            parent: None,
            name: "read",
            kind: SpanKind::Internal,
            start_unix_ns: 1,
            end_unix_ns: 2,
            attributes: Vec::new(),
            events: Vec::new(),
            error: None,
        };
        (0..SPANS_MAX + 3).for_each(|_| spans.put(span.clone()));
        let taken = spans.take();
        assert_eq!((taken.len(), spans.dropped(), spans.take().len()), (SPANS_MAX, 3, 0));
        spans.put(span);
        spans.keep(taken);
        assert_eq!((spans.take().len(), spans.dropped()), (SPANS_MAX, 4), "as many as there is room for");
    }
}
