//! The memory tier: which chunks rest in the arena, who may read them, and what goes when room is needed. A sans-IO state
//! machine: time is an argument, and the bytes move elsewhere between a `begin` and its end. This file holds the state,
//! lookups and what changes single chunks; `write.rs` lets chunks in, `read.rs` grants and serves leases, `evict.rs` makes
//! room. None of them must ever touch the arena or know what the bytes mean.

mod evict;
mod read;
mod write;

pub use read::{Read, ReadEnd};
pub use write::{Begun, Write};

use crate::entry::{ChunkRef, Entry, EntryIx, State};
use crate::index::{BATCH, Index};
use crate::lease::Leases;
use crate::recency::Recency;
use crate::slots::{Refund, SlabError, Slots};
use crate::stat::{Faults, Refusals, Stat};
use crate::tenant::{Quotas, TenantId};
use crate::tree::Tree;
use forebay_kv::ChunkId;

/// The limits of a tier.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TierConfig {
    /// Length of the arena.
    pub capacity_bytes: u64,
    /// Length of a slab: the largest chunk, and the unit in which memory passes between chunks of different shapes. A
    /// multiple of [`SLOT_ALIGN_BYTES`](crate::SLOT_ALIGN_BYTES).
    pub slab_bytes: u64,
    /// Chunks known at most. Tables for so many are reserved at the start, 90 bytes each, and touched as they fill.
    pub max_chunks: u32,
    /// Leases alive at most.
    pub max_leases: usize,
    /// Longest time to live of a lease; longer wishes are cut to it.
    pub max_lease_us: u64,
    /// What a tenant may use that is not named in `quotas`.
    pub default_quota_bytes: u64,
    /// What single tenants may use.
    pub quotas: Vec<(TenantId, u64)>,
}

impl TierConfig {
    /// A tier without quotas: slabs of a 64th of the capacity, an index for chunks of 64 KiB and larger, 65,536 leases
    /// of at most a minute.
    pub fn new(capacity_bytes: u64) -> TierConfig {
        let align = crate::SLOT_ALIGN_BYTES;
        let slab_limit = crate::slots::NUMBER_LIMIT * align;
        TierConfig {
            capacity_bytes,
            slab_bytes: (capacity_bytes / 64 / align * align).clamp(align, slab_limit),
            max_chunks: u32::try_from(capacity_bytes / (64 << 10)).unwrap_or(u32::MAX).max(1024),
            max_leases: 65_536,
            max_lease_us: 60_000_000,
            default_quota_bytes: u64::MAX,
            quotas: Vec::new(),
        }
    }
}

/// Chunks in memory.
///
/// What may be found: the longest prefix of a sequence whose chunks are all here. A chunk is let in only below a parent
/// that is here or on its way, becomes visible when all of it is written, and is evicted before its parent, never after.
///
/// A chunk that is deleted or found corrupt while chunks below it stay leaves a *hole*: its id without bytes. Lookups end
/// before it; storing it again makes what is below visible again.
#[derive(Debug)]
pub struct MemoryTier {
    config: TierConfig,
    index: Index,
    entries: Vec<Entry>,
    tree: Tree,
    recency: Recency,
    slots: Slots,
    leases: Leases,
    quotas: Quotas,
    /// The latest time that any caller gave: time never runs backwards here.
    clock_us: u64,
    chunks: usize,
    stored: u64,
    evicted: u64,
    refusals: Refusals,
    faults: Faults,
}

impl MemoryTier {
    /// An empty tier.
    pub fn new(config: TierConfig) -> Result<MemoryTier, SlabError> {
        let slots = Slots::new(config.capacity_bytes, config.slab_bytes)?;
        let index = Index::new(config.max_chunks);
        let limit = index.limit();
        Ok(MemoryTier {
            index,
            entries: Vec::with_capacity(limit),
            tree: Tree::new(limit),
            recency: Recency::new(limit),
            slots,
            leases: Leases::new(config.max_leases),
            quotas: Quotas::new(config.default_quota_bytes, config.quotas.iter().copied()),
            clock_us: 0,
            chunks: 0,
            stored: 0,
            evicted: 0,
            refusals: Refusals::default(),
            faults: Faults::default(),
            config,
        })
    }

    /// How many of `ids`, a sequence from its first chunk on, are here without a gap. Looking is not using: only a lease
    /// keeps a chunk warm.
    pub fn lookup(&self, ids: &[ChunkId]) -> usize {
        self.prefix(ids).count()
    }

    /// The rows of the longest resident prefix.
    fn prefix<'a>(&'a self, ids: &'a [ChunkId]) -> impl Iterator<Item = EntryIx> + 'a {
        ids.chunks(BATCH)
            .flat_map(|batch| self.index.find_batch(batch).into_iter().take(batch.len()))
            .map_while(|row| row.filter(|row| self.entry(*row).is_resident()))
    }

    /// Keeps the longest resident prefix of `ids` from being evicted until it is unpinned, and says how long it is. What
    /// is pinned still counts against the tenant's quota.
    pub fn pin(&mut self, tenant: TenantId, ids: &[ChunkId]) -> usize {
        let rows: Vec<EntryIx> =
            self.prefix(ids).take_while(|row| self.entry(*row).tenant == tenant).collect();
        for row in &rows {
            self.entry_mut(*row).pinned = true;
        }
        rows.len()
    }

    /// Ends the pins of these chunks, and says how many there were.
    pub fn unpin(&mut self, tenant: TenantId, ids: &[ChunkId]) -> usize {
        let mut count = 0;
        for row in self.rows_of(tenant, ids) {
            if std::mem::take(&mut self.entry_mut(row).pinned) {
                count += 1;
                self.relist(row);
            }
        }
        count
    }

    /// Drops these chunks, even if they are leased, pinned or being written, and says how many there were. Nobody finds
    /// or reads them from now on; memory that an operation still uses is free when that ends.
    pub fn delete(&mut self, tenant: TenantId, ids: &[ChunkId]) -> usize {
        let rows = self.rows_of(tenant, ids);
        rows.into_iter().filter(|row| self.drop_bytes(*row)).count()
    }

    fn rows_of(&self, tenant: TenantId, ids: &[ChunkId]) -> Vec<EntryIx> {
        ids.iter()
            .filter_map(|id| self.index.find(id))
            .filter(|row| self.entry(*row).tenant == tenant)
            .collect()
    }

    /// Bytes of the arena at `offset_bytes` that were reported as lost are touched by nobody any more.
    pub fn quiet(&mut self, offset_bytes: u64, bytes: u64) {
        if let Some(slot) = self.slots.at_offset(offset_bytes) {
            let refund = self.slots.quiet(slot, bytes);
            self.refund(refund);
        }
    }

    /// All counters.
    pub fn stat(&self) -> Stat {
        Stat {
            capacity_bytes: self.config.capacity_bytes,
            arena: self.slots.usage(),
            chunks: self.chunks,
            rows: self.index.len(),
            leases: self.leases.len(),
            leases_expired: self.leases.expired(),
            stored: self.stored,
            evicted: self.evicted,
            refusals: self.refusals,
            faults: self.faults,
            tenants: self.quotas.report(),
            index_bytes: self.index.table_bytes()
                + self.tree.table_bytes()
                + self.recency.table_bytes()
                + (self.entries.capacity() * size_of::<Entry>()) as u64,
            slot_table_bytes: self.slots.table_bytes(),
        }
    }

    /// Takes in the time and ends the leases that are over.
    fn advance(&mut self, now_us: u64) {
        self.clock_us = self.clock_us.max(now_us);
        while let Some(grant) = self.leases.expire(self.clock_us) {
            self.let_go(&grant);
        }
    }

    fn entry(&self, row: EntryIx) -> &Entry {
        &self.entries[row.position()]
    }

    fn entry_mut(&mut self, row: EntryIx) -> &mut Entry {
        &mut self.entries[row.position()]
    }

    /// Whether the row still has the bytes that it had when the reference was made.
    fn is_live(&self, chunk: &ChunkRef) -> bool {
        self.entry(chunk.entry).generation == chunk.generation
    }

    fn refund(&mut self, refund: Option<Refund>) {
        if let Some(Refund { tenant, bytes }) = refund {
            self.quotas.credit(tenant, bytes);
        }
    }

    /// Takes the bytes of a row away, if it has any, and says whether it had: from now on it is a hole or, without
    /// descendants, nothing. Its place in the order of use falls to the first ancestor that has become evictable by it.
    fn drop_bytes(&mut self, row: EntryIx) -> bool {
        let entry = self.entry_mut(row);
        let (tenant, state, slot) = (entry.tenant, entry.state, entry.slot.take());
        if state == State::Hole {
            return false;
        }
        *entry = Entry { generation: entry.generation.saturating_add(1), ..Entry::unused(tenant) };
        self.chunks -= usize::from(state != State::Writing);
        if let Some(slot) = slot {
            let refund = self.slots.vacate(slot, tenant);
            self.refund(refund);
        }
        let heir = self.remove_empty_holes(row).filter(|heir| self.awaits_listing(*heir));
        match (state == State::Listed, heir) {
            (true, Some(heir)) => {
                self.recency.replace(row, heir, tenant);
                self.entry_mut(heir).state = State::Listed;
            }
            (true, None) => self.recency.remove(row, tenant),
            (false, Some(heir)) => self.relist(heir),
            (false, None) => {}
        }
        true
    }

    /// Forgets the row, and then each ancestor, as long as they are holes without children. Returns the first row that
    /// stays.
    fn remove_empty_holes(&mut self, row: EntryIx) -> Option<EntryIx> {
        let mut at = Some(row);
        while let Some(row) =
            at.filter(|row| self.entry(*row).state == State::Hole && self.tree.is_leaf(*row))
        {
            at = self.tree.remove(row);
            let reusable = self.entry(row).generation < u32::MAX;
            self.index.remove(row, reusable);
        }
        at
    }
}
