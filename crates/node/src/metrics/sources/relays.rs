//! What a node's GPUs that relay for engines have to show.

use super::{counter, gauge, push_one};
use crate::metrics::{Family, Metric};
use forebay_cuda::remote::RelaysStat;

const GPUS: Family = gauge("forebay_relays_gpus", "GPUs that relay for engines.");
const ENGINES: Family = gauge("forebay_relays_engines", "Engines that are attached.");
const STAGING: Family = gauge("forebay_relays_staging_bytes", "Staging that engines have, on all GPUs.");
const REQUESTS: Family = counter("forebay_relays_requests_total", "Copies that engines asked for.");
const BYTES: Family = counter("forebay_relays_bytes_total", "Bytes of these copies.");
const REFUSED: Family = counter("forebay_relays_refused_total", "Engines that were not let in.");
const VIOLATIONS: Family =
    counter("forebay_relays_violations_total", "Engines that asked for nonsense and were parted from.");

pub fn collect(stat: &RelaysStat, out: &mut Vec<Metric>) {
    push_one(out, &GPUS, stat.gpus as f64);
    push_one(out, &ENGINES, stat.engines as f64);
    push_one(out, &STAGING, stat.staging_bytes as f64);
    push_one(out, &REQUESTS, stat.requests as f64);
    push_one(out, &BYTES, stat.bytes as f64);
    push_one(out, &REFUSED, stat.refused as f64);
    push_one(out, &VIOLATIONS, stat.violations as f64);
}
