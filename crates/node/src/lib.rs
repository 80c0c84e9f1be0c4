//! The node: the process of each host that holds KV for the engines of that host and for other
//! nodes. Engines of the host use it by way of `forebay-client`.

mod config;
pub mod directory;
mod hand_over;
mod local;
pub mod metrics;
mod node;
mod peering;

pub use config::{
    CollectorConfig, ConfigError, DirectoryConfig, LimitsConfig, MemoryConfig, MetricsConfig, NodeConfig,
    PagesConfig, PeersConfig, QuotaConfig, RailConfig, RelayGpus, RelaysConfig, SsdCheck, SsdConfig,
    TenantsConfig, WriteBackPolicy,
};
pub use hand_over::{NotGiven, Successor, TakeOverError};
pub use node::{
    ClientStat, DrainError, Drained, HandOverError, HandedOver, Inherited, MemoryBound, NoMemory, Node,
    NodeError, RingStat,
};
pub use peering::PeeringStat;

use forebay_transfer::size;
