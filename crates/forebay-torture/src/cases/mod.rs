//! The cases: what is done to a store, and what it may do then. Every case also fails when a value comes back wrong, a
//! command is not answered in time, a worker dies or an answer is an exception; a case says only what comes on top.
//! Cases must never know which store they torture.

mod clock;
mod crash;
mod damage;
mod image;
mod load;
mod owners;
mod place;
mod restart;
mod runtime;
mod space;

use crate::rig::Rig;
use crate::worker::Broken;

/// Something that is done to a store.
#[derive(Debug, Clone, Copy)]
pub struct Case {
    /// Its name in tables.
    pub name: &'static str,
    /// What is done, and what must come of it, in a sentence.
    pub what: &'static str,
    /// Does it.
    pub run: fn(&mut Rig) -> Result<Verdict, Broken>,
}

/// What a case says.
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

/// All cases, in the order in which they are run.
pub fn all() -> Vec<Case> {
    let groups = [
        restart::CASES,
        damage::CASES,
        place::CASES,
        image::CASES,
        runtime::CASES,
        space::CASES,
        load::CASES,
        clock::CASES,
        owners::CASES,
        crash::CASES,
    ];
    groups.concat()
}

impl Verdict {
    fn failed_if(failed: bool, why: impl FnOnce() -> String) -> Verdict {
        if failed { Verdict::Failed(why()) } else { Verdict::Passed }
    }

    /// The first that is not a pass.
    fn or(self, other: Verdict) -> Verdict {
        if self == Verdict::Passed { other } else { self }
    }
}

/// Whether values that were put now are there now: a store that survived must also still work. Uses keys that no case uses.
fn still_works(rig: &mut Rig) -> Result<Verdict, Broken> {
    const FRESH: u64 = 4;
    let first = rig.model().keys().max(rig.scale.keys);
    let stored = rig.put_all(first..first + FRESH)?;
    let hits = rig.get_all(first..first + FRESH)?;
    Ok(Verdict::failed_if(hits < FRESH, || {
        format!("wedged: of {FRESH} new values {stored} were stored and {hits} were hits")
    }))
}

/// Whether what was flushed before crashes and restarts is there.
fn is_warm(rig: &Rig) -> Verdict {
    let (due, hits) = (rig.seen.due, rig.seen.due_hits);
    Verdict::failed_if(hits * 100 < due * WARM_PERCENT, || {
        format!("{hits} of {due} flushed values are there")
    })
}
