//! What loading the driver and calling it can end in.

use super::abi::{self, Status};
use thiserror::Error;

/// A call of the driver failed.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("{call} failed: {name} ({status})")]
pub struct CudaError {
    /// The function that failed.
    pub call: &'static str,
    /// Its `CUresult`.
    pub status: Status,
    /// The result's name.
    pub name: String,
}

impl CudaError {
    /// Something of ours is full that a call would have needed.
    pub(crate) fn full(what: &'static str) -> CudaError {
        CudaError { call: what, status: abi::OUT_OF_MEMORY, name: "full".into() }
    }

    /// The context that a call would have been for was reset.
    pub(crate) fn gone() -> CudaError {
        CudaError { call: "context", status: abi::CONTEXT_IS_DESTROYED, name: "reset by the program".into() }
    }

    /// A relay that may have had a part in something lost its context.
    pub(crate) fn relay_lost() -> CudaError {
        CudaError { call: "relay", status: abi::CONTEXT_IS_DESTROYED, name: "its context is lost".into() }
    }
}

/// Why there is no driver to use.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum LoadError {
    #[error("FOREBAY_LIBCUDA: a path cannot hold a zero byte")]
    Path,
    #[error("no CUDA driver: {path}: {error}")]
    NoLibrary {
        /// What was opened.
        path: String,
        /// What the loader said.
        error: String,
    },
    #[error("the CUDA driver has no {symbol}; drivers of CUDA 12.4 or later have it")]
    MissingSymbol {
        /// The function's name.
        symbol: &'static str,
    },
    #[error("the CUDA driver supports CUDA {}.{}; {}.{} or later is needed", .version / 1000, .version % 1000 / 10, .oldest / 1000, .oldest % 1000 / 10)]
    TooOld {
        /// What it supports.
        version: i32,
        oldest: i32,
    },
    #[error("the CUDA driver does not start: {0}")]
    Start(#[from] CudaError),
}
