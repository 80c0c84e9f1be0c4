//! What a node starts beside its store and its clients, as the configuration says: other nodes,
//! relays, and the places where it shows its metrics.

use super::{HOST, Node, NodeError};
use crate::config::{CollectorConfig, NodeConfig};
use crate::directory::{
    Directory, EtcdConfig, EtcdDirectory, NoDirectory, NodeRecord, StaticDirectory, node_of_name,
};
use crate::metrics::sources::{agent, clients, directory, mover, peering, ports, process, relays, store};
use crate::metrics::{self, HttpLimits, Metrics, MetricsServer};
use crate::peering::Peering;
use forebay_cuda::driver::Driver;
use forebay_cuda::remote::Relays;
use forebay_otlp::{Push, PushConfig, PushError};
use std::net::SocketAddr;
use std::sync::{Arc, Weak};
use std::time::Duration;

impl Node {
    /// Meets other nodes, has its GPUs relay, and shows its metrics.
    pub(super) fn join(mut self, config: &NodeConfig, metrics: Arc<Metrics>) -> Result<Node, NodeError> {
        self.join_peers(config, &metrics)?;
        self.start_relays(config, &metrics)?;
        self.show_metrics(config, metrics)?;
        Ok(self)
    }

    fn join_peers(&mut self, config: &NodeConfig, metrics: &Metrics) -> Result<(), NodeError> {
        let Some(peers) = &config.peers else { return Ok(()) };
        let clients = &self.clients;
        let directory = open_directory(config, peers.advertised(), clients.instance)?;
        let shown = Arc::clone(&directory);
        metrics.add("directory", move |out| directory::collect(&shown.stat(), out));
        let ground = (&clients.store, &clients.mover, HOST);
        let spans = Arc::clone(&clients.spans);
        let peering = Peering::start(peers, &config.name, ground, &config.limits, directory, spans)?;
        let peering = Arc::new(peering);
        clients.set_remote(Arc::clone(&peering));
        metrics.add_part("agent", &peering, |peering, out| agent::collect(&peering.stat().peers, out));
        metrics.add_part("peering", &peering, |peering, out| peering::collect(&peering.stat(), out));
        self.peering = Some(peering);
        Ok(())
    }

    fn start_relays(&mut self, config: &NodeConfig, metrics: &Metrics) -> Result<(), NodeError> {
        let Some(relays) = &config.relays else { return Ok(()) };
        let relays = relays.for_relays(&config.token, &config.allow_uids).map_err(NodeError::Config)?;
        let arena = self.clients.store.arena_memory();
        let relays = Arc::new(Relays::beside(Driver::load()?, relays, Some(arena))?);
        metrics.add_part("relays", &relays, |relays, out| relays::collect(&relays.stat(), out));
        self.relays = Some(relays);
        Ok(())
    }

    fn show_metrics(&mut self, config: &NodeConfig, metrics: Arc<Metrics>) -> Result<(), NodeError> {
        let Some(shown) = &config.metrics else { return Ok(()) };
        let clients = &self.clients;
        metrics.add("process", process::source());
        let (store, mover) = (clients.store.clone(), clients.mover.clone());
        metrics.add("store", move |out| store::collect(&store.stat(), store.disk_stat().as_ref(), out));
        metrics.add("mover", move |out| mover::collect(&mover.telemetry().unwrap_or_default(), out));
        metrics.add_part("clients", clients, |all, out| clients::collect(&all.stat(), &all.clients(), out));
        metrics.add_part("hand_overs", clients, |all, out| {
            clients::collect_rings(&all.rings.stat(), out);
            clients::collect_controls(&all.controls.stat(), out);
            clients::collect_hand_overs(all.not_given(), all.inherited.get().copied(), out);
        });
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
        metrics.add("ports", move |out| {
            let clients = all.upgrade().map(|all| (all.room.stat(), Arc::clone(&all.unfinished)));
            let peers = peering.as_ref().and_then(Weak::upgrade).and_then(|peering| peering.port());
            let metrics = port.as_ref().map(|port| port.stat());
            ports::collect(&ports::PortsStat { clients, peers, metrics }, out);
        });
        self._push = shown.push.as_ref().map(|to| push(to, &config.name, &metrics)).transpose()?;
        Ok(())
    }
}

fn open_directory(
    config: &NodeConfig,
    address: SocketAddr,
    instance: [u8; 16],
) -> Result<Arc<dyn Directory>, NodeError> {
    let node = node_of_name(&config.name);
    let Some(directory) = &config.directory else { return Ok(Arc::new(NoDirectory)) };
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
fn push(to: &CollectorConfig, node: &str, metrics: &Arc<Metrics>) -> Result<Push, PushError> {
    metrics.spans().export_one_of(to.trace_one_of);
    let config = PushConfig {
        endpoint: to.endpoint.clone(),
        service: "forebay-node",
        instance: node.to_owned(),
        limit: Duration::from_millis(to.limit_ms),
    };
    metrics::push(&config, Duration::from_secs(to.every_s.into()), metrics)
}
