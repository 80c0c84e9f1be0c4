//! A list of descriptors that can be looked at and changed, kept as numbers: a million of them are
//! 24 MB, not a million tuples. This file knows rows.

use crate::errors::invalid;
use crate::rows::{Row, read_plain, read_row};
use forebay_transfer::lock::{Mutex, MutexGuard};
use pyo3::exceptions::PyIndexError;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

const ROW_BYTES: usize = size_of::<Row>();

/// A list of descriptors (address, length in bytes, device).
#[pyclass(frozen, module = "forebay")]
pub struct Descriptors {
    rows: Mutex<Vec<Row>>,
}

impl Descriptors {
    /// The rows as they are now.
    pub fn rows(&self) -> MutexGuard<'_, Vec<Row>> {
        self.rows.lock()
    }
}

#[pymethods]
impl Descriptors {
    #[new]
    #[pyo3(signature = (rows = None))]
    fn new(rows: Option<&Bound<'_, PyAny>>) -> PyResult<Descriptors> {
        let rows = rows.map_or(Ok(Vec::new()), read_plain)?;
        Ok(Descriptors { rows: Mutex::new(rows) })
    }

    /// The opposite of `to_bytes`.
    #[staticmethod]
    fn from_bytes(bytes: &[u8]) -> PyResult<Descriptors> {
        if !bytes.len().is_multiple_of(ROW_BYTES) {
            return Err(invalid(format!("{} bytes of descriptors: a multiple of {ROW_BYTES}", bytes.len())));
        }
        let (numbers, _) = bytes.as_chunks::<8>();
        let (rows, _) = numbers.as_chunks::<3>();
        let rows = rows.iter().map(|row| row.map(u64::from_le_bytes)).collect();
        Ok(Descriptors { rows: Mutex::new(rows) })
    }

    /// Three little-endian 64-bit numbers for each descriptor.
    fn to_bytes<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        let bytes: Vec<u8> = self.rows().iter().flatten().flat_map(|number| number.to_le_bytes()).collect();
        PyBytes::new(py, &bytes)
    }

    fn append(&self, row: &Bound<'_, PyAny>) -> PyResult<()> {
        let row = read_row(row)?;
        self.rows().push(row);
        Ok(())
    }

    /// Where the first descriptor like this one stands, if there is one.
    fn find(&self, row: &Bound<'_, PyAny>) -> PyResult<Option<usize>> {
        let row: Row = read_row(row)?;
        Ok(self.rows().iter().position(|other| *other == row))
    }

    fn clear(&self) {
        self.rows().clear();
    }

    fn copy(&self) -> Descriptors {
        Descriptors { rows: Mutex::new(self.rows().clone()) }
    }

    fn __len__(&self) -> usize {
        self.rows().len()
    }

    fn __getitem__(&self, index: isize) -> PyResult<(u64, u64, u64)> {
        let rows = self.rows();
        let [address, bytes, device] = rows[position(&rows, index)?];
        Ok((address, bytes, device))
    }

    fn __setitem__(&self, index: isize, row: &Bound<'_, PyAny>) -> PyResult<()> {
        let row = read_row(row)?;
        let mut rows = self.rows();
        let at = position(&rows, index)?;
        rows[at] = row;
        Ok(())
    }

    fn __delitem__(&self, index: isize) -> PyResult<()> {
        let mut rows = self.rows();
        let at = position(&rows, index)?;
        rows.remove(at);
        Ok(())
    }

    fn __eq__(&self, other: &Bound<'_, PyAny>) -> bool {
        let Ok(other) = other.cast::<Descriptors>() else { return false };
        // One lock at a time: a list may be compared with itself.
        let mine = self.rows().clone();
        mine == *other.get().rows()
    }

    fn __repr__(&self) -> String {
        format!("<forebay.Descriptors: {}>", self.rows().len())
    }
}

/// The place of a descriptor, counted from the end if the index is below 0.
fn position(rows: &[Row], index: isize) -> PyResult<usize> {
    let counted = if index < 0 { rows.len().checked_add_signed(index) } else { Some(index.unsigned_abs()) };
    counted
        .filter(|at| *at < rows.len())
        .ok_or_else(|| PyIndexError::new_err(format!("descriptor {index} of {}", rows.len())))
}
