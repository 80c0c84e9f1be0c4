//! What an agent has to show of each peer: its state, what carries the bytes, the times of requests
//! and of lots, and what failed.

use super::{counter, gauge};
use crate::metrics::{Family, Histogram, Kind, Metric, Value};
use forebay_net::{Counts, PeerStat};
use std::collections::BTreeMap;

const STATES: [&str; 5] = ["idle", "connecting", "resting", "up", "dead"];

const STATE: Family = gauge("forebay_peer_state", "1 for the state that the way to the peer is in.");
const FLOWS: Family =
    gauge("forebay_peer_flows", "Connections to the peer, by path, and whether they carry bytes or words.");
const IDLE_RAILS: Family =
    gauge("forebay_peer_idle_rails", "Rails that carry nothing to the peer, by fabric.");
const BYTES: Family = counter("forebay_peer_bytes_total", "Bytes that arrived, both ways, by path.");
const BUSY: Family = counter("forebay_peer_busy_seconds_total", "Time in which something was under way.");
const IN_FLIGHT_BYTES: Family = gauge("forebay_peer_in_flight_bytes", "Bytes on connections now, by path.");
const IN_FLIGHT_LOTS: Family = gauge("forebay_peer_in_flight_lots", "Lots on connections now, by path.");
const ENDED: Family = counter("forebay_peer_requests_total", "Requests that ended well or were cancelled.");
const FAULTS: Family = counter("forebay_peer_faults_total", "What failed, by kind.");
const UNREACHED: Family =
    counter("forebay_peer_unreached_total", "Connections to the peer that did not come about, by reason.");
const IS_UNREACHED: Family =
    gauge("forebay_peer_unreached", "1 while the peer is not reached, with the last reason.");
const REQUESTS: Family = histogram(
    "forebay_peer_request_seconds",
    "Times of requests, by stage: until the mover had them, until their bytes were in place, until the peer was notified.",
);
const LOTS: Family = histogram(
    "forebay_peer_lot_seconds",
    "Times of lots on the wire, by path: until their bytes were in place, verified and acknowledged.",
);

const fn histogram(name: &'static str, help: &'static str) -> Family {
    Family { name, help, kind: Kind::Histogram }
}

pub fn collect(peers: &[PeerStat], out: &mut Vec<Metric>) {
    peers.iter().for_each(|peer| collect_peer(peer, out));
}

fn collect_peer(stat: &PeerStat, out: &mut Vec<Metric>) {
    let peer = ("peer", stat.name.as_str());
    let states = STATES.map(|state| (state, f64::from(state == stat.state)));
    out.extend(states.map(|(state, is)| Metric::new(&STATE, &[peer, ("state", state)], is)));
    collect_flows(peer, stat, out);
    collect_paths(peer, &stat.counts, out);
    let counts = &stat.counts;
    out.push(Metric::new(&BUSY, &[peer], counts.busy_us as f64 / 1e6));
    let ends = [("done", counts.done), ("cancelled", counts.cancelled)];
    out.extend(ends.map(|(end, count)| Metric::new(&ENDED, &[peer, ("end", end)], count as f64)));
    let faults = counts.faults.iter();
    out.extend(faults.map(|(kind, count)| Metric::new(&FAULTS, &[peer, ("kind", *kind)], *count as f64)));
    out.extend(
        counts.unreached.iter().map(|(reason, count)| {
            Metric::new(&UNREACHED, &[peer, ("reason", reason.label())], *count as f64)
        }),
    );
    if let Some(unreached) = &stat.unreached {
        out.push(Metric::new(&IS_UNREACHED, &[peer, ("reason", unreached.reason.label())], 1.0));
    }
    let stages = &counts.stages;
    for (stage, times) in
        [("queued", &stages.queued), ("posted", &stages.posted), ("notified", &stages.notified)]
    {
        out.push(timed(&REQUESTS, &[peer, ("stage", stage)], times));
    }
}

fn collect_flows(peer: (&'static str, &str), stat: &PeerStat, out: &mut Vec<Metric>) {
    let mut flows = BTreeMap::new();
    for flow in &stat.flows {
        *flows.entry((flow.path, flow.stands_by)).or_insert(0u32) += 1;
    }
    out.extend(flows.into_iter().map(|((path, stands_by), count)| {
        let carries = if stands_by { "words" } else { "bytes" };
        Metric::new(&FLOWS, &[peer, ("path", path), ("carries", carries)], count.into())
    }));
    let mut idle = BTreeMap::new();
    for rail in &stat.idle_rails {
        *idle.entry(rail.rail.name()).or_insert(0u32) += 1;
    }
    out.extend(
        idle.into_iter()
            .map(|(fabric, count)| Metric::new(&IDLE_RAILS, &[peer, ("fabric", fabric)], count.into())),
    );
}

fn collect_paths(peer: (&'static str, &str), counts: &Counts, out: &mut Vec<Metric>) {
    for (path, of) in &counts.paths {
        let labels = [peer, ("path", *path)];
        out.push(Metric::new(&BYTES, &labels, of.moved_bytes as f64));
        out.push(Metric::new(&IN_FLIGHT_BYTES, &labels, of.in_flight_bytes as f64));
        out.push(Metric::new(&IN_FLIGHT_LOTS, &labels, of.in_flight_lots as f64));
        out.push(timed(&LOTS, &labels, &of.wire));
    }
}

/// An agent's histogram: bounds are powers of two, in microseconds; the last count is of those
/// above all of them.
fn timed(family: &'static Family, labels: &[(&'static str, &str)], times: &forebay_net::Histogram) -> Metric {
    let bounds = (0..times.counts.len() as i32 - 1).map(|power| 2f64.powi(power) / 1e6).collect();
    let (counts, sum) = (times.counts.to_vec(), times.sum_us as f64 / 1e6);
    let value = Value::Histogram(Histogram { bounds, counts, sum });
    Metric { value, ..Metric::new(family, labels, 0.0) }
}

#[cfg(test)]
pub mod tests {
    use super::*;
    use forebay_net::{
        FlowStat, IdleRail, PathCounts, RailOptions, TCP, Unreachable, UnreachableReason, WhyIdle,
    };

    const MEMORY: &str = "ucx_memory";

    /// A peer with everything that there is to show.
    pub fn a_peer() -> PeerStat {
        let flow = |path, stands_by| FlowStat { path, stands_by, moved_bytes: 0, report: None };
        let rail = RailOptions::named("rdma", Vec::new()).unwrap();
        let mut counts = Counts { busy_us: 2_500_000, done: 3, ..Counts::default() };
        let mut path = PathCounts { moved_bytes: 4096, in_flight_bytes: 512, ..PathCounts::default() };
        path.wire.counts[4] = 2;
        path.wire.counts[31] = 1;
        path.wire.sum_us = 9_000_000;
        counts.paths.insert(MEMORY, path);
        counts.faults.insert("rail_lost", 7);
        counts.unreached.insert(UnreachableReason::Token, 5);
        PeerStat {
            name: "two".into(),
            state: "up",
            unreached: Some(Unreachable { reason: UnreachableReason::Token, why: String::new() }),
            flows: vec![flow(TCP, true), flow(MEMORY, false)],
            idle_rails: vec![IdleRail { rail, why: WhyIdle::NotThere }],
            counts,
        }
    }

    #[test]
    fn a_peer_is_shown_by_path_stage_and_fault() {
        let mut out = Vec::new();
        collect(&[a_peer()], &mut out);
        let text = crate::metrics::render(out);
        for line in [
            "forebay_peer_state{peer=\"two\",state=\"up\"} 1",
            "forebay_peer_state{peer=\"two\",state=\"dead\"} 0",
            "forebay_peer_flows{peer=\"two\",path=\"tcp\",carries=\"words\"} 1",
            "forebay_peer_flows{peer=\"two\",path=\"ucx_memory\",carries=\"bytes\"} 1",
            "forebay_peer_idle_rails{peer=\"two\",fabric=\"rdma\"} 1",
            "forebay_peer_bytes_total{peer=\"two\",path=\"ucx_memory\"} 4096",
            "forebay_peer_in_flight_bytes{peer=\"two\",path=\"ucx_memory\"} 512",
            "forebay_peer_busy_seconds_total{peer=\"two\"} 2.5",
            "forebay_peer_requests_total{peer=\"two\",end=\"done\"} 3",
            "forebay_peer_faults_total{peer=\"two\",kind=\"rail_lost\"} 7",
            "forebay_peer_unreached_total{peer=\"two\",reason=\"token\"} 5",
            "forebay_peer_unreached{peer=\"two\",reason=\"token\"} 1",
            "forebay_peer_lot_seconds_sum{peer=\"two\",path=\"ucx_memory\"} 9.0",
            "forebay_peer_lot_seconds_count{peer=\"two\",path=\"ucx_memory\"} 3",
        ] {
            assert!(text.lines().any(|shown| shown == line), "{line} is not in\n{text}");
        }
    }

    #[test]
    fn a_time_is_at_most_its_bound_and_what_is_above_all_bounds_is_counted_last() {
        let metric = timed(&LOTS, &[], &a_peer().counts.paths[MEMORY].wire);
        let Value::Histogram(shown) = metric.value else { panic!("{metric:?}") };
        assert_eq!((shown.bounds.len(), shown.counts.len()), (31, 32));
        // From 8 us to below 16 us, and from 2^30 us.
        assert_eq!((shown.bounds[4], shown.counts[4]), (16e-6, 2));
        assert_eq!((shown.bounds[30], shown.counts[31]), (1073.741824, 1));
    }
}
