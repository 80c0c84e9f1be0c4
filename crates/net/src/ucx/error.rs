//! Why there is no UCX rail, or no connection over it.

use super::fabric::Fabric;
use crate::host_process::NoProcess;
use crate::transport::TransportError;
use std::borrow::Cow;
use thiserror::Error;

/// Why UCX cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum UcxError {
    #[error("libucp.so.0 cannot be loaded: {why}")]
    NoLibrary { why: String },
    #[error("libucp.so.0 has no {name}")]
    NoSymbol { name: Cow<'static, str> },
    #[error("libucp is version {}.{}.{}; needed: 1.13 or a later 1.x", version.0, version.1, version.2)]
    Version { version: (u32, u32, u32) },
    #[error("no transport of the fabric {fabric:?} on devices {devices:?}; this machine has {has}")]
    NoTransport {
        fabric: Fabric,
        /// On which devices; none named: all.
        devices: Vec<String>,
        /// What UCX finds here.
        has: String,
    },
    #[error("{name:?} is no name of a device: letters, digits, '_', '-', '.' and ':' only")]
    DeviceName { name: String },
    #[error("{doing}: UCX says {why}")]
    Ucx { doing: &'static str, why: String },
    #[error("{doing}: {why}")]
    System { doing: &'static str, why: String },
    #[error("the peer's UCX address: {why}")]
    BadDescription { why: String },
}

impl From<UcxError> for TransportError {
    fn from(error: UcxError) -> TransportError {
        TransportError::Failed(error.to_string())
    }
}

impl From<NoProcess> for UcxError {
    fn from(why: NoProcess) -> UcxError {
        UcxError::System { doing: "watching the peer's process", why: why.to_string() }
    }
}
