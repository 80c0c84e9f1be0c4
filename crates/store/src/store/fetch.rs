//! Fetching: chunks of a lease come into the arena and stay there with their checksums beside them,
//! for those who read the arena by themselves, in other processes and on other machines.
//!
//! A [`ReadGuard`] is a read that has begun: as long as it lives its bytes are nobody else's,
//! whatever becomes of the chunk or of the lease. A chunk on disk is read into memory first, once
//! for all who want it at that time. Nobody has less time than it asked for, or waits behind more
//! than it would, because another one asked first.

use super::load::Urgency;
use super::promote::{self, NotPromoted, Promotion};
use super::reserve::ChunkName;
use super::{Lease, Store, StoreInner};
use crate::checksum;
use crate::shape::ChunkShape;
use crate::ssd::{Check, DiskLease, LayerRead, NotRead, NotStaged, ReadResults, Staged};
use crate::stat::Unreadable;
use crate::tenant::TenantId;
use crate::tier::{Read, ReadEnd};
use forebay_kv::ChunkId;
use forebay_transfer::lock::Mutex;
use forebay_transfer::{Arena, Class, RaisableClass, RegionId, Span};
use std::collections::HashMap;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use thiserror::Error;

/// A chunk that lies still in the arena until this is dropped.
#[derive(Debug)]
pub struct ReadGuard {
    shared: Arc<StoreInner>,
    /// Only taken when the guard ends.
    read: Option<Read>,
    checksums: Vec<u32>,
}

/// Why a chunk is not in memory. To the caller it is a miss.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum NotFetched {
    /// The lease does not give access to the chunk.
    #[error(transparent)]
    Unreadable(#[from] Unreadable),
    /// The disk did not give it.
    #[error(transparent)]
    Disk(#[from] NotRead),
    /// It did not get into memory.
    #[error(transparent)]
    NotPromoted(#[from] NotPromoted),
}

type OnFetched = Box<dyn FnOnce(Result<ReadGuard, NotFetched>) + Send>;

/// Bytes of chunks that one request reads at most, if it has more than one. A request costs little
/// beside this many bytes, and those read first are verified while the disk reads the next.
pub(super) const READ_BYTES: u64 = 1 << 20;

/// How long a lease lives that is needed until the read of a chunk has begun, which owns it then.
const UNTIL_READ_US: u64 = 1_000_000;

/// Chunks on their way.
#[derive(Default)]
pub(super) struct Fetches(Mutex<HashMap<ChunkId, Coming>>);

/// Who waits for a chunk, and the class of the read that brings it once that has begun.
#[derive(Default)]
struct Coming {
    waiting: Vec<Waiter>,
    class: Option<RaisableClass>,
}

/// One who waits.
struct Waiter {
    urgency: Urgency,
    on_end: OnFetched,
}

/// A chunk on its way. Dropped before it is there, it has failed.
struct Fetch {
    shared: Arc<StoreInner>,
    name: ChunkName,
    /// Its slot, if the disk can read it there without a copy.
    promotion: Option<Promotion>,
    outcome: Result<(), NotFetched>,
}

impl Store {
    /// Begins to read a chunk of the lease that is in memory now.
    pub fn read_guard(&self, lease: &Lease, chunk: usize) -> Result<ReadGuard, Unreadable> {
        let shared = &self.shared;
        match lease.on_disk(chunk) {
            Some((part, place)) => {
                let (id, _) = part.name(place).ok_or(Unreadable::Outside { chunk, layer: 0 })?;
                shared.read_guard_by_id(part.tenant, &id).ok_or(Unreadable::Gone { chunk })
            }
            None => {
                let (read, checksums) = shared.tier.lock().begin_read_with_checksums(
                    shared.now_us(),
                    lease.memory_id()?,
                    chunk,
                )?;
                Ok(ReadGuard { shared: Arc::clone(shared), read: Some(read), checksums })
            }
        }
    }

    /// Begins to read a chunk that is in memory now, without a lease: it stays as cold as it is.
    pub fn read_guard_by_id(&self, tenant: TenantId, id: &ChunkId) -> Option<ReadGuard> {
        self.shared.read_guard_by_id(tenant, id)
    }

    /// Fetches a chunk of the lease; see [`fetch_many`](Store::fetch_many).
    pub fn fetch(
        &self,
        lease: &Lease,
        chunk: usize,
        class: Class,
        deadline_us: Option<u64>,
        on_end: impl FnOnce(Result<ReadGuard, NotFetched>) + Send + 'static,
    ) {
        let on_end: OnFetched = Box::new(on_end);
        self.fetch_each(lease, std::iter::once((chunk, on_end)), Urgency { class, deadline_us });
    }

    /// Fetches chunks of the lease, wherever they are: those on disk come into memory first, many
    /// by one read, and are verified there, or by who uses them, as [`Check`](crate::ssd::Check)
    /// says. `deadline_us` is in the mover's clock.
    ///
    /// `on_end` is called exactly once for each chunk, on a thread of the store or the mover, or on
    /// this one: keep it short, and do not wait for either in it. Keep the lease until then. A
    /// chunk that memory has no room for is a miss.
    pub fn fetch_many(
        &self,
        lease: &Lease,
        chunks: impl IntoIterator<Item = usize>,
        class: Class,
        deadline_us: Option<u64>,
        on_end: impl Fn(usize, Result<ReadGuard, NotFetched>) + Send + Sync + 'static,
    ) {
        let on_end = Arc::new(on_end);
        let each = chunks.into_iter().map(|chunk| {
            let on_end = Arc::clone(&on_end);
            let on_end: OnFetched = Box::new(move |guard| on_end(chunk, guard));
            (chunk, on_end)
        });
        self.fetch_each(lease, each, Urgency { class, deadline_us });
    }

    fn fetch_each(&self, lease: &Lease, chunks: impl Iterator<Item = (usize, OnFetched)>, urgency: Urgency) {
        let mut fetches = Vec::new();
        for (chunk, on_end) in chunks {
            let unreadable = match self.read_guard(lease, chunk) {
                Ok(guard) => {
                    on_end(Ok(guard));
                    continue;
                }
                Err(unreadable) => unreadable,
            };
            let named = lease.on_disk(chunk).and_then(|(part, place)| Some((part, place, part.name(place)?)));
            let Some((part, place, (id, parent))) = named else {
                on_end(Err(unreadable.into()));
                continue;
            };
            let name = ChunkName { tenant: part.tenant, id, parent };
            if self.shared.fetches.join(id, vec![Waiter { urgency, on_end }]).is_some() {
                fetches.push((place, Fetch::new(&self.shared, name)));
            }
        }
        if let Some((part, _)) = lease.on_disk(usize::MAX) {
            self.shared.fetch_from_disk(fetches, &part.lease, urgency);
        }
    }

    /// The file of the arena, for mapping it in other processes.
    pub fn arena_fd(&self) -> BorrowedFd<'_> {
        self.shared.backing.as_fd()
    }

    pub fn arena_memory(&self) -> Arc<Arena> {
        Arc::clone(&self.shared.backing)
    }

    /// What the mover calls the arena.
    pub fn arena_region(&self) -> RegionId {
        self.shared.arena
    }
}

impl ReadGuard {
    /// Where the chunk starts in the arena.
    pub fn offset_bytes(&self) -> u64 {
        self.read().offset_bytes()
    }

    /// The lengths of its layers.
    pub fn shape(&self) -> &ChunkShape {
        self.read().shape()
    }

    /// The CRC-32C that each layer had when it was stored.
    pub fn checksums(&self) -> &[u32] {
        &self.checksums
    }

    /// Whether the bytes are still those that were stored. If they are not, the chunk is a miss for
    /// all from now on, and counted. It takes as long as reading the chunk.
    pub fn check(&self) -> bool {
        let read = self.read();
        let shape = read.shape();
        let sum = |layer| {
            let extent = shape.layer(layer)?;
            let at = read.offset_bytes() + extent.start;
            let span = Span::new(self.shared.arena, at, extent.end - extent.start);
            checksum::of_spans(self.shared.mover.memory(), &[span])
        };
        let intact = (0..shape.layers()).map(sum).eq(self.checksums.iter().copied().map(Some));
        if !intact {
            let name = self.shared.tier.lock().drop_found_corrupt(&read.chunk);
            self.shared.drop_unchecked_copy(name);
        }
        intact
    }

    fn read(&self) -> &Read {
        match &self.read {
            Some(read) => read,
            None => unreachable!("the read is only taken when the guard is dropped"),
        }
    }
}

impl Drop for ReadGuard {
    fn drop(&mut self) {
        if let Some(read) = self.read.take() {
            self.shared.tier.lock().end_read(self.shared.now_us(), read, ReadEnd::Done);
        }
    }
}

impl StoreInner {
    /// Who compares what is fetched from the disk with its checksums.
    pub(super) fn check_of_fetches(&self) -> Check {
        self.open_disk().map(|disk| disk.ssd.check()).unwrap_or_default()
    }

    /// A chunk in memory was wrong. If no read has compared it, it may have been so on disk.
    pub(super) fn drop_unchecked_copy(&self, name: Option<(TenantId, ChunkId)>) {
        let disk = self.open_disk().filter(|disk| disk.ssd.check() == Check::AtUse);
        if let Some((disk, (tenant, id))) = disk.zip(name) {
            disk.ssd.drop_found_corrupt(tenant, &id);
        }
    }

    pub(super) fn read_guard_by_id(self: &Arc<Self>, tenant: TenantId, id: &ChunkId) -> Option<ReadGuard> {
        let (read, checksums) = self.tier.lock().begin_copy(self.now_us(), tenant, id)?;
        Some(ReadGuard { shared: Arc::clone(self), read: Some(read), checksums })
    }

    /// Reads the chunks at these places of the lease into memory, many by one request.
    fn fetch_from_disk(self: &Arc<Self>, fetches: Vec<(usize, Fetch)>, lease: &DiskLease, urgency: Urgency) {
        let (mut wants, mut coming, mut bytes) = (Vec::new(), Vec::new(), 0);
        for (place, mut fetch) in fetches {
            match fetch.want(lease, place) {
                Ok(Some((want, chunk_bytes))) => {
                    if bytes + chunk_bytes > READ_BYTES {
                        self.read_from_disk(
                            std::mem::take(&mut wants),
                            std::mem::take(&mut coming),
                            lease,
                            urgency,
                        );
                        bytes = 0;
                    }
                    bytes += chunk_bytes;
                    wants.push(want);
                    coming.push(fetch);
                }
                Ok(None) => fetch.end(Ok(())),
                Err(error) => fetch.end(Err(error)),
            }
        }
        self.read_from_disk(wants, coming, lease, urgency);
    }

    /// Reads the chunks by one request.
    fn read_from_disk(
        self: &Arc<Self>,
        wants: Vec<LayerRead>,
        coming: Vec<Fetch>,
        lease: &DiskLease,
        urgency: Urgency,
    ) {
        let Some(disk) = self.open_disk().filter(|_| !wants.is_empty()) else { return };
        let reading = self.disk_reading();
        let ids: Vec<ChunkId> = coming.iter().map(|fetch| fetch.name.id).collect();
        let on_read = move |ends: ReadResults| {
            reading.end(&ends);
            coming.into_iter().zip(ends).for_each(|(fetch, end)| fetch.read(end));
        };
        // What the disk refuses drops the fetches, which say so.
        if let Ok(class) = disk.ssd.read(lease, &wants, urgency.class, urgency.deadline_us, on_read) {
            self.fetches.come_in(&ids, &class);
        }
    }
}

impl Urgency {
    fn is_late(&self, now_us: u64) -> bool {
        self.deadline_us.is_some_and(|deadline_us| deadline_us <= now_us)
    }

    /// What does for both: as urgent as either, for as long as either waits.
    fn and(self, other: Urgency) -> Urgency {
        let deadline_us = self.deadline_us.zip(other.deadline_us).map(|(one, other)| one.max(other));
        Urgency { class: self.class.min(other.class), deadline_us }
    }
}

impl Fetches {
    /// Whether somebody brings the chunk, all of it.
    pub fn has(&self, id: &ChunkId) -> bool {
        self.0.lock().contains_key(id)
    }

    /// These wait for a chunk, and a read that is under way for it goes as soon as any of them
    /// wants. Says how soon that is if nobody else waits, so that the caller has to bring it.
    fn join(&self, id: ChunkId, mut those: Vec<Waiter>) -> Option<Urgency> {
        let urgency = those.iter().map(|waiting| waiting.urgency).reduce(Urgency::and)?;
        let mut table = self.0.lock();
        let coming = table.entry(id).or_default();
        let is_first = coming.waiting.is_empty();
        coming.waiting.append(&mut those);
        let class = coming.class.clone();
        drop(table);
        if let Some(class) = class {
            class.raise(urgency.class);
        }
        is_first.then_some(urgency)
    }

    /// How soon those who wait for a chunk want it.
    fn class(&self, id: &ChunkId) -> Class {
        let table = self.0.lock();
        let waiting = table.get(id).into_iter().flat_map(|coming| &coming.waiting);
        waiting.map(|waiting| waiting.urgency.class).min().unwrap_or(Class::Prefetch)
    }

    /// These chunks come by a read of this class, which is raised for those who joined meanwhile.
    fn come_in(&self, ids: &[ChunkId], class: &RaisableClass) {
        let mut table = self.0.lock();
        let mut most_urgent = None;
        for id in ids {
            let Some(coming) = table.get_mut(id) else { continue };
            coming.class = Some(class.clone());
            let classes = coming.waiting.iter().map(|waiting| waiting.urgency.class);
            most_urgent = most_urgent.into_iter().chain(classes).min();
        }
        drop(table);
        if let Some(most_urgent) = most_urgent {
            class.raise(most_urgent);
        }
    }
}

impl std::fmt::Debug for Fetches {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Fetches").field("chunks", &self.0.lock().len()).finish()
    }
}

impl Fetch {
    fn new(shared: &Arc<StoreInner>, name: ChunkName) -> Fetch {
        let outcome = Err(NotRead::Closed.into());
        Fetch { shared: Arc::clone(shared), name, promotion: None, outcome }
    }

    /// What is to be read for it, and its bytes. `None`: it has come meanwhile.
    fn want(&mut self, lease: &DiskLease, place: usize) -> Result<Option<(LayerRead, u64)>, NotFetched> {
        let (shape, is_plain) = lease.layout_of(place)?;
        if is_plain {
            let Some(promotion) = Promotion::begin(&self.shared, self.name, shape.chunk(), true)? else {
                return Ok(None);
            };
            self.promotion = Some(promotion);
        }
        let into = self.promotion.as_ref().map(Promotion::pages);
        let check = self.shared.check_of_fetches();
        let want = LayerRead { chunk: place, layers: 0..shape.layers(), into, check };
        Ok(Some((want, shape.chunk().bytes())))
    }

    /// The disk was read, or was not; on a thread of the disk tier.
    fn read(mut self, end: Result<Staged, NotRead>) {
        match (end, self.promotion.take()) {
            (Ok(staged), Some(promotion)) if staged.is_direct() => {
                let outcome = promotion.commit(&staged.crcs());
                self.end(outcome.map_err(NotFetched::from));
            }
            (Ok(staged), _) => {
                let (shared, name) = (Arc::clone(&self.shared), self.name);
                let class = shared.fetches.class(&name.id);
                promote::offer(&shared, name, Arc::new(staged), class, true, move |outcome| {
                    self.end(outcome.map_err(NotFetched::from));
                });
            }
            (Err(error), promotion) => {
                if let Some(promotion) = promotion {
                    promotion.abandon(error.quarantined());
                }
                self.end(Err(error.into()));
            }
        }
    }

    fn end(mut self, outcome: Result<(), NotFetched>) {
        self.outcome = outcome;
    }

    /// Takes out those who have time left although the read came too late for who asked first.
    fn in_time(&self, waiting: &mut Vec<Waiter>) -> Vec<Waiter> {
        if self.outcome != Err(NotFetched::Disk(NotStaged::Late.into())) {
            return Vec::new();
        }
        let now_us = self.shared.now_us();
        waiting.extract_if(.., |waiting| !waiting.urgency.is_late(now_us)).collect()
    }

    /// Fetches it again for those who have time left.
    fn again(&self, in_time: Vec<Waiter>) {
        let (shared, name) = (&self.shared, self.name);
        let lease = shared.open_disk().map(|disk| disk.ssd.lease(name.tenant, &[name.id], UNTIL_READ_US));
        let Some(lease) = lease else { return self.tell(in_time) };
        if let Some(urgency) = shared.fetches.join(name.id, in_time) {
            shared.fetch_from_disk(vec![(0, Fetch::new(shared, name))], &lease, urgency);
        }
    }

    /// Tells how it went, each with a guard of its own.
    fn tell(&self, waiting: Vec<Waiter>) {
        let ChunkName { tenant, id, .. } = self.name;
        for Waiter { on_end, .. } in waiting {
            let guard = || {
                let guard = self.shared.read_guard_by_id(tenant, &id);
                guard.ok_or(NotFetched::NotPromoted(NotPromoted::Gone))
            };
            on_end(self.outcome.clone().and_then(|()| guard()));
        }
    }
}

impl Drop for Fetch {
    fn drop(&mut self) {
        let mut waiting = self.shared.fetches.0.lock().remove(&self.name.id).unwrap_or_default().waiting;
        let in_time = self.in_time(&mut waiting);
        if !in_time.is_empty() {
            self.again(in_time);
        }
        self.tell(waiting);
    }
}
