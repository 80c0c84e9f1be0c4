//! Regions and spans: how memory is named without pointers.

use thiserror::Error;

/// Names a registered region. No other region of a mover ever has the same id.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RegionId {
    /// Where it is in the table; used again when the region is gone,
    slot: u32,
    /// for another generation.
    generation: u32,
}

/// Where a region's bytes lie. Paths join two places.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Place {
    /// Host memory of a NUMA node.
    Host(u16),
    /// Memory of a GPU, by the node's own numbering.
    Device(u16),
    /// An SSD or a partition of one.
    Disk(u16),
    /// Memory owned by another node.
    Peer(u32),
}

/// Bytes `offset .. offset + len` of a region.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Span {
    pub region: RegionId,
    /// First byte, from the region's start.
    pub offset: u64,
    pub len: u64,
}

/// A source and a target of equal length.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct SpanPair {
    pub from: Span,
    pub to: Span,
}

impl Span {
    pub fn new(region: RegionId, offset: u64, len: u64) -> Span {
        Span { region, offset, len }
    }

    /// The part of this span that starts `skip` bytes in and is `len` long. The caller keeps it
    /// inside the span.
    pub(crate) fn part(&self, skip: u64, len: u64) -> Span {
        debug_assert!(skip + len <= self.len);
        Span { region: self.region, offset: self.offset + skip, len }
    }

    /// Whether `next` starts where this span ends.
    fn continues_into(&self, next: &Span) -> bool {
        self.region == next.region && self.offset + self.len == next.offset
    }
}

impl SpanPair {
    /// Bytes of `from` go to `to`. Lengths are checked when the transfer is submitted.
    pub fn new(from: Span, to: Span) -> SpanPair {
        SpanPair { from, to }
    }

    /// The regions that it joins.
    pub(crate) fn between(&self) -> (RegionId, RegionId) {
        (self.from.region, self.to.region)
    }

    pub(crate) fn len(&self) -> u64 {
        self.from.len
    }

    /// The part that starts `skip` bytes in and is `len` long, on both sides.
    pub(crate) fn part(&self, skip: u64, len: u64) -> SpanPair {
        SpanPair { from: self.from.part(skip, len), to: self.to.part(skip, len) }
    }

    /// Grows this pair by `next` when both sides are adjacent, so that one copy serves both. Says
    /// whether it did.
    pub fn merge(&mut self, next: &SpanPair) -> bool {
        let adjacent = self.from.continues_into(&next.from) && self.to.continues_into(&next.to);
        if adjacent {
            self.from.len += next.from.len;
            self.to.len += next.to.len;
        }
        adjacent
    }
}

/// What the schedule knows of each region. As long as there ever were regions at a time: programs
/// that register and forget memory for years do not make it grow.
#[derive(Debug, Default)]
pub(crate) struct RegionTable {
    slots: Vec<Slot>,
    free: Vec<u32>,
}

#[derive(Debug, Default)]
struct Slot {
    generation: u32,
    region: Option<Region>,
}

#[derive(Debug)]
struct Region {
    place: Place,
    len: u64,
    /// Transfers that name this region and have not ended, and operations of theirs that are lost.
    users: u32,
}

impl RegionTable {
    pub fn add(&mut self, place: Place, len: u64) -> RegionId {
        let slot = self.free.pop().unwrap_or_else(|| {
            self.slots.push(Slot::default());
            self.slots.len() as u32 - 1
        });
        let found = &mut self.slots[slot as usize];
        found.region = Some(Region { place, len, users: 0 });
        RegionId { slot, generation: found.generation }
    }

    /// Forgets a region. Refused while a transfer uses it.
    pub fn remove(&mut self, id: RegionId) -> Result<(), Refused> {
        let region = self.get(id)?;
        if region.users > 0 {
            return Err(Refused::RegionInUse { region: id, users: region.users });
        }
        let slot = &mut self.slots[id.slot as usize];
        slot.region = None;
        // A slot whose generations are used up stays empty.
        if let Some(next) = slot.generation.checked_add(1) {
            slot.generation = next;
            self.free.push(id.slot);
        }
        Ok(())
    }

    /// The place of a span that lies inside its region.
    pub fn place_of(&self, span: &Span) -> Result<Place, Refused> {
        self.place_of_all(span.region, std::iter::once(span))
    }

    /// The place of a region that holds all of these spans of it.
    pub fn place_of_all<'a>(
        &self,
        region: RegionId,
        mut spans: impl Iterator<Item = &'a Span>,
    ) -> Result<Place, Refused> {
        let region = self.get(region)?;
        let outside = spans.find(|span| span.offset.checked_add(span.len).is_none_or(|end| end > region.len));
        match outside {
            None => Ok(region.place),
            Some(span) => Err(Refused::OutOfBounds { span: *span, region_bytes: region.len }),
        }
    }

    pub fn hold(&mut self, id: RegionId) {
        if let Some(region) = self.get_mut(id) {
            region.users += 1;
        }
    }

    pub fn release(&mut self, id: RegionId) {
        if let Some(region) = self.get_mut(id) {
            debug_assert!(region.users > 0, "a region is released as often as it is held");
            region.users = region.users.saturating_sub(1);
        }
    }

    fn get(&self, id: RegionId) -> Result<&Region, Refused> {
        let slot = self.slots.get(id.slot as usize).filter(|slot| slot.generation == id.generation);
        slot.and_then(|slot| slot.region.as_ref()).ok_or(Refused::UnknownRegion { region: id })
    }

    fn get_mut(&mut self, id: RegionId) -> Option<&mut Region> {
        let slot = self.slots.get_mut(id.slot as usize).filter(|slot| slot.generation == id.generation);
        slot.and_then(|slot| slot.region.as_mut())
    }
}

#[cfg(test)]
impl RegionId {
    /// An id as the `nth` region of a new mover has it.
    pub(crate) fn nth(nth: u32) -> RegionId {
        RegionId { slot: nth, generation: 0 }
    }
}

/// Why a wish was not accepted. Nothing was moved and nothing will be.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum Refused {
    #[error("region {region:?} is not registered")]
    UnknownRegion { region: RegionId },
    #[error("span {span:?} reaches outside its region of {region_bytes} bytes")]
    OutOfBounds { span: Span, region_bytes: u64 },
    #[error("a pair must have equal lengths above 0: from {from_bytes} to {to_bytes} bytes")]
    Length { from_bytes: u64, to_bytes: u64 },
    #[error("no live path from {from:?} to {to:?}")]
    NoPath { from: Place, to: Place },
    #[error("{queued} transfers are queued; at most {limit} may be")]
    TooManyTransfers { queued: usize, limit: usize },
    #[error("{pairs} pairs in one transfer; at most {limit} may be")]
    TooManyPairs { pairs: usize, limit: usize },
    #[error("region {region:?} is used by {users} transfers")]
    RegionInUse {
        region: RegionId,
        /// Transfers, or lost operations, that hold it.
        users: u32,
    },
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn the_table_is_as_long_as_there_were_regions_at_a_time_and_no_id_comes_back() {
        let (mut table, mut seen) = (RegionTable::default(), HashSet::new());
        let kept = table.add(Place::Host(0), 10);
        for len in 1..1_000 {
            let [one, other] = [table.add(Place::Peer(1), len), table.add(Place::Peer(2), len)];
            assert!(seen.insert(one) && seen.insert(other));
            for gone in [one, other] {
                assert_eq!(table.remove(gone), Ok(()));
                assert_eq!(table.remove(gone), Err(Refused::UnknownRegion { region: gone }));
            }
            assert!(table.place_of(&Span::new(one, 0, 1)).is_err(), "an id of a region that is gone");
        }
        assert_eq!(table.place_of(&Span::new(kept, 0, 10)), Ok(Place::Host(0)));
        assert_eq!(table.slots.len(), 3);
    }

    #[test]
    fn a_slot_whose_generations_are_used_up_is_not_used_again() {
        let mut table = RegionTable::default();
        let first = table.add(Place::Host(0), 1);
        table.slots[0].generation = u32::MAX;
        let last = RegionId { generation: u32::MAX, ..first };
        assert_eq!(table.remove(last), Ok(()));
        assert_eq!(table.add(Place::Host(0), 1).slot, 1);
        assert!(table.place_of(&Span::new(last, 0, 1)).is_err());
    }
}
