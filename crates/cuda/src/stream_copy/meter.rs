//! What the paths of a GPU carry, measured by the copies themselves: a pair of events with a time
//! stands around each path's part of a divided batch, and is read when a later batch is divided.
//! Nobody waits for one. How batches are divided by that is [`Estimates`]'; this file has the
//! events.

use crate::device::{Device, Event};
use crate::driver::CudaError;
use crate::driver::abi::StreamHandle;
use crate::estimates::Estimates;
use crate::plan::PathRates;
use std::collections::VecDeque;
use std::sync::Arc;

/// Parts of a path that may be under way and timed. A part that finds no events is not.
const PARTS: usize = 8;

/// All paths of one GPU in one direction.
#[derive(Debug)]
pub struct Meter {
    estimates: Estimates,
    /// Of each path, the direct one first; none if shares follow nothing.
    clocks: Vec<Clock>,
}

/// A path's part of a batch, and when it began and ended.
#[derive(Debug)]
pub struct Part {
    begun: Event,
    ended: Event,
    batch: u64,
    bytes: u64,
    /// What the path was given without a time since the part before.
    untimed_bytes: u64,
    has_begun: bool,
    /// Both were recorded.
    is_timed: bool,
    /// When somebody first saw that it had begun.
    seen_us: Option<u64>,
}

/// A path's events.
#[derive(Debug)]
struct Clock {
    spare: Vec<Part>,
    under_way: VecDeque<Part>,
    /// The part that was read last. The next one may have begun before this ended, and has had the
    /// path to itself only since then.
    last: Option<Part>,
    /// What was queued without a time since the last part that has one.
    untimed_bytes: u64,
}

impl Meter {
    /// For paths over these GPUs, that of the target first. `is_fixed`: whatever is measured, the
    /// rates stay.
    pub fn new(rates: PathRates, gpus: &[&Arc<Device>], is_fixed: bool) -> Result<Meter, CudaError> {
        let clocks = gpus.iter().filter(|_| !is_fixed && gpus.len() > 1).map(|gpu| Clock::new(gpu));
        let estimates = if is_fixed { Estimates::fixed(rates) } else { Estimates::new(rates) };
        Ok(Meter { clocks: clocks.collect::<Result<_, _>>()?, estimates })
    }

    /// What each path carries, 0 if nothing goes there now; and whether that was measured.
    pub fn rates(&self) -> impl Iterator<Item = (f64, bool)> {
        self.estimates.rates()
    }

    /// Divides a batch over paths that may be used: a share for each path.
    pub fn shares(&mut self, bytes: u64, is_usable: impl Fn(usize) -> bool, now_us: u64) -> Vec<u64> {
        for (path, clock) in self.clocks.iter_mut().enumerate() {
            clock.read(path, &mut self.estimates, now_us);
        }
        self.estimates.shares(bytes, is_usable, now_us)
    }

    /// What times a path's part of the batch that was divided last, if there are events for it.
    pub fn part(&mut self, path: usize, bytes: u64) -> Option<Part> {
        if bytes == 0 {
            return None;
        }
        let (clock, batch) = (self.clocks.get_mut(path)?, self.estimates.batch());
        let Some(part) = clock.spare.pop() else {
            clock.untimed_bytes += bytes;
            return None;
        };
        let untimed_bytes = std::mem::take(&mut clock.untimed_bytes);
        Some(Part { batch, bytes, untimed_bytes, has_begun: false, is_timed: false, seen_us: None, ..part })
    }

    /// A part was queued, or something of it was refused.
    pub fn queued(&mut self, path: usize, part: Part) {
        let Some(clock) = self.clocks.get_mut(path) else { return };
        match part.is_timed {
            true => clock.under_way.push_back(part),
            false => {
                clock.untimed_bytes += part.bytes + part.untimed_bytes;
                clock.spare.push(part);
            }
        }
    }
}

impl Part {
    fn new(gpu: &Arc<Device>) -> Result<Part, CudaError> {
        let (begun, ended) = (Event::with_time(gpu)?, Event::with_time(gpu)?);
        Ok(Part {
            begun,
            ended,
            batch: 0,
            bytes: 0,
            untimed_bytes: 0,
            has_begun: false,
            is_timed: false,
            seen_us: None,
        })
    }

    /// It begins here. A refusal says nothing of the copy.
    pub fn begins(&mut self, stream: StreamHandle) {
        self.has_begun = self.begun.record_in(stream).is_ok();
    }

    /// All of it is queued, and what of it ends last does so here.
    pub fn ends(&mut self, stream: StreamHandle) {
        self.is_timed = self.has_begun && self.ended.record_in(stream).is_ok();
    }
}

impl Clock {
    fn new(gpu: &Arc<Device>) -> Result<Clock, CudaError> {
        let spare = (0..PARTS).map(|_| Part::new(gpu)).collect::<Result<_, _>>()?;
        Ok(Clock { spare, under_way: VecDeque::new(), last: None, untimed_bytes: 0 })
    }

    /// Tells what was measured since the last time.
    fn read(&mut self, path: usize, estimates: &mut Estimates, now_us: u64) {
        while let Some(part) = self.under_way.front_mut() {
            match part.ended.is_passed() {
                Ok(true) => {}
                Ok(false) => {
                    if part.begun.is_passed() == Ok(true) {
                        let seen_us = *part.seen_us.get_or_insert(now_us);
                        estimates.waits(path, part.bytes, now_us.saturating_sub(seen_us) as f64 / 1e6);
                    }
                    return;
                }
                // Its context is lost: that path has no more parts.
                Err(_) => return,
            }
            let Some(part) = self.under_way.pop_front() else { return };
            // Where nobody can say how long, it is over all the same.
            let seconds = self.seconds(&part).unwrap_or(0.0);
            estimates.measured(path, part.batch, part.bytes, seconds);
            self.spare.extend(self.last.replace(part));
        }
    }

    /// How long the path took for a part: since that began, or the one before ended, if that was
    /// later.
    fn seconds(&self, part: &Part) -> Option<f64> {
        let own = part.ended.since(&part.begun).ok()?.as_secs_f64();
        let behind = self.last.as_ref().and_then(|last| part.ended.since(&last.ended).ok());
        // Of what went between the two without a time it is only known that it was there.
        let scale = part.bytes as f64 / (part.bytes + part.untimed_bytes) as f64;
        let behind = behind.map(|behind| behind.as_secs_f64() * scale).filter(|behind| *behind > 0.0);
        Some(behind.map_or(own, |behind| own.min(behind)))
    }
}
