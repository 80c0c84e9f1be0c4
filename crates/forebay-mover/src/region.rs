//! Regions and spans: how memory is named without pointers. This file knows ids, places and lengths; it must never know
//! an address.

use crate::transfer::Refused;

/// Names a registered region. Ids are never reused while a mover lives.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RegionId(pub(crate) u32);

/// Where a region's bytes lie. Routes join two places.
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
    /// The region.
    pub region: RegionId,
    /// First byte, from the region's start.
    pub offset: u64,
    /// Length in bytes.
    pub len: u64,
}

/// A source and a target of equal length.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct SpanPair {
    /// Where the bytes are read.
    pub from: Span,
    /// Where they are written.
    pub to: Span,
}

impl Span {
    /// The span of `len` bytes at `offset` of `region`.
    pub fn new(region: RegionId, offset: u64, len: u64) -> Span {
        Span { region, offset, len }
    }

    /// The part of this span that starts `skip` bytes in and is `len` long. The caller keeps it inside the span.
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

    /// Length in bytes.
    pub(crate) fn len(&self) -> u64 {
        self.from.len
    }

    /// The part that starts `skip` bytes in and is `len` long, on both sides.
    pub(crate) fn part(&self, skip: u64, len: u64) -> SpanPair {
        SpanPair { from: self.from.part(skip, len), to: self.to.part(skip, len) }
    }

    /// Grows this pair by `next` when both sides are adjacent, so that one copy serves both. Says whether it did.
    pub(crate) fn merge(&mut self, next: &SpanPair) -> bool {
        let adjacent = self.from.continues_into(&next.from) && self.to.continues_into(&next.to);
        if adjacent {
            self.from.len += next.from.len;
            self.to.len += next.to.len;
        }
        adjacent
    }
}

/// What the schedule knows of each region.
#[derive(Debug, Default)]
pub(crate) struct RegionTable {
    regions: Vec<Option<Region>>,
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
        self.regions.push(Some(Region { place, len, users: 0 }));
        RegionId(self.regions.len() as u32 - 1)
    }

    /// Forgets a region. Refused while a transfer uses it.
    pub fn remove(&mut self, id: RegionId) -> Result<(), Refused> {
        let region = self.get(id)?;
        if region.users > 0 {
            return Err(Refused::RegionInUse { region: id, users: region.users });
        }
        self.regions[id.0 as usize] = None;
        Ok(())
    }

    /// The place of a span that lies inside its region.
    pub fn place_of(&self, span: &Span) -> Result<Place, Refused> {
        let region = self.get(span.region)?;
        match span.offset.checked_add(span.len) {
            Some(end) if end <= region.len => Ok(region.place),
            _ => Err(Refused::OutOfBounds { span: *span, region_bytes: region.len }),
        }
    }

    pub fn hold(&mut self, id: RegionId) {
        if let Some(Some(region)) = self.regions.get_mut(id.0 as usize) {
            region.users += 1;
        }
    }

    pub fn release(&mut self, id: RegionId) {
        if let Some(Some(region)) = self.regions.get_mut(id.0 as usize) {
            debug_assert!(region.users > 0, "a region is released as often as it is held");
            region.users = region.users.saturating_sub(1);
        }
    }

    fn get(&self, id: RegionId) -> Result<&Region, Refused> {
        self.regions.get(id.0 as usize).and_then(Option::as_ref).ok_or(Refused::UnknownRegion { region: id })
    }
}
