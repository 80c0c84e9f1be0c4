//! The functions that programs call instead of the driver's: one for each entry point and way to
//! find it. They turn calling conventions into an offer, and an offer that was declined into the
//! call that the program made.

#![allow(non_snake_case)]

use crate::library::{CopyApi, Pair};
use crate::mode::{Mode, mode};
use crate::names::{ASKED, Function, LINKED, LOOKED_UP, WAYS, Way, by_query};
use crate::offer::{Attributes, Batch, Entry, answered, batch, is_inside, one};
use crate::real::{drivers, real, stand_for};
use std::ffi::{CStr, c_char, c_int, c_void};
use std::ptr::null_mut;

const SUCCESS: c_int = 0;
/// `CUDA_ERROR_NOT_INITIALIZED`: what a call of a driver that is not there returns.
const NO_DRIVER: c_int = 3;
/// What a batch writes for an error that is not one copy's.
const NO_SINGLE_COPY: usize = usize::MAX;

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

/// What to give a program that found `found`: our function, which stands for it from now on, unless
/// ours stands for another one already.
pub(crate) fn hand_out(way: Way, function: Function, found: *mut c_void) -> *mut c_void {
    let ours = entry(way, function);
    let is_ours = || (0..WAYS).any(|way| entry(way, function) == found);
    if found.is_null() || ours.is_null() || is_ours() || !stand_for(way, function, found) {
        return found;
    }
    ours
}

/// For each signature a function, which is there for each entry point and way. Its body is told the
/// entry point, and the function that it stands for. Exports a symbol for each entry point.
macro_rules! entries {
    ($($shape:ident $arguments:tt |$entry:pat_param, $real:ident| $body:block: $($function:literal $symbol:ident),*;)*) => {
        $(
            entries!(@shape $shape $arguments $entry, $real $body);
            $(entries!(@export $shape $arguments $function $symbol);)*
        )*

        /// Our function for an entry point that was found in one way; null if there is none.
        pub(crate) fn entry(way: Way, function: Function) -> *mut c_void {
            match (way, function) {
                $($(
                    (LINKED, $function) => $symbol as *mut c_void,
                    (LOOKED_UP, $function) => $shape::<LOOKED_UP, $function> as *mut c_void,
                    (ASKED, $function) => $shape::<ASKED, $function> as *mut c_void,
                )*)*
                _ => null_mut(),
            }
        }

        #[cfg(test)]
        const SYMBOLS: &[&str] = &[$($(stringify!($symbol)),*),*];
    };
    (@shape $shape:ident ($($argument:ident: $kind:ty),*) $entry:pat_param, $real:ident $body:block) => {
        #[allow(clippy::too_many_arguments)] // The driver's signature.
        unsafe extern "C" fn $shape<const WAY: Way, const FUNCTION: Function>($($argument: $kind),*) -> c_int {
            let goes_round = WAY == LINKED && is_inside();
            let found = if goes_round { drivers(FUNCTION) } else { real(WAY, FUNCTION, entry) };
            let Some(found) = found else { return NO_DRIVER };
            type Signature = unsafe extern "C" fn($($kind),*) -> c_int;
            // SAFETY: this is what the driver has under a symbol of this signature.
            let $real = unsafe { std::mem::transmute::<*mut c_void, Signature>(found) };
            let $entry = Entry { way: WAY, function: FUNCTION };
            $body
        }
    };
    (@export $shape:ident ($($argument:ident: $kind:ty),*) $function:literal $symbol:ident) => {
        #[cfg_attr(not(test), unsafe(no_mangle))]
        #[allow(clippy::too_many_arguments)]
        unsafe extern "C" fn $symbol($($argument: $kind),*) -> c_int {
            // SAFETY: the program's own arguments.
            unsafe { $shape::<LINKED, $function>($($argument),*) }
        }
    };
}

entries! {
    finished(to: u64, from: u64, bytes: usize) |entry, real| {
        let pair = Pair { from, to, bytes: bytes as u64 };
        // SAFETY: the program's own arguments.
        one(entry, pair, null_mut(), || unsafe { real(to, from, bytes) })
    }:
        0 cuMemcpy, 1 cuMemcpy_ptds, 2 cuMemcpyHtoD_v2, 3 cuMemcpyHtoD_v2_ptds, 4 cuMemcpyDtoH_v2,
        5 cuMemcpyDtoH_v2_ptds;

    enqueued(to: u64, from: u64, bytes: usize, stream: *mut c_void) |entry, real| {
        let pair = Pair { from, to, bytes: bytes as u64 };
        // SAFETY: the program's own arguments.
        one(entry, pair, stream, || unsafe { real(to, from, bytes, stream) })
    }:
        6 cuMemcpyAsync, 7 cuMemcpyAsync_ptsz, 8 cuMemcpyHtoDAsync_v2, 9 cuMemcpyHtoDAsync_v2_ptsz,
        10 cuMemcpyDtoHAsync_v2, 11 cuMemcpyDtoHAsync_v2_ptsz;

    batched(
        to: *const u64, from: *const u64, bytes: *const usize, count: usize, attributes: *const Attributes,
        attributes_from: *const usize, attributes_count: usize, failed: *mut usize, stream: *mut c_void
    ) |entry, real| {
        let asked = Batch { to, from, bytes, count, attributes, attributes_from, attributes_count, stream };
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
    }:
        12 cuMemcpyBatchAsync, 13 cuMemcpyBatchAsync_ptsz;

    batched_v2(
        to: *const u64, from: *const u64, bytes: *const usize, count: usize, attributes: *const Attributes,
        attributes_from: *const usize, attributes_count: usize, stream: *mut c_void
    ) |entry, real| {
        let asked = Batch { to, from, bytes, count, attributes, attributes_from, attributes_count, stream };
        // SAFETY: the program's own arguments, here and in the call of the real function.
        unsafe {
            batch(entry, asked, || {
                real(to, from, bytes, count, attributes, attributes_from, attributes_count, stream)
            })
        }
    }:
        14 cuMemcpyBatchAsync_v2, 15 cuMemcpyBatchAsync_v2_ptsz;

    query(name: *const c_char, found: *mut *mut c_void, version: c_int, flags: u64) |_, real| {
        // SAFETY: the program's own arguments, and what the driver wrote for them.
        unsafe {
            let result = real(name, found, version, flags);
            replace(result, name, found, version, flags);
            result
        }
    }:
        16 cuGetProcAddress;

    query_v2(
        name: *const c_char, found: *mut *mut c_void, version: c_int, flags: u64, status: *mut c_int
    ) |_, real| {
        // SAFETY: the program's own arguments, and what the driver wrote for them.
        unsafe {
            let result = real(name, found, version, flags, status);
            replace(result, name, found, version, flags);
            result
        }
    }:
        17 cuGetProcAddress_v2;

    enabling(peer: *mut c_void, flags: u32) |_, real| {
        // SAFETY: the program's own arguments, whoever calls.
        answered(|api| unsafe { (api.enable_peer)(peer, flags, real) }, || unsafe { real(peer, flags) })
    }:
        18 cuCtxEnablePeerAccess;

    disabling(peer: *mut c_void) |_, real| {
        // SAFETY: as above.
        answered(|api| unsafe { (api.disable_peer)(peer, real) }, || unsafe { real(peer) })
    }:
        19 cuCtxDisablePeerAccess;

    resetting(device: c_int) |_, real| {
        let told = |api: &CopyApi| {
            // SAFETY: as above; what the library has on that GPU is not used from here on.
            unsafe {
                (api.reset)(device);
                real(device)
            }
        };
        // SAFETY: as above.
        answered(told, || unsafe { real(device) })
    }:
        20 cuDevicePrimaryCtxReset, 21 cuDevicePrimaryCtxReset_v2;
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
