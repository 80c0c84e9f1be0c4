//! The disk as a limit: what a store was given, and what there is.

use crate::case::{Case, Verdict, still_works};
use crate::rig::Rig;
use crate::worker::Broken;
use std::path::{Path, PathBuf};
use std::process::Command;

pub const CASES: &[Case] = &[
    Case {
        name: "bounded disk",
        what: "three capacities are written: the files never take more than the capacity and 1 %",
        run: bounded,
    },
    Case {
        name: "disk fuller than configured",
        what: "the file system is half as large as the capacity: refused at once, or used within its limits",
        run: disk_too_small,
    },
];

fn bounded(rig: &mut Rig) -> Result<Verdict, Broken> {
    let disk = rig.disk();
    let (capacity, values) = (rig.scale.capacity_bytes, rig.scale.capacity_bytes / rig.scale.value_bytes);
    rig.open()?;
    let mut most = 0;
    for key in 0..3 * values {
        rig.put(key)?;
        if key % 8 == 0 {
            most = most.max(disk.physical_bytes()?);
        }
    }
    rig.flush()?;
    most = most.max(disk.physical_bytes()?);
    let newest = rig.get_all(3 * values - rig.scale.keys..3 * values)?;
    rig.note(format!("at most {:.1} % of the capacity", most as f64 * 100.0 / capacity as f64));
    let lost = Verdict::failed_if(newest == 0, || "the newest values are not there".into());
    Ok(exceeded(most, capacity).or(lost))
}

/// Whether files take more than they may.
pub fn exceeded(physical_bytes: u64, capacity_bytes: u64) -> Verdict {
    Verdict::failed_if(physical_bytes > capacity_bytes + capacity_bytes / 100, || {
        format!("takes {physical_bytes} bytes of disk, {capacity_bytes} were allowed")
    })
}

fn disk_too_small(rig: &mut Rig) -> Result<Verdict, Broken> {
    let Some(small) = SmallDisk::mount(&rig.setup.dir, rig.scale.capacity_bytes / 2) else {
        return Ok(Verdict::NotApplicable("mounting a small file system needs root".into()));
    };
    let verdict = on_small_disk(rig, &small);
    // Before the file system goes.
    rig.kill()?;
    verdict
}

fn on_small_disk(rig: &mut Rig, small: &SmallDisk) -> Result<Verdict, Broken> {
    rig.setup.dir.clone_from(&small.0);
    if !rig.open_damaged()? {
        return Ok(Verdict::Passed);
    }
    let values = rig.scale.capacity_bytes / rig.scale.value_bytes;
    let stored = rig.put_all(0..values)?;
    let hits = rig.get_all(0..values)?;
    rig.note(format!("{stored} of {values} stored, {hits} hits"));
    still_works(rig)
}

/// A file system in memory. Unmounted when dropped.
struct SmallDisk(PathBuf);

impl SmallDisk {
    fn mount(below: &Path, bytes: u64) -> Option<SmallDisk> {
        let at = below.join("small");
        std::fs::create_dir(&at).ok()?;
        let size = format!("size={bytes}");
        let mount = Command::new("mount").args(["-t", "tmpfs", "-o", &size, "tmpfs"]).arg(&at).output();
        mount.is_ok_and(|output| output.status.success()).then_some(SmallDisk(at))
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        // What stays mounted is small, and below a directory that says whose it is.
        let _ = Command::new("umount").arg("-l").arg(&self.0).output();
    }
}
