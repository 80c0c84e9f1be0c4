//! A trace that is read more than once. A file is opened again each time; what comes through a pipe
//! is first copied to a temporary file that has no name and goes with the process.

use super::input::{DETECT_BYTES, Input};
use super::kind::ReadOptions;
use super::{TraceError, TraceReader};
use std::fs::File;
use std::io::{self, BufReader, Seek, Write};
use std::path::{Path, PathBuf};

/// Where a trace can be read from again and again.
#[derive(Debug)]
pub struct Rereadable {
    path: PathBuf,
    copy: Option<File>,
}

impl Rereadable {
    /// Nothing is read yet, except from a pipe.
    ///
    /// # Errors
    /// When `path` is not there, or a pipe cannot be copied.
    pub fn new(path: &Path) -> Result<Rereadable, TraceError> {
        let failed = |source| TraceError::Io { file: path.into(), source };
        let copy = if path == Path::new("-") {
            Some(copied(&mut io::stdin().lock()).map_err(failed)?)
        } else {
            let kind = std::fs::metadata(path).map_err(failed)?;
            let again = kind.is_file() || kind.is_dir();
            let copy = || File::open(path).and_then(|mut pipe| copied(&mut pipe));
            (!again).then(copy).transpose().map_err(failed)?
        };
        Ok(Rereadable { path: path.into(), copy })
    }

    /// Reads it from its beginning; see [`TraceReader::open`]. A reader from before ends.
    pub fn open(&self, options: ReadOptions) -> Result<TraceReader, TraceError> {
        let Some(copy) = &self.copy else { return TraceReader::open(&self.path, options) };
        let failed = |source| TraceError::Io { file: self.path.clone(), source };
        let from_start = || copy.try_clone().and_then(|mut copy| copy.rewind().map(|()| copy));
        let copy = BufReader::new(from_start().map_err(failed)?);
        TraceReader::of_input(&self.path, Input::new(&self.path, Box::new(copy), DETECT_BYTES)?, options)
    }
}

fn copied(pipe: &mut impl io::Read) -> io::Result<File> {
    let mut copy = tempfile::tempfile()?;
    io::copy(pipe, &mut copy)?;
    copy.flush()?;
    Ok(copy)
}
