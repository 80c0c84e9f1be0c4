//! What a node has to show of chunks that it leases to other nodes and pulls from them. The ways
//! to them are the
//! [`agent`](super::agent)'s.

use super::{counter, push_each, push_one};
use crate::metrics::{Family, Metric};
use crate::peering::PeeringStat;

const PULLS: Family = counter("forebay_peering_pulls_total", "Chunks wanted from peers, by how it ended.");
const DENIED: Family = counter(
    "forebay_peering_denied_total",
    "Loans that a peer denied although it was said to have the chunk.",
);
const CORRUPT: Family =
    counter("forebay_peering_corrupt_chunks_total", "Chunks that came with other bytes than were lent.");
const RETRIED: Family = counter(
    "forebay_peering_retried_total",
    "Chunks that a peer lent and that did not come, so that another peer was asked.",
);
const LENT: Family = counter("forebay_peering_lent_chunks_total", "Chunks lent to peers.");
const COMPLAINTS: Family = counter(
    "forebay_peering_complaints_total",
    "Chunks of this node that peers found wrong, by whether they are.",
);
const REFUSED: Family = counter("forebay_peering_refused_total", "Questions of peers that were refused.");
const UNFORGOTTEN: Family =
    counter("forebay_peering_unforgotten_total", "Questions to forget chunks that the peer did not answer.");

pub fn collect(stat: &PeeringStat, out: &mut Vec<Metric>) {
    push_each(out, &PULLS, "end", &[("pulled", stat.pulled), ("failed", stat.not_pulled)]);
    push_one(out, &DENIED, stat.denied as f64);
    push_one(out, &CORRUPT, stat.corrupt as f64);
    push_one(out, &RETRIED, stat.retried as f64);
    push_one(out, &LENT, stat.lent as f64);
    push_one(out, &REFUSED, stat.refused as f64);
    let right = stat.complaints.saturating_sub(stat.wrong);
    push_each(out, &COMPLAINTS, "here", &[("wrong", stat.wrong), ("right", right)]);
    let unforgotten = stat.unforgotten.iter();
    out.extend(unforgotten.map(|(peer, count)| Metric::new(&UNFORGOTTEN, &[("peer", peer)], *count as f64)));
}
