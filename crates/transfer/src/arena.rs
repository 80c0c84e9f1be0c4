//! The arena: the memory that chunks rest in.

use crate::Backing;
use rustix::fs::{
    FallocateFlags, MemfdFlags, SealFlags, fallocate, fcntl_add_seals, fcntl_get_seals, fstat, ftruncate,
    memfd_create,
};
use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, munmap};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use thiserror::Error;

/// Which pages an arena is made of, or should be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pages {
    Base,
    /// The kernel was asked for transparent huge pages and gives them as it can.
    Transparent,
    /// Reserved huge pages of 2 MiB.
    Huge,
}

/// A file in memory, mapped, with all of its pages present: what does not fit fails when the arena
/// is made, not when a chunk is stored.
///
/// The file cannot be shortened, so that the mapping stays valid also in processes that it is
/// shared with, nor lengthened by one of them, which would be memory that nobody counts.
#[derive(Debug)]
pub struct Arena {
    file: OwnedFd,
    start: NonNull<u8>,
    len: usize,
    pages: Pages,
}

/// Why there is no arena.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("an arena of {bytes} bytes: {step}: {error}")]
pub struct ArenaError {
    pub bytes: u64,
    pub step: &'static str,
    pub error: Errno,
}

const HUGE_PAGE_BYTES: u64 = 2 << 20;

impl Arena {
    /// An arena of `bytes` bytes, zeroed, of the wished pages or the next smaller kind that there
    /// is.
    /// [`pages`](Arena::pages) tells which.
    pub fn new(bytes: u64, wish: Pages) -> Result<Arena, ArenaError> {
        if wish == Pages::Huge
            && bytes.is_multiple_of(HUGE_PAGE_BYTES)
            && let Ok(arena) = Arena::map(bytes, Pages::Huge)
        {
            return Ok(arena);
        }
        Arena::map(bytes, if wish == Pages::Base { Pages::Base } else { Pages::Transparent })
    }

    fn map(bytes: u64, pages: Pages) -> Result<Arena, ArenaError> {
        let failed = |step| move |error| ArenaError { bytes, step, error };
        let len = usize::try_from(bytes).map_err(|_| failed("length")(Errno::NOMEM))?;
        let huge = if pages == Pages::Huge { MemfdFlags::HUGETLB } else { MemfdFlags::empty() };
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING | huge;
        let file = memfd_create("forebay-arena", flags).map_err(failed("memfd_create"))?;
        ftruncate(&file, bytes).map_err(failed("ftruncate"))?;
        // Whoever has the file can write it, and punch holes that read as zeros, which checksums
        // find. Nobody can change its length, or seal it against those who come later.
        let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
        fcntl_add_seals(&file, seals).map_err(failed("seal"))?;
        let start = map_shared(&file, len).map_err(failed("mmap"))?;
        let mut arena = Arena { file, start, len, pages };
        arena.make_present().map_err(failed("populate"))?;
        Ok(arena)
    }

    /// The arena of another process, by its file: the same memory, which that process may go on
    /// using also when this one ends. A file that could be shortened under the mapping is refused.
    /// Children of this process do not get the mapping.
    pub fn attach(file: OwnedFd) -> Result<Arena, ArenaError> {
        let arena = Arena::map_sealed(file, Pages::Base)?;
        let failed = |error| ArenaError { bytes: arena.len as u64, step: "madvise", error };
        arena.advise(Advice::LinuxDontFork).map_err(failed)?;
        Ok(arena)
    }

    /// The arena of a process that gives it up, by its file: what it wrote is there. A file that
    /// could be shortened under the mapping is refused.
    pub fn take_over(file: OwnedFd, pages: Pages) -> Result<Arena, ArenaError> {
        let mut arena = Arena::map_sealed(file, pages)?;
        if pages == Pages::Transparent && arena.advise(Advice::LinuxHugepage).is_err() {
            arena.pages = Pages::Base;
        }
        Ok(arena)
    }

    fn map_sealed(file: OwnedFd, pages: Pages) -> Result<Arena, ArenaError> {
        let failed = |bytes, step| move |error| ArenaError { bytes, step, error };
        let stat = fstat(&file).map_err(failed(0, "fstat"))?;
        let bytes = u64::try_from(stat.st_size).unwrap_or(0);
        let seals = fcntl_get_seals(&file).map_err(failed(bytes, "seals"))?;
        let len = usize::try_from(bytes).map_err(|_| failed(bytes, "length")(Errno::NOMEM))?;
        if !seals.contains(SealFlags::SHRINK) || len == 0 {
            return Err(failed(bytes, "not a sealed file")(Errno::INVAL));
        }
        let start = map_shared(&file, len).map_err(failed(bytes, "mmap"))?;
        Ok(Arena { file, start, len, pages })
    }

    /// Has the kernel give all pages now.
    fn make_present(&mut self) -> Result<(), Errno> {
        if self.pages == Pages::Transparent && self.advise(Advice::LinuxHugepage).is_err() {
            self.pages = Pages::Base;
        }
        match self.advise(Advice::LinuxPopulateWrite) {
            // Kernels before 5.14 do not know the advice.
            Err(Errno::INVAL) => fallocate(&self.file, FallocateFlags::empty(), 0, self.len as u64),
            outcome => outcome,
        }
    }

    fn advise(&self, advice: Advice) -> Result<(), Errno> {
        // SAFETY: the range is this arena's own mapping, and no advice that is given here changes
        // its contents.
        unsafe { madvise(self.start.as_ptr().cast(), self.len, advice) }
    }

    pub fn pages(&self) -> Pages {
        self.pages
    }
}

fn map_shared(file: &OwnedFd, len: usize) -> Result<NonNull<u8>, Errno> {
    let (access, shared) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED);
    // SAFETY: a new mapping at an address of the kernel's choice replaces nothing.
    let start = unsafe { mmap(std::ptr::null_mut(), len, access, shared, file, 0) }?;
    NonNull::new(start.cast()).ok_or(Errno::NOMEM)
}

impl AsFd for Arena {
    /// The file, for mapping it in another process.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

// SAFETY: the mapping is owned, never moves, and is only reached through raw copies.
unsafe impl Send for Arena {}
// SAFETY: as above; who may touch which bytes when is the contract of `Backing`.
unsafe impl Sync for Arena {}

// SAFETY: the mapping lives as long as the value, is readable and writable, neither moves nor
// resizes, and the file under it is sealed against shrinking.
unsafe impl Backing for Arena {
    fn as_ptr(&self) -> *mut u8 {
        self.start.as_ptr()
    }

    fn len(&self) -> usize {
        self.len
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        // SAFETY: mapped in `map` with this length and unmapped only here. Failure leaves the
        // memory mapped: a leak.
        let _ = unsafe { munmap(self.start.as_ptr().cast(), self.len) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn an_arena_has_all_its_pages_from_the_start() {
        for wish in [Pages::Base, Pages::Transparent, Pages::Huge] {
            let arena = Arena::new(4 * MIB, wish).unwrap();
            assert!(arena.pages() == wish || wish == Pages::Huge || arena.pages() == Pages::Base);
            assert_eq!(arena.len() as u64, 4 * MIB);
            let stat = rustix::fs::fstat(&arena).unwrap();
            assert_eq!(stat.st_blocks as u64 * 512, 4 * MIB, "{wish:?}");
            // SAFETY: the last byte of the mapping, which nobody else uses.
            assert_eq!(unsafe { arena.as_ptr().add(arena.len() - 1).read() }, 0);
        }
    }

    #[test]
    fn what_one_mapping_writes_the_other_reads_and_a_file_that_may_shrink_is_refused() {
        let arena = Arena::new(MIB, Pages::Base).unwrap();
        let other = Arena::attach(arena.as_fd().try_clone_to_owned().unwrap()).unwrap();
        assert_eq!(other.len(), arena.len());
        // SAFETY: inside of both mappings, which nobody else uses.
        let seen = unsafe {
            arena.as_ptr().add(77).write(5);
            other.as_ptr().add(77).read()
        };
        assert_eq!(seen, 5);
        let unsealed = memfd_create("unsealed", MemfdFlags::ALLOW_SEALING).unwrap();
        ftruncate(&unsealed, MIB).unwrap();
        assert!(Arena::attach(unsealed).is_err());
    }

    #[test]
    fn whoever_has_the_file_changes_neither_its_length_nor_its_seals() {
        let arena = Arena::new(MIB, Pages::Base).unwrap();
        let theirs = arena.as_fd().try_clone_to_owned().unwrap();
        for bytes in [0, MIB - 4096, MIB + 4096, 1 << 30] {
            assert_eq!(ftruncate(&theirs, bytes), Err(Errno::PERM), "{bytes}");
        }
        assert_eq!(fallocate(&theirs, FallocateFlags::empty(), MIB, 4096), Err(Errno::PERM));
        for seal in [SealFlags::WRITE, SealFlags::FUTURE_WRITE] {
            assert_eq!(fcntl_add_seals(&theirs, seal), Err(Errno::PERM), "{seal:?}");
        }
        let later = Arena::attach(arena.as_fd().try_clone_to_owned().unwrap()).unwrap();
        assert_eq!(later.len() as u64, MIB);
    }

    #[test]
    fn an_impossible_length_is_an_error() {
        for bytes in [0, u64::MAX, 1 << 62] {
            let error = Arena::new(bytes, Pages::Huge).unwrap_err();
            assert_eq!(error.bytes, bytes);
        }
    }
}
