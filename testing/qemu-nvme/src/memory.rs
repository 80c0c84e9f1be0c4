//! The guest's memory, which this process and QEMU share. It knows addresses as the controller sees
//! them, and nothing of what lies there.

use crate::Error;
use rustix::fs::MemfdFlags;
use rustix::mm::{MapFlags, ProtFlags};
use std::fs::File;
use std::ptr::NonNull;
use std::sync::atomic::AtomicU32;

/// Memory that the controller reaches by DMA, from address 0.
#[derive(Debug)]
pub struct GuestMemory {
    start: NonNull<u8>,
    bytes: usize,
    file: File,
}

// SAFETY: the mapping stays where it is until the value is dropped, and all access is through raw
// pointers or atomics.
unsafe impl Send for GuestMemory {}
// SAFETY: as above. Two threads that copy the same bytes at once race as they would with the
// device: bytes may be torn, nothing else happens.
unsafe impl Sync for GuestMemory {}

impl GuestMemory {
    /// Where the first MiB ends. The firmware's mailbox, its image and holes lie below it, so tests
    /// use only what comes after it.
    pub const FIRST_FREE: u64 = 1 << 20;

    pub(crate) fn new(bytes: usize) -> Result<GuestMemory, Error> {
        let file = anonymous_file("guest memory", bytes as u64)?;
        // SAFETY: a new mapping at an address that the system chooses.
        let mapped = unsafe {
            let flags = ProtFlags::READ | ProtFlags::WRITE;
            rustix::mm::mmap(std::ptr::null_mut(), bytes, flags, MapFlags::SHARED, &file, 0)
        };
        let mapped = mapped
            .map_err(|errno| Error::Io { what: "mapping guest memory".into(), source: errno.into() })?;
        let start = NonNull::new(mapped.cast()).expect("a mapping is nowhere else than at 0");
        Ok(GuestMemory { start, bytes, file })
    }

    /// Where it begins in this process.
    pub(crate) fn start(&self) -> NonNull<u8> {
        self.start
    }

    /// The file that QEMU maps too.
    pub(crate) fn file(&self) -> &File {
        &self.file
    }

    /// How many bytes there are.
    pub fn bytes(&self) -> u64 {
        self.bytes as u64
    }

    /// The word at an address, as both sides see it.
    ///
    /// # Panics
    /// Where the word is not aligned, or not within the memory.
    pub fn word(&self, address: u64) -> &AtomicU32 {
        assert!(address.is_multiple_of(4), "the word at {address:#x} is not aligned");
        let at = self.at(address, 4).cast::<AtomicU32>();
        // SAFETY: it lies within the mapping, which lives as long as `self`, and is aligned.
        unsafe { at.as_ref() }
    }

    /// Copies bytes out. What the controller writes meanwhile may come torn.
    ///
    /// # Panics
    /// Where the bytes are not within the memory.
    pub fn read(&self, address: u64, into: &mut [u8]) {
        let from = self.at(address, into.len());
        // SAFETY: `at` has looked at the bounds, and `into` is no part of the mapping, to which
        // there are no references but to atomics.
        unsafe { from.as_ptr().copy_to_nonoverlapping(into.as_mut_ptr(), into.len()) }
    }

    /// As [`GuestMemory::read`], into memory of its own.
    ///
    /// # Panics
    /// Where the bytes are not within the memory.
    pub fn copy(&self, address: u64, bytes: usize) -> Vec<u8> {
        let mut copy = vec![0; bytes];
        self.read(address, &mut copy);
        copy
    }

    /// Copies bytes in.
    ///
    /// # Panics
    /// Where the bytes are not within the memory.
    pub fn write(&self, address: u64, from: &[u8]) {
        let to = self.at(address, from.len());
        // SAFETY: as above.
        unsafe { to.as_ptr().copy_from_nonoverlapping(from.as_ptr(), from.len()) }
    }

    /// Sets bytes to one value.
    ///
    /// # Panics
    /// Where the bytes are not within the memory.
    pub fn fill(&self, address: u64, bytes: usize, value: u8) {
        // SAFETY: `at` has looked at the bounds.
        unsafe { self.at(address, bytes).as_ptr().write_bytes(value, bytes) }
    }

    fn at(&self, address: u64, bytes: usize) -> NonNull<u8> {
        let is_within = address.checked_add(bytes as u64).is_some_and(|end| end <= self.bytes());
        assert!(is_within, "{bytes} bytes at {address:#x} of {:#x} of guest memory", self.bytes);
        // SAFETY: it lies within the mapping.
        unsafe { self.start.add(address as usize) }
    }
}

impl Drop for GuestMemory {
    fn drop(&mut self) {
        // SAFETY: it is our own mapping, and nothing borrowed from it can outlive `self`.
        let unmapped = unsafe { rustix::mm::munmap(self.start.as_ptr().cast(), self.bytes) };
        debug_assert!(unmapped.is_ok(), "{unmapped:?}");
    }
}

/// A file that is nowhere in the file system, so that none is left behind however a test ends.
pub(crate) fn anonymous_file(name: &str, bytes: u64) -> Result<File, Error> {
    let file = rustix::fs::memfd_create(name, MemfdFlags::CLOEXEC)
        .map_err(|errno| Error::Io { what: format!("no memory for {name}"), source: errno.into() })?;
    let file = File::from(file);
    file.set_len(bytes).map_err(Error::io(format!("{name} of {bytes} bytes")))?;
    Ok(file)
}
