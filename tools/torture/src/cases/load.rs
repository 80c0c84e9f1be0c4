//! More at a time than there is room for: readers beyond the staging memory, readers of what is
//! being evicted. Everything is answered, and rightly.

use crate::case::{Case, Verdict, still_works};
use crate::protocol::COMMANDS_MAX;
use crate::rig::Rig;
use crate::worker::Broken;
use std::collections::VecDeque;

pub const CASES: &[Case] = &[
    Case {
        name: "staging exhaustion",
        what: "many values are asked for at a time, and in one call, with memory for a few: each is answered",
        run: staging,
    },
    Case {
        name: "readers during eviction",
        what: "values are read while three capacities are written: each is right, or a miss",
        run: readers,
    },
];

/// Values that staging memory holds in the case about it.
const STAGED_VALUES: u64 = 8;

fn staging(rig: &mut Rig) -> Result<Verdict, Broken> {
    rig.setup.staging_bytes = STAGED_VALUES * rig.scale.value_bytes;
    rig.open()?;
    let keys: Vec<u64> = (0..rig.scale.keys.min(COMMANDS_MAX as u64 - 16)).collect();
    rig.put_all(0..keys.len() as u64)?;
    rig.flush()?;
    let sent = keys.iter().map(|key| rig.send_get(*key)).collect::<Result<Vec<_>, _>>()?;
    let mut hits = 0;
    for (key, sent) in keys.iter().zip(sent) {
        hits += u64::from(rig.end_get(*key, sent)?);
    }
    let at_once = rig.get_many(&keys)?;
    let later = rig.get_all(keys.iter().copied())?;
    rig.note(format!("of {} hits: {hits} side by side, {at_once} in one call, {later} later", keys.len()));
    let lost = Verdict::failed_if(later == 0, || "nothing is a hit afterwards".into());
    Ok(lost.or(still_works(rig)?))
}

fn readers(rig: &mut Rig) -> Result<Verdict, Broken> {
    let values = rig.scale.capacity_bytes / rig.scale.value_bytes;
    let (mut puts, mut gets, mut answered) = (VecDeque::new(), VecDeque::new(), 0);
    rig.open()?;
    for key in 0..3 * values {
        let (version, sent) = rig.send_put(key)?;
        puts.push_back((key, version, sent));
        if puts.len() == COMMANDS_MAX / 4
            && let Some((key, version, sent)) = puts.pop_front()
        {
            rig.end_put(key, version, sent)?;
            answered = key + 1;
        }
        // What was put last, and what is about to be evicted.
        for age in [0, values - values / 8].into_iter().filter(|age| *age < answered) {
            let asked = (answered - 1 - age).saturating_sub(rig.random.below(32));
            gets.push_back((asked, rig.send_get(asked)?));
        }
        while gets.len() > COMMANDS_MAX / 4 {
            if let Some((key, sent)) = gets.pop_front() {
                rig.end_get(key, sent)?;
            }
        }
    }
    for (key, version, sent) in puts {
        rig.end_put(key, version, sent)?;
    }
    for (key, sent) in gets {
        rig.end_get(key, sent)?;
    }
    let hits = rig.seen.hits;
    rig.note(format!("{hits} of {} reads were hits", hits + rig.seen.misses));
    Ok(Verdict::failed_if(hits == 0, || "no read was ever a hit".into()).or(still_works(rig)?))
}
