//! Host memory that is there: mapped, of huge pages where the system has them, and with every page
//! present before anybody waits for it.

use super::error::PinError;
use crate::topology::MemoryFacts;
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, mmap_anonymous, munmap};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::thread;

/// A transparent huge page, and what threads that make pages present share the work by.
const HUGE_PAGE_BYTES: usize = 2 << 20;
const PAGE_BYTES: usize = 4096;

/// A mapping of this process's own, gone when it is dropped.
#[derive(Debug)]
pub struct Mapping {
    start: NonNull<u8>,
    len: usize,
    /// The file under it, where other processes are to map it too.
    file: Option<OwnedFd>,
}

// SAFETY: the mapping is owned and never moves.
unsafe impl Send for Mapping {}
// SAFETY: as above; it gives out an address only, never a reference.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// `bytes` zeroed bytes that are present, made so by up to `threads` threads. As a file where
    /// it is to be shared.
    pub fn new(bytes: u64, shared: bool, threads: usize) -> Result<Mapping, PinError> {
        let failed =
            |step| move |error| PinError::Map { bytes, step, error, host: Box::new(MemoryFacts::read()) };
        let len = usize::try_from(bytes).map_err(|_| failed("length")(Errno::NOMEM))?;
        let file = shared.then(|| Mapping::file(bytes)).transpose().map_err(failed("memfd"))?;
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice replaces nothing.
        let start = unsafe {
            match &file {
                Some(file) => mmap(std::ptr::null_mut(), len, access, MapFlags::SHARED, file, 0),
                None => mmap_anonymous(std::ptr::null_mut(), len, access, MapFlags::PRIVATE),
            }
        };
        let start = NonNull::new(start.map_err(failed("mmap"))?.cast());
        let mapping = Mapping { start: start.ok_or_else(|| failed("mmap")(Errno::NOMEM))?, len, file };
        if mapping.file.is_none() {
            // Forking copies pages that are pinned, all of them at once; a child could do nothing
            // with the copy.
            mapping.advise(Advice::LinuxDontFork).map_err(failed("madvise"))?;
        }
        // A kernel without huge pages refuses this, and small ones do.
        let _ = mapping.advise(Advice::LinuxHugepage);
        mapping.make_present(threads).map_err(failed("populate"))?;
        Ok(mapping)
    }

    /// A file in memory that cannot be shortened, so that mappings of it stay valid everywhere.
    fn file(bytes: u64) -> Result<OwnedFd, Errno> {
        let file = memfd_create("forebay-pinned", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        ftruncate(&file, bytes)?;
        fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        Ok(file)
    }

    /// Has the kernel give, and zero, all pages now. One thread zeroes a few GB a second, so
    /// several share the work.
    fn make_present(&self, threads: usize) -> Result<(), Errno> {
        let huge_pages = self.len.div_ceil(HUGE_PAGE_BYTES);
        let part = huge_pages.div_ceil(threads.max(1)).max(1) * HUGE_PAGE_BYTES;
        thread::scope(|scope| {
            let mut helpers = Vec::new();
            for offset in (0..self.len).step_by(part) {
                let populate = move || self.populate(offset, part.min(self.len - offset));
                match thread::Builder::new().spawn_scoped(scope, populate) {
                    Ok(helper) => helpers.push(helper),
                    // The system has no thread left: this one does it.
                    Err(_) => populate()?,
                }
            }
            helpers.into_iter().try_for_each(|helper| helper.join().unwrap_or(Err(Errno::CANCELED)))
        })
    }

    fn populate(&self, offset: usize, len: usize) -> Result<(), Errno> {
        // SAFETY: the callers' ranges lie in the mapping, and the advice changes no contents.
        let populated =
            unsafe { madvise(self.start.as_ptr().add(offset).cast(), len, Advice::LinuxPopulateWrite) };
        match populated {
            // Kernels before 5.14 do not know the advice.
            Err(Errno::INVAL) => {
                self.touch(offset, len);
                Ok(())
            }
            outcome => outcome,
        }
    }

    /// Writes to every page of a range of a mapping that nobody has been given yet.
    fn touch(&self, offset: usize, len: usize) {
        for page in (offset..offset + len).step_by(PAGE_BYTES) {
            // SAFETY: the range lies in the mapping, which is writable and still zero.
            unsafe { self.start.as_ptr().add(page).write_volatile(0) };
        }
    }

    fn advise(&self, advice: Advice) -> Result<(), Errno> {
        // SAFETY: the range is this mapping, and no advice that is given here changes its contents.
        unsafe { madvise(self.start.as_ptr().cast(), self.len, advice) }
    }

    pub fn start(&self) -> NonNull<u8> {
        self.start
    }

    pub fn len(&self) -> usize {
        self.len
    }

    /// The file under it, if there is one.
    pub fn file_descriptor(&self) -> Option<BorrowedFd<'_>> {
        self.file.as_ref().map(AsFd::as_fd)
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: mapped by `new`, unmapped once.
        let _ = unsafe { munmap(self.start.as_ptr().cast(), self.len) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Pages of a mapping that are in memory.
    fn present(mapping: &Mapping) -> usize {
        let mut pages = vec![0u8; mapping.len.div_ceil(PAGE_BYTES)];
        // SAFETY: the range is mapped, and there is a byte for each of its pages.
        let status =
            unsafe { libc::mincore(mapping.start.as_ptr().cast(), mapping.len, pages.as_mut_ptr().cast()) };
        assert_eq!(status, 0);
        pages.iter().filter(|page| **page & 1 == 1).count()
    }

    #[test]
    fn every_page_is_present_whatever_the_length_and_the_number_of_threads() {
        for (bytes, threads) in [(4096, 4), (5 << 20, 1), (5 << 20, 3), ((8 << 20) + 4096, 16)] {
            for shared in [false, true] {
                let mapping = Mapping::new(bytes, shared, threads).unwrap();
                assert_eq!(present(&mapping), bytes as usize / PAGE_BYTES);
                assert_eq!(mapping.file_descriptor().is_some(), shared);
            }
        }
    }

    #[test]
    fn pages_are_present_also_where_the_kernel_has_to_be_made_to_by_touching() {
        let mapping = Mapping::new(1 << 20, false, 1).unwrap();
        // SAFETY: the range is this mapping, whose contents nobody needs.
        unsafe { madvise(mapping.start.as_ptr().cast(), mapping.len, Advice::LinuxDontNeed) }.unwrap();
        assert_eq!(present(&mapping), 0);
        mapping.touch(0, mapping.len);
        assert_eq!(present(&mapping), 256);
    }

    #[test]
    fn a_length_that_no_host_has_is_refused_with_what_there_is() {
        let refused = Mapping::new(1 << 60, false, 1).unwrap_err();
        assert!(matches!(refused, PinError::Map { bytes, .. } if bytes == 1 << 60));
        assert!(refused.to_string().contains("memory"), "{refused}");
    }
}
