//! Pinned memory for Python: a pool, and buffers of it that any program for buffers can use. This
//! file knows objects and who keeps memory alive.

use super::driver;
use crate::errors::{NoRoomError, failed, invalid};
use crate::process::Own;
use forebay_cuda::device::Device;
use forebay_cuda::pinned::{self, PinError, PoolConfig};
use forebay_transfer::Backing;
use forebay_transfer::lock::{Mutex, MutexGuard};
use pyo3::exceptions::PyBufferError;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyTuple;
use std::ffi::c_int;

/// Pinned host memory that is kept when it is given back.
#[pyclass(frozen, module = "forebay.cuda")]
pub struct PinnedPool {
    pool: Own<pinned::PinnedPool>,
}

/// Pinned host memory, which its pool has back when it is closed, or when nothing refers to it any
/// more.
#[pyclass(frozen, module = "forebay.cuda")]
pub struct PinnedBuffer {
    shared: Own<Mutex<Taken>>,
}

struct Taken {
    /// `None` once it is closed.
    buffer: Option<pinned::PinnedBuffer>,
    /// Views of Python's that look at the memory.
    views: usize,
}

#[pymethods]
impl PinnedPool {
    #[new]
    #[pyo3(signature = (limit_bytes, *, shared = false, device = 0))]
    fn new(py: Python<'_>, limit_bytes: u64, shared: bool, device: u16) -> PyResult<PinnedPool> {
        let config = if shared { PoolConfig::shared(limit_bytes) } else { PoolConfig::new(limit_bytes) };
        py.detach(|| {
            let device = Device::open(driver()?, device).map_err(failed)?;
            Ok(PinnedPool { pool: Own::new(pinned::PinnedPool::new(&device, config)) })
        })
    }

    /// Pins until the pool holds `bytes` bytes, on a thread of its own unless the caller waits.
    #[pyo3(signature = (bytes, *, wait = false))]
    fn warm(&self, py: Python<'_>, bytes: u64, wait: bool) -> PyResult<()> {
        let pool = self.pool.get()?;
        if wait {
            py.detach(|| pool.warm(bytes)).map_err(unpinned)
        } else {
            // Nobody waits: what could not be pinned ahead is pinned, or refused, when it is asked
            // for.
            pool.warm_in_background(bytes).map(drop).map_err(failed)
        }
    }

    fn take(&self, py: Python<'_>, bytes: u64) -> PyResult<PinnedBuffer> {
        let pool = self.pool.get()?;
        let buffer = py.detach(|| pool.take(bytes)).map_err(unpinned)?;
        Ok(PinnedBuffer { shared: Own::new(Mutex::new(Taken { buffer: Some(buffer), views: 0 })) })
    }

    #[getter]
    fn held_bytes(&self) -> PyResult<u64> {
        Ok(self.pool.get()?.counters().held_bytes)
    }

    #[getter]
    fn lent_bytes(&self) -> PyResult<u64> {
        Ok(self.pool.get()?.counters().lent_bytes)
    }

    #[getter]
    fn registrations(&self) -> PyResult<u64> {
        Ok(self.pool.get()?.counters().registrations)
    }

    #[getter]
    fn pinning_seconds(&self) -> PyResult<f64> {
        Ok(self.pool.get()?.counters().pinning.as_secs_f64())
    }
}

#[pymethods]
impl PinnedBuffer {
    #[getter]
    fn address(&self) -> PyResult<usize> {
        Ok(self.lock()?.open()?.as_ptr() as usize)
    }

    #[getter]
    fn bytes(&self) -> PyResult<usize> {
        Ok(self.lock()?.open()?.len())
    }

    fn __len__(&self) -> PyResult<usize> {
        self.bytes()
    }

    /// Gives the memory back, once: no copy may be using it any more.
    fn close(&self) -> PyResult<()> {
        let mut taken = self.lock()?;
        if taken.views > 0 {
            let views = taken.views;
            return Err(PyBufferError::new_err(format!("{views} views look at the memory: release them")));
        }
        taken.buffer = None;
        Ok(())
    }

    fn __enter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    #[pyo3(signature = (*_error))]
    fn __exit__(&self, _error: &Bound<'_, PyTuple>) -> PyResult<()> {
        self.close()
    }

    /// The bytes, writable. While a view is left, the pool does not have them back.
    ///
    /// # Safety
    ///
    /// `view` is null or a place for a view, as Python's buffer protocol has it.
    unsafe fn __getbuffer__(slf: Bound<'_, Self>, view: *mut ffi::Py_buffer, flags: c_int) -> PyResult<()> {
        let mut taken = slf.get().lock()?;
        let buffer = taken.open()?;
        let len = ffi::Py_ssize_t::try_from(buffer.len()).map_err(PyBufferError::new_err)?;
        // SAFETY: by this function's contract; the memory is there, and writable, until no view is
        // left.
        let status =
            unsafe { ffi::PyBuffer_FillInfo(view, slf.as_ptr(), buffer.as_ptr().cast(), len, 0, flags) };
        if status != 0 {
            return Err(PyErr::fetch(slf.py()));
        }
        taken.views += 1;
        Ok(())
    }

    /// # Safety
    ///
    /// Python calls it once for each view that it got.
    unsafe fn __releasebuffer__(&self, _view: *mut ffi::Py_buffer) {
        // Another process has views of memory that is the parent's.
        if let Ok(mut taken) = self.lock() {
            taken.views -= 1;
        }
    }
}

impl PinnedBuffer {
    fn lock(&self) -> PyResult<MutexGuard<'_, Taken>> {
        Ok(self.shared.get()?.lock())
    }
}

impl Taken {
    fn open(&self) -> PyResult<&pinned::PinnedBuffer> {
        self.buffer.as_ref().ok_or_else(|| invalid("the buffer is closed"))
    }
}

fn unpinned(error: PinError) -> PyErr {
    NoRoomError::new_err(error.to_string())
}
