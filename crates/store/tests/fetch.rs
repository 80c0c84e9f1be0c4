//! Chunks that are lent, slots that are reserved, and what others are told: what those get who use
//! the arena by themselves.
#![allow(clippy::unwrap_used)]

use forebay_kv::ChunkId;
use forebay_store::admission::Policy;
use forebay_store::disk::DiskOptions;
use forebay_store::ssd::{
    Check, Existing, LayerRead, NotRead, NotStaged, ReadResults, Ssd, SsdOptions, Volume, init,
};
use forebay_store::{
    Begun, Changed, ChunkShape, Left, MemoryTier, NotCommitted, NotFetched, ReadGuard, Store, TenantId,
    TierConfig, WriteBackConfig, checksum,
};
use forebay_transfer::{
    Backing, Class, End, Failure, HostLink, Limits, LinkSpec, MoverHandle, MoverThread, Pages, PathSpec,
    Place, Reason, Span,
};
use std::collections::HashSet;
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use testkit::eventually;

const HOST: Place = Place::Host(0);
const TENANT: TenantId = TenantId(0);
const LAYER_BYTES: usize = 10_001;
const LAYERS: usize = 2;

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

/// A log whose last owner may not have let go of it quite yet: its write-back thread ends a little
/// later than it.
fn opened(log: &Path) -> Volume {
    let since = Instant::now();
    loop {
        match Volume::open(log, DiskOptions::default()) {
            Ok(volume) => return volume,
            Err(error) => assert!(since.elapsed() < Duration::from_secs(60), "{error}"),
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

impl Rig {
    fn in_memory(bytes: u64) -> Rig {
        let (mover, handle) = mover();
        let mut config = TierConfig::new(bytes);
        config.slab_bytes = 64 << 10;
        Rig { store: Store::open(&handle, HOST, Pages::Base, config).unwrap(), _mover: mover }
    }

    fn with_ssd(log: &Path) -> Rig {
        Rig::with(log, SsdOptions::default(), &write_back()).0
    }

    fn with(log: &Path, config: SsdOptions, write_back: &WriteBackConfig) -> (Rig, Ssd, MoverHandle) {
        let (mover, handle) = mover();
        if !log.exists() {
            init(log, 16 << 20, 1 << 20, Existing::Keep).unwrap();
        }
        let volume = opened(log);
        let ssd = Ssd::open(&handle, HOST, vec![volume], config).unwrap();
        let config = TierConfig::new(4 << 20);
        let store =
            Store::open_with_ssd(&handle, HOST, Pages::Base, config, ssd.clone(), write_back).unwrap();
        (Rig { store, _mover: mover }, ssd, handle)
    }

    /// Writes a chunk by hand, as another process would.
    fn put(&self, number: usize) {
        let shape = ChunkShape::new([LAYER_BYTES as u64; LAYERS]).unwrap();
        let parent =
            number.checked_sub(1).map(id).filter(|parent| self.store.lookup(TENANT, &[*parent]) == 1);
        let slot = self.store.reserve(TENANT, id(number), parent, &shape).unwrap().unwrap();
        self.write(slot.offset_bytes(), &truth(number));
        let checksums = slot.checksums();
        assert_eq!(
            checksums,
            truth(number).chunks(LAYER_BYTES).map(|layer| checksum::of_pieces(&[layer])).collect::<Vec<_>>()
        );
        slot.commit(&checksums).unwrap();
    }

    fn write(&self, offset: u64, bytes: &[u8]) {
        let arena = self.store.arena_memory();
        assert!(offset as usize + bytes.len() <= arena.len());
        // SAFETY: inside of the arena, in a slot that is this test's.
        unsafe { arena.as_ptr().add(offset as usize).copy_from(bytes.as_ptr(), bytes.len()) };
    }

    fn bytes_of(&self, loan: &ReadGuard) -> Vec<u8> {
        let arena = self.store.arena_memory();
        let (offset, len) = (loan.offset_bytes() as usize, loan.shape().bytes() as usize);
        // SAFETY: inside of the arena, where nobody writes as long as the loan lives.
        unsafe { std::slice::from_raw_parts(arena.as_ptr().add(offset), len) }.to_vec()
    }
}

/// A log that holds so many chunks.
fn log_with(chunks: usize, config: SsdOptions) -> (std::path::PathBuf, tempfile::TempDir) {
    let folder = tempfile::tempdir().unwrap();
    let log = folder.path().join("log");
    let first = Rig::with(&log, config, &write_back()).0;
    (0..chunks).for_each(|number| first.put(number));
    first.store.close().unwrap();
    (log, folder)
}

fn write_back() -> WriteBackConfig {
    WriteBackConfig::new(Policy::All, 4 << 20, 16 << 20, 64 << 10)
}

fn id(number: usize) -> ChunkId {
    ChunkId::from_bytes([number as u8 + 1; 32])
}

fn truth(number: usize) -> Vec<u8> {
    (0..LAYERS * LAYER_BYTES).map(|at| (at as u32 * 31 + number as u32 * 7) as u8).collect()
}

#[test]
fn a_lent_chunk_lies_still_whatever_becomes_of_it() {
    let rig = Rig::in_memory(64 << 10);
    rig.put(0);
    let lease = rig.store.lease(TENANT, &[id(0)], 1_000_000);
    let loan = rig.store.read_guard(&lease, 0).unwrap();
    drop(lease);
    assert_eq!(rig.store.delete(TENANT, &[id(0)]), 1);
    // Two more would fill the slab; the lent slot is not among them.
    rig.put(1);
    let shape = ChunkShape::new([LAYER_BYTES as u64; LAYERS]).unwrap();
    let next = rig.store.reserve(TENANT, id(2), Some(id(1)), &shape).unwrap().unwrap();
    assert_ne!(next.offset_bytes(), loan.offset_bytes());
    assert!(rig.bytes_of(&loan) == truth(0) && loan.check());
    drop(loan);
    assert_eq!(rig.store.stat().arena.draining_bytes, 0);
}

#[test]
fn a_chunk_that_is_no_longer_what_it_was_is_found_by_a_check() {
    let rig = Rig::in_memory(1 << 20);
    rig.put(0);
    let loan = rig.store.read_guard_by_id(TENANT, &id(0)).unwrap();
    assert!(loan.check());
    rig.write(loan.offset_bytes() + 15_000, &[!truth(0)[15_000]]);
    assert!(!loan.check());
    assert_eq!((rig.store.lookup(TENANT, &[id(0)]), rig.store.stat().faults.corrupt), (0, 1));
}

#[test]
fn a_reservation_that_is_dropped_was_never_there() {
    let rig = Rig::in_memory(1 << 20);
    let shape = ChunkShape::new([LAYER_BYTES as u64; LAYERS]).unwrap();
    let slot = rig.store.reserve(TENANT, id(0), None, &shape).unwrap().unwrap();
    assert!(rig.store.reserve(TENANT, id(0), None, &shape).is_err(), "somebody writes it");
    drop(slot);
    assert_eq!((rig.store.lookup(TENANT, &[id(0)]), rig.store.stat().arena.used_bytes), (0, 0));
    let slot = rig.store.reserve(TENANT, id(0), None, &shape).unwrap().unwrap();
    assert!(slot.commit(&[1]).is_err(), "one checksum for two layers");
    assert_eq!(rig.store.stat().arena.used_bytes, 0);
    rig.put(0);
    assert!(rig.store.reserve(TENANT, id(0), None, &shape).unwrap().is_none(), "it is here");
}

#[test]
fn chunks_on_disk_are_brought_once_for_all_who_want_them() {
    let (log, _folder) = log_with(4, SsdOptions::default());
    let rig = Rig::with_ssd(&log);
    let ids: Vec<ChunkId> = (0..4).map(id).collect();
    let lease = rig.store.lease(TENANT, &ids, 60_000_000);
    assert_eq!((lease.in_memory(), lease.len()), (0, 4));
    assert!(rig.store.read_guard(&lease, 0).is_err(), "it is not in memory");
    let (sender, loans) = channel();
    for chunk in [0, 1, 1, 2, 1, 3] {
        let sender = sender.clone();
        let tell = move |loan| sender.send((chunk, loan)).unwrap();
        rig.store.fetch(&lease, chunk, Class::Demand, None, tell);
    }
    for _ in 0..6 {
        let (chunk, loan) = loans.recv_timeout(Duration::from_secs(30)).unwrap();
        assert!(rig.bytes_of(&loan.unwrap()) == truth(chunk));
    }
    assert_eq!(rig.store.disk_stat().unwrap().promotions.promoted, 4);
    assert!(rig.store.read_guard(&lease, 3).is_ok());
}

/// A store over a log that holds chunks 0 to 3 and over memory that holds none, and the log.
fn on_disk_alone(config: fn() -> SsdOptions) -> (Rig, std::path::PathBuf, tempfile::TempDir) {
    let (log, folder) = log_with(4, config());
    (Rig::with(&log, config(), &write_back()).0, log, folder)
}

/// Brings these chunks by one request, and says how each ended, in their order.
fn bring(rig: &Rig, numbers: std::ops::Range<usize>) -> Vec<Result<ReadGuard, NotFetched>> {
    let lease = rig.store.lease(TENANT, &numbers.clone().map(id).collect::<Vec<_>>(), 60_000_000);
    assert_eq!((lease.in_memory(), lease.len()), (0, numbers.len()));
    let (sender, loans) = channel();
    let tell = move |chunk, loan| sender.send((chunk, loan)).unwrap();
    rig.store.fetch_many(&lease, 0..numbers.len(), Class::Demand, None, tell);
    let next = || loans.recv_timeout(Duration::from_secs(30)).expect("each chunk ends");
    let mut ends: Vec<_> = numbers.map(|_| next()).collect();
    ends.sort_by_key(|(chunk, _)| *chunk);
    ends.into_iter().map(|(_, loan)| loan).collect()
}

#[test]
fn chunks_of_one_request_come_by_one_read_and_straight_into_memory() {
    let (rig, _log, _folder) = on_disk_alone(SsdOptions::default);
    for (number, loan) in bring(&rig, 0..4).into_iter().enumerate() {
        assert!(rig.bytes_of(&loan.unwrap()) == truth(number));
    }
    let stat = rig.store.disk_stat().unwrap();
    assert_eq!((stat.ssd.reads, stat.ssd.direct_reads, stat.promotions.promoted), (1, 4, 4));
}

#[test]
fn chunks_that_the_index_has_no_room_for_are_told_when_the_log_is_opened() {
    let (log, _folder) = log_with(4, SsdOptions::default());
    let mut config = SsdOptions::default();
    config.tier.max_chunks = 3;
    let lines = testkit::logged(|| drop(Rig::with(&log, config, &write_back())));
    assert!(lines.contains("SSD log has more chunks than the index holds") && lines.contains("left_out=1"));
}

/// With a key for the tenant.
fn keyed() -> SsdOptions {
    let mut config = SsdOptions::default();
    config.keys.insert(TENANT, [42; 32]);
    config
}

#[test]
fn an_encrypted_chunk_lies_decrypted_in_memory() {
    let (rig, _log, _folder) = on_disk_alone(keyed);
    for (number, loan) in bring(&rig, 0..4).into_iter().enumerate() {
        let loan = loan.unwrap();
        assert!(rig.bytes_of(&loan) == truth(number) && loan.check());
    }
    assert_eq!(rig.store.disk_stat().unwrap().ssd.direct_reads, 0);
}

/// Changes bytes of a chunk in the log.
fn damage(log: &Path, number: usize) {
    let file = std::fs::read(log).unwrap();
    let starts = |at: &usize| file[*at..].starts_with(&truth(number)[..64]);
    let at = (0..file.len()).step_by(4096).find(starts).unwrap() as u64;
    let damaged = std::fs::File::options().write(true).open(log).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&damaged, b"damage", at + 9_000).unwrap();
    damaged.sync_all().unwrap();
}

#[test]
fn what_is_left_to_its_users_to_check_is_dropped_from_disk_too_once_one_finds_it_wrong() {
    let left = || SsdOptions { check: Check::AtUse, ..SsdOptions::default() };
    let (rig, log, _folder) = on_disk_alone(left);
    damage(&log, 1);
    for (number, loan) in bring(&rig, 0..4).into_iter().enumerate() {
        let loan = loan.unwrap();
        assert_eq!((loan.check(), rig.bytes_of(&loan) == truth(number)), (number != 1, number != 1));
    }
    assert!(rig.store.read_guard_by_id(TENANT, &id(1)).is_none());
    let lease = rig.store.lease(TENANT, &[id(1)], 60_000_000);
    assert_eq!(lease.len(), 0, "nor is it on disk");
    assert_eq!((rig.store.disk_stat().unwrap().ssd.corrupt, rig.store.stat().faults.corrupt), (1, 1));
}

#[test]
fn a_chunk_that_is_damaged_on_disk_is_never_seen_in_memory_and_costs_no_other() {
    let (rig, log, _folder) = on_disk_alone(SsdOptions::default);
    damage(&log, 1);
    for (number, loan) in bring(&rig, 0..4).into_iter().enumerate() {
        match loan {
            Ok(loan) => assert!(number != 1 && rig.bytes_of(&loan) == truth(number)),
            Err(error) => {
                assert!(matches!(&error, NotFetched::Disk(NotRead::Corrupt { .. })), "{error}");
                assert_eq!(number, 1);
            }
        }
    }
    assert!(rig.store.read_guard_by_id(TENANT, &id(1)).is_none());
    assert_eq!(rig.store.disk_stat().unwrap().ssd.corrupt, 1);
}

#[test]
fn a_read_that_fails_midway_frees_its_slot_and_is_a_miss() {
    let (rig, log, _folder) = on_disk_alone(SsdOptions::default);
    // The end of the file comes before the chunks do.
    std::fs::File::options().write(true).open(&log).unwrap().set_len(64 << 10).unwrap();
    for loan in bring(&rig, 0..4) {
        let error = loan.unwrap_err();
        assert!(matches!(error, NotFetched::Disk(NotRead::Failed { .. })), "{error}");
    }
    assert_eq!(rig.store.stat().arena.used_bytes, 0);
    rig.put(0);
    assert!(rig.bytes_of(&rig.store.read_guard_by_id(TENANT, &id(0)).unwrap()) == truth(0));
}

/// A store over a log of which nothing can be read until the third one is dropped: staging is for
/// one chunk with its footer, and the first chunk is in it.
fn without_staging(log: &Path, config: SsdOptions) -> (Rig, MoverHandle, ReadResults) {
    let staging_bytes = if config.keys.is_empty() { 24 << 10 } else { 28 << 10 };
    let (rig, ssd, handle) = Rig::with(log, SsdOptions { staging_bytes, ..config }, &write_back());
    let (sender, staged) = channel();
    let held = ssd.lease(TENANT, &[id(0)], 60_000_000);
    let all = [LayerRead { chunk: 0, layers: 0..LAYERS, into: None, check: Check::AtRead }];
    ssd.read(&held, &all, Class::Demand, None, move |ends| sender.send(ends).unwrap()).unwrap();
    (rig, handle, staged.recv_timeout(Duration::from_secs(30)).unwrap())
}

#[test]
fn who_has_time_left_gets_a_chunk_although_who_asked_for_it_first_has_none() {
    let (log, _folder) = log_with(2, SsdOptions::default());
    let (rig, handle, staged) = without_staging(&log, SsdOptions::default());

    let (sender, ends) = channel();
    let soon_us = handle.now_us() + 200_000;
    for (who, deadline_us) in [("hasty", Some(soon_us)), ("late", Some(soon_us - 1)), ("patient", None)] {
        // Each has a lease of its own until it is told.
        let lease = Arc::new(rig.store.lease(TENANT, &[id(0), id(1)], 60_000_000));
        let (sender, kept) = (sender.clone(), Arc::clone(&lease));
        rig.store.fetch(&lease, 1, Class::Demand, deadline_us, move |loan| {
            drop(kept);
            sender.send((who, loan)).unwrap();
        });
    }
    for _ in 0..2 {
        let (who, loan) = ends.recv_timeout(Duration::from_secs(30)).unwrap();
        assert_ne!(who, "patient");
        assert_eq!(loan.unwrap_err(), NotFetched::Disk(NotRead::Staging(NotStaged::Late)));
    }
    assert!(handle.now_us() >= soon_us && ends.try_recv().is_err());
    drop(staged);
    let (who, loan) = ends.recv_timeout(Duration::from_secs(30)).unwrap();
    assert_eq!(who, "patient");
    assert!(rig.bytes_of(&loan.unwrap()) == truth(1));
}

#[test]
fn a_chunk_that_comes_ahead_comes_at_once_when_a_request_waits_for_it() {
    // What is encrypted is decrypted in staging, and copied from there.
    for (config, transfers) in [(SsdOptions::default as fn() -> _, 1), (keyed, 2)] {
        let (log, _folder) = log_with(2, config());
        let (rig, handle, staged) = without_staging(&log, config());
        let (sender, ends) = channel();
        let done = || handle.telemetry().unwrap().classes.map(|class| class.done);
        let before = done();
        for class in [Class::Prefetch, Class::Demand] {
            let lease = Arc::new(rig.store.lease(TENANT, &[id(0), id(1)], 60_000_000));
            let (sender, kept) = (sender.clone(), Arc::clone(&lease));
            rig.store.fetch(&lease, 1, class, None, move |loan| {
                drop(kept);
                sender.send(loan).unwrap();
            });
        }
        drop(staged);
        for _ in 0..2 {
            let loan = ends.recv_timeout(Duration::from_secs(30)).unwrap();
            assert!(rig.bytes_of(&loan.unwrap()) == truth(1));
        }
        let by_class: Vec<_> = done().iter().zip(before).map(|(now, before)| now - before).collect();
        assert_eq!(by_class, [transfers, 0, 0, 0], "it comes once, as urgently as the request is");
    }
}

#[test]
fn a_chunk_on_disk_is_lent_although_somebody_stores_it_anew() {
    let (log, _folder) = log_with(1, SsdOptions::default());
    let rig = Rig::with_ssd(&log);
    let lease = rig.store.lease(TENANT, &[id(0)], 60_000_000);
    // One that computed it and is about to copy it there.
    let shape = ChunkShape::new([LAYER_BYTES as u64; LAYERS]).unwrap();
    let slot = rig.store.reserve(TENANT, id(0), None, &shape).unwrap().unwrap();
    let (sender, loans) = channel();
    rig.store.fetch(&lease, 0, Class::Demand, None, move |loan| sender.send(loan).unwrap());
    let loan = loans.recv_timeout(Duration::from_secs(30)).unwrap().unwrap();
    assert!(rig.bytes_of(&loan) == truth(0));
    assert_ne!(slot.offset_bytes(), loan.offset_bytes(), "it may still write its slot");
    let checksums = slot.checksums();
    assert_eq!(slot.commit(&checksums), Err(NotCommitted::Deleted));
    assert!(loan.check() && rig.store.locate(TENANT, &[id(0)]) == (1, 0));
}

#[test]
fn writes_to_disk_make_way_for_chunks_that_are_slow_to_come_to_be_lent() {
    let (log, _folder) = log_with(4, SsdOptions::default());
    // Each read is too slow, and judged at the next one.
    let mut write_back = write_back();
    (write_back.pacer.read_goal_us, write_back.pacer.read_goal_bytes_per_s) = (0, u64::MAX);
    write_back.pacer.epoch_us = 1;
    let rig = Rig::with(&log, SsdOptions::default(), &write_back).0;
    let ids: Vec<ChunkId> = (0..4).map(id).collect();
    let lease = rig.store.lease(TENANT, &ids, 60_000_000);
    let (sender, loans) = channel();
    for chunk in 0..4 {
        let sender = sender.clone();
        rig.store.fetch(&lease, chunk, Class::Demand, None, move |loan| sender.send(loan).unwrap());
        loans.recv_timeout(Duration::from_secs(30)).unwrap().unwrap();
    }
    assert_eq!(rig.store.disk_stat().unwrap().write_back.window, 1, "half of 8 for each of three");
}

#[test]
fn others_are_told_what_is_here_and_what_is_not_any_more() {
    let (log, _folder) = log_with(1, SsdOptions::default());
    let rig = Rig::with_ssd(&log);
    rig.put(4);
    let told: Arc<Mutex<HashSet<ChunkId>>> = Arc::default();
    let kept = Arc::clone(&told);
    let listener = move |changed: Changed<'_>| {
        let mut kept = kept.lock().unwrap();
        match changed {
            Changed::All(all) => *kept = all.iter().copied().collect(),
            Changed::Some { added, removed } => {
                kept.extend(added);
                kept.retain(|id| !removed.contains(id));
            }
        }
    };
    rig.store.on_change(listener).unwrap();
    let knows =
        |numbers: &[usize]| *told.lock().unwrap() == numbers.iter().map(|number| id(*number)).collect();
    eventually("what was there is told", || knows(&[0, 4]));
    rig.put(1);
    eventually("what came is told", || knows(&[0, 1, 4]));
    rig.store.flush().unwrap();
    assert_eq!(rig.store.delete(TENANT, &[id(0), id(4)]), 2);
    eventually("what went is told", || knows(&[1]));
}

#[test]
fn what_goes_is_told_when_it_is_in_neither_tier_and_until_nobody_listens() {
    let folder = tempfile::tempdir().unwrap();
    let rig = Rig::with_ssd(&folder.path().join("log"));
    let listen = |last: usize| {
        let told: Arc<Mutex<HashSet<ChunkId>>> = Arc::default();
        let kept = Arc::clone(&told);
        let listener = move |left: Left<'_>| {
            let Left::These(ids) = left else { panic!("few have gone") };
            kept.lock().unwrap().extend(ids);
            if ids.contains(&id(last)) { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        };
        rig.store.on_leave(listener).unwrap();
        move |numbers: &[usize]| *told.lock().unwrap() == numbers.iter().map(|number| id(*number)).collect()
    };
    let (knows, other_knows) = (listen(2), listen(254));
    // More than memory has room for, none below another.
    for number in (0..240).rev() {
        rig.put(number);
        if number % 16 == 0 {
            rig.store.flush().unwrap();
        }
    }
    let place = |number: &usize| rig.store.locate(TENANT, &[id(*number)]);
    let evicted = (3..240).find(|number| place(number) == (0, 1)).expect("on disk alone");
    let in_both = (3..240).find(|number| place(number) == (1, 0)).expect("in memory, and on disk");
    assert_eq!(rig.store.delete(TENANT, &[id(evicted), id(in_both)]), 2);
    eventually("what went from disk, and from both, is told", || knows(&[evicted, in_both]));
    assert_eq!(rig.store.delete(TENANT, &[id(2)]), 1);
    eventually("the last one is told", || knows(&[evicted, in_both, 2]));
    assert_eq!(rig.store.delete(TENANT, &[id(1)]), 1);
    eventually("the other one hears of more", || other_knows(&[evicted, in_both, 2, 1]));
    assert!(knows(&[evicted, in_both, 2]), "nobody listens any more");
}

#[test]
fn slots_side_by_side_that_one_lost_operation_fills_are_nobodys_until_it_is_quiet() {
    const BYTES: u64 = 8192;
    let shape = ChunkShape::new([BYTES]).unwrap();
    let rig = Rig::in_memory(1 << 20);
    let slots = [0, 1].map(|number| rig.store.reserve(TENANT, id(number), None, &shape).unwrap().unwrap());
    let begin = slots[0].offset_bytes();
    assert_eq!(slots[1].offset_bytes(), begin + BYTES);
    // One transfer filled both: their bytes became one span.
    let quarantined = vec![Span::new(rig.store.arena_region(), begin, 2 * BYTES)];
    let failure = Failure { reason: Reason::Closed, unmoved: Vec::new(), moved_bytes: 0, quarantined };
    let end = End::Failed(failure);
    slots.into_iter().for_each(|slot| slot.abandon(&end));
    assert_eq!(rig.store.stat().arena.quarantined_bytes, 2 * BYTES);

    let mut config = TierConfig::new(1 << 20);
    config.slab_bytes = 64 << 10;
    let mut tier = MemoryTier::new(config).unwrap();
    let writes = [0, 1].map(|number| match tier.begin_write(0, TENANT, &id(number), None, &shape) {
        Ok(Begun::Write(write)) => write,
        other => panic!("{other:?}"),
    });
    let begin = writes[0].offset_bytes();
    writes.into_iter().for_each(|write| tier.abort(0, write, BYTES));
    assert_eq!(tier.stat().arena.quarantined_bytes, 2 * BYTES);
    tier.quiet(0, begin, 2 * BYTES);
    assert_eq!(tier.stat().arena.quarantined_bytes, 0);
}

#[test]
fn a_store_is_closed_although_others_go_on_storing() {
    let directory = tempfile::tempdir().unwrap();
    let rig = Rig::with_ssd(&directory.path().join("log"));
    let (closed, until) = (AtomicBool::new(false), Instant::now() + Duration::from_secs(10));
    let goes_on = || !closed.load(Ordering::Relaxed) && Instant::now() < until;
    std::thread::scope(|scope| {
        for storer in 0..2u64 {
            let (store, goes_on) = (&rig.store, &goes_on);
            scope.spawn(move || {
                let shape = ChunkShape::new([4096]).unwrap();
                for number in (storer << 32..).take_while(|_| goes_on()) {
                    let mut name = [9; 32];
                    name[..8].copy_from_slice(&number.to_le_bytes());
                    // There may be no room for the moment.
                    if let Ok(Some(slot)) = store.reserve(TENANT, ChunkId::from_bytes(name), None, &shape) {
                        let checksums = slot.checksums();
                        slot.commit(&checksums).unwrap();
                    }
                }
            });
        }
        std::thread::sleep(Duration::from_millis(200));
        rig.store.close().unwrap();
        assert!(goes_on(), "only when the others had stopped");
        closed.store(true, Ordering::Relaxed);
    });
}
