//! The driver's entry points, as the runtime asks for them.

use std::ffi::{CStr, c_char, c_void};
use std::sync::OnceLock;

/// The version that this runtime was built for.
const VERSION: i32 = 13000;
/// `CU_GET_PROC_ADDRESS_LEGACY_STREAM`, and `..._PER_THREAD_DEFAULT_STREAM`.
const FLAGS: [u64; 2] = [0, 2];
/// `cudaErrorInitializationError`: there is no driver, or it lacks something.
pub const NO_DRIVER: i32 = 3;

type GetProcAddress = unsafe extern "C" fn(*const c_char, *mut *mut c_void, i32, u64, *mut u32) -> i32;

/// An entry point for the legacy stream and its twin for the thread's own.
#[derive(Clone, Copy)]
pub struct Pair([usize; 2]);

impl Pair {
    /// The entry point, to be called as `F`, which is the type that `cuda.h` gives it. `None`: the
    /// driver lacks it.
    pub fn get<F: Copy>(self, per_thread: bool) -> Option<F> {
        const { assert!(size_of::<F>() == size_of::<usize>()) };
        let address = self.0[usize::from(per_thread)];
        // SAFETY: F is a function pointer, and the driver gave its address for the type that the
        // caller names.
        (address != 0).then(|| unsafe { std::mem::transmute_copy::<usize, F>(&address) })
    }
}

macro_rules! table {
    ($($field:ident $name:literal $legacy:literal $per_thread:literal;)*) => {
        /// What the runtime uses of the driver.
        pub struct Driver { $(pub $field: Pair,)* }

        impl Driver {
            fn load(get: GetProcAddress) -> Driver {
                Driver { $($field: Pair([find(get, $name, $legacy, FLAGS[0]), find(get, $name, $per_thread, FLAGS[1])]),)* }
            }
        }
    };
}

table! {
    init c"cuInit" 2000 2000;
    retain c"cuDevicePrimaryCtxRetain" 7000 7000;
    set_current c"cuCtxSetCurrent" 4000 4000;
    reset c"cuDevicePrimaryCtxReset" 11000 11000;
    enable_peer c"cuCtxEnablePeerAccess" 4000 4000;
    disable_peer c"cuCtxDisablePeerAccess" 4000 4000;
    count c"cuDeviceGetCount" 2000 2000;
    synchronize c"cuCtxSynchronize" 2000 2000;
    alloc c"cuMemAlloc" 3020 3020;
    free c"cuMemFree" 3020 3020;
    host_alloc c"cuMemHostAlloc" 2020 2020;
    free_host c"cuMemFreeHost" 2000 2000;
    host_register c"cuMemHostRegister" 6050 6050;
    host_unregister c"cuMemHostUnregister" 4000 4000;
    copy c"cuMemcpy" 4000 7000;
    copy_async c"cuMemcpyAsync" 4000 7000;
    h2d c"cuMemcpyHtoD" 3020 7000;
    d2h c"cuMemcpyDtoH" 3020 7000;
    d2d c"cuMemcpyDtoD" 3020 7000;
    h2d_async c"cuMemcpyHtoDAsync" 3020 7000;
    d2h_async c"cuMemcpyDtoHAsync" 3020 7000;
    d2d_async c"cuMemcpyDtoDAsync" 3020 7000;
    batch c"cuMemcpyBatchAsync" 13000 13000;
    set_async c"cuMemsetD8Async" 3020 7000;
    stream_create c"cuStreamCreate" 2000 2000;
    stream_destroy c"cuStreamDestroy" 4000 4000;
    stream_query c"cuStreamQuery" 2000 7000;
    stream_synchronize c"cuStreamSynchronize" 2000 7000;
    stream_wait c"cuStreamWaitEvent" 3020 7000;
    begin_capture c"cuStreamBeginCapture" 10010 10010;
    end_capture c"cuStreamEndCapture" 10000 10000;
    event_create c"cuEventCreate" 2000 2000;
    event_destroy c"cuEventDestroy" 4000 4000;
    event_record c"cuEventRecord" 2000 7000;
    event_synchronize c"cuEventSynchronize" 2000 2000;
}

/// An entry point's address; 0: there is none.
fn find(get: GetProcAddress, name: &CStr, since: i32, flags: u64) -> usize {
    let mut address = std::ptr::null_mut();
    let mut status = 0;
    // SAFETY: the signature of cuGetProcAddress_v2; name and results live for the call.
    let code = unsafe { get(name.as_ptr(), &mut address, since.min(VERSION), flags, &mut status) };
    if code == 0 && status == 0 { address as usize } else { 0 }
}

/// The driver, found at the first call.
pub fn driver() -> Option<&'static Driver> {
    static DRIVER: OnceLock<Option<Driver>> = OnceLock::new();
    let load = || {
        // SAFETY: plain dlopen and dlsym of a name; whatever interposes them answers as they would.
        let found = unsafe {
            let library = libc::dlopen(c"libcuda.so.1".as_ptr(), libc::RTLD_NOW);
            if library.is_null() { library } else { libc::dlsym(library, c"cuGetProcAddress_v2".as_ptr()) }
        };
        let get = Pair([found as usize; 2]).get::<GetProcAddress>(false)?;
        let driver = Driver::load(get);
        let init = driver.init.get::<unsafe extern "C" fn(u32) -> i32>(false)?;
        // SAFETY: the signature of cuInit.
        (unsafe { init(0) } == 0).then_some(driver)
    };
    DRIVER.get_or_init(load).as_ref()
}
