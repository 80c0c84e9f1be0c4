//! Objects that belong to the process that made them, as Python sees them: in a child of `fork()`
//! each of their calls raises, and the child only forgets them. This file knows which process
//! calls.

use crate::errors::of_forked;
use forebay_transfer::InProcess;
use pyo3::prelude::*;

/// What is behind an object that has sockets, threads or memory that others reach. Nothing of it is
/// touched, and no lock of it taken, in another process.
pub struct Own<T>(InProcess<T>);

impl<T> Own<T> {
    pub fn new(value: T) -> Own<T> {
        Own(InProcess::new(value))
    }

    /// What it is, in its own process.
    pub fn get(&self) -> PyResult<&T> {
        self.0.get().map_err(of_forked)
    }
}
