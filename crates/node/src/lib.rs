//! The node: the process of each host that holds KV for the engines of that host and for other nodes.
//!
//! Knows which chunks are where, on this host and elsewhere, and who may have them. Must never know what KV means, or
//! how bytes are moved: copies are transfers that the mover carries out.

mod config;
pub mod directory;
mod elsewhere;
mod endpoint;
mod hex;
mod local;
pub mod log;
pub mod metrics;
mod node;
mod peering;

pub use config::{
    CollectorConfig, ConfigError, DirectoryConfig, LimitsConfig, MemoryConfig, MetricsConfig, NodeConfig,
    PagesConfig, PeersConfig, QuotaConfig, RailConfig, RelayGpus, RelaysConfig, SsdConfig, TenantsConfig,
    WriteBackPolicy,
};
pub use node::{ClientStat, DrainError, Drained, NoMemory, Node, NodeError};
pub use peering::PeeringStat;

use forebay_transfer::size;
