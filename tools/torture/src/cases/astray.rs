//! Reads and writes that go astray under the running store: a page comes from another place, or
//! lands there, and nothing says so. What comes back is intact by itself, and not what was asked
//! for.

use crate::case::{Case, Verdict, counts, still_works, was_played};
use crate::protocol::{Fault, IoFault};
use crate::rig::Rig;
use crate::worker::Broken;

pub const CASES: &[Case] = &[
    Case {
        name: "misdirected pages, read",
        what: "a page of what is read is that of another place: it is a miss, also while the store opens",
        run: read,
    },
    Case {
        name: "misdirected pages, written",
        what: "a page lands at another place: what should be there and what was there are misses",
        run: written,
    },
];

fn misdirected(reads: bool, percent: u8) -> Fault {
    Fault::Io { kind: IoFault::Misdirected, reads, writes: !reads, percent }
}

fn read(rig: &mut Rig) -> Result<Verdict, Broken> {
    rig.open_and_fill()?;
    for percent in [20, 100] {
        if let Some(why) = rig.inject(misdirected(true, percent))? {
            return Ok(Verdict::NotApplicable(why));
        }
        let hits = rig.get_all(rig.keys())?;
        rig.note(format!("{hits} hits at {percent} %"));
    }
    rig.inject(Fault::None)?;
    let stat = rig.note_faults()?;
    rig.get_all(rig.keys())?;
    rig.put_all(rig.scale.keys..2 * rig.scale.keys)?;
    rig.flush()?;
    rig.kill()?;
    rig.start()?;
    rig.inject(misdirected(true, 20))?;
    if rig.open_damaged()? {
        rig.get_all(0..2 * rig.scale.keys)?;
        rig.kill()?;
    }
    // The disk itself is whole.
    rig.open()?;
    rig.get_all(0..2 * rig.scale.keys)?;
    Ok(was_played(stat).or(counts(stat)).or(still_works(rig)?))
}

fn written(rig: &mut Rig) -> Result<Verdict, Broken> {
    let keys = rig.scale.keys;
    rig.open_and_fill()?;
    let mut next = keys;
    for (percent, more) in [(20, keys / 2), (100, keys / 4)] {
        if let Some(why) = rig.inject(misdirected(false, percent))? {
            return Ok(Verdict::NotApplicable(why));
        }
        rig.put_all(next..next + more)?;
        next += more;
        rig.flush()?;
        let hits = rig.get_all(0..next)?;
        rig.note(format!("{hits} of {next} hits at {percent} %"));
    }
    rig.inject(Fault::None)?;
    let stat = rig.note_faults()?;
    rig.get_all(0..next)?;
    rig.kill()?;
    if !rig.open_damaged()? {
        return Ok(was_played(stat));
    }
    rig.get_all(0..next)?;
    Ok(was_played(stat).or(counts(stat)).or(still_works(rig)?))
}
