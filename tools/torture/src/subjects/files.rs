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
    let options = || File::options().read(true).write(true).create(true).truncate(true).open(path);
    let file = Arc::new(options()?);
    let mut written = 0;
    while written < bytes.len() {
        match write_once(faults, &file, written as u64, &bytes[written..]) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(more) => written += more,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Reads a file of `bytes`; one that is shorter is an error.
pub fn read(faults: &Faults, path: &Path, bytes: usize) -> io::Result<Vec<u8>> {
    let file = File::open(path)?;
    let (mut buffer, mut read) = (vec![0; bytes], 0);
    while read < bytes {
        match read_once(faults, &file, read as u64, &mut buffer[read..]) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(more) => read += more,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(buffer)
}

fn write_once(faults: &Faults, file: &Arc<File>, offset: u64, bytes: &[u8]) -> io::Result<usize> {
    let bytes = match faults.write(bytes.len()) {
        Ending::Honest => bytes,
        Ending::Short(fewer) => &bytes[..fewer],
        Ending::Instead(result) => return instead(result),
    };
    let announced = faults.power().write(file, offset, &[bytes])?;
    let written = file.write_at(bytes, offset);
    faults.power().written(announced);
    written
}

fn read_once(faults: &Faults, file: &File, offset: u64, buffer: &mut [u8]) -> io::Result<usize> {
    match faults.read(buffer.len()) {
        Ending::Honest => file.read_at(buffer, offset),
        Ending::Short(fewer) => file.read_at(&mut buffer[..fewer], offset),
        Ending::Instead(result) => instead(result),
    }
}
