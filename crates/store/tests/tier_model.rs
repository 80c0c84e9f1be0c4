//! The memory tier against a simple model: random stores, leases, reads, pins, deletions,
//! corruptions, lost operations and clock steps, by two tenants with chunks of two sizes, under
//! pressure on memory, quotas and the index.
//!
//! The model keeps for every byte page of the arena who wrote it last, so that a stale or shared
//! slot shows at once.

#![allow(clippy::unwrap_used)]

use forebay_kv::ChunkId;
use forebay_store::{
    Begun, ChunkShape, LeaseId, MemoryTier, Read, ReadEnd, Refused, SLOT_ALIGN_BYTES as PAGE,
};
use forebay_store::{PINNED_OF_QUOTA, TenantId, TierConfig, Unchanged, Unreadable, Write};
use proptest::prelude::*;
use std::collections::{HashMap, HashSet};

const CHUNKS: usize = 32;
const SLAB_PAGES: u64 = 4;
const SLABS: u64 = 5;
const QUOTA_PAGES: [u64; 2] = [11, 14];

/// Chunk `number` continues `number / 2 - 1` or, for the first two of each tenant, nothing: trees
/// with forks.
fn parent(number: usize) -> Option<usize> {
    let (tenant, place) = (number % 2, number / 2);
    (place >= 2).then(|| (place / 2 - 1) * 2 + tenant)
}

fn tenant(number: usize) -> TenantId {
    TenantId((number % 2) as u16)
}

fn id(number: usize) -> ChunkId {
    let mut bytes = [0; 32];
    bytes[0..8].copy_from_slice(&(number as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes());
    ChunkId::from_bytes(bytes)
}

/// Tenant 0 has chunks of one page and two layers, tenant 1 of two pages and one layer.
fn shape(number: usize) -> ChunkShape {
    match number % 2 {
        0 => ChunkShape::new([100, PAGE - 100]).unwrap(),
        _ => ChunkShape::new([PAGE + 1]).unwrap(),
    }
}

fn pages(number: usize) -> u64 {
    shape(number).bytes().div_ceil(PAGE)
}

/// From the first chunk of the sequence to `number`.
fn path(number: usize) -> Vec<usize> {
    let mut path: Vec<usize> = std::iter::successors(Some(number), |at| parent(*at)).collect();
    path.reverse();
    path
}

fn ids(numbers: &[usize]) -> Vec<ChunkId> {
    numbers.iter().map(|number| id(*number)).collect()
}

#[derive(Debug, Clone)]
enum Step {
    Store(usize),
    Commit(usize),
    Abort(usize, bool),
    Lease(usize, u64),
    Renew(usize, u64),
    Release(usize),
    BeginRead(usize, usize),
    EndRead(usize, bool),
    Corrupt(usize, usize),
    Pin(usize, u64),
    Unpin(usize),
    Delete(usize),
    Quiet,
    Clock(i64),
}

fn step() -> impl Strategy<Value = Step> {
    let chunk = 0..CHUNKS;
    let pick = 0usize..8;
    prop_oneof![
        12 => chunk.clone().prop_map(Step::Store),
        10 => pick.clone().prop_map(Step::Commit),
        1 => (pick.clone(), any::<bool>()).prop_map(|(at, lost)| Step::Abort(at, lost)),
        4 => (chunk.clone(), 0u64..200).prop_map(|(number, ttl)| Step::Lease(number, ttl)),
        1 => (pick.clone(), 0u64..200).prop_map(|(at, ttl)| Step::Renew(at, ttl)),
        3 => pick.clone().prop_map(Step::Release),
        4 => (pick.clone(), pick.clone()).prop_map(|(at, chunk)| Step::BeginRead(at, chunk)),
        4 => (pick.clone(), any::<bool>()).prop_map(|(at, lost)| Step::EndRead(at, lost)),
        1 => (pick.clone(), pick).prop_map(|(at, chunk)| Step::Corrupt(at, chunk)),
        2 => (chunk.clone(), 1u64..200).prop_map(|(number, ttl)| Step::Pin(number, ttl)),
        2 => chunk.clone().prop_map(Step::Unpin),
        1 => chunk.prop_map(Step::Delete),
        1 => Just(Step::Quiet),
        4 => (-50i64..100).prop_map(Step::Clock),
    ]
}

/// A version of a chunk's bytes: which chunk, and which of its writes.
type Stamp = (usize, u64);

struct Leased {
    id: LeaseId,
    versions: Vec<Stamp>,
    expires_us: u64,
}

struct Model {
    tier: MemoryTier,
    now_us: u64,
    /// The latest time the tier was told.
    seen_us: u64,
    writes_made: u64,
    /// Who wrote each page of the arena last.
    arena: HashMap<u64, Stamp>,
    /// The bytes that each visible chunk must have.
    visible: HashMap<usize, Stamp>,
    writing: Vec<(Write, Stamp, bool)>,
    reading: Vec<(Read, Stamp)>,
    leases: Vec<Leased>,
    /// When pins end.
    pinned: HashMap<usize, u64>,
    /// Chunks whose bytes went although others continue them.
    holes: HashSet<usize>,
    /// Lost operations: offset, bytes.
    lost: Vec<(u64, u64)>,
}

impl Model {
    fn new(max_chunks: u32) -> Model {
        let mut config = TierConfig::new(SLABS * SLAB_PAGES * PAGE);
        config.slab_bytes = SLAB_PAGES * PAGE;
        config.max_chunks = max_chunks;
        config.max_leases = 4;
        config.max_lease_us = 150;
        config.quotas =
            (0..2).map(|tenant| (TenantId(tenant), QUOTA_PAGES[usize::from(tenant)] * PAGE)).collect();
        Model {
            tier: MemoryTier::new(config).unwrap(),
            now_us: 1000,
            seen_us: 0,
            writes_made: 0,
            arena: HashMap::new(),
            visible: HashMap::new(),
            writing: Vec::new(),
            reading: Vec::new(),
            leases: Vec::new(),
            pinned: HashMap::new(),
            holes: HashSet::new(),
            lost: Vec::new(),
        }
    }

    /// The time to give to the tier, which ends leases and pins that are over.
    fn tell_time(&mut self) -> u64 {
        self.seen_us = self.seen_us.max(self.now_us);
        let seen_us = self.seen_us;
        self.leases.retain(|lease| lease.expires_us > seen_us);
        self.pinned.retain(|_, until_us| *until_us > seen_us);
        self.now_us
    }

    fn is_here(&self, number: usize) -> bool {
        self.visible.contains_key(&number)
    }

    fn is_writing(&self, number: usize) -> bool {
        self.writing.iter().any(|(_, stamp, doomed)| stamp.0 == number && !doomed)
    }

    fn is_held(&self, number: usize) -> bool {
        let version = self.visible.get(&number);
        let leased = self.leases.iter().flat_map(|lease| &lease.versions).any(|held| Some(held) == version);
        let read = self.reading.iter().any(|(_, held)| Some(held) == version);
        leased || read || self.pinned.contains_key(&number)
    }

    /// Whether something below the chunk has bytes or is getting them.
    fn has_descendants(&self, number: usize) -> bool {
        (0..CHUNKS).any(|other| {
            other != number
                && path(other).contains(&number)
                && (self.is_here(other) || self.is_writing(other))
        })
    }

    /// What could make room for `number`; its own parent could not.
    fn evictable_for(&self, number: usize) -> Vec<usize> {
        let may_go = |other: &usize| {
            parent(number) != Some(*other) && !self.is_held(*other) && !self.has_descendants(*other)
        };
        self.visible.keys().copied().filter(may_go).collect()
    }

    /// No chunk may go in whose slot this one would fit, and no slab may go whole.
    fn check_that_nothing_would_give_room(&self, number: usize) {
        let evictable = self.evictable_for(number);
        assert!(evictable.iter().all(|other| pages(*other) != pages(number)), "{evictable:?} could go");
        for slab in 0..SLABS {
            assert!(!self.could_go_whole(slab, number), "slab {slab} could go");
        }
    }

    /// Whether nobody needs the slab, or anything that continues what is in it, `number` included.
    fn could_go_whole(&self, slab: u64, number: usize) -> bool {
        let slab_pages = slab * SLAB_PAGES..(slab + 1) * SLAB_PAGES;
        let touched = |offset: u64| slab_pages.contains(&(offset / PAGE));
        let written = self.writing.iter().any(|(write, ..)| touched(write.offset_bytes()));
        let read = self.reading.iter().any(|(read, _)| touched(read.offset_bytes()));
        let lost = self.lost.iter().any(|(offset, _)| touched(*offset));
        let is_in_slab = |other: &usize| {
            let stamp = self.visible.get(other);
            stamp.is_some() && slab_pages.clone().any(|page| self.arena.get(&page) == stamp)
        };
        let goes = |other: &usize| path(*other).iter().any(is_in_slab);
        let stays = |other: usize| other == number || self.is_held(other) || self.is_writing(other);
        !written && !read && !lost && !(0..CHUNKS).filter(goes).any(stays)
    }

    fn take(&mut self, step: Step) {
        match step {
            Step::Store(number) => self.store(number),
            Step::Commit(at) if at < self.writing.len() => self.commit(at),
            Step::Abort(at, lost) if at < self.writing.len() => self.abort(at, lost),
            Step::Lease(number, ttl_us) => self.lease(number, ttl_us),
            Step::Renew(at, ttl_us) if at < self.leases.len() => self.renew(at, ttl_us),
            Step::Release(at) if at < self.leases.len() => {
                let lease = self.leases.remove(at);
                let now_us = self.tell_time();
                assert_eq!(self.tier.release(now_us, lease.id), lease.expires_us > self.seen_us);
                assert_eq!(self.tier.begin_read(now_us, lease.id, 0).unwrap_err(), Unreadable::DeadLease);
            }
            Step::BeginRead(at, chunk) if at < self.leases.len() => self.begin_read(at, chunk),
            Step::EndRead(at, lost) if at < self.reading.len() => self.end_read(at, lost),
            Step::Corrupt(at, chunk) if at < self.leases.len() => self.corrupt(at, chunk),
            Step::Pin(number, ttl_us) => self.pin(number, ttl_us),
            Step::Unpin(number) => self.unpin(number),
            Step::Delete(number) => self.delete(number),
            Step::Quiet => {
                if let Some((offset, bytes)) = self.lost.pop() {
                    self.tier.quiet(0, offset, bytes);
                }
            }
            Step::Clock(by_us) => self.now_us = self.now_us.saturating_add_signed(by_us),
            _ => {}
        }
    }

    fn pin(&mut self, number: usize, ttl_us: u64) {
        let now_us = self.tell_time();
        let until_us = self.seen_us + ttl_us;
        assert_eq!(self.tier.pin(now_us, TenantId(7), &id(number), ttl_us), Err(Unchanged::NotHere));
        match self.tier.pin(now_us, tenant(number), &id(number), ttl_us) {
            Ok(end_us) => {
                let line = path(number).into_iter().rev().filter(|above| self.visible.contains_key(above));
                let ends_sooner = |above: &usize| self.pinned.get(above).is_none_or(|end| *end < until_us);
                let line: Vec<usize> = line.take_while(ends_sooner).collect();
                self.pinned.extend(line.into_iter().map(|above| (above, until_us)));
                assert_eq!(self.pinned[&number], end_us);
            }
            Err(Unchanged::NotHere) => assert!(!self.is_here(number)),
            Err(Unchanged::NoRoom { needed_bytes, room_bytes }) => assert!(needed_bytes > room_bytes),
            Err(other) => panic!("{other}"),
        }
        for (tenant, quota_pages) in QUOTA_PAGES.iter().enumerate() {
            let own = self.pinned.keys().filter(|pinned| **pinned % 2 == tenant);
            let pages: u64 = own.map(|pinned| pages(*pinned)).sum();
            assert!(pages * PINNED_OF_QUOTA <= *quota_pages, "{pages} pages are pinned");
        }
    }

    fn unpin(&mut self, number: usize) {
        let now_us = self.tell_time();
        match self.tier.unpin(now_us, tenant(number), &id(number)) {
            Ok(()) => assert!(self.pinned.remove(&number).is_some()),
            Err(Unchanged::NotHere) => assert!(!self.is_here(number)),
            Err(Unchanged::Continued) => {
                assert!(self.pinned.keys().any(|below| parent(*below) == Some(number)));
            }
            Err(other) => assert!(other == Unchanged::NotPinned && !self.pinned.contains_key(&number)),
        }
    }

    /// Pins may give way where there is no other room, and then they are counted.
    fn notice_broken_pins(&mut self, broken_before: u64) {
        let (tier, now_us) = (&mut self.tier, self.now_us);
        let before = self.pinned.len();
        self.pinned.retain(|number, _| tier.pinned_until_us(now_us, tenant(*number), &id(*number)).is_some());
        assert_eq!((before - self.pinned.len()) as u64, self.tier.pins_broken() - broken_before);
    }

    fn store(&mut self, number: usize) {
        let before = self.tell_time();
        let broken = self.tier.pins_broken();
        let parent_id = parent(number).map(id);
        let begun =
            self.tier.begin_write(before, tenant(number), &id(number), parent_id.as_ref(), &shape(number));
        let parent_known = parent(number).is_none_or(|above| self.is_here(above) || self.is_writing(above));
        self.notice_broken_pins(broken);
        self.notice_evictions();
        match begun {
            Ok(Begun::AlreadyHere) => assert!(self.is_here(number)),
            Ok(Begun::Write(write)) => {
                assert!(parent_known && !self.is_here(number) && !self.is_writing(number));
                assert_eq!(write.offset_bytes() % PAGE, 0);
                self.writes_made += 1;
                let stamp = (number, self.writes_made);
                for page in 0..pages(number) {
                    self.overwrite(write.offset_bytes() / PAGE + page, stamp);
                }
                self.holes.remove(&number);
                self.writing.push((write, stamp, false));
            }
            Err(Refused::BeingWritten) => assert!(self.is_writing(number)),
            Err(Refused::ParentMissing) => {
                let above = parent(number).unwrap();
                assert!(!self.is_here(above) && !self.is_writing(above));
            }
            Err(Refused::Full { .. }) => self.check_that_nothing_would_give_room(number),
            Err(Refused::IndexFull { .. }) => assert!(self.evictable_for(number).is_empty()),
            Err(Refused::Quota { used_bytes, quota_bytes, needed_bytes, .. }) => {
                assert!(used_bytes + needed_bytes > quota_bytes);
                assert!(self.evictable_for(number).iter().all(|other| tenant(*other) != tenant(number)));
            }
            Err(other) => panic!("{other}"),
        }
        self.drop_childless_holes();
    }

    /// No page may change while a read runs on it, and only the visible bytes of chunks that are
    /// gone may change.
    fn overwrite(&mut self, page: u64, stamp: Stamp) {
        assert!(page < SLABS * SLAB_PAGES);
        assert!(
            !self
                .lost
                .iter()
                .any(|(offset, bytes)| (offset / PAGE..(offset + bytes).div_ceil(PAGE)).contains(&page))
        );
        for (other, owner, _) in &self.writing {
            let start = other.offset_bytes() / PAGE;
            assert!(!(start..start + pages(owner.0)).contains(&page), "two writes share a page");
        }
        let old = self.arena.insert(page, stamp);
        assert!(
            old.is_none_or(|old| self.visible.get(&old.0) != Some(&old)),
            "a visible chunk was overwritten"
        );
        assert!(
            self.reading.iter().all(|(_, read)| Some(*read) != old),
            "a page was overwritten under a read"
        );
    }

    fn commit(&mut self, at: usize) {
        let (write, stamp, doomed) = self.writing.remove(at);
        let checksums: Vec<u32> =
            (0..shape(stamp.0).layers()).map(|layer| stamp.1 as u32 * 10 + layer as u32).collect();
        let now_us = self.tell_time();
        assert_eq!(self.tier.commit(now_us, write, &checksums).is_err(), doomed);
        if !doomed {
            self.visible.insert(stamp.0, stamp);
        }
    }

    fn abort(&mut self, at: usize, lost: bool) {
        let (write, stamp, doomed) = self.writing.remove(at);
        let (offset, bytes) = (write.offset_bytes(), if lost { shape(stamp.0).bytes() } else { 0 });
        let now_us = self.tell_time();
        self.tier.abort(now_us, write, bytes);
        if lost {
            self.lost.push((offset, bytes));
        }
        if !doomed {
            self.holes.insert(stamp.0);
        }
        self.drop_childless_holes();
    }

    fn prefix(&self, number: usize) -> usize {
        path(number).into_iter().take_while(|number| self.is_here(*number)).count()
    }

    fn lease(&mut self, number: usize, ttl_us: u64) {
        let now_us = self.tell_time();
        let expected = self.prefix(number);
        assert!(
            self.tier.lease(now_us, TenantId(7), &ids(&path(number)), ttl_us).is_none(),
            "a foreign tenant"
        );
        match self.tier.lease(now_us, tenant(number), &ids(&path(number)), ttl_us) {
            Some((id, chunks)) => {
                assert_eq!(chunks, expected);
                let versions = path(number).iter().take(chunks).map(|number| self.visible[number]).collect();
                let expires_us = self.seen_us + ttl_us.min(150);
                self.leases.push(Leased { id, versions, expires_us });
            }
            None => assert!(expected == 0 || self.leases.len() == 4),
        }
    }

    fn renew(&mut self, at: usize, ttl_us: u64) {
        let (id, before) = (self.leases[at].id, self.leases[at].expires_us);
        let now_us = self.tell_time();
        let renewed = self.tier.renew(now_us, id, ttl_us);
        assert_eq!(renewed.is_ok(), before > self.seen_us);
        if let (Ok(expires_us), Some(lease)) = (renewed, self.leases.iter_mut().find(|lease| lease.id == id))
        {
            assert_eq!(expires_us, self.seen_us + ttl_us.min(150));
            lease.expires_us = expires_us;
        }
    }

    fn begin_read(&mut self, at: usize, chunk: usize) {
        let lease = &self.leases[at];
        let (id, version) = (lease.id, lease.versions.get(chunk).copied());
        let alive = lease.expires_us > self.seen_us.max(self.now_us);
        let now_us = self.tell_time();
        let current = version.filter(|version| self.visible.get(&version.0) == Some(version));
        match self.tier.begin_read(now_us, id, chunk) {
            Ok(read) => {
                let version = current.expect("a read of bytes that are gone");
                assert!(alive);
                self.assert_bytes(&read, version);
                let layer = version.1 as usize % shape(version.0).layers();
                let extent = shape(version.0).layer(layer).unwrap();
                let stored = (version.1 as u32 * 10 + layer as u32, extent.end - extent.start);
                assert_eq!(self.tier.sum(now_us, id, chunk, layer), Ok(stored));
                self.reading.push((read, version));
            }
            Err(Unreadable::DeadLease) => assert!(!alive),
            Err(Unreadable::Gone { .. }) => assert!(alive && version.is_some() && current.is_none()),
            Err(Unreadable::Outside { .. }) => assert!(alive && version.is_none()),
        }
    }

    fn assert_bytes(&self, read: &Read, version: Stamp) {
        for page in 0..pages(version.0) {
            assert_eq!(self.arena.get(&(read.offset_bytes() / PAGE + page)), Some(&version), "stale bytes");
        }
    }

    fn end_read(&mut self, at: usize, lost: bool) {
        let (read, version) = self.reading.remove(at);
        self.assert_bytes(&read, version);
        let lost_bytes = if lost { 50 } else { 0 };
        if lost {
            self.lost.push((read.offset_bytes(), lost_bytes));
        }
        let now_us = self.tell_time();
        self.tier.end_read(now_us, read, if lost { ReadEnd::Failed { lost_bytes } } else { ReadEnd::Done });
    }

    fn corrupt(&mut self, at: usize, chunk: usize) {
        let (id, version) = (self.leases[at].id, self.leases[at].versions.get(chunk).copied());
        let now_us = self.tell_time();
        self.tier.drop_corrupt(now_us, id, chunk);
        let alive = self.leases.iter().any(|lease| lease.id == id);
        if let Some(version) =
            version.filter(|version| alive && self.visible.get(&version.0) == Some(version))
        {
            self.forget(version.0);
        }
        self.drop_childless_holes();
    }

    fn delete(&mut self, number: usize) {
        let known = self.is_here(number) || self.is_writing(number);
        assert_eq!(self.tier.delete(TenantId(7), &[id(number)]), 0);
        assert_eq!(self.tier.delete(tenant(number), &[id(number)]), usize::from(known));
        for (_, stamp, doomed) in &mut self.writing {
            *doomed |= stamp.0 == number;
        }
        if known {
            self.forget(number);
        }
        self.drop_childless_holes();
    }

    fn forget(&mut self, number: usize) {
        self.visible.remove(&number);
        self.pinned.remove(&number);
        self.holes.insert(number);
    }

    fn drop_childless_holes(&mut self) {
        let stays: HashSet<usize> =
            self.holes.iter().copied().filter(|hole| self.has_descendants(*hole)).collect();
        self.holes = stays;
    }

    /// What went by eviction must have been free to go, and after it nothing stays that continues
    /// it.
    fn notice_evictions(&mut self) {
        let gone: Vec<usize> = self
            .visible
            .keys()
            .copied()
            .filter(|number| self.tier.lookup(tenant(*number), &[id(*number)]) == 0)
            .collect();
        for number in &gone {
            assert!(!self.is_held(*number), "{number} was held and is evicted");
        }
        for number in &gone {
            self.visible.remove(number);
        }
        for number in gone {
            assert!(!self.has_descendants(number), "{number} was evicted before what continues it");
        }
    }

    /// Ends everything, and fills the arena with chunks of another tenant: nothing may have got
    /// stuck.
    fn check_that_all_memory_comes_back(mut self, max_chunks: u32) {
        (0..self.writing.len()).for_each(|_| self.commit(0));
        (0..self.reading.len()).for_each(|_| self.end_read(0, false));
        (0..self.lost.len()).for_each(|_| self.take(Step::Quiet));
        self.now_us = self.seen_us + 1000;
        let count = (SLABS * SLAB_PAGES).min(max_chunks.into());
        let ids: Vec<ChunkId> = (0..count).map(|number| id(1000 + number as usize)).collect();
        let shape = ChunkShape::new([PAGE]).unwrap();
        for id in &ids {
            match self.tier.begin_write(self.now_us, TenantId(2), id, None, &shape) {
                Ok(Begun::Write(write)) => self.tier.commit(self.now_us, write, &[0]).unwrap(),
                other => panic!("{other:?}"),
            }
        }
        assert!(ids.iter().all(|id| self.tier.lookup(TenantId(2), &[*id]) == 1));
        let stat = self.tier.stat();
        assert_eq!((stat.rows as u64, stat.arena.used_bytes), (count, count * PAGE));
        assert_eq!((stat.arena.draining_bytes, stat.arena.quarantined_bytes), (0, 0));
    }

    fn check(&self) {
        for number in 0..CHUNKS {
            assert_eq!(
                self.tier.lookup(tenant(number), &ids(&path(number))),
                self.prefix(number),
                "prefix of {number}"
            );
            assert_eq!(self.tier.lookup(tenant(number), &[id(number)]) == 1, self.is_here(number));
            if let (true, Some(above)) = (self.is_here(number), parent(number)) {
                assert!(self.is_here(above) || self.is_writing(above) || self.holes.contains(&above));
            }
        }
        self.check_accounts();
    }

    fn check_accounts(&self) {
        let stat = self.tier.stat();
        let arena = stat.arena;
        let sum = arena.used_bytes
            + arena.draining_bytes
            + arena.quarantined_bytes
            + arena.free_bytes
            + arena.tail_bytes;
        assert_eq!(sum, stat.capacity_bytes);
        let live = self.writing.iter().filter(|(_, _, doomed)| !doomed).map(|(_, stamp, _)| stamp.0);
        let used: u64 = self.visible.keys().copied().chain(live).map(pages).sum();
        assert_eq!(arena.used_bytes, used * PAGE);
        assert_eq!(stat.chunks, self.visible.len());
        let charged: u64 = stat.tenants.iter().map(|tenant| tenant.used_bytes).sum();
        assert_eq!(charged, arena.used_bytes + arena.draining_bytes);
        assert!(stat.tenants.iter().all(|tenant| tenant.used_bytes <= tenant.quota_bytes));
        assert!(stat.arena.quarantined_bytes <= self.lost.len() as u64 * 2 * PAGE);
        assert_eq!(stat.leases, self.leases.len());
        let writing = self.writing.iter().filter(|(_, _, doomed)| !doomed).count();
        assert_eq!(stat.rows, self.visible.len() + writing + self.holes.len());
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn every_hit_has_the_right_bytes_and_every_byte_is_accounted_for(
        steps in prop::collection::vec(step(), 1..250),
        max_chunks in prop_oneof![Just(9u32), Just(1024)],
    ) {
        let mut model = Model::new(max_chunks);
        for step in steps {
            model.take(step);
            model.check();
        }
        model.check_that_all_memory_comes_back(max_chunks);
    }
}
