//! Copies between pinned host memory and GPUs for Python. This file knows lists of copies and what
//! they ended in.

use super::driver;
use crate::errors::{failed, invalid, not_moved};
use crate::process::Own;
use crate::rows;
use forebay_cuda::kernels::Piece;
use forebay_cuda::remote::{NodeRelays, RelaysAt, Status};
use forebay_cuda::stream_copy::{DeclineReason, PathRate};
use forebay_cuda::{CopierOptions, CopyError, StartError};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};
use std::path::PathBuf;
use std::sync::atomic::Ordering::Relaxed;

/// Every path between host memory and the GPUs of this process. For any number of threads.
#[pyclass(frozen, module = "forebay.cuda")]
pub struct Copier(Own<forebay_cuda::Copier>);

#[pymethods]
impl Copier {
    #[new]
    #[pyo3(signature = (devices = None, *, relays = None, token = String::new()))]
    fn new(
        py: Python<'_>,
        devices: Option<Vec<u16>>,
        relays: Option<PathBuf>,
        token: String,
    ) -> PyResult<Copier> {
        let relays =
            relays.map_or(NodeRelays::FromEnvironment, |socket| NodeRelays::At(RelaysAt { socket, token }));
        let options = CopierOptions { devices, relays, ..CopierOptions::default() };
        py.detach(|| {
            let copier = forebay_cuda::Copier::with_driver(driver()?, &options).map_err(not_started)?;
            Ok(Copier(Own::new(copier)))
        })
    }

    /// Puts copies into a stream. What follows in it waits for them.
    #[pyo3(signature = (pairs, *, stream = 0))]
    fn copy_batch(&self, py: Python<'_>, pairs: &Bound<'_, PyAny>, stream: usize) -> PyResult<()> {
        let (copier, pieces) = (self.0.get()?, read(pairs)?);
        // SAFETY: Python's callers answer for addresses and streams, as they do with every binding
        // of the driver.
        let queued = py.detach(|| unsafe { copier.copy_in_stream(&pieces, stream as *mut _) });
        queued.map(drop).map_err(not_moved)
    }

    /// Copies at once and waits. When it returns, or raises, nothing of it is under way any more.
    fn copy_batch_and_wait(&self, py: Python<'_>, pairs: &Bound<'_, PyAny>) -> PyResult<()> {
        let (copier, pieces) = (self.0.get()?, read(pairs)?);
        // SAFETY: as above.
        py.detach(|| unsafe { copier.copy_all_and_wait(&pieces) }).map_err(not_copied)
    }

    /// What was done since the start.
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let copier = self.0.get()?;
        let links = py.detach(|| copier.telemetry()).map_err(failed)?.links;
        let counters = copier.stream_copies().counters();
        let (declined, by_link) = (PyDict::new(py), PyDict::new(py));
        for why in DeclineReason::ALL.into_iter().filter(|why| counters.declined(*why) > 0) {
            declined.set_item(why.to_string(), counters.declined(why))?;
        }
        for link in links {
            by_link.set_item(link.name, link.bytes)?;
        }
        let stats = PyDict::new(py);
        stats.set_item("chains", counters.stream_copies.load(Relaxed))?;
        stats.set_item("direct_bytes", counters.direct_bytes.load(Relaxed))?;
        stats.set_item("relayed_bytes", counters.relayed_bytes.load(Relaxed))?;
        stats.set_item("declined", declined)?;
        stats.set_item("links", by_link)?;
        stats.set_item("paths", paths(py, copier)?)?;
        stats.set_item("relays", self.relays(py)?)?;
        Ok(stats)
    }
}

impl Copier {
    /// By GPU, the relays of a node's process: how many are in use, the bytes that they reach, and
    /// why there are none.
    fn relays<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let by_gpu = PyDict::new(py);
        let copier = self.0.get()?;
        for relays in copier.devices().filter_map(|device| copier.relays(device.index())) {
            let (count, reason) = match relays.status() {
                Status::Attached { relays } => (relays, None),
                Status::Detached { reason } => (0, Some(reason)),
            };
            let one = PyDict::new(py);
            one.set_item("relays", count)?;
            one.set_item("shared_bytes", relays.shared_bytes())?;
            one.set_item("reason", reason)?;
            by_gpu.set_item(relays.device(), one)?;
        }
        Ok(by_gpu)
    }
}

/// What each path carries by the last copies: the GPU, the direction, whose link it is and its
/// rate.
fn paths<'py>(py: Python<'py>, copier: &forebay_cuda::Copier) -> PyResult<Bound<'py, PyList>> {
    let path = |rate: PathRate| {
        let path = PyDict::new(py);
        path.set_item("gpu", rate.gpu)?;
        path.set_item("direction", rate.direction.name())?;
        path.set_item("over", rate.over)?;
        path.set_item("gb_per_s", rate.bytes_per_s / 1e9)?;
        path.set_item("measured", rate.is_measured)?;
        Ok(path)
    };
    let paths = copier.stream_copies().path_rates().into_iter().map(path);
    PyList::new(py, paths.collect::<PyResult<Vec<_>>>()?)
}

/// From, to, bytes. Those without bytes are left out.
fn read(pairs: &Bound<'_, PyAny>) -> PyResult<Vec<Piece>> {
    let rows = rows::read_copies(pairs)?;
    let total = rows.iter().try_fold(0_u64, |total, [_, _, bytes]| total.checked_add(*bytes));
    let fits = |[from, to, bytes]: &[u64; 3]| from.checked_add(*bytes).and(to.checked_add(*bytes)).is_some();
    if total.is_none() || !rows.iter().all(fits) {
        return Err(invalid("copies reach beyond the last address"));
    }
    let pieces = rows.into_iter().map(|[from, to, bytes]| Piece { from, to, bytes });
    Ok(pieces.filter(|piece| piece.bytes > 0).collect())
}

fn not_started(error: StartError) -> PyErr {
    match error {
        StartError::NoDevice { .. } | StartError::NoDevices | StartError::Relays(_) => invalid(error),
        _ => failed(error),
    }
}

fn not_copied(error: CopyError) -> PyErr {
    match error {
        CopyError::NoDevice { .. } | CopyError::NotBetween { .. } => invalid(error),
        _ => not_moved(error),
    }
}
