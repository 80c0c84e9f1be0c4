//! What may carry bytes beside TCP, as Python says it. It is opened when an agent needs it.

use crate::errors::invalid;
use forebay_net::RailOptions;
use pyo3::prelude::*;

/// A transport: "memory", "rdma" or "tcp"; on these devices, or on all of them if none is named.
#[pyclass(frozen, eq, module = "forebay")]
#[derive(PartialEq, Eq)]
pub struct Rail(RailOptions);

#[pymethods]
impl Rail {
    #[new]
    #[pyo3(signature = (fabric, *, devices = Vec::new()))]
    fn new(fabric: &str, devices: Vec<String>) -> PyResult<Rail> {
        RailOptions::named(fabric, devices).map(Rail).map_err(invalid)
    }

    /// What it uses.
    #[getter]
    fn fabric(&self) -> &'static str {
        self.0.name()
    }

    /// On which devices, as the transport names them; none: all.
    #[getter]
    fn devices(&self) -> Vec<String> {
        self.0.devices.clone()
    }

    fn __repr__(&self) -> String {
        format!("Rail({:?}, devices={:?})", self.fabric(), self.0.devices)
    }
}

impl Rail {
    /// For an agent.
    pub fn options(&self) -> RailOptions {
        self.0.clone()
    }
}
