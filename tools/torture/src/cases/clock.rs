//! A wall clock that was wrong for a while. The suite does not set the machine's clock; it gives
//! the files the times that a wrong clock would have given them, then lets the store choose what to
//! evict.

use super::space::exceeded;
use crate::case::{Case, Verdict};
use crate::rig::Rig;
use crate::worker::Broken;
use std::fs::{File, FileTimes};
use std::time::{Duration, SystemTime};

pub const CASES: &[Case] = &[Case {
    name: "clock jumps",
    what: "a full store's files are dated 2100, then 1970: new values are kept, the disk stays bounded",
    run: jumps,
}];

const YEAR_2100_S: u64 = 4_102_444_800;

fn jumps(rig: &mut Rig) -> Result<Verdict, Broken> {
    let disk = rig.disk();
    let values = rig.scale.capacity_bytes / rig.scale.value_bytes;
    let mut verdict = Verdict::Passed;
    let mut next = 0;
    for since_1970 in [Duration::from_secs(YEAR_2100_S), Duration::ZERO] {
        rig.open()?;
        rig.put_all(next..next + values)?;
        next += values;
        rig.flush()?;
        rig.close()?;
        let then = SystemTime::UNIX_EPOCH + since_1970;
        for file in disk.files()? {
            File::options()
                .write(true)
                .open(file)?
                .set_times(FileTimes::new().set_modified(then).set_accessed(then))?;
        }
        rig.open()?;
        let fresh = next..next + rig.scale.keys;
        next = fresh.end;
        rig.put_all(fresh.clone())?;
        let hits = rig.get_all(fresh)?;
        let keys = rig.scale.keys;
        verdict = verdict
            .or(Verdict::failed_if(hits < keys / 2, || format!("of {keys} new values {hits} were kept")))
            .or(exceeded(disk.physical_bytes()?, rig.scale.capacity_bytes));
        rig.close()?;
    }
    Ok(verdict)
}
