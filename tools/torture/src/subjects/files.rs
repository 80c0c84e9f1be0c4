//! The system calls of the file-per-object store, with faults in front of them: reads and writes of
//! whole files as a careful program makes them. Interrupted calls are repeated, short ones
//! continued.

use crate::faults::{Ending, Faults, instead};
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;

/// Makes a file of `bytes`.
pub fn write(faults: &Faults, path: &Path, bytes: &[u8]) -> io::Result<()> {
    let file = File::options().read(true).write(true).create(true).truncate(true).open(path)?;
    FaultyFile { faults, file: Arc::new(file) }.write_all_at(bytes, 0)
}

/// Reads a file of `bytes`; one that is shorter is an error.
pub fn read(faults: &Faults, path: &Path, bytes: usize) -> io::Result<Vec<u8>> {
    let mut buffer = vec![0; bytes];
    FaultyFile { faults, file: Arc::new(File::open(path)?) }.read_exact_at(&mut buffer, 0)?;
    Ok(buffer)
}

struct FaultyFile<'a> {
    faults: &'a Faults,
    file: Arc<File>,
}

impl FileExt for FaultyFile<'_> {
    fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<usize> {
        let bytes = match self.faults.write(bytes.len()) {
            Ending::Honest => bytes,
            Ending::Short(fewer) => &bytes[..fewer],
            Ending::Instead(result) => return instead(result),
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
        }
    }
}
