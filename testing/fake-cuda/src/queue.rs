//! When operations run.
//!
//! An operation counts the operations that it is ordered after and that have not ended: the last
//! one of its stream, the record of an event, what the legacy rule adds. When none is left it
//! begins; those that need no engine end at once.

use crate::abi::{Code, Outcome};
use crate::clock::Clock;
use crate::driver::{State, signals};
use crate::memory::{Kind, Lost, Move};
use crate::op::{Op, Wanted, What};
use crate::order::Touch;
use crate::stream::{Sort, Stream};
use std::time::Instant;

/// Bytes at most that are taken for a signal when they are written to host memory.
const SIGNAL_BYTES: u64 = 64;

impl State {
    /// Puts an operation at a stream's end. `None`: a capture has it.
    pub fn enqueue(&mut self, stream: usize, name: &'static str, what: What) -> Outcome<Option<u64>> {
        let gpu = self.streams.get(&stream).map(|stream| stream.gpu).ok_or(Code::INVALID_HANDLE)?;
        let touches = self.touched(gpu, name, &what)?;
        let Some(what) = self.record_if_capturing(stream, name, what)? else { return Ok(None) };
        let id = self.new_handle() as u64;
        let (clock, dependents) = (self.order.host.clone(), Vec::new());
        let (lost, pending) = (None, 0);
        let mut op = Op { name, gpu, stream, number: 0, what, clock, touches, lost, pending, dependents };
        for before in self.streams_before(stream) {
            let Some(before) = self.streams.get(&before) else { continue };
            let (last, clock) = (before.last, before.clock.clone());
            self.order_after(id, &mut op, last, &clock);
        }
        if let What::Join(event) = op.what {
            let event = self.events.get(&event).ok_or(Code::INVALID_HANDLE)?;
            let (record, clock) = (event.record, event.clock.clone());
            self.order_after(id, &mut op, record, &clock);
        }
        if let What::Record(event) = op.what {
            let event = self.events.get_mut(&event).ok_or(Code::INVALID_HANDLE)?;
            (event.record, event.at) = (id, None);
        }
        if let Some(stream) = self.streams.get_mut(&stream) {
            stream.number += 1;
            stream.last = id;
            op.number = stream.number;
        }
        let ready = op.pending == 0;
        self.ops.insert(id, op);
        if ready {
            self.run(vec![id]);
        }
        Ok(Some(id))
    }

    /// `op` comes after operation `last`, before whose end, if it has ended, lies `clock`.
    fn order_after(&mut self, id: u64, op: &mut Op, last: u64, clock: &Clock) {
        match self.ops.get_mut(&last) {
            Some(before) => {
                before.dependents.push(id);
                op.pending += 1;
            }
            None => op.clock.join(clock),
        }
    }

    /// An operation has done what it does.
    pub fn finish(&mut self, id: u64) {
        let free = self.end(id);
        self.run(free);
    }

    fn run(&mut self, mut ready: Vec<u64>) {
        while let Some(id) = ready.pop() {
            if self.begin(id) {
                ready.extend(self.end(id));
            }
        }
    }

    /// Begins an operation; says whether that was all.
    fn begin(&mut self, id: u64) -> bool {
        let Some(op) = self.ops.get(&id) else { return false };
        if let Some(lost) = op.lost {
            self.gpus[op.gpu].poison.get_or_insert(lost);
        }
        if self.gpus[op.gpu].poison.is_some() {
            return true;
        }
        match op.what.clone() {
            What::Record(_) | What::Join(_) => true,
            What::Write { at, bytes, value } => {
                self.write_value(id, at, bytes, value);
                true
            }
            What::Wait(wanted) => self.begin_wait(id, wanted),
            What::Moves { .. } | What::Fill { .. } | What::Kernel { .. } => {
                self.give_to_engine(id);
                false
            }
        }
    }

    /// Takes an operation out; gives those that may begin now.
    fn end(&mut self, id: u64) -> Vec<u64> {
        let Some(mut op) = self.ops.remove(&id) else { return Vec::new() };
        op.clock.reach(op.stream, op.number);
        let mut last_of_retired = false;
        if let Some(stream) = self.streams.get_mut(&op.stream) {
            stream.clock.join(&op.clock);
            last_of_retired = stream.retired && stream.last == id;
        }
        if last_of_retired {
            self.remove_stream(op.stream);
        }
        match op.what {
            What::Record(event) => {
                if let Some(event) = self.events.get_mut(&event).filter(|event| event.record == id) {
                    (event.clock, event.at) = (op.clock.clone(), Some(Instant::now()));
                }
            }
            _ if self.signals_host(&op) => self.order.host.join(&op.clock),
            _ => {}
        }
        signals().done.notify_all();
        let mut free = Vec::new();
        let gpu = &self.gpus[op.gpu];
        let lost = gpu.poison.filter(|_| !gpu.is_abandoned);
        for dependent in op.dependents {
            let Some(next) = self.ops.get_mut(&dependent) else { continue };
            next.clock.join(&op.clock);
            next.lost = next.lost.or(lost);
            next.pending -= 1;
            if next.pending == 0 {
                free.push(dependent);
            }
        }
        free
    }

    /// Whether an operation writes a few bytes of host memory: the host may look at them and go on
    /// from there.
    fn signals_host(&self, op: &Op) -> bool {
        let few = op.touches.iter().filter(|touch| touch.writes && touch.to - touch.from <= SIGNAL_BYTES);
        few.into_iter().any(|touch| self.memory.find(touch.from).is_some_and(|area| !area.kind.on_device()))
    }

    /// What an operation will read and write, if its GPU may. What kernels touch shows when they
    /// run.
    fn touched(&mut self, gpu: usize, name: &'static str, what: &What) -> Outcome<Vec<Touch>> {
        let mut touches = Vec::new();
        match what {
            What::Moves { moves, kept } => {
                for one in moves.iter() {
                    self.check_move(gpu, name, one)?;
                    touches.push(Touch::write(one.to, one.bytes));
                    if kept.is_none() {
                        touches.push(Touch::read(one.from, one.bytes));
                    }
                }
            }
            What::Fill { at, bytes, .. } => {
                self.check(gpu, name, *at, *bytes)?;
                touches.push(Touch::write(*at, *bytes));
            }
            // Words that streams signal each other with are there to be raced for.
            What::Write { at, bytes, .. } | What::Wait(Wanted { at, bytes, .. }) => {
                self.check(gpu, name, *at, *bytes)?;
                if self.memory.find(*at).is_none() || at % bytes != 0 {
                    return Err(Code::INVALID_VALUE);
                }
            }
            What::Record(_) | What::Join(_) | What::Kernel { .. } => {}
        }
        Ok(touches)
    }

    /// Whether a copy that `gpu` makes may be made.
    pub fn check_move(&mut self, gpu: usize, name: &str, one: &Move) -> Outcome {
        self.check(gpu, name, one.from, one.bytes)?;
        self.check(gpu, name, one.to, one.bytes)?;
        let areas = [one.from, one.to].map(|at| self.memory.find(at).filter(|area| area.kind.on_device()));
        if let Some(lost) = areas.iter().flatten().find_map(|area| self.gpus[area.gpu].poison) {
            return Err(lost);
        }
        // A copy from or to the host takes the link of the GPU that has the memory, whoever makes
        // it.
        let [Some(from), Some(to)] = areas else { return Ok(()) };
        if let Some(area) = [from, to].into_iter().find(|area| !self.memory.reaches(gpu, area)) {
            // The real driver copies by way of the host then, without a word.
            let whose = area.gpu;
            self.misuse.report(format!("{name}: GPU {gpu} has no peer access to GPU {whose}"));
        }
        Ok(())
    }

    /// Whether an operation of `gpu` may touch these bytes. Addresses that the driver does not know
    /// are the host's own.
    pub fn check(&mut self, gpu: usize, name: &str, at: u64, bytes: u64) -> Outcome {
        if at == 0 && bytes > 0 {
            return Err(Code::INVALID_VALUE);
        }
        let wrong = match self.memory.span(at, bytes) {
            Ok(area) if area.kind == Kind::Device || self.memory.reaches(gpu, area) => return Ok(()),
            Ok(area) => format!("GPU {gpu} has no access to {:?} memory of GPU {}", area.kind, area.gpu),
            Err(Lost::Unknown) => return Ok(()),
            Err(Lost::Freed) => "freed memory".into(),
            Err(Lost::Beyond) => "bytes beyond the end of an allocation or registration".into(),
        };
        self.misuse.report(format!("{name}: {wrong}"));
        Err(Code::INVALID_VALUE)
    }

    /// Whether any operation that has not ended touches these bytes; its name.
    pub fn using(&self, base: u64, bytes: u64) -> Option<&'static str> {
        let wanted = Touch::write(base, bytes);
        let using = |op: &&Op| {
            let word = match op.what {
                What::Write { at, bytes, .. } | What::Wait(Wanted { at, bytes, .. }) => {
                    Some(Touch::read(at, bytes))
                }
                _ => None,
            };
            op.touches.iter().chain(&word).any(|touch| touch.overlaps(&wanted))
        };
        self.ops.values().find(using).map(|op| op.name)
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
