//! Finding entry points by name, version and flags, and naming errors.

use crate::abi::Code;
use crate::caller::{put, put_if_wanted, text};
use crate::driver::State;
use crate::entry::{Entry, entries};
use std::ffi::{c_char, c_void};
use std::ptr::null_mut;

const PER_THREAD_DEFAULT_STREAM: u64 = 2;
const FOUND: u32 = 0;
const NOT_FOUND: u32 = 1;
const TOO_NEW: u32 = 2;

/// Every table of entry points.
const TABLES: &[&[Entry]] = &[
    ENTRIES,
    super::context::ENTRIES,
    super::copy::ENTRIES,
    super::device::ENTRIES,
    super::event::ENTRIES,
    super::graph::ENTRIES,
    super::ipc::ENTRIES,
    super::memory::ENTRIES,
    super::module::ENTRIES,
    super::stream::ENTRIES,
    super::vmm::ENTRIES,
];

/// The newest entry point of a name that `version` has, or why there is none.
fn find(state: &State, name: &str, version: i32, flags: u64) -> Result<*mut c_void, u32> {
    let newest = state.settings.version;
    let named = TABLES.iter().copied().flatten().filter(|entry| entry.name == name && entry.since <= newest);
    let mut named = named
        .filter(|entry| !state.faults.is_missing(name) && !state.faults.is_missing(entry.symbol))
        .peekable();
    named.peek().ok_or(NOT_FOUND)?;
    let fits = named.filter(|entry| entry.since <= version);
    let per_thread = flags & PER_THREAD_DEFAULT_STREAM != 0;
    let best = fits
        .filter(|entry| per_thread || !entry.per_thread)
        .max_by_key(|entry| (entry.per_thread, entry.since));
    best.map(|entry| entry.address as *mut c_void).ok_or(TOO_NEW)
}

entries! {
    cuGetProcAddress_v2 = "cuGetProcAddress" @ 12000
    (name: *const c_char, address: *mut *mut c_void, version: i32, flags: u64, status: *mut u32) |call| {
        if version > call.settings.version {
            return Err(Code::INVALID_VALUE);
        }
        let (found, answer) = match find(call, text(name)?, version, flags) {
            Ok(found) => (found, FOUND),
            Err(why) => (null_mut(), why),
        };
        put(address, found)?;
        put_if_wanted(status, answer);
        Ok(())
    }
    cuGetErrorName = "cuGetErrorName" @ 6000 (code: i32, name: *mut *const c_char) |_call| {
        put(name, Code(code).name().ok_or(Code::INVALID_VALUE)?.as_ptr())
    }
}
