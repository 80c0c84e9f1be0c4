//! The few questions that are asked of the driver before the copying library may start: is there a
//! context, and would its start end somebody's capture of a graph? Knows their signatures; keeps
//! nothing.

use crate::names::PER_THREAD;
use crate::real::{driver_handle, look_up};
use crate::reason::Reason;
use std::ffi::{CStr, c_int, c_void};

const SUCCESS: c_int = 0;
const CAPTURE_NONE: c_int = 0;
const CAPTURE_RELAXED: c_int = 2;
/// `CUDA_ERROR_STREAM_CAPTURE_IMPLICIT`.
const ANOTHER_CAPTURES: c_int = 906;
/// The handle that means the calling thread's default stream, in every entry point.
const STREAM_PER_THREAD: *mut c_void = 2 as *mut c_void;

type GetCurrent = unsafe extern "C" fn(*mut *mut c_void) -> c_int;
type IsCapturing = unsafe extern "C" fn(*mut c_void, *mut c_int) -> c_int;
type ExchangeMode = unsafe extern "C" fn(*mut c_int) -> c_int;

#[derive(Clone, Copy)]
pub(crate) struct Driver {
    pub handle: *mut c_void,
}

impl Driver {
    /// The driver, on a thread that has a context and whose stream is not captured: a moment at
    /// which others may call it too.
    pub(crate) fn at_rest(stream: *mut c_void, flags: u32) -> Result<Driver, Reason> {
        let driver = Driver { handle: driver_handle().ok_or(Reason::NO_CONTEXT)? };
        if !driver.has_context() {
            return Err(Reason::NO_CONTEXT);
        }
        let own = stream.is_null() && flags & PER_THREAD != 0;
        driver.ask(if own { STREAM_PER_THREAD } else { stream })?;
        Ok(driver)
    }

    /// Runs `work` so that it breaks no capture of other threads.
    pub(crate) fn relaxed<T>(self, work: impl FnOnce() -> T) -> T {
        // SAFETY: the signature of cuda.h.
        let exchange = self
            .find(c"cuThreadExchangeStreamCaptureMode")
            .map(|at| unsafe { std::mem::transmute::<*mut c_void, ExchangeMode>(at) });
        let mut mode = CAPTURE_RELAXED;
        // SAFETY: the mode is ours to read and write. It holds the earlier mode afterwards.
        let changed = exchange.filter(|exchange| unsafe { exchange(&mut mode) } == SUCCESS);
        let done = work();
        if let Some(exchange) = changed {
            // SAFETY: as above; it gives the earlier mode back.
            unsafe { exchange(&mut mode) };
        }
        done
    }

    /// Whether the driver is initialised and this thread has a context: before, there is nothing to
    /// copy.
    fn has_context(self) -> bool {
        let Some(at) = self.find(c"cuCtxGetCurrent") else { return false };
        // SAFETY: the signature of cuda.h.
        let get_current = unsafe { std::mem::transmute::<*mut c_void, GetCurrent>(at) };
        let mut context = std::ptr::null_mut();
        // SAFETY: writes a handle to where it is told.
        let result = unsafe { get_current(&mut context) };
        result == SUCCESS && !context.is_null()
    }

    /// Asks whether the stream is part of a capture. It may not be asked where another one is, and
    /// a stream of a context that is lost has nothing to say.
    fn ask(self, stream: *mut c_void) -> Result<(), Reason> {
        let Some(at) = self.find(c"cuStreamIsCapturing") else { return Ok(()) };
        // SAFETY: the signature of cuda.h.
        let is_capturing = unsafe { std::mem::transmute::<*mut c_void, IsCapturing>(at) };
        let mut status = CAPTURE_NONE;
        // SAFETY: the stream is as good as the program's own call, which is about to use it.
        match unsafe { is_capturing(stream, &mut status) } {
            SUCCESS if status == CAPTURE_NONE => Ok(()),
            SUCCESS | ANOTHER_CAPTURES => Err(Reason::CAPTURING),
            _ => Err(Reason::DRIVER_JUDGES),
        }
    }

    fn find(self, name: &CStr) -> Option<*mut c_void> {
        let found = look_up(self.handle, name);
        (!found.is_null()).then_some(found)
    }
}
