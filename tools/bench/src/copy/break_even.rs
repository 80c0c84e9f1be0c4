//! From which size on several links beat one. Stream copies are made here however small a copy is,
//! as the copier would not.

use super::plan::Plan;
use super::rig::Rig;
use super::way::{Course, Way};
use crate::output::Outcome;
use crate::timing::median;
use forebay_results::Row;

const MIB: u64 = 1 << 20;
/// Sizes that are tried.
const SIZES: [u64; 9] = [MIB, 3 * MIB / 2, 2 * MIB, 3 * MIB, 4 * MIB, 6 * MIB, 8 * MIB, 16 * MIB, 64 * MIB];
/// Runs of each, for each that was asked for: what is looked for are differences of a percent.
const RUNS: u32 = 4;

/// Medians of one size.
#[derive(Debug, Clone, Copy)]
struct Tried {
    bytes: u64,
    /// Seconds of the driver's own copy.
    native_s: f64,
    /// Seconds of a chain; `None` where it has nothing for relays to do.
    chain_s: Option<f64>,
}

/// Rows for each way that was asked for.
pub fn rows(rig: &Rig, plan: &Plan) -> Outcome<Vec<Row>> {
    let mut rows = Vec::new();
    for course in plan.courses.iter().filter(|course| **course != Course::Both) {
        let room = rig.ends[plan.first()].bytes();
        let sizes = SIZES.into_iter().filter(|bytes| *bytes <= room);
        let tried = sizes.map(|bytes| attempt(rig, plan, *course, bytes)).collect::<Outcome<Vec<_>>>()?;
        let name = format!("copy.{}.break_even_mib", course.name());
        match break_even(&tried) {
            Some(bytes) => {
                let value = bytes as f64 / MIB as f64;
                let runs = (plan.runs * RUNS) as usize;
                rows.push(Row { runs, ..Row::of_runs(name, "MiB", &[value]) });
            }
            None => eprintln!("{name} is left out: no size that was tried is faster over several links"),
        }
    }
    Ok(rows)
}

fn attempt(rig: &Rig, plan: &Plan, course: Course, bytes: u64) -> Outcome<Tried> {
    let jobs = [rig.whole(plan.first(), course.directions()[0], bytes)];
    let before = rig.ways().eager_chains()?;
    let (mut native, mut chain) = (Vec::new(), Vec::new());
    for _ in 0..plan.runs * RUNS {
        native.push(rig.timed(Way::Direct, &jobs)?.again.wall_s);
        chain.push(rig.timed(Way::Eager, &jobs)?.again.wall_s);
    }
    // Each is made twice.
    let are_chains = rig.ways().eager_chains()? - before == u64::from(2 * plan.runs * RUNS);
    Ok(Tried { bytes, native_s: median(&native), chain_s: are_chains.then(|| median(&chain)) })
}

/// The smallest size from which on a chain is never slower.
fn break_even(tried: &[Tried]) -> Option<u64> {
    let gains = |tried: &&Tried| tried.chain_s.is_some_and(|chain_s| chain_s <= tried.native_s);
    tried.iter().rev().take_while(gains).last().map(|tried| tried.bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_break_even_is_where_chains_are_slower_for_the_last_time() {
        let tried = |bytes, native_s, chain_s| Tried { bytes, native_s, chain_s };
        let sizes = [
            tried(1, 1.0, None),
            tried(2, 2.0, Some(1.9)),
            tried(3, 3.0, Some(3.1)),
            tried(4, 4.0, Some(3.0)),
        ];
        assert_eq!(break_even(&sizes), Some(4));
        assert_eq!(break_even(&sizes[..2]), Some(2));
        assert_eq!(break_even(&sizes[..3]), None);
        assert_eq!(break_even(&sizes[..1]), None);
        assert_eq!(break_even(&[]), None);
    }
}
