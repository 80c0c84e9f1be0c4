//! What a log must survive: the end of its process or of its power after any write, damage to any
//! bit, an older image.
#![allow(clippy::unwrap_used)]

#[allow(dead_code, reason = "each test file uses a part of the simulation")]
mod sim;

use forebay_kv::ChunkId;
use forebay_store::log::*;
use forebay_store::{ChunkShape, TenantId};
use forebay_transfer::SplitMix;
use sim::{Got, Host, SimDisk, config, disks, id, layers_of, shape};
use std::collections::BTreeSet;

const TENANT: TenantId = TenantId(3);

/// A load that touches everything: sequences of chunks, of several shapes, deleted, reclaimed and
/// committed now and then.
struct Load {
    random: SplitMix,
    /// Chunks that were in the tier at the last commit that is known to be durable.
    committed: BTreeSet<u64>,
    /// Chunks that were deleted, durably so, and not stored again.
    deleted: BTreeSet<u64>,
    stored: u64,
}

impl Load {
    fn new(seed: u64) -> Load {
        Load { random: SplitMix(seed), committed: BTreeSet::new(), deleted: BTreeSet::new(), stored: 0 }
    }

    fn below(&mut self, limit: u64) -> u64 {
        self.random.draw() % limit
    }

    /// Runs until the disk fails or the load is over.
    fn run(&mut self, host: &mut Host, operations: u32) -> std::io::Result<()> {
        let mut deleted = self.deleted.clone();
        for _ in 0..operations {
            match self.below(20) {
                0..12 => {
                    let number = self.stored;
                    // Sequences of four chunks.
                    let parent = (!number.is_multiple_of(4)).then(|| id(number - 1));
                    self.stored += 1;
                    deleted.remove(&number);
                    host.store(TENANT, &id(number), parent.as_ref(), &shape(number / 40))?;
                }
                12..15 => {
                    let number = self.below(self.stored.max(1));
                    check(host, number);
                }
                15 => {
                    let number = self.below(self.stored.max(1));
                    if host.tier.delete(TENANT, &[id(number)]) > 0 {
                        deleted.insert(number);
                    }
                }
                16 => {
                    let number = self.below(self.stored.max(1));
                    if host.tier.delete_and_scrub(TENANT, &[id(number)]) > 0 {
                        deleted.insert(number);
                    }
                    host.scrub()?;
                }
                17 => host.reclaim()?,
                _ => {
                    let resident: BTreeSet<u64> =
                        (0..self.stored).filter(|number| host.tier.contains(&id(*number))).collect();
                    host.commit()?;
                    self.committed = resident;
                    self.deleted = deleted.clone();
                }
            }
            if (0..host.tier.volumes()).any(|volume| host.tier.commit_is_urgent(volume)) {
                host.commit()?;
            }
        }
        Ok(())
    }

    /// What was durable and not dropped since can be read; what was deleted cannot; nothing is ever
    /// wrong.
    fn verify(&self, before: &Host, after: &mut Host) {
        for number in 0..self.stored {
            let got = check(after, number);
            if self.committed.contains(&number) && before.tier.contains(&id(number)) {
                assert!(got != Got::Miss, "chunk {number} was durable and is gone");
            }
            if self.deleted.contains(&number) {
                assert_eq!(got, Got::Miss, "chunk {number} was deleted and is back");
            }
        }
    }
}

/// Reads a chunk and compares it with the only bytes that it may have.
fn check(host: &mut Host, number: u64) -> Got {
    let got = host.get(TENANT, &id(number));
    if let Got::Bytes(layers) = &got {
        assert!(*layers == layers_of(&id(number), &shape(number / 40)), "wrong bytes of chunk {number}");
    }
    got
}

fn steps(disks: &[SimDisk]) -> u64 {
    disks.iter().map(SimDisk::steps).sum()
}

/// Runs the load up to a crash after so many writes of the first disk, and what comes after.
fn crash_at(seed: u64, point: u64, power: bool) -> bool {
    let disks = disks(1 + seed % 2);
    let mut host = Host::open(&config(), &disks).unwrap();
    let mut load = Load::new(seed);
    disks[0].fail_after(point);
    let crashed = load.run(&mut host, 150).is_err();
    let mut random = SplitMix(point);
    for disk in &disks {
        disk.revive();
        if power {
            disk.cut_power(&mut || random.draw());
        }
    }
    let mut again = Host::open(&config(), &disks).unwrap();
    load.verify(&host, &mut again);
    // Life goes on, and another restart finds what came after the crash.
    load.committed.clear();
    load.run(&mut again, 40).unwrap();
    again.commit().unwrap();
    let mut last = Host::open(&config(), &disks).unwrap();
    load.verify(&again, &mut last);
    crashed
}

/// The number of crash points that a seed has.
fn points(seed: u64) -> u64 {
    let disks = disks(1 + seed % 2);
    let mut host = Host::open(&config(), &disks).unwrap();
    let before = disks[0].steps();
    Load::new(seed).run(&mut host, 150).unwrap();
    assert!(steps(&disks) > 0);
    disks[0].steps() - before
}

#[test]
fn a_kill_after_any_write_loses_nothing_durable_and_yields_nothing_wrong() {
    let mut crashes = 0;
    for seed in 0..6 {
        crashes += (0..points(seed)).filter(|point| crash_at(seed, *point, false)).count();
    }
    assert!(crashes >= 500, "only {crashes} crash points");
}

#[test]
fn a_power_cut_after_any_write_loses_nothing_durable_and_yields_nothing_wrong() {
    let mut crashes = 0;
    for seed in 10..16 {
        crashes += (0..points(seed)).filter(|point| crash_at(seed, *point, true)).count();
    }
    assert!(crashes >= 500, "only {crashes} crash points");
}

/// Carries out a commit, or all of it that comes before the checkpoint.
fn write_commit(disk: &SimDisk, commit: &Commit, with_tail: bool) {
    let write = |pages: &Pages| pages.iter().try_for_each(|(offset, page)| disk.write_at(*offset, page));
    disk.sync().unwrap();
    write(&commit.head).and_then(|()| write(&commit.journal)).and_then(|()| disk.sync()).unwrap();
    if with_tail {
        write(&commit.tail).and_then(|()| disk.sync()).unwrap();
    }
}

#[test]
fn a_checkpoint_whose_commit_failed_costs_nothing_that_was_durable_before() {
    // What is relocated, and where from, is told in front of the end of a journal block, across it,
    // and behind.
    for changes in 0..24 {
        let disk = SimDisk::with_log(4 << 20, 64 << 10, 16 << 10);
        let mut host = Host::open(&config(), std::slice::from_ref(&disk)).unwrap();
        let store = |host: &mut Host, number: u64| host.store(TENANT, &id(number), None, &shape(0)).unwrap();
        (0..200).for_each(|number| assert!(store(&mut host, number)));
        // Of the first segments few chunks are left: those are relocated when segments are needed.
        (0..50).filter(|number| number % 5 > 1).for_each(|number| {
            host.tier.delete(TENANT, &[id(number)]);
        });
        host.commit().unwrap();
        let durable: Vec<u64> = (0..50).filter(|number| host.tier.contains(&id(*number))).collect();
        // A commit writes its checkpoint, and the last sync fails.
        for number in 200.. {
            store(&mut host, number);
            let commit = host.tier.next_commit(0, 0).unwrap();
            write_commit(&disk, &commit, true);
            let failed = !commit.tail.is_empty();
            host.tier.end_commit(0, commit, !failed);
            if failed {
                break;
            }
        }
        // Its changes come again, with others, and the process ends before their checkpoint.
        (0..changes).for_each(|change| {
            host.tier.delete(TENANT, &[id(50 + change * 5)]);
        });
        for number in 300..500 {
            store(&mut host, number);
            host.reclaim().unwrap();
            if host.tier.stat().relocated > 0 {
                break;
            }
        }
        assert_eq!(host.tier.stat().relocated, 1, "after {changes} changes");
        let commit = host.tier.next_commit(0, 0).unwrap();
        write_commit(&disk, &commit, false);
        let mut again = Host::open(&config(), &[disk]).unwrap();
        for number in durable.into_iter().filter(|number| host.tier.contains(&id(*number))) {
            let got = again.get(TENANT, &id(number));
            assert_ne!(got, Got::Miss, "chunk {number} was durable and is gone, after {changes} changes");
        }
    }
}

#[test]
fn a_closed_log_opens_with_everything_and_without_search() {
    let disks = disks(2);
    let mut host = Host::open(&config(), &disks).unwrap();
    let mut load = Load::new(77);
    load.run(&mut host, 100).unwrap();
    let resident: Vec<ChunkId> = host.tier.resident().map(|(_, id)| id).collect();
    host.close().unwrap();
    let host = Host::open(&config(), &disks).unwrap();
    assert!(resident.iter().all(|id| host.tier.contains(id)));
    assert_eq!(host.tier.stat().chunks, resident.len());
    for recovered in &host.recovered {
        assert!(recovered.clean);
        assert_eq!((recovered.footers_read, recovered.salvaged, recovered.lost), (0, 0, 0));
    }
}

#[test]
fn a_flipped_bit_anywhere_is_a_miss_or_a_refusal_and_never_data() {
    let disks = disks(1);
    let mut host = Host::open(&config(), &disks).unwrap();
    let mut load = Load::new(5);
    load.run(&mut host, 120).unwrap();
    host.commit().unwrap();
    let image = disks[0].image();
    let mut random = SplitMix(1);
    let (mut faults, mut refusals) = (0, 0);
    for _ in 0..300 {
        disks[0].set_image(&image);
        for _ in 0..1 + random.draw() % 20 {
            disks[0].flip(random.draw() as usize);
        }
        match Host::open(&config(), &disks) {
            Ok(mut host) => {
                (0..load.stored).for_each(|number| drop(check(&mut host, number)));
                faults += host.tier.stat().faults.corrupt;
            }
            Err(_) => refusals += 1,
        }
    }
    assert!(faults > 100, "{faults} faults, {refusals} refusals: the damage was not found");
}

#[test]
fn an_older_image_of_any_stretch_never_yields_wrong_bytes() {
    let disks = disks(1);
    let mut host = Host::open(&config(), &disks).unwrap();
    let mut load = Load::new(6);
    let mut images = Vec::new();
    for _ in 0..6 {
        load.run(&mut host, 60).unwrap();
        images.push(disks[0].image());
    }
    let mut random = SplitMix(2);
    for _ in 0..200 {
        let mut image = images.last().unwrap().clone();
        for _ in 0..8 {
            let from = &images[random.draw() as usize % images.len()];
            let page = random.draw() as usize % (image.len() / 4096) * 4096;
            let len = (1 + random.draw() as usize % 16) * 4096;
            let end = (page + len).min(image.len());
            image[page..end].copy_from_slice(&from[page..end]);
        }
        disks[0].set_image(&image);
        if let Ok(mut host) = Host::open(&config(), &disks) {
            (0..load.stored).for_each(|number| drop(check(&mut host, number)));
        }
    }
}

#[test]
fn chunks_that_no_record_names_are_salvaged_after_a_kill() {
    let disks = disks(1);
    let mut host = Host::open(&config(), &disks).unwrap();
    host.store(TENANT, &id(0), None, &shape(0)).unwrap();
    host.commit().unwrap();
    host.store(TENANT, &id(1), Some(&id(0)), &shape(0)).unwrap();
    let mut again = Host::open(&config(), &disks).unwrap();
    assert_eq!(again.recovered[0].salvaged, 1);
    assert_ne!(check(&mut again, 1), Got::Miss);
}

#[test]
fn changes_are_pending_until_the_commit_that_has_them_has_ended() {
    let disks = disks(1);
    let mut host = Host::open(&config(), &disks).unwrap();
    let pending = |host: &Host| host.tier.stat().space.pending_records;
    host.commit().unwrap();
    assert_eq!(pending(&host), 0);
    host.store(TENANT, &id(0), None, &shape(0)).unwrap();
    let before = pending(&host);
    let commit = host.tier.next_commit(1, 0).unwrap();
    assert_eq!(pending(&host), before, "it is under way");
    host.tier.end_commit(1, commit, false);
    assert_eq!(pending(&host), before, "it failed");
    host.commit().unwrap();
    assert_eq!((before > 0, pending(&host)), (true, 0));
}

#[test]
fn a_log_of_many_times_its_size_never_wedges_and_keeps_what_was_used_last() {
    let disks = disks(2);
    let mut host = Host::open(&config(), &disks).unwrap();
    let mut refused = 0;
    for number in 0..2000 {
        refused += u32::from(!host.store(TENANT, &id(number), None, &shape(0)).unwrap());
        // Eight chunks far from each other are in use all the time.
        (0..8).for_each(|hot| drop(host.get(TENANT, &id(hot * 5))));
        host.reclaim().unwrap();
        if (0..2).any(|volume| host.tier.commit_is_urgent(volume)) {
            host.commit().unwrap();
        }
    }
    assert_eq!(refused, 0);
    for hot in 0..8 {
        assert_ne!(check(&mut host, hot * 5), Got::Miss, "a chunk in use all the time was evicted");
    }
    let stat = host.tier.stat();
    assert!(stat.relocated > 0);
    assert!(stat.space.live_bytes <= stat.space.live_limit_bytes + (64 << 10), "{stat:?}");
    assert!(stat.space.live_bytes * 2 > stat.space.live_limit_bytes, "{stat:?}");
}

#[test]
fn a_disk_that_runs_short_gets_space_back_and_the_tier_goes_on() {
    let disks = disks(1);
    let mut host = Host::open(&config(), &disks).unwrap();
    let fill = |host: &mut Host, numbers: std::ops::Range<u64>| {
        for number in numbers {
            assert!(host.store(TENANT, &id(number), None, &shape(0)).unwrap(), "chunk {number}");
            host.reclaim().unwrap();
            host.commit().unwrap();
        }
    };
    fill(&mut host, 0..200);
    let before = host.tier.stat().space;
    host.tier.shrink(0, 5 * (64 << 10));
    let mut given = 0;
    for _ in 0..20 {
        while let Some(withdrawal) = host.tier.next_withdrawal(0) {
            disks[0].withdraw(withdrawal.offset, withdrawal.bytes).unwrap();
            host.tier.end_withdrawal(withdrawal, true);
            given += 1;
        }
        host.reclaim().unwrap();
        host.commit().unwrap();
    }
    assert_eq!((given, host.tier.stat().space.withdrawn_segments), (5, 5));
    fill(&mut host, 200..400);
    let mut host = Host::open(&config(), &disks).unwrap();
    assert_eq!(host.tier.stat().space.withdrawn_segments, 5);
    host.tier.grow(0, u64::MAX);
    while let Some(withdrawal) = host.tier.next_withdrawal(0) {
        host.tier.end_withdrawal(withdrawal, true);
    }
    host.commit().unwrap();
    assert_eq!(host.tier.stat().space.withdrawn_segments, 0);
    assert_eq!(host.tier.stat().space.live_limit_bytes, before.live_limit_bytes);
    fill(&mut host, 400..600);
}

#[test]
fn segments_that_a_commit_under_way_frees_count_as_free() {
    let disks = disks(1);
    let config = DiskTierConfig { relocated_percent: 0, ..config() };
    let mut host = Host::open(&config, &disks).unwrap();
    for number in 0.. {
        host.store(TENANT, &id(number), None, &shape(0)).unwrap();
        assert!(host.tier.next_relocation(0).is_none());
        if host.tier.commit_is_urgent(0) {
            break;
        }
    }
    let resident = host.tier.resident().count();
    let commit = host.tier.next_commit(0, 0).unwrap();
    assert!(host.tier.next_relocation(0).is_none());
    assert_eq!(host.tier.resident().count(), resident, "dropped, although room is about to come");
    host.tier.end_commit(0, commit, true);
}

#[test]
fn a_chunk_that_is_longer_than_its_tenants_quota_evicts_nothing() {
    let disks = disks(1);
    let config = DiskTierConfig { quotas: vec![(TENANT, 32 << 10)], ..config() };
    let mut host = Host::open(&config, &disks).unwrap();
    let (short, long) = (ChunkShape::new([4096]).unwrap(), ChunkShape::new([32 << 10]).unwrap());
    for number in 0..4 {
        assert!(host.store(TENANT, &id(number), None, &short).unwrap());
    }
    assert!(!host.store(TENANT, &id(9), None, &long).unwrap());
    assert_eq!(host.tier.stat().refusals.quota, 1);
    assert_eq!(host.tier.resident().count(), 4);
}

#[test]
fn slots_that_one_lost_operation_touched_are_quiet_when_it_is() {
    let disks = disks(1);
    let mut host = Host::open(&config(), &disks).unwrap();
    let writes: Vec<DiskWrite> = (0..2)
        .map(|number| match host.tier.begin_write(0, TENANT, &id(number), None, &shape(0)) {
            Ok(DiskBegun::Write(write)) => write,
            other => panic!("{other:?}"),
        })
        .collect();
    let (begin, stride) = (writes[0].slot_at, writes[0].shape.stride_bytes());
    assert_eq!(writes[1].slot_at, begin + stride);
    for write in writes {
        host.tier.abort(0, write, stride);
    }
    // Slots that lie side by side become one I/O.
    host.tier.quiet(0, begin, 2 * stride);
    let free = host.tier.stat().space.free_segments;
    let commit = host.tier.close(0).unwrap();
    host.tier.end_commit(0, commit, true);
    assert_eq!(host.tier.stat().space.free_segments, free + 1, "nothing uses the segment any more");
}
