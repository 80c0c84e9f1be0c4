//! What tools do with a log that no engine uses: look at it, check it, drop what is damaged, empty
//! it of a tenant, rebuild it when its checkpoints are lost.
#![allow(clippy::unwrap_used)]

#[allow(dead_code, reason = "the simulated host is for other tests")]
mod sim;

use forebay_kv::ChunkId;
use forebay_store::TenantId;
use forebay_store::log::{
    ChunkFault, ChunkInLog, DiskTierConfig, Fault, Inspection, Layout, Medium, NotOpened, NotRebuilt,
    Offline, PAGE_BYTES, inspect, rebuild, verify,
};
use sim::SimDisk;

const FILE_BYTES: u64 = 4 << 20;
const SEGMENT_BYTES: u64 = 256 << 10;
const ONE: TenantId = TenantId(1);
const TWO: TenantId = TenantId(2);

fn config() -> DiskTierConfig {
    DiskTierConfig { max_chunks: 1000, ..DiskTierConfig::default() }
}

fn id(number: u8) -> ChunkId {
    ChunkId::from_bytes([number; 32])
}

fn layers(number: u8) -> Vec<Vec<u8>> {
    vec![vec![number; 5000], vec![number ^ 0xff; 300]]
}

/// A log with chunks 1 to 20 of tenant 1 and 21 to 30 of tenant 2, closed in good order.
fn filled() -> SimDisk {
    let disk = SimDisk::with_log(FILE_BYTES, SEGMENT_BYTES, 64 << 10);
    let (mut log, _) = Offline::open(&config(), &disk).unwrap();
    for number in 1..=30 {
        let tenant = if number <= 20 { ONE } else { TWO };
        log.store(tenant, &id(number), None, &layers(number)).unwrap();
    }
    log.close().unwrap();
    disk
}

fn layout() -> Layout {
    Layout::with_journal(FILE_BYTES, SEGMENT_BYTES, 64 << 10).unwrap()
}

fn chunks(disk: &SimDisk) -> (Vec<ChunkInLog>, Inspection) {
    let mut chunks = Vec::new();
    let inspection = inspect(disk, |chunk| chunks.push(chunk.clone())).unwrap();
    (chunks, inspection)
}

fn overwrite(disk: &SimDisk, at: u64, with: &[u8]) {
    let mut image = disk.image();
    image[at as usize..at as usize + with.len()].copy_from_slice(with);
    disk.set_image(&image);
}

fn lose_checkpoints(disk: &SimDisk) {
    layout().checkpoints.iter().for_each(|area| overwrite(disk, area.offset, &[0; PAGE_BYTES]));
}

#[test]
fn looking_at_a_log_finds_what_is_there_and_changes_nothing() {
    let disk = filled();
    let before = disk.image();
    let (chunks, seen) = chunks(&disk);
    assert_eq!(chunks.len(), 30);
    assert!(seen.recovered.clean && seen.both_superblocks);
    assert_eq!((seen.tenants[&ONE].chunks, seen.tenants[&TWO].chunks), (20, 10));
    assert_eq!(seen.tenants[&TWO].bytes, 10 * 5300);
    assert!(verify(&disk).unwrap().is_sound());
    assert_eq!(disk.image(), before);
}

#[test]
fn a_flipped_bit_is_found_where_it_is_and_what_is_damaged_can_be_dropped() {
    let disk = filled();
    let bad = chunks(&disk).0[7].clone();
    let place = bad.shape.layer(1).unwrap();
    disk.flip((bad.slot_at + place.start) as usize * 8 + 3);
    let found = verify(&disk).unwrap();
    assert!(!found.is_sound());
    let [(chunk, ChunkFault::Bytes(Fault::Bytes { layer: 1 }))] = &found.faults[..] else {
        panic!("{:?}", found.faults)
    };
    assert_eq!(*chunk, bad);

    let (mut log, _) = Offline::open(&config(), &disk).unwrap();
    assert!(log.drop_copy(bad.tenant, &bad.copy));
    assert!(!log.drop_copy(bad.tenant, &bad.copy), "it is gone");
    log.close().unwrap();
    let after = verify(&disk).unwrap();
    assert!(after.is_sound());
    assert_eq!(after.inspection.recovered.chunks, 29);
}

#[test]
fn a_purged_tenant_leaves_no_byte_behind_and_others_stay() {
    let disk = filled();
    let (mut log, _) = Offline::open(&config(), &disk).unwrap();
    assert_eq!(log.purge(ONE).unwrap(), 20);
    log.close().unwrap();
    let (left, seen) = chunks(&disk);
    assert!(left.len() == 10 && left.iter().all(|chunk| chunk.tenant == TWO));
    assert!(seen.doomed.is_empty());
    let image = disk.image();
    for number in 1..=20 {
        let first_page = &layers(number)[0][..PAGE_BYTES];
        assert!(image.chunks(PAGE_BYTES).all(|page| page != first_page), "chunk {number}");
    }
}

#[test]
fn a_log_without_checkpoints_is_rebuilt_from_its_footers() {
    let disk = filled();
    let before = chunks(&disk).0;
    lose_checkpoints(&disk);
    assert!(matches!(verify(&disk).unwrap_err(), NotOpened::NoCheckpoint { .. }));
    let rebuilt = rebuild(&disk).unwrap();
    assert_eq!(rebuilt.chunks, 30);
    assert_eq!(chunks(&disk).0, before);
    assert!(verify(&disk).unwrap().is_sound());
    let (mut log, _) = Offline::open(&config(), &disk).unwrap();
    log.store(TWO, &id(99), None, &layers(99)).unwrap();
    log.close().unwrap();
    assert_eq!(verify(&disk).unwrap().inspection.recovered.chunks, 31);
}

#[test]
fn what_the_journal_says_is_gone_stays_gone_when_a_log_is_rebuilt() {
    let disk = filled();
    let gone = chunks(&disk).0[3].clone();
    let (mut log, _) = Offline::open(&config(), &disk).unwrap();
    log.drop_copy(gone.tenant, &gone.copy);
    log.settle().unwrap();
    drop(log);
    lose_checkpoints(&disk);
    assert_eq!(rebuild(&disk).unwrap().chunks, 29);
    assert!(chunks(&disk).0.iter().all(|chunk| chunk.copy != gone.copy));
}

#[test]
fn a_log_that_can_be_opened_is_not_rebuilt() {
    let disk = filled();
    let before = disk.image();
    assert!(matches!(rebuild(&disk), Err(NotRebuilt::NotNeeded)));
    let foreign = SimDisk::new(FILE_BYTES);
    assert!(matches!(rebuild(&foreign), Err(NotRebuilt::NotOpened(NotOpened::NotALog { .. }))));
    assert_eq!(disk.image(), before);
}

#[test]
fn a_file_that_ends_before_a_log_says_what_it_is_is_no_log() {
    for bytes in [0, PAGE_BYTES as u64, 16 * PAGE_BYTES as u64] {
        let short = SimDisk::new(bytes);
        assert!(matches!(verify(&short), Err(NotOpened::NotALog { .. })), "{bytes}");
        assert!(matches!(rebuild(&short), Err(NotRebuilt::NotOpened(NotOpened::NotALog { .. }))), "{bytes}");
    }
}

#[test]
fn a_full_log_takes_new_chunks_and_stays_sound() {
    let disk = SimDisk::with_log(FILE_BYTES, SEGMENT_BYTES, 64 << 10);
    let (mut log, _) = Offline::open(&config(), &disk).unwrap();
    let mut bytes = [0; 32];
    for number in 0..600u32 {
        bytes[..4].copy_from_slice(&number.to_le_bytes());
        log.store(ONE, &ChunkId::from_bytes(bytes), None, &layers(number as u8)).unwrap();
    }
    drop(log);
    let found = verify(&disk as &dyn Medium).unwrap();
    assert!(found.faults.is_empty() && found.inspection.recovered.chunks > 100, "{found:?}");
}

#[test]
fn what_was_dropped_after_a_commit_that_failed_half_way_stays_gone() {
    let disk = SimDisk::with_log(FILE_BYTES, SEGMENT_BYTES, 16 << 10);
    let (mut log, _) = Offline::open(&config(), &disk).unwrap();
    log.store(ONE, &id(1), None, &layers(1)).unwrap();
    // Its sync, header and journal block succeed, the sync after them does not.
    disk.fail_after(3);
    assert!(log.settle().is_err());
    disk.revive();
    let name = chunks(&disk).0[0].copy;
    assert!(log.drop_copy(ONE, &name));
    // More records than the journal has room for: a checkpoint takes their place.
    for number in 0..300u16 {
        let id = ChunkId::from_bytes(std::array::from_fn(|byte| number.to_le_bytes()[byte % 2]));
        log.store(TWO, &id, None, &[vec![1]]).unwrap();
    }
    log.settle().unwrap();
    drop(log);
    assert!(
        chunks(&disk).0.iter().all(|chunk| chunk.tenant == TWO),
        "the failed commit's block is not replayed"
    );
}
