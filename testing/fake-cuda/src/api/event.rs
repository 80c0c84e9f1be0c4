//! Events.

use crate::abi::{Code, EVENT_DISABLE_TIMING, Outcome};
use crate::caller::put;
use crate::entry::{Call, entries};
use crate::op::What;
use crate::stream::Event;

/// `CU_EVENT_INTERPROCESS`.
const INTERPROCESS: u32 = 4;

impl Call {
    /// The GPU of an event that exists.
    fn event(&mut self, event: usize) -> Outcome<usize> {
        self.ready()?;
        if let Some(found) = self.events.get(&event) {
            return Ok(found.gpu);
        }
        self.misused("an event that does not exist");
        Err(Code::INVALID_HANDLE)
    }

    fn record(&mut self, event: usize, stream: usize) -> Outcome {
        let gpu = self.event(event)?;
        let stream = self.stream(stream)?;
        let (of_stream, capture) = self
            .streams
            .get(&stream)
            .map(|stream| (stream.gpu, stream.capture))
            .ok_or(Code::INVALID_HANDLE)?;
        if of_stream != gpu {
            self.misused(format_args!("an event of GPU {gpu} in a stream of GPU {of_stream}"));
            return Err(Code::INVALID_HANDLE);
        }
        if let Some(event) = self.events.get_mut(&event) {
            event.capture = capture;
        }
        self.enqueue_named(stream, What::Record(event)).map(drop)
    }

    fn elapsed(&mut self, ms: *mut f32, first: usize, last: usize) -> Outcome {
        let mut times = [None; 2];
        for (event, time) in [first, last].into_iter().zip(&mut times) {
            self.event(event)?;
            let Some(found) = self.events.get(&event) else { continue };
            if found.flags & EVENT_DISABLE_TIMING != 0 || found.record == 0 {
                return Err(Code::INVALID_HANDLE);
            }
            *time = Some(found.at.ok_or(Code::NOT_READY)?);
        }
        let gpus = [first, last].map(|event| self.events.get(&event).map(|found| found.gpu));
        if gpus[0] != gpus[1] {
            return Err(Code::INVALID_HANDLE);
        }
        let [Some(first), Some(last)] = times else { return Err(Code::INVALID_HANDLE) };
        let (sign, between) = if last >= first { (1.0, last - first) } else { (-1.0, first - last) };
        put(ms, sign * (between.as_secs_f64() * 1e3) as f32)
    }
}

entries! {
    cuEventCreate = "cuEventCreate" @ 2000 (event: *mut usize, flags: u32) |call| {
        let gpu = call.current()?;
        if flags & !7 != 0 {
            return Err(Code::INVALID_VALUE);
        }
        if flags & INTERPROCESS != 0 {
            return Err(Code::NOT_SUPPORTED);
        }
        let handle = call.new_handle();
        call.events.insert(handle, Event { gpu, flags, ..Event::default() });
        put(event, handle)
    }
    cuEventDestroy_v2 = "cuEventDestroy" @ 4000 (event: usize) |call| {
        call.event(event)?;
        call.events.remove(&event);
        Ok(())
    }
    cuEventRecord | cuEventRecord_ptsz @ 7000 = "cuEventRecord" @ 2000 (event: usize, stream: usize) |call| {
        call.record(event, stream)
    }
    cuEventQuery = "cuEventQuery" @ 2000 (event: usize) |call| {
        let gpu = call.event(event)?;
        call.healthy(gpu)?;
        call.not_captured(event)?;
        let Some(found) = call.events.get(&event) else { return Err(Code::INVALID_HANDLE) };
        let (record, clock) = (found.record, found.clock.clone());
        if call.ops.contains_key(&record) {
            return Err(Code::NOT_READY);
        }
        call.order.host.join(&clock);
        Ok(())
    }
    cuEventSynchronize = "cuEventSynchronize" @ 2000 (event: usize) |call| {
        let gpu = call.event(event)?;
        call.not_captured(event)?;
        let record = call.events.get(&event).map(|event| event.record);
        call.wait_for_ops(record)?;
        // Another thread may have destroyed it meanwhile.
        if let Some(clock) = call.events.get(&event).map(|event| event.clock.clone()) {
            call.order.host.join(&clock);
        }
        call.healthy(gpu)
    }
    cuEventElapsedTime = "cuEventElapsedTime" @ 2000 (ms: *mut f32, first: usize, last: usize) |call| {
        call.elapsed(ms, first, last)
    }
}
