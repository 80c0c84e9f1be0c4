//! Volumes: making a file or partition a log, and opening one. This file knows what a log's first
//! pages are and who may own it.

use super::error::SsdError;
use super::file_medium::FileMedium;
use crate::disk::{DiskError, DiskFile, DiskLink, DiskOptions, sync_directory};
use crate::log::{
    Layout, LogUuid, Medium, NotOpened, PAGE_BYTES, SUPERBLOCKS_AT, empty_log, read_superblock,
};
use rustix::fs::{CWD, RenameFlags, rename, renameat_with};
use rustix::io::Errno;
use rustix::rand::{GetRandomFlags, getrandom};
use std::path::{Path, PathBuf};
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

/// Makes an empty log of `bytes` bytes, all of them set aside on the disk, in segments of
/// `segment_bytes`. A partition always holds something, so that it is only used with
/// [`Existing::Destroy`].
///
/// A file has its name only when all of it is there and durable: until then it is `PATH.new`, which
/// the next attempt takes over. A link is followed: what it points to is made anew, and the link
/// stays.
pub fn init(
    path: impl AsRef<Path>,
    bytes: u64,
    segment_bytes: u64,
    existing: Existing,
) -> Result<LogUuid, SsdError> {
    let path = &followed(path.as_ref())?;
    let layout = Layout::new(bytes, segment_bytes)?;
    match FileMedium::open(path) {
        Err(SsdError::Disk(DiskError::Missing { .. })) => make(path, layout),
        Err(error) => Err(error),
        Ok(_) if existing == Existing::Keep => Err(SsdError::Exists { path: path.into() }),
        Ok(old) if old.is_file() => {
            std::fs::remove_file(path).map_err(failed("removing the old file"))?;
            // Its space is free only when it is closed.
            drop(old);
            make(path, layout)
        }
        Ok(partition) if partition.bytes() >= bytes => format_pages(&partition, layout),
        Ok(partition) => Err(SsdError::TooSmall { path: path.into(), bytes, have_bytes: partition.bytes() }),
    }
}

/// Where a path leads. A link to something that is not there leads nowhere: a disk may not be
/// mounted.
fn followed(path: &Path) -> Result<PathBuf, SsdError> {
    let is_link = std::fs::symlink_metadata(path).is_ok_and(|found| found.is_symlink());
    if !is_link {
        return Ok(path.into());
    }
    std::fs::canonicalize(path).map_err(|_| SsdError::DanglingLink {
        path: path.into(),
        target: std::fs::read_link(path).unwrap_or_default(),
    })
}

fn failed(doing: &'static str) -> impl Fn(std::io::Error) -> SsdError {
    move |source| SsdError::System { doing, source }
}

/// Makes a log under another name, and gives it its own when it is durable.
fn make(path: &Path, layout: Layout) -> Result<LogUuid, SsdError> {
    let draft = draft_of(path);
    let mut medium = FileMedium::claim(&draft)?;
    let made = fill(&mut medium, &draft, layout).and_then(|log| {
        give_name(&draft, path)?;
        Ok(log)
    });
    if made.is_err() {
        // The reason matters more than whether the next attempt finds an empty file.
        let _ = std::fs::remove_file(&draft);
    }
    let log = made?;
    sync_directory(path)?;
    Ok(log)
}

fn fill(medium: &mut FileMedium, draft: &Path, layout: Layout) -> Result<LogUuid, SsdError> {
    DiskFile::remake(draft, layout.file_bytes)?;
    medium.measure().map_err(|errno| failed("finding the size of the new log")(errno.into()))?;
    format_pages(medium, layout)
}

/// The name of a log that is not finished.
fn draft_of(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".new");
    name.into()
}

/// Renames a finished log. What came there in the meantime stays.
fn give_name(draft: &Path, path: &Path) -> Result<(), SsdError> {
    let exists = || SsdError::Exists { path: path.into() };
    let unnamed = |errno: Errno| failed("giving the new log its name")(errno.into());
    match renameat_with(CWD, draft, CWD, path, RenameFlags::NOREPLACE) {
        Err(Errno::EXIST) => Err(exists()),
        // This file system cannot promise it.
        Err(Errno::INVAL | Errno::NOSYS) if path.exists() => Err(exists()),
        Err(Errno::INVAL | Errno::NOSYS) => rename(draft, path).map_err(unnamed),
        renamed => renamed.map_err(unnamed),
    }
}

fn format_pages(medium: &FileMedium, layout: Layout) -> Result<LogUuid, SsdError> {
    format(medium, layout).map_err(failed("writing the first pages"))
}

/// Writes the pages of an empty log. The superblocks come last, and those of an earlier log are
/// gone before.
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
        Ok(self.layout()?.segment_bytes)
    }

    /// Bytes of all its segments, as it was made: chunks in it have no more.
    pub fn capacity_bytes(&self) -> Result<u64, SsdError> {
        let layout = self.layout()?;
        Ok(u64::from(layout.segments) * layout.segment_bytes)
    }

    fn layout(&self) -> Result<Layout, SsdError> {
        let current = read_superblock(&*self.medium).map_err(|error| self.not_opened(error))?;
        Ok(current.superblock.layout)
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

#[cfg(test)]
mod tests {
    use super::*;

    const BYTES: u64 = 4 << 20;
    const SEGMENT_BYTES: u64 = 256 << 10;

    /// A place for a log where there is direct I/O, or nothing, loudly.
    fn place() -> Option<(tempfile::TempDir, PathBuf)> {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("log");
        match init(&path, BYTES, SEGMENT_BYTES, Existing::Keep) {
            Err(SsdError::Disk(DiskError::NoDirectIo { .. })) => {
                testkit::skipped(format_args!("no direct I/O at {}", path.display()));
                return None;
            }
            made => drop(made.unwrap()),
        }
        std::fs::remove_file(&path).unwrap();
        Some((directory, path))
    }

    fn opens(path: &Path) -> bool {
        Volume::open(path, DiskOptions::default()).is_ok_and(|volume| volume.segment_bytes().is_ok())
    }

    #[test]
    fn a_log_has_its_name_only_when_it_is_whole() {
        let Some((_directory, path)) = place() else { return };
        let layout = Layout::new(BYTES, SEGMENT_BYTES).unwrap();
        // As far as an attempt may come before it is interrupted.
        let draft = draft_of(&path);
        let mut medium = FileMedium::claim(&draft).unwrap();
        DiskFile::remake(&draft, layout.file_bytes).unwrap();
        medium.measure().unwrap();
        let refused = init(&path, BYTES, SEGMENT_BYTES, Existing::Keep).unwrap_err();
        assert!(matches!(refused, SsdError::SecondOwner { .. }), "while it is made: {refused}");
        format(&medium, layout).unwrap();
        assert!(!path.exists());
        drop(medium);
        // The next one takes its place over.
        std::fs::write(&draft, b"anything").unwrap();
        init(&path, BYTES, SEGMENT_BYTES, Existing::Keep).unwrap();
        assert!(opens(&path) && !draft.exists());
    }

    #[test]
    fn what_came_to_the_place_of_a_new_log_meanwhile_stays() {
        let Some((_directory, path)) = place() else { return };
        let draft = draft_of(&path);
        std::fs::write(&draft, b"new").unwrap();
        std::fs::write(&path, b"precious").unwrap();
        let refused = give_name(&draft, &path).unwrap_err();
        assert!(matches!(refused, SsdError::Exists { .. }), "{refused}");
        assert_eq!(std::fs::read(&path).unwrap(), b"precious");
    }
}
