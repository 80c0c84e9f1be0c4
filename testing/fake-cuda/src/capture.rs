//! Stream capture: operations that are recorded instead of run, and what may not be called
//! meanwhile.

use crate::abi::{Code, Outcome};
use crate::driver::State;
use crate::op::What;
use crate::stream::{Capture, Sort, Stream, this_thread};
use std::cell::Cell;

/// `CU_STREAM_CAPTURE_MODE_GLOBAL`: nobody may make unsafe calls. With 1, `..._THREAD_LOCAL`, the
/// capturing thread may not.
pub const GLOBAL: u32 = 0;
/// `CU_STREAM_CAPTURE_MODE_RELAXED`.
pub const RELAXED: u32 = 2;

thread_local! {
    static MODE: Cell<u32> = const { Cell::new(GLOBAL) };
}

/// Sets the calling thread's mode; gives the former one.
pub fn exchange_mode(mode: u32) -> u32 {
    MODE.replace(mode)
}

impl State {
    /// A capture begins on `stream`.
    pub fn begin_capture(&mut self, stream: usize, mode: u32) -> Outcome {
        if mode > RELAXED {
            return Err(Code::INVALID_VALUE);
        }
        let id = self.new_handle() as u64;
        let begun = self
            .streams
            .get_mut(&stream)
            .filter(|begun| begun.sort != Sort::Legacy && begun.capture.is_none());
        begun.ok_or(Code::STREAM_CAPTURE_UNSUPPORTED)?.capture = Some(id);
        let (thread, ops) = (this_thread(), Vec::new());
        self.captures.push(Capture { id, origin: stream, mode, thread, ops, broken: false });
        Ok(())
    }

    /// The capture of `stream` ends; gives the graph.
    pub fn end_capture(&mut self, stream: usize) -> Outcome<usize> {
        let id = self
            .streams
            .get(&stream)
            .and_then(|stream| stream.capture)
            .ok_or(Code::STREAM_CAPTURE_UNMATCHED)?;
        let at = self
            .captures
            .iter()
            .position(|capture| capture.id == id)
            .ok_or(Code::STREAM_CAPTURE_UNMATCHED)?;
        let capture = &self.captures[at];
        if capture.origin != stream {
            return Err(Code::STREAM_CAPTURE_UNMATCHED);
        }
        if capture.mode != RELAXED && capture.thread != this_thread() {
            return Err(Code::STREAM_CAPTURE_WRONG_THREAD);
        }
        let capture = self.captures.swap_remove(at);
        self.streams
            .values_mut()
            .filter(|stream| stream.capture == Some(id))
            .for_each(|stream| stream.capture = None);
        self.events
            .values_mut()
            .filter(|event| event.capture == Some(id))
            .for_each(|event| event.capture = None);
        if capture.broken {
            return Err(Code::STREAM_CAPTURE_INVALIDATED);
        }
        let graph = self.new_handle();
        self.graphs.insert(graph, capture.ops);
        Ok(graph)
    }

    /// Records an operation if `stream` captures. Gives it back if not.
    pub fn record_if_capturing(
        &mut self,
        stream: usize,
        name: &'static str,
        what: What,
    ) -> Outcome<Option<What>> {
        let Some(Some(id)) = self.streams.get(&stream).map(|stream| stream.capture) else {
            self.legacy_beside_capture(stream)?;
            return Ok(Some(what));
        };
        let capture = self.captures.iter_mut().find(|capture| capture.id == id).ok_or(Code::UNKNOWN)?;
        if capture.broken {
            return Err(Code::STREAM_CAPTURE_INVALIDATED);
        }
        capture.ops.push((name, what));
        Ok(None)
    }

    /// The legacy stream would have to wait for streams that run nothing: that breaks their
    /// capture.
    fn legacy_beside_capture(&mut self, stream: usize) -> Outcome {
        let Some(legacy) = self.streams.get(&stream).filter(|stream| stream.sort == Sort::Legacy) else {
            return Ok(());
        };
        let gpu = legacy.gpu;
        let waited_for = |other: &&Stream| other.gpu == gpu && other.sort == Sort::Blocking;
        let ids: Vec<u64> =
            self.streams.values().filter(waited_for).filter_map(|other| other.capture).collect();
        if ids.is_empty() {
            return Ok(());
        }
        self.break_captures(|capture| ids.contains(&capture.id));
        self.misused("in the legacy stream while a blocking stream captures");
        Err(Code::STREAM_CAPTURE_IMPLICIT)
    }

    /// A call that might wait for the GPU or change what it sees is illegal while someone captures
    /// who cares.
    pub fn unsafe_in_capture(&mut self) -> Outcome {
        let (thread, mode) = (this_thread(), MODE.get());
        let forbids = |capture: &Capture| match mode {
            RELAXED => false,
            GLOBAL if capture.mode == GLOBAL => true,
            _ => capture.thread == thread && capture.mode != RELAXED,
        };
        if !self.captures.iter().any(forbids) {
            return Ok(());
        }
        self.break_captures(forbids);
        self.misused("not allowed while a stream captures");
        Err(Code::STREAM_CAPTURE_UNSUPPORTED)
    }

    /// A call that waits for a stream or asks after it is illegal while that stream captures.
    pub fn not_capturing(&mut self, stream: usize) -> Outcome {
        let Some(Some(id)) = self.streams.get(&stream).map(|stream| stream.capture) else { return Ok(()) };
        self.break_captures(|capture| capture.id == id);
        self.misused("of a stream that captures");
        Err(Code::STREAM_CAPTURE_UNSUPPORTED)
    }

    /// A call that waits for an event or asks after it is illegal if the event was recorded in a
    /// capture.
    pub fn not_captured(&mut self, event: usize) -> Outcome {
        let Some(Some(id)) = self.events.get(&event).map(|event| event.capture) else { return Ok(()) };
        self.break_captures(|capture| capture.id == id);
        self.misused("of an event that was recorded in a capture");
        Err(Code::CAPTURED_EVENT)
    }

    /// `CUstreamCaptureStatus` of a stream.
    pub fn capture_status(&self, stream: usize) -> u32 {
        let id = self.streams.get(&stream).and_then(|stream| stream.capture);
        let capture = self.captures.iter().find(|capture| Some(capture.id) == id);
        capture.map_or(0, |capture| 1 + u32::from(capture.broken))
    }

    fn break_captures(&mut self, which: impl Fn(&Capture) -> bool) {
        self.captures.iter_mut().filter(|capture| which(capture)).for_each(|capture| capture.broken = true);
    }
}
