//! The order in which chunks go, case by case. That nothing is lost or shared on the way is for the
//! model test.
#![allow(clippy::unwrap_used)]

use forebay_kv::ChunkId;
use forebay_store::{
    Begun, ChunkShape, LeaseId, MemoryTier, ReadEnd, Refused, SLOT_ALIGN_BYTES as PAGE, TenantId, TierConfig,
};

const TENANT: TenantId = TenantId(0);
const TTL_US: u64 = 1000;

fn tier(slabs: u64, slab_pages: u64) -> MemoryTier {
    let mut config = TierConfig::new(slabs * slab_pages * PAGE);
    config.slab_bytes = slab_pages * PAGE;
    MemoryTier::new(config).unwrap()
}

fn id(number: u8) -> ChunkId {
    ChunkId::from_bytes([number; 32])
}

fn store_sized(
    tier: &mut MemoryTier,
    tenant: TenantId,
    number: u8,
    parent: Option<u8>,
    pages: u64,
) -> Result<(), Refused> {
    let shape = ChunkShape::new([pages * PAGE]).unwrap();
    match tier.begin_write(0, tenant, &id(number), parent.map(id).as_ref(), &shape)? {
        Begun::Write(write) => tier.commit(0, write, &[0]).unwrap(),
        Begun::AlreadyHere => {}
    }
    Ok(())
}

fn store(tier: &mut MemoryTier, number: u8, parent: Option<u8>) {
    store_sized(tier, TENANT, number, parent, 1).unwrap();
}

/// Leases a prefix and releases it: a use.
fn touch(tier: &mut MemoryTier, prefix: &[u8]) {
    let ids: Vec<ChunkId> = prefix.iter().copied().map(id).collect();
    let (lease, chunks) = tier.lease(0, TENANT, &ids, TTL_US).unwrap();
    assert_eq!(chunks, prefix.len());
    assert!(tier.release(0, lease));
}

fn here<const N: usize>(tier: &MemoryTier, numbers: [u8; N]) -> [bool; N] {
    numbers.map(|number| tier.contains(&id(number)))
}

/// Keeps a chunk from being evicted.
fn hold(tier: &mut MemoryTier, number: u8) -> LeaseId {
    tier.lease(0, TENANT, &[id(number)], TTL_US).unwrap().0
}

#[test]
fn the_chunk_leased_longest_ago_goes_first_and_looking_does_not_count() {
    let mut tier = tier(1, 3);
    (1..4).for_each(|number| store(&mut tier, number, None));
    touch(&mut tier, &[1]);
    assert_eq!(tier.lookup(TENANT, &[id(2)]), 1);
    store(&mut tier, 4, None);
    assert_eq!(here(&tier, [1, 2, 3, 4]), [true, false, true, true]);
    store(&mut tier, 5, None);
    assert_eq!(here(&tier, [1, 3, 4, 5]), [true, false, true, true]);
}

#[test]
fn a_prefix_that_a_request_will_need_is_used_before_it_is_leased() {
    let mut tier = tier(1, 4);
    store(&mut tier, 1, None);
    store(&mut tier, 2, Some(1));
    store(&mut tier, 3, None);
    store(&mut tier, 4, None);
    // The third chunk of the prompt is nowhere yet; nobody else's use counts.
    tier.used(TENANT, &[id(1), id(2), id(9)]);
    tier.used(TenantId(1), &[id(3)]);
    store(&mut tier, 5, None);
    store(&mut tier, 6, None);
    assert_eq!(here(&tier, [1, 2, 3, 4, 5, 6]), [true, true, false, false, true, true]);
}

#[test]
fn a_chunk_that_needs_a_row_never_evicts_its_own_parent() {
    let mut config = TierConfig::new(4 * PAGE);
    (config.slab_bytes, config.max_chunks) = (4 * PAGE, 2);
    let mut tier = MemoryTier::new(config).unwrap();
    store(&mut tier, 1, None);
    store(&mut tier, 2, None);
    store(&mut tier, 3, Some(1));
    assert_eq!(here(&tier, [1, 2, 3]), [true, false, true]);
    assert_eq!(store_sized(&mut tier, TENANT, 4, Some(3), 1), Err(Refused::IndexFull { limit: 2 }));
    assert_eq!(here(&tier, [1, 3]), [true, true]);
}

#[test]
fn storing_a_chunk_again_is_a_use() {
    let mut tier = tier(1, 2);
    store(&mut tier, 1, None);
    store(&mut tier, 2, None);
    store(&mut tier, 1, None);
    store(&mut tier, 3, None);
    assert_eq!(here(&tier, [1, 2, 3]), [true, false, true]);
}

#[test]
fn a_sequence_goes_from_its_end() {
    let mut tier = tier(1, 4);
    store(&mut tier, 1, None);
    store(&mut tier, 2, Some(1));
    store(&mut tier, 3, Some(2));
    store(&mut tier, 4, None);
    for (new, left) in
        [(5, [true, true, false, true]), (6, [true, false, false, true]), (7, [false, false, false, true])]
    {
        store(&mut tier, new, None);
        assert_eq!(here(&tier, [1, 2, 3, 4]), left);
    }
}

#[test]
fn a_lease_of_a_sequence_keeps_all_of_it_warm() {
    let mut tier = tier(1, 4);
    store(&mut tier, 1, None);
    store(&mut tier, 2, Some(1));
    store(&mut tier, 3, Some(2));
    store(&mut tier, 4, None);
    touch(&mut tier, &[1, 2, 3]);
    store(&mut tier, 5, None);
    assert_eq!(here(&tier, [1, 2, 3, 4, 5]), [true, true, true, false, true]);
}

#[test]
fn a_sequence_that_came_in_parts_goes_from_its_end_too() {
    let whole = [1, 2, 3, 4, 5];
    let used = |tier: &mut MemoryTier| tier.used(TENANT, &whole.map(id));
    let leased = |tier: &mut MemoryTier| touch(tier, &whole);
    for (how, user) in [("used", &used as &dyn Fn(&mut MemoryTier)), ("leased", &leased)] {
        let mut tier = tier(1, 6);
        // Each part was brought here by a lease that began with it, the last one after something
        // else.
        for (number, parent) in [(1, None), (2, Some(1)), (3, None), (9, None), (4, None), (5, Some(4))] {
            store(&mut tier, number, parent);
        }
        user(&mut tier);
        for (new, left) in (10..).zip((0..=5).rev()) {
            store(&mut tier, new, None);
            assert_eq!(here(&tier, whole), whole.map(|number| number <= left), "{how}, {left} are left");
        }
    }
}

#[test]
fn a_parent_used_by_itself_outlives_chunks_used_before_that() {
    let mut tier = tier(1, 3);
    store(&mut tier, 1, None);
    store(&mut tier, 2, Some(1));
    store(&mut tier, 3, None);
    touch(&mut tier, &[1]);
    store(&mut tier, 4, None);
    assert_eq!(here(&tier, [1, 2, 3, 4]), [true, false, true, true], "its child is the coldest");
    store(&mut tier, 5, None);
    assert_eq!(
        here(&tier, [1, 3, 4, 5]),
        [true, false, true, true],
        "the parent does not inherit a colder place"
    );
}

#[test]
fn what_is_leased_or_below_such_a_chunk_stays() {
    let mut tier = tier(1, 3);
    store(&mut tier, 1, None);
    store(&mut tier, 2, Some(1));
    store(&mut tier, 3, None);
    let (lease, _) = tier.lease(0, TENANT, &[id(1), id(2)], TTL_US).unwrap();
    let other = hold(&mut tier, 3);
    assert!(matches!(store_sized(&mut tier, TENANT, 4, None, 1), Err(Refused::Full { .. })));
    tier.release(0, other);
    store(&mut tier, 4, None);
    assert_eq!(here(&tier, [1, 2, 3, 4]), [true, true, false, true]);
    tier.release(0, lease);
    store(&mut tier, 5, None);
    store(&mut tier, 6, None);
    assert_eq!(here(&tier, [1, 2, 4, 5, 6]), [true, false, false, true, true]);
}

#[test]
fn a_lease_that_expired_holds_nothing() {
    let mut tier = tier(1, 1);
    store(&mut tier, 1, None);
    let (lease, _) = tier.lease(0, TENANT, &[id(1)], TTL_US).unwrap();
    let shape = ChunkShape::new([PAGE]).unwrap();
    assert!(tier.begin_write(TTL_US - 1, TENANT, &id(2), None, &shape).is_err());
    assert!(matches!(tier.begin_write(TTL_US, TENANT, &id(2), None, &shape), Ok(Begun::Write(_))));
    assert!(!tier.release(0, lease), "a clock that steps back revives nothing");
}

#[test]
fn a_tenant_at_its_quota_evicts_its_own_coldest() {
    let mut config = TierConfig::new(8 * PAGE);
    config.slab_bytes = 8 * PAGE;
    config.quotas = vec![(TenantId(1), 2 * PAGE)];
    let mut tier = MemoryTier::new(config).unwrap();
    store(&mut tier, 1, None);
    for number in 10..13 {
        store_sized(&mut tier, TenantId(1), number, None, 1).unwrap();
    }
    assert_eq!(here(&tier, [1, 10, 11, 12]), [true, false, true, true]);
    let refused = store_sized(&mut tier, TenantId(1), 13, None, 3).unwrap_err();
    assert!(
        matches!(refused, Refused::Quota { needed_bytes, quota_bytes, .. } if needed_bytes > quota_bytes)
    );
}

#[test]
fn a_larger_chunk_empties_one_slab_and_not_the_arena() {
    let mut tier = tier(3, 4);
    (0..12).for_each(|number| store(&mut tier, number, None));
    // The coldest chunk is in the second slab; the others of that slab are warm.
    [0, 1, 2, 3, 5, 6, 7, 8, 9, 10, 11].into_iter().for_each(|number| touch(&mut tier, &[number]));
    store_sized(&mut tier, TENANT, 20, None, 2).unwrap();
    assert_eq!(here(&tier, [4, 5, 6, 7]), [false; 4]);
    assert_eq!(here(&tier, [0, 1, 2, 3, 8, 9, 10, 11, 20]), [true; 9]);
    assert_eq!(tier.stat().evicted, 4);
}

#[test]
fn a_slab_with_a_held_chunk_is_not_emptied() {
    let mut tier = tier(2, 2);
    (0..4).for_each(|number| store(&mut tier, number, None));
    hold(&mut tier, 1);
    store_sized(&mut tier, TENANT, 20, None, 2).unwrap();
    assert_eq!(here(&tier, [1, 2, 3, 20]), [true, false, false, true]);
}

#[test]
fn a_chunk_of_another_length_that_gets_no_slot_evicts_nothing() {
    let mut tier = tier(4, 4);
    (0..16).for_each(|number| store(&mut tier, number, None));
    // One chunk of each slab, so that none can go whole.
    let (lease, _) = tier.lease(0, TENANT, &[id(1)], TTL_US).unwrap();
    for number in [5, 9, 13] {
        hold(&mut tier, number);
    }
    assert!(matches!(store_sized(&mut tier, TENANT, 20, None, 2), Err(Refused::Full { .. })));
    assert_eq!((tier.stat().chunks, tier.stat().evicted), (16, 0));
    // What was passed over is where it was in the order.
    store(&mut tier, 21, None);
    store(&mut tier, 22, None);
    assert_eq!(here(&tier, [0, 1, 2, 3, 21, 22]), [false, true, false, true, true, true]);
    tier.release(0, lease);
    store_sized(&mut tier, TENANT, 20, None, 2).unwrap();
    assert_eq!(tier.stat().evicted, 2 + 4);
}

#[test]
fn a_chunk_of_another_length_takes_the_one_slab_that_can_go_whole() {
    let mut tier = tier(3, 4);
    (0..12).for_each(|number| store(&mut tier, number, None));
    for number in [1, 5] {
        hold(&mut tier, number);
    }
    store_sized(&mut tier, TENANT, 20, None, 2).unwrap();
    assert_eq!(here(&tier, [8, 9, 10, 11, 20]), [false, false, false, false, true]);
    assert_eq!(here(&tier, [0, 1, 2, 3, 4, 5, 6, 7]), [true; 8]);
}

#[test]
fn a_chunk_of_another_length_takes_a_slot_of_its_own_length_when_no_slab_can_go() {
    let mut tier = tier(2, 4);
    (0..4).for_each(|number| store(&mut tier, number, None));
    (20..22).for_each(|number| store_sized(&mut tier, TENANT, number, None, 2).unwrap());
    hold(&mut tier, 3);
    store_sized(&mut tier, TENANT, 22, None, 2).unwrap();
    assert_eq!(here(&tier, [0, 1, 2, 3, 20, 21, 22]), [true, true, true, true, false, true, true]);
}

#[test]
fn a_slab_that_an_operation_keeps_is_not_emptied_for_nothing() {
    let mut tier = tier(2, 3);
    (0..6).for_each(|number| store(&mut tier, number, None));
    let (lease, _) = tier.lease(0, TENANT, &[id(1)], TTL_US).unwrap();
    let read = tier.begin_read(0, lease, 0).unwrap();
    assert_eq!(tier.delete(TENANT, &[id(1)]), 1);
    touch(&mut tier, &[2]);
    store_sized(&mut tier, TENANT, 20, None, 3).unwrap();
    assert_eq!(here(&tier, [0, 2, 3, 4, 5, 20]), [true, true, false, false, false, true]);
    tier.end_read(0, read, ReadEnd::Done);
}

#[test]
fn what_continues_a_chunk_goes_with_its_slab() {
    let mut tier = tier(2, 2);
    store(&mut tier, 0, None);
    store(&mut tier, 1, None);
    store(&mut tier, 2, Some(1));
    store(&mut tier, 3, None);
    touch(&mut tier, &[1, 2]);
    store_sized(&mut tier, TENANT, 20, None, 2).unwrap();
    assert_eq!(here(&tier, [0, 1, 2, 3, 20]), [false, false, false, true, true]);
}

#[test]
fn a_slab_goes_whole_although_all_that_is_in_it_is_continued_elsewhere() {
    let mut tier = tier(2, 3);
    (0..4).for_each(|number: u8| store(&mut tier, number, number.checked_sub(1)));
    (4..6).for_each(|number| store(&mut tier, number, None));
    // The slab of the sequence's end has to stay.
    hold(&mut tier, 4);
    store_sized(&mut tier, TENANT, 20, None, 3).unwrap();
    assert_eq!(here(&tier, [0, 1, 2, 3, 4, 5, 20]), [false, false, false, false, true, true, true]);
}

#[test]
fn a_full_index_evicts_like_full_memory() {
    let mut config = TierConfig::new(8 * PAGE);
    config.slab_bytes = 8 * PAGE;
    config.max_chunks = 2;
    let mut tier = MemoryTier::new(config).unwrap();
    (1..4).for_each(|number| store(&mut tier, number, None));
    assert_eq!(here(&tier, [1, 2, 3]), [false, true, true]);
    hold(&mut tier, 2);
    hold(&mut tier, 3);
    assert_eq!(store_sized(&mut tier, TENANT, 4, None, 1), Err(Refused::IndexFull { limit: 2 }));
}
