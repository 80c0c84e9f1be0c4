//! What a configuration needs of the machine: places for sockets and logs. It looks and changes
//! nothing; it must never say no to what a node that runs already has. The check of a configuration
//! and the start of a node ask the same.

use super::{ConfigError, NodeConfig, SsdConfig};
use crate::size;
use forebay_store::log::PAGE_BYTES;
use std::fs::{FileType, symlink_metadata};
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};

impl NodeConfig {
    /// Whether this machine has what the configuration names.
    pub fn check_machine(&self) -> Result<(), ConfigError> {
        socket("socket", &self.socket)?;
        self.relays.as_ref().map_or(Ok(()), |relays| socket("relays.socket", &relays.socket))?;
        self.ssd.iter().try_for_each(log)
    }
}

fn wrong(field: &'static str, path: &Path, is: &str, allowed: &str) -> ConfigError {
    ConfigError::value(field, format!("{path:?}, {is}"), allowed)
}

fn kind(path: &Path) -> Option<FileType> {
    symlink_metadata(path).ok().map(|file| file.file_type())
}

fn folder(path: &Path) -> PathBuf {
    match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder.to_owned(),
        _ => PathBuf::from("."),
    }
}

/// A socket that a node left behind, or that another one has, is the start's to judge.
fn socket(field: &'static str, path: &Path) -> Result<(), ConfigError> {
    let allowed = "a path in a directory that is there, with nothing or a socket at it";
    match kind(path) {
        None if folder(path).is_dir() => Ok(()),
        None => Err(wrong(field, path, "whose directory is not there", allowed)),
        Some(kind) if kind.is_socket() => Ok(()),
        Some(_) => Err(wrong(field, path, "where there is a file that is no socket", allowed)),
    }
}

fn log(ssd: &SsdConfig) -> Result<(), ConfigError> {
    let allowed = "a log, a partition, or a path in a directory that is there";
    let refuse = |is| Err(wrong("ssd.path", &ssd.path, is, allowed));
    let file = std::fs::metadata(&ssd.path);
    match file.as_ref().map(|file| file.file_type()) {
        Ok(kind) if kind.is_block_device() => Ok(()),
        Ok(kind) if kind.is_file() && file.as_ref().is_ok_and(|file| is_in_pages(file.len())) => Ok(()),
        Ok(kind) if kind.is_file() => refuse("which is no log: its length is not whole pages"),
        Ok(kind) if kind.is_dir() => refuse("which is a directory"),
        Ok(_) => refuse("which is neither a file nor a partition"),
        Err(_) if kind(&ssd.path).is_some() => refuse("a link to what is not there"),
        Err(_) if !folder(&ssd.path).is_dir() => refuse("whose directory is not there"),
        Err(_) => fits(ssd),
    }
}

fn is_in_pages(bytes: u64) -> bool {
    bytes > 0 && bytes.is_multiple_of(PAGE_BYTES as u64)
}

/// Whether there is room for a log that is to be made.
fn fits(ssd: &SsdConfig) -> Result<(), ConfigError> {
    let Ok(disk) = rustix::fs::statvfs(folder(&ssd.path)) else { return Ok(()) };
    let left = disk.f_bavail.saturating_mul(disk.f_frsize);
    if ssd.size <= left {
        return Ok(());
    }
    let value = format!("{}, for which the disk of {:?} has no room", size::write(ssd.size), ssd.path);
    Err(ConfigError::value("ssd.size", value, format!("what is left there, {left} bytes")))
}
