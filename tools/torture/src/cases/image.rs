//! A disk that went back in time: restored from a snapshot, as a whole or in part. A whole image is
//! a state that was once right, and no store can tell; but each value must be one that was stored,
//! complete, under its key.

use crate::case::{Case, Verdict, still_works};
use crate::rig::Rig;
use crate::worker::Broken;

pub const CASES: &[Case] = &[
    Case {
        name: "older image",
        what: "all files are replaced by those of earlier: values are complete ones of some time, or misses",
        run: |rig| replaced(rig, &[100]),
    },
    Case {
        name: "partly older image",
        what: "a part of each file is replaced by that of earlier: values are complete ones, or misses",
        run: |rig| replaced(rig, &[3, 10, 30, 50, 80]),
    },
];

fn replaced(rig: &mut Rig, share_percents: &[u64]) -> Result<Verdict, Broken> {
    let disk = rig.disk();
    rig.open_and_fill()?;
    rig.kill()?;
    let older = disk.image()?;
    rig.open()?;
    for round in 0..2 {
        for key in rig.keys().filter(|key| key % 3 != round) {
            rig.delete(key)?;
            rig.put(key)?;
        }
        rig.flush()?;
    }
    rig.kill()?;
    let newer = disk.image()?;
    rig.model().any_past();
    let mut verdict = Verdict::Passed;
    for percent in share_percents {
        disk.restore(&older.mixed_with(&newer, *percent))?;
        if rig.open_damaged()? {
            rig.get_all(rig.keys())?;
            verdict = verdict.or(still_works(rig)?);
            rig.kill()?;
        }
    }
    Ok(verdict)
}
