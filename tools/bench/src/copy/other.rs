//! Another process of this program, for what needs one: it is ready when a file of its is there,
//! and ends with its standard input.

use crate::output::Outcome;
use std::ffi::OsStr;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

/// How long it may take: contexts on all GPUs, and pinning what is shared.
const TIMEOUT: Duration = Duration::from_secs(60);
const PAUSE: Duration = Duration::from_millis(10);

pub struct Other(Child);

impl Other {
    /// Starts `forebay bench NAME FILE` with more arguments, and waits for the file.
    pub fn start(name: &str, file: &Path, more: &[&OsStr]) -> Outcome<Other> {
        let mut command = Command::new(std::env::current_exe()?);
        command.args(["bench", name]).arg(file).args(more).stdin(Stdio::piped());
        let mut other = Other(command.spawn()?);
        let begin = Instant::now();
        while !file.exists() {
            if let Some(status) = other.0.try_wait()? {
                return Err(format!("`forebay bench {name}` has ended: {status}").into());
            }
            if begin.elapsed() > TIMEOUT {
                return Err(format!("`forebay bench {name}` is not ready after {TIMEOUT:?}").into());
            }
            std::thread::sleep(PAUSE);
        }
        Ok(other)
    }

    /// Ends it. An error is the whole measurement's: it did not do what it was for.
    pub fn end(mut self) -> Outcome<()> {
        match self.wait() {
            Some(status) if status.success() => Ok(()),
            Some(status) => Err(format!("a process beside this one has failed: {status}").into()),
            None => Err(format!("a process beside this one has not ended after {TIMEOUT:?}").into()),
        }
    }

    /// How it ended, with its standard input. One that does not is of no use to anybody.
    fn wait(&mut self) -> Option<ExitStatus> {
        drop(self.0.stdin.take());
        let begin = Instant::now();
        while begin.elapsed() < TIMEOUT {
            match self.0.try_wait() {
                Ok(None) => std::thread::sleep(PAUSE),
                Ok(Some(status)) => return Some(status),
                Err(_) => break,
            }
        }
        let _ = self.0.kill();
        let _ = self.0.wait();
        None
    }
}

impl Drop for Other {
    fn drop(&mut self) {
        self.wait();
    }
}
