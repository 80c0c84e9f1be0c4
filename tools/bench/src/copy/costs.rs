//! What the copier costs beside its copies: memory of the GPUs, time for the first copy, processors
//! while nothing is copied.

use super::plan::Plan;
use super::rig::Rig;
use super::way::Way;
use crate::output::Outcome;
use crate::timing::{cost, median};
use forebay_cuda::links::Direction;
use forebay_results::Row;
use std::time::Duration;

/// The first copy's length at most: what is done once is done for any.
const FIRST_BYTES_MAX: u64 = 64 << 20;
/// Copies that the first is compared with.
const LATER: usize = 9;
/// How long nothing is done.
const IDLE: Duration = Duration::from_secs(2);

/// What it costs to start. Nothing may have been copied before.
pub fn of_starting(rig: &Rig, plan: &Plan, relays: bool) -> Outcome<Vec<Row>> {
    let bytes = rig.ends[plan.first()].bytes().min(FIRST_BYTES_MAX);
    let mut firsts = Vec::new();
    for direction in Direction::BOTH {
        let jobs = [rig.whole(plan.first(), direction, bytes)];
        let copy = || rig.timed(Way::Best, &jobs).map(|timed| timed.first.wall_s * 1e3);
        let first_ms = copy()?;
        let later_ms = (0..LATER).map(|_| copy()).collect::<Outcome<Vec<_>>>()?;
        firsts.push(first_ms - median(&later_ms));
    }
    let mut rows = vec![Row::of_runs("copy.first_copy_extra_ms", "ms", &firsts)];
    if relays {
        let mib = |bytes: &u64| *bytes as f64 / f64::from(1 << 20);
        let each: Vec<f64> = rig.ways().start_bytes.iter().map(mib).collect();
        rows.push(Row::of_runs("copy.hbm_mib.per_relay", "MiB", &each));
    }
    Ok(rows)
}

/// What it costs to have it.
pub fn of_idling() -> Outcome<Row> {
    let idle = cost(|| {
        std::thread::sleep(IDLE);
        Ok(())
    })?;
    Ok(Row::of_runs("copy.idle.cpu_core", "cores", &[idle.cores()]))
}
