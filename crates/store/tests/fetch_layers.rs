//! Chunks that come from the disk layer by layer: every layer is right as soon as it is told, the
//! chunk is everybody's when all of it is there, and nobody's slot is lost.
#![allow(clippy::unwrap_used)]

use forebay_kv::ChunkId;
use forebay_store::admission::Policy;
use forebay_store::disk::DiskOptions;
use forebay_store::ssd::{Check, Existing, NotRead, Ssd, SsdOptions, Volume, init};
use forebay_store::{
    ChunkShape, LayerGuard, Lease, NotFetched, Store, TenantId, TierConfig, WriteBackConfig, checksum,
};
use forebay_transfer::{
    Backing, Class, HostLink, Limits, LinkSpec, MoverHandle, MoverThread, Pages, PathSpec, Place,
};
use proptest::prelude::*;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;
use testkit::eventually;

const HOST: Place = Place::Host(0);
const TENANT: TenantId = TenantId(0);
/// Four runs of eight layers.
const LAYERS: usize = 32;
const LAYER_BYTES: usize = 64 << 10;
/// Where runs begin and the last one ends: the first one is 128 KiB long, the others 512.
const RUNS: [usize; 6] = [0, 2, 10, 18, 26, LAYERS];
const CHUNKS: usize = 3;

struct Rig {
    store: Store,
    _mover: MoverThread,
}

fn mover() -> (MoverThread, MoverHandle) {
    let mover = MoverThread::spawn(Limits::default()).unwrap();
    let handle = mover.handle();
    let link =
        handle.add_link(LinkSpec::new("h2h", 4, 64 << 20), Box::new(HostLink::new(1).unwrap())).unwrap();
    handle.add_path(PathSpec::direct(HOST, HOST, link)).unwrap().unwrap();
    (mover, handle)
}

/// A log whose last owner may not have let go of it quite yet.
fn opened(log: &Path) -> Volume {
    let mut volume = None;
    eventually("the log is free", || {
        volume = Volume::open(log, DiskOptions::default()).ok();
        volume.is_some()
    });
    volume.unwrap()
}

impl Rig {
    fn open(log: &Path, options: SsdOptions) -> Rig {
        let (mover, handle) = mover();
        let ssd = Ssd::open(&handle, HOST, vec![opened(log)], options).unwrap();
        let write_back = WriteBackConfig::new(Policy::All, 32 << 20, 64 << 20, 64 << 10);
        let mut tier = TierConfig::new(32 << 20);
        tier.slab_bytes = 4 << 20;
        let store = Store::open_with_ssd(&handle, HOST, Pages::Base, tier, ssd, &write_back).unwrap();
        Rig { store, _mover: mover }
    }

    fn put(&self, number: usize, layer_bytes: usize) {
        let shape = ChunkShape::new(vec![layer_bytes as u64; LAYERS]).unwrap();
        let parent = number.checked_sub(1).map(id);
        let slot = self.store.reserve(TENANT, id(number), parent, &shape).unwrap().unwrap();
        let (arena, bytes) = (self.store.arena_memory(), truth(number, layer_bytes));
        // SAFETY: the slot is this test's, and inside of the arena.
        unsafe { arena.as_ptr().add(slot.offset_bytes() as usize).copy_from(bytes.as_ptr(), bytes.len()) };
        let checksums = slot.checksums();
        slot.commit(&checksums).unwrap();
    }

    fn lease(&self) -> Lease {
        self.store.lease(TENANT, &(0..CHUNKS).map(id).collect::<Vec<_>>(), 60_000_000)
    }

    /// Asks for a layer of chunks.
    fn ask(&self, lease: &Lease, layer: usize, chunks: &[usize]) -> Receiver<Told> {
        let (sender, told) = channel();
        let on_end = move |chunk, guard| sender.send((chunk, guard)).unwrap();
        self.store.fetch_layer(lease, layer, chunks.iter().copied(), (Class::Demand, None), on_end);
        told
    }

    /// Sees that a layer is what was stored.
    fn check(&self, number: usize, layer: usize, guard: &LayerGuard, layer_bytes: usize) {
        let (place, arena) = (guard.place(layer).unwrap(), self.store.arena_memory());
        assert!(place.end <= arena.len() as u64);
        // SAFETY: inside of the arena, where nobody writes under the guard.
        let bytes = unsafe {
            let start = arena.as_ptr().add(place.start as usize);
            std::slice::from_raw_parts(start, (place.end - place.start) as usize)
        };
        assert!(
            bytes == &truth(number, layer_bytes)[layer * layer_bytes..][..layer_bytes],
            "{number} {layer}"
        );
        assert_eq!(guard.checksum(layer), Some(checksum::of_pieces(&[bytes])));
    }

    fn is_in_memory(&self, number: usize) -> bool {
        self.store.read_guard_by_id(TENANT, &id(number)).is_some()
    }
}

type Told = (usize, Result<LayerGuard, NotFetched>);

fn next(told: &Receiver<Told>) -> Told {
    told.recv_timeout(Duration::from_secs(60)).expect("each chunk ends")
}

fn id(number: usize) -> ChunkId {
    ChunkId::from_bytes([number as u8 + 1; 32])
}

fn truth(number: usize, layer_bytes: usize) -> Vec<u8> {
    let word = |at: usize| (at as u32).wrapping_mul(2_654_435_761).wrapping_add(number as u32 * 97);
    (0..LAYERS * layer_bytes / 4 + 1)
        .flat_map(|at| word(at).to_le_bytes())
        .take(LAYERS * layer_bytes)
        .collect()
}

/// A store over a log that holds all chunks, and memory that holds none.
fn on_disk_alone(layer_bytes: usize, options: &dyn Fn() -> SsdOptions) -> (Rig, PathBuf, tempfile::TempDir) {
    let folder = tempfile::tempdir().unwrap();
    let log = folder.path().join("log");
    init(&log, 64 << 20, 8 << 20, Existing::Keep).unwrap();
    let first = Rig::open(&log, options());
    (0..CHUNKS).for_each(|number| first.put(number, layer_bytes));
    first.store.close().unwrap();
    drop(first);
    (Rig::open(&log, options()), log, folder)
}

#[test]
fn a_layer_of_all_chunks_is_there_before_the_layers_behind_it_are_read() {
    let (rig, _log, _folder) = on_disk_alone(LAYER_BYTES, &SsdOptions::default);
    let lease = rig.lease();
    assert_eq!((lease.in_memory(), lease.len()), (0, CHUNKS));
    let (all, mut guards) = ((0..CHUNKS).collect::<Vec<_>>(), Vec::new());
    for run in RUNS.windows(2) {
        let told = rig.ask(&lease, run[0], &all);
        for _ in 0..CHUNKS {
            let (chunk, guard) = next(&told);
            let guard = guard.unwrap();
            // Those right behind it came along.
            (run[0]..run[1]).for_each(|layer| rig.check(chunk, layer, &guard, LAYER_BYTES));
            guards.push(guard);
        }
        let read = (run[1] * CHUNKS * LAYER_BYTES) as u64;
        assert_eq!(rig.store.disk_stat().unwrap().ssd.read_bytes, read);
        assert_eq!(rig.is_in_memory(0), run[1] == LAYERS, "when all of it is there");
    }
    assert_eq!(rig.store.disk_stat().unwrap().promotions.promoted, CHUNKS as u64);
    // Whoever comes now finds it in memory, and those who came before still have it.
    let told = rig.ask(&lease, 3, &[1]);
    rig.check(1, 3, &next(&told).1.unwrap(), LAYER_BYTES);
    rig.store.delete(TENANT, &[id(1)]);
    guards.iter().zip(all.iter().cycle()).for_each(|(guard, _)| assert!(guard.place(LAYERS).is_none()));
    drop(guards);
    drop(lease);
    assert_eq!(rig.store.stat().arena.draining_bytes, 0);
}

#[test]
fn a_chunk_that_changes_in_memory_while_its_layers_come_is_given_up_and_read_anew() {
    let (rig, _log, _folder) = on_disk_alone(LAYER_BYTES, &SsdOptions::default);
    let lease = rig.lease();
    let guard = next(&rig.ask(&lease, 0, &[0])).1.unwrap();
    assert!(guard.check());
    let place = guard.place(1).unwrap();
    // SAFETY: inside of the arena; only this test reads and writes there.
    unsafe { *rig.store.arena_memory().as_ptr().add(place.start as usize) ^= 1 };
    assert!(!guard.check());
    for layer in [0, LAYERS - 1] {
        let told = next(&rig.ask(&lease, layer, &[0])).1;
        assert!(told.is_err(), "layer {layer}");
    }
    assert!(!rig.is_in_memory(0));
    drop(guard);
    // The thread that told of the layer may still hold the chunk.
    eventually("its slot is free", || rig.store.stat().arena.used_bytes == 0);
    for layer in &RUNS[..5] {
        let guard = next(&rig.ask(&lease, *layer, &[0])).1.unwrap();
        rig.check(0, *layer, &guard, LAYER_BYTES);
    }
}

#[test]
fn a_chunk_of_which_nobody_wants_the_rest_gives_its_slot_back() {
    let (rig, _log, _folder) = on_disk_alone(LAYER_BYTES, &SsdOptions::default);
    let lease = rig.lease();
    let told = rig.ask(&lease, 0, &[0, 2]);
    let guards = [next(&told).1.unwrap(), next(&told).1.unwrap()];
    assert!(rig.store.stat().arena.used_bytes > 0);
    drop(guards);
    eventually("nothing is used", || rig.store.stat().arena.used_bytes == 0);
    let told = rig.ask(&lease, LAYERS - 1, &[0]);
    rig.check(0, LAYERS - 1, &next(&told).1.unwrap(), LAYER_BYTES);
}

/// Changes bytes of a layer of a chunk in the log.
fn damage(log: &Path, number: usize, layer: usize) {
    let (file, truth) = (std::fs::read(log).unwrap(), truth(number, LAYER_BYTES));
    let begins = &truth[layer * LAYER_BYTES..][..64];
    let at = (0..file.len()).step_by(4096).find(|at| file[*at..].starts_with(begins)).unwrap() as u64;
    let damaged = std::fs::File::options().write(true).open(log).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&damaged, b"damage", at + 9_000).unwrap();
    damaged.sync_all().unwrap();
}

#[test]
fn a_layer_that_its_user_finds_wrong_ends_its_chunk_in_memory_and_on_disk() {
    let left = || SsdOptions { check: Check::AtUse, ..SsdOptions::default() };
    for layers in [vec![0, RUNS[2]], RUNS[..5].to_vec()] {
        let (rig, log, _folder) = on_disk_alone(LAYER_BYTES, &left);
        damage(&log, 1, RUNS[2] + 3);
        let lease = rig.lease();
        let told: Vec<_> = layers.iter().map(|layer| rig.ask(&lease, *layer, &[0, 1])).collect();
        let guards: Vec<Told> = told.iter().flat_map(|told| [next(told), next(told)]).collect();
        for (chunk, guard) in &guards {
            assert_eq!(guard.as_ref().unwrap().check(), *chunk != 1);
        }
        assert!(next(&rig.ask(&lease, LAYERS - 1, &[1])).1.is_err(), "none of it is told any more");
        assert!(!rig.is_in_memory(1));
        assert_eq!(rig.store.lease(TENANT, &[id(1)], 60_000_000).len(), 0, "nor is it on disk");
        assert_eq!(rig.store.disk_stat().unwrap().ssd.corrupt, 1);
    }
}

#[test]
fn a_layer_that_is_damaged_is_never_told_and_its_chunk_never_seen() {
    let (rig, log, _folder) = on_disk_alone(LAYER_BYTES, &SsdOptions::default);
    damage(&log, 1, RUNS[2] + 3);
    let lease = rig.lease();
    let first = rig.ask(&lease, 0, &[1]);
    let first = next(&first).1.unwrap();
    let told = rig.ask(&lease, RUNS[2], &[0, 1, 2]);
    for _ in 0..CHUNKS {
        match next(&told) {
            (1, end) => assert!(matches!(end, Err(NotFetched::Disk(NotRead::Corrupt { .. }))), "{end:?}"),
            (chunk, guard) => rig.check(chunk, RUNS[2], &guard.unwrap(), LAYER_BYTES),
        }
    }
    rig.check(1, 0, &first, LAYER_BYTES);
    for layer in [0, RUNS[2], LAYERS - 1] {
        let told = rig.ask(&lease, layer, &[1]);
        assert!(next(&told).1.is_err(), "none of it is told any more");
    }
    assert!(!rig.is_in_memory(1));
    assert_eq!(rig.store.disk_stat().unwrap().ssd.corrupt, 1);
}

#[test]
fn who_wants_all_of_a_chunk_gets_it_beside_those_who_want_its_layers() {
    let (rig, _log, _folder) = on_disk_alone(LAYER_BYTES, &SsdOptions::default);
    let lease = rig.lease();
    let (sender, whole) = channel();
    let told: Vec<_> = (0..LAYERS).step_by(4).map(|layer| (layer, rig.ask(&lease, layer, &[0]))).collect();
    let tell = move |guard| sender.send(guard).unwrap();
    rig.store.fetch(&lease, 0, Class::Demand, None, tell);
    let whole = whole.recv_timeout(Duration::from_secs(60)).unwrap().unwrap();
    assert!(whole.check());
    for (layer, told) in told {
        // What was read twice may be deleted by the one and kept by the other: then it is a miss.
        if let Ok(guard) = next(&told).1 {
            rig.check(0, layer, &guard, LAYER_BYTES);
        }
    }
    assert!(rig.is_in_memory(0));
}

#[test]
fn layers_that_share_pages_or_are_encrypted_come_with_their_chunk() {
    let keyed = || {
        let mut options = SsdOptions::default();
        options.keys.insert(TENANT, [42; 32]);
        options
    };
    let unaligned: (usize, &dyn Fn() -> SsdOptions) = (LAYER_BYTES + 1, &SsdOptions::default);
    for (layer_bytes, options) in [unaligned, (LAYER_BYTES, &keyed)] {
        let (rig, _log, _folder) = on_disk_alone(layer_bytes, options);
        let lease = rig.lease();
        let told = rig.ask(&lease, 2, &[0, 1, 2]);
        for _ in 0..CHUNKS {
            let (chunk, guard) = next(&told);
            rig.check(chunk, 2, &guard.unwrap(), layer_bytes);
            assert!(rig.is_in_memory(chunk));
        }
    }
}

#[test]
fn a_chunk_that_is_deleted_while_it_comes_is_not_in_memory_afterwards() {
    let (rig, _log, _folder) = on_disk_alone(LAYER_BYTES, &SsdOptions::default);
    let lease = rig.lease();
    let told = rig.ask(&lease, 0, &[0]);
    let _first = next(&told).1.unwrap();
    rig.store.delete(TENANT, &[id(0)]);
    let told: Vec<_> = RUNS[1..5].iter().map(|layer| rig.ask(&lease, *layer, &[0])).collect();
    told.iter().for_each(|told| drop(next(told)));
    assert!(!rig.is_in_memory(0));
    assert!(next(&rig.ask(&lease, 0, &[0])).1.is_err());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]

    #[test]
    fn layers_asked_for_in_any_order_and_by_many_are_each_told_once_and_right(
        asked in prop::collection::vec((0..LAYERS, prop::collection::vec(0..CHUNKS, 1..5), any::<bool>()), 1..60),
    ) {
        let (rig, _log, _folder) = on_disk_alone(LAYER_BYTES, &SsdOptions::default);
        let lease = rig.lease();
        let (mut waiting, mut kept) = (Vec::new(), Vec::new());
        for (layer, chunks, keeps) in asked {
            waiting.push((layer, chunks.len(), keeps, rig.ask(&lease, layer, &chunks)));
        }
        for (layer, count, keeps, told) in waiting {
            for _ in 0..count {
                let (chunk, guard) = next(&told);
                let guard = guard.unwrap();
                rig.check(chunk, layer, &guard, LAYER_BYTES);
                if keeps {
                    kept.push((chunk, layer, guard));
                }
            }
            prop_assert!(told.recv_timeout(Duration::from_millis(1)).is_err(), "once");
        }
        kept.iter().for_each(|(chunk, layer, guard)| rig.check(*chunk, *layer, guard, LAYER_BYTES));
    }
}
