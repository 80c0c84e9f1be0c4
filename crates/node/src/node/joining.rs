//! What a node starts beside its store and its clients, as the configuration says: other nodes,
//! relays, and the places where it shows its metrics.

use super::{HOST, Node, NodeError};
use crate::config::{CollectorConfig, NodeConfig};
use crate::directory::{Directory, EtcdConfig, EtcdDirectory, NodeRecord, StaticDirectory, node_of_name};
use crate::metrics::sources::{
    PortsStat, of_agent, of_clients, of_directory, of_mover, of_peering, of_ports, of_process, of_relays,
    of_store,
};
use crate::metrics::{HttpLimits, Metrics, MetricsServer, Push, PushConfig, PushError};
use crate::peering::{Nobody, Peering};
use crate::remote::RemoteNodes;
use forebay_cuda::driver::Driver;
use forebay_cuda::remote::Relays;
use std::net::SocketAddr;
use std::sync::{Arc, Weak};
use std::time::Duration;

impl Node {
    /// Meets other nodes, lends GPUs as relays, and shows its metrics.
    pub(super) fn join(mut self, config: &NodeConfig, metrics: Arc<Metrics>) -> Result<Node, NodeError> {
        self.join_peers(config, &metrics)?;
        self.start_relays(config, &metrics)?;
        self.show_metrics(config, metrics)?;
        Ok(self)
    }

    fn join_peers(&mut self, config: &NodeConfig, metrics: &Metrics) -> Result<(), NodeError> {
        let Some(peers) = &config.peers else { return Ok(()) };
        let clients = &self.clients;
        let directory = open_directory(config, peers.told(), clients.instance)?;
        metrics.add("directory", of_directory(Arc::clone(&directory)));
        let ground = (&clients.store, &clients.mover, HOST);
        let spans = Arc::clone(&clients.spans);
        let peering = Peering::start(peers, &config.name, ground, &config.limits, directory, spans)?;
        let peering = Arc::new(peering);
        clients.set_remote(Arc::clone(&peering) as Arc<dyn RemoteNodes>);
        let others = Arc::downgrade(&peering);
        let peers = move || others.upgrade().map(|others| others.stat().peers).unwrap_or_default();
        metrics.add("agent", of_agent(peers));
        let others = Arc::downgrade(&peering);
        metrics.add("peering", of_peering(move || others.upgrade().map(|others| others.stat())));
        self.peering = Some(peering);
        Ok(())
    }

    fn start_relays(&mut self, config: &NodeConfig, metrics: &Metrics) -> Result<(), NodeError> {
        let Some(relays) = &config.relays else { return Ok(()) };
        let relays = relays.for_relays(&config.token, &config.allow_uids).map_err(NodeError::Config)?;
        let relays = Arc::new(Relays::start(Driver::load()?, relays)?);
        let shown = Arc::downgrade(&relays);
        metrics.add("relays", of_relays(move || shown.upgrade().map(|relays| relays.stat())));
        self.relays = Some(relays);
        Ok(())
    }

    fn show_metrics(&mut self, config: &NodeConfig, metrics: Arc<Metrics>) -> Result<(), NodeError> {
        let Some(shown) = &config.metrics else { return Ok(()) };
        let clients = &self.clients;
        metrics.add("process", of_process());
        metrics.add("store", of_store(Arc::new(clients.store.clone())));
        let mover = clients.mover.clone();
        metrics.add("mover", of_mover(move || mover.telemetry().unwrap_or_default()));
        let all = Arc::downgrade(clients);
        metrics.add("clients", of_clients(move || all.upgrade().map(|all| (all.stat(), all.clients()))));
        let (all, peering) = (Arc::downgrade(clients), self.peering.as_ref().map(Arc::downgrade));
        let ready = move || match all.upgrade() {
            Some(all) if !all.is_draining() => match peering.as_ref().and_then(Weak::upgrade) {
                Some(peering) => peering.readiness(),
                None => Ok(String::new()),
            },
            _ => Err("the node is shutting down".into()),
        };
        let system = |error| NodeError::System { doing: "the port for metrics", error };
        let limits = HttpLimits {
            pending_max: config.limits.unauthenticated,
            request_limit: Duration::from_millis(config.limits.authentication_ms),
            metrics_max: shown.requests_max,
        };
        let listen = |at| MetricsServer::listen(at, Arc::clone(&metrics), limits, ready).map_err(system);
        self.metrics = shown.listen.map(listen).transpose()?;
        let port = self.metrics.as_ref().map(MetricsServer::pending);
        let (all, peering) = (Arc::downgrade(clients), self.peering.as_ref().map(Arc::downgrade));
        let ports = move || {
            let clients = all.upgrade().map(|all| (all.room.stat(), Arc::clone(&all.unfinished)));
            let peers = peering.as_ref().and_then(Weak::upgrade).and_then(|peering| peering.port());
            PortsStat { clients, peers, metrics: port.as_ref().map(|port| port.stat()) }
        };
        metrics.add("ports", of_ports(ports));
        self._push = shown.push.as_ref().map(|to| push(to, &config.name, metrics)).transpose()?;
        Ok(())
    }
}

fn open_directory(
    config: &NodeConfig,
    address: SocketAddr,
    instance: [u8; 16],
) -> Result<Arc<dyn Directory>, NodeError> {
    let node = node_of_name(&config.name);
    let Some(directory) = &config.directory else { return Ok(Arc::new(Nobody)) };
    if let Some(file) = &directory.file {
        return Ok(Arc::new(StaticDirectory::open(file, node)?));
    }
    let me = NodeRecord { node, instance, name: config.name.clone(), address };
    let etcd = EtcdConfig {
        endpoints: directory.etcd.clone(),
        prefix: directory.prefix.clone(),
        ttl_s: directory.ttl_s,
        ..EtcdConfig::default()
    };
    Ok(Arc::new(EtcdDirectory::start(&etcd, me)?))
}

/// Tells a collector, and traces for it.
fn push(to: &CollectorConfig, node: &str, metrics: Arc<Metrics>) -> Result<Push, PushError> {
    metrics.spans().sample_one_of(to.trace_one_of);
    let (endpoint, node, limit_us) = (to.endpoint.clone(), node.to_owned(), to.limit_ms.saturating_mul(1000));
    Push::start(&PushConfig { endpoint, node, every_s: to.every_s, limit_us }, metrics)
}
