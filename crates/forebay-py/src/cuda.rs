//! Pinned memory for Python: a pool, and buffers of it that any program for buffers can use. This file knows objects and
//! who keeps memory alive; it must never know how memory is pinned.

use crate::errors::{ForebayError, NoRoomError};
use forebay_cuda::device::Device;
use forebay_cuda::driver::Driver;
use forebay_cuda::pinned::{self, PinError, PoolConfig};
use forebay_mover::Backing;
use pyo3::exceptions::PyBufferError;
use pyo3::ffi;
use pyo3::prelude::*;
use std::ffi::c_int;
use std::sync::OnceLock;

/// Pinned host memory that is kept when it is given back.
#[pyclass(frozen, module = "forebay.cuda")]
pub struct PinnedPool {
    pool: pinned::PinnedPool,
}

/// Pinned host memory, which its pool has back when nothing refers to it any more.
#[pyclass(frozen, module = "forebay.cuda")]
pub struct PinnedBuffer {
    buffer: pinned::PinnedBuffer,
}

#[pymethods]
impl PinnedPool {
    #[new]
    #[pyo3(signature = (limit_bytes, *, shared = false, device = 0))]
    fn new(py: Python<'_>, limit_bytes: u64, shared: bool, device: u16) -> PyResult<PinnedPool> {
        let config = if shared { PoolConfig::shared(limit_bytes) } else { PoolConfig::new(limit_bytes) };
        py.detach(|| {
            let device = Device::open(driver()?, device).map_err(failed)?;
            Ok(PinnedPool { pool: pinned::PinnedPool::new(&device, config) })
        })
    }

    /// Pins until the pool holds `bytes` bytes; with `wait=False` on a thread of its own.
    #[pyo3(signature = (bytes, *, wait = true))]
    fn warm(&self, py: Python<'_>, bytes: u64, wait: bool) -> PyResult<()> {
        if wait {
            py.detach(|| self.pool.warm(bytes)).map_err(unpinned)
        } else {
            // Nobody waits: what could not be pinned ahead is pinned, or refused, when it is asked for.
            self.pool.warm_in_background(bytes).map(drop).map_err(failed)
        }
    }

    fn take(&self, py: Python<'_>, bytes: u64) -> PyResult<PinnedBuffer> {
        let buffer = py.detach(|| self.pool.take(bytes)).map_err(unpinned)?;
        Ok(PinnedBuffer { buffer })
    }

    #[getter]
    fn held_bytes(&self) -> u64 {
        self.pool.counters().held_bytes
    }

    #[getter]
    fn lent_bytes(&self) -> u64 {
        self.pool.counters().lent_bytes
    }

    #[getter]
    fn registrations(&self) -> u64 {
        self.pool.counters().registrations
    }

    #[getter]
    fn pinning_seconds(&self) -> f64 {
        self.pool.counters().pinning.as_secs_f64()
    }
}

#[pymethods]
impl PinnedBuffer {
    #[getter]
    fn address(&self) -> usize {
        self.buffer.as_ptr() as usize
    }

    fn __len__(&self) -> usize {
        self.buffer.len()
    }

    /// The bytes, writable. A view refers to this object, so the pool does not have them back while one is left.
    ///
    /// # Safety
    ///
    /// `view` is null or a place for a view, as Python's buffer protocol has it.
    unsafe fn __getbuffer__(slf: Bound<'_, Self>, view: *mut ffi::Py_buffer, flags: c_int) -> PyResult<()> {
        let buffer = &slf.get().buffer;
        let len = ffi::Py_ssize_t::try_from(buffer.len()).map_err(PyBufferError::new_err)?;
        // SAFETY: by this function's contract; the memory is there, and writable, as long as the object is.
        let status =
            unsafe { ffi::PyBuffer_FillInfo(view, slf.as_ptr(), buffer.as_ptr().cast(), len, 0, flags) };
        if status == 0 { Ok(()) } else { Err(PyErr::fetch(slf.py())) }
    }
}

/// The driver, loaded once for the whole process.
fn driver() -> PyResult<&'static Driver> {
    static DRIVER: OnceLock<&'static Driver> = OnceLock::new();
    match DRIVER.get() {
        Some(driver) => Ok(driver),
        None => Driver::load().map(|driver| *DRIVER.get_or_init(|| driver)).map_err(failed),
    }
}

fn unpinned(error: PinError) -> PyErr {
    NoRoomError::new_err(error.to_string())
}

fn failed(error: impl std::error::Error) -> PyErr {
    ForebayError::new_err(error.to_string())
}
