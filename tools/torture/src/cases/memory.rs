//! What changes in memory behind the store's check: whoever uses a value must be able to see it.
//! The worker plays its user.

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
    for (percent, restarts) in [(20, false), (100, false), (100, true)] {
        if restarts {
            for key in rig.keys() {
                rig.delete(key)?;
                rig.put(key)?;
            }
            rig.close()?;
            // What was in memory comes from the disk, if it comes at all.
            rig.open()?;
        }
        if let Some(why) = rig.inject(Fault::Flip { percent })? {
            return Ok(Verdict::NotApplicable(why));
        }
        let hits = rig.get_all(rig.keys())?;
        rig.inject(Fault::None)?;
        rig.note(format!("{hits} hits with {percent} % flipped"));
        let stat = rig.note_faults()?;
        if !restarts {
            verdict = verdict.or(was_played(stat));
        }
        if stat.played > Some(0) {
            verdict = verdict.or(counts(stat));
        }
        rig.get_all(rig.keys())?;
    }
    Ok(verdict.or(still_works(rig)?))
}
