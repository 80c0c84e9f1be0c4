//! Bytes in the wrong place or of the wrong time: writes that went astray, writes that never
//! arrived. Everything that comes back is intact by itself, and still must not be taken for what
//! was asked for.

use crate::case::{Case, Verdict, still_works};
use crate::disk::{Copy, Disk, Image, Place};
use crate::rig::Rig;
use crate::value::SECTOR_BYTES;
use crate::worker::Broken;
use std::io;

pub const CASES: &[Case] = &[
    Case {
        name: "misdirected writes",
        what: "pairs of values have changed places, with and without what follows them: both are misses",
        run: misdirected,
    },
    Case {
        name: "stale values",
        what: "the older value of the same key lies where the newer was written: it is a miss",
        run: stale,
    },
    Case {
        name: "lost writes",
        what: "the places of new values hold what was there before: they are misses",
        run: lost_writes,
    },
];

/// What stores keep beside a value is taken to be within a page after it.
const BESIDE_BYTES: usize = 4096;

fn misdirected(rig: &mut Rig) -> Result<Verdict, Broken> {
    let disk = rig.disk();
    rig.open_and_fill()?;
    let copies = disk.find(rig.scale.keys, 1, rig.scale.value_bytes)?;
    if copies.len() < 4 {
        return Ok(Verdict::NotApplicable("its files hold no value as it was put".into()));
    }
    for (number, pair) in copies.chunks_exact(2).enumerate() {
        match number % 2 {
            0 => disk.swap(&pair[0], &pair[1])?,
            _ => swap_with_neighbourhood(&disk, &pair[0], &pair[1])?,
        }
    }
    twice(rig)
}

fn swap_with_neighbourhood(disk: &Disk, one: &Copy, other: &Copy) -> io::Result<()> {
    let image = disk.image()?;
    let (first, second) = (neighbourhood(&image, one), neighbourhood(&image, other));
    disk.write(&one.sectors[0], second)?;
    disk.write(&other.sectors[0], first)
}

fn stale(rig: &mut Rig) -> Result<Verdict, Broken> {
    let disk = rig.disk();
    let (older, image) = two_versions(rig, &disk)?;
    let newer = disk.find(rig.scale.keys, 2, rig.scale.value_bytes)?;
    let mut overwritten = 0;
    for new in newer.iter().filter(|copy| copy.version == 1) {
        if let Some(old) = older.iter().find(|old| old.key == new.key) {
            disk.write(&new.sectors[0], neighbourhood(&image, old))?;
            overwritten += 1;
        }
    }
    if overwritten == 0 {
        return Ok(Verdict::NotApplicable("its files hold no value as it was put".into()));
    }
    twice(rig)
}

fn lost_writes(rig: &mut Rig) -> Result<Verdict, Broken> {
    let disk = rig.disk();
    let (_, image) = two_versions(rig, &disk)?;
    let mut lost = 0;
    for new in disk.find(rig.scale.keys, 2, rig.scale.value_bytes)?.iter().filter(|copy| copy.version == 1) {
        let bytes = new.sectors.len() * SECTOR_BYTES;
        let place = &new.sectors[0];
        // Every second loses what follows it, too.
        let before = image.read(place, bytes + BESIDE_BYTES * (new.key % 2) as usize);
        if let Some(before) = before.or_else(|| image.read(place, bytes)) {
            disk.write(place, before)?;
            lost += 1;
        }
    }
    if lost == 0 {
        return Ok(Verdict::NotApplicable("it never writes a value over what was there".into()));
    }
    twice(rig)
}

/// Stores a version of every key, takes an image, and stores the next. The older copies, and the
/// image.
fn two_versions(rig: &mut Rig, disk: &Disk) -> Result<(Vec<Copy>, Image), Broken> {
    rig.open_and_fill()?;
    let older = disk.find(rig.scale.keys, 1, rig.scale.value_bytes)?;
    let image = disk.image()?;
    for key in rig.keys() {
        rig.delete(key)?;
    }
    rig.flush()?;
    rig.put_all(rig.keys())?;
    rig.flush()?;
    Ok((older, image))
}

/// Asks for everything under the running store and after a restart.
fn twice(rig: &mut Rig) -> Result<Verdict, Broken> {
    rig.get_all(rig.keys())?;
    rig.note_faults()?;
    rig.kill()?;
    if !rig.open_damaged()? {
        return Ok(Verdict::Passed);
    }
    rig.get_all(rig.keys())?;
    still_works(rig)
}

/// A value and what follows it, or the value alone at the end of a file.
fn neighbourhood<'a>(image: &'a Image, copy: &Copy) -> &'a [u8] {
    let first: &Place = &copy.sectors[0];
    let bytes = copy.sectors.len() * SECTOR_BYTES;
    let with_neighbours = image.read(first, bytes + BESIDE_BYTES);
    with_neighbours.or_else(|| image.read(first, bytes)).unwrap_or_default()
}
