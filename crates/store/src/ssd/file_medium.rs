//! A volume's metadata on a file or raw partition: exact, blocking, direct I/O, and the lock that
//! makes one owner of it. This file knows system calls and alignment.

use super::error::SsdError;
use crate::disk::DiskError;
use crate::log::{Medium, PAGE_BYTES, VolumeSpace};
use forebay_transfer::lock::Mutex;
use forebay_transfer::{Backing, HostBuffer};
use rustix::fs::{self, FallocateFlags, FileType, FlockOperation, Mode, OFlags};
use rustix::io::{self as system, Errno};
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

/// Bytes that go through the scratch buffer at a time, for callers whose memory is not aligned.
const SCRATCH_BYTES: usize = 1 << 20;

/// A file or raw partition that this process owns until the value is dropped.
#[derive(Debug)]
pub struct FileMedium {
    file: File,
    bytes: u64,
    /// A partition has no file system that space could be given back to.
    is_file: bool,
    scratch: Mutex<HostBuffer>,
}

impl FileMedium {
    /// Opens a file or raw partition and takes its lock. A second owner, in this process or
    /// another, is refused.
    pub fn open(path: &Path) -> Result<FileMedium, SsdError> {
        FileMedium::open_as(path, OFlags::RDWR, FlockOperation::NonBlockingLockExclusive)
    }

    /// The same for reading alone, which needs no right to write. Others may read at the same time;
    /// an owner is refused meanwhile, and refuses.
    pub fn open_read_only(path: &Path) -> Result<FileMedium, SsdError> {
        FileMedium::open_as(path, OFlags::RDONLY, FlockOperation::NonBlockingLockShared)
    }

    /// Takes the name `path` for a file that is to be made: it is empty, or what an attempt left
    /// that was interrupted. While somebody else makes it that is refused.
    pub(super) fn claim(path: &Path) -> Result<FileMedium, SsdError> {
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::NOFOLLOW;
        loop {
            let opened = FileMedium::open_as(path, flags, FlockOperation::NonBlockingLockExclusive);
            if let Err(SsdError::Disk(DiskError::NoDirectIo { .. })) = opened {
                // The system makes the file before it finds that it has no direct I/O.
                let _ = fs::unlink(path);
            }
            let medium = opened?;
            // Whoever had the lock before may have given the file its name, or removed it.
            if medium.is_at(path) {
                return Ok(medium);
            }
        }
    }

    fn open_as(path: &Path, access: OFlags, lock: FlockOperation) -> Result<FileMedium, SsdError> {
        let failed =
            |doing| move |errno: Errno| DiskError::System { path: path.into(), doing, source: errno.into() };
        let flags = access | OFlags::DIRECT | OFlags::CLOEXEC;
        let mode = Mode::RUSR | Mode::WUSR;
        let fd = fs::open(path, flags, mode).map_err(|errno| DiskError::of_open(path, errno))?;
        match fs::flock(&fd, lock) {
            Ok(()) => {}
            Err(Errno::WOULDBLOCK) => {
                let locks = std::fs::read_to_string("/proc/locks").unwrap_or_default();
                let process = fs::fstat(&fd).ok().and_then(|file| owner_in(&locks, file.st_dev, file.st_ino));
                return Err(SsdError::SecondOwner { path: path.into(), process });
            }
            Err(errno) => return Err(failed("locking")(errno).into()),
        }
        let kind = FileType::from_raw_mode(fs::fstat(&fd).map_err(failed("asking what it is"))?.st_mode);
        let is_file = kind == FileType::RegularFile;
        if !is_file && kind != FileType::BlockDevice {
            return Err(DiskError::NotAFile { path: path.into() }.into());
        }
        let mut medium = FileMedium {
            file: fd.into(),
            bytes: 0,
            is_file,
            scratch: Mutex::new(HostBuffer::new(SCRATCH_BYTES)),
        };
        medium.measure().map_err(failed("finding its size"))?;
        Ok(medium)
    }

    /// Looks again how long it is.
    pub(super) fn measure(&mut self) -> Result<(), Errno> {
        let end = fs::seek(&self.file, fs::SeekFrom::End(0))?;
        self.bytes = end - end % PAGE_BYTES as u64;
        Ok(())
    }

    /// Whether `path` is this file's name.
    fn is_at(&self, path: &Path) -> bool {
        let same =
            |ours: fs::Stat, theirs: fs::Stat| (ours.st_dev, ours.st_ino) == (theirs.st_dev, theirs.st_ino);
        matches!((fs::fstat(&self.file), fs::lstat(path)), (Ok(ours), Ok(theirs)) if same(ours, theirs))
    }

    /// Whether it is a file, not a partition.
    pub fn is_file(&self) -> bool {
        self.is_file
    }

    fn allocate(&self, flags: FallocateFlags, offset: u64, bytes: u64) -> io::Result<()> {
        if !self.is_file {
            return Ok(());
        }
        Ok(system::retry_on_intr(|| fs::fallocate(&self.file, flags, offset, bytes))?)
    }
}

impl Drop for FileMedium {
    fn drop(&mut self) {
        // Closing is not enough: a thread of this process that starts another program holds a copy
        // of the descriptor for a moment, and the lock with it. If it fails, closing does what it
        // can.
        let _ = fs::flock(&self.file, FlockOperation::Unlock);
    }
}

impl Medium for FileMedium {
    fn bytes(&self) -> u64 {
        self.bytes
    }

    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> io::Result<()> {
        check_pages(offset, buffer.len())?;
        if is_aligned(buffer) {
            return self.file.read_exact_at(buffer, offset);
        }
        let mut scratch = self.scratch.lock();
        let mut offset = offset;
        for part in buffer.chunks_mut(SCRATCH_BYTES) {
            let aligned = &mut bytes_of(&mut scratch)[..part.len()];
            self.file.read_exact_at(aligned, offset)?;
            part.copy_from_slice(aligned);
            offset += part.len() as u64;
        }
        Ok(())
    }

    fn write_at(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        check_pages(offset, bytes.len())?;
        if is_aligned(bytes) {
            return self.file.write_all_at(bytes, offset);
        }
        let mut scratch = self.scratch.lock();
        let mut offset = offset;
        for part in bytes.chunks(SCRATCH_BYTES) {
            let aligned = &mut bytes_of(&mut scratch)[..part.len()];
            aligned.copy_from_slice(part);
            self.file.write_all_at(aligned, offset)?;
            offset += part.len() as u64;
        }
        Ok(())
    }

    fn sync(&self) -> io::Result<()> {
        Ok(system::retry_on_intr(|| fs::fdatasync(&self.file))?)
    }

    fn withdraw(&self, offset: u64, bytes: u64) -> io::Result<()> {
        self.allocate(FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, offset, bytes)
    }

    fn restore(&self, offset: u64, bytes: u64) -> io::Result<()> {
        self.allocate(FallocateFlags::empty(), offset, bytes)
    }

    fn space(&self) -> io::Result<VolumeSpace> {
        if !self.is_file {
            return Ok(VolumeSpace { held_bytes: self.bytes, free_bytes: None });
        }
        let held_bytes = u64::try_from(fs::fstat(&self.file)?.st_blocks).unwrap_or(0) * 512;
        let disk = fs::fstatvfs(&self.file)?;
        Ok(VolumeSpace { held_bytes, free_bytes: Some(disk.f_bavail.saturating_mul(disk.f_frsize)) })
    }
}

/// In the system's table of locks, the process that has one on a file of this device and inode.
fn owner_in(locks: &str, device: u64, inode: u64) -> Option<u32> {
    let wanted = format!("{:02x}:{:02x}:{inode}", fs::major(device), fs::minor(device));
    locks.lines().find_map(|line| {
        let mut words = line.split_whitespace().skip(1);
        let (kind, process, place) = (words.next()?, words.nth(2)?, words.next()?);
        (kind == "FLOCK" && place == wanted).then(|| process.parse().ok()).flatten()
    })
}

fn is_aligned(bytes: &[u8]) -> bool {
    bytes.as_ptr().addr().is_multiple_of(PAGE_BYTES)
}

fn check_pages(offset: u64, len: usize) -> io::Result<()> {
    let aligned = offset.is_multiple_of(PAGE_BYTES as u64) && len.is_multiple_of(PAGE_BYTES);
    let message = || format!("{len} bytes at {offset}: both must be multiples of {PAGE_BYTES}");
    aligned.then_some(()).ok_or_else(|| io::Error::new(io::ErrorKind::InvalidInput, message()))
}

fn bytes_of(buffer: &mut HostBuffer) -> &mut [u8] {
    // SAFETY: the buffer is borrowed exclusively, is not registered anywhere, and lives as long as
    // the borrow.
    unsafe { std::slice::from_raw_parts_mut(buffer.as_ptr(), buffer.len()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: usize = PAGE_BYTES;

    /// A file of so many pages on a disk that can do direct I/O, or nothing, loudly.
    fn file(pages: usize) -> Option<(tempfile::TempDir, FileMedium)> {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("volume");
        std::fs::write(&path, vec![0; pages * PAGE]).unwrap();
        match FileMedium::open(&path) {
            Ok(medium) => Some((directory, medium)),
            Err(SsdError::Disk(DiskError::NoDirectIo { path })) => {
                testkit::skipped(format_args!("no direct I/O at {}", path.display()));
                None
            }
            Err(error) => panic!("{error}"),
        }
    }

    #[test]
    fn bytes_come_back_wherever_the_callers_memory_lies() {
        let Some((_directory, medium)) = file(600) else { return };
        let bytes: Vec<u8> = (0..500 * PAGE + 1).map(|byte| (byte * 31 / 7) as u8).collect();
        // One of the two slices of each pair is not aligned.
        for shift in [0, 1] {
            let written = &bytes[shift..shift + 500 * PAGE];
            medium.write_at(7 * PAGE as u64, written).unwrap();
            let mut read = vec![0; 500 * PAGE + 1];
            medium.read_at(7 * PAGE as u64, &mut read[1 - shift..501 * PAGE - PAGE + 1 - shift]).unwrap();
            assert!(read[1 - shift..500 * PAGE + 1 - shift] == *written);
        }
        medium.sync().unwrap();
    }

    #[test]
    fn what_lies_beyond_the_end_is_an_error() {
        let Some((_directory, medium)) = file(4) else { return };
        let mut buffer = vec![0; 2 * PAGE];
        let error = medium.read_at(3 * PAGE as u64, &mut buffer).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof);
        for (offset, len) in [(1, PAGE), (0, PAGE - 1)] {
            let error = medium.write_at(offset, &vec![0; len]).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::InvalidInput);
        }
    }

    #[test]
    fn a_second_owner_is_refused_until_the_first_is_gone() {
        let Some((directory, medium)) = file(4) else { return };
        let path = directory.path().join("volume");
        let refused = FileMedium::open(&path).unwrap_err();
        assert!(matches!(&refused, SsdError::SecondOwner { path: named, .. } if *named == path));
        drop(medium);
        FileMedium::open(&path).unwrap();
    }

    #[test]
    fn the_owner_of_a_log_is_found_in_the_table_of_locks() {
        let table = "1: FLOCK  ADVISORY  WRITE 22458 fe:00:5491399 0 EOF\n\
                     2: POSIX  ADVISORY  WRITE 7 fe:00:12 0 EOF\n\
                     2: -> FLOCK  ADVISORY  WRITE 8 fe:00:12 0 EOF\n\
                     3: FLOCK  ADVISORY  WRITE 9 fe:00:12 0 EOF\n";
        let device = fs::makedev(0xfe, 0);
        assert_eq!(owner_in(table, device, 12), Some(9), "who waits for it has it not");
        assert_eq!(owner_in(table, device, 5491399), Some(22458));
        assert_eq!(owner_in(table, fs::makedev(8, 1), 12), None);
    }

    #[test]
    fn withdrawn_space_is_the_file_systems_until_it_is_restored() {
        let Some((_directory, medium)) = file(64) else { return };
        let held = || medium.space().unwrap().held_bytes;
        medium.write_at(0, &vec![7; 64 * PAGE]).unwrap();
        let before = held();
        medium.withdraw(8 * PAGE as u64, 32 * PAGE as u64).unwrap();
        assert_eq!(held(), before - 32 * PAGE as u64);
        let mut page = vec![1; PAGE];
        medium.read_at(8 * PAGE as u64, &mut page).unwrap();
        assert!(page.iter().all(|byte| *byte == 0));
        medium.restore(8 * PAGE as u64, 32 * PAGE as u64).unwrap();
        assert_eq!(held(), before);
        assert!(medium.space().unwrap().free_bytes.is_some());
    }
}
