//! Child processes: this program with other arguments, or another one.
//!
//! A child is in a process group of its own, so that a Ctrl-C at the terminal reaches only its
//! parent, which ends it when it is done with it, and what it started with it. A child whose parent
//! is gone ends too: see `--end-with` in `main.rs`; another program sees to it itself.

use forebay_transfer::lock::Mutex;
use rustix::process::{Pid, Signal, getpid, kill_process, kill_process_group};
use std::ffi::OsString;
use std::path::PathBuf;
use std::process::{ExitStatus, Stdio};
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, BufReader};
use tokio::process::{Child, ChildStdout, Command};
use tokio::task::JoinHandle;
use tokio::time::timeout;

/// How long this program may take until it is ready, and any child to end after it was told to.
const START_LIMIT: Duration = Duration::from_secs(30);
const STOP_LIMIT: Duration = Duration::from_secs(30);

/// What is kept of the last that a child says on stderr.
const ERRORS_BYTES_MAX: usize = 4 << 10;

/// What a child runs.
#[derive(Debug)]
pub struct Launch {
    /// The program; this one if there is none.
    pub program: Option<PathBuf>,
    pub arguments: Vec<OsString>,
    /// What its environment has beside ours.
    pub environment: Vec<(&'static str, OsString)>,
    /// How long it may take until it is ready.
    pub limit: Duration,
}

impl Launch {
    /// This program.
    pub fn own(arguments: Vec<OsString>) -> Launch {
        Launch { program: None, arguments, environment: Vec::new(), limit: START_LIMIT }
    }

    fn command(self) -> std::io::Result<Command> {
        let mut command = Command::new(match &self.program {
            Some(program) => program.clone(),
            None => std::env::current_exe()?,
        });
        command.args(self.arguments).envs(self.environment);
        if self.program.is_none() {
            command.arg("--end-with").arg(getpid().as_raw_nonzero().to_string());
        }
        Ok(command)
    }
}

/// A running child. Dropping it kills it, and what it started.
#[derive(Debug)]
pub struct Process {
    name: String,
    child: Child,
    errors: Arc<Mutex<Vec<u8>>>,
    listening: JoinHandle<()>,
}

/// A child that did not do as it should.
#[derive(Debug, thiserror::Error)]
pub enum ProcessError {
    /// The system did not start or signal it.
    #[error("{name}: {error}")]
    Io { name: String, error: std::io::Error },
    /// It did not say that it is ready.
    #[error("{name} was not ready within {} s: {errors}", limit.as_secs())]
    NotReady { name: String, limit: Duration, errors: String },
    /// It ended by itself, or badly.
    #[error("{name} ended with {status}: {errors}")]
    Ended { name: String, status: ExitStatus, errors: String },
    /// It had to be killed.
    #[error("{name} did not end within {} s and was killed: {errors}", STOP_LIMIT.as_secs())]
    Wedged { name: String, errors: String },
}

impl Process {
    /// Starts a child, and waits until it prints a line that `ready` makes something of.
    pub async fn start<T>(
        name: &str,
        launch: Launch,
        ready: impl Fn(&str) -> Option<T>,
    ) -> Result<(Process, T), ProcessError> {
        let io_error = |error| ProcessError::Io { name: name.to_owned(), error };
        let limit = launch.limit;
        let mut child = launch
            .command()
            .map_err(io_error)?
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .process_group(0)
            .kill_on_drop(true)
            .spawn()
            .map_err(io_error)?;
        let errors = Arc::new(Mutex::new(Vec::new()));
        let (stdout, stderr) = (child.stdout.take(), child.stderr.take());
        let kept = Arc::clone(&errors);
        let listening = tokio::spawn(async move {
            if let Some(mut stderr) = stderr {
                keep_last(&mut stderr, &kept).await;
            }
        });
        let mut process = Process { name: name.to_owned(), child, errors, listening };
        let told = timeout(limit, first_line(stdout, ready)).await;
        match told {
            Ok(Some(told)) => Ok((process, told)),
            Ok(None) => {
                let status = process.child.wait().await.map_err(io_error)?;
                Err(process.ended(status).await)
            }
            Err(_) => Err(ProcessError::NotReady { name: name.to_owned(), limit, errors: process.errors() }),
        }
    }

    /// Kills the child and what it started; when this returns the child is gone.
    pub async fn kill(mut self) -> Result<(), ProcessError> {
        self.kill_group();
        self.child.kill().await.map_err(|error| ProcessError::Io { name: self.name.clone(), error })
    }

    /// Asks the child to end, and waits for it. An error if it ended before, ends badly or has to
    /// be killed.
    pub async fn stop(mut self) -> Result<(), ProcessError> {
        let io_error = |error| ProcessError::Io { name: self.name.clone(), error };
        if let Some(status) = self.child.try_wait().map_err(io_error)? {
            return Err(self.ended(status).await);
        }
        if let Some(pid) = self.pid() {
            kill_process(pid, Signal::TERM).map_err(|error| io_error(error.into()))?;
        }
        match timeout(STOP_LIMIT, self.child.wait()).await {
            Ok(Ok(status)) if status.success() => Ok(()),
            Ok(Ok(status)) => Err(self.ended(status).await),
            Ok(Err(error)) => Err(io_error(error)),
            Err(_) => Err(ProcessError::Wedged { name: self.name.clone(), errors: self.errors() }),
        }
    }

    /// Kills all of the child's group, unless the child has been waited for: then its id may be
    /// anybody's.
    fn kill_group(&self) {
        if let Some(group) = self.pid() {
            // All of it may have ended.
            let _ = kill_process_group(group, Signal::KILL);
        }
    }

    fn pid(&self) -> Option<Pid> {
        self.child.id().and_then(|id| Pid::from_raw(id as i32))
    }

    /// The child has ended, so that its last words arrive soon.
    async fn ended(&mut self, status: ExitStatus) -> ProcessError {
        // A grandchild that keeps stderr open is not waited for.
        let _ = timeout(Duration::from_secs(1), &mut self.listening).await;
        ProcessError::Ended { name: self.name.clone(), status, errors: self.errors() }
    }

    fn errors(&self) -> String {
        let errors = self.errors.lock();
        String::from_utf8_lossy(&errors).trim().to_owned()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill_group();
    }
}

/// What `ready` makes of the first line that it knows; `None` if stdout ends before. What follows
/// is read and dropped, so that the child never waits for us.
async fn first_line<T>(stdout: Option<ChildStdout>, ready: impl Fn(&str) -> Option<T>) -> Option<T> {
    let mut stdout = BufReader::new(stdout?);
    let mut line = String::new();
    let told = loop {
        line.clear();
        if stdout.read_line(&mut line).await.ok()? == 0 {
            return None;
        }
        if let Some(told) = ready(&line) {
            break told;
        }
    };
    // It ends with the child.
    tokio::spawn(async move { tokio::io::copy(&mut stdout, &mut tokio::io::sink()).await });
    Some(told)
}

/// Reads until the end and keeps the last of it.
async fn keep_last(from: &mut (impl AsyncReadExt + Unpin), kept: &Mutex<Vec<u8>>) {
    let mut read = [0; 1 << 10];
    while let Ok(length @ 1..) = from.read(&mut read).await {
        let mut kept = kept.lock();
        kept.extend_from_slice(&read[..length]);
        let surplus = kept.len().saturating_sub(ERRORS_BYTES_MAX);
        kept.drain(..surplus);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Instant;

    /// Not what is only not waited for yet.
    fn is_alive(pid: u32) -> bool {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"));
        stat.is_ok_and(|stat| stat.rsplit(')').next().is_some_and(|rest| !rest.trim_start().starts_with('Z')))
    }

    #[test]
    fn what_a_child_started_ends_with_it() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        for is_killed in [true, false] {
            runtime.block_on(async {
                let launch = Launch {
                    program: Some("sh".into()),
                    arguments: ["-c", "sleep 1000 & echo $!; wait"].map(OsString::from).into(),
                    environment: Vec::new(),
                    limit: START_LIMIT,
                };
                let ready = |line: &str| line.trim().parse::<u32>().ok();
                let (process, grandchild) = Process::start("sh", launch, ready).await.unwrap();
                assert!(is_alive(grandchild));
                match is_killed {
                    true => process.kill().await.unwrap(),
                    false => drop(process),
                }
                let since = Instant::now();
                while is_alive(grandchild) {
                    assert!(since.elapsed() < Duration::from_secs(60), "it goes on");
                    tokio::time::sleep(Duration::from_millis(5)).await;
                }
            });
        }
    }
}
