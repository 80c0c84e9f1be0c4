//! Lending: chunks of a lease as they lie in the arena, for those who read the arena by themselves, in other processes and
//! on other machines. This file knows how a chunk comes to lie still in memory with its checksums beside it; it must never
//! know who reads it or by which way.
//!
//! A [`Loan`] is a read that has begun: as long as it lives its bytes are nobody else's, whatever becomes of the chunk or of
//! the lease. A chunk on disk is brought into memory first, once for all who want it at that time. Nobody has less time than
//! it asked for because another one asked first.

use super::promote::{self, NotPromoted, Promotion};
use super::{Lease, Shared, Store};
use crate::checksum;
use crate::shape::ChunkShape;
use crate::ssd::{DiskLease, NotRead, NotStaged, ReadEnds, Staged, Want};
use crate::stat::Unreadable;
use crate::tenant::TenantId;
use crate::tier::{Read, ReadEnd};
use forebay_kv::ChunkId;
use forebay_transfer::{Backing, Class, RegionId, Span};
use parking_lot::Mutex;
use std::collections::HashMap;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use thiserror::Error;

/// A chunk that lies still in the arena until this is dropped.
#[derive(Debug)]
pub struct Loan {
    shared: Arc<Shared>,
    /// Only taken when the loan ends.
    read: Option<Read>,
    checksums: Vec<u32>,
}

/// Why a chunk cannot be lent. To the caller it is a miss.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum NotBrought {
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

type OnLoan = Box<dyn FnOnce(Result<Loan, NotBrought>) + Send>;

/// How long a lease lives that is needed until the read of a chunk has begun, which owns it then.
const UNTIL_READ_US: u64 = 1_000_000;

/// Chunks on their way from disk to memory, with those who wait for them.
#[derive(Default)]
pub(super) struct Arrivals(Mutex<HashMap<ChunkId, Vec<Waiting>>>);

/// One who waits.
struct Waiting {
    wish: Wish,
    on_end: OnLoan,
}

/// How soon a chunk is wanted.
#[derive(Debug, Clone, Copy)]
struct Wish {
    class: Class,
    deadline_us: Option<u64>,
}

/// A chunk on its way. Dropped before it is there, it has failed.
struct Arrival {
    shared: Arc<Shared>,
    name: promote::Name,
    /// Its slot, if the disk can read it there without a copy.
    promotion: Option<Promotion>,
    outcome: Result<(), NotBrought>,
}

impl Store {
    /// Lends a chunk of the lease that is in memory now.
    pub fn lend(&self, lease: &Lease, chunk: usize) -> Result<Loan, Unreadable> {
        let shared = &self.shared;
        match lease.on_disk(chunk) {
            Some((part, place)) => {
                let (id, _) = part.name(place).ok_or(Unreadable::Outside { chunk, layer: 0 })?;
                shared.lend_named(part.tenant, &id).ok_or(Unreadable::Gone { chunk })
            }
            None => {
                let (read, checksums) =
                    shared.tier.lock().begin_lend(shared.now_us(), lease.memory_id()?, chunk)?;
                Ok(Loan { shared: Arc::clone(shared), read: Some(read), checksums })
            }
        }
    }

    /// Lends a chunk that is in memory now, without a lease: it stays as cold as it is.
    pub fn lend_named(&self, tenant: TenantId, id: &ChunkId) -> Option<Loan> {
        self.shared.lend_named(tenant, id)
    }

    /// Lends a chunk of the lease; see [`bring_many`](Store::bring_many).
    pub fn bring(
        &self,
        lease: &Lease,
        chunk: usize,
        class: Class,
        deadline_us: Option<u64>,
        on_end: impl FnOnce(Result<Loan, NotBrought>) + Send + 'static,
    ) {
        let on_end: OnLoan = Box::new(on_end);
        self.bring_each(lease, std::iter::once((chunk, on_end)), Wish { class, deadline_us });
    }

    /// Lends chunks of the lease, wherever they are: those on disk come into memory first, all by one read, and are verified
    /// there. `deadline_us` is in the mover's clock.
    ///
    /// `on_end` is called exactly once for each chunk, on a thread of the store or the mover, or on this one: keep it short,
    /// and do not wait for either in it. Keep the lease until then. A chunk that memory has no room for is a miss.
    pub fn bring_many(
        &self,
        lease: &Lease,
        chunks: impl IntoIterator<Item = usize>,
        class: Class,
        deadline_us: Option<u64>,
        on_end: impl Fn(usize, Result<Loan, NotBrought>) + Send + Sync + 'static,
    ) {
        let on_end = Arc::new(on_end);
        let each = chunks.into_iter().map(|chunk| {
            let on_end = Arc::clone(&on_end);
            let on_end: OnLoan = Box::new(move |loan| on_end(chunk, loan));
            (chunk, on_end)
        });
        self.bring_each(lease, each, Wish { class, deadline_us });
    }

    fn bring_each(&self, lease: &Lease, chunks: impl Iterator<Item = (usize, OnLoan)>, wish: Wish) {
        let mut arrivals = Vec::new();
        for (chunk, on_end) in chunks {
            let unreadable = match self.lend(lease, chunk) {
                Ok(loan) => {
                    on_end(Ok(loan));
                    continue;
                }
                Err(unreadable) => unreadable,
            };
            let named = lease.on_disk(chunk).and_then(|(part, place)| Some((part, place, part.name(place)?)));
            let Some((part, place, (id, parent))) = named else {
                on_end(Err(unreadable.into()));
                continue;
            };
            let name = promote::Name { tenant: part.tenant, id, parent };
            if self.shared.arrivals.join(id, vec![Waiting { wish, on_end }]).is_some() {
                arrivals.push((place, Arrival::new(&self.shared, name)));
            }
        }
        if let Some((part, _)) = lease.on_disk(usize::MAX) {
            self.shared.bring_from_disk(arrivals, &part.lease, wish);
        }
    }

    /// The file of the arena, for mapping it in other processes.
    pub fn arena_fd(&self) -> BorrowedFd<'_> {
        self.shared.backing.as_fd()
    }

    /// The memory of the arena.
    pub fn arena_memory(&self) -> Arc<dyn Backing> {
        Arc::clone(&self.shared.backing) as Arc<dyn Backing>
    }

    /// What the mover calls the arena.
    pub fn arena_region(&self) -> RegionId {
        self.shared.arena
    }
}

impl Loan {
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

    /// Whether the bytes are still those that were stored. If they are not, the chunk is a miss for all from now on, and
    /// counted. It takes as long as reading the chunk.
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
            self.shared.tier.lock().drop_found_corrupt(&read.chunk);
        }
        intact
    }

    fn read(&self) -> &Read {
        match &self.read {
            Some(read) => read,
            None => unreachable!("the read is only taken when the loan is dropped"),
        }
    }
}

impl Drop for Loan {
    fn drop(&mut self) {
        if let Some(read) = self.read.take() {
            self.shared.tier.lock().end_read(self.shared.now_us(), read, ReadEnd::Done);
        }
    }
}

impl Shared {
    fn lend_named(self: &Arc<Self>, tenant: TenantId, id: &ChunkId) -> Option<Loan> {
        let (read, checksums) = self.tier.lock().begin_copy(self.now_us(), tenant, id)?;
        Some(Loan { shared: Arc::clone(self), read: Some(read), checksums })
    }

    /// Reads the chunks at these places of the lease into memory, by one request.
    fn bring_from_disk(self: &Arc<Self>, arrivals: Vec<(usize, Arrival)>, lease: &DiskLease, wish: Wish) {
        let Some(disk) = self.open_disk() else { return };
        let (mut wants, mut coming) = (Vec::new(), Vec::new());
        for (place, mut arrival) in arrivals {
            match arrival.want(lease, place) {
                Ok(Some(want)) => {
                    wants.push(want);
                    coming.push(arrival);
                }
                Ok(None) => arrival.end(Ok(())),
                Err(error) => arrival.end(Err(error)),
            }
        }
        if wants.is_empty() {
            return;
        }
        let began_us = self.now_us();
        let on_read = move |ends: ReadEnds| {
            let read_bytes = ends.iter().flatten().map(Staged::len_bytes).sum();
            if let Some(first) = coming.first() {
                first.shared.tell_write_back(began_us, read_bytes);
            }
            coming.into_iter().zip(ends).for_each(|(arrival, end)| arrival.read(end, wish.class));
        };
        // What the disk refuses drops the arrivals, which say so.
        let _ = disk.ssd.read(lease, &wants, wish.class, wish.deadline_us, on_read);
    }
}

impl Wish {
    fn is_late(&self, now_us: u64) -> bool {
        self.deadline_us.is_some_and(|deadline_us| deadline_us <= now_us)
    }

    /// What does for both: as urgent as either, for as long as either waits.
    fn and(self, other: Wish) -> Wish {
        let deadline_us = self.deadline_us.zip(other.deadline_us).map(|(one, other)| one.max(other));
        Wish { class: self.class.min(other.class), deadline_us }
    }
}

impl Arrivals {
    /// These wait for a chunk. Says how soon they want it if nobody else waits, so that the caller has to bring it.
    fn join(&self, id: ChunkId, mut those: Vec<Waiting>) -> Option<Wish> {
        let wish = those.iter().map(|waiting| waiting.wish).reduce(Wish::and);
        let mut table = self.0.lock();
        let waiting = table.entry(id).or_default();
        let wish = wish.filter(|_| waiting.is_empty());
        waiting.append(&mut those);
        wish
    }
}

impl std::fmt::Debug for Arrivals {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Arrivals").field("chunks", &self.0.lock().len()).finish()
    }
}

impl Arrival {
    fn new(shared: &Arc<Shared>, name: promote::Name) -> Arrival {
        let outcome = Err(NotRead::Closed.into());
        Arrival { shared: Arc::clone(shared), name, promotion: None, outcome }
    }

    /// What is to be read for it. `None`: it has come meanwhile.
    fn want(&mut self, lease: &DiskLease, place: usize) -> Result<Option<Want>, NotBrought> {
        let (shape, is_plain) = lease.layout_of(place)?;
        if is_plain {
            let Some(promotion) = Promotion::begin(&self.shared, self.name, shape.chunk(), true)? else {
                return Ok(None);
            };
            self.promotion = Some(promotion);
        }
        let into = self.promotion.as_ref().map(Promotion::pages);
        Ok(Some(Want { chunk: place, layers: 0..shape.layers(), into }))
    }

    /// The disk was read, or was not; on a thread of the disk tier.
    fn read(mut self, end: Result<Staged, NotRead>, class: Class) {
        match (end, self.promotion.take()) {
            (Ok(staged), Some(promotion)) if staged.is_direct() => {
                let outcome = promotion.commit(&staged.crcs());
                self.end(outcome.map_err(NotBrought::from));
            }
            (Ok(staged), _) => {
                let (shared, name) = (Arc::clone(&self.shared), self.name);
                promote::offer(&shared, name, Arc::new(staged), class, true, move |outcome| {
                    self.end(outcome.map_err(NotBrought::from));
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

    fn end(mut self, outcome: Result<(), NotBrought>) {
        self.outcome = outcome;
    }

    /// Takes out those who have time left although the read came too late for who asked first.
    fn patient(&self, waiting: &mut Vec<Waiting>) -> Vec<Waiting> {
        if self.outcome != Err(NotBrought::Disk(NotStaged::Late.into())) {
            return Vec::new();
        }
        let now_us = self.shared.now_us();
        waiting.extract_if(.., |waiting| !waiting.wish.is_late(now_us)).collect()
    }

    /// Brings it again for those who have time left.
    fn again(&self, patient: Vec<Waiting>) {
        let (shared, name) = (&self.shared, self.name);
        let lease = shared.open_disk().map(|disk| disk.ssd.lease(name.tenant, &[name.id], UNTIL_READ_US));
        let Some(lease) = lease else { return self.tell(patient) };
        if let Some(wish) = shared.arrivals.join(name.id, patient) {
            shared.bring_from_disk(vec![(0, Arrival::new(shared, name))], &lease, wish);
        }
    }

    /// Tells how it went, each with a loan of their own.
    fn tell(&self, waiting: Vec<Waiting>) {
        let promote::Name { tenant, id, .. } = self.name;
        for Waiting { on_end, .. } in waiting {
            let lent = || {
                let loan = self.shared.lend_named(tenant, &id);
                loan.ok_or(NotBrought::NotPromoted(NotPromoted::Gone))
            };
            on_end(self.outcome.clone().and_then(|()| lent()));
        }
    }
}

impl Drop for Arrival {
    fn drop(&mut self) {
        let mut waiting = self.shared.arrivals.0.lock().remove(&self.name.id).unwrap_or_default();
        let patient = self.patient(&mut waiting);
        if !patient.is_empty() {
            self.again(patient);
        }
        self.tell(waiting);
    }
}
