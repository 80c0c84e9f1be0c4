//! What was written is read, also by the next process.

use crate::rig::*;
use forebay_store::TenantId;
use forebay_store::disk::DiskOptions;
use forebay_store::ssd::{Existing, NotWritten, Source, SsdError, SsdWriteEnd, TenantKeys, Volume, init};

const PAGE: u64 = 4096;

/// Whole pages at a page; whole pages at an odd place; lengths that fit nothing; one layer; one
/// byte.
fn shapes() -> [Shape; 5] {
    let odd = Shape { memory_at: 512, ..Shape::new(&[2 * PAGE, 3 * PAGE]) };
    [
        Shape::new(&[16 * PAGE, 32 * PAGE, PAGE]),
        odd,
        Shape::new(&[70_001, 1, 4095, 600_000, 4097]),
        Shape::new(&[20 * PAGE]),
        Shape::new(&[1]),
    ]
}

#[test]
fn chunks_of_any_shape_come_back_whole_and_by_layers() {
    let Some(rig) = Rig::new(1, 64 * MIB, 4 * MIB) else { return };
    let opened = rig.open(config());
    for (shape, first) in shapes().iter().zip((0..).step_by(100)) {
        opened.write_chain(first..first + 5, shape);
        opened.expect_chain(first..first + 5, shape);
        let lease = opened.lease(first..first + 5);
        let count = shape.layers.len();
        let runs = (0..count).flat_map(|start| (start + 1..=count).map(move |end| start..end));
        let wants: Vec<_> = runs.map(|layers| want(3, layers)).chain([want(0, 0..1)]).collect();
        let staged = opened.read(&lease, &wants).unwrap();
        assert_eq!(staged.len(), wants.len());
        for (staged, want) in staged.iter().zip(&wants) {
            assert_eq!(staged.layers(), want.layers);
            expect_truth(staged, first + want.chunk as u64, shape);
        }
    }
    let stat = opened.ssd.stat();
    assert_eq!((stat.writes, stat.direct_writes), (25, 10), "aligned chunks go to disk without a copy");
    assert_eq!((stat.corrupt, stat.io_faults, stat.staging.used_bytes), (0, 0, 0));
}

#[test]
fn many_chunks_in_one_write_end_each_by_itself() {
    let Some(rig) = Rig::new(1, 64 * MIB, 4 * MIB) else { return };
    let opened = rig.open(config());
    let shape = Shape::new(&[20 * PAGE]);
    opened.write_chain(0..1, &shape);
    let source = |number: u64, parent: u64| Source {
        id: id(number),
        parent: Some(id(parent)),
        layers: opened.source(number, &Shape { memory_at: number * 32 * PAGE, ..Shape::new(&[20 * PAGE]) }),
        crcs: None,
    };
    // One is here, three follow it, one continues nothing, and one has too many checksums.
    let odd = Source { crcs: Some(vec![0; 2]), ..source(4, 3) };
    let sources = vec![
        Source { parent: None, ..source(0, 0) },
        source(1, 0),
        source(2, 1),
        source(3, 2),
        source(9, 8),
        odd,
    ];
    let (sender, receiver) = std::sync::mpsc::channel();
    let on_end = move |ends| drop(sender.send(ends));
    opened.ssd.write_many(TENANT, sources, forebay_transfer::Class::WriteBack, on_end).unwrap();
    let ends: Vec<SsdWriteEnd> = receiver.recv().unwrap();
    let stored = SsdWriteEnd::Stored { bytes: 20 * PAGE };
    assert_eq!(ends[..4], [SsdWriteEnd::AlreadyHere, stored.clone(), stored.clone(), stored]);
    assert!(matches!(ends[4], SsdWriteEnd::Failed(NotWritten::Refused(_))), "{:?}", ends[4]);
    assert!(
        matches!(ends[5], SsdWriteEnd::Failed(NotWritten::Checksums { given: 2, layers: 1 })),
        "{:?}",
        ends[5]
    );
    opened.expect_chain(0..4, &shape);
    assert_eq!(opened.ssd.stat().staging.used_bytes, 0);
}

#[test]
fn checksums_of_the_caller_are_taken_and_a_wrong_one_is_never_data() {
    let Some(rig) = Rig::new(1, 64 * MIB, 4 * MIB) else { return };
    let opened = rig.open(config());
    let shape = Shape::new(&[4 * PAGE, 1000]);
    let crcs: Vec<u32> = shape
        .layers
        .iter()
        .enumerate()
        .map(|(layer, bytes)| crc32c::crc32c(&truth(7, layer, *bytes)))
        .collect();
    let write = |number: u64, crcs: Vec<u32>| {
        let (sender, receiver) = std::sync::mpsc::channel();
        let (id, layers) = (id(number), opened.source(7, &shape));
        let on_end = move |end| drop(sender.send(end));
        let class = forebay_transfer::Class::WriteBack;
        let source = Source { id, parent: None, layers, crcs: Some(crcs) };
        opened.ssd.write(TENANT, source, class, on_end)?;
        Ok::<_, forebay_store::ssd::NotWritten>(receiver.recv_timeout(PATIENCE).unwrap())
    };
    assert_eq!(write(7, crcs.clone()), Ok(SsdWriteEnd::Stored { bytes: shape.bytes() }));
    opened.expect_chain(7..8, &shape);
    assert_eq!(write(7, crcs.clone()), Ok(SsdWriteEnd::AlreadyHere));
    assert!(write(8, crcs[..1].to_vec()).is_err());
    write(9, vec![crcs[0], crcs[1] ^ 1]).unwrap();
    let lease = opened.ssd.lease(TENANT, &[id(9)], MINUTE_US);
    assert!(opened.read(&lease, &[want(0, 0..1)]).is_ok());
    assert!(opened.read(&lease, &[want(0, 1..2)]).is_err());
    assert!(!opened.ssd.contains(&id(9)));
}

#[test]
fn chunks_are_there_after_a_close_and_after_a_flush_without_one() {
    let Some(rig) = Rig::new(1, 64 * MIB, 4 * MIB) else { return };
    let shape = Shape::new(&[16 * PAGE, 70_001]);
    let opened = rig.open(config());
    opened.write_chain(0..20, &shape);
    opened.ssd.close().unwrap();

    let opened = rig.open(config());
    assert_eq!(opened.ssd.stat().tier.chunks, 20);
    opened.expect_chain(0..20, &shape);
    opened.write_chain(100..120, &shape);
    opened.ssd.flush().unwrap();
    drop(opened);

    let opened = rig.open(config());
    opened.expect_chain(0..20, &shape);
    opened.expect_chain(100..120, &shape);
    opened.ssd.delete(TENANT, &[id(119)]);
    opened.ssd.flush().unwrap();
    drop(opened);

    let opened = rig.open(config());
    assert_eq!(opened.ssd.lookup(TENANT, &ids(100..120)), 19);
}

#[test]
fn what_was_written_becomes_durable_by_itself() {
    let Some(rig) = Rig::new(1, 64 * MIB, 4 * MIB) else { return };
    let shape = Shape::new(&[PAGE]);
    let opened = rig.open(config());
    opened.write_chain(0..3, &shape);
    let patience = std::time::Instant::now() + PATIENCE;
    while opened.ssd.stat().tier.space.pending_records > 0 || opened.ssd.stat().volumes[0].commits == 0 {
        assert!(std::time::Instant::now() < patience, "{:?}", opened.ssd.stat());
        std::thread::sleep(std::time::Duration::from_millis(2));
    }
    drop(opened);
    rig.open(config()).expect_chain(0..3, &shape);
}

#[test]
fn two_volumes_share_the_chunks() {
    let Some(rig) = Rig::new(2, 32 * MIB, 2 * MIB) else { return };
    let shape = Shape::new(&[16 * PAGE; 4]);
    let opened = rig.open(config());
    opened.write_chain(0..64, &shape);
    let written = |number: usize| opened.ssd.stat().volumes[number].link.written_bytes;
    assert!(written(0) > 0 && written(1) > 0, "{} and {}", written(0), written(1));
    let lease = opened.lease(0..64);
    let wants: Vec<_> = (0..16).map(|chunk| want(chunk * 4, 1..3)).collect();
    for (staged, want) in opened.read(&lease, &wants).unwrap().iter().zip(&wants) {
        expect_truth(staged, want.chunk as u64, &shape);
    }
    drop(lease);
    opened.ssd.close().unwrap();
    rig.open(config()).expect_chain(0..64, &shape);
}

#[test]
fn a_second_owner_and_a_second_log_are_refused() {
    let Some(rig) = Rig::new(1, 32 * MIB, 2 * MIB) else { return };
    let path = &rig.paths[0];
    let opened = rig.open(config());
    let refused = Volume::open(path, DiskOptions::default()).unwrap_err();
    assert!(matches!(&refused, SsdError::SecondOwner { path: named, .. } if named == path), "{refused}");
    for existing in [Existing::Keep, Existing::Destroy] {
        let refused = init(path, 32 * MIB, 2 * MIB, existing).unwrap_err();
        assert!(matches!(refused, SsdError::SecondOwner { .. }), "{refused}");
    }
    opened.write_chain(0..1, &Shape::new(&[PAGE]));
    opened.ssd.close().unwrap();
    assert!(matches!(init(path, 32 * MIB, 2 * MIB, Existing::Keep), Err(SsdError::Exists { .. })));
    init(path, 16 * MIB, 2 * MIB, Existing::Destroy).unwrap();
    let opened = rig.open(config());
    assert!(!opened.ssd.contains(&id(0)));
    assert_eq!(std::fs::metadata(path).unwrap().len(), 16 * MIB);
}

#[test]
fn a_log_says_how_long_the_segments_are_that_it_was_made_with() {
    let Some(rig) = Rig::new(1, 32 * MIB, 2 * MIB) else { return };
    rig.open(config()).ssd.close().unwrap();
    let volume = || Volume::open(&rig.paths[0], DiskOptions::default()).unwrap();
    assert_eq!(volume().segment_bytes().unwrap(), 2 * MIB);
    init(&rig.paths[0], 32 * MIB, MIB, Existing::Destroy).unwrap();
    assert_eq!(volume().segment_bytes().unwrap(), MIB);
}

#[test]
fn encrypted_chunks_come_back_and_are_not_on_disk_as_they_were() {
    let Some(rig) = Rig::new(1, 32 * MIB, 2 * MIB) else { return };
    let shape = Shape::new(&[16 * PAGE, 1001, 1]);
    let keyed = || {
        let mut config = config();
        config.keys = TenantKeys::default();
        config.keys.insert(TENANT, [5; 32]);
        config
    };
    let opened = rig.open(keyed());
    opened.write_chain(0..4, &shape);
    opened.expect_chain(0..4, &shape);
    opened.ssd.close().unwrap();
    let on_disk = std::fs::read(&rig.paths[0]).unwrap();
    let plain = &truth(2, 0, 16 * PAGE)[..32];
    assert!(!on_disk.windows(32).any(|bytes| bytes == plain));

    let opened = rig.open(config());
    let lease = opened.lease(0..4);
    let refused = opened.read(&lease, &[want(0, 0..1)]).unwrap_err();
    assert!(matches!(refused, forebay_store::ssd::NotRead::Encrypted { .. }), "{refused}");
    assert!(opened.ssd.contains(&id(0)), "without its key a chunk is no fault");
    assert_eq!(opened.ssd.lease(TenantId(9), &ids(0..4), MINUTE_US).len(), 0);
    drop((lease, opened));
    rig.open(keyed()).expect_chain(0..4, &shape);
}
