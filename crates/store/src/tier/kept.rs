//! What memory keeps, as one process says it to another that goes on with the same memory: which
//! chunk lies where, what continues what, and in which order they were used. Pure: whoever says it
//! may be wrong, so that everything is checked.

use super::{MemoryTier, TierConfig};
use crate::entry::{Entry, Row, State};
use crate::pins::Pins;
use crate::shape::ChunkShape;
use crate::slots::{SlabError, slot_bytes};
use crate::tenant::TenantId;
use forebay_kv::ChunkId;
use std::collections::HashMap;
use std::sync::Arc;
use thiserror::Error;

/// How long a chunk stays pinned that came so from another process: until when that one had it
/// pinned is not handed over.
const PINNED_ON_US: u64 = 600_000_000;

/// Chunks of a memory tier that nothing touches.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Kept {
    /// A chunk comes behind the one that it continues.
    pub chunks: Vec<KeptChunk>,
    /// Places in `chunks`, from the chunk used longest ago to the one used last. Those that could
    /// not go when it was last tried are missing.
    pub coldest_first: Vec<u32>,
}

/// A chunk and where it lies.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KeptChunk {
    pub id: ChunkId,
    pub tenant: TenantId,
    pub pinned: bool,
    /// The place in [`Kept::chunks`] of the nearest chunk before it that memory has.
    pub parent: Option<u32>,
    pub offset_bytes: u64,
    pub shape: Arc<ChunkShape>,
    /// The CRC-32C of each layer.
    pub checksums: Vec<u32>,
}

/// Why what is said to be kept cannot be.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum NotAdopted {
    #[error(transparent)]
    Slabs(#[from] SlabError),
    #[error("chunk {chunk} is said to be there twice")]
    Twice { chunk: usize },
    #[error("chunk {chunk} continues chunk {parent}, which is not before it or is another tenant's")]
    Parent { chunk: usize, parent: u32 },
    #[error(
        "chunk {chunk} of {bytes} bytes at {offset_bytes} lies where none of its shape can, or over another"
    )]
    Place { chunk: usize, offset_bytes: u64, bytes: u64 },
    #[error("chunk {chunk} has {given} checksums for {layers} layers")]
    Checksums { chunk: usize, given: usize, layers: usize },
    #[error("more chunks than the {limit} that this memory has room for in its tables")]
    Full { limit: usize },
    #[error("the order of use names place {place}, of {chunks} chunks, or names it twice")]
    Order { place: u32, chunks: usize },
}

impl MemoryTier {
    /// Whether nothing reads or writes any slot, now or later.
    pub fn is_quiet(&self) -> bool {
        self.space.is_quiet()
    }

    /// What it keeps. Chunks that are being written are not kept.
    pub fn kept(&self) -> Kept {
        let mut kept = Kept::default();
        let mut places: HashMap<Row, u32> = HashMap::with_capacity(self.chunks);
        for row in self.resident_rows() {
            let line = self.resident_line(row).take_while(|row| !places.contains_key(row));
            for row in line.collect::<Vec<Row>>().into_iter().rev() {
                let parent = self.resident_line(row).nth(1).and_then(|parent| places.get(&parent).copied());
                let Some(chunk) = self.kept_chunk(row, parent) else { continue };
                places.insert(row, kept.chunks.len() as u32);
                kept.chunks.push(chunk);
            }
        }
        let by_use =
            std::iter::successors(self.recency.coldest(), |row| self.recency.next_warmer(Some(*row)));
        kept.coldest_first = by_use.filter_map(|row| places.get(&row).copied()).collect();
        kept
    }

    /// A chunk and those before it that are here, the nearest first.
    fn resident_line(&self, row: Row) -> impl Iterator<Item = Row> + '_ {
        let up = std::iter::successors(Some(row), |row| self.tree.parent(*row));
        up.filter(|row| self.entry(*row).is_resident())
    }

    fn kept_chunk(&self, row: Row, parent: Option<u32>) -> Option<KeptChunk> {
        let entry = self.entry(row);
        let slot = entry.slot?;
        Some(KeptChunk {
            id: *self.index.id(row),
            tenant: entry.tenant,
            pinned: entry.pinned,
            parent,
            offset_bytes: self.space.offset_bytes(slot),
            shape: Arc::clone(self.space.shape(slot)),
            checksums: self.space.checksums(slot).to_vec(),
        })
    }

    /// A tier that has these chunks already, where they lie. A tenant may have more than its quota:
    /// it evicts some of its own when it stores the next one.
    pub fn adopt(config: TierConfig, kept: &Kept) -> Result<MemoryTier, NotAdopted> {
        let mut tier = MemoryTier::new(config)?;
        let mut rows = Vec::with_capacity(kept.chunks.len());
        for (number, chunk) in kept.chunks.iter().enumerate() {
            let row = tier.adopt_chunk(number, chunk, &rows)?;
            rows.push(row);
        }
        tier.space.count_free();
        let mut is_listed = vec![false; rows.len()];
        for place in &kept.coldest_first {
            let bad = NotAdopted::Order { place: *place, chunks: rows.len() };
            let listed = is_listed.get_mut(*place as usize).filter(|listed| !**listed).ok_or(bad)?;
            *listed = true;
            tier.touch(rows[*place as usize]);
        }
        let unlisted = rows.into_iter().zip(is_listed).filter(|(_, is_listed)| !is_listed);
        unlisted.for_each(|(row, _)| tier.park(row));
        Ok(tier)
    }

    fn adopt_chunk(&mut self, number: usize, chunk: &KeptChunk, rows: &[Row]) -> Result<Row, NotAdopted> {
        let KeptChunk { id, tenant, pinned, parent, offset_bytes, shape, checksums } = chunk;
        let layers = shape.layers();
        if checksums.len() != layers {
            return Err(NotAdopted::Checksums { chunk: number, given: checksums.len(), layers });
        }
        if self.index.find(id).is_some() {
            return Err(NotAdopted::Twice { chunk: number });
        }
        let parent = match parent {
            None => None,
            Some(parent) => {
                let row = rows.get(*parent as usize).filter(|row| self.entry(**row).tenant == *tenant);
                Some(*row.ok_or(NotAdopted::Parent { chunk: number, parent: *parent })?)
            }
        };
        let row = self.index.insert(id).ok_or(NotAdopted::Full { limit: self.index.limit() })?;
        let (offset_bytes, bytes) = (*offset_bytes, shape.bytes());
        let bad = NotAdopted::Place { chunk: number, offset_bytes, bytes };
        let slot = self.space.adopt(offset_bytes, shape, row).ok_or(bad)?;
        self.space.set_checksums(slot, checksums);
        self.quotas.charge_over(*tenant, slot_bytes(shape));
        let (slot, pinned) = (Some(slot), *pinned);
        self.put_recovered(row, parent, Entry { slot, state: State::Listed, ..Entry::unused(*tenant) });
        if pinned {
            self.set_pin(row, Pins::end_of(self.clock_us, PINNED_ON_US));
        }
        Ok(row)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tier::Begun;
    use proptest::prelude::*;

    const PAGE: u64 = 4096;
    const CAPACITY: u64 = 16 * PAGE;

    fn config() -> TierConfig {
        TierConfig { slab_bytes: 4 * PAGE, max_chunks: 64, ..TierConfig::new(CAPACITY) }
    }

    fn id(number: u8) -> ChunkId {
        let mut bytes = [number; 32];
        bytes[1] = 7;
        ChunkId::from_bytes(bytes)
    }

    fn shape(kind: u8) -> ChunkShape {
        ChunkShape::new(vec![PAGE / 2; 1 + usize::from(kind % 3)]).unwrap()
    }

    fn store(tier: &mut MemoryTier, number: u8, parent: Option<u8>, kind: u8) {
        let (shape, parent) = (shape(kind), parent.map(id));
        let tenant = TenantId(u16::from(kind / 8));
        if let Ok(Begun::Write(write)) = tier.begin_write(0, tenant, &id(number), parent.as_ref(), &shape) {
            let checksums: Vec<u32> =
                (0..shape.layers() as u32).map(|layer| layer + u32::from(number)).collect();
            tier.commit(0, write, &checksums).unwrap();
        }
    }

    /// A tier with a history: what is stored, used and deleted, in this order.
    fn tier(steps: &[(u8, u8, Option<u8>, u8)]) -> MemoryTier {
        let mut tier = MemoryTier::new(config()).unwrap();
        for (what, number, parent, kind) in steps.iter().copied() {
            match what {
                0..5 => store(&mut tier, number, parent, kind),
                5 => tier.used(TenantId(0), &[id(number)]),
                6 => drop(tier.pin(0, TenantId(0), &id(number), 1_000_000)),
                7 => drop(tier.unpin(0, TenantId(0), &id(number))),
                _ => drop(tier.delete(TenantId(0), &[id(number)])),
            }
        }
        tier
    }

    fn steps() -> impl Strategy<Value = Vec<(u8, u8, Option<u8>, u8)>> {
        prop::collection::vec((0u8..9, 0u8..24, prop::option::of(0u8..24), 0u8..9), 0..120)
    }

    /// The chunks that go one after another when room is needed.
    fn evicted(mut tier: MemoryTier) -> Vec<ChunkId> {
        let mut gone = Vec::new();
        let all: Vec<ChunkId> = (0..24).map(id).collect();
        let mut here: Vec<ChunkId> = all.into_iter().filter(|id| tier.contains(id)).collect();
        while tier.evict_coldest() {
            gone.extend(here.extract_if(.., |id| !tier.contains(id)));
        }
        gone
    }

    proptest! {
        #[test]
        fn a_tier_that_is_taken_over_has_the_same_chunks_and_evicts_them_in_the_same_order(steps in steps()) {
            let before = tier(&steps);
            let kept = before.kept();
            let after = MemoryTier::adopt(config(), &kept).unwrap();
            prop_assert_eq!(&after.kept(), &kept);
            let (old, new) = (before.stat(), after.stat());
            prop_assert_eq!((old.arena, old.chunks, &old.tenants), (new.arena, new.chunks, &new.tenants));
            // What had been set aside comes back to the order at the same times.
            prop_assert_eq!(evicted(before), evicted(after));
        }

        #[test]
        fn what_is_said_to_be_kept_and_cannot_be_is_refused_or_harmless(
            steps in steps(),
            (at, field, value) in (any::<prop::sample::Index>(), 0u8..8, any::<u64>()),
        ) {
            let mut kept = tier(&steps).kept();
            prop_assume!(!kept.chunks.is_empty());
            let at = at.index(kept.chunks.len());
            let near = value % (2 * CAPACITY);
            let chunk = &mut kept.chunks[at];
            match field {
                0 => chunk.offset_bytes = value,
                1 => chunk.offset_bytes = near,
                2 => chunk.offset_bytes = near - near % PAGE,
                3 => chunk.parent = Some(value as u32 % 70),
                4 => chunk.shape = Arc::new(shape(value as u8)),
                5 => chunk.checksums.resize(value as usize % 5, 0),
                6 => chunk.id = id(value as u8),
                _ => kept.coldest_first.push(value as u32 % 70),
            }
            if let Ok(tier) = MemoryTier::adopt(config(), &kept) {
                let mut ends: Vec<(u64, u64)> = Vec::new();
                for chunk in &tier.kept().chunks {
                    let end = chunk.offset_bytes + slot_bytes(&chunk.shape);
                    prop_assert!(end <= CAPACITY, "inside of the memory");
                    prop_assert!(ends.iter().all(|(from, to)| end <= *from || *to <= chunk.offset_bytes));
                    ends.push((chunk.offset_bytes, end));
                }
                evicted(tier);
            }
        }
    }

    #[test]
    fn each_lie_about_what_is_kept_has_its_reason() {
        let kept = tier(&[(0, 1, None, 1), (0, 2, Some(1), 1), (0, 3, None, 1)]).kept();
        assert_eq!(kept.chunks.len(), 3);
        let refused = |change: &dyn Fn(&mut Kept)| {
            let mut kept = kept.clone();
            change(&mut kept);
            MemoryTier::adopt(config(), &kept).unwrap_err()
        };
        let place = |offset_bytes| NotAdopted::Place { chunk: 2, offset_bytes, bytes: PAGE };
        for outside in [CAPACITY, u64::MAX, 1, kept.chunks[0].offset_bytes] {
            assert_eq!(refused(&|kept| kept.chunks[2].offset_bytes = outside), place(outside));
        }
        assert_eq!(refused(&|kept| kept.chunks[2].id = id(1)), NotAdopted::Twice { chunk: 2 });
        let parent = NotAdopted::Parent { chunk: 1, parent: 1 };
        assert_eq!(refused(&|kept| kept.chunks[1].parent = Some(1)), parent);
        let parent = NotAdopted::Parent { chunk: 1, parent: 0 };
        assert_eq!(refused(&|kept| kept.chunks[1].tenant = TenantId(5)), parent);
        let checksums = NotAdopted::Checksums { chunk: 0, given: 1, layers: 2 };
        assert_eq!(refused(&|kept| kept.chunks[0].checksums.truncate(1)), checksums);
        let order = NotAdopted::Order { place: 0, chunks: 3 };
        assert_eq!(refused(&|kept| kept.coldest_first = vec![0, 0]), order);
    }

    #[test]
    fn memory_is_quiet_only_when_nothing_reads_or_writes_it() {
        let mut tier = tier(&[(0, 1, None, 0)]);
        assert!(tier.is_quiet());
        let (read, _) = tier.begin_copy(0, TenantId(0), &id(1)).unwrap();
        assert!(!tier.is_quiet());
        tier.end_read(0, read, crate::ReadEnd::Done);
        assert!(tier.is_quiet());
        let Ok(Begun::Write(write)) = tier.begin_write(0, TenantId(0), &id(2), None, &shape(0)) else {
            panic!("there is room");
        };
        assert!(!tier.is_quiet());
        assert_eq!(tier.kept().chunks.len(), 1, "what is being written is not kept");
        tier.abort(0, write, 1);
        assert!(!tier.is_quiet(), "a lost operation may still write");
    }
}
