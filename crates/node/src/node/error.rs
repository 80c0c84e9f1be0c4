//! Why a node does not start.

use super::NoMemory;
use crate::config::ConfigError;
use crate::directory::{EtcdError, StaticError};
use crate::hand_over::TakeOverError;
use forebay_cuda::driver::LoadError;
use forebay_cuda::remote::RelayError;
use forebay_net::AgentError;
use forebay_otlp::PushError;
use forebay_store::OpenError;
use forebay_store::ssd::SsdError;
use forebay_transfer::{Closed, PathError};
use std::path::PathBuf;
use thiserror::Error;

/// Why there is no node.
#[derive(Debug, Error)]
pub enum NodeError {
    #[error("socket {}: {error}", path.display())]
    Socket { path: PathBuf, error: std::io::Error },
    #[error(transparent)]
    Memory(#[from] NoMemory),
    #[error("socket {}: not taken over: {error}", path.display())]
    TakeOver { path: PathBuf, error: TakeOverError },
    #[error(
        "ssd.path: {}: there is no log, and ssd.create is false: mount its disk (that directory is on the \
         file system that is mounted at {}), or make a log with `forebay store init`",
        path.display(), mount.display()
    )]
    NoLog { path: PathBuf, mount: PathBuf },
    /// Memory, threads or the mover.
    #[error(transparent)]
    Store(#[from] OpenError),
    #[error("ssd: {0}")]
    Ssd(#[from] SsdError),
    #[error(transparent)]
    Mover(#[from] Closed),
    #[error(transparent)]
    Route(#[from] PathError),
    #[error("peers: {0}")]
    Peers(#[from] AgentError),
    #[error("directory: {0}")]
    File(#[from] StaticError),
    #[error("directory: {0}")]
    Etcd(#[from] EtcdError),
    /// Tenants' keys, or GPUs that relay.
    #[error(transparent)]
    Config(ConfigError),
    #[error("relays: {0}")]
    Driver(#[from] LoadError),
    #[error("relays: {0}")]
    Relays(#[from] RelayError),
    #[error("metrics.push: {0}")]
    Push(#[from] PushError),
    #[error("{doing}: {error}")]
    System { doing: &'static str, error: std::io::Error },
}
