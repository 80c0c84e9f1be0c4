//! The system calls of the file-per-object store, with faults in front of them: reads and writes of
//! whole files as a careful program makes them. Interrupted calls are repeated, short ones
//! continued. What is misdirected goes to the same page of another file in the directory, as the
//! blocks of file systems do, or to another page of its own.

use crate::faults::{Ending, Faults, instead};
use crate::misdirected;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Makes a file of `bytes`.
pub fn write(faults: &Faults, path: &Path, bytes: &[u8]) -> io::Result<()> {
    let file = File::options().read(true).write(true).create(true).truncate(true).open(path)?;
    FaultyFile { faults, path, file: Arc::new(file) }.write_all_at(bytes, 0)
}

/// Reads a file of `bytes`; one that is shorter is an error.
pub fn read(faults: &Faults, path: &Path, bytes: usize) -> io::Result<Vec<u8>> {
    let mut buffer = vec![0; bytes];
    FaultyFile { faults, path, file: Arc::new(File::open(path)?) }.read_exact_at(&mut buffer, 0)?;
    Ok(buffer)
}

struct FaultyFile<'a> {
    faults: &'a Faults,
    path: &'a Path,
    file: Arc<File>,
}

impl FaultyFile<'_> {
    /// Writes all but a page, which lands elsewhere. The file is as long as it should be.
    fn write_misdirected(&self, bytes: &[u8], offset: u64, choice: u64) -> io::Result<usize> {
        let page = misdirected::page(bytes.len(), choice);
        let end = offset + bytes.len() as u64;
        self.file.set_len(end.max(self.file.metadata()?.len()))?;
        self.file.write_all_at(&bytes[..page.start], offset)?;
        self.file.write_all_at(&bytes[page.end..], offset + page.end as u64)?;
        let (file, place) = self.elsewhere(offset + page.start as u64, choice)?;
        file.write_all_at(&bytes[page], place)?;
        Ok(bytes.len())
    }

    /// Reads all, and a page of it from elsewhere. What lies behind an end is zeros.
    fn read_misdirected(&self, buffer: &mut [u8], offset: u64, choice: u64) -> io::Result<usize> {
        let read = self.file.read_at(buffer, offset)?;
        let page = misdirected::page(read, choice);
        let (file, place) = self.elsewhere(offset + page.start as u64, choice)?;
        let target = &mut buffer[page];
        target.fill(0);
        file.read_at(target, place)?;
        Ok(read)
    }

    /// Another place than that of a page of this file.
    fn elsewhere(&self, place: u64, choice: u64) -> io::Result<(File, u64)> {
        let open = |path: &Path| File::options().read(true).write(true).open(path);
        let others = self.others()?;
        match others.len() as u64 {
            0 => Ok((open(self.path)?, misdirected::neighbour(place))),
            _ if choice.is_multiple_of(2) => Ok((open(self.path)?, misdirected::neighbour(place))),
            count => Ok((open(&others[(choice / 2 % count) as usize])?, place)),
        }
    }

    fn others(&self) -> io::Result<Vec<PathBuf>> {
        let dir = self.path.parent().unwrap_or(Path::new("."));
        let mut others: Vec<PathBuf> =
            std::fs::read_dir(dir)?.map(|entry| Ok(entry?.path())).collect::<io::Result<_>>()?;
        others.retain(|path| path != self.path && path.is_file());
        others.sort();
        Ok(others)
    }
}

impl FileExt for FaultyFile<'_> {
    fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<usize> {
        let bytes = match self.faults.write(bytes.len()) {
            Ending::Honest => bytes,
            Ending::Short(fewer) => &bytes[..fewer],
            Ending::Instead(result) => return instead(result),
            Ending::Misdirected(choice) => return self.write_misdirected(bytes, offset, choice),
        };
        let announced = self.faults.power().write(&self.file, offset, &[bytes])?;
        let written = self.file.write_at(bytes, offset);
        self.faults.power().written(announced);
        written
    }

    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
        match self.faults.read(buffer.len()) {
            Ending::Honest => self.file.read_at(buffer, offset),
            Ending::Short(fewer) => self.file.read_at(&mut buffer[..fewer], offset),
            Ending::Instead(result) => instead(result),
            Ending::Misdirected(choice) => self.read_misdirected(buffer, offset, choice),
        }
    }
}
