//! Scatter gather lists: descriptors of 16 bytes, one in the command and others in segments of
//! memory. Lists are built for each command, or once for a registered region of which commands use
//! slices. Which memory holds segments is the caller's business.

use super::memory::{ListPage, Segment};
use thiserror::Error;

/// Bytes of a descriptor.
pub const DESCRIPTOR_BYTES: usize = 16;

/// What a descriptor describes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    DataBlock,
    /// A segment of descriptors whose last one leads to another segment.
    Segment,
    LastSegment,
}

/// A descriptor, with an address as its subtype.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Descriptor {
    pub kind: Kind,
    pub address: u64,
    /// Of data, or of the segment: 16 a descriptor.
    pub bytes: u32,
}

/// Why memory or a list has no encoding.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum SglError {
    #[error("there are no segments; a transfer has at least one byte")]
    Nothing,
    #[error(
        "segment {segment} has {bytes} bytes from {address:#x}; 1 to 4,294,967,295 within 64 bits \
             are allowed"
    )]
    Range { segment: usize, address: u64, bytes: u64 },
    #[error("segment {segment} has {bytes} bytes from {address:#x}; this drive takes multiples of 4")]
    Alignment { segment: usize, address: u64, bytes: u64 },
    #[error(
        "list page {page} is at {address:#x} with {bytes} bytes; it begins at a multiple of 8 and has \
             room for a descriptor, or for two if others follow"
    )]
    ListPage { page: usize, address: u64, bytes: usize },
    #[error("{0} list pages are too few for the descriptors")]
    ListPages(usize),
    #[error("segment {segment} has {bytes} bytes; all but the last have as many as the first, {first}")]
    Uneven { segment: usize, bytes: u64, first: u64 },
    #[error("{bytes} bytes at {offset} are no part of a region of {region} bytes")]
    Slice { offset: u64, bytes: u64, region: u64 },
    #[error("{bytes} bytes at {offset} begin or end inside a segment of {segment} bytes")]
    SliceInSegment { offset: u64, bytes: u64, segment: u64 },
    #[error("{bytes} bytes at {offset} have descriptors in two pages of the list")]
    SliceInTwoLists { offset: u64, bytes: u64 },
}

impl Descriptor {
    /// The two 64-bit words of the encoding.
    #[inline]
    pub fn halves(self) -> (u64, u64) {
        let kind: u64 = match self.kind {
            Kind::DataBlock => 0,
            Kind::Segment => 2,
            Kind::LastSegment => 3,
        };
        (self.address, kind << 60 | u64::from(self.bytes))
    }

    #[inline]
    fn write(self, to: &mut [u8]) {
        let (low, high) = self.halves();
        to[..8].copy_from_slice(&low.to_le_bytes());
        to[8..16].copy_from_slice(&high.to_le_bytes());
    }
}

/// Encodes the segments in order, one data block each. Returns the descriptor of the command and
/// how many pages hold others: none for one segment. A page of the list holds as many descriptors
/// as its bytes have room for, so short pages make short segments.
pub fn encode(
    segments: &[Segment],
    multiples_of_4: bool,
    lists: &mut [ListPage<'_>],
) -> Result<(Descriptor, usize), SglError> {
    let granularity = if multiples_of_4 { 4 } else { 1 };
    if let [only] = segments {
        return Ok((data_block(0, *only, granularity)?, 0));
    }
    let mut remaining = segments.len();
    let first = lists.first().ok_or(SglError::ListPages(0))?;
    let in_command = link(first, remaining).ok_or(SglError::Nothing)?;
    let mut rest = segments.iter().enumerate();
    for at in 0..lists.len() {
        check_list(at, &lists[at], remaining)?;
        let room = lists[at].bytes.len() / DESCRIPTOR_BYTES;
        let here = if remaining <= room { remaining } else { room - 1 };
        remaining -= here;
        let next = lists.get(at + 1).and_then(|page| link(page, remaining));
        let (filled, after) = lists[at].bytes.split_at_mut(here * DESCRIPTOR_BYTES);
        for (slot, (segment, memory)) in filled.chunks_exact_mut(DESCRIPTOR_BYTES).zip(&mut rest) {
            data_block(segment, *memory, granularity)?.write(slot);
        }
        if remaining == 0 {
            return Ok((in_command, at + 1));
        }
        if let Some(next) = next {
            next.write(after);
        }
    }
    Err(SglError::ListPages(lists.len()))
}

/// The descriptor that leads to a page, on which this many data blocks and those that follow begin.
fn link(page: &ListPage<'_>, remaining: usize) -> Option<Descriptor> {
    let room = page.bytes.len() / DESCRIPTOR_BYTES;
    let kind = if remaining <= room { Kind::LastSegment } else { Kind::Segment };
    let bytes = (room.min(remaining) * DESCRIPTOR_BYTES) as u32;
    (remaining > 0).then_some(Descriptor { kind, address: page.address, bytes })
}

fn check_list(page: usize, list: &ListPage<'_>, remaining: usize) -> Result<(), SglError> {
    let needed = DESCRIPTOR_BYTES * remaining.min(2);
    match list.address.is_multiple_of(8) && list.bytes.len() >= needed {
        true => Ok(()),
        false => Err(SglError::ListPage { page, address: list.address, bytes: list.bytes.len() }),
    }
}

#[inline]
fn data_block(segment: usize, memory: Segment, granularity: u64) -> Result<Descriptor, SglError> {
    let Segment { address, bytes } = memory;
    let length = u32::try_from(bytes).ok().filter(|&bytes| bytes > 0);
    let (Some(length), Some(_)) = (length, memory.end()) else {
        return Err(SglError::Range { segment, address, bytes });
    };
    if !address.is_multiple_of(granularity) || !bytes.is_multiple_of(granularity) {
        return Err(SglError::Alignment { segment, address, bytes });
    }
    Ok(Descriptor { kind: Kind::DataBlock, address, bytes: length })
}

/// The data blocks of a whole region in segments of one size, of which commands use slices. No
/// descriptor leads to another page of the list, so a slice has its descriptors on one page.
#[derive(Debug)]
pub struct SglRegion<'a> {
    lists: Vec<ListPage<'a>>,
    per_list: u64,
    segment_bytes: u64,
    bytes: u64,
}

impl<'a> SglRegion<'a> {
    /// Writes the list. All segments but the last have one size, and so have all pages of the list.
    pub fn build(segments: &[Segment], mut lists: Vec<ListPage<'a>>) -> Result<SglRegion<'a>, SglError> {
        let segment_bytes = segments.first().ok_or(SglError::Nothing)?.bytes;
        let page_bytes = lists.first().ok_or(SglError::ListPages(0))?.bytes.len();
        let mut rest = segments.iter().enumerate();
        for (page, list) in lists.iter_mut().enumerate() {
            check_list(page, list, 1)?;
            if list.bytes.len() != page_bytes {
                return Err(SglError::ListPage { page, address: list.address, bytes: list.bytes.len() });
            }
            let slots = list.bytes.chunks_exact_mut(DESCRIPTOR_BYTES);
            for (slot, (segment, memory)) in slots.zip(rest.by_ref()) {
                let is_last = segment + 1 == segments.len();
                if memory.bytes > segment_bytes || (memory.bytes < segment_bytes && !is_last) {
                    return Err(SglError::Uneven { segment, bytes: memory.bytes, first: segment_bytes });
                }
                data_block(segment, *memory, 4)?.write(slot);
            }
        }
        if rest.next().is_some() {
            return Err(SglError::ListPages(lists.len()));
        }
        let per_list = (page_bytes / DESCRIPTOR_BYTES) as u64;
        let bytes = segments.iter().map(|segment| segment.bytes).sum();
        Ok(SglRegion { lists, per_list, segment_bytes, bytes })
    }

    /// The descriptor for a command on this part of the region: any part of a segment, or whole
    /// segments. Nothing is written.
    pub fn slice(&self, offset: u64, bytes: u64) -> Result<Descriptor, SglError> {
        let end = offset.checked_add(bytes).filter(|&end| end <= self.bytes && bytes > 0);
        let end = end.ok_or(SglError::Slice { offset, bytes, region: self.bytes })?;
        let (first, in_segment) = (offset / self.segment_bytes, offset % self.segment_bytes);
        let last = (end - 1) / self.segment_bytes;
        if first == last {
            let address = self.block_address(first) + in_segment;
            return Ok(Descriptor { kind: Kind::DataBlock, address, bytes: bytes as u32 });
        }
        if in_segment != 0 || (!end.is_multiple_of(self.segment_bytes) && end != self.bytes) {
            return Err(SglError::SliceInSegment { offset, bytes, segment: self.segment_bytes });
        }
        if first / self.per_list != last / self.per_list {
            return Err(SglError::SliceInTwoLists { offset, bytes });
        }
        let (list, at) = self.place(first);
        let length = (last - first + 1) as u32 * DESCRIPTOR_BYTES as u32;
        let address = self.lists[list].address + at as u64;
        Ok(Descriptor { kind: Kind::LastSegment, address, bytes: length })
    }

    fn block_address(&self, segment: u64) -> u64 {
        let (list, at) = self.place(segment);
        let bytes = &self.lists[list].bytes[at..];
        bytes.first_chunk().map_or(0, |address| u64::from_le_bytes(*address))
    }

    fn place(&self, segment: u64) -> (usize, usize) {
        let at = segment % self.per_list * DESCRIPTOR_BYTES as u64;
        ((segment / self.per_list) as usize, at as usize)
    }
}
