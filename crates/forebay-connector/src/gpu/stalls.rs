//! Stalls: how long an engine's stream waited for layers of a load. Two events with times stand around each wait. This file knows such
//! pairs; it must never know what was waited for.

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
    after: Event,
}

impl Stalls {
    /// Has a stream wait for what is over when `event` has passed, and notes how long it will. If it has passed there is nothing to wait for.
    ///
    /// # Safety
    ///
    /// As for [`Event::record_behind`] and [`Event::come_before`].
    pub unsafe fn wait(
        &mut self,
        device: &Arc<Device>,
        layer: u32,
        event: &Event,
        stream: StreamHandle,
    ) -> Result<(), CudaError> {
        if event.is_passed()? {
            return Ok(());
        }
        let (before, after) = (Event::with_time(device)?, Event::with_time(device)?);
        // SAFETY: by this function's contract.
        unsafe {
            before.record_behind(stream)?;
            event.come_before(stream)?;
            after.record_behind(stream)?;
        }
        self.0.push(Stall { layer, before, after });
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
        if !self.before.is_passed()? {
            return Ok(None);
        }
        // What the stream waits for is over, so there is nothing left between the two.
        self.after.synchronize()?;
        Ok(Some(self.after.since(&self.before)?).filter(|time| *time >= LEAST))
    }
}
