//! Stalls: how long an engine's stream waited for layers of a load. One event with a time stands
//! where the stream comes to need a layer, another one behind the last copy of that layer: from the
//! one to the other it waits, also where the host could not queue the copy sooner. This file knows
//! such pairs.
//!
//! An engine's thread makes two calls of the driver for a layer that is late. Only if its copies
//! are not queued yet may it have to wait for threads that do that, and it asks whether the copies
//! are over.

use forebay_cuda::device::{Device, Event};
use forebay_cuda::driver::{CudaError, abi::StreamHandle};
use forebay_transfer::lock::Mutex;
use std::sync::Arc;
use std::time::Duration;

/// A stream goes on some microseconds after what it waits for. Less than this is no stall.
const LEAST: Duration = Duration::from_micros(20);

/// Events that nobody uses now.
#[derive(Debug)]
pub struct EventPool(Mutex<Vec<Event>>);

/// Waits of a stream for layers.
#[derive(Debug, Default)]
pub struct Stalls(Vec<Stall>);

#[derive(Debug)]
struct Stall {
    layer: u32,
    from: Event,
    until: Option<Arc<Event>>,
}

impl EventPool {
    /// So many to begin with: making one takes an engine's thread longer than all else that it does
    /// for a layer.
    pub fn filled(device: &Arc<Device>, count: usize) -> Result<EventPool, CudaError> {
        let events = (0..count).map(|_| Event::with_time(device)).collect::<Result<_, _>>()?;
        Ok(EventPool(Mutex::new(events)))
    }

    fn take(&self, device: &Arc<Device>) -> Result<Event, CudaError> {
        let spare = self.0.lock().pop();
        spare.map_or_else(|| Event::with_time(device), Ok)
    }

    fn give_back(&self, mark: Event) {
        self.0.lock().push(mark);
    }
}

impl Stalls {
    /// A stream comes to where it needs a layer, and passes when `last` does, an event with a time
    /// behind all copies of the layer.
    ///
    /// # Safety
    ///
    /// As for [`Event::record_behind`] and [`Event::come_before`].
    pub unsafe fn pass(
        &mut self,
        events: &EventPool,
        device: &Arc<Device>,
        layer: u32,
        last: Arc<Event>,
        stream: StreamHandle,
    ) -> Result<(), CudaError> {
        let from = events.take(device)?;
        // SAFETY: by this function's contract.
        unsafe { from.record_behind(stream).and_then(|()| last.come_before(stream)) }?;
        self.0.push(Stall { layer, from, until: Some(last) });
        Ok(())
    }

    /// A stream comes to where it needs a layer.
    ///
    /// # Safety
    ///
    /// As for [`Event::record_behind`].
    pub unsafe fn open(
        &mut self,
        events: &EventPool,
        device: &Arc<Device>,
        layer: u32,
        stream: StreamHandle,
    ) -> Result<(), CudaError> {
        let from = events.take(device)?;
        // SAFETY: by this function's contract.
        unsafe { from.record_behind(stream) }?;
        self.0.push(Stall { layer, from, until: None });
        Ok(())
    }

    /// It passes when `last` does, an event with a time behind all copies of the layer; at once if
    /// there are none or they are over: what else the host has waited for is over too.
    ///
    /// # Safety
    ///
    /// As for [`Event::record_behind`] and [`Event::come_before`].
    pub unsafe fn close(
        &mut self,
        device: &Arc<Device>,
        layer: u32,
        last: Option<Arc<Event>>,
        stream: StreamHandle,
    ) -> Result<(), CudaError> {
        let until = match last {
            Some(last) if !last.is_passed()? => {
                // SAFETY: by this function's contract.
                unsafe { last.come_before(stream) }?;
                last
            }
            _ => {
                let here = Event::with_time(device)?;
                // SAFETY: by this function's contract.
                unsafe { here.record_behind(stream) }?;
                Arc::new(here)
            }
        };
        // One before it that is open is of a wait that failed.
        if let Some(open) = self.0.iter_mut().rfind(|stall| stall.layer == layer && stall.until.is_none()) {
            open.until = Some(until);
        }
        Ok(())
    }

    /// Of each layer that was waited for, how long, once all that was waited for is over: a wait to
    /// which the stream has not come by then is none. After an error of the driver nobody knows.
    pub fn take(&mut self, events: &EventPool) -> Vec<(u32, Duration)> {
        let stalls = std::mem::take(&mut self.0).into_iter();
        let took = stalls.filter_map(|stall| {
            let time = stall.time();
            events.give_back(stall.from);
            Some((stall.layer, time?))
        });
        took.collect()
    }
}

impl Stall {
    fn time(&self) -> Option<Duration> {
        let until = self.until.as_ref().filter(|_| self.from.is_passed() == Ok(true))?;
        // All copies are over, so there is nothing left between the two.
        until.synchronize().ok()?;
        until.since(&self.from).ok().filter(|time| *time >= LEAST)
    }
}
