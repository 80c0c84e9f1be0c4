//! What a node has to show of the clients of its host: who is there, what they hold, and what they
//! found.

use super::{counter, gauge, push_each, push_one};
use crate::metrics::{Family, Metric};
use crate::node::{ClientStat, ControlStat, Inherited, RingStat};
use forebay_client::protocol::answer::NodeStat;
use forebay_client::protocol::control::{Verb, Verdict};
use std::collections::BTreeMap;

const CLIENTS: Family = gauge("forebay_clients", "Clients that are connected, by the name they give.");
const LEASES: Family = gauge("forebay_client_leases", "Leases that clients hold, by name.");
const SLOTS: Family = gauge("forebay_client_slots", "Slots that clients write, by name.");
const HITS: Family = counter(
    "forebay_client_leased_chunks_total",
    "Chunks that clients leased to load them, by where they were.",
);
const REFUSED: Family = counter("forebay_clients_refused_total", "Clients that were not let in.");
const ORPHANS: Family =
    counter("forebay_client_orphaned_slots_total", "Slots whose client went without a word.");
const CORRUPT: Family =
    counter("forebay_client_corrupt_chunks_total", "Chunks that a client, and then the node, found wrong.");

const RING_CONTEXTS: Family = counter(
    "forebay_ring_contexts_total",
    "Contexts of requests from clients' rings, by what became of them.",
);
const RING_REFUSED: Family = counter(
    "forebay_ring_requests_refused_total",
    "Requests in rings that were none, or named nothing of their client's.",
);
const RING_CLOSED: Family =
    counter("forebay_rings_closed_total", "Rings closed since their client wrote what it must not.");

const CONTROLLED: Family = counter(
    "forebay_control_chunks_total",
    "Chunks of which clients said what is to become of them, by verb and verdict.",
);
const AHEAD: Family = counter("forebay_prefetched_chunks_total", "Chunks fetched ahead, by how it ended.");

const NOT_GIVEN: Family = counter(
    "forebay_hand_overs_refused_total",
    "Nodes that were to go on with this one's memory and were refused it.",
);
const INHERITED: Family = gauge(
    "forebay_inherited_chunks",
    "Chunks that the node has taken over from another one, or from itself after a hand-over failed.",
);
const INHERITED_TOOK: Family =
    gauge("forebay_inherited_seconds", "From when it was asked for them until it let clients in.");

/// What went over from one node to another.
pub fn collect_hand_overs(not_given: u64, inherited: Option<Inherited>, out: &mut Vec<Metric>) {
    push_one(out, &NOT_GIVEN, not_given as f64);
    push_one(out, &INHERITED, inherited.map_or(0.0, |inherited| inherited.chunks as f64));
    push_one(out, &INHERITED_TOOK, inherited.map_or(0.0, |inherited| inherited.took.as_secs_f64()));
}

/// What clients say of single chunks.
pub fn collect_controls(stat: &ControlStat, out: &mut Vec<Metric>) {
    for (verb, verdicts) in Verb::NAMES.iter().zip(stat.chunks) {
        for (verdict, chunks) in Verdict::NAMES.iter().zip(verdicts) {
            let labels = [("verb", *verb), ("verdict", *verdict)];
            out.push(Metric::new(&CONTROLLED, &labels, chunks as f64));
        }
    }
    push_each(out, &AHEAD, "end", &[("came", stat.came as u64), ("failed", stat.failed as u64)]);
}

/// What clients ask through their rings.
pub fn collect_rings(rings: &RingStat, out: &mut Vec<Metric>) {
    push_each(out, &RING_CONTEXTS, "end", &[("done", rings.done), ("failed", rings.failed)]);
    push_one(out, &RING_REFUSED, rings.refused as f64);
    push_one(out, &RING_CLOSED, rings.closed as f64);
}

pub fn collect(stat: &NodeStat, clients: &[ClientStat], out: &mut Vec<Metric>) {
    // Several may give the same name.
    let mut named: BTreeMap<&str, [usize; 3]> = BTreeMap::new();
    for client in clients {
        let sums = named.entry(&client.name).or_default();
        *sums = [sums[0] + 1, sums[1] + client.leases, sums[2] + client.slots];
    }
    for (name, sums) in named {
        for (family, sum) in [&CLIENTS, &LEASES, &SLOTS].into_iter().zip(sums) {
            out.push(Metric::new(family, &[("client", name)], sum as f64));
        }
    }
    let [memory, disk, peers] = stat.hits;
    push_each(out, &HITS, "tier", &[("memory", memory), ("disk", disk), ("peers", peers)]);
    push_one(out, &REFUSED, stat.refused as f64);
    push_one(out, &ORPHANS, stat.orphans as f64);
    push_one(out, &CORRUPT, stat.corrupt as f64);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clients_of_one_name_are_shown_together() {
        let client = |name: &str, leases| ClientStat { name: name.into(), leases, slots: 1 };
        let stat = NodeStat { hits: [1, 2, 3], ..NodeStat::default() };
        let mut out = Vec::new();
        collect(&stat, &[client("engine", 2), client("other", 1), client("engine", 3)], &mut out);
        let text = crate::metrics::render(out);
        for line in [
            "forebay_clients{client=\"engine\"} 2",
            "forebay_client_leases{client=\"engine\"} 5",
            "forebay_client_slots{client=\"other\"} 1",
            "forebay_client_leased_chunks_total{tier=\"peers\"} 3",
        ] {
            assert!(text.lines().any(|shown| shown == line), "{line} is not in\n{text}");
        }
    }
}
