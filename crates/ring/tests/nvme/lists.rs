//! Memory of lists for tests: pages at chosen addresses that the encoders fill and that the
//! controller's decoders read.

use forebay_ring::controller::{Extent, HostMemory, OutsideMemory};
use forebay_ring::nvme::{ListPage, Segment};

/// Where the first page of a list is; the others follow, not next to each other.
pub const LISTS: u64 = 0x7000_0000_0000;

/// Pages of a list, by address.
pub struct Lists(pub Vec<(u64, Vec<u8>)>);

impl Lists {
    /// Pages of these sizes; the first one begins so many bytes into its page.
    pub fn new(first_offset: u64, sizes: &[usize]) -> Lists {
        let offset = |at: u64| if at == 0 { first_offset } else { 0 };
        let page = |(at, bytes): (u64, &usize)| (LISTS + at * 0x10_0000 + offset(at), vec![0xee; *bytes]);
        Lists((0..).zip(sizes).map(page).collect())
    }

    /// Whole pages but for the first one, which has what is left behind its offset.
    pub fn of_pages(page_bytes: u64, first_offset: u64, count: usize) -> Lists {
        let size = |at| (page_bytes - if at == 0 { first_offset } else { 0 }) as usize;
        Lists::new(first_offset, &(0..count).map(size).collect::<Vec<_>>())
    }

    pub fn pages(&mut self) -> Vec<ListPage<'_>> {
        self.0.iter_mut().map(|(address, bytes)| ListPage { address: *address, bytes }).collect()
    }
}

impl HostMemory for Lists {
    fn contains(&self, address: u64, bytes: u64) -> bool {
        self.read(address, &mut vec![0; bytes as usize]).is_ok()
    }

    fn read(&self, address: u64, into: &mut [u8]) -> Result<(), OutsideMemory> {
        let inside = self.0.iter().find_map(|(start, bytes)| {
            let at = usize::try_from(address.checked_sub(*start)?).ok()?;
            bytes.get(at..at.checked_add(into.len())?)
        });
        let outside = OutsideMemory { address, bytes: into.len() };
        into.copy_from_slice(inside.ok_or(outside)?);
        Ok(())
    }

    fn write(&self, address: u64, from: &[u8]) -> Result<(), OutsideMemory> {
        Err(OutsideMemory { address, bytes: from.len() })
    }

    fn publish(&self, address: u64, _word: u32) -> Result<(), OutsideMemory> {
        Err(OutsideMemory { address, bytes: 4 })
    }
}

/// Ranges of memory in order, with those that follow each other made one.
pub fn merged(ranges: impl IntoIterator<Item = (u64, u64)>) -> Vec<(u64, u64)> {
    let mut merged: Vec<(u64, u64)> = Vec::new();
    for (address, bytes) in ranges.into_iter().filter(|(_, bytes)| *bytes > 0) {
        match merged.last_mut().filter(|(from, length)| from + length == address) {
            Some((_, length)) => *length += bytes,
            None => merged.push((address, bytes)),
        }
    }
    merged
}

pub fn of_segments(segments: &[Segment]) -> Vec<(u64, u64)> {
    merged(segments.iter().map(|segment| (segment.address, segment.bytes)))
}

pub fn of_extents(extents: &[Extent]) -> Vec<(u64, u64)> {
    merged(extents.iter().map(|extent| (extent.address, extent.bytes)))
}

pub fn total(segments: &[Segment]) -> u64 {
    segments.iter().map(|segment| segment.bytes).sum()
}
