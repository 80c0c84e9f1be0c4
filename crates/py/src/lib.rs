//! Python's view of Forebay: the extension module `forebay._forebay`, wrapped by the package in
//! `python/forebay`.
//!
//! Knows Python's objects: buffers, arrays, exceptions, who holds the interpreter's lock. Whatever
//! waits lets go of the interpreter's lock first.

mod agent;
mod chunk;
mod cost_model;
mod cuda;
mod descriptors;
mod errors;
mod finding;
mod ids;
mod memory;
mod node;
mod paged;
mod places;
mod process;
mod rail;
mod rows;
mod trace;
mod transfer;
mod watching;

/// The compiled part of the package `forebay`.
#[pyo3::pymodule]
mod _forebay {
    #[pymodule_export]
    use crate::agent::{Agent, Registration};
    #[pymodule_export]
    use crate::chunk::{Loading, Storing};
    #[pymodule_export]
    use crate::cost_model::CostModel;
    #[pymodule_export]
    use crate::cuda::{Copier, PinnedBuffer, PinnedPool};
    #[pymodule_export]
    use crate::descriptors::Descriptors;
    #[pymodule_export]
    use crate::finding::{Finding, Hold};
    #[pymodule_export]
    use crate::ids::{chunk_ids, namespace_key};
    #[pymodule_export]
    use crate::node::{Lease, Node, NodeMemory};
    #[pymodule_export]
    use crate::paged::{PagedCache, head_reads};
    #[pymodule_export]
    use crate::rail::Rail;
    #[pymodule_export]
    use crate::transfer::{Prepared, Transfer};

    #[pymodule_init]
    fn init(_module: &pyo3::Bound<'_, pyo3::types::PyModule>) -> pyo3::PyResult<()> {
        use forebay_client::log::{Format, LevelFilter, start};
        let started = start(LevelFilter::WARN, Format::Text);
        started.map_err(|bad| pyo3::exceptions::PyValueError::new_err(bad.to_string()))
    }
}
