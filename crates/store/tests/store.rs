//! The store through a real mover and host link, whole and faulty: what its users get.
#![allow(clippy::unwrap_used)]

mod faulty;

use faulty::{Fault, Faulty};
use forebay_kv::ChunkId;
use forebay_store::{
    Absence, Faults, Lease, NotLoaded, NotStored, NotVerified, Refused, SLOT_ALIGN_BYTES, Store, StoreEnd,
    TenantId, TierConfig, Unreadable,
};
use forebay_transfer::{
    Class, End, HostBuffer, Limits, LinkSpec, MoverHandle, MoverThread, Pages, PathSpec, Place, Reason,
    RegionId, Span,
};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;
use testkit::{ended, eventually};

const HOST: Place = Place::Host(0);
const DEVICE: Place = Place::Device(0);
const TENANT: TenantId = TenantId(0);
const LAYERS: usize = 3;
/// Not a multiple of anything.
const LAYER_BYTES: u64 = 70_001;
const CHUNK_BYTES: u64 = LAYERS as u64 * LAYER_BYTES;
const CHUNKS: usize = 4;
const MINUTE_US: u64 = 60_000_000;

/// A store of `slots` chunks, and an emulated device with room for [`CHUNKS`] chunks to store from
/// and as many to load to.
struct Rig {
    store: Store,
    faulty: Faulty,
    device: Arc<HostBuffer>,
    region: RegionId,
    handle: MoverHandle,
    _mover: MoverThread,
}

impl Rig {
    fn new(slots: u64) -> Rig {
        Rig::with_limit(slots, 30_000_000)
    }

    /// With a link that is given up after so long.
    fn with_limit(slots: u64, op_timeout_us: u64) -> Rig {
        let slot_bytes = CHUNK_BYTES.next_multiple_of(SLOT_ALIGN_BYTES);
        let mut config = TierConfig::new(slots * slot_bytes);
        config.slab_bytes = slot_bytes;
        let mover = MoverThread::spawn(Limits { attempts: 1, ..Limits::default() }).unwrap();
        let handle = mover.handle();
        let faulty = Faulty::new();
        let spec = LinkSpec { op_timeout_us, ..LinkSpec::new("host", 4, 64 << 20) };
        let link = handle.add_link(spec, faulty.link()).unwrap();
        handle.add_path(PathSpec::direct(HOST, DEVICE, link)).unwrap().unwrap();
        handle.add_path(PathSpec::direct(DEVICE, HOST, link)).unwrap().unwrap();
        let device = Arc::new(HostBuffer::new(2 * CHUNKS * CHUNK_BYTES as usize));
        let region = handle.register(DEVICE, device.clone()).unwrap();
        let store = Store::open(&handle, HOST, Pages::Base, config).unwrap();
        Rig { store, faulty, device, region, handle, _mover: mover }
    }

    /// Fills the source of chunk `number` and returns its layers, each as three spans in another
    /// order than they lie.
    fn source(&self, number: usize) -> Vec<Vec<Span>> {
        let start = number as u64 * CHUNK_BYTES;
        assert!(self.device.write(start as usize, &truth(number)));
        self.spans(start)
    }

    fn spans(&self, start: u64) -> Vec<Vec<Span>> {
        let cuts = [0, 40_000, 65_000, LAYER_BYTES];
        let span = |layer: u64, part: usize| {
            Span::new(self.region, start + layer * LAYER_BYTES + cuts[part], cuts[part + 1] - cuts[part])
        };
        (0..LAYERS as u64).map(|layer| [1, 2, 0].map(|part| span(layer, part)).to_vec()).collect()
    }

    fn begin_store(&self, number: usize) -> Result<Receiver<StoreEnd>, NotStored> {
        let (sender, receiver) = channel();
        let parent = number.checked_sub(1).map(id);
        let on_end = move |end| sender.send(end).unwrap();
        self.store.store_chunk(TENANT, id(number), parent, &self.source(number), Class::WriteBack, on_end)?;
        Ok(receiver)
    }

    fn store(&self, number: usize) -> StoreEnd {
        ended(&self.begin_store(number).unwrap())
    }

    fn lease(&self) -> Lease {
        self.store.lease(TENANT, &ids(), MINUTE_US)
    }

    fn begin_load(&self, lease: &Lease, number: usize) -> Result<Receiver<End>, NotLoaded> {
        let (sender, receiver) = channel();
        let targets = self.spans((CHUNKS + number) as u64 * CHUNK_BYTES);
        let on_end = move |end| sender.send(end).unwrap();
        self.store.load_chunk(lease, number, &targets, Class::Demand, None, on_end)?;
        Ok(receiver)
    }

    fn load(&self, lease: &Lease, number: usize) -> End {
        ended(&self.begin_load(lease, number).unwrap())
    }

    fn loaded(&self, number: usize) -> Vec<u8> {
        let mut bytes = vec![0; CHUNK_BYTES as usize];
        assert!(self.device.read((CHUNKS + number) * CHUNK_BYTES as usize, &mut bytes));
        bytes
    }

    /// Verifies all layers of what was loaded, in pieces in the order of the target's spans.
    fn verify(&self, lease: &Lease, number: usize) -> Result<(), NotVerified> {
        let bytes = self.loaded(number);
        for (layer, bytes) in bytes.chunks(LAYER_BYTES as usize).enumerate() {
            let pieces = [&bytes[40_000..65_000], &bytes[65_000..], &bytes[..40_000]];
            self.store.verify(lease, number, layer, &pieces)?;
        }
        Ok(())
    }
}

fn id(number: usize) -> ChunkId {
    ChunkId::from_bytes([number as u8 + 1; 32])
}

fn ids() -> Vec<ChunkId> {
    (0..CHUNKS).map(id).collect()
}

fn truth(number: usize) -> Vec<u8> {
    let word = |at: usize| (at as u32 + 1).wrapping_mul(2_654_435_761 + number as u32).to_le_bytes()[2];
    (0..CHUNK_BYTES as usize).map(word).collect()
}

#[test]
fn what_is_stored_is_what_is_loaded() {
    let rig = Rig::new(4);
    for number in 0..CHUNKS {
        assert_eq!(rig.store(number), StoreEnd::Stored { bytes: CHUNK_BYTES });
    }
    assert_eq!(rig.store.lookup(TENANT, &ids()), CHUNKS);
    let lease = rig.lease();
    for number in 0..lease.len() {
        assert_eq!(rig.load(&lease, number), End::Done { bytes: CHUNK_BYTES });
        assert_eq!(rig.verify(&lease, number), Ok(()));
        assert!(rig.loaded(number) == truth(number));
    }
}

#[test]
fn single_layers_are_loaded_where_they_belong() {
    let rig = Rig::new(1);
    rig.store(0);
    let (lease, (sender, receiver)) = (rig.lease(), channel());
    let targets = &rig.spans(CHUNKS as u64 * CHUNK_BYTES)[1..];
    rig.store
        .load_layers(&lease, 0, 1..3, targets, Class::Demand, None, move |end| sender.send(end).unwrap())
        .unwrap();
    assert_eq!(ended(&receiver), End::Done { bytes: 2 * LAYER_BYTES });
    let (loaded, layer) = (rig.loaded(0), LAYER_BYTES as usize);
    assert!(loaded[layer..] == truth(0)[layer..]);
    assert!(loaded[..layer].iter().all(|byte| *byte == 0));
}

#[test]
fn wrong_targets_are_refused_and_leave_no_trace() {
    let rig = Rig::new(1);
    rig.store(0);
    let lease = rig.lease();
    let targets = rig.spans(CHUNKS as u64 * CHUNK_BYTES);
    let load = |layers, targets: &[Vec<Span>]| {
        rig.store.load_layers(&lease, 0, layers, targets, Class::Demand, None, |_| {}).unwrap_err()
    };
    assert!(matches!(load(0..4, &targets), NotLoaded::Layers { .. }));
    assert!(matches!(load(2..4, &targets[..2]), NotLoaded::Layers { .. }));
    assert!(matches!(load(0..0, &[]), NotLoaded::Layers { .. }));
    assert!(matches!(load(0..1, &[vec![targets[0][0]]]), NotLoaded::Length { layer: 0, .. }));
    assert!(matches!(
        rig.begin_load(&lease, 1).unwrap_err(),
        NotLoaded::Unreadable(Unreadable::Outside { chunk: 1, .. })
    ));
    assert!(matches!(rig.store.verify(&lease, 0, 0, &[b"short"]), Err(NotVerified::Length { .. })));
    drop(lease);
    assert_eq!(rig.store.delete(TENANT, &[id(0)]), 1);
    assert_eq!(rig.store.stat().arena.used_bytes, 0);
    assert_eq!(rig.store.stat().faults, Faults::default());
}

#[test]
fn storing_a_chunk_that_is_here_ends_at_once_and_copies_nothing() {
    let rig = Rig::new(2);
    rig.store(0);
    let copied = rig.handle.telemetry().unwrap().links[0].bytes;
    assert_eq!(rig.begin_store(0).unwrap().try_recv(), Ok(StoreEnd::AlreadyHere));
    assert_eq!(rig.handle.telemetry().unwrap().links[0].bytes, copied);
}

#[test]
fn an_orphan_is_refused_with_the_reason() {
    let rig = Rig::new(2);
    assert_eq!(rig.begin_store(1).unwrap_err(), NotStored::Refused(Refused::ParentMissing));
    assert_eq!(rig.store.stat().refusals.parent_missing, 1);
}

#[test]
fn what_is_not_here_has_its_reason_and_what_is_here_has_none() {
    let rig = Rig::new(2);
    assert_eq!(rig.store(0), StoreEnd::Stored { bytes: CHUNK_BYTES });
    assert_eq!(rig.store(1), StoreEnd::Stored { bytes: CHUNK_BYTES });
    let known = rig.store.whereabouts(&id(0));
    assert!(known.in_memory && known.is_continued && known.owner == Some(TENANT));
    let why = |number| rig.store.why_absent().from_memory.of(&id(number)).map(|noted| noted.why);
    assert_eq!((why(0), why(2)), (None, None));
    rig.store.delete(TENANT, &[id(1)]);
    assert!(rig.begin_store(3).is_err(), "its parent is not there");
    assert_eq!((why(1), why(3)), (Some(Absence::Deleted), Some(Absence::ParentMissing)));
    assert!(!rig.store.whereabouts(&id(0)).is_continued && rig.store.whereabouts(&id(9)).owner.is_none());
    // Two others need the room of both.
    for number in 10..12 {
        let (sender, end) = channel();
        let on_end = move |end| sender.send(end).unwrap();
        let source = rig.source(0);
        rig.store.store_chunk(TENANT, id(number), None, &source, Class::WriteBack, on_end).unwrap();
        assert_eq!(ended(&end), StoreEnd::Stored { bytes: CHUNK_BYTES });
    }
    assert_eq!((why(0), why(10)), (Some(Absence::Evicted), None));
    assert_eq!(rig.store.why_absent().from_memory.since_s, None, "nothing is forgotten");
}

#[test]
fn a_chunk_is_invisible_until_its_last_layer_is_in() {
    let rig = Rig::new(2);
    rig.faulty.set(Fault::Hold);
    let end = rig.begin_store(0).unwrap();
    let child = rig.begin_store(1).unwrap();
    assert_eq!(rig.begin_store(0).unwrap_err(), NotStored::Refused(Refused::BeingWritten));
    assert_eq!((rig.store.lookup(TENANT, &ids()), rig.lease().len()), (0, 0));
    rig.faulty.set(Fault::None);
    assert_eq!(ended(&end), StoreEnd::Stored { bytes: CHUNK_BYTES });
    assert_eq!(ended(&child), StoreEnd::Stored { bytes: CHUNK_BYTES });
    assert_eq!(rig.store.lookup(TENANT, &ids()), 2);
}

#[test]
fn a_failed_store_is_never_a_hit_and_frees_its_slot() {
    let rig = Rig::new(1);
    rig.faulty.set(Fault::Fail);
    assert!(matches!(rig.store(0), StoreEnd::Failed(End::Failed(_))));
    let stat = rig.store.stat();
    assert_eq!((rig.store.lookup(TENANT, &ids()), stat.arena.used_bytes, stat.faults.writes), (0, 0, 1));
    rig.faulty.set(Fault::None);
    assert_eq!(rig.store(0), StoreEnd::Stored { bytes: CHUNK_BYTES });
}

#[test]
fn a_failed_load_leaves_the_chunk_readable() {
    let rig = Rig::new(1);
    rig.store(0);
    let lease = rig.lease();
    rig.faulty.set(Fault::Fail);
    assert!(matches!(rig.load(&lease, 0), End::Failed(_)));
    rig.faulty.set(Fault::None);
    assert_eq!(rig.load(&lease, 0), End::Done { bytes: CHUNK_BYTES });
    assert_eq!((rig.verify(&lease, 0), rig.store.stat().faults.reads), (Ok(()), 1));
}

/// One flipped bit, on the way in or on the way out.
fn flipped_bit(on_store: bool) -> (Rig, Lease) {
    let rig = Rig::new(2);
    let flip = |now| rig.faulty.set(if now { Fault::FlipBit } else { Fault::None });
    flip(on_store);
    assert_eq!(rig.store(0), StoreEnd::Stored { bytes: CHUNK_BYTES });
    flip(false);
    rig.store(1);
    let lease = rig.lease();
    assert_eq!(lease.len(), 2);
    flip(!on_store);
    assert_eq!(rig.load(&lease, 0), End::Done { bytes: CHUNK_BYTES });
    flip(false);
    assert!(rig.loaded(0) != truth(0), "the fault is real");
    (rig, lease)
}

#[test]
#[cfg(not(feature = "unverified"))]
fn a_flipped_bit_is_found_wherever_it_flipped_and_ends_the_chunk() {
    for on_store in [true, false] {
        let (rig, lease) = flipped_bit(on_store);
        assert!(matches!(rig.verify(&lease, 0), Err(NotVerified::Corrupt { chunk: 0, .. })));
        assert_eq!((rig.store.stat().faults.corrupt, rig.store.lookup(TENANT, &ids())), (1, 0));
        let why = rig.store.why_absent().from_memory.of(&id(0)).map(|noted| noted.why);
        assert_eq!(why, Some(Absence::Corrupt));
        assert_eq!(
            rig.begin_load(&lease, 0).unwrap_err(),
            NotLoaded::Unreadable(Unreadable::Gone { chunk: 0 })
        );
        assert_eq!(rig.store(0), StoreEnd::Stored { bytes: CHUNK_BYTES });
        assert_eq!(rig.store.lookup(TENANT, &ids()), 2, "its child is found again");
    }
}

#[test]
#[cfg(feature = "unverified")]
fn without_verification_a_flipped_bit_passes() {
    let (rig, lease) = flipped_bit(false);
    assert_eq!(rig.verify(&lease, 0), Ok(()));
}

#[test]
fn a_dead_lease_gives_neither_bytes_nor_checksums() {
    let rig = Rig::new(1);
    rig.store(0);
    let lease = rig.store.lease(TENANT, &ids(), 500_000);
    assert_eq!(lease.renew(1_000_000), Ok(()));
    rig.load(&lease, 0);
    std::thread::sleep(Duration::from_millis(1_100));
    let dead = Unreadable::DeadLease;
    assert_eq!(rig.begin_load(&lease, 0).unwrap_err(), NotLoaded::Unreadable(dead));
    assert_eq!(rig.verify(&lease, 0), Err(NotVerified::Unreadable(dead)));
    assert_eq!(lease.renew(MINUTE_US), Err(dead));
    assert_eq!((rig.store.stat().leases, rig.store.stat().leases_expired), (0, 1));
}

#[test]
fn a_dropped_lease_lets_its_chunks_go() {
    let rig = Rig::new(1);
    rig.store(0);
    let lease = rig.lease();
    let other =
        |rig: &Rig| rig.store.store_chunk(TENANT, id(9), None, &rig.source(3), Class::WriteBack, |_| {});
    assert!(matches!(other(&rig), Err(NotStored::Refused(Refused::Full { .. }))));
    drop(lease);
    assert_eq!(other(&rig), Ok(()));
    assert_eq!(rig.store.lookup(TENANT, &[id(0)]), 0);
}

#[test]
fn a_chunk_deleted_under_a_load_keeps_its_memory_until_the_load_has_ended() {
    let rig = Rig::new(1);
    rig.store(0);
    let lease = rig.lease();
    rig.faulty.set(Fault::Hold);
    let load = rig.begin_load(&lease, 0).unwrap();
    assert_eq!(rig.store.delete(TENANT, &[id(0)]), 1);
    drop(lease);
    assert!(rig.store.stat().arena.draining_bytes > 0);
    assert!(matches!(rig.begin_store(0), Err(NotStored::Refused(Refused::Full { .. }))));
    rig.faulty.set(Fault::None);
    assert_eq!(ended(&load), End::Done { bytes: CHUNK_BYTES });
    assert!(rig.loaded(0) == truth(0), "the load read the chunk, not its successor");
    assert_eq!(rig.store.stat().arena.draining_bytes, 0);
    assert_eq!(rig.store(0), StoreEnd::Stored { bytes: CHUNK_BYTES });
}

#[test]
fn a_chunk_deleted_while_it_is_stored_never_becomes_visible() {
    let rig = Rig::new(1);
    rig.faulty.set(Fault::Hold);
    let end = rig.begin_store(0).unwrap();
    assert_eq!(rig.store.delete(TENANT, &[id(0)]), 1);
    rig.faulty.set(Fault::None);
    assert_eq!(ended(&end), StoreEnd::Deleted);
    assert_eq!((rig.store.lookup(TENANT, &ids()), rig.store.stat().arena.used_bytes), (0, 0));
}

#[test]
fn memory_that_a_lost_write_may_touch_is_not_reused_until_it_is_quiet() {
    let rig = Rig::with_limit(1, 200_000);
    rig.faulty.set(Fault::Hold);
    let end = ended(&rig.begin_store(0).unwrap());
    let StoreEnd::Failed(End::Failed(failure)) = end else { panic!("{end:?}") };
    assert!(matches!(failure.reason, Reason::TimedOut { .. }));
    let stat = rig.store.stat();
    assert_eq!((stat.arena.quarantined_bytes, stat.arena.free_bytes), (stat.capacity_bytes, 0));
    assert!(matches!(rig.begin_store(0), Err(NotStored::Refused(Refused::Full { .. }))));
    rig.faulty.set(Fault::None);
    eventually("the lost write becomes quiet", || rig.store.stat().arena.quarantined_bytes == 0);
    assert_eq!(rig.store(0), StoreEnd::Stored { bytes: CHUNK_BYTES });
}

#[test]
fn spans_outside_of_their_region_fail_the_store_and_free_the_slot() {
    let rig = Rig::new(1);
    let layers = [vec![Span::new(rig.region, u64::MAX - 10, 100)]];
    let (sender, receiver) = channel();
    let on_end = move |end| sender.send(end).unwrap();
    rig.store.store_chunk(TENANT, id(0), None, &layers, Class::WriteBack, on_end).unwrap();
    assert!(matches!(ended(&receiver), StoreEnd::Failed(_)));
    assert_eq!(rig.store.stat().arena.used_bytes, 0);
    let huge = [vec![Span::new(rig.region, 0, u64::MAX), Span::new(rig.region, 0, u64::MAX)]];
    let refused = rig.store.store_chunk(TENANT, id(0), None, &huge, Class::WriteBack, |_| {});
    assert!(matches!(refused, Err(NotStored::Refused(Refused::TooLarge { .. }))));
}

/// Two threads store and load through a store with room for half of the chunks.
#[test]
fn under_eviction_every_verified_hit_has_the_right_bytes() {
    let rig = Rig::new(2);
    let hits: usize = std::thread::scope(|scope| {
        let work = |first: usize| {
            let rig = &rig;
            move || {
                let mut hits = 0;
                for round in 0..60 {
                    let number = first + round / 2 % 2;
                    let own = [ChunkId::from_bytes([100 + number as u8; 32])];
                    let lease = rig.store.lease(TENANT, &own, MINUTE_US);
                    if lease.is_empty() {
                        let (sender, receiver) = channel();
                        let source = rig.source(number);
                        let stored = rig.store.store_chunk(
                            TENANT,
                            own[0],
                            None,
                            &source,
                            Class::WriteBack,
                            move |end| {
                                sender.send(end).unwrap();
                            },
                        );
                        if stored.is_ok() {
                            ended(&receiver);
                        }
                        continue;
                    }
                    let targets = rig.spans((CHUNKS + number) as u64 * CHUNK_BYTES);
                    let (sender, receiver) = channel();
                    let on_end = move |end| sender.send(end).unwrap();
                    rig.store.load_chunk(&lease, 0, &targets, Class::Demand, None, on_end).unwrap();
                    assert_eq!(ended(&receiver), End::Done { bytes: CHUNK_BYTES });
                    assert!(rig.loaded(number) == truth(number));
                    hits += 1;
                }
                hits
            }
        };
        // The threads work on chunks of their own, so that sources and targets are not shared.
        let threads = [scope.spawn(work(0)), scope.spawn(work(2))];
        threads.into_iter().map(|thread| thread.join().unwrap()).sum()
    });
    assert!(hits > 0 && rig.store.stat().evicted > 0, "{hits} hits");
}
