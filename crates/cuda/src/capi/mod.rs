//! The C interface by which `libforebay_preload.so` hands copies over; docs/preload.md has the
//! header. Starting takes a few hundred milliseconds, for a context on each GPU, so it happens in
//! the background, when the first copy comes that could go over several links, and copies are
//! declined until then.

mod log;
mod startup;

use crate::access;
use crate::driver::abi::{self, ContextHandle, Dlsym, Status, StreamHandle};
use crate::driver::{Driver, Relaxed};
use crate::kernels::Piece;
use crate::links::Direction;
use crate::rates::Rates;
use crate::stream_copy::{DeclineReason, is_candidate};
use libc::{c_int, c_uint, c_void};
use log::WarningLog;
use startup::{Startup, forget, start_in_background, startup};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

const ABI: u32 = 2;
const STARTING: i32 = 11;
/// The caller waits for the copy.
const SYNCHRONOUS: u32 = 1;
/// The null stream is the thread's own.
const PER_THREAD: u32 = 2;

type EnablePeer = unsafe extern "C" fn(ContextHandle, c_uint) -> Status;
type DisablePeer = unsafe extern "C" fn(ContextHandle) -> Status;

/// What the preload library calls.
#[repr(C)]
#[derive(Debug)]
pub struct CopyApi {
    abi: u32,
    size: u32,
    /// Smaller copies need not be offered. It changes once it is known what was measured on this
    /// host.
    min_bytes: AtomicU64,
    copy: unsafe extern "C" fn(*const Piece, u64, u32, StreamHandle, u32, *mut c_int) -> i32,
    enable_peer: unsafe extern "C" fn(ContextHandle, c_uint, EnablePeer) -> Status,
    disable_peer: unsafe extern "C" fn(ContextHandle, DisablePeer) -> Status,
    reset: extern "C" fn(c_int),
}

/// Null inside: there is no driver that can be used.
static DRIVER: OnceLock<Option<&'static Driver>> = OnceLock::new();
static API: OnceLock<CopyApi> = OnceLock::new();

/// Takes the driver over. Null when there is nothing to copy with.
///
/// # Safety
///
/// `real_dlsym` behaves as the C library's; `libcuda` is an open handle of the CUDA driver that is
/// never closed. `lines` is a descriptor for log lines that stays open.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn forebay_copy_open(
    real_dlsym: Option<Dlsym>,
    libcuda: *mut c_void,
    lines: c_int,
) -> *const CopyApi {
    let Some(real_dlsym) = real_dlsym.filter(|_| !libcuda.is_null()) else { return std::ptr::null() };
    let open = || {
        WarningLog::go_to(lines);
        // SAFETY: by this function's contract.
        let driver = unsafe { Driver::from_library(real_dlsym, libcuda) };
        let driver =
            driver.inspect_err(|error| tracing::warn!(reason = %error, "copies are left to the driver"));
        let _ = DRIVER.set(driver.ok());
        let min_bytes = AtomicU64::new(Rates::default().least_bytes());
        CopyApi {
            abi: ABI,
            size: size_of::<CopyApi>() as u32,
            min_bytes,
            copy,
            enable_peer,
            disable_peer,
            reset,
        }
    };
    // A panic must not leave Rust. Its message is on stderr.
    catch_unwind(|| std::ptr::from_ref(API.get_or_init(open))).unwrap_or(std::ptr::null())
}

fn driver() -> Option<&'static Driver> {
    DRIVER.get().copied().flatten()
}

/// Has the preload offer what is worth it by these rates.
fn ready(rates: &Rates) {
    API.wait().min_bytes.store(rates.least_bytes(), Ordering::Relaxed);
}

/// Takes a copy over (0), or says why not (above 0) and has done nothing then.
unsafe extern "C" fn copy(
    pairs: *const Piece,
    count: u64,
    direction: u32,
    stream: StreamHandle,
    flags: u32,
    result: *mut c_int,
) -> i32 {
    if pairs.is_null() || count == 0 {
        return DeclineReason::Small as i32;
    }
    // SAFETY: the caller gives `count` pairs.
    let pieces = unsafe { std::slice::from_raw_parts(pairs, count as usize) };
    let own = flags & PER_THREAD != 0 && stream.is_null();
    let stream = if own { abi::PER_THREAD_STREAM } else { stream };
    // SAFETY: the pairs are those of a copy that the program has asked the driver for.
    let copied = catch_unwind(AssertUnwindSafe(|| unsafe {
        copy_pieces(pieces, asked(direction), stream, flags & SYNCHRONOUS != 0)
    }));
    // A panic leaves, as an error does, right copies in the stream, behind which the driver makes
    // them again.
    match copied.unwrap_or(Err(DeclineReason::Fault as i32)) {
        Ok(status) => {
            // SAFETY: the caller gives a valid place.
            unsafe { *result = status };
            0
        }
        Err(declined) => declined,
    }
}

/// What the entry point says of the direction.
fn asked(direction: u32) -> Option<Direction> {
    match direction {
        0 => Some(Direction::HostToDevice),
        1 => Some(Direction::DeviceToHost),
        _ => None,
    }
}

/// # Safety
///
/// What holds for `cuMemcpyAsync` holds for every piece.
unsafe fn copy_pieces(
    pieces: &[Piece],
    asked: Option<Direction>,
    stream: StreamHandle,
    is_waited_for: bool,
) -> Result<Status, i32> {
    if pieces.iter().any(|piece| piece.bytes == 0) {
        return Err(DeclineReason::DriverJudges as i32);
    }
    let Some(startup) = startup() else { return Err(STARTING) };
    match &*startup {
        Startup::Failed => Err(DeclineReason::Fault as i32),
        Startup::Not => {
            let driver = driver().ok_or(DeclineReason::Fault as i32)?;
            is_candidate(driver, pieces, asked, stream).map_err(|why| why as i32)?;
            // It waits for nobody who reads.
            drop(startup);
            start_in_background(driver, ready);
            Err(STARTING)
        }
        Startup::With(stream_copies) => {
            // SAFETY: by this function's contract.
            let copied = unsafe {
                match is_waited_for {
                    true => stream_copies.copy_and_wait(pieces, asked, stream),
                    false => stream_copies.copy_asked(pieces, asked, stream).map(|()| abi::SUCCESS),
                }
            };
            copied.map_err(|why| why as i32)
        }
    }
}

/// The current context; null if there is none.
fn current() -> ContextHandle {
    let mut context = std::ptr::null_mut();
    if let Some(driver) = driver() {
        // SAFETY: the result is written to a valid place. It stays null after an error.
        unsafe { (driver.table().context_current)(&mut context) };
    }
    context
}

unsafe extern "C" fn enable_peer(peer: ContextHandle, flags: c_uint, real: EnablePeer) -> Status {
    // SAFETY: the program's own arguments.
    access::enabled(current(), peer, flags, || unsafe { real(peer, flags) })
}

unsafe extern "C" fn disable_peer(peer: ContextHandle, real: DisablePeer) -> Status {
    // SAFETY: the program's own arguments.
    access::disabled(current(), peer, || unsafe { real(peer) })
}

/// The program is about to reset the primary context of a GPU.
extern "C" fn reset(device: c_int) {
    // A panic must not leave Rust. Its message is on stderr.
    let _ = catch_unwind(|| {
        let _relaxed = driver().map(Relaxed::enter);
        forget(device);
    });
}
