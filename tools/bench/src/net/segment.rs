//! The memory that blocks lie in, of a wished kind, the same at both ends. Driver: it maps memory
//! and reaches it by copies.

use super::gpu::{GpuMemory, GpuWay};
use crate::output::Error;
use forebay_net::{Access, Agent, Registration};
use forebay_transfer::{Arena, Pages};
use forebay_transfer::{Backing, HostBuffer};
use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};
use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;

/// One of the two ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    Asking,
    Owner,
}

/// A kind of memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Segment {
    /// What the allocator gives
    Heap,
    /// A file in memory, mapped shared, as a node's arena is
    Memfd,
    /// Anonymous memory for which transparent huge pages were asked
    Hugepages,
    /// Memory of a GPU, the first one here and the last one there
    Gpu,
}

const HUGE_PAGE_BYTES: usize = 2 << 20;
/// What is tried before it is said that a kind is possible.
const TRIED_BYTES: usize = 4 * HUGE_PAGE_BYTES;

impl Segment {
    /// As on the command line, and in a row's name.
    pub fn name(self) -> &'static str {
        match self {
            Segment::Heap => "heap",
            Segment::Memfd => "memfd",
            Segment::Hugepages => "hugepages",
            Segment::Gpu => "gpu",
        }
    }

    /// Whether this machine has it; an error says why not.
    pub fn check(self) -> Result<(), Error> {
        let tried = Memory::new(self, End::Asking, TRIED_BYTES)?;
        if self == Segment::Hugepages && tried.huge_bytes()? == 0 {
            return Err("the system gave none (/sys/kernel/mm/transparent_hugepage/enabled)".into());
        }
        Ok(())
    }
}

impl fmt::Display for Segment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Memory that an agent may move bytes from and to meanwhile: it is reached by copies only.
#[derive(Clone)]
pub struct Memory(Kind);

#[derive(Clone)]
enum Kind {
    Host(Arc<dyn Backing>),
    Gpu(Arc<GpuMemory>),
}

impl Memory {
    pub fn new(segment: Segment, end: End, bytes: usize) -> Result<Memory, Error> {
        Ok(Memory(match segment {
            Segment::Heap => Kind::Host(Arc::new(HostBuffer::new(bytes))),
            Segment::Memfd => Kind::Host(Arc::new(Arena::new(bytes as u64, Pages::Base)?)),
            Segment::Hugepages => Kind::Host(Arc::new(Advised::new(bytes)?)),
            Segment::Gpu => Kind::Gpu(Arc::new(GpuMemory::new(end == End::Owner, bytes)?)),
        }))
    }

    /// Offers all of it. The agent has to end before the memory is dropped.
    pub fn register(&self, agent: &Agent, way: GpuWay) -> Result<Registration, Error> {
        match &self.0 {
            Kind::Host(backing) => Ok(agent.register(Arc::clone(backing), Access::OPEN)?),
            Kind::Gpu(gpu) => gpu.register(agent, way),
        }
    }

    /// `None`: it is in host memory.
    pub fn gpu(&self) -> Option<&Arc<GpuMemory>> {
        match &self.0 {
            Kind::Host(_) => None,
            Kind::Gpu(gpu) => Some(gpu),
        }
    }

    /// Copies `bytes` to `offset`. Says whether they fit; nothing is written otherwise.
    pub fn write(&self, offset: usize, bytes: &[u8]) -> bool {
        let host = match &self.0 {
            Kind::Host(host) => host,
            Kind::Gpu(gpu) => return gpu.write(offset, bytes),
        };
        let fits = offset.checked_add(bytes.len()).is_some_and(|end| end <= host.len());
        if fits {
            // SAFETY: the range was checked; a caller's slice cannot overlap memory that is never
            // lent out.
            unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), host.as_ptr().add(offset), bytes.len()) };
        }
        fits
    }

    /// Copies from `offset` into `bytes`. Says whether the range exists; nothing is copied
    /// otherwise.
    pub fn read(&self, offset: usize, bytes: &mut [u8]) -> bool {
        let host = match &self.0 {
            Kind::Host(host) => host,
            Kind::Gpu(gpu) => return gpu.read(offset, bytes),
        };
        let fits = offset.checked_add(bytes.len()).is_some_and(|end| end <= host.len());
        if fits {
            // SAFETY: as in `write`.
            unsafe {
                std::ptr::copy_nonoverlapping(host.as_ptr().add(offset), bytes.as_mut_ptr(), bytes.len())
            };
        }
        fits
    }

    /// Bytes of it that lie in transparent huge pages now.
    pub fn huge_bytes(&self) -> Result<usize, Error> {
        let Kind::Host(host) = &self.0 else { return Ok(0) };
        let start = host.as_ptr() as usize;
        Ok(huge_bytes(&std::fs::read_to_string("/proc/self/smaps")?, start, start + host.len()))
    }
}

/// What the system says of the mappings that overlap a range.
fn huge_bytes(smaps: &str, start: usize, end: usize) -> usize {
    let (mut inside, mut kib) = (false, 0);
    for line in smaps.lines() {
        if let Some((from, to)) = addresses(line) {
            inside = from < end && start < to;
        } else if let Some(rest) = line.strip_prefix("AnonHugePages:").filter(|_| inside) {
            kib += rest.trim().trim_end_matches(" kB").parse().unwrap_or(0);
        }
    }
    kib << 10
}

/// The addresses at the head of a mapping's lines: `7f0000000000-7f0000200000 rw-p ...`.
fn addresses(line: &str) -> Option<(usize, usize)> {
    let (from, to) = line.split_whitespace().next()?.split_once('-')?;
    let address = |digits| usize::from_str_radix(digits, 16).ok();
    address(from).zip(address(to))
}

/// Anonymous memory from the start of a huge page on, with all of its pages present.
struct Advised {
    mapping: NonNull<u8>,
    mapped_bytes: usize,
    start: NonNull<u8>,
    len: usize,
}

impl Advised {
    fn new(len: usize) -> Result<Advised, Error> {
        let mapped_bytes = len.checked_add(HUGE_PAGE_BYTES).ok_or("it is too long")?;
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice replaces nothing.
        let mapping =
            unsafe { mmap_anonymous(std::ptr::null_mut(), mapped_bytes, access, MapFlags::PRIVATE) }?;
        let mapping = NonNull::new(mapping.cast::<u8>()).ok_or("there is no memory")?;
        // SAFETY: less than a huge page from the start of a mapping that is longer than one.
        let start = unsafe { mapping.add(mapping.align_offset(HUGE_PAGE_BYTES)) };
        let memory = Advised { mapping, mapped_bytes, start, len };
        memory.advise(Advice::LinuxHugepage).map_err(|error| format!("huge pages: {error}"))?;
        match memory.advise(Advice::LinuxPopulateWrite) {
            // Kernels before 5.14 do not know the advice: pages come when they are first written.
            Err(Errno::INVAL) => Ok(memory),
            outcome => Ok(outcome.map(|()| memory)?),
        }
    }

    fn advise(&self, advice: Advice) -> Result<(), Errno> {
        // SAFETY: the range is this mapping's own, and no advice that is given here changes its
        // contents.
        unsafe { madvise(self.start.as_ptr().cast(), self.len, advice) }
    }
}

// SAFETY: the mapping is owned, never moves, and is only reached through raw copies.
unsafe impl Send for Advised {}
// SAFETY: as above; who may touch which bytes when is the contract of `Backing`.
unsafe impl Sync for Advised {}

// SAFETY: the mapping lives as long as the value, is readable and writable, and neither moves nor
// resizes.
unsafe impl Backing for Advised {
    fn as_ptr(&self) -> *mut u8 {
        self.start.as_ptr()
    }

    fn len(&self) -> usize {
        self.len
    }
}

impl Drop for Advised {
    fn drop(&mut self) {
        // SAFETY: mapped in `new` with this length and unmapped only here. Failure leaves the
        // memory mapped: a leak.
        let _ = unsafe { munmap(self.mapping.as_ptr().cast(), self.mapped_bytes) };
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn every_kind_keeps_its_bytes_and_refuses_what_lies_outside() {
        for segment in [Segment::Heap, Segment::Memfd, Segment::Hugepages, Segment::Gpu] {
            let memory = match Memory::new(segment, End::Asking, TRIED_BYTES + 8) {
                Ok(memory) => memory,
                Err(error) => {
                    eprintln!("SKIPPED: {segment}: {error}");
                    continue;
                }
            };
            assert!(memory.write(TRIED_BYTES, &[7; 8]) && !memory.write(TRIED_BYTES + 1, &[7; 8]));
            let mut read = [0; 8];
            assert!(memory.read(TRIED_BYTES, &mut read) && !memory.read(usize::MAX, &mut read));
            assert_eq!(read, [7; 8], "{segment}");
        }
    }

    #[test]
    fn huge_pages_are_counted_in_the_mappings_of_the_range_only() {
        let smaps = "7f0000000000-7f0000200000 rw-p 00000000 00:00 0\nAnonHugePages:      2048 kB\n\
                     7f0000200000-7f0000600000 rw-p 00000000 00:00 0\nAnonHugePages:      4096 kB\nVmFlags: rd hg\n";
        assert_eq!(huge_bytes(smaps, 0x7f00_0020_0000, 0x7f00_0060_0000), 4 << 20);
        assert_eq!(huge_bytes(smaps, 0x7f00_001f_ffff, 0x7f00_0020_0001), 6 << 20);
        assert_eq!(huge_bytes(smaps, 0x7f00_0060_0000, 0x7f00_0070_0000), 0);
    }
}
