//! A store with an SSD below its memory: what was written outlives memory and the process, and
//! whatever happens to it on the way, nobody gets a wrong byte.
#![allow(clippy::unwrap_used)]

mod model;
mod rig;

use forebay_store::admission::Policy;
use forebay_store::{StoreEnd, TenantId, Timing, Unchanged, WriteBackConfig};
use forebay_transfer::{Backing, End, Reason};
use rig::{CHUNK_BYTES, Disk, MINUTE_US, Rig, TENANT, id, ids, truth};
use std::time::Duration;
use testkit::{ended, eventually};

const CHAIN: [usize; 4] = [0, 1, 2, 3];
const OTHER: [usize; 4] = [10, 11, 12, 13];

#[test]
fn what_was_flushed_is_found_by_the_next_store_whether_or_not_the_last_one_was_closed() {
    for close in [true, false] {
        let disk = Disk::new();
        let rig = Rig::new(&disk, 8);
        assert_eq!(rig.store_chain(&CHAIN), 4);
        rig.store.flush().unwrap();
        assert_eq!((rig.stat().write_back.written, rig.stat().write_back.waiting), (4, 0));
        if close {
            rig.store.close().unwrap();
        }
        drop(rig);
        let rig = Rig::new(&disk, 8);
        assert_eq!(rig.store.lookup(TENANT, &ids(&CHAIN)), 4, "closed: {close}");
        assert_eq!(rig.lease(&CHAIN).in_memory(), 0);
        assert_eq!(rig.load_all(&CHAIN), 4);
        assert_eq!(rig.stat().hits.disk, 8);
    }
}

#[test]
fn a_log_without_a_free_segment_for_the_moment_costs_no_chunk_and_none_behind_it() {
    // It holds a part of what is stored, and forgets the rest.
    let disk = Disk::with(6 << 20, Duration::from_millis(50));
    let rig = Rig::new(&disk, 250);
    for first in (0..250).step_by(5) {
        let chain: Vec<usize> = (first..first + 5).collect();
        assert_eq!(rig.store_chain(&chain), 5);
    }
    rig.store.flush().unwrap();
    let stat = rig.stat().write_back;
    assert_eq!((stat.refused, stat.written), (0, 250), "{:?}", rig.stat());
}

#[test]
fn what_memory_evicted_is_read_back_from_disk() {
    let disk = Disk::new();
    let rig = Rig::new(&disk, 4);
    for chain in [CHAIN, OTHER] {
        assert_eq!(rig.store_chain(&chain), 4);
        rig.store.flush().unwrap();
    }
    assert!(rig.store.stat().counters.evicted >= 4);
    assert_eq!((rig.store.lookup(TENANT, &ids(&CHAIN)), rig.lease(&CHAIN).in_memory()), (4, 0));
    assert_eq!((rig.load_all(&CHAIN), rig.load_all(&OTHER)), (4, 4));
}

#[test]
fn a_lease_covers_a_prefix_in_memory_and_what_follows_it_on_disk() {
    let disk = Disk::new();
    let rig = Rig::new(&disk, 4);
    rig.store_chain(&CHAIN[..3]);
    rig.store.flush().unwrap();
    // The coldest leaves go first: the end of the first chain.
    rig.store_chain(&OTHER[..2]);
    let lease = rig.lease(&CHAIN);
    assert_eq!((lease.in_memory(), lease.len()), (2, 3));
    assert_eq!(rig.load(&lease, 3), Ok(End::Done { bytes: 3 * CHUNK_BYTES }));
    assert_eq!(rig.verify(&lease, &CHAIN[..3]), Ok(()));
    assert!(lease.renew(1_000_000).is_ok());
    assert_eq!((rig.stat().hits.memory, rig.stat().hits.disk), (2, 1));
}

#[test]
fn chunks_read_whole_from_disk_are_in_memory_afterwards() {
    let disk = Disk::new();
    let rig = Rig::new(&disk, 8);
    rig.store_chain(&CHAIN);
    rig.store.close().unwrap();
    drop(rig);
    let rig = Rig::new(&disk, 8);
    assert_eq!(rig.load_all(&CHAIN), 4);
    eventually("all four are promoted", || rig.stat().promotions.promoted == 4);
    let lease = rig.lease(&CHAIN);
    assert_eq!((lease.in_memory(), rig.store.stat().counters.chunks), (4, 4));
    assert_eq!(rig.load(&lease, 4), Ok(End::Done { bytes: 4 * CHUNK_BYTES }));
    assert_eq!(rig.verify(&lease, &CHAIN), Ok(()));
    // What continues the chain is stored below a parent that came from the disk.
    assert_eq!(rig.store_chain(&[0, 1, 2, 3, 4]), 5);
    rig.store.flush().unwrap();
    assert_eq!((rig.stat().write_back.written, rig.stat().write_back.refused), (1, 0));
}

#[test]
fn what_continues_a_prefix_that_is_on_disk_only_is_stored_behind_it() {
    let disk = Disk::new();
    let rig = Rig::new(&disk, 4);
    for chain in [CHAIN, OTHER] {
        rig.store_chain(&chain);
        rig.store.flush().unwrap();
    }
    assert_eq!(rig.lease(&CHAIN).in_memory(), 0);
    assert!(rig.begin_store(4, Some(3)).is_some_and(|end| matches!(ended(&end), StoreEnd::Stored { .. })));
    rig.store.flush().unwrap();
    assert_eq!((rig.store.lookup(TENANT, &ids(&[0, 1, 2, 3, 4])), rig.load_all(&[0, 1, 2, 3, 4])), (5, 5));
    assert!(rig.begin_store(6, Some(5)).is_none(), "what continues nothing is refused");
}

#[test]
fn bytes_that_were_damaged_on_disk_are_a_miss_and_counted() {
    let disk = Disk::new();
    let rig = Rig::new(&disk, 8);
    rig.store_chain(&CHAIN);
    rig.store.close().unwrap();
    drop(rig);
    disk.damage(2);
    let rig = Rig::new(&disk, 8);
    let lease = rig.lease(&CHAIN);
    assert_eq!(lease.len(), 4);
    assert_eq!(rig.load(&lease, 2), Ok(End::Done { bytes: 2 * CHUNK_BYTES }), "those before it are whole");
    let Ok(End::Failed(failure)) = rig.load(&lease, 3) else { panic!("the third one is not") };
    assert!(matches!(failure.reason, Reason::Corrupt { .. }), "{failure:?}");
    assert_eq!((failure.moved_bytes, rig.stat().ssd.corrupt), (0, 1));
    drop(lease);
    assert_eq!(rig.store.lookup(TENANT, &ids(&CHAIN)), 2);
    eventually("the first two are promoted", || rig.stat().promotions.promoted == 2);
    assert_eq!(rig.store_chain(&CHAIN), 4, "it is stored again");
    assert_eq!(rig.load_all(&CHAIN), 4);
}

#[test]
fn what_was_deleted_is_in_neither_tier_also_after_a_restart() {
    let disk = Disk::new();
    let rig = Rig::new(&disk, 8);
    rig.store_chain(&CHAIN);
    // Some are written, some wait, some are being written.
    assert_eq!(rig.store.delete(TENANT, &ids(&CHAIN[2..])), 2);
    rig.store.flush().unwrap();
    assert_eq!(rig.store.lookup(TENANT, &ids(&CHAIN)), 2);
    rig.store.close().unwrap();
    drop(rig);
    let rig = Rig::new(&disk, 8);
    assert_eq!(
        (
            rig.store.lookup(TENANT, &ids(&CHAIN)),
            rig.store.lookup(TENANT, &[id(2)]),
            rig.store.lookup(TENANT, &[id(3)])
        ),
        (2, 0, 0)
    );
}

#[test]
fn with_second_hit_a_chunk_is_written_when_it_is_used_again() {
    let disk = Disk::new();
    let rig = Rig::with_policy(&disk, 8, Policy::SecondHit);
    rig.store.used(TENANT, &ids(&CHAIN), CHUNK_BYTES);
    rig.store_chain(&CHAIN);
    rig.store.flush().unwrap();
    assert_eq!(rig.stat().ssd.writes, 0);
    rig.store.used(TENANT, &ids(&CHAIN[..2]), CHUNK_BYTES);
    rig.store.flush().unwrap();
    assert_eq!(rig.stat().write_back.written, 2);
    assert_eq!(rig.stat().write_back.verdicts.used_once_bytes, 4 * CHUNK_BYTES);
}

/// Writes wait for windows, for an hour if need be.
fn in_windows(config: &mut WriteBackConfig) {
    config.timing = Timing::InWindows;
    config.due_bytes = u64::MAX;
    config.pacer.dirty_age_max_us = 2 * 60 * MINUTE_US;
}

#[test]
fn reads_that_failed_or_were_refused_hold_back_no_write() {
    let disk = Disk::new();
    let rig = Rig::with(&disk, 4, in_windows);
    for chain in [CHAIN, OTHER] {
        rig.store_chain(&chain);
        rig.store.flush().unwrap();
    }
    let lease = rig.lease(&CHAIN);
    assert_eq!((lease.in_memory(), lease.len()), (0, 4));
    rig.store.delete(TENANT, &ids(&CHAIN[3..]));
    assert!(rig.load(&lease, 4).is_err());
    disk.damage(0);
    assert!(matches!(rig.load(&lease, 3), Ok(End::Failed(_))));
    let before = rig.stat().write_back.written;
    rig.store_chain(&[20, 21]);
    eventually("both are written", || rig.stat().write_back.written == before + 2);
    assert_eq!(rig.stat().write_back.too_old, 0);
}

#[test]
fn in_windows_as_at_once_all_that_was_flushed_comes_back_right() {
    let disk = Disk::new();
    let rig = Rig::with(&disk, 4, in_windows);
    for chain in [CHAIN, OTHER, [20, 21, 22, 23]] {
        assert_eq!(rig.store_chain(&chain), 4);
        rig.store.flush().unwrap();
        assert!(rig.load_all(&CHAIN) == 4 && rig.stat().write_back.waiting == 0);
    }
    assert_eq!((rig.stat().write_back.written, rig.stat().write_back.gone), (12, 0));
    assert_eq!((rig.load_all(&OTHER), rig.load_all(&[20, 21, 22, 23])), (4, 4));
}

#[test]
fn pinned_chunks_stay_wherever_they_are() {
    let disk = Disk::new();
    let rig = Rig::new(&disk, 4);
    rig.store_chain(&CHAIN[..2]);
    rig.store.flush().unwrap();
    assert_eq!(rig.store.pin(TENANT, &id(20), 1), Err(Unchanged::NotHere));
    rig.store.pin(TENANT, &id(0), MINUTE_US).unwrap();
    let no_room = rig.store.pin(TENANT, &id(1), MINUTE_US);
    assert!(matches!(no_room, Err(Unchanged::NoRoom { .. })), "a quarter of memory may be pinned");
    assert_eq!(rig.store_chain(&OTHER[..3]), 3, "what is not pinned makes room");
    assert_eq!(rig.lease(&CHAIN).in_memory(), 1);
    let status = rig.store.status(TENANT, &id(1));
    assert!(!status.in_memory && status.on_disk, "{status:?}");
    rig.store.pin(TENANT, &id(1), MINUTE_US).unwrap();
    assert!(rig.store.status(TENANT, &id(1)).pinned_until_us.is_some(), "pinned on disk");
    assert_eq!(rig.store.unpin(TENANT, &id(1)), Ok(()));
    assert_eq!(rig.store.unpin(TENANT, &id(0)), Ok(()));
    assert_eq!(rig.store.unpin(TENANT, &id(0)), Err(Unchanged::NotPinned));
}

#[test]
fn a_chunk_that_is_sent_away_leaves_memory_once_it_is_on_disk_and_the_last_one_first() {
    let disk = Disk::new();
    let rig = Rig::with_policy(&disk, 8, Policy::SecondHit);
    rig.store_chain(&CHAIN[..2]);
    assert_eq!(rig.store.demote(TENANT, &id(1)), Err(Unchanged::NotOnDisk));
    assert_eq!(rig.store.demote(TENANT, &id(0)), Err(Unchanged::NotOnDisk));
    rig.store.flush().unwrap();
    eventually("the parent's turn made the chunk's", || rig.store.status(TENANT, &id(1)).on_disk);
    assert_eq!(rig.store.demote(TENANT, &id(0)), Err(Unchanged::Continued));
    let lease = rig.lease(&CHAIN);
    assert_eq!(rig.store.demote(TENANT, &id(1)), Err(Unchanged::InUse));
    drop(lease);
    assert_eq!(rig.store.demote(TENANT, &id(1)), Ok(()));
    assert_eq!(rig.store.demote(TENANT, &id(0)), Ok(()));
    assert_eq!(rig.store.locate(TENANT, &ids(&CHAIN)), (0, 2));
    assert_eq!(rig.store.demote(TENANT, &id(2)), Err(Unchanged::NotHere));
}

/// Whether the bytes of a chunk are anywhere on the disk.
fn is_on_disk(disk: &Disk, number: usize) -> bool {
    let bytes = std::fs::read(disk.path()).unwrap();
    let start = &truth(number)[..512];
    bytes.chunks(512).any(|sector| sector == start)
}

/// The same in memory.
fn is_in_memory(rig: &Rig, number: usize) -> bool {
    let arena = rig.store.arena_memory();
    // SAFETY: nobody writes the arena now; it lives as long as the store.
    let bytes = unsafe { std::slice::from_raw_parts(arena.as_ptr(), arena.len()) };
    bytes.chunks(512).any(|sector| sector == &truth(number)[..512])
}

#[test]
fn a_forgotten_chunk_is_in_no_byte_of_memory_and_disk_when_its_last_reader_has_gone() {
    let disk = Disk::new();
    let rig = Rig::new(&disk, 8);
    rig.store_chain(&CHAIN);
    rig.store.flush().unwrap();
    assert!(is_on_disk(&disk, 3) && is_in_memory(&rig, 3));
    let lease = rig.lease(&CHAIN);
    let guard = rig.store.read_guard(&lease, 3).unwrap();
    assert_eq!(rig.store.forget(TENANT, &ids(&[3, 20])), [true, false]);
    assert_eq!(rig.store.forget(TenantId(7), &ids(&[2])), [false], "another tenant's");
    assert_eq!(rig.lease(&CHAIN).len(), 3, "nobody finds it");
    assert!(guard.check() && is_in_memory(&rig, 3), "who reads it reads to the end");
    drop((guard, lease));
    eventually("memory is overwritten", || !is_in_memory(&rig, 3));
    rig.store.flush().unwrap();
    eventually("the disk is overwritten", || !is_on_disk(&disk, 3));
    assert_eq!((rig.store.to_overwrite(), rig.load_all(&CHAIN[..3])), (0, 3));
    drop(rig);
    let rig = Rig::new(&disk, 8);
    assert_eq!(rig.store.locate(TENANT, &ids(&CHAIN)), (0, 3), "a new process has not got it either");
}

#[test]
fn a_closed_store_serves_its_memory_and_nothing_from_disk() {
    let disk = Disk::new();
    let rig = Rig::new(&disk, 4);
    rig.store_chain(&CHAIN);
    rig.store.flush().unwrap();
    assert_eq!(rig.store_chain(&OTHER[..2]), 2, "the end of the first chain is on disk only");
    rig.store.close().unwrap();
    assert_eq!((rig.store.lookup(TENANT, &ids(&CHAIN)), rig.load_all(&CHAIN)), (2, 2));
    assert_eq!(rig.store_chain(&[10, 11, 12]), 3, "memory goes on");
    assert_eq!(rig.stat().write_back.waiting, 0);
}
