//! System calls that end oddly while the store runs. Values may be lost and puts declined;
//! afterwards the store works again.

use crate::case::{Case, Verdict, still_works};
use crate::protocol::{Fault, IoFault};
use crate::rig::Rig;
use crate::worker::Broken;

pub const CASES: &[Case] = &[
    Case {
        name: "short I/O",
        what: "half of all reads and writes move fewer bytes than asked for",
        run: |rig| while_running(rig, IoFault::Short, &[50]),
    },
    Case {
        name: "zero I/O",
        what: "reads and writes move nothing and report no error: a fifth of them, then all",
        run: |rig| while_running(rig, IoFault::Zero, &[20, 100]),
    },
    Case {
        name: "EIO",
        what: "reads and writes fail: a fifth of them, then all",
        run: |rig| while_running(rig, IoFault::Eio, &[20, 100]),
    },
    Case {
        name: "ENOSPC",
        what: "writes fail for want of space: a fifth of them, then all",
        run: |rig| while_running(rig, IoFault::Enospc, &[20, 100]),
    },
    Case {
        name: "EINTR storm",
        what: "nine of ten calls are interrupted before they move anything",
        run: |rig| while_running(rig, IoFault::Eintr, &[90]),
    },
];

/// Values that are put, and older ones that are asked for, while every call fails.
const ATTEMPTS: u64 = 4;

fn while_running(rig: &mut Rig, kind: IoFault, percents: &[u8]) -> Result<Verdict, Broken> {
    let (quarter, keys) = (rig.scale.keys / 4, rig.scale.keys);
    rig.open()?;
    rig.put_all(0..quarter)?;
    rig.flush()?;
    let mut next = quarter;
    for percent in percents {
        let fault = Fault::Io { kind, reads: kind != IoFault::Enospc, writes: true, percent: *percent };
        if let Some(why) = rig.inject(fault)? {
            return Ok(Verdict::NotApplicable(why));
        }
        // Where everything fails, a few attempts tell as much as many, and each may take its time.
        let (more, asked) = match percent {
            100 => (ATTEMPTS, next - ATTEMPTS..next + ATTEMPTS),
            _ => (keys / 2, 0..next + keys / 2),
        };
        let stored = rig.put_all(next..next + more)?;
        next += more;
        let flushed = if rig.flush()? { "" } else { "no " };
        let (hits, gets) = (rig.get_all(asked.clone())?, asked.end - asked.start);
        rig.note(format!("at {percent} %: {stored} of {more} stored, {flushed}flush, {hits} of {gets} hits"));
    }
    rig.inject(Fault::None)?;
    rig.get_all(0..next)?;
    rig.note_faults()?;
    if still_works(rig)? == Verdict::Passed {
        return Ok(Verdict::Passed);
    }
    // A store may stop writing after errors, as long as a restart helps.
    rig.note("writes again only after a restart");
    rig.kill()?;
    rig.open()?;
    rig.get_all(0..next)?;
    still_works(rig)
}
