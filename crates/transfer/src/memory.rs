//! Memory: the addresses behind region ids. Links resolve spans here and nowhere else. Together
//! with the links it is the only place that touches pointers.

use crate::lock::RwLock;
use crate::region::{RegionId, Span};
use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::collections::HashMap;
use std::ptr::NonNull;
use std::sync::Arc;

/// Host-addressable memory that can be registered as a region.
///
/// # Safety
///
/// For as long as the value lives, `as_ptr() .. as_ptr() + len()` must be mapped, readable and
/// writable, and neither the address nor the length may change. Other code may read and write the
/// memory at the same time only under the rules that it agreed with the callers of the mover: a
/// span belongs to the mover from submission until its transfer ended.
pub unsafe trait Backing: Send + Sync {
    fn as_ptr(&self) -> *mut u8;
    fn len(&self) -> usize;
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
    /// Whether these bytes, which lie inside, are there to be read, and to be written if `write`.
    /// What keeps the promise above by itself always says yes. Memory whose owner may break it, by
    /// unmapping it or cutting its file, is looked at: links ask before each operation, and one
    /// that is told no fails.
    fn is_there(&self, _offset: usize, _len: usize, _write: bool) -> bool {
        true
    }
}

/// The table of registered host-addressable memory. A region stays here, and its backing alive,
/// until it is unregistered, which the mover refuses while a transfer uses it.
#[derive(Default)]
pub struct Memory {
    regions: RwLock<HashMap<RegionId, Arc<dyn Backing>>>,
}

impl Memory {
    /// Address and length of a span, or `None` when its region is not host-addressable, not
    /// registered, too short, or not there any more.
    /// The address stays valid while the region is registered; during an operation it is.
    pub fn host(&self, span: &Span) -> Option<(NonNull<u8>, usize)> {
        self.find(span, false)
    }

    /// As [`host`](Memory::host), for a span that is to be written.
    pub fn target(&self, span: &Span) -> Option<(NonNull<u8>, usize)> {
        self.find(span, true)
    }

    fn find(&self, span: &Span, write: bool) -> Option<(NonNull<u8>, usize)> {
        let regions = self.regions.read();
        let backing = regions.get(&span.region)?;
        let (offset, len) = (usize::try_from(span.offset).ok()?, usize::try_from(span.len).ok()?);
        let end = offset.checked_add(len)?;
        if end > backing.len() || !backing.is_there(offset, len, write) {
            return None;
        }
        // SAFETY: offset <= end <= len, so the address lies inside the backing's allocation or one
        // past its end.
        let start = unsafe { backing.as_ptr().add(offset) };
        NonNull::new(start).map(|start| (start, len))
    }

    /// Overwrites a span with zeros, and says whether it is there. The caller knows that nobody
    /// uses the span meanwhile.
    pub fn zero(&self, span: &Span) -> bool {
        let backing = self.regions.read().get(&span.region).map(Arc::clone);
        let (Some(_kept), Some((start, len))) = (backing, self.target(span)) else { return false };
        // SAFETY: the bytes lie inside of the region, whose backing is kept alive here; nobody else
        // uses them.
        unsafe { start.write_bytes(0, len) };
        true
    }

    /// Address and length of a whole region, for links that resolve many spans of it. As valid as
    /// for [`host`](Memory::host).
    pub fn whole(&self, region: RegionId) -> Option<(NonNull<u8>, usize)> {
        let regions = self.regions.read();
        let backing = regions.get(&region)?;
        NonNull::new(backing.as_ptr()).map(|start| (start, backing.len()))
    }

    pub(crate) fn insert(&self, region: RegionId, backing: Arc<dyn Backing>) {
        self.regions.write().insert(region, backing);
    }

    pub(crate) fn remove(&self, region: RegionId) {
        self.regions.write().remove(&region);
    }
}

impl std::fmt::Debug for Memory {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let regions = self.regions.read().len();
        f.debug_struct("Memory").field("regions", &regions).finish()
    }
}

/// Zeroed, page-aligned host memory for staging, for emulated devices and for tests.
///
/// Its bytes are shared with links on other threads, so they are read and written by copies, never
/// borrowed.
#[derive(Debug)]
pub struct HostBuffer {
    start: NonNull<u8>,
    layout: Layout,
}

const PAGE_BYTES: usize = 4096;

impl HostBuffer {
    /// `len` zeroed bytes, at least one.
    pub fn new(len: usize) -> HostBuffer {
        // A size that overflows becomes one that no allocator can give, which ends in
        // handle_alloc_error as any other allocation that is too large does.
        let layout = Layout::from_size_align(len.max(1), PAGE_BYTES)
            .unwrap_or_else(|_| handle_alloc_error(Layout::new::<u8>()));
        // SAFETY: the layout has a size above 0.
        let start = unsafe { alloc_zeroed(layout) };
        let start = NonNull::new(start).unwrap_or_else(|| handle_alloc_error(layout));
        HostBuffer { start, layout }
    }

    /// Copies `bytes` to `offset`. Says whether they fit; nothing is written otherwise.
    pub fn write(&self, offset: usize, bytes: &[u8]) -> bool {
        let fits = offset.checked_add(bytes.len()).is_some_and(|end| end <= self.len());
        if fits {
            // SAFETY: the range was checked; a caller's slice cannot overlap memory that is never
            // lent out.
            unsafe {
                std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.start.as_ptr().add(offset), bytes.len())
            };
        }
        fits
    }

    /// Copies from `offset` into `bytes`. Says whether the range exists; nothing is copied
    /// otherwise.
    pub fn read(&self, offset: usize, bytes: &mut [u8]) -> bool {
        let fits = offset.checked_add(bytes.len()).is_some_and(|end| end <= self.len());
        if fits {
            // SAFETY: the range was checked; a caller's slice cannot overlap memory that is never
            // lent out.
            unsafe {
                std::ptr::copy_nonoverlapping(
                    self.start.as_ptr().add(offset),
                    bytes.as_mut_ptr(),
                    bytes.len(),
                )
            };
        }
        fits
    }
}

// SAFETY: the allocation is owned, never moves, and is only reached through raw copies.
unsafe impl Send for HostBuffer {}
// SAFETY: as above; who may touch which bytes when is the contract of `Backing`.
unsafe impl Sync for HostBuffer {}

// SAFETY: the allocation lives as long as the value, is readable and writable, and neither moves
// nor resizes.
unsafe impl Backing for HostBuffer {
    fn as_ptr(&self) -> *mut u8 {
        self.start.as_ptr()
    }

    fn len(&self) -> usize {
        self.layout.size()
    }
}

impl Drop for HostBuffer {
    fn drop(&mut self) {
        // SAFETY: allocated in `new` with this layout and freed only here.
        unsafe { dealloc(self.start.as_ptr(), self.layout) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_span_outside_its_region_has_no_address() {
        let memory = Memory::default();
        let region = RegionId::nth(3);
        memory.insert(region, Arc::new(HostBuffer::new(100)));
        assert!(memory.host(&Span::new(region, 0, 100)).is_some());
        assert!(memory.host(&Span::new(region, 100, 0)).is_some());
        assert!(memory.host(&Span::new(region, 1, 100)).is_none());
        assert!(memory.host(&Span::new(region, u64::MAX, 2)).is_none());
        assert!(memory.host(&Span::new(RegionId::nth(4), 0, 1)).is_none());
        memory.remove(region);
        assert!(memory.host(&Span::new(region, 0, 1)).is_none());
    }

    #[test]
    fn a_host_buffer_refuses_ranges_outside_of_it() {
        let buffer = HostBuffer::new(8);
        assert!(buffer.write(4, &[1, 2, 3, 4]));
        assert!(!buffer.write(5, &[9; 4]));
        let mut read = [0; 4];
        assert!(buffer.read(4, &mut read));
        assert_eq!(read, [1, 2, 3, 4]);
        assert!(!buffer.read(usize::MAX, &mut read));
    }
}
