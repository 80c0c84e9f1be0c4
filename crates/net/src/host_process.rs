//! Processes of this host: which one this is, and when another one ends.

use crate::bytes::fields;
use rustix::fd::OwnedFd;
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use std::io;
use thiserror::Error;

/// A process of this host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct HostProcess {
    pub pid: u64,
    pub started: u64,
}

fields!(HostProcess { pid, started });

/// Why a process is not known.
#[derive(Debug, Error)]
pub(crate) enum NoProcess {
    #[error("/proc/self/stat has no start time")]
    NoStart,
    #[error("its number is none of a process")]
    NoNumber,
    #[error("{0}")]
    System(#[from] io::Error),
    #[error("the process with its number is not the peer, as seen from here")]
    NotThePeer,
}

impl HostProcess {
    pub fn own() -> Result<HostProcess, NoProcess> {
        let pid = u64::from(std::process::id());
        let started = started(pid).ok_or(NoProcess::NoStart)?;
        Ok(HostProcess { pid, started })
    }

    /// What becomes readable when the process ends. An error if it has ended, or is none of those
    /// that are seen here.
    pub fn watch(self) -> Result<OwnedFd, NoProcess> {
        let pid = i32::try_from(self.pid).ok().and_then(Pid::from_raw).ok_or(NoProcess::NoNumber)?;
        let fd = pidfd_open(pid, PidfdFlags::empty()).map_err(io::Error::from)?;
        // The number may be another's by now, or in another namespace. From here on it stays who it
        // is.
        match started(self.pid) {
            Some(started) if started == self.started => Ok(fd),
            _ => Err(NoProcess::NotThePeer),
        }
    }
}

/// When a process started, in clock ticks since boot. The name before it may hold anything,
/// parentheses included.
fn started(pid: u64) -> Option<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let (_, fields) = stat.rsplit_once(')')?;
    fields.split_whitespace().nth(19)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_process_that_is_meant_is_watched() {
        let own = HostProcess::own().unwrap();
        assert!(own.watch().is_ok());
        let other = HostProcess { started: own.started + 1, ..own };
        assert!(other.watch().unwrap_err().to_string().contains("not the peer"));
        for pid in [0, 1 << 40, i32::MAX as u64] {
            assert!(HostProcess { pid, ..own }.watch().is_err());
        }
    }
}
