//! Files that disk links work on: preallocated or a raw partition, opened for direct I/O, and
//! refused with a clear reason when they would fail later. This file knows file systems and
//! devices.

use super::plan::DISK_ALIGN_BYTES;
use rustix::fs::{self, AtFlags, FallocateFlags, FileType, Mode, OFlags, StatxFlags};
use rustix::io::Errno;
use std::io::{Seek, SeekFrom};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use thiserror::Error;

/// A file or raw partition for direct I/O. Closed when dropped.
#[derive(Debug)]
pub struct DiskFile {
    fd: OwnedFd,
    facts: Arc<FileFacts>,
}

/// What stays true of a file, also after it was closed.
#[derive(Debug)]
pub(crate) struct FileFacts {
    path: PathBuf,
    bytes: u64,
    block_bytes: u64,
}

/// Why a disk file or link cannot be used. Existing data is untouched.
#[derive(Debug, Error)]
pub enum DiskError {
    /// The file's directory does not exist.
    #[error("{}: the directory does not exist: create it first", path.display())]
    MissingDirectory {
        /// The file.
        path: PathBuf,
    },
    /// There is no such file.
    #[error("{}: no such file: create it first", path.display())]
    Missing {
        /// The file.
        path: PathBuf,
    },
    /// The file exists already.
    #[error("{}: exists already: open it, or remove it if nothing in it is needed", path.display())]
    Exists {
        /// The file.
        path: PathBuf,
    },
    /// Neither a regular file nor a block device.
    #[error("{}: neither a regular file nor a block device", path.display())]
    NotAFile { path: PathBuf },
    /// The file, its directory or the file system cannot be written to.
    #[error("{}: cannot be written to ({source}): check its owner and how the disk is mounted", path.display())]
    ReadOnly {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// Somebody else has the device, such as a mounted file system.
    #[error("{}: in use, for instance by a mounted file system", path.display())]
    InUse {
        /// The device.
        path: PathBuf,
    },
    /// A size that cannot be.
    #[error("{}: {bytes} bytes: a size must be a multiple of {DISK_ALIGN_BYTES} above 0", path.display())]
    Size {
        /// The file.
        path: PathBuf,
        /// Its size.
        bytes: u64,
    },
    /// The disk has not enough room.
    #[error("{}: {bytes} bytes do not fit: the disk has {available_bytes} left", path.display())]
    DoesNotFit {
        /// The file.
        path: PathBuf,
        /// Bytes that the file still needs.
        bytes: u64,
        /// Bytes that the disk has.
        available_bytes: u64,
    },
    /// The file system cannot set space aside.
    #[error("{}: the file system cannot preallocate: use another one, or a raw partition", path.display())]
    NoPreallocation {
        /// The file.
        path: PathBuf,
    },
    /// The file system or device does not do direct I/O in blocks that suit.
    #[error("{}: no direct I/O at multiples of {DISK_ALIGN_BYTES} bytes: use another file system", path.display())]
    NoDirectIo {
        /// The file.
        path: PathBuf,
    },
    /// A region on disk that reaches outside the file, or is not aligned.
    #[error(
        "{}: a region of {len} bytes at {base} must lie within {file_bytes} bytes and be a multiple of {DISK_ALIGN_BYTES}",
        path.display()
    )]
    Extent {
        /// The file.
        path: PathBuf,
        /// Where the region should start.
        base: u64,
        /// How long it should be.
        len: u64,
        /// Size of the file.
        file_bytes: u64,
    },
    /// The link cannot be started.
    #[error("{}: starting the {driver} driver: {source}", path.display())]
    Driver {
        /// The file.
        path: PathBuf,
        driver: &'static str,
        /// What the system said.
        source: std::io::Error,
    },
    /// The mover of the regions has ended.
    #[error(transparent)]
    MoverClosed(#[from] forebay_transfer::Closed),
    /// Anything else that the system refused.
    #[error("{}: {doing}: {source}", path.display())]
    System {
        /// The file.
        path: PathBuf,
        /// What was tried.
        doing: &'static str,
        /// What the system said.
        source: std::io::Error,
    },
}

impl DiskError {
    /// Why `path` could not be opened for direct I/O, from what the system said.
    pub fn of_open(path: &Path, errno: Errno) -> DiskError {
        open_error(path, errno)
    }
}

/// What becomes of stretches of a file that have no space on the disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Holes {
    /// Space is set aside for them.
    Fill,
    /// Nothing.
    Keep,
}

impl DiskFile {
    /// Creates a file of `bytes` bytes, all of them set aside on the disk. What cannot be completed
    /// is removed again.
    pub fn create(path: impl AsRef<Path>, bytes: u64) -> Result<DiskFile, DiskError> {
        let path = path.as_ref();
        check_size(path, bytes)?;
        check_room(path, bytes)?;
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::DIRECT | OFlags::CLOEXEC;
        let remove = || {
            // The reason for a failure matters more than whether an empty file stays behind.
            let _ = fs::unlink(path);
        };
        let fd = fs::open(path, flags, Mode::RUSR | Mode::WUSR).map_err(|errno| {
            // The system makes the file before it finds that it has no direct I/O.
            if errno == Errno::INVAL {
                remove();
            }
            open_error(path, errno)
        })?;
        DiskFile::complete(fd, path, bytes).inspect_err(|_| remove())
    }

    /// Gives a file that exists `bytes` bytes of zeros, all of them set aside on the disk, in place
    /// of what it holds. The caller owns the file: nobody else may use it meanwhile.
    pub fn remake(path: impl AsRef<Path>, bytes: u64) -> Result<DiskFile, DiskError> {
        let path = path.as_ref();
        check_size(path, bytes)?;
        let flags = OFlags::RDWR | OFlags::DIRECT | OFlags::CLOEXEC;
        let fd = fs::open(path, flags, Mode::empty()).map_err(|errno| open_error(path, errno))?;
        fs::ftruncate(&fd, 0).map_err(|errno| system_error(path, "emptying it", errno))?;
        check_room(path, bytes)?;
        DiskFile::complete(fd, path, bytes)
    }

    fn complete(fd: OwnedFd, path: &Path, bytes: u64) -> Result<DiskFile, DiskError> {
        preallocate(&fd, path, bytes)?;
        let block_bytes = block_bytes(&fd, path)?;
        let system = |doing| move |errno: Errno| system_error(path, doing, errno);
        fs::fsync(&fd).map_err(system("syncing the file"))?;
        sync_directory(path)?;
        Ok(DiskFile::new(fd, path, bytes, block_bytes))
    }

    /// Opens a file that exists, or a raw partition that nobody else uses. A file with holes has
    /// them set aside, so that a full disk is found now and not by a write.
    pub fn open(path: impl AsRef<Path>) -> Result<DiskFile, DiskError> {
        DiskFile::open_and(path.as_ref(), Holes::Fill)
    }

    /// The same, but holes stay: for owners that give space back to the file system and know where.
    /// A write into a hole may find the disk full.
    pub fn open_with_holes(path: impl AsRef<Path>) -> Result<DiskFile, DiskError> {
        DiskFile::open_and(path.as_ref(), Holes::Keep)
    }

    fn open_and(path: &Path, holes: Holes) -> Result<DiskFile, DiskError> {
        let stat = fs::stat(path).map_err(|errno| open_error(path, errno))?;
        let kind = FileType::from_raw_mode(stat.st_mode);
        let exclusive = match kind {
            FileType::RegularFile => OFlags::empty(),
            // On a device, this refuses one that is mounted or that somebody else opened so.
            FileType::BlockDevice => OFlags::EXCL,
            _ => return Err(DiskError::NotAFile { path: path.to_owned() }),
        };
        let flags = OFlags::RDWR | OFlags::DIRECT | OFlags::CLOEXEC | exclusive;
        let fd = fs::open(path, flags, Mode::empty()).map_err(|errno| open_error(path, errno))?;
        let block_bytes = block_bytes(&fd, path)?;
        let mut file = std::fs::File::from(fd);
        let bytes = file.seek(SeekFrom::End(0)).map_err(|source| DiskError::System {
            path: path.to_owned(),
            doing: "finding its size",
            source,
        })?;
        let fd = OwnedFd::from(file);
        let held_bytes = u64::try_from(stat.st_blocks).unwrap_or(0) * 512;
        match kind {
            FileType::BlockDevice => {}
            _ => {
                check_size(path, bytes)?;
                if held_bytes < bytes && holes == Holes::Fill {
                    check_room(path, bytes - held_bytes)?;
                    preallocate(&fd, path, bytes)?;
                }
            }
        }
        let bytes = bytes - bytes % DISK_ALIGN_BYTES;
        check_size(path, bytes)?;
        Ok(DiskFile::new(fd, path, bytes, block_bytes))
    }

    fn new(fd: OwnedFd, path: &Path, bytes: u64, block_bytes: u64) -> DiskFile {
        DiskFile { fd, facts: Arc::new(FileFacts { path: path.to_owned(), bytes, block_bytes }) }
    }

    pub fn path(&self) -> &Path {
        &self.facts.path
    }

    /// Its size, a multiple of [`DISK_ALIGN_BYTES`]; of a partition, what can be used.
    pub fn bytes(&self) -> u64 {
        self.facts.bytes
    }

    /// The smallest unit that the device reads and writes directly, at most [`DISK_ALIGN_BYTES`].
    pub fn block_bytes(&self) -> u64 {
        self.facts.block_bytes
    }

    pub(crate) fn facts(&self) -> &Arc<FileFacts> {
        &self.facts
    }
}

impl FileFacts {
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Checks that a region lies inside.
    pub fn check_extent(&self, base: u64, len: u64) -> Result<(), DiskError> {
        let aligned = (base | len).is_multiple_of(DISK_ALIGN_BYTES);
        let inside = base.checked_add(len).is_some_and(|end| end <= self.bytes);
        match aligned && inside && len > 0 {
            true => Ok(()),
            false => Err(DiskError::Extent { path: self.path.clone(), base, len, file_bytes: self.bytes }),
        }
    }
}

impl AsFd for DiskFile {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// Makes the name of a file durable.
pub fn sync_directory(path: &Path) -> Result<(), DiskError> {
    let system = |doing| move |errno: Errno| system_error(path, doing, errno);
    let directory = fs::open(directory_of(path), OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())
        .map_err(system("opening the directory"))?;
    fs::fsync(&directory).map_err(system("syncing the directory"))
}

fn directory_of(path: &Path) -> &Path {
    path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

fn check_size(path: &Path, bytes: u64) -> Result<(), DiskError> {
    let is_size = bytes > 0 && bytes.is_multiple_of(DISK_ALIGN_BYTES) && i64::try_from(bytes).is_ok();
    is_size.then_some(()).ok_or_else(|| DiskError::Size { path: path.to_owned(), bytes })
}

fn check_room(path: &Path, bytes: u64) -> Result<(), DiskError> {
    let available_bytes = available_bytes(path)?;
    match bytes <= available_bytes {
        true => Ok(()),
        false => Err(DiskError::DoesNotFit { path: path.to_owned(), bytes, available_bytes }),
    }
}

/// What the disk under `path` still has for this process.
fn available_bytes(path: &Path) -> Result<u64, DiskError> {
    let disk = fs::statvfs(directory_of(path)).map_err(|errno| match errno {
        Errno::NOENT | Errno::NOTDIR => DiskError::MissingDirectory { path: path.to_owned() },
        errno => system_error(path, "asking for free space", errno),
    })?;
    Ok(disk.f_bavail.saturating_mul(disk.f_frsize))
}

fn preallocate(fd: &OwnedFd, path: &Path, bytes: u64) -> Result<(), DiskError> {
    let attempt = || fs::fallocate(fd, FallocateFlags::empty(), 0, bytes);
    rustix::io::retry_on_intr(attempt).map_err(|errno| match errno {
        Errno::OPNOTSUPP => DiskError::NoPreallocation { path: path.to_owned() },
        Errno::NOSPC | Errno::DQUOT | Errno::FBIG => DiskError::DoesNotFit {
            path: path.to_owned(),
            bytes,
            available_bytes: available_bytes(path).unwrap_or(0),
        },
        errno => system_error(path, "preallocating", errno),
    })
}

/// The block size of direct I/O. Systems that cannot say (before Linux 6.1) are taken to need
/// [`DISK_ALIGN_BYTES`].
fn block_bytes(fd: &OwnedFd, path: &Path) -> Result<u64, DiskError> {
    let mask = StatxFlags::from_bits_retain(libc::STATX_DIOALIGN);
    let stat = fs::statx(fd, c"", AtFlags::EMPTY_PATH, mask)
        .map_err(|errno| system_error(path, "asking for its block size", errno))?;
    if stat.stx_mask & libc::STATX_DIOALIGN == 0 {
        return Ok(DISK_ALIGN_BYTES);
    }
    let block_bytes = u64::from(stat.stx_dio_offset_align.max(stat.stx_dio_mem_align));
    let suits = block_bytes > 0 && DISK_ALIGN_BYTES.is_multiple_of(block_bytes);
    suits.then_some(block_bytes).ok_or_else(|| DiskError::NoDirectIo { path: path.to_owned() })
}

fn open_error(path: &Path, errno: Errno) -> DiskError {
    let path_buf = path.to_owned();
    match errno {
        Errno::NOENT | Errno::NOTDIR if !directory_of(path).is_dir() => {
            DiskError::MissingDirectory { path: path_buf }
        }
        Errno::NOENT => DiskError::Missing { path: path_buf },
        Errno::EXIST => DiskError::Exists { path: path_buf },
        Errno::ACCESS | Errno::PERM | Errno::ROFS => {
            DiskError::ReadOnly { path: path_buf, source: errno.into() }
        }
        Errno::BUSY => DiskError::InUse { path: path_buf },
        Errno::INVAL => DiskError::NoDirectIo { path: path_buf },
        errno => system_error(path, "opening", errno),
    }
}

fn system_error(path: &Path, doing: &'static str, errno: Errno) -> DiskError {
    DiskError::System { path: path.to_owned(), doing, source: errno.into() }
}
