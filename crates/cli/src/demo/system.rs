//! What an arm is replayed on: a host in this process, or a cluster of processes.

use super::cluster::Cluster;
use super::host::Host;
use super::rows::Count;
use super::spec::{ClusterSpec, HostSpec};
use forebay_results::output::Error;
use forebay_router::Policy;
use forebay_trace::record::RecordWriter;
use forebay_trace::replay::Check;
use std::path::Path;
use std::sync::Arc;

/// What a system is to be.
pub enum Spec {
    /// Everything in this process.
    Host(HostSpec),
    /// Nodes and engines in processes of their own.
    Cluster(ClusterSpec),
}

/// A running system.
pub enum System {
    /// Of [`Spec::Host`].
    Host(Host),
    /// Of [`Spec::Cluster`].
    Cluster(Cluster),
}

impl Spec {
    /// What the engines are, wherever they run.
    pub fn host(&self) -> &HostSpec {
        match self {
            Spec::Host(host) => host,
            Spec::Cluster(cluster) => &cluster.host,
        }
    }

    /// One line for people.
    pub fn description(&self) -> String {
        match self {
            Spec::Host(host) => host.description(),
            Spec::Cluster(cluster) => cluster.description(),
        }
    }

    /// What engines must answer, if that is known: what a real model says, only that model knows.
    pub fn check(&self) -> Result<Option<Arc<dyn Check>>, Error> {
        match self {
            Spec::Cluster(ClusterSpec { vllm: Some(_), .. }) => Ok(None),
            Spec::Host(host) | Spec::Cluster(ClusterSpec { host, .. }) => Ok(Some(Arc::new(host.oracle()?))),
        }
    }

    /// Starts it, cold but for SSDs.
    pub async fn start(&self, policy: Policy, decision_log: &Path) -> Result<System, Error> {
        match self {
            Spec::Host(host) => Ok(System::Host(host.start(policy, decision_log).await?)),
            Spec::Cluster(cluster) => Ok(System::Cluster(cluster.start(policy, decision_log).await?)),
        }
    }
}

impl System {
    /// Where requests go.
    pub fn url(&self) -> String {
        let router = match self {
            System::Host(host) => &host.router,
            System::Cluster(cluster) => &cluster.router,
        };
        format!("http://{}", router.addr())
    }

    /// Samples load and links until it cannot write any more.
    pub async fn sample(&self, arm: &str, clock_ratio: f64, records: &RecordWriter) -> Error {
        match self {
            System::Host(host) => host.sample(arm, clock_ratio, records).await,
            System::Cluster(cluster) => cluster.sample(arm, clock_ratio, records).await,
        }
    }

    /// What its parts counted themselves.
    pub async fn counts(&self) -> Result<Vec<Count>, Error> {
        match self {
            System::Host(host) => Ok(host.counts()),
            System::Cluster(cluster) => cluster.counts().await,
        }
    }

    /// The cluster that a node is to be killed of, if one is.
    pub fn cluster_to_harm(&self) -> Option<&Cluster> {
        match self {
            System::Cluster(cluster) if cluster.kill_one => Some(cluster),
            _ => None,
        }
    }

    /// Stops everything. When this returns nothing of it runs any more.
    pub async fn stop(self) -> Result<(), Error> {
        match self {
            System::Host(host) => host.stop().await,
            System::Cluster(cluster) => cluster.stop().await,
        }
    }
}
