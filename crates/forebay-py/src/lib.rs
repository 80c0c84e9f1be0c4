//! Python's view of Forebay: the extension module `forebay._forebay`, wrapped by the package in `python/forebay`.
//!
//! Knows Python's objects: buffers, arrays, exceptions, who holds the interpreter's lock. Must never know how bytes move:
//! that is `forebay-agent`, `forebay-node` and `forebay-cuda`. Whatever waits lets go of the interpreter's lock first.

mod agent;
mod chunk;
mod cuda;
mod descriptors;
mod errors;
mod memory;
mod node;
mod places;
mod rail;
mod rows;
mod transfer;

/// The compiled part of the package `forebay`.
#[pyo3::pymodule]
mod _forebay {
    #[pymodule_export]
    use crate::agent::{Agent, Registration};
    #[pymodule_export]
    use crate::chunk::{Loading, Storing};
    #[pymodule_export]
    use crate::cuda::{Copier, PinnedBuffer, PinnedPool};
    #[pymodule_export]
    use crate::descriptors::Descriptors;
    #[pymodule_export]
    use crate::node::{Lease, Node, NodeMemory, chunk_ids};
    #[pymodule_export]
    use crate::rail::Rail;
    #[pymodule_export]
    use crate::transfer::{Prepared, Transfer};
}
