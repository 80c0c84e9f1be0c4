//! The end without warning: processes that are killed while they write, and power that fails at a
//! chosen write. What was flushed is there afterwards, and nothing that comes back was ever
//! anything else.

use crate::case::{Case, Verdict, is_warm, still_works};
use crate::protocol::Fault;
use crate::rig::Rig;
use crate::worker::Broken;
use std::time::Duration;

pub const CASES: &[Case] = &[
    Case {
        name: "SIGKILL loop",
        what: "the process is killed again and again while it writes: 99 % of what was flushed is there",
        run: sigkill,
    },
    Case {
        name: "power loss at every write",
        what: "the power fails at the 1st, 2nd, 3rd.. write, what was not synced is kept, lost or torn: as above",
        run: power_loss,
    },
];

/// Puts that are under way when the process is killed.
const UNDER_WAY: u64 = 16;
/// Changes of a store's life between two power failures, at most.
const CHANGES: u64 = 24;
/// Changes between flushes.
const CHANGES_A_FLUSH: u64 = 3;
/// Keys and bytes of the power losses, small so that many can be had.
const POWER_KEYS: u64 = 24;
const POWER_VALUE_BYTES: u64 = 16 << 10;
const POWER_CAPACITY_BYTES: u64 = 16 << 20;

fn sigkill(rig: &mut Rig) -> Result<Verdict, Broken> {
    for _ in 0..rig.scale.kills {
        rig.open()?;
        rig.get_all(rig.keys())?;
        for changes in 0..rig.random.below(32) {
            let key = rig.random.below(rig.scale.keys);
            rig.delete(key)?;
            rig.put(key)?;
            if changes % 8 == 7 {
                rig.flush()?;
            }
        }
        let first = rig.random.below(rig.scale.keys - UNDER_WAY);
        for key in first..first + UNDER_WAY {
            rig.delete(key)?;
        }
        for key in first..first + UNDER_WAY {
            drop(rig.send_put(key)?);
        }
        std::thread::sleep(Duration::from_micros(rig.random.below(8_000)));
        rig.kill()?;
    }
    rig.open()?;
    rig.get_all(rig.keys())?;
    rig.note(format!("{} of {} flushed values after a kill", rig.seen.due_hits, rig.seen.due));
    let warm = is_warm(rig);
    Ok(warm.or(still_works(rig)?))
}

fn power_loss(rig: &mut Rig) -> Result<Verdict, Broken> {
    (rig.scale.keys, rig.scale.value_bytes) = (POWER_KEYS, POWER_VALUE_BYTES);
    (rig.setup.value_bytes, rig.setup.capacity_bytes) = (POWER_VALUE_BYTES, POWER_CAPACITY_BYTES);
    let mut after_writes = 0;
    while rig.seen.crash_points < u64::from(rig.scale.crash_points) {
        rig.start()?;
        let seed = rig.random.next();
        if let Some(why) = rig.inject(Fault::PowerLoss { after_writes, seed })? {
            return Ok(Verdict::NotApplicable(why));
        }
        match live(rig) {
            // Its life was shorter than that many writes: begin again, with other choices.
            Ok(()) if after_writes == 0 => return Ok(Verdict::Failed("never writes anything".into())),
            Ok(()) => {
                after_writes = 0;
                rig.kill()?;
            }
            Err(broken) if rig.lost_power(&broken) => {
                after_writes += 1;
                rig.seen.crash_points += 1;
            }
            Err(broken) => return Err(broken),
        }
    }
    rig.open()?;
    rig.get_all(rig.keys())?;
    rig.note(format!("{} of {} flushed values after a loss", rig.seen.due_hits, rig.seen.due));
    let warm = is_warm(rig);
    Ok(warm.or(still_works(rig)?))
}

/// Opens, reads and changes a store, until the power fails.
fn live(rig: &mut Rig) -> Result<(), Broken> {
    rig.open()?;
    rig.get_all(rig.keys())?;
    for changes in 0..CHANGES {
        let key = rig.random.below(rig.scale.keys);
        rig.delete(key)?;
        rig.put(key)?;
        if changes % CHANGES_A_FLUSH == CHANGES_A_FLUSH - 1 {
            rig.flush()?;
        }
    }
    Ok(())
}
