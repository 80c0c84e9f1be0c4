//! Stalls: how long an engine's stream waited for layers of a load. Of two events with times the first is where the stream comes to need
//! a layer, the second where it may pass: between them it waits for the layer, and before that for the host to queue what it waits for.
//! This file knows such pairs; it must never know why a layer is late.

use forebay_cuda::device::{Device, Event};
use forebay_cuda::driver::{CudaError, abi::StreamHandle};
use std::sync::Arc;
use std::time::Duration;

/// Passing both events of a wait for nothing takes some microseconds. Less than this is no stall.
const LEAST: Duration = Duration::from_micros(20);

/// Waits of a stream for layers.
#[derive(Debug, Default)]
pub struct Stalls(Vec<Stall>);

#[derive(Debug)]
struct Stall {
    layer: u32,
    before: Event,
    after: Option<Event>,
}

impl Stalls {
    /// Whether a stream has come to where it needs a layer, and may not pass yet.
    pub fn is_open(&self, layer: u32) -> bool {
        self.0.iter().any(|stall| stall.layer == layer && stall.after.is_none())
    }

    /// A stream comes to where it needs a layer.
    ///
    /// # Safety
    ///
    /// As for [`Event::record_behind`].
    pub unsafe fn open(
        &mut self,
        device: &Arc<Device>,
        layer: u32,
        stream: StreamHandle,
    ) -> Result<(), CudaError> {
        if self.is_open(layer) {
            return Ok(());
        }
        let before = Event::with_time(device)?;
        // SAFETY: by this function's contract.
        unsafe { before.record_behind(stream) }?;
        self.0.push(Stall { layer, before, after: None });
        Ok(())
    }

    /// It may pass behind `event`, if anything is to be waited for.
    ///
    /// # Safety
    ///
    /// As for [`Event::record_behind`] and [`Event::come_before`].
    pub unsafe fn close(
        &mut self,
        device: &Arc<Device>,
        layer: u32,
        event: Option<&Event>,
        stream: StreamHandle,
    ) -> Result<(), CudaError> {
        let after = Event::with_time(device)?;
        // SAFETY: by this function's contract.
        unsafe {
            event.map_or(Ok(()), |event| event.come_before(stream))?;
            after.record_behind(stream)?;
        }
        if let Some(open) = self.0.iter_mut().find(|stall| stall.layer == layer && stall.after.is_none()) {
            open.after = Some(after);
        }
        Ok(())
    }

    /// Of each layer that was waited for, how long, once all that was waited for is over: a wait to which the stream has not come by
    /// then is none. After an error of the driver nobody knows.
    pub fn take(&mut self) -> Vec<(u32, Duration)> {
        let stalls = std::mem::take(&mut self.0).into_iter();
        stalls.filter_map(|stall| Some((stall.layer, stall.time().ok().flatten()?))).collect()
    }
}

impl Stall {
    fn time(&self) -> Result<Option<Duration>, CudaError> {
        let Some(after) = self.after.as_ref().filter(|_| self.before.is_passed() == Ok(true)) else {
            return Ok(None);
        };
        // What the stream waits for is over, so there is nothing left between the two.
        after.synchronize()?;
        Ok(Some(after.since(&self.before)?).filter(|time| *time >= LEAST))
    }
}
