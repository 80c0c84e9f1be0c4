//! Volumes: making a file or partition a log, and opening one. This file knows what a log's first pages are and who may own
//! it; it must never know what is kept in it.

use super::error::SsdError;
use super::file_medium::FileMedium;
use crate::log::{
    Layout, LogUuid, Medium, NotOpened, PAGE_BYTES, SUPERBLOCKS_AT, empty_log, read_superblock,
};
use forebay_links::disk::{DiskError, DiskFile, DiskLink, DiskOptions};
use rustix::rand::{GetRandomFlags, getrandom};
use std::path::Path;
use std::sync::Arc;

/// A log that is opened: the link that moves its chunks, and the medium of all else.
pub struct Volume {
    /// Moves chunks.
    pub link: DiskLink,
    /// Reads and writes the rest. Owns the log for as long as it lives.
    pub medium: Arc<dyn Medium>,
}

/// What becomes of something that is where a new log is to be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Existing {
    /// It stays, and no log is made.
    Keep,
    /// It is destroyed, unless somebody owns it as a log.
    Destroy,
}

/// Makes an empty log of `bytes` bytes, all of them set aside on the disk, in segments of `segment_bytes`. A partition
/// always holds something, so that it is only used with [`Existing::Destroy`].
pub fn init(
    path: impl AsRef<Path>,
    bytes: u64,
    segment_bytes: u64,
    existing: Existing,
) -> Result<LogUuid, SsdError> {
    let path = path.as_ref();
    let layout = Layout::new(bytes, segment_bytes)?;
    let medium = match FileMedium::open(path) {
        Err(SsdError::Disk(DiskError::Missing { .. })) => create(path, bytes)?,
        Err(error) => return Err(error),
        Ok(_) if existing == Existing::Keep => return Err(SsdError::Exists { path: path.into() }),
        Ok(old) if old.is_file() => {
            std::fs::remove_file(path)
                .map_err(|source| SsdError::System { doing: "removing the old file", source })?;
            create(path, bytes)?
        }
        Ok(partition) if partition.bytes() >= bytes => partition,
        Ok(partition) => {
            return Err(SsdError::TooSmall { path: path.into(), bytes, have_bytes: partition.bytes() });
        }
    };
    format(&medium, layout).map_err(|source| SsdError::System { doing: "writing the first pages", source })
}

fn create(path: &Path, bytes: u64) -> Result<FileMedium, SsdError> {
    DiskFile::create(path, bytes)?;
    FileMedium::open(path)
}

/// Writes the pages of an empty log. The superblocks come last, and those of an earlier log are gone before.
fn format(medium: &FileMedium, layout: Layout) -> std::io::Result<LogUuid> {
    let mut uuid = [0; 16];
    getrandom(&mut uuid, GetRandomFlags::empty())?;
    let log = LogUuid(uuid);
    for at in SUPERBLOCKS_AT {
        medium.write_at(at, &[0; PAGE_BYTES])?;
    }
    medium.sync()?;
    let (superblocks, others): (Vec<_>, Vec<_>) =
        empty_log(log, layout).into_iter().partition(|(offset, _)| SUPERBLOCKS_AT.contains(offset));
    for pages in [others, superblocks] {
        for (offset, page) in pages {
            medium.write_at(offset, &page)?;
        }
        medium.sync()?;
    }
    Ok(log)
}

impl Volume {
    /// Opens a log, and owns it until the medium is dropped.
    pub fn open(path: impl AsRef<Path>, options: DiskOptions) -> Result<Volume, SsdError> {
        let path = path.as_ref();
        let medium = Arc::new(FileMedium::open(path)?);
        // What the log gave back to a disk that ran short stays there until the log takes it again.
        let link = DiskLink::open(DiskFile::open_with_holes(path)?, options)?;
        Ok(Volume { link, medium })
    }

    /// How long its segments are, as it was made: no chunk in it is longer.
    pub fn segment_bytes(&self) -> Result<u64, SsdError> {
        let current = read_superblock(&*self.medium).map_err(|error| self.not_opened(error))?;
        Ok(current.superblock.layout.segment_bytes)
    }

    /// Why its log is not opened: what the log says does not name the file.
    pub(super) fn not_opened(&self, error: NotOpened) -> SsdError {
        SsdError::Log { path: self.link.path().into(), error: Box::new(error) }
    }
}

impl std::fmt::Debug for Volume {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_struct("Volume").field("link", &self.link).finish_non_exhaustive()
    }
}
