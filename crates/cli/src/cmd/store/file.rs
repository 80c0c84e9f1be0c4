//! The file of a log: opened, and named where something is wrong with it.

use forebay_results::output::Error;
use forebay_store::ssd::FileMedium;
use std::path::Path;

/// Opens a log's file, which nobody else may have open as a log.
pub fn open(file: &Path) -> Result<FileMedium, Error> {
    Ok(FileMedium::open(file)?)
}

/// The same, to read it only.
pub fn open_read_only(file: &Path) -> Result<FileMedium, Error> {
    Ok(FileMedium::open_read_only(file)?)
}

/// Says in which file something is wrong.
pub fn in_file(file: &Path, error: impl std::error::Error) -> Error {
    format!("{}: {error}", file.display()).into()
}
