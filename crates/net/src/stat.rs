//! What an agent shows of its peers.

use crate::capabilities::WhyIdle;
use crate::error::Unreachable;
use crate::peer::{Peer, PeerFlow, Via};
use crate::peer_metrics::Counts;
use crate::rails::Rails;
use crate::transports::RailOptions;

/// A snapshot of one peer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PeerStat {
    pub name: String,
    /// `idle`, `connecting`, `resting`, `up` or `dead`.
    pub state: &'static str,
    /// Why it is not reached, since the last attempt to connect failed.
    pub unreached: Option<Unreachable>,
    pub flows: Vec<FlowStat>,
    /// Rails of this agent that carry nothing to it although there is a connection.
    pub idle_rails: Vec<IdleRail>,
    pub counts: Counts,
}

/// A snapshot of one connection.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FlowStat {
    /// What carries its bytes: [`TCP`](crate::TCP), or the label of a transport.
    pub path: &'static str,
    /// It is used for words only, since rails carry the bytes.
    pub stands_by: bool,
    pub moved_bytes: u64,
    /// Of a rail: which hardware carries it, and why no other does, for people.
    pub report: Option<String>,
}

/// A rail that carries nothing to a peer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct IdleRail {
    pub rail: RailOptions,
    pub why: WhyIdle,
}

impl PeerStat {
    pub(crate) fn of(peer: &Peer, rails: &Rails) -> PeerStat {
        let state = peer.state();
        let idle = |(nth, why): (&usize, &WhyIdle)| {
            rails.options(*nth).map(|rail| IdleRail { rail: rail.clone(), why: why.clone() })
        };
        PeerStat {
            name: peer.name.clone(),
            state: state.connection.word(),
            unreached: state.unreached.clone(),
            flows: state.flows.iter().map(FlowStat::of).collect(),
            idle_rails: state.idle_rails.iter().filter_map(idle).collect(),
            counts: peer.metrics.counts(),
        }
    }
}

impl FlowStat {
    fn of(flow: &PeerFlow) -> FlowStat {
        let report = match &flow.via {
            Via::Tcp => None,
            Via::Rail { report, .. } => Some(report.clone()),
        };
        let moved_bytes = flow.handle.stats().moved_bytes;
        FlowStat { path: flow.via.path(), stands_by: flow.stands_by, moved_bytes, report }
    }
}
