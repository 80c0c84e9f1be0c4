//! Memory that two processes map: files without a name.

use forebay_transfer::Backing;
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, fstat, ftruncate, memfd_create};
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::AtomicU64;
use thiserror::Error;

/// Why memory of another process was not mapped.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum NotShared {
    #[error("the file is not sealed against being shortened")]
    NotSealed,
    #[error("the file has {bytes} bytes; allowed are 4096 to {most_bytes}")]
    Length { bytes: u64, most_bytes: u64 },
    #[error("the file cannot be mapped: {0}")]
    Map(#[from] Errno),
}

/// A file that is mapped whole, until this is dropped.
#[derive(Debug)]
pub struct SharedFile {
    start: NonNull<u8>,
    len: usize,
    file: OwnedFd,
}

// SAFETY: the mapping is owned and never moves.
unsafe impl Send for SharedFile {}
// SAFETY: as above; its bytes are reached as atomics or through addresses only.
unsafe impl Sync for SharedFile {}

const LEAST_BYTES: u64 = 4096;

impl SharedFile {
    /// A new file of zeroes, whose length nobody can change.
    pub fn create(bytes: u64) -> Result<SharedFile, NotShared> {
        let file = memfd_create("forebay-relay", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        ftruncate(&file, bytes)?;
        fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        SharedFile::open(file, bytes)
    }

    /// Maps a file that may have come from anybody.
    pub fn open(file: OwnedFd, most_bytes: u64) -> Result<SharedFile, NotShared> {
        // Files that know no seals are not in memory, or can be shortened.
        let seals = fcntl_get_seals(&file).map_err(|_| NotShared::NotSealed)?;
        if !seals.contains(SealFlags::SHRINK) {
            return Err(NotShared::NotSealed);
        }
        let bytes = u64::try_from(fstat(&file)?.st_size).unwrap_or(0);
        let len = usize::try_from(bytes).ok().filter(|_| (LEAST_BYTES..=most_bytes).contains(&bytes));
        let len = len.ok_or(NotShared::Length { bytes, most_bytes })?;
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice replaces nothing.
        let start = unsafe { mmap(std::ptr::null_mut(), len, access, MapFlags::SHARED, &file, 0) }?;
        let start = NonNull::new(start.cast()).ok_or(Errno::NOMEM)?;
        Ok(SharedFile { start, len, file })
    }

    pub fn file(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    /// The bytes as words that any process may change at any time.
    pub fn words(&self) -> &[AtomicU64] {
        // SAFETY: the mapping begins at a page, lives as long as the value and cannot be shortened;
        // every pattern of bits is a word, and atomics allow for others that write.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr().cast(), self.len / size_of::<AtomicU64>()) }
    }
}

impl Drop for SharedFile {
    fn drop(&mut self) {
        // SAFETY: mapped by `open`, unmapped once.
        let _ = unsafe { munmap(self.start.as_ptr().cast(), self.len) };
    }
}

// SAFETY: the mapping lives as long as the value, is readable and writable, neither moves nor can
// be shortened.
unsafe impl Backing for SharedFile {
    fn as_ptr(&self) -> *mut u8 {
        self.start.as_ptr()
    }

    fn len(&self) -> usize {
        self.len
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::Ordering;

    #[test]
    fn both_mappings_see_the_same_words() {
        let ours = SharedFile::create(8192).unwrap();
        let theirs = SharedFile::open(ours.file().try_clone_to_owned().unwrap(), 8192).unwrap();
        ours.words()[1023].store(7, Ordering::Relaxed);
        assert_eq!(theirs.words()[1023].load(Ordering::Relaxed), 7);
    }

    #[test]
    fn a_file_that_its_owner_could_shorten_is_refused() {
        let file = memfd_create("test", MemfdFlags::ALLOW_SEALING).unwrap();
        ftruncate(&file, 8192).unwrap();
        assert_eq!(SharedFile::open(file, 8192).unwrap_err(), NotShared::NotSealed);
        let on_disk = tempfile::tempfile().unwrap();
        on_disk.set_len(8192).unwrap();
        assert_eq!(SharedFile::open(on_disk.into(), 8192).unwrap_err(), NotShared::NotSealed);
    }

    #[test]
    fn a_file_that_is_too_long_is_refused() {
        let ours = SharedFile::create(8192).unwrap();
        let refused = SharedFile::open(ours.file().try_clone_to_owned().unwrap(), 4096).unwrap_err();
        assert_eq!(refused, NotShared::Length { bytes: 8192, most_bytes: 4096 });
    }
}
