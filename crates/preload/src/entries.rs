//! The functions that programs call instead of the driver's: one for each entry point and way to
//! find it. They turn calling conventions into an offer, and an offer that was declined into the
//! call that the program made.

#![allow(non_snake_case)]

use crate::library::{CopyApi, Pair};
use crate::mode::{Mode, mode};
use crate::names::{Function, by_query};
use crate::offer::{Attributes, Batch, Entry, answered, batch, is_inside, one};
use crate::real::{ASKED, LINKED, LOOKED_UP, Way, drivers, hand_out, real};
use std::ffi::{CStr, c_char, c_int, c_void};

const SUCCESS: c_int = 0;
/// `CUDA_ERROR_NOT_INITIALIZED`: what a call of a driver that is not there returns.
const NO_DRIVER: c_int = 3;
/// What a batch writes for an error that is not one copy's.
const NO_SINGLE_COPY: usize = usize::MAX;

type Finished = unsafe extern "C" fn(u64, u64, usize) -> c_int;
type Enqueued = unsafe extern "C" fn(u64, u64, usize, *mut c_void) -> c_int;
type Batched = unsafe extern "C" fn(
    *const u64,
    *const u64,
    *const usize,
    usize,
    *const Attributes,
    *const usize,
    usize,
    *mut usize,
    *mut c_void,
) -> c_int;
type BatchedV2 = unsafe extern "C" fn(
    *const u64,
    *const u64,
    *const usize,
    usize,
    *const Attributes,
    *const usize,
    usize,
    *mut c_void,
) -> c_int;
type Enabling = unsafe extern "C" fn(*mut c_void, u32) -> c_int;
type Disabling = unsafe extern "C" fn(*mut c_void) -> c_int;
type Resetting = unsafe extern "C" fn(c_int) -> c_int;
type Query = unsafe extern "C" fn(*const c_char, *mut *mut c_void, c_int, u64) -> c_int;
type QueryV2 = unsafe extern "C" fn(*const c_char, *mut *mut c_void, c_int, u64, *mut c_int) -> c_int;

/// The real function, with the signature that its table entry says.
macro_rules! real_or_return {
    ($signature:ty) => {{
        let found = if WAY == LINKED && is_inside() { drivers(FUNCTION) } else { real(WAY, FUNCTION) };
        let Some(found) = found else { return NO_DRIVER };
        // SAFETY: this is what the driver has under a symbol of this signature.
        unsafe { std::mem::transmute::<*mut c_void, $signature>(found) }
    }};
}

unsafe extern "C" fn finished<const WAY: Way, const FUNCTION: Function>(
    to: u64,
    from: u64,
    bytes: usize,
) -> c_int {
    let real = real_or_return!(Finished);
    let pair = Pair { from, to, bytes: bytes as u64 };
    let entry = Entry { way: WAY, function: FUNCTION };
    // SAFETY: the program's own arguments.
    one(entry, pair, std::ptr::null_mut(), || unsafe { real(to, from, bytes) })
}

unsafe extern "C" fn enqueued<const WAY: Way, const FUNCTION: Function>(
    to: u64,
    from: u64,
    bytes: usize,
    stream: *mut c_void,
) -> c_int {
    let real = real_or_return!(Enqueued);
    let pair = Pair { from, to, bytes: bytes as u64 };
    let entry = Entry { way: WAY, function: FUNCTION };
    // SAFETY: the program's own arguments.
    one(entry, pair, stream, || unsafe { real(to, from, bytes, stream) })
}

#[allow(clippy::too_many_arguments)] // The driver's signature.
unsafe extern "C" fn batched<const WAY: Way, const FUNCTION: Function>(
    to: *const u64,
    from: *const u64,
    bytes: *const usize,
    count: usize,
    attributes: *const Attributes,
    attributes_from: *const usize,
    attributes_count: usize,
    failed: *mut usize,
    stream: *mut c_void,
) -> c_int {
    let real = real_or_return!(Batched);
    let asked = Batch { to, from, bytes, count, attributes, attributes_from, attributes_count, stream };
    let entry = Entry { way: WAY, function: FUNCTION };
    let mut passed_on = false;
    // SAFETY: the program's own arguments, here and in the call of the real function.
    let result = unsafe {
        batch(entry, asked, || {
            passed_on = true;
            real(to, from, bytes, count, attributes, attributes_from, attributes_count, failed, stream)
        })
    };
    if !passed_on && result != SUCCESS && !failed.is_null() {
        // SAFETY: where the driver would have written.
        unsafe { failed.write(NO_SINGLE_COPY) };
    }
    result
}

#[allow(clippy::too_many_arguments)] // The driver's signature.
unsafe extern "C" fn batched_v2<const WAY: Way, const FUNCTION: Function>(
    to: *const u64,
    from: *const u64,
    bytes: *const usize,
    count: usize,
    attributes: *const Attributes,
    attributes_from: *const usize,
    attributes_count: usize,
    stream: *mut c_void,
) -> c_int {
    let real = real_or_return!(BatchedV2);
    let asked = Batch { to, from, bytes, count, attributes, attributes_from, attributes_count, stream };
    let entry = Entry { way: WAY, function: FUNCTION };
    // SAFETY: the program's own arguments, here and in the call of the real function.
    unsafe {
        batch(entry, asked, || {
            real(to, from, bytes, count, attributes, attributes_from, attributes_count, stream)
        })
    }
}

unsafe extern "C" fn enabling<const WAY: Way, const FUNCTION: Function>(
    peer: *mut c_void,
    flags: u32,
) -> c_int {
    let real = real_or_return!(Enabling);
    // SAFETY: the program's own arguments, whoever calls.
    answered(|api| unsafe { (api.enable_peer)(peer, flags, real) }, || unsafe { real(peer, flags) })
}

unsafe extern "C" fn disabling<const WAY: Way, const FUNCTION: Function>(peer: *mut c_void) -> c_int {
    let real = real_or_return!(Disabling);
    // SAFETY: as above.
    answered(|api| unsafe { (api.disable_peer)(peer, real) }, || unsafe { real(peer) })
}

unsafe extern "C" fn resetting<const WAY: Way, const FUNCTION: Function>(device: c_int) -> c_int {
    let real = real_or_return!(Resetting);
    let told = |api: &CopyApi| {
        // SAFETY: as above; what the library has on that GPU is not used from here on.
        unsafe {
            (api.reset)(device);
            real(device)
        }
    };
    // SAFETY: as above.
    answered(told, || unsafe { real(device) })
}

unsafe extern "C" fn query<const WAY: Way, const FUNCTION: Function>(
    name: *const c_char,
    found: *mut *mut c_void,
    version: c_int,
    flags: u64,
) -> c_int {
    let real = real_or_return!(Query);
    // SAFETY: the program's own arguments, and what the driver wrote for them.
    unsafe {
        let result = real(name, found, version, flags);
        replace(result, name, found, version, flags);
        result
    }
}

unsafe extern "C" fn query_v2<const WAY: Way, const FUNCTION: Function>(
    name: *const c_char,
    found: *mut *mut c_void,
    version: c_int,
    flags: u64,
    status: *mut c_int,
) -> c_int {
    let real = real_or_return!(QueryV2);
    // SAFETY: the program's own arguments, and what the driver wrote for them.
    unsafe {
        let result = real(name, found, version, flags, status);
        replace(result, name, found, version, flags);
        result
    }
}

/// Replaces what the driver found by ours, where we know what it is.
unsafe fn replace(result: c_int, name: *const c_char, found: *mut *mut c_void, version: c_int, flags: u64) {
    if result != SUCCESS || name.is_null() || found.is_null() || mode() == Mode::Off {
        return;
    }
    // SAFETY: the driver took the name for text that ends in NUL, and wrote to `found`.
    unsafe {
        if let Some(function) = by_query(CStr::from_ptr(name), version, flags) {
            *found = hand_out(ASKED, function, *found);
        }
    }
}

/// Exports a symbol for each entry point, and lists the functions of all three ways.
macro_rules! entries {
    ($($function:literal $symbol:ident $shape:ident($($argument:ident: $kind:ty),*);)*) => {
        $(
            #[cfg_attr(not(test), unsafe(no_mangle))]
            unsafe extern "C" fn $symbol($($argument: $kind),*) -> c_int {
                // SAFETY: the program's own arguments.
                unsafe { $shape::<LINKED, $function>($($argument),*) }
            }
        )*

        /// Our function for an entry point that was found in one way; null if there is none.
        pub(crate) fn entry(way: Way, function: Function) -> *mut c_void {
            match (way, function) {
                $(
                    (LINKED, $function) => $symbol as *mut c_void,
                    (LOOKED_UP, $function) => $shape::<LOOKED_UP, $function> as *mut c_void,
                    (ASKED, $function) => $shape::<ASKED, $function> as *mut c_void,
                )*
                _ => std::ptr::null_mut(),
            }
        }

        #[cfg(test)]
        const SYMBOLS: &[&str] = &[$(stringify!($symbol)),*];
    };
}

entries! {
    0 cuMemcpy finished(to: u64, from: u64, bytes: usize);
    1 cuMemcpy_ptds finished(to: u64, from: u64, bytes: usize);
    2 cuMemcpyHtoD_v2 finished(to: u64, from: u64, bytes: usize);
    3 cuMemcpyHtoD_v2_ptds finished(to: u64, from: u64, bytes: usize);
    4 cuMemcpyDtoH_v2 finished(to: u64, from: u64, bytes: usize);
    5 cuMemcpyDtoH_v2_ptds finished(to: u64, from: u64, bytes: usize);
    6 cuMemcpyAsync enqueued(to: u64, from: u64, bytes: usize, stream: *mut c_void);
    7 cuMemcpyAsync_ptsz enqueued(to: u64, from: u64, bytes: usize, stream: *mut c_void);
    8 cuMemcpyHtoDAsync_v2 enqueued(to: u64, from: u64, bytes: usize, stream: *mut c_void);
    9 cuMemcpyHtoDAsync_v2_ptsz enqueued(to: u64, from: u64, bytes: usize, stream: *mut c_void);
    10 cuMemcpyDtoHAsync_v2 enqueued(to: u64, from: u64, bytes: usize, stream: *mut c_void);
    11 cuMemcpyDtoHAsync_v2_ptsz enqueued(to: u64, from: u64, bytes: usize, stream: *mut c_void);
    12 cuMemcpyBatchAsync batched(
        to: *const u64, from: *const u64, bytes: *const usize, count: usize, attributes: *const Attributes,
        attributes_from: *const usize, attributes_count: usize, failed: *mut usize, stream: *mut c_void);
    13 cuMemcpyBatchAsync_ptsz batched(
        to: *const u64, from: *const u64, bytes: *const usize, count: usize, attributes: *const Attributes,
        attributes_from: *const usize, attributes_count: usize, failed: *mut usize, stream: *mut c_void);
    14 cuMemcpyBatchAsync_v2 batched_v2(
        to: *const u64, from: *const u64, bytes: *const usize, count: usize, attributes: *const Attributes,
        attributes_from: *const usize, attributes_count: usize, stream: *mut c_void);
    15 cuMemcpyBatchAsync_v2_ptsz batched_v2(
        to: *const u64, from: *const u64, bytes: *const usize, count: usize, attributes: *const Attributes,
        attributes_from: *const usize, attributes_count: usize, stream: *mut c_void);
    16 cuGetProcAddress query(name: *const c_char, found: *mut *mut c_void, version: c_int, flags: u64);
    17 cuGetProcAddress_v2 query_v2(
        name: *const c_char, found: *mut *mut c_void, version: c_int, flags: u64, status: *mut c_int);
    18 cuCtxEnablePeerAccess enabling(peer: *mut c_void, flags: u32);
    19 cuCtxDisablePeerAccess disabling(peer: *mut c_void);
    20 cuDevicePrimaryCtxReset resetting(device: c_int);
    21 cuDevicePrimaryCtxReset_v2 resetting(device: c_int);
}

#[cfg(test)]
mod tests {
    use super::SYMBOLS;
    use crate::names::NAMES;

    #[test]
    fn every_function_stands_at_the_place_of_its_name() {
        let names = NAMES.iter().map(|name| name.symbol.to_str().unwrap());
        assert!(names.eq(SYMBOLS.iter().copied()));
    }
}
