//! Python's memory as a region: any writable buffer, or an address and a length. Driver: it vouches
//! for pointers.

use crate::errors::invalid;
use forebay_transfer::Backing;
use forebay_transfer::mapped;
use pyo3::buffer::PyUntypedBuffer;
use pyo3::prelude::*;
use pyo3::types::PyTuple;
use std::sync::Arc;

/// Where a region lies. The owner of the memory keeps it: for a buffer that is
/// [`Borrowed::buffer`].
struct Address {
    start: *mut u8,
    len: usize,
}

// SAFETY: what is at the address may be used from any thread: buffers are pinned by their export,
// see `Borrowed`, and for plain addresses the caller says so.
unsafe impl Send for Address {}
// SAFETY: as above; the address and the length never change.
unsafe impl Sync for Address {}

// SAFETY: a buffer's export keeps its memory in place until it is released, which `Agent` does
// after the region has been deregistered or the agent has ended. For a plain address the caller of
// `register_memory` promises the same.
unsafe impl Backing for Address {
    fn as_ptr(&self) -> *mut u8 {
        self.start
    }

    fn len(&self) -> usize {
        self.len
    }

    /// Whoever owns it may break the promise, which must not end the process.
    fn is_there(&self, offset: usize, len: usize, write: bool) -> bool {
        mapped::is_there(self.start as u64 + offset as u64, len as u64, write)
    }
}

/// Memory to be registered.
pub struct Borrowed {
    /// For the mover.
    pub backing: Arc<dyn Backing>,
    /// To be released when nothing touches the memory any more. `None` for a plain address.
    pub buffer: Option<PyUntypedBuffer>,
}

/// Memory of a GPU: a tuple (address, bytes).
pub fn range_of(memory: &Bound<'_, PyAny>) -> PyResult<(u64, u64)> {
    let other = |_| invalid(format!("memory of a GPU is a tuple (address, bytes), not {memory}"));
    memory.extract().map_err(other)
}

/// Takes a buffer that is contiguous and, if `writable`, can be written; or a tuple (address,
/// bytes).
pub fn borrow(memory: &Bound<'_, PyAny>, writable: bool) -> PyResult<Borrowed> {
    if let Ok(tuple) = memory.cast::<PyTuple>() {
        let other = || invalid(format!("memory is a buffer or a tuple (address, bytes), not {tuple}"));
        let (start, len): (usize, usize) = tuple.extract().map_err(|_| other())?;
        return Ok(Borrowed { backing: Arc::new(Address { start: start as *mut u8, len }), buffer: None });
    }
    let buffer = PyUntypedBuffer::get(memory)?;
    if writable && buffer.readonly() {
        return Err(invalid(
            "the buffer is read-only; allowed: one that can be written. Only an Agent takes others, with writable=False",
        ));
    }
    if !buffer.is_c_contiguous() {
        return Err(invalid("the buffer is not contiguous: its bytes do not lie one after another"));
    }
    let backing = Arc::new(Address { start: buffer.buf_ptr().cast(), len: buffer.len_bytes() });
    Ok(Borrowed { backing, buffer: Some(buffer) })
}
