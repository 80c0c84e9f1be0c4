//! Damage to values at rest: bits, sectors, pages, lengths and files. What was damaged is a miss,
//! while the store runs and after a restart.

use crate::case::{Case, Verdict, still_works};
use crate::disk::{Copy, Disk};
use crate::rig::Rig;
use crate::value::SECTOR_BYTES;
use crate::worker::Broken;
use std::collections::BTreeSet;
use std::fs::File;
use std::io;

pub const CASES: &[Case] = &[
    Case {
        name: "bit flips",
        what: "one bit of every second value is flipped: it is a miss",
        run: |rig| at_rest(rig, flip_bits),
    },
    Case {
        name: "bit flips anywhere",
        what: "hundreds of bits of all files are flipped, metadata included: nothing wrong comes back",
        run: |rig| at_rest(rig, flip_bits_anywhere),
    },
    Case {
        name: "torn sectors",
        what: "of every second value some sectors of 512 B were never written: it is a miss",
        run: |rig| at_rest(rig, |rig, disk, copies| tear(rig, disk, copies, 1)),
    },
    Case {
        name: "torn pages",
        what: "of every second value some pages of 4 KiB were never written: it is a miss",
        run: |rig| at_rest(rig, |rig, disk, copies| tear(rig, disk, copies, PAGE_SECTORS)),
    },
    Case {
        name: "zeroed pages",
        what: "a page of every second value is zeros: it is a miss",
        run: |rig| at_rest(rig, zero_a_page),
    },
    Case {
        name: "truncated files",
        what: "the files of every second value end in its midst: it is a miss",
        run: |rig| at_rest(rig, truncate),
    },
    Case {
        name: "deleted files",
        what: "the files of every second value are gone: it is a miss, or still there",
        run: |rig| at_rest(rig, delete),
    },
];

const PAGE_SECTORS: usize = 4096 / SECTOR_BYTES;
/// Bits that are flipped without regard to what they are.
const FLIPS: u64 = 400;

type Damage = fn(&mut Rig, &Disk, &[Copy]) -> io::Result<()>;

/// Does damage under a running store, then to another set of values while the store is closed.
fn at_rest(rig: &mut Rig, damage: Damage) -> Result<Verdict, Broken> {
    let keys = rig.scale.keys;
    let disk = rig.disk();
    rig.open()?;
    rig.put_all(0..keys)?;
    rig.flush()?;
    let copies = disk.find(keys, 1, rig.scale.value_bytes)?;
    if copies.is_empty() {
        return Ok(Verdict::NotApplicable("its files hold no value as it was put".into()));
    }
    damage(rig, &disk, &every_second(&copies))?;
    let hits = rig.get_all(0..keys)?;
    rig.note(format!("{hits} of {keys} values left while running"));
    rig.note_faults()?;
    let running = still_works(rig)?;

    let first = rig.model().keys();
    let all = first + keys;
    rig.put_all(first..all)?;
    rig.flush()?;
    rig.close()?;
    let copies = disk.find(all, 1, rig.scale.value_bytes)?;
    damage(rig, &disk, &every_second(&copies))?;
    if !rig.open_damaged()? {
        return Ok(running);
    }
    let hits = rig.get_all(0..all)?;
    rig.note(format!("{hits} of {all} after a restart"));
    Ok(running.or(still_works(rig)?))
}

fn every_second(copies: &[Copy]) -> Vec<Copy> {
    copies.iter().filter(|copy| copy.key % 2 == 0).cloned().collect()
}

fn flip_bits(rig: &mut Rig, disk: &Disk, copies: &[Copy]) -> io::Result<()> {
    for copy in copies {
        let sector = rig.random.below(copy.sectors.len() as u64) as usize;
        disk.flip_bit(&copy.sectors[sector], &mut rig.random)?;
    }
    Ok(())
}

/// Half of the flips fall on pages that hold no value, however few they are.
fn flip_bits_anywhere(rig: &mut Rig, disk: &Disk, _: &[Copy]) -> io::Result<()> {
    let versions = rig.model().versions();
    let copies = disk.find(rig.model().keys(), versions, rig.scale.value_bytes)?;
    let of_values: BTreeSet<_> =
        copies.iter().flat_map(|copy| &copy.sectors).map(|place| (&place.file, place.offset)).collect();
    let (mut values, mut others) = (Vec::new(), Vec::new());
    for file in disk.files()? {
        for (number, sector) in std::fs::read(&file)?.chunks_exact(SECTOR_BYTES).enumerate() {
            let place = crate::disk::Place { file: file.clone(), offset: (number * SECTOR_BYTES) as u64 };
            match of_values.contains(&(&file, place.offset)) {
                true => values.push(place),
                // Sectors of zeros are space that nobody uses.
                false if sector.iter().any(|byte| *byte != 0) => others.push(place),
                false => {}
            }
        }
    }
    for places in [values, others].iter().filter(|places| !places.is_empty()) {
        for _ in 0..FLIPS / 2 {
            let place = &places[rig.random.below(places.len() as u64) as usize];
            disk.flip_bit(place, &mut rig.random)?;
        }
    }
    Ok(())
}

/// A write that stopped midway leaves zeros, or what another value had left there.
fn tear(rig: &mut Rig, disk: &Disk, copies: &[Copy], unit: usize) -> io::Result<()> {
    for (number, copy) in copies.iter().enumerate() {
        let units = (copy.sectors.len() / unit) as u64;
        let first = rig.random.below(units) as usize;
        let last = first + rig.random.below(units - first as u64) as usize;
        let other = &copies[(number + 1) % copies.len()];
        for at in first * unit..(last + 1) * unit {
            let left_there = match number % 2 {
                0 => vec![0; SECTOR_BYTES],
                _ => disk.read(&other.sectors[at], SECTOR_BYTES)?,
            };
            disk.write(&copy.sectors[at], &left_there)?;
        }
    }
    Ok(())
}

fn zero_a_page(rig: &mut Rig, disk: &Disk, copies: &[Copy]) -> io::Result<()> {
    for copy in copies {
        let page = rig.random.below((copy.sectors.len() / PAGE_SECTORS) as u64) as usize;
        for place in &copy.sectors[page * PAGE_SECTORS..(page + 1) * PAGE_SECTORS] {
            disk.write(place, &[0; SECTOR_BYTES])?;
        }
    }
    Ok(())
}

/// A file with many values is cut in the midst of the last of them.
fn truncate(_: &mut Rig, _: &Disk, copies: &[Copy]) -> io::Result<()> {
    for copy in copies {
        let middle = &copy.sectors[copy.sectors.len() / 2];
        let is_last = |other: &Copy| {
            let other = &other.sectors[0];
            other.file != middle.file || other.offset <= middle.offset
        };
        if copies.iter().all(is_last) {
            File::options().write(true).open(&middle.file)?.set_len(middle.offset)?;
        }
    }
    Ok(())
}

fn delete(_: &mut Rig, _: &Disk, copies: &[Copy]) -> io::Result<()> {
    let files: BTreeSet<_> = copies.iter().map(|copy| &copy.sectors[0].file).collect();
    files.into_iter().try_for_each(std::fs::remove_file)
}
