//! What holds when there is too little of something: staging, slots, disk.

use crate::faulty::Faults;
use crate::rig::*;
use forebay_store::disk::DiskOptions;
use forebay_store::ssd::{NotRead, NotStaged, NotWritten, SsdOptions, SsdWriteEnd, Volume};
use forebay_store::{Refused, Unreadable};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

const PAGE: u64 = 4096;

#[test]
fn staging_is_had_for_a_whole_request_or_not_at_all() {
    let Some(rig) = Rig::new(1, 32 * MIB, 4 * MIB) else { return };
    let opened = rig.open(SsdOptions { staging_bytes: MIB, ..config() });
    let shape = Shape::new(&[60 * PAGE]);
    opened.write_chain(0..5, &shape);
    let lease = opened.lease(0..5);
    let wants: Vec<_> = (0..5).map(|chunk| want(chunk, 0..1)).collect();
    let refused = opened.read(&lease, &wants).unwrap_err();
    assert!(matches!(refused, NotRead::Staging(NotStaged::TooLarge { .. })), "{refused}");

    let first = opened.read(&lease, &wants[..3]).unwrap();
    let used_bytes = opened.ssd.stat().staging.used_bytes;
    let deadline_us = opened.handle.now_us() + 50_000;
    let late = opened.begin_read(&lease, &wants[1..4], Some(deadline_us)).unwrap();
    let patient = opened.begin_read(&lease, &wants[2..4], None).unwrap();
    let refused = late.recv_timeout(PATIENCE).unwrap().unwrap_err();
    assert_eq!(refused, NotRead::Staging(NotStaged::Late));
    assert!(opened.handle.now_us() >= deadline_us);
    assert!(patient.try_recv().is_err());
    assert_eq!(opened.ssd.stat().staging.used_bytes, used_bytes, "those who wait hold nothing");
    drop(first);
    for (staged, number) in patient.recv_timeout(PATIENCE).unwrap().unwrap().iter().zip(2..) {
        expect_truth(staged, number, &shape);
    }
    // Leases and slots were let go of: everything can be deleted and its room used again.
    drop(lease);
    assert_eq!(opened.ssd.delete(TENANT, &ids(0..5)), 5);
}

#[test]
fn wants_that_cannot_be_are_refused_and_leave_nothing_behind() {
    let Some(rig) = Rig::new(1, 32 * MIB, 4 * MIB) else { return };
    let opened = rig.open(config());
    let shape = Shape::new(&[PAGE, PAGE]);
    opened.write_chain(0..2, &shape);
    let lease = opened.lease(0..3);
    assert_eq!(lease.len(), 2);
    let refusal = |wants: &[_]| opened.read(&lease, wants).unwrap_err();
    assert!(matches!(
        refusal(&[want(0, 0..1), want(2, 0..1)]),
        NotRead::Unreadable(Unreadable::Outside { .. })
    ));
    assert!(matches!(
        refusal(&[want(0, 0..2), want(1, 1..3)]),
        NotRead::Layers { chunk: 1, chunk_layers: 2, .. }
    ));
    assert!(matches!(refusal(&[want(0, 1..1)]), NotRead::Layers { .. }));
    assert_eq!(opened.read(&lease, &[]).unwrap().len(), 0);
    let nothing = opened.lease(50..51);
    assert!(nothing.is_empty());
    assert!(matches!(opened.read(&nothing, &[]), Err(NotRead::Unreadable(Unreadable::DeadLease))));
    drop(lease);
    let other = opened.ssd.clone();
    opened.ssd.clone().close().unwrap();
    assert!(matches!(opened.begin_write(9, None, &shape), Err(NotWritten::Closed)));
    assert!(other.flush().is_err());
}

#[test]
fn readers_see_whole_chunks_while_everything_is_evicted_around_them() {
    let Some(rig) = Rig::new(1, 24 * MIB, 2 * MIB) else { return };
    let opened = rig.open(config());
    let shape = Shape::new(&[16 * PAGE, 70_001]);
    opened.write_chain(0..4, &shape);
    // What the last one continues is pinned with it.
    opened.ssd.pin(TENANT, &ids(3..4)[0], u64::MAX).unwrap();
    let (written, done, read) = (AtomicU64::new(1000), AtomicBool::new(false), AtomicU64::new(0));
    std::thread::scope(|scope| {
        for seed in 0..3 {
            let (opened, shape, written, done, read) = (&opened, &shape, &written, &done, &read);
            scope.spawn(move || {
                let mut step = seed;
                while !done.load(Ordering::Relaxed) {
                    step += 1;
                    let newest = written.load(Ordering::Relaxed);
                    let number = newest.saturating_sub(1 + step * 7 % 150).max(1000);
                    let lease = opened.lease(number..number + 1);
                    if lease.is_empty() {
                        continue;
                    }
                    let staged = opened.read(&lease, &[want(0, 0..2), want(0, 1..2)]).unwrap();
                    staged.iter().for_each(|staged| expect_truth(staged, number, shape));
                    read.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
        // Five times what the disk holds.
        let mut refused = 0;
        for number in 1000..1900 {
            let patience = Instant::now() + PATIENCE;
            loop {
                match opened.begin_write(number, None, &shape) {
                    Ok(end) => {
                        let end = end.recv_timeout(PATIENCE).unwrap();
                        assert_eq!(end, SsdWriteEnd::Stored { bytes: shape.bytes() });
                        break;
                    }
                    Err(NotWritten::Refused(Refused::Full { .. })) => {
                        refused += 1;
                        assert!(Instant::now() < patience, "{:?}", opened.ssd.stat());
                        std::thread::sleep(Duration::from_millis(1));
                    }
                    Err(error) => panic!("{error}"),
                }
            }
            written.store(number + 1, Ordering::Relaxed);
        }
        done.store(true, Ordering::Relaxed);
        eprintln!("{refused} times no segment was free");
    });
    let stat = opened.ssd.stat();
    assert!(read.load(Ordering::Relaxed) > 100, "{} reads", read.load(Ordering::Relaxed));
    assert_eq!((stat.corrupt, stat.io_faults), (0, 0), "{stat:?}");
    assert!(stat.physical_bytes() <= 24 * MIB + 24 * MIB / 100, "{} bytes", stat.physical_bytes());
    assert!(stat.tier.evicted > 0);
    opened.expect_chain(0..4, &shape);
    opened.ssd.close().unwrap();
    let opened = rig.open(config());
    opened.expect_chain(0..4, &shape);
    let last = (1000..1900).filter(|number| opened.ssd.contains(&id(*number)));
    last.for_each(|number| opened.expect_chain(number..number + 1, &shape));
}

#[test]
fn chunks_of_many_lengths_take_no_segment_each_for_ever() {
    // Twelve segments at most, and each holds chunks of one length.
    let Some(rig) = Rig::new(1, 24 * MIB, 2 * MIB) else { return };
    let opened = rig.open(config());
    let patience = Instant::now() + Duration::from_secs(20);
    let write = |number: u64, parent: Option<u64>, shape: &Shape| loop {
        match opened.begin_write(number, parent, shape) {
            Ok(end) => break assert!(matches!(end.recv_timeout(PATIENCE), Ok(SsdWriteEnd::Stored { .. }))),
            Err(NotWritten::Refused(Refused::Full { .. })) => {
                assert!(Instant::now() < patience, "chunk {number}: {:?}", opened.ssd.stat().tier.space);
                std::thread::sleep(Duration::from_millis(1));
            }
            Err(error) => panic!("{error}"),
        }
    };
    // As the tails of prompts are.
    (0..60).for_each(|number| write(number, None, &Shape::new(&[(number + 1) * PAGE])));
    let usual = Shape::new(&[16 * PAGE]);
    (1000..1150).for_each(|number| write(number, (number > 1000).then(|| number - 1), &usual));
    // Ten MiB: more than what a few segments hold.
    opened.expect_chain(1000..1150, &usual);
    opened.ssd.close().unwrap();
    rig.open(config()).expect_chain(1000..1150, &usual);
}

#[test]
fn a_disk_that_runs_short_gets_space_back_and_gives_it_again() {
    let Some(rig) = Rig::new(1, 32 * MIB, 2 * MIB) else { return };
    let faults = Faults::default();
    let volume_on = |faults: &Faults| {
        let mut volume = rig.volume_over(0, |kernel| faults.kernel(kernel));
        volume.medium = faults.medium(volume.medium);
        volume
    };
    let reserved = || SsdOptions { reserve_bytes: 8 * MIB, ..config() };
    let wait = |opened: &Opened, what: &dyn Fn() -> bool| {
        let patience = Instant::now() + PATIENCE;
        while !what() {
            assert!(Instant::now() < patience, "{:?}", opened.ssd.stat());
            std::thread::sleep(Duration::from_millis(20));
        }
    };
    let opened = rig.try_open(vec![volume_on(&faults)], reserved()).unwrap();
    let shape = Shape::new(&[16 * PAGE]);
    opened.write_chain(0..100, &shape);
    let before = opened.ssd.stat().physical_bytes();
    faults.say_free(2 * MIB);
    wait(&opened, &|| opened.ssd.stat().physical_bytes() <= before - 6 * MIB);
    drop(opened);
    // A log that is opened again takes nothing back by itself.
    let held_bytes =
        || std::os::unix::fs::MetadataExt::blocks(&std::fs::metadata(&rig.paths[0]).unwrap()) * 512;
    let given_back = held_bytes();
    drop(Volume::open(&rig.paths[0], DiskOptions::default()).unwrap());
    assert_eq!(held_bytes(), given_back);
    let opened = rig.try_open(vec![volume_on(&faults)], reserved()).unwrap();
    let held = || opened.ssd.stat().physical_bytes();
    let wait = |what: &dyn Fn() -> bool| wait(&opened, what);
    faults.say_free(100 * MIB);
    wait(&|| opened.ssd.stat().tier.space.withdrawn_segments == 0 && held() == before);
    opened.write_chain(1000..1100, &shape);
    opened.expect_chain(1000..1100, &shape);
}
