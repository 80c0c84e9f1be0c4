//! What a directory has to show.

use super::{counter, gauge, push_each, push_one};
use crate::directory::DirectoryStat;
use crate::metrics::{Family, Metric};

const NODES: Family = gauge("forebay_directory_nodes", "Nodes known, without this one.");
const HOLDINGS: Family = gauge("forebay_directory_holdings", "Pairs of a chunk and a node said to hold it.");
const ANNOUNCED: Family = gauge("forebay_directory_announced_chunks", "Chunks of this node that others see.");
const WAITING: Family = gauge("forebay_directory_waiting_chunks", "Changes that others do not see yet.");
const STALE: Family =
    gauge("forebay_directory_stale_seconds", "For how long what is known may be out of date; 0: it is not.");
const CONFLICT: Family = gauge(
    "forebay_directory_name_conflict",
    "1 while another live node has this node's name; each hides the other.",
);
const LISTS: Family = counter("forebay_directory_lists_total", "Times everything was read anew.");
const JOINS: Family = counter("forebay_directory_joins_total", "Times this node began anew as a member.");
const FAULTS: Family = counter("forebay_directory_faults_total", "What went wrong, by kind.");

pub fn collect(stat: &DirectoryStat, out: &mut Vec<Metric>) {
    push_one(out, &NODES, stat.nodes as f64);
    push_one(out, &HOLDINGS, stat.holdings as f64);
    push_one(out, &ANNOUNCED, stat.announced as f64);
    push_one(out, &WAITING, stat.waiting as f64);
    push_one(out, &STALE, stat.stale_us.unwrap_or(0) as f64 / 1e6);
    push_one(out, &CONFLICT, f64::from(stat.name_conflict));
    push_one(out, &LISTS, stat.lists as f64);
    push_one(out, &JOINS, stat.joins as f64);
    let faults = &stat.faults;
    let kinds = [
        ("unreachable", faults.unreachable),
        ("refused", faults.refused),
        ("bad_entry", faults.bad_entries),
        ("over_limit", faults.over_limit),
    ];
    push_each(out, &FAULTS, "kind", &kinds);
}
