//! What changes in memory behind the store's check: whoever uses a value must be able to see it. The
//! worker plays its user.

use crate::case::{Case, Verdict, counts, still_works, was_played};
use crate::protocol::Fault;
use crate::rig::Rig;
use crate::worker::Broken;

pub const CASES: &[Case] = &[Case {
    name: "flips after verification",
    what: "a byte of a value changes in memory after the store has checked it: it is a miss, and counted",
    run: flips,
}];

fn flips(rig: &mut Rig) -> Result<Verdict, Broken> {
    rig.open_and_fill()?;
    let mut verdict = Verdict::Passed;
    // What was just put may be in memory; behind a restart it comes from the disk.
    for restarts in [false, true] {
        if restarts {
            rig.close()?;
            rig.open()?;
        }
        for percent in [20, 100] {
            if let Some(why) = rig.inject(Fault::Flip { percent })? {
                return Ok(Verdict::NotApplicable(why));
            }
            let hits = rig.get_all(rig.keys())?;
            rig.note(format!("{hits} hits with {percent} % flipped"));
        }
        rig.inject(Fault::None)?;
        let stat = rig.note_faults()?;
        if !restarts {
            verdict = verdict.or(was_played(stat)).or(counts(stat));
        }
        rig.get_all(rig.keys())?;
    }
    Ok(verdict.or(still_works(rig)?))
}
