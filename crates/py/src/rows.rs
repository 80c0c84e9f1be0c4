//! Descriptors as Python writes them: rows of numbers in an array, or tuples in a list. Arrays are
//! read through the buffer protocol in one go, without an object for each element. This file knows
//! shapes and numbers.

use crate::errors::invalid;
use pyo3::buffer::{Element, PyBuffer};
use pyo3::prelude::*;
use pyo3::types::{PyList, PyTuple};

/// Address, length in bytes, device.
pub type Row = [u64; 3];
/// Address, length in bytes, device, distance of two starts in bytes, number of pieces.
pub type StridedRow = [u64; 5];

/// Descriptors: one piece to a row, or evenly spaced pieces of one length.
pub enum Rows {
    /// N x 3.
    Plain(Vec<Row>),
    /// N x 5.
    Strided(Vec<StridedRow>),
}

/// Reads an N x 3 or N x 5 array of 64-bit integers, or a list of tuples of 3 or 5.
pub fn read(value: &Bound<'_, PyAny>) -> PyResult<Rows> {
    match columns_of(value)? {
        Some(3) => read_array(value).map(Rows::Plain),
        Some(5) => read_array(value).map(Rows::Strided),
        Some(columns) => Err(invalid(format!(
            "descriptors have 3 columns (address, bytes, device) or 5 (address, bytes, device, stride, count), not {columns}"
        ))),
        None if value.cast::<PyList>().is_ok_and(|list| first_len(list) == Some(5)) => {
            read_tuples(value).map(Rows::Strided)
        }
        None => read_tuples(value).map(Rows::Plain),
    }
}

/// Reads an N x 3 array of 64-bit integers or a list of 3-tuples.
pub fn read_plain(value: &Bound<'_, PyAny>) -> PyResult<Vec<Row>> {
    read_threes(value, "descriptors have 3 columns (address, bytes, device) here")
}

/// Reads copies, from, to and bytes of each: an N x 3 array of 64-bit integers or a list of
/// 3-tuples.
pub fn read_copies(value: &Bound<'_, PyAny>) -> PyResult<Vec<[u64; 3]>> {
    read_threes(value, "copies have 3 columns (from, to, bytes)")
}

fn read_threes(value: &Bound<'_, PyAny>, allowed: &str) -> PyResult<Vec<[u64; 3]>> {
    match columns_of(value)? {
        None => read_tuples(value),
        Some(3) => read_array(value),
        Some(columns) => Err(invalid(format!("{allowed}, not {columns}"))),
    }
}

/// Reads which descriptors are meant: a list of integers or an array of 32- or 64-bit integers.
pub fn read_indices(value: &Bound<'_, PyAny>) -> PyResult<Vec<u32>> {
    if let Ok(list) = value.cast::<PyList>() {
        return list.iter().map(|index| checked_index(index.extract::<i64>()?)).collect();
    }
    let py = value.py();
    if let Ok(array) = PyBuffer::<i32>::get(value) {
        return array.to_vec(py)?.into_iter().map(|index| checked_index(i64::from(index))).collect();
    }
    if let Ok(array) = PyBuffer::<i64>::get(value) {
        return array.to_vec(py)?.into_iter().map(checked_index).collect();
    }
    value.extract::<Vec<i64>>()?.into_iter().map(checked_index).collect()
}

fn checked_index(index: i64) -> PyResult<u32> {
    u32::try_from(index)
        .map_err(|_| invalid(format!("an index of descriptors is {index}: 0 to {} are", u32::MAX)))
}

/// How many columns an array has; `None` for what is no two-dimensional buffer.
fn columns_of(value: &Bound<'_, PyAny>) -> PyResult<Option<usize>> {
    let Ok(array) = pyo3::buffer::PyUntypedBuffer::get(value) else { return Ok(None) };
    match array.shape() {
        [_, columns] => Ok(Some(*columns)),
        shape => Err(invalid(format!("an array of descriptors has 2 dimensions, not {}", shape.len()))),
    }
}

fn first_len(list: &Bound<'_, PyList>) -> Option<usize> {
    list.get_item(0).ok()?.cast::<PyTuple>().ok().map(PyTupleMethods::len)
}

fn read_array<const N: usize>(value: &Bound<'_, PyAny>) -> PyResult<Vec<[u64; N]>> {
    let unsigned = match typed::<u64>(value) {
        Some(array) => array?,
        None => typed::<i64>(value)
            .ok_or_else(|| invalid("an array of descriptors is of uint64 or int64"))??
            .into_iter()
            .map(checked)
            .collect::<PyResult<_>>()?,
    };
    let (rows, rest) = unsigned.as_chunks::<N>();
    debug_assert!(rest.is_empty(), "the caller has looked at the number of columns");
    Ok(rows.to_vec())
}

/// The numbers of an array of `T`, row after row; `None` if it is of another type.
fn typed<T: Element>(value: &Bound<'_, PyAny>) -> Option<PyResult<Vec<T>>> {
    PyBuffer::<T>::get(value).ok().map(|array| array.to_vec(value.py()))
}

fn read_tuples<const N: usize>(value: &Bound<'_, PyAny>) -> PyResult<Vec<[u64; N]>> {
    let Ok(list) = value.cast::<PyList>() else {
        return value.try_iter()?.map(|row| read_row(&row?)).collect();
    };
    list.iter().map(|row| read_row(&row)).collect()
}

/// One descriptor.
pub fn read_row<const N: usize>(row: &Bound<'_, PyAny>) -> PyResult<[u64; N]> {
    let tuple = row.cast::<PyTuple>().map_err(|_| not_a_row::<N>(row))?;
    if tuple.len() != N {
        return Err(not_a_row::<N>(row));
    }
    let mut numbers = [0; N];
    for (number, item) in numbers.iter_mut().zip(tuple.iter_borrowed()) {
        *number = item.extract().map_err(|_| not_a_row::<N>(row))?;
    }
    Ok(numbers)
}

fn not_a_row<const N: usize>(row: &Bound<'_, PyAny>) -> PyErr {
    invalid(format!("a descriptor is a tuple of {N} integers of 0 or more, not {row}"))
}

fn checked(number: i64) -> PyResult<u64> {
    u64::try_from(number).map_err(|_| invalid(format!("a descriptor holds {number}: at least 0")))
}
