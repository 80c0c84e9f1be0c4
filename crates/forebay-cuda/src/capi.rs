//! The C interface by which `libforebay_preload.so` hands copies over; docs/preload.md has the header. Starting takes a few
//! hundred milliseconds, for a context on each GPU, so it happens in the background and copies are declined until then. This
//! file knows the ABI; it must never know which program calls.

use crate::chain::{Chains, Declined};
use crate::copier::StartError;
use crate::device::Device;
use crate::driver::abi::{self, Dlsym, StreamHandle};
use crate::driver::{Driver, Relaxed};
use crate::gpu::Gpu;
use crate::kernels::{Kernels, Piece};
use crate::profile::Profile;
use crate::rates::Rates;
use libc::{c_int, c_void};
use std::io::Write;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

/// Version of the structures below.
const ABI: u32 = 1;
/// Why a copy is declined while the start is under way.
const STARTING: i32 = 11;
/// The caller waits for the copy.
const SYNCHRONOUS: u32 = 1;
/// The null stream is the thread's own.
const PER_THREAD: u32 = 2;

/// What the preload library calls.
#[repr(C)]
#[derive(Debug)]
pub struct CopyApi {
    abi: u32,
    size: u32,
    /// Smaller copies need not be offered. It changes once it is known what was measured on this host.
    min_bytes: AtomicU64,
    copy: unsafe extern "C" fn(*const Piece, u64, u32, StreamHandle, u32, *mut c_int) -> i32,
}

/// What copies are made with, once it has started. `None` when it could not. Never dropped: the driver may be gone by then.
static CHAINS: OnceLock<Option<Chains>> = OnceLock::new();
static API: OnceLock<CopyApi> = OnceLock::new();

/// Begins to start. Null when there is nothing to start with.
///
/// # Safety
///
/// `real_dlsym` behaves as the C library's; `libcuda` is an open handle of the CUDA driver that is never closed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn forebay_copy_open(
    real_dlsym: Option<Dlsym>,
    libcuda: *mut c_void,
) -> *const CopyApi {
    let Some(real_dlsym) = real_dlsym.filter(|_| !libcuda.is_null()) else { return std::ptr::null() };
    let open = || {
        // SAFETY: by this function's contract.
        let driver = unsafe { Driver::from_library(real_dlsym, libcuda) };
        let started = driver.map_err(StartError::from).and_then(start_behind);
        if let Err(error) = started {
            let _ = CHAINS.set(complain(&error));
        }
        let min_bytes = AtomicU64::new(Rates::default().least_bytes());
        CopyApi { abi: ABI, size: size_of::<CopyApi>() as u32, min_bytes, copy }
    };
    // A panic must not leave Rust. Its message is on stderr.
    catch_unwind(|| std::ptr::from_ref(API.get_or_init(open))).unwrap_or(std::ptr::null())
}

/// Starts on a thread of its own.
fn start_behind(driver: &'static Driver) -> Result<(), StartError> {
    let start = move || {
        let chains = started(driver);
        if let Some(chains) = &chains {
            API.wait().min_bytes.store(chains.rates().least_bytes(), Ordering::Relaxed);
        }
        drop(CHAINS.set(chains));
    };
    let thread = std::thread::Builder::new().name("forebay-start".into());
    thread.spawn(start).map(drop).map_err(StartError::Thread)
}

/// What copies are made with; nothing, and a line on stderr, where that does not start.
fn started(driver: &'static Driver) -> Option<Chains> {
    let start = AssertUnwindSafe(|| start(driver));
    catch_unwind(start).ok()?.map_or_else(|error| complain(&error), Some)
}

fn complain(error: &StartError) -> Option<Chains> {
    // The program may have closed it, and is not to end for that.
    let _ = writeln!(std::io::stderr(), "forebay: copies are left to the driver: {error}");
    None
}

fn start(driver: &'static Driver) -> Result<Chains, StartError> {
    let _relaxed = Relaxed::enter(driver);
    let gpu = |index| Ok(Arc::new(Kernels::load(&Device::open(driver, index)?)?));
    let gpus = (0..Gpu::count(driver)?).map(gpu).collect::<Result<Vec<_>, StartError>>()?;
    let rates = Profile::kept(driver).as_ref().map(Rates::from).unwrap_or_default();
    Ok(Chains::new(driver, &gpus, rates)?)
}

/// Takes a copy over (0), or says why not (above 0) and has done nothing then.
unsafe extern "C" fn copy(
    pairs: *const Piece,
    count: u64,
    _direction: u32,
    stream: StreamHandle,
    flags: u32,
    result: *mut c_int,
) -> i32 {
    let Some(started) = CHAINS.get() else { return STARTING };
    let Some(chains) = started else { return Declined::Fault as i32 };
    if pairs.is_null() || count == 0 {
        return Declined::Small as i32;
    }
    // SAFETY: the caller gives `count` pairs.
    let pieces = unsafe { std::slice::from_raw_parts(pairs, count as usize) };
    let own = flags & PER_THREAD != 0 && stream.is_null();
    let stream = if own { abi::PER_THREAD_STREAM } else { stream };
    // SAFETY: the pairs are those of a copy that the program has asked the driver for.
    let copied = catch_unwind(AssertUnwindSafe(|| unsafe { chains.copy(pieces, stream) }));
    // A panic leaves, as an error does, right copies in the stream, behind which the driver makes them again.
    if let Err(declined) = copied.unwrap_or(Err(Declined::Fault)) {
        return declined as i32;
    }
    let status = if flags & SYNCHRONOUS != 0 { chains.wait(stream) } else { abi::SUCCESS };
    // SAFETY: the caller gives a valid place.
    unsafe { *result = status };
    0
}
