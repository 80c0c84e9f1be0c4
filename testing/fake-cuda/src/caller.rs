//! Reading and writing what a caller's pointers point at. This is the one place that follows
//! pointers of the C ABI. A caller who passes a wild pointer breaks the contract of `cuda.h`, here
//! as there.

use crate::abi::{Code, Outcome};
use std::ffi::{CStr, c_char};

/// Stores a result; a null pointer is the caller's mistake.
pub fn put<T>(at: *mut T, value: T) -> Outcome {
    if at.is_null() {
        return Err(Code::INVALID_VALUE);
    }
    // SAFETY: the C contract: a result pointer that is not null points at writable memory for a T.
    unsafe { at.write_unaligned(value) };
    Ok(())
}

/// Stores a result that the caller may decline by a null pointer.
pub fn put_if_wanted<T>(at: *mut T, value: T) {
    if !at.is_null() {
        let _ = put(at, value);
    }
}

/// Reads one value.
pub fn get<T: Copy>(at: *const T) -> Outcome<T> {
    if at.is_null() {
        return Err(Code::INVALID_VALUE);
    }
    // SAFETY: the C contract: an argument pointer that is not null points at a readable T.
    Ok(unsafe { at.read_unaligned() })
}

/// Reads `count` values.
pub fn get_all<T: Copy>(at: *const T, count: usize) -> Outcome<Vec<T>> {
    (0..count).map(|index| get(at.wrapping_add(index))).collect()
}

/// Reads a name.
pub fn text<'a>(at: *const c_char) -> Outcome<&'a str> {
    if at.is_null() {
        return Err(Code::INVALID_VALUE);
    }
    // SAFETY: the C contract: a name is text that ends with a zero byte and lives for the call.
    unsafe { CStr::from_ptr(at) }.to_str().map_err(|_| Code::INVALID_VALUE)
}

/// Stores a text of at most `bytes` bytes, its closing zero among them.
pub fn put_text(at: *mut c_char, bytes: usize, text: &str) -> Outcome {
    if at.is_null() || bytes == 0 {
        return Err(Code::INVALID_VALUE);
    }
    let kept = text.len().min(bytes - 1);
    for (index, byte) in text.bytes().take(kept).chain([0]).enumerate() {
        put(at.wrapping_add(index), byte as c_char)?;
    }
    Ok(())
}
