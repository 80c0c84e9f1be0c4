//! Engines that a Kubernetes cluster says there are: the pods of an `InferencePool`.
//!
//! * `objects`: pools and pods, and the lines of a watch, as far as they matter.
//! * `pool`: which engines they are. It does no I/O.
//! * `api`: requests to the API server; `follow`: a collection of objects, listed and then watched.
//! * `watch`: keeps the router's engines as the pool has them.

mod api;
mod follow;
mod objects;
mod pool;
mod watch;

pub(crate) use api::Api;
pub use api::{ApiError, ApiPlace};
pub(crate) use watch::watch_pool;

use std::fmt;
use std::str::FromStr;

/// How engines are found in a cluster.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Discovery {
    pub pool: PoolName,
    /// Where the API server is.
    pub api: ApiPlace,
    /// Port at which the first data-parallel rank of each pod publishes KV events; none if they do
    /// not.
    pub events_port: Option<u16>,
    /// Which pods share a store of KV; none if they do not.
    pub store: Option<SharedStore>,
}

/// An `InferencePool` and its namespace.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PoolName {
    pub namespace: String,
    pub name: String,
}

/// The pods that share a store of KV.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SharedStore {
    /// Those of one host: its node has no peers.
    Host,
    /// All of the pool: nodes read from each other.
    Pool,
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DiscoveryError {
    #[error("'{0}' is not of the form kubernetes://NAMESPACE/POOL")]
    Pool(String),
    #[error("'{0}' is no such group of pods; host and pool are allowed")]
    Store(String),
}

impl Discovery {
    /// Engines that share no store and publish no events, found by the API server of the cluster in
    /// which this runs.
    pub fn new(pool: PoolName) -> Discovery {
        Discovery { pool, api: ApiPlace::Cluster, events_port: None, store: None }
    }
}

impl FromStr for PoolName {
    type Err = DiscoveryError;

    fn from_str(text: &str) -> Result<PoolName, DiscoveryError> {
        let parts = text.strip_prefix("kubernetes://").and_then(|rest| rest.split_once('/'));
        match parts {
            Some((namespace, name)) if is_label(namespace) && is_label(name) => {
                Ok(PoolName { namespace: namespace.into(), name: name.into() })
            }
            _ => Err(DiscoveryError::Pool(text.into())),
        }
    }
}

/// What Kubernetes allows as a name; dots are allowed in names of pools.
fn is_label(name: &str) -> bool {
    let is_allowed = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || b"-.".contains(&byte);
    !name.is_empty() && name.len() <= 253 && name.bytes().all(is_allowed)
}

impl fmt::Display for PoolName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "kubernetes://{}/{}", self.namespace, self.name)
    }
}

impl FromStr for SharedStore {
    type Err = DiscoveryError;

    fn from_str(text: &str) -> Result<SharedStore, DiscoveryError> {
        match text {
            "host" => Ok(SharedStore::Host),
            "pool" => Ok(SharedStore::Pool),
            _ => Err(DiscoveryError::Store(text.into())),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pool_has_a_namespace_and_a_name_and_nothing_else() {
        let pool: PoolName = "kubernetes://serving/qwen-3.pool".parse().unwrap();
        assert_eq!((&*pool.namespace, &*pool.name), ("serving", "qwen-3.pool"));
        assert_eq!(pool.to_string(), "kubernetes://serving/qwen-3.pool");
        for bad in [
            "serving/pool",
            "kubernetes://pool",
            "kubernetes:///pool",
            "kubernetes://a/",
            "kubernetes://a/b/c",
            "kubernetes://a/B",
        ] {
            assert_eq!(bad.parse::<PoolName>(), Err(DiscoveryError::Pool(bad.into())));
        }
        assert_eq!("pool".parse::<SharedStore>(), Ok(SharedStore::Pool));
        assert!("node".parse::<SharedStore>().unwrap_err().to_string().contains("host and pool"));
    }
}
