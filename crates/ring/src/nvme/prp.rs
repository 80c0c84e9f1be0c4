//! Physical region pages: two addresses in the command, or one and a list of the others. Lists are
//! built for each command, or once for a registered region of which commands use slices. Which
//! memory holds lists is the caller's business.

use super::memory::{ListPage, Segment};
use thiserror::Error;

/// Bytes of an entry of a list.
pub const ENTRY_BYTES: u64 = 8;

/// The two addresses of a command. A transfer within one page leaves the second at 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Prp {
    pub prp1: u64,
    pub prp2: u64,
}

/// Why memory or a list has no encoding.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum PrpError {
    #[error("page_bytes is {0}; powers of two from 4,096 are allowed")]
    PageBytes(u64),
    #[error("there are no segments; a transfer has at least one byte")]
    Nothing,
    #[error("segment {segment} has {bytes} bytes from {address:#x}; it must have some, within 64 bits")]
    Range { segment: usize, address: u64, bytes: u64 },
    #[error("the data begin at {0:#x}; multiples of 4 are allowed")]
    Start(u64),
    #[error(
        "segment {segment} leaves a gap at {address:#x}; only the first may begin inside a page, \
             and only the last may end there"
    )]
    Gap { segment: usize, address: u64 },
    #[error(
        "list page {page} is at {address:#x} with {bytes} bytes; the first begins at a multiple of 8, \
             others at a page, and all but the last reach their page's end"
    )]
    ListPage { page: usize, address: u64, bytes: usize },
    #[error("{0} list pages are too few for the entries")]
    ListPages(usize),
    #[error("{bytes} bytes at {offset} are no part of a region of {region} bytes from a multiple of 4")]
    Slice { offset: u64, bytes: u64, region: u64 },
    #[error("{bytes} bytes at {offset} go on into another page of the list; up to {longest} are allowed")]
    SliceInTwoLists { offset: u64, bytes: u64, longest: u64 },
}

/// Encodes the segments in order. Returns how many pages hold the list: none, as a rule, below
/// three pages of data.
pub fn encode(
    segments: &[Segment],
    page_bytes: u64,
    lists: &mut [ListPage<'_>],
) -> Result<(Prp, usize), PrpError> {
    let pages = count_pages(segments, page_bytes)?;
    let mut entries = Entries::new(segments, page_bytes);
    let prp1 = entries.next().ok_or(PrpError::Nothing)?;
    match pages {
        1 => Ok((Prp { prp1, prp2: 0 }, 0)),
        2 => Ok((Prp { prp1, prp2: entries.next().unwrap_or(0) }, 0)),
        _ => {
            let used = write_list(entries, pages - 1, page_bytes, lists)?;
            Ok((Prp { prp1, prp2: lists[0].address }, used))
        }
    }
}

/// Pages that the segments touch, if PRPs can describe them.
fn count_pages(segments: &[Segment], page_bytes: u64) -> Result<u64, PrpError> {
    check_page(page_bytes)?;
    let first = segments.first().ok_or(PrpError::Nothing)?;
    if !first.address.is_multiple_of(4) {
        return Err(PrpError::Start(first.address));
    }
    let mut pages = 0;
    for (segment, &Segment { address, bytes }) in segments.iter().enumerate() {
        let end = end_of(segment, segments[segment])?;
        if segment > 0 && !address.is_multiple_of(page_bytes) {
            return Err(PrpError::Gap { segment, address });
        }
        if segment + 1 < segments.len() && !end.is_multiple_of(page_bytes) {
            return Err(PrpError::Gap { segment, address: end });
        }
        pages += (address % page_bytes + bytes).div_ceil(page_bytes);
    }
    Ok(pages)
}

fn check_page(page_bytes: u64) -> Result<(), PrpError> {
    match page_bytes.is_power_of_two() && page_bytes >= 4096 {
        true => Ok(()),
        false => Err(PrpError::PageBytes(page_bytes)),
    }
}

fn end_of(segment: usize, Segment { address, bytes }: Segment) -> Result<u64, PrpError> {
    let end = address.checked_add(bytes).filter(|_| bytes > 0);
    end.ok_or(PrpError::Range { segment, address, bytes })
}

/// Writes so many entries. Where a page cannot hold all that remain, its last eight bytes are the
/// address of the next one.
fn write_list(
    mut entries: Entries<'_>,
    mut remaining: u64,
    page_bytes: u64,
    lists: &mut [ListPage<'_>],
) -> Result<usize, PrpError> {
    for at in 0..lists.len() {
        let next = lists.get(at + 1).map(|page| page.address);
        let room = list_room(at, &lists[at], page_bytes)?;
        let ends_here = remaining <= room.entries;
        let here = if ends_here { remaining } else { room.entries - 1 };
        let (filled, rest) = lists[at].bytes.split_at_mut((here * ENTRY_BYTES) as usize);
        for (slot, entry) in filled.chunks_exact_mut(ENTRY_BYTES as usize).zip(&mut entries) {
            slot.copy_from_slice(&entry.to_le_bytes());
        }
        if ends_here {
            return Ok(at + 1);
        }
        let (Some(next), true) = (next, room.reaches_end) else { break };
        if let Some(slot) = rest.first_chunk_mut() {
            *slot = next.to_le_bytes();
        }
        remaining -= here;
    }
    Err(PrpError::ListPages(lists.len()))
}

struct ListRoom {
    entries: u64,
    /// Only at the end of a page does the drive look for the next one's address.
    reaches_end: bool,
}

fn list_room(page: usize, list: &ListPage<'_>, page_bytes: u64) -> Result<ListRoom, PrpError> {
    let to_end = page_bytes - list.address % page_bytes;
    let bytes = to_end.min(list.bytes.len() as u64);
    let alignment = if page == 0 { ENTRY_BYTES } else { page_bytes };
    if !list.address.is_multiple_of(alignment) || bytes < ENTRY_BYTES {
        return Err(PrpError::ListPage { page, address: list.address, bytes: list.bytes.len() });
    }
    Ok(ListRoom { entries: bytes / ENTRY_BYTES, reaches_end: bytes == to_end })
}

/// The address of each page's first byte that takes part.
struct Entries<'a> {
    segments: std::slice::Iter<'a, Segment>,
    page_bytes: u64,
    next: u64,
    end: u64,
}

impl Entries<'_> {
    fn new(segments: &[Segment], page_bytes: u64) -> Entries<'_> {
        Entries { segments: segments.iter(), page_bytes, next: 0, end: 0 }
    }
}

impl Iterator for Entries<'_> {
    type Item = u64;

    #[inline]
    fn next(&mut self) -> Option<u64> {
        if self.next >= self.end {
            let segment = self.segments.next()?;
            (self.next, self.end) = (segment.address, segment.address + segment.bytes);
        }
        let entry = self.next;
        // The last page of the address space has no next one.
        self.next = (entry & !(self.page_bytes - 1)).saturating_add(self.page_bytes);
        Some(entry)
    }
}

/// The list of a whole region, of which commands use slices. Its pages are not chained: the last
/// eight bytes of a page are an entry, since a drive takes them for one exactly if nothing follows.
/// So a slice stays within one page of the list, 2 MiB of data with pages of 4 KiB.
#[derive(Debug)]
pub struct PrpRegion<'a> {
    lists: Vec<ListPage<'a>>,
    page_bytes: u64,
    bytes: u64,
}

impl<'a> PrpRegion<'a> {
    /// Writes the list. Segments and list pages are whole pages.
    pub fn build(
        segments: &[Segment],
        page_bytes: u64,
        mut lists: Vec<ListPage<'a>>,
    ) -> Result<PrpRegion<'a>, PrpError> {
        let pages = count_pages(segments, page_bytes)?;
        let first = segments.first().filter(|first| !first.address.is_multiple_of(page_bytes));
        if let Some(first) = first {
            return Err(PrpError::Gap { segment: 0, address: first.address });
        }
        let per_list = page_bytes / ENTRY_BYTES;
        if (lists.len() as u64) < pages.div_ceil(per_list) {
            return Err(PrpError::ListPages(lists.len()));
        }
        let mut entries = Entries::new(segments, page_bytes);
        for (page, list) in lists.iter_mut().enumerate() {
            if !list.address.is_multiple_of(page_bytes) || list.bytes.len() as u64 != page_bytes {
                return Err(PrpError::ListPage { page, address: list.address, bytes: list.bytes.len() });
            }
            for (slot, entry) in list.bytes.chunks_exact_mut(ENTRY_BYTES as usize).zip(entries.by_ref()) {
                slot.copy_from_slice(&entry.to_le_bytes());
            }
        }
        let bytes = segments.iter().map(|segment| segment.bytes).sum();
        Ok(PrpRegion { lists, page_bytes, bytes })
    }

    /// The addresses for a command on this part of the region. Nothing is written.
    pub fn slice(&self, offset: u64, bytes: u64) -> Result<Prp, PrpError> {
        let is_inside = offset.checked_add(bytes).is_some_and(|end| end <= self.bytes);
        if !is_inside || bytes == 0 || !offset.is_multiple_of(4) {
            return Err(PrpError::Slice { offset, bytes, region: self.bytes });
        }
        let (first, in_page) = (offset / self.page_bytes, offset % self.page_bytes);
        let prp1 = self.entry(first) + in_page;
        match (in_page + bytes).div_ceil(self.page_bytes) {
            1 => Ok(Prp { prp1, prp2: 0 }),
            2 => Ok(Prp { prp1, prp2: self.entry(first + 1) }),
            _ if bytes > self.longest(offset) => {
                Err(PrpError::SliceInTwoLists { offset, bytes, longest: self.longest(offset) })
            }
            _ => Ok(Prp { prp1, prp2: self.entry_address(first + 1) }),
        }
    }

    /// The most bytes from an offset of the region that one page of the list covers: what a slice
    /// may have. The first page of the data stands in the command.
    pub fn longest(&self, offset: u64) -> u64 {
        let per_list = self.page_bytes / ENTRY_BYTES;
        let second = offset / self.page_bytes + 1;
        let end = (second / per_list + 1) * per_list * self.page_bytes;
        end.min(self.bytes).saturating_sub(offset)
    }

    fn entry(&self, page: u64) -> u64 {
        let (list, at) = self.place(page);
        let bytes = &self.lists[list].bytes[at..];
        bytes.first_chunk().map_or(0, |entry| u64::from_le_bytes(*entry))
    }

    fn entry_address(&self, page: u64) -> u64 {
        let (list, at) = self.place(page);
        self.lists[list].address + at as u64
    }

    fn place(&self, page: u64) -> (usize, usize) {
        let per_list = self.page_bytes / ENTRY_BYTES;
        ((page / per_list) as usize, (page % per_list * ENTRY_BYTES) as usize)
    }
}
