//! A case: something that is done to a store, what it says of the store, and the questions that
//! many cases ask. `cases` has them all.

use crate::rig::{Rig, Stat};
use crate::worker::Broken;
use std::time::Duration;

/// Something that is done to a store.
#[derive(Debug, Clone, Copy)]
pub struct Case {
    pub name: &'static str,
    /// What is done, and what must come of it, in a sentence.
    pub what: &'static str,
    pub run: fn(&mut Rig) -> Result<Verdict, Broken>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    /// Nothing was found beyond what the rig has counted.
    Passed,
    /// The store broke a promise.
    Failed(String),
    /// The case cannot be played with this store or on this machine.
    NotApplicable(String),
}

/// Least share of the values that were flushed that must be there after a crash, in percent.
const WARM_PERCENT: u64 = 99;

impl Verdict {
    pub fn failed_if(failed: bool, why: impl FnOnce() -> String) -> Verdict {
        if failed { Verdict::Failed(why()) } else { Verdict::Passed }
    }

    /// The first that is not a pass.
    pub fn or(self, other: Verdict) -> Verdict {
        if self == Verdict::Passed { other } else { self }
    }
}

/// Whether values that are put now are there: a store that survived must also still work. It may
/// decline for a few seconds, while it makes room or tries a disk again that has failed. Uses keys
/// that no case uses.
pub fn still_works(rig: &mut Rig) -> Result<Verdict, Broken> {
    const FRESH: u64 = 4;
    const ATTEMPTS: usize = 25;
    const REST: Duration = Duration::from_millis(200);
    let (mut stored, mut hits) = (0, 0);
    for attempt in 0..ATTEMPTS {
        if attempt > 0 {
            std::thread::sleep(REST);
        }
        let first = rig.model().keys().max(rig.scale.keys);
        stored = rig.put_all(first..first + FRESH)?;
        hits = rig.get_all(first..first + FRESH)?;
        if hits == FRESH {
            return Ok(Verdict::Passed);
        }
    }
    Ok(Verdict::Failed(format!("wedged: of {FRESH} new values {stored} were stored and {hits} were hits")))
}

/// Not applicable, if the worker says that nothing has gone wrong after all.
pub fn was_played(stat: Stat) -> Verdict {
    match stat.played {
        Some(0) => Verdict::NotApplicable("its worker had no occasion to play it".into()),
        _ => Verdict::Passed,
    }
}

/// Whether a store that counts faults has counted what went wrong.
pub fn counts(stat: Stat) -> Verdict {
    Verdict::failed_if(stat.faults == Some(0), || "counts no fault".into())
}

/// Whether what was flushed before crashes and restarts is there.
pub fn is_warm(rig: &Rig) -> Verdict {
    let (due, hits) = (rig.seen.due, rig.seen.due_hits);
    Verdict::failed_if(hits * 100 < due * WARM_PERCENT, || {
        format!("{hits} of {due} flushed values are there")
    })
}
