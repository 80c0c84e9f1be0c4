//! What may carry bytes beside TCP, as Python says it. This file knows the names of fabrics; it must never open one.

use crate::errors::InvalidError;
use forebay_net::{Fabric, RailOptions};
use pyo3::prelude::*;

/// UCX over one fabric: "memory", "rdma" or "tcp"; on these devices, or on all of them if none is named.
#[pyclass(frozen, eq, module = "forebay")]
#[derive(PartialEq, Eq)]
pub struct Rail(RailOptions);

#[pymethods]
impl Rail {
    #[new]
    #[pyo3(signature = (fabric, *, devices = Vec::new()))]
    fn new(fabric: &str, devices: Vec<String>) -> PyResult<Rail> {
        let known = Fabric::ALL.into_iter().find(|known| name(*known) == fabric);
        let fabric = known.ok_or_else(|| {
            InvalidError::new_err(format!("fabric {fabric:?}: allowed are \"memory\", \"rdma\" and \"tcp\""))
        })?;
        Ok(Rail(RailOptions { fabric, devices }))
    }

    /// What it uses.
    #[getter]
    fn fabric(&self) -> &'static str {
        name(self.0.fabric)
    }

    /// On which devices, as UCX names them; none: all.
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

/// A fabric's name.
pub fn name(fabric: Fabric) -> &'static str {
    match fabric {
        Fabric::Memory => "memory",
        Fabric::Rdma => "rdma",
        Fabric::Tcp => "tcp",
    }
}
