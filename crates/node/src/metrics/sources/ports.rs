//! What a node's ports have to show: connections that have not said who they are, those that gave
//! way to others or were refused, and requests that have come in part.

use super::{counter, gauge};
use crate::metrics::{Family, Metric};
use forebay_client::protocol::frame::Unfinished;
use forebay_net::ServerStats;
use forebay_transfer::listen::RoomStat;
use std::collections::BTreeMap;
use std::sync::Arc;

const PENDING: Family = gauge(
    "forebay_unauthenticated_connections",
    "Connections that have not said who they are, by port: clients, peers, metrics.",
);
const EVICTED: Family = counter(
    "forebay_unauthenticated_evicted_total",
    "Connections that had not said who they are and gave way to others, by port.",
);
const UNFINISHED: Family =
    gauge("forebay_client_unfinished_bytes", "Bytes of clients' requests that have come in part.");
const UNFINISHED_REFUSED: Family = counter(
    "forebay_client_unfinished_refused_total",
    "Requests refused since too many bytes of others had come in part.",
);
const LET_IN: Family = counter("forebay_peer_connections_total", "Connections of peers that were let in.");
const REFUSED: Family =
    counter("forebay_peer_connections_refused_total", "Connections to the peers' port refused, by reason.");

/// What the ports of a node count.
pub struct PortsStat {
    pub clients: Option<(RoomStat, Arc<Unfinished>)>,
    pub peers: Option<ServerStats>,
    pub metrics: Option<RoomStat>,
}

pub fn collect(stat: &PortsStat, out: &mut Vec<Metric>) {
    let rooms = [
        ("clients", stat.clients.as_ref().map(|(room, _)| *room)),
        ("peers", stat.peers.as_ref().map(|peers| peers.pending)),
        ("metrics", stat.metrics),
    ];
    for (port, room) in rooms {
        let Some(RoomStat { pending, evicted }) = room else { continue };
        out.push(Metric::new(&PENDING, &[("port", port)], pending as f64));
        out.push(Metric::new(&EVICTED, &[("port", port)], evicted as f64));
    }
    if let Some((_, unfinished)) = &stat.clients {
        out.push(Metric::new(&UNFINISHED, &[], unfinished.bytes() as f64));
        out.push(Metric::new(&UNFINISHED_REFUSED, &[], unfinished.refused() as f64));
    }
    let Some(peers) = &stat.peers else { return };
    out.push(Metric::new(&LET_IN, &[], peers.let_in as f64));
    // Several codes of the protocol are one reason.
    let mut refused: BTreeMap<&str, u64> = BTreeMap::new();
    for (code, count) in &peers.refused {
        *refused.entry(code.label()).or_default() += count;
    }
    let count = |(reason, count): (&str, u64)| Metric::new(&REFUSED, &[("reason", reason)], count as f64);
    out.extend(refused.into_iter().map(count));
}
