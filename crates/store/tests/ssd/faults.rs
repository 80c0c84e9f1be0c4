//! What holds when the disk lies, fails or is full: a miss, counted, and never a wrong byte.

use crate::faulty::Faults;
use crate::log_lines;
use crate::rig::*;
use forebay_store::disk::DiskOptions;
use forebay_store::log::read_superblock;
use forebay_store::ssd::{FileMedium, NotRead, NotWritten, SsdWriteEnd, Volume};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::Instant;

const PAGE: u64 = 4096;
const EIO: i32 = 5;
const ENOSPC: i32 = 28;

/// Where the first bytes of a layer lie in the file. Other copies of them are of earlier lives.
fn find(path: &Path, bytes: &[u8]) -> u64 {
    let file = std::fs::read(path).unwrap();
    let pages = (0..file.len()).step_by(PAGE as usize);
    pages.rev().find(|at| file[*at..].starts_with(&bytes[..64])).unwrap() as u64
}

/// Exclusive or with one byte of the file, past any cache.
fn flip(path: &Path, at: u64, mask: u8) {
    let file = File::options().read(true).write(true).open(path).unwrap();
    let mut byte = [0];
    file.read_exact_at(&mut byte, at).unwrap();
    file.write_all_at(&[byte[0] ^ mask], at).unwrap();
    file.sync_all().unwrap();
}

#[test]
fn a_flipped_bit_anywhere_in_a_chunk_is_a_miss_and_counted() {
    let Some(rig) = Rig::new(1, 32 * MIB, 2 * MIB) else { return };
    let shape = Shape::new(&[2 * PAGE, PAGE]);
    let opened = rig.open(config());
    opened.write_chain(0..8, &shape);
    let start = |number: u64| find(&rig.paths[0], &truth(number, 0, 2 * PAGE));
    // Layer 0, layer 1, and the footer's head, identity and checksums.
    let places = [0, 2 * PAGE - 1, 2 * PAGE, 3 * PAGE - 1, 3 * PAGE, 3 * PAGE + 64, 3 * PAGE + 128];
    for (number, place) in (1..).zip(places) {
        flip(&rig.paths[0], start(number) + place, 0x10);
        let lease = opened.lease(0..number + 1);
        assert_eq!(lease.len() as u64, number + 1);
        let refused = opened.read(&lease, &[want(0, 0..2), want(number as usize, 0..2)]).unwrap_err();
        assert!(matches!(refused, NotRead::Corrupt { want: 1, .. }), "byte {place}: {refused}");
        assert!(!opened.ssd.contains(&id(number)));
        // Stored again, it is another copy, and those behind it are found again.
        assert_eq!(opened.write(number, Some(number - 1), &shape), SsdWriteEnd::Stored { bytes: 3 * PAGE });
    }
    opened.expect_chain(0..8, &shape);
    let stat = opened.ssd.stat();
    assert_eq!((stat.corrupt, stat.tier.faults.corrupt, stat.io_faults), (7, 7, 0));
    assert_eq!(stat.staging.used_bytes, 0);
}

#[test]
fn a_flipped_bit_in_a_layer_that_nobody_reads_hurts_nobody() {
    let Some(rig) = Rig::new(1, 32 * MIB, 2 * MIB) else { return };
    let shape = Shape::new(&[PAGE, PAGE]);
    let opened = rig.open(config());
    opened.write_chain(0..1, &shape);
    flip(&rig.paths[0], find(&rig.paths[0], &truth(0, 1, PAGE)), 1);
    let lease = opened.lease(0..1);
    expect_truth(&opened.read(&lease, &[want(0, 0..1)]).unwrap()[0], 0, &shape);
    assert!(opened.read(&lease, &[want(0, 0..2)]).is_err());
}

#[test]
fn bytes_of_another_chunk_are_a_miss() {
    let Some(rig) = Rig::new(1, 32 * MIB, 2 * MIB) else { return };
    let shape = Shape::new(&[4 * PAGE]);
    let opened = rig.open(config());
    opened.write_chain(0..2, &shape);
    let [first, second] = [0, 1].map(|number| find(&rig.paths[0], &truth(number, 0, 4 * PAGE)));
    let file = File::options().read(true).write(true).open(&rig.paths[0]).unwrap();
    let mut slots = [vec![0; 5 * PAGE as usize], vec![0; 5 * PAGE as usize]];
    file.read_exact_at(&mut slots[0], first).unwrap();
    file.read_exact_at(&mut slots[1], second).unwrap();
    file.write_all_at(&slots[1], first).unwrap();
    file.write_all_at(&slots[0], second).unwrap();
    file.sync_all().unwrap();
    for chunk in [1, 0] {
        let lease = opened.lease(0..chunk + 1);
        assert!(matches!(opened.read(&lease, &[want(chunk as usize, 0..1)]), Err(NotRead::Corrupt { .. })));
    }
    assert_eq!(opened.ssd.stat().corrupt, 2);
}

/// A rig whose one volume fails as it is told to.
fn faulty() -> Option<(Rig, Faults, Opened)> {
    let rig = Rig::new(1, 32 * MIB, 2 * MIB)?;
    let faults = Faults::default();
    let mut volume = rig.volume_over(0, |kernel| faults.kernel(kernel));
    volume.medium = faults.medium(volume.medium);
    let opened = rig.try_open(vec![volume], config()).unwrap();
    Some((rig, faults, opened))
}

#[test]
fn a_disk_that_fails_to_read_gives_nothing_and_loses_nothing() {
    let Some((_rig, faults, opened)) = faulty() else { return };
    let shape = Shape::new(&[4 * PAGE, 100]);
    opened.write_chain(0..4, &shape);
    faults.fail_reads(EIO);
    let lease = opened.lease(0..4);
    let refused = opened.read(&lease, &[want(0, 0..2), want(1, 0..1)]).unwrap_err();
    assert!(
        matches!(&refused, NotRead::Failed { reason, .. } if reason.contains("the device failed")),
        "{refused}"
    );
    faults.fail_reads(0);
    opened.expect_chain(0..4, &shape);
    let stat = opened.ssd.stat();
    assert_eq!((stat.io_faults, stat.corrupt, stat.staging.used_bytes), (2, 0, 0));
}

#[test]
fn a_chunk_that_cannot_be_read_costs_no_other_chunk_of_its_request() {
    let Some((rig, faults, opened)) = faulty() else { return };
    let shape = Shape::new(&[4 * PAGE]);
    opened.write_chain(0..4, &shape);
    faults.fail_reads_at(find(&rig.paths[0], &truth(2, 0, 4 * PAGE)));
    let lease = opened.lease(0..4);
    let (sender, receiver) = std::sync::mpsc::channel();
    let wants: Vec<_> = (0..4).map(|chunk| want(chunk, 0..1)).collect();
    let on_end = move |ends| drop(sender.send(ends));
    opened.ssd.read(&lease, &wants, forebay_transfer::Class::Demand, None, on_end).unwrap();
    for (number, end) in receiver.recv_timeout(PATIENCE).unwrap().iter().enumerate() {
        match end {
            Ok(staged) => expect_truth(staged, number as u64, &shape),
            Err(error) => {
                assert!(number == 2 && matches!(error, NotRead::Failed { .. }), "{number}: {error}")
            }
        }
    }
    assert_eq!(opened.ssd.stat().io_faults, 1);
}

#[test]
fn a_disk_that_fails_to_write_or_is_full_never_wedges_the_store() {
    let Some((_rig, faults, opened)) = faulty() else { return };
    for shape in [Shape::new(&[4 * PAGE]), Shape::new(&[4 * PAGE, 100])] {
        for errno in [EIO, ENOSPC] {
            faults.fail_writes(errno);
            // Few, because the mover rests a link that fails again and again.
            for number in 0..5 {
                let end = opened.write(number, None, &shape);
                assert!(matches!(end, SsdWriteEnd::Failed(NotWritten::Failed(_))), "{end:?}");
            }
            faults.fail_writes(0);
            opened.write_chain(0..40, &shape);
            opened.expect_chain(0..40, &shape);
            assert_eq!(opened.ssd.delete(TENANT, &ids(0..40)), 40);
        }
    }
    assert_eq!(opened.ssd.stat().staging.used_bytes, 0);
}

#[test]
fn commits_that_fail_are_told_and_tried_again_until_they_succeed() {
    let Some((rig, faults, opened)) = faulty() else { return };
    let shape = Shape::new(&[PAGE]);
    opened.write_chain(0..2, &shape);
    opened.ssd.flush().unwrap();
    faults.fail_syncs(EIO);
    opened.write_chain(10..12, &shape);
    assert!(opened.ssd.flush().is_err());
    let patience = Instant::now() + PATIENCE;
    while !opened.ssd.stat().volumes[0].read_only {
        assert!(Instant::now() < patience, "{:?}", opened.ssd.stat().volumes);
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    assert!(matches!(opened.begin_write(20, None, &shape), Err(NotWritten::ReadOnly { volume: 0 })));
    opened.expect_chain(0..2, &shape);
    opened.expect_chain(10..12, &shape);
    faults.fail_syncs(0);
    opened.ssd.flush().unwrap();
    opened.write_chain(20..22, &shape);
    let stat = opened.ssd.stat().volumes[0];
    assert!(!stat.read_only && stat.failed_commits >= 5, "{stat:?}");
    opened.ssd.flush().unwrap();
    drop(opened);
    let opened = rig.open(config());
    for chunks in [0..2, 10..12, 20..22] {
        opened.expect_chain(chunks, &shape);
    }
}

#[test]
fn a_store_dropped_with_writes_under_way_comes_back_with_whole_chunks_only() {
    let Some(rig) = Rig::new(1, 32 * MIB, 2 * MIB) else { return };
    let shape = Shape::new(&[16 * PAGE, 70_001]);
    for round in 0..5u64 {
        let first = round * 100;
        let opened = rig.open(config());
        let ends: Vec<_> = (first..first + 30)
            .map(|number| {
                opened
                    .begin_write(
                        number,
                        None,
                        &Shape { memory_at: (number - first) * 40 * PAGE, ..shape.clone() },
                    )
                    .unwrap()
            })
            .collect();
        ends.iter().take(round as usize * 6).for_each(|end| drop(end.recv_timeout(PATIENCE).unwrap()));
        if round % 2 == 0 {
            opened.ssd.flush().unwrap();
        }
        drop(opened);
        // Every write ends, though nobody is left to hear it.
        ends.iter().for_each(|end| drop(end.recv_timeout(PATIENCE)));
        let opened = rig.open(config());
        let here = (first..first + 30).filter(|number| opened.ssd.contains(&id(*number)));
        let here: Vec<u64> = here.collect();
        here.iter().for_each(|number| opened.expect_chain(*number..number + 1, &shape));
        assert!(round % 2 == 1 || here.len() as u64 >= round * 6, "round {round}: {here:?}");
        assert_eq!(opened.ssd.stat().corrupt, 0);
    }
}

#[test]
fn each_fault_of_a_disk_is_one_line_of_the_log_that_names_its_volume() {
    log_lines::keep();
    let Some((rig, faults, opened)) = faulty() else { return };
    let (path, shape) = (rig.paths[0].clone(), Shape::new(&[4 * PAGE]));
    let expect = |message, lines| assert_eq!(log_lines::count(&path, message), lines, "{message}");
    let patience = Instant::now() + PATIENCE;
    let until = |read_only: bool| {
        while opened.ssd.stat().volumes[0].read_only != read_only {
            assert!(Instant::now() < patience, "{:?}", opened.ssd.stat().volumes);
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
    };
    expect("SSD log opened", 1);
    opened.write_chain(0..4, &shape);
    faults.fail_reads(EIO);
    for _ in 0..3 {
        opened.read(&opened.lease(0..1), &[want(0, 0..1)]).unwrap_err();
    }
    faults.fail_reads(0);
    expect("SSD read failed", 1);
    faults.fail_writes(EIO);
    opened.write(100, None, &shape);
    faults.fail_writes(0);
    expect("SSD write failed", 1);
    flip(&path, find(&path, &truth(3, 0, 4 * PAGE)) + 700, 1);
    opened.read(&opened.lease(0..4), &[want(3, 0..1)]).unwrap_err();
    expect("chunk on SSD is corrupt", 1);
    faults.fail_syncs(EIO);
    opened.write_chain(200..201, &shape);
    until(true);
    expect("SSD commit failed", 1);
    expect("SSD volume is read only", 1);
    faults.fail_syncs(0);
    until(false);
    opened.ssd.flush().unwrap();
    expect("SSD volume can be written again", 1);
}

#[test]
fn the_end_of_a_tenant_overwrites_its_bytes() {
    let Some(rig) = Rig::new(1, 32 * MIB, 2 * MIB) else { return };
    let shape = Shape::new(&[4 * PAGE]);
    let opened = rig.open(config());
    opened.write_chain(0..100, &shape);
    opened.ssd.delete(TENANT, &ids(50..60));
    assert_eq!(opened.ssd.purge(TENANT), 90);
    let patience = Instant::now() + PATIENCE;
    let is_there = |number: u64| {
        let (file, bytes) = (std::fs::read(&rig.paths[0]).unwrap(), truth(number, 0, 4 * PAGE));
        file.chunks(PAGE as usize).any(|page| page[..64] == bytes[..64])
    };
    while (0..100).step_by(7).any(is_there) {
        assert!(Instant::now() < patience, "{:?}", opened.ssd.stat());
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    opened.write_chain(200..210, &shape);
    opened.expect_chain(200..210, &shape);
}

/// Opens two logs with this fault in one of them, and sees that the error names that one and not
/// the other.
fn expect_named(rig: &Rig, faulty: usize, faults: &Faults) -> String {
    let open = |number: usize| {
        let volume = rig.volume_over(number, |inner| inner);
        let medium = if number == faulty { faults.medium(volume.medium) } else { volume.medium };
        Volume { medium, ..volume }
    };
    let refused = rig.try_open(vec![open(0), open(1)], config()).err().unwrap().to_string();
    let path = |number: usize| rig.paths[number].display().to_string();
    assert!(refused.starts_with(&format!("{}: ", path(faulty))), "{refused}");
    assert!(!refused.contains(&path(1 - faulty)), "{refused}");
    refused
}

#[test]
fn of_several_logs_the_error_names_the_one_that_cannot_be_opened() {
    for faulty in [0, 1] {
        let Some(rig) = Rig::new(2, 32 * MIB, 2 * MIB) else { return };
        let opened = rig.open(config());
        opened.write_chain(0..32, &Shape::new(&[64 * PAGE]));
        opened.ssd.close().unwrap();
        let superblock = read_superblock(&FileMedium::open(&rig.paths[faulty]).unwrap()).unwrap().superblock;
        // Of the metadata only a superblock can be read; or no segment.
        for from in [1, superblock.layout.segments_at] {
            let faults = Faults::default();
            faults.fail_pages_from(from);
            let refused = expect_named(&rig, faulty, &faults);
            assert!(refused.contains("the disk failed at offset"), "{refused}");
        }
        let faults = Faults::default();
        faults.fail_syncs(EIO);
        assert!(expect_named(&rig, faulty, &faults).contains("the disk failed at offset"));
        std::fs::write(&rig.paths[faulty], vec![b'#'; 32 << 20]).unwrap();
        assert!(expect_named(&rig, faulty, &Faults::default()).contains("not a Forebay log"));
        let volume = Volume::open(&rig.paths[faulty], DiskOptions::default()).unwrap();
        let refused = volume.segment_bytes().unwrap_err().to_string();
        assert!(refused.starts_with(&rig.paths[faulty].display().to_string()), "{refused}");
    }
}
