//! The files under test: in each a log, and behind it as much room again for the ceiling, which
//! thereby works on the same file without touching the log. All of it is written once before
//! anything is measured: what was only set aside is slower to write the first time.

use super::memory::{At, Buffers, Direction, MIB, Objects};
use super::raw::Raw;
use crate::output::Error;
use forebay_store::log::Layout;
use forebay_store::ssd::{Existing, init};
use std::fs::File;
use std::path::{Path, PathBuf};
use tempfile::TempPath;

/// Each file has room for one more of these, as its end may hold only a part of an object.
const LARGEST_OBJECT: u64 = 2 * MIB;

/// A file with a log in it. Removed when dropped.
pub struct TestFile {
    path: TempPath,
    log_bytes: u64,
    room_bytes: u64,
}

impl TestFile {
    /// Makes a file with room for `objects_bytes` of objects in the log, and for as many behind it.
    pub fn make(dir: &Path, objects_bytes: u64) -> Result<TestFile, Error> {
        let path = TempPath::try_from_path(dir.join(format!("forebay-bench-disk-{}", std::process::id())))?;
        // Footers take a page for each object, the smallest of which has twenty; segments being
        // filled or emptied take some more.
        let segment_bytes = (objects_bytes / 64).next_multiple_of(MIB).clamp(8 * MIB, 256 * MIB);
        let log_bytes = (objects_bytes / 18 * 20).next_multiple_of(MIB) + 10 * segment_bytes;
        let file = TestFile { path, log_bytes, room_bytes: objects_bytes };
        init(&file.path, log_bytes, segment_bytes, Existing::Keep)?;
        File::options().write(true).open(&file.path)?.set_len(log_bytes + objects_bytes)?;
        file.write_once(Layout::new(log_bytes, segment_bytes)?.segments_at)?;
        Ok(file)
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Length of the log.
    pub fn log_bytes(&self) -> u64 {
        self.log_bytes
    }

    /// First byte behind the log, and how many there are from there on.
    pub fn room(&self) -> (u64, u64) {
        (self.log_bytes, self.room_bytes)
    }

    /// Where the object of this number would lie behind the log.
    fn offset(&self, number: u64, object_bytes: u64) -> u64 {
        self.log_bytes + number * object_bytes
    }

    fn write_once(&self, from: u64) -> Result<(), Error> {
        let objects = Objects { bytes: MIB, depth: 8, slots: 16 };
        let end = self.log_bytes + self.room_bytes;
        let place = |number| At { file: 0, offset: from + number * MIB };
        let places: Vec<At> = (0..(end - from) / MIB).map(place).collect();
        Raw::open(&[self.path()], &Buffers::new(objects)?)?.run(Direction::Write, &places)
    }
}

/// One such file in each directory, as alike as disks that a node spreads its chunks over.
pub struct TestFiles(pub Vec<TestFile>);

impl TestFiles {
    /// Makes files that together have room for `objects_bytes` of objects in their logs.
    pub fn make(dirs: &[PathBuf], objects_bytes: u64) -> Result<TestFiles, Error> {
        let each = objects_bytes.div_ceil(dirs.len() as u64).next_multiple_of(MIB) + LARGEST_OBJECT;
        let files: Result<Vec<TestFile>, Error> = dirs.iter().map(|dir| TestFile::make(dir, each)).collect();
        Ok(TestFiles(files?))
    }

    /// Where they are.
    pub fn paths(&self) -> Vec<&Path> {
        self.0.iter().map(TestFile::path).collect()
    }

    /// Length of all logs together.
    pub fn log_bytes(&self) -> u64 {
        self.0.iter().map(TestFile::log_bytes).sum()
    }

    /// Places for objects behind the logs, in each file in turn.
    pub fn places(&self, object_bytes: u64) -> Vec<At> {
        let room_bytes = self.0.iter().map(|file| file.room_bytes).min().unwrap_or(0);
        let row = |number| {
            let place = move |(file, test): (usize, &TestFile)| At {
                file,
                offset: test.offset(number, object_bytes),
            };
            self.0.iter().enumerate().map(place)
        };
        (0..room_bytes / object_bytes).flat_map(row).collect()
    }
}
