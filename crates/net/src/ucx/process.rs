//! Processes of this host: which one this is, and when another one ends.

use super::error::UcxError;
use rustix::fd::OwnedFd;
use rustix::process::{Pid, PidfdFlags, pidfd_open};

/// A process of this host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Process {
    pub pid: u64,
    pub started: u64,
}

impl Process {
    pub fn own() -> Result<Process, UcxError> {
        let pid = u64::from(std::process::id());
        let started = started(pid).ok_or_else(|| system("reading /proc/self/stat", "no start time"))?;
        Ok(Process { pid, started })
    }

    /// What becomes readable when the process ends. An error if it has ended, or is none of those
    /// that are seen here.
    pub fn watch(self) -> Result<OwnedFd, UcxError> {
        let doing = "watching the peer's process";
        let pid = i32::try_from(self.pid).ok().and_then(Pid::from_raw);
        let pid = pid.ok_or_else(|| system(doing, "its number is none of a process"))?;
        let fd = pidfd_open(pid, PidfdFlags::empty()).map_err(|error| system(doing, &error.to_string()))?;
        // The number may be another's by now, or in another namespace. From here on it stays who it
        // is.
        match started(self.pid) {
            Some(started) if started == self.started => Ok(fd),
            _ => Err(system(doing, "the process with its number is not the peer, as seen from here")),
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

fn system(doing: &'static str, why: &str) -> UcxError {
    UcxError::System { doing, why: why.into() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_process_that_is_meant_is_watched() {
        let own = Process::own().unwrap();
        assert!(own.watch().is_ok());
        let other = Process { started: own.started + 1, ..own };
        assert!(other.watch().unwrap_err().to_string().contains("not the peer"));
        for pid in [0, 1 << 40, i32::MAX as u64] {
            assert!(Process { pid, ..own }.watch().is_err());
        }
    }
}
