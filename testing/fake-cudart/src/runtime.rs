//! The runtime's calls, each a call of the driver.

use crate::driver::{Driver, NO_DRIVER, driver};
use std::cell::Cell;
use std::ffi::c_void;

thread_local! {
    /// The thread's device, and whether its context is current.
    static DEVICE: Cell<(i32, bool)> = const { Cell::new((0, false)) };
}

type Address = *mut c_void;

/// Serves a call in the thread's context.
fn serve(call: impl FnOnce(&Driver) -> Option<i32>) -> i32 {
    let Some(driver) = driver() else { return NO_DRIVER };
    match make_current(driver) {
        Some(0) => call(driver).unwrap_or(NO_DRIVER),
        error => error.unwrap_or(NO_DRIVER),
    }
}

fn make_current(driver: &Driver) -> Option<i32> {
    let (device, current) = DEVICE.get();
    if current {
        return Some(0);
    }
    let retain = driver.retain.get::<unsafe extern "C" fn(*mut usize, i32) -> i32>(false)?;
    let set = driver.set_current.get::<unsafe extern "C" fn(usize) -> i32>(false)?;
    let mut context = 0;
    // SAFETY: the signatures of cuDevicePrimaryCtxRetain and cuCtxSetCurrent.
    let code = unsafe {
        match retain(&mut context, device) {
            0 => set(context),
            code => code,
        }
    };
    DEVICE.set((device, code == 0));
    Some(code)
}

/// Calls that the driver has with the same arguments.
macro_rules! calls {
    ($($name:ident($($arg:ident: $kind:ty),*) => $entry:ident;)*) => { $(
        #[unsafe(no_mangle)]
        extern "C" fn $name($($arg: $kind),*) -> i32 {
            serve(|driver| {
                let entry = driver.$entry.get::<unsafe extern "C" fn($($kind),*) -> i32>(false)?;
                // SAFETY: the entry point has this signature, and the arguments are the caller's.
                Some(unsafe { entry($($arg),*) })
            })
        }
    )* };
}

calls! {
    cudaDeviceSynchronize() => synchronize;
    cudaMalloc(address: *mut Address, bytes: usize) => alloc;
    cudaFree(address: Address) => free;
    cudaHostAlloc(address: *mut Address, bytes: usize, flags: u32) => host_alloc;
    cudaFreeHost(address: Address) => free_host;
    cudaHostRegister(address: Address, bytes: usize, flags: u32) => host_register;
    cudaHostUnregister(address: Address) => host_unregister;
    cudaStreamCreateWithFlags(stream: *mut usize, flags: u32) => stream_create;
    cudaStreamDestroy(stream: usize) => stream_destroy;
    cudaStreamBeginCapture(stream: usize, mode: u32) => begin_capture;
    cudaStreamEndCapture(stream: usize, graph: *mut usize) => end_capture;
    cudaEventCreateWithFlags(event: *mut usize, flags: u32) => event_create;
    cudaEventDestroy(event: usize) => event_destroy;
    cudaEventSynchronize(event: usize) => event_synchronize;
}

/// Calls with a twin for the per-thread default stream: `_ptsz` or `_ptds`.
macro_rules! twins {
    ($($name:ident $twin:ident ($($arg:ident: $kind:ty),*) |$driver:ident, $per_thread:ident| $body:expr;)*) => { $(
        #[unsafe(no_mangle)]
        extern "C" fn $name($($arg: $kind),*) -> i32 {
            let $per_thread = false;
            serve(|$driver| $body)
        }
        #[unsafe(no_mangle)]
        extern "C" fn $twin($($arg: $kind),*) -> i32 {
            let $per_thread = true;
            serve(|$driver| $body)
        }
    )* };
}

/// A copy that the caller waits for, by `cudaMemcpyKind`.
fn copy(
    driver: &Driver,
    to: Address,
    from: Address,
    bytes: usize,
    kind: i32,
    per_thread: bool,
) -> Option<i32> {
    let entry = match kind {
        1 => driver.h2d,
        2 => driver.d2h,
        3 => driver.d2d,
        _ => driver.copy,
    };
    let entry = entry.get::<unsafe extern "C" fn(Address, Address, usize) -> i32>(per_thread)?;
    // SAFETY: cuMemcpy, cuMemcpyHtoD, cuMemcpyDtoH and cuMemcpyDtoD take an address, an address and
    // a length.
    Some(unsafe { entry(to, from, bytes) })
}

/// A copy in a stream, by `cudaMemcpyKind`.
fn copy_async(
    driver: &Driver,
    to: Address,
    from: Address,
    bytes: usize,
    kind: i32,
    stream: usize,
    per_thread: bool,
) -> Option<i32> {
    let entry = match kind {
        1 => driver.h2d_async,
        2 => driver.d2h_async,
        3 => driver.d2d_async,
        _ => driver.copy_async,
    };
    let entry = entry.get::<unsafe extern "C" fn(Address, Address, usize, usize) -> i32>(per_thread)?;
    // SAFETY: as above, and the stream.
    Some(unsafe { entry(to, from, bytes, stream) })
}

type Batch = unsafe extern "C" fn(
    *const Address,
    *const Address,
    *const usize,
    usize,
    *const c_void,
    *const usize,
    usize,
    usize,
) -> i32;

twins! {
    cudaMemcpy cudaMemcpy_ptds(to: Address, from: Address, bytes: usize, kind: i32) |driver, per_thread| {
        copy(driver, to, from, bytes, kind, per_thread)
    };
    cudaMemcpyAsync cudaMemcpyAsync_ptsz(to: Address, from: Address, bytes: usize, kind: i32, stream: usize)
    |driver, per_thread| {
        copy_async(driver, to, from, bytes, kind, stream, per_thread)
    };
    cudaMemcpyBatchAsync cudaMemcpyBatchAsync_ptsz(
        to: *const Address, from: *const Address, bytes: *const usize, count: usize, attrs: *const c_void,
        starts: *const usize, attr_count: usize, stream: usize
    ) |driver, per_thread| {
        let entry = driver.batch.get::<Batch>(per_thread)?;
        // SAFETY: cuMemcpyBatchAsync of 13000 has this signature; the arguments are the caller's.
        Some(unsafe { entry(to, from, bytes, count, attrs, starts, attr_count, stream) })
    };
    cudaMemsetAsync cudaMemsetAsync_ptsz(at: Address, value: i32, bytes: usize, stream: usize) |driver, per_thread| {
        let entry = driver.set_async.get::<unsafe extern "C" fn(Address, u8, usize, usize) -> i32>(per_thread)?;
        // SAFETY: the signature of cuMemsetD8Async.
        Some(unsafe { entry(at, value as u8, bytes, stream) })
    };
    cudaStreamQuery cudaStreamQuery_ptsz(stream: usize) |driver, per_thread| {
        let entry = driver.stream_query.get::<unsafe extern "C" fn(usize) -> i32>(per_thread)?;
        // SAFETY: the signature of cuStreamQuery.
        Some(unsafe { entry(stream) })
    };
    cudaStreamSynchronize cudaStreamSynchronize_ptsz(stream: usize) |driver, per_thread| {
        let entry = driver.stream_synchronize.get::<unsafe extern "C" fn(usize) -> i32>(per_thread)?;
        // SAFETY: the signature of cuStreamSynchronize.
        Some(unsafe { entry(stream) })
    };
    cudaStreamWaitEvent cudaStreamWaitEvent_ptsz(stream: usize, event: usize, flags: u32) |driver, per_thread| {
        let entry = driver.stream_wait.get::<unsafe extern "C" fn(usize, usize, u32) -> i32>(per_thread)?;
        // SAFETY: the signature of cuStreamWaitEvent.
        Some(unsafe { entry(stream, event, flags) })
    };
    cudaEventRecord cudaEventRecord_ptsz(event: usize, stream: usize) |driver, per_thread| {
        let entry = driver.event_record.get::<unsafe extern "C" fn(usize, usize) -> i32>(per_thread)?;
        // SAFETY: the signature of cuEventRecord.
        Some(unsafe { entry(event, stream) })
    };
}

/// As cudaStreamCreateWithFlags without any.
#[unsafe(no_mangle)]
extern "C" fn cudaStreamCreate(stream: *mut usize) -> i32 {
    cudaStreamCreateWithFlags(stream, 0)
}

/// As cudaHostAlloc without any flags.
#[unsafe(no_mangle)]
extern "C" fn cudaMallocHost(address: *mut Address, bytes: usize) -> i32 {
    cudaHostAlloc(address, bytes, 0)
}

/// The thread's device from now on.
#[unsafe(no_mangle)]
extern "C" fn cudaSetDevice(device: i32) -> i32 {
    DEVICE.set((device, false));
    serve(|_| Some(0))
}

/// Takes away all that the thread's device has in this process. The next call makes its context
/// anew.
#[unsafe(no_mangle)]
extern "C" fn cudaDeviceReset() -> i32 {
    let code = serve(|driver| {
        let entry = driver.reset.get::<unsafe extern "C" fn(i32) -> i32>(false)?;
        // SAFETY: the signature of cuDevicePrimaryCtxReset.
        Some(unsafe { entry(DEVICE.get().0) })
    });
    DEVICE.set((DEVICE.get().0, false));
    code
}

/// Lets the thread's device reach the memory of another.
#[unsafe(no_mangle)]
extern "C" fn cudaDeviceEnablePeerAccess(peer: i32, flags: u32) -> i32 {
    serve(|driver| {
        let entry = driver.enable_peer.get::<unsafe extern "C" fn(usize, u32) -> i32>(false)?;
        let retain = driver.retain.get::<unsafe extern "C" fn(*mut usize, i32) -> i32>(false)?;
        let mut context = 0;
        // SAFETY: the signatures of cuDevicePrimaryCtxRetain and cuCtxEnablePeerAccess.
        Some(unsafe {
            match retain(&mut context, peer) {
                0 => entry(context, flags),
                code => code,
            }
        })
    })
}

/// Ends that.
#[unsafe(no_mangle)]
extern "C" fn cudaDeviceDisablePeerAccess(peer: i32) -> i32 {
    serve(|driver| {
        let entry = driver.disable_peer.get::<unsafe extern "C" fn(usize) -> i32>(false)?;
        let retain = driver.retain.get::<unsafe extern "C" fn(*mut usize, i32) -> i32>(false)?;
        let mut context = 0;
        // SAFETY: the signatures of cuDevicePrimaryCtxRetain and cuCtxDisablePeerAccess.
        Some(unsafe {
            match retain(&mut context, peer) {
                0 => entry(context),
                code => code,
            }
        })
    })
}

/// The thread's device.
#[unsafe(no_mangle)]
extern "C" fn cudaGetDevice(device: *mut i32) -> i32 {
    // SAFETY: the C contract: a result pointer points at writable memory.
    unsafe { device.write(DEVICE.get().0) };
    0
}

/// How many devices there are.
#[unsafe(no_mangle)]
extern "C" fn cudaGetDeviceCount(count: *mut i32) -> i32 {
    let ask = |driver: &Driver| {
        let entry = driver.count.get::<unsafe extern "C" fn(*mut i32) -> i32>(false)?;
        // SAFETY: the signature of cuDeviceGetCount.
        Some(unsafe { entry(count) })
    };
    driver().and_then(ask).unwrap_or(NO_DRIVER)
}
