//! Lending: chunks of a lease as they lie in the arena, for those who read the arena by themselves, in other processes and
//! on other machines. This file knows how a chunk comes to lie still in memory with its checksums beside it; it must never
//! know who reads it or by which way.
//!
//! A [`Loan`] is a read that has begun: as long as it lives its bytes are nobody else's, whatever becomes of the chunk or of
//! the lease. A chunk on disk is brought into memory first, once for all who want it at that time.

use super::gate::Reading;
use super::promote::{self, NotPromoted};
use super::{Lease, Shared, Store};
use crate::checksum;
use crate::shape::ChunkShape;
use crate::ssd::{NotRead, Staged, Want};
use crate::stat::Unreadable;
use crate::tenant::TenantId;
use crate::tier::{Read, ReadEnd};
use forebay_kv::ChunkId;
use forebay_mover::{Backing, Class, RegionId, Span};
use std::collections::HashMap;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use thiserror::Error;

/// A chunk that lies still in the arena until this is dropped.
#[derive(Debug)]
pub struct Loan {
    shared: Arc<Shared>,
    /// Only taken when the loan ends.
    read: Option<Read>,
    sums: Vec<u32>,
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
    /// It did not get from the disk's staging to memory.
    #[error(transparent)]
    NotPromoted(#[from] NotPromoted),
}

type OnLoan = Box<dyn FnOnce(Result<Loan, NotBrought>) + Send>;

/// Chunks on their way from disk to memory, with those who wait for them beside the one who asked first.
#[derive(Default)]
pub(super) struct Arrivals(Mutex<HashMap<ChunkId, Vec<OnLoan>>>);

/// One of them. Dropped before it is there, it has failed.
struct Arrival {
    shared: Arc<Shared>,
    tenant: TenantId,
    id: ChunkId,
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
                let (read, sums) = shared.tier().begin_lend(shared.now_us(), lease.memory_id()?, chunk)?;
                Ok(Loan { shared: Arc::clone(shared), read: Some(read), sums })
            }
        }
    }

    /// Lends a chunk that is in memory now, without a lease: it stays as cold as it is.
    pub fn lend_named(&self, tenant: TenantId, id: &ChunkId) -> Option<Loan> {
        self.shared.lend_named(tenant, id)
    }

    /// Lends a chunk of the lease, wherever it is: one on disk comes into memory first, verified. `deadline_us` is in the
    /// mover's clock.
    ///
    /// `on_end` is called exactly once, on a thread of the store or the mover, or on this one: keep it short, and do not
    /// wait for either in it. Keep the lease until then. A chunk that memory has no room for is a miss.
    pub fn bring(
        &self,
        lease: &Lease,
        chunk: usize,
        class: Class,
        deadline_us: Option<u64>,
        on_end: impl FnOnce(Result<Loan, NotBrought>) + Send + 'static,
    ) {
        let unreadable = match self.lend(lease, chunk) {
            Ok(loan) => return on_end(Ok(loan)),
            Err(unreadable) => unreadable,
        };
        let named = lease.on_disk(chunk).and_then(|(part, place)| Some((part, place, part.name(place)?)));
        let Some((part, place, (id, parent))) = named else { return on_end(Err(unreadable.into())) };
        let shared = &self.shared;
        if !shared.arrivals.join(id, Box::new(on_end)) {
            return;
        }
        let arrival = Arrival::new(shared, part.tenant, id);
        let name = promote::Name { tenant: part.tenant, id, parent };
        let (disk, (layers, bytes)) = match (shared.open_disk(), part.lease.size_of(place)) {
            (Some(disk), Ok(size)) => (disk, size),
            (None, _) => return,
            (_, Err(unreadable)) => return arrival.end(Err(unreadable.into())),
        };
        let reading = Reading::begin(shared, bytes);
        let on_read = move |staged: Result<Vec<Staged>, NotRead>| arrival.read(staged, reading, name, class);
        let want = Want { chunk: place, layers: 0..layers };
        // What the disk refuses drops the arrival, which says so.
        let _ = disk.ssd.read(&part.lease, &[want], class, deadline_us, on_read);
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
    pub fn sums(&self) -> &[u32] {
        &self.sums
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
        let intact = (0..shape.layers()).map(sum).eq(self.sums.iter().copied().map(Some));
        if !intact {
            self.shared.tier().drop_found_corrupt(&read.chunk);
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
            self.shared.tier().end_read(self.shared.now_us(), read, ReadEnd::Done);
        }
    }
}

impl Shared {
    fn lend_named(self: &Arc<Self>, tenant: TenantId, id: &ChunkId) -> Option<Loan> {
        let (read, sums) = self.tier().begin_copy(self.now_us(), tenant, id)?;
        Some(Loan { shared: Arc::clone(self), read: Some(read), sums })
    }
}

impl Arrivals {
    fn table(&self) -> MutexGuard<'_, HashMap<ChunkId, Vec<OnLoan>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for a chunk. Says whether nobody else does, so that the caller has to bring it.
    fn join(&self, id: ChunkId, on_end: OnLoan) -> bool {
        let mut table = self.table();
        let waiting = table.entry(id).or_default();
        waiting.push(on_end);
        waiting.len() == 1
    }
}

impl std::fmt::Debug for Arrivals {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Arrivals").field("chunks", &self.table().len()).finish()
    }
}

impl Arrival {
    fn new(shared: &Arc<Shared>, tenant: TenantId, id: ChunkId) -> Arrival {
        let outcome = Err(NotRead::Closed.into());
        Arrival { shared: Arc::clone(shared), tenant, id, outcome }
    }

    /// The disk was read, or was not; on a thread of the disk tier.
    fn read(self, staged: Result<Vec<Staged>, NotRead>, reading: Reading, name: promote::Name, class: Class) {
        let staged = match staged.map(|mut staged| staged.pop()) {
            Ok(Some(staged)) => staged,
            Ok(None) => return,
            Err(error) => return self.end(Err(error.into())),
        };
        reading.succeeded();
        let shared = Arc::clone(&self.shared);
        promote::offer(&shared, name, Arc::new(staged), class, move |outcome| {
            self.end(outcome.map_err(NotBrought::from));
        });
    }

    fn end(mut self, outcome: Result<(), NotBrought>) {
        self.outcome = outcome;
    }
}

impl Drop for Arrival {
    /// Tells everybody who waits, each with a loan of their own.
    fn drop(&mut self) {
        let waiting = self.shared.arrivals.table().remove(&self.id).unwrap_or_default();
        for on_end in waiting {
            let lent = || {
                let loan = self.shared.lend_named(self.tenant, &self.id);
                loan.ok_or(NotBrought::NotPromoted(NotPromoted::Gone))
            };
            on_end(self.outcome.clone().and_then(|()| lent()));
        }
    }
}
