//! Entries that are seen half written: records beside the values at rest, and requests, completions
//! and results in memory that a store shares with its user. Each request ends once, and nothing
//! comes back that was not asked for.

use crate::case::{Case, Verdict, still_works, was_played};
use crate::disk::{Image, Place};
use crate::protocol::Fault;
use crate::rig::Rig;
use crate::value::SECTOR_BYTES;
use crate::worker::Broken;
use std::collections::BTreeSet;

pub const CASES: &[Case] = &[
    Case {
        name: "torn records",
        what: "records beside the values are half of one state and half of the next: values are complete, or misses",
        run: torn_records,
    },
    Case {
        name: "torn requests",
        what: "requests in shared memory have words of older ones: each ends once, nothing else comes back",
        run: |rig| torn_entries(rig, true),
    },
    Case {
        name: "torn answers",
        what: "completions and results in shared memory have words of older ones: as above",
        run: |rig| torn_entries(rig, false),
    },
];

/// Of all sectors that may be torn, how many are in each round.
const TORN_PERCENTS: [u8; 6] = [2, 5, 10, 25, 50, 100];
/// What memory and disks write whole.
const WORD_BYTES: usize = 8;

fn torn_records(rig: &mut Rig) -> Result<Verdict, Broken> {
    let disk = rig.disk();
    rig.open_and_fill()?;
    let older = disk.image()?;
    for key in rig.keys() {
        rig.delete(key)?;
    }
    // From the last to the first, so that places are not given out as before.
    for key in rig.keys().rev() {
        rig.put(key)?;
    }
    rig.flush()?;
    rig.kill()?;
    let newer = disk.image()?;
    let copies = disk.find(rig.scale.keys, 2, rig.scale.value_bytes)?;
    let of_values: BTreeSet<_> = copies.into_iter().flat_map(|copy| copy.sectors).collect();
    let records = changed_records(&older, &newer, &of_values);
    if records.is_empty() {
        return Ok(Verdict::NotApplicable("its files hold no records beside values".into()));
    }
    rig.note(format!("{} sectors of records", records.len()));
    rig.model().any_past();
    let mut verdict = Verdict::Passed;
    for percent in TORN_PERCENTS {
        disk.restore(&newer)?;
        for place in &records {
            if !rig.random.chance(percent) {
                continue;
            }
            if let Some(torn) = torn_sector(&older, &newer, place, rig.random.next()) {
                disk.write(place, &torn)?;
            }
        }
        if rig.open_damaged()? {
            let hits = rig.get_all(rig.keys())?;
            rig.note(format!("{hits} hits with {percent} % of them torn"));
            verdict = verdict.or(still_works(rig)?);
            rig.kill()?;
        }
    }
    Ok(verdict)
}

/// Sectors that changed and hold no value.
fn changed_records(older: &Image, newer: &Image, of_values: &BTreeSet<Place>) -> Vec<Place> {
    let is_record = |place: &Place| {
        let (old, new) = (older.read(place, SECTOR_BYTES), newer.read(place, SECTOR_BYTES));
        old.is_some() && old != new && !of_values.contains(place)
    };
    newer.sectors().filter(is_record).collect()
}

/// A sector whose words are old up to one of those that changed, and new from there on, or the
/// other way round.
fn torn_sector(older: &Image, newer: &Image, place: &Place, choice: u64) -> Option<Vec<u8>> {
    let (old, new) = (older.read(place, SECTOR_BYTES)?, newer.read(place, SECTOR_BYTES)?);
    let words = || old.chunks(WORD_BYTES).zip(new.chunks(WORD_BYTES)).enumerate();
    let changed: Vec<usize> = words().filter(|(_, (old, new))| old != new).map(|(word, _)| word).collect();
    // With one word there is nothing between old and new.
    let cut = *changed.get(1..)?.get(choice as usize / 2 % (changed.len() - 1).max(1))? * WORD_BYTES;
    let (first, rest) = if choice.is_multiple_of(2) { (old, new) } else { (new, old) };
    Some([&first[..cut], &rest[cut..]].concat())
}

fn torn_entries(rig: &mut Rig, requests: bool) -> Result<Verdict, Broken> {
    rig.open_and_fill()?;
    let mut verdict = Verdict::Passed;
    for percent in [5, 50, 100] {
        // What is asked for comes from the disk, by a new ring, whose slots have all been used.
        rig.close()?;
        rig.open()?;
        (0..ROUNDS).try_for_each(|_| rig.get_all(rig.keys()).map(drop))?;
        let fault = Fault::Torn { requests, answers: !requests, percent };
        if let Some(why) = rig.inject(fault)? {
            return Ok(Verdict::NotApplicable(why));
        }
        let keys: Vec<u64> = rig.keys().collect();
        let mut hits = 0;
        for _ in 0..ROUNDS {
            hits += rig.get_all(rig.keys())?;
            hits += keys.chunks(TOGETHER).map(|keys| rig.get_many(keys)).sum::<Result<u64, _>>()?;
        }
        rig.note(format!("{hits} of {} hits at {percent} %", 2 * ROUNDS * keys.len()));
        rig.inject(Fault::None)?;
        verdict = verdict.or(was_played(rig.note_faults()?));
        rig.get_all(rig.keys())?;
        verdict = verdict.or(still_works(rig)?);
    }
    Ok(verdict)
}

/// Times that all values are asked for before entries are torn, and meanwhile.
const ROUNDS: usize = 3;
/// Values that are asked for with one call.
const TOGETHER: usize = 8;

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::PathBuf;

    #[test]
    fn a_torn_sector_has_words_of_both_states_and_no_other() {
        let dir = tempfile::tempdir().unwrap();
        let disk = crate::disk::Disk::of(dir.path());
        let file: PathBuf = dir.path().join("log");
        let image = |byte: u8| {
            let mut bytes = [7; 2 * SECTOR_BYTES];
            bytes[64..96].fill(byte);
            std::fs::write(&file, bytes).unwrap();
            disk.image().unwrap()
        };
        let (older, newer) = (image(1), image(2));
        let records = changed_records(&older, &newer, &BTreeSet::new());
        assert_eq!(records, [Place { file: file.clone(), offset: 0 }]);
        assert!(changed_records(&older, &newer, &records.iter().cloned().collect()).is_empty());
        for choice in 0..64 {
            let torn = torn_sector(&older, &newer, &records[0], choice).unwrap();
            let entry: BTreeSet<u8> = torn[64..96].iter().copied().collect();
            assert_eq!(entry, BTreeSet::from([1, 2]), "{choice}");
            assert!(torn[64..96].chunks(WORD_BYTES).all(|word| word.iter().all(|byte| *byte == word[0])));
            assert!(torn[..64].iter().chain(&torn[96..]).all(|byte| *byte == 7));
        }
    }
}
