//! A worker as the suite sees it: a child process that is spoken to, waited for with a limit, and
//! killed. This file knows processes and frames.

use crate::protocol::{Answer, Command, Do, Is, Setup, read_frame, write_frame};
use forebay_transfer::lock::Mutex;
use std::collections::HashMap;
use std::ffi::OsString;
use std::io::{BufReader, BufWriter};
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, ChildStdin, ChildStdout, ExitStatus, Stdio};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};
use thiserror::Error;

#[derive(Debug, Clone)]
pub struct Launch {
    pub program: OsString,
    pub args: Vec<OsString>,
    /// Its diagnostics go nowhere unless wanted.
    pub quiet: bool,
}

#[derive(Debug, Clone, Copy)]
pub struct Timeouts {
    /// Start and `open`, which recovers.
    pub open: Duration,
    /// Everything else.
    pub command: Duration,
}

/// What goes wrong with a worker, apart from what it answers.
#[derive(Debug, Error)]
pub enum Broken {
    #[error("hangs: no answer to `{command}` within {limit_s} s")]
    Hangs { command: &'static str, limit_s: u64 },
    #[error("died at `{command}`: {status}")]
    Died { command: &'static str, status: ExitStatus },
    #[error("refuses to open: {reason}")]
    NotOpened { reason: String },
    #[error("answers `{command}` with {answer:?}")]
    Unexpected { command: &'static str, answer: Is },
    #[error("the suite: {0}")]
    System(#[from] std::io::Error),
}

/// A running worker. Killed when dropped.
#[derive(Debug)]
pub struct Worker {
    child: Child,
    commands: Option<Sender<(Command, Vec<u8>)>>,
    waiting: Arc<Mutex<Waiting>>,
    next_id: u64,
    timeouts: Timeouts,
}

/// Who waits for an answer; nobody any more once the worker has stopped talking.
#[derive(Debug, Default)]
struct Waiting {
    by_id: HashMap<u64, Sender<(Is, Vec<u8>)>>,
    has_ended: bool,
}

#[derive(Debug)]
pub struct Sent {
    name: &'static str,
    answer: Receiver<(Is, Vec<u8>)>,
    deadline: Instant,
    limit: Duration,
}

impl Worker {
    pub fn start(launch: &Launch, timeouts: Timeouts) -> Result<Worker, Broken> {
        let mut child = std::process::Command::new(&launch.program)
            .args(&launch.args)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(if launch.quiet { Stdio::null() } else { Stdio::inherit() })
            .spawn()?;
        let pipes = child.stdin.take().zip(child.stdout.take());
        let (stdin, stdout) = pipes.ok_or_else(|| std::io::Error::other("the worker has no pipes"))?;
        let (commands, to_send) = channel();
        let waiting = Arc::new(Mutex::new(Waiting::default()));
        let for_reader = Arc::clone(&waiting);
        std::thread::Builder::new().spawn(move || send_all(&to_send, stdin))?;
        std::thread::Builder::new().spawn(move || hand_out(stdout, &for_reader))?;
        Ok(Worker { child, commands: Some(commands), waiting, next_id: 0, timeouts })
    }

    pub fn open(&mut self, setup: Setup) -> Result<(), Broken> {
        match self.ask(Do::Open(setup), Vec::new())?.0 {
            Is::Done => Ok(()),
            Is::Refused { reason } | Is::Error { reason } | Is::Unsupported { reason } => {
                Err(Broken::NotOpened { reason })
            }
            answer => Err(Broken::Unexpected { command: "open", answer }),
        }
    }

    pub fn ask(&mut self, what: Do, payload: Vec<u8>) -> Result<(Is, Vec<u8>), Broken> {
        let sent = self.send(what, payload);
        self.answer(sent)
    }

    /// Sends a command without waiting.
    pub fn send(&mut self, what: Do, payload: Vec<u8>) -> Sent {
        let (name, limit) = match what {
            Do::Open(_) => ("open", self.timeouts.open),
            Do::Put { .. } => ("put", self.timeouts.command),
            Do::Get { .. } => ("get", self.timeouts.command),
            Do::GetMany { .. } => ("get_many", self.timeouts.command),
            Do::Delete { .. } => ("delete", self.timeouts.command),
            Do::Flush => ("flush", self.timeouts.command),
            // The first command of a process may be this one.
            Do::Inject(_) => ("inject", self.timeouts.open),
            Do::Stat => ("stat", self.timeouts.command),
            Do::Close => ("close", self.timeouts.command),
        };
        let (sender, answer) = channel();
        self.next_id += 1;
        let command = Command { id: self.next_id, bytes: payload.len() as u64, what };
        let mut waiting = self.waiting.lock();
        if !waiting.has_ended {
            waiting.by_id.insert(command.id, sender);
            if let Some(commands) = &self.commands {
                // A worker that no longer listens shows by not answering.
                let _ = commands.send((command, payload));
            }
        }
        Sent { name, answer, deadline: Instant::now() + limit, limit }
    }

    /// Waits for the answer to a command, as long as commands may take.
    pub fn answer(&mut self, sent: Sent) -> Result<(Is, Vec<u8>), Broken> {
        let left = sent.deadline.saturating_duration_since(Instant::now());
        match sent.answer.recv_timeout(left) {
            Ok(answer) => Ok(answer),
            Err(RecvTimeoutError::Timeout) => {
                Err(Broken::Hangs { command: sent.name, limit_s: sent.limit.as_secs() })
            }
            Err(RecvTimeoutError::Disconnected) => {
                let status = self.kill()?;
                Err(Broken::Died { command: sent.name, status })
            }
        }
    }

    /// Closes the store and waits for the process to end.
    pub fn close(mut self) -> Result<(), Broken> {
        let (answer, _) = self.ask(Do::Close, Vec::new())?;
        if answer != Is::Done {
            return Err(Broken::Unexpected { command: "close", answer });
        }
        self.wait_for_end()?;
        Ok(())
    }

    /// Ends the process with `SIGKILL`, unless it has ended already, and tells how it ended.
    pub fn kill(&mut self) -> Result<ExitStatus, Broken> {
        // An error means that it has ended.
        let _ = self.child.kill();
        Ok(self.child.wait()?)
    }

    fn wait_for_end(&mut self) -> Result<(), Broken> {
        self.commands = None;
        let deadline = Instant::now() + self.timeouts.command;
        while self.child.try_wait()?.is_none() {
            if Instant::now() > deadline {
                return Err(Broken::Hangs { command: "close", limit_s: self.timeouts.command.as_secs() });
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        Ok(())
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        // An error means that it has ended.
        let _ = self.kill();
    }
}

/// Whether a process was ended by `SIGKILL`, as simulated power losses end it.
pub fn was_killed(status: ExitStatus) -> bool {
    status.signal() == Some(libc::SIGKILL)
}

/// On a thread of its own, because a worker that hangs does not read.
fn send_all(commands: &Receiver<(Command, Vec<u8>)>, stdin: ChildStdin) {
    let mut stdin = BufWriter::new(stdin);
    for (command, payload) in commands {
        if write_frame(&mut stdin, &command, &payload).is_err() {
            return;
        }
    }
}

fn hand_out(stdout: ChildStdout, waiting: &Mutex<Waiting>) {
    let mut stdout = BufReader::new(stdout);
    while let Ok(Some((answer, payload))) = read_frame(&mut stdout, |answer: &Answer| answer.bytes) {
        let waiter = waiting.lock().by_id.remove(&answer.id);
        if let Some(waiter) = waiter {
            // Who gave up waiting does not mind.
            let _ = waiter.send((answer.what, payload));
        }
    }
    // Whoever still waits learns that no answer will come.
    *waiting.lock() = Waiting { has_ended: true, ..Waiting::default() };
}
