//! Streams, what they wait for and what they signal.

use super::context::context_handle;
use crate::abi::{Code, Outcome, STREAM_NON_BLOCKING};
use crate::caller::{put, put_if_wanted};
use crate::entry::{Call, entries};
use crate::op::{Wanted, What};
use crate::stream::{Sort, Stream};

impl Call {
    fn create_stream(&mut self, handle: *mut usize, flags: u32) -> Outcome {
        let gpu = self.current()?;
        if flags & !STREAM_NON_BLOCKING != 0 {
            return Err(Code::INVALID_VALUE);
        }
        let sort = if flags == STREAM_NON_BLOCKING { Sort::NonBlocking } else { Sort::Blocking };
        let created = self.new_handle();
        self.streams.insert(created, Stream::new(gpu, sort, true));
        put(handle, created)
    }

    fn wait_value(&mut self, stream: usize, at: u64, bytes: u64, value: u64, flags: u32) -> Outcome {
        let stream = self.stream(stream)?;
        self.enqueue_named(stream, What::Wait(Wanted { at, bytes, value, flags })).map(drop)
    }

    fn write_word(&mut self, stream: usize, at: u64, bytes: u64, value: u64) -> Outcome {
        let stream = self.stream(stream)?;
        self.enqueue_named(stream, What::Write { at, bytes, value }).map(drop)
    }
}

entries! {
    cuStreamCreate = "cuStreamCreate" @ 2000 (stream: *mut usize, flags: u32) |call| {
        call.create_stream(stream, flags)
    }
    cuStreamCreateWithPriority = "cuStreamCreateWithPriority" @ 5050
    (stream: *mut usize, flags: u32, _priority: i32) |call| {
        call.create_stream(stream, flags)
    }
    cuStreamDestroy_v2 = "cuStreamDestroy" @ 4000 (stream: usize) |call| {
        let resolved = call.stream(stream)?;
        if resolved != stream {
            return Err(Code::INVALID_HANDLE);
        }
        call.retire_stream(stream);
        Ok(())
    }
    cuStreamQuery | cuStreamQuery_ptsz @ 7000 = "cuStreamQuery" @ 2000 (stream: usize) |call| {
        let stream = call.stream(stream)?;
        call.not_capturing(stream)?;
        for stream in call.waited_for_with(stream) {
            let Some(found) = call.streams.get(&stream) else { continue };
            let (last, gpu, clock) = (found.last, found.gpu, found.clock.clone());
            call.healthy(gpu)?;
            if call.ops.contains_key(&last) {
                return Err(Code::NOT_READY);
            }
            call.order.host.join(&clock);
        }
        Ok(())
    }
    cuStreamSynchronize | cuStreamSynchronize_ptsz @ 7000 = "cuStreamSynchronize" @ 2000 (stream: usize) |call| {
        let stream = call.stream(stream)?;
        call.wait_for_stream(stream)
    }
    cuStreamWaitEvent | cuStreamWaitEvent_ptsz @ 7000 = "cuStreamWaitEvent" @ 3020
    (stream: usize, event: usize, _flags: u32) |call| {
        let stream = call.stream(stream)?;
        let Some((capture, gpu)) = call.events.get(&event).map(|event| (event.capture, event.gpu)) else {
            call.misused("an event that does not exist");
            return Err(Code::INVALID_HANDLE);
        };
        call.healthy(gpu)?;
        if let (Some(_), Some(found)) = (capture, call.streams.get_mut(&stream)) {
            // The stream joins the capture.
            found.capture = capture;
        }
        call.enqueue_named(stream, What::Join(event)).map(drop)
    }
    cuStreamIsCapturing | cuStreamIsCapturing_ptsz @ 10000 = "cuStreamIsCapturing" @ 10000
    (stream: usize, status: *mut u32) |call| {
        let stream = call.stream(stream)?;
        put(status, call.capture_status(stream))
    }
    cuStreamBeginCapture_v2 | cuStreamBeginCapture_v2_ptsz @ 10010 = "cuStreamBeginCapture" @ 10010
    (stream: usize, mode: u32) |call| {
        let stream = call.stream(stream)?;
        call.begin_capture(stream, mode)
    }
    cuStreamEndCapture | cuStreamEndCapture_ptsz @ 10000 = "cuStreamEndCapture" @ 10000
    (stream: usize, graph: *mut usize) |call| {
        let stream = call.stream(stream)?;
        put_if_wanted(graph, 0);
        let made = call.end_capture(stream)?;
        put(graph, made)
    }
    cuStreamGetCtx | cuStreamGetCtx_ptsz @ 9020 = "cuStreamGetCtx" @ 9020 (stream: usize, context: *mut usize) |call| {
        let stream = call.stream(stream)?;
        let gpu = call.streams.get(&stream).map(|stream| stream.gpu).ok_or(Code::INVALID_HANDLE)?;
        put(context, context_handle(gpu))
    }
    cuStreamGetId | cuStreamGetId_ptsz @ 12000 = "cuStreamGetId" @ 12000 (stream: usize, id: *mut u64) |call| {
        // Streams' handles here are never used again.
        let stream = call.stream(stream)?;
        put(id, stream as u64)
    }
    cuStreamWriteValue32_v2 | cuStreamWriteValue32_v2_ptsz @ 11070 = "cuStreamWriteValue32" @ 11070
    (stream: usize, at: u64, value: u32, _flags: u32) |call| {
        call.write_word(stream, at, 4, value.into())
    }
    cuStreamWriteValue64_v2 | cuStreamWriteValue64_v2_ptsz @ 11070 = "cuStreamWriteValue64" @ 11070
    (stream: usize, at: u64, value: u64, _flags: u32) |call| {
        call.write_word(stream, at, 8, value)
    }
    cuStreamWaitValue32_v2 | cuStreamWaitValue32_v2_ptsz @ 11070 = "cuStreamWaitValue32" @ 11070
    (stream: usize, at: u64, value: u32, flags: u32) |call| {
        call.wait_value(stream, at, 4, value.into(), flags)
    }
    cuStreamWaitValue64_v2 | cuStreamWaitValue64_v2_ptsz @ 11070 = "cuStreamWaitValue64" @ 11070
    (stream: usize, at: u64, value: u64, flags: u32) |call| {
        call.wait_value(stream, at, 8, value, flags)
    }
}
