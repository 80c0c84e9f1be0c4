//! The worker's half of the protocol: commands from standard input are carried out by a subject,
//! each on a thread of its own, and answered on standard output. This file knows threads and
//! frames.

use crate::faults::Faults;
use crate::protocol::{Answer, COMMANDS_MAX, Command, Do, Fault, Is, Setup, read_frame, write_frame};
use forebay_transfer::lock::Mutex;
use std::io::{self, Read, Write};
use std::panic::AssertUnwindSafe;
use std::sync::Arc;

/// A store under test. Methods are called from many threads at a time; an error is the answer to
/// what was not done.
pub trait Subject: Send + Sync {
    fn open(&self, setup: &Setup) -> Result<(), Is>;
    fn put(&self, key: u64, value: Vec<u8>) -> Result<(), Is>;
    /// Reads values with one call of the store: `None` is a miss.
    fn get_many(&self, keys: &[u64]) -> Result<Vec<Option<Vec<u8>>>, Is>;
    fn delete(&self, key: u64) -> Result<(), Is>;
    /// Makes durable what was answered before.
    fn flush(&self) -> Result<(), Is>;
    /// What goes wrong below the store.
    fn faults(&self) -> &Faults;
    /// Why this cannot go wrong below it.
    fn cannot_play(&self, fault: &Fault) -> Option<&'static str>;
    /// Faults that the store has noticed, if it counts them.
    fn noticed(&self) -> Option<u64>;
    fn close(&self) -> Result<(), Is>;
}

/// Serves `subject` until `close` or the end of the commands.
pub fn serve(
    subject: Arc<dyn Subject>,
    mut commands: impl Read,
    answers: impl Write + Send + 'static,
) -> io::Result<()> {
    let answers = Arc::new(Mutex::new(answers));
    let mut threads = Vec::new();
    while let Some((command, payload)) = read_frame(&mut commands, |command: &Command| command.bytes)? {
        let is_last = command.what == Do::Close;
        let (subject, answers) = (Arc::clone(&subject), Arc::clone(&answers));
        let answer = move || {
            let (what, payload) = carry_out(&*subject, command.what, payload);
            let header = Answer { id: command.id, bytes: payload.len() as u64, what };
            let mut answers = answers.lock();
            // Who no longer listens has ended, and so will this process with its next command.
            let _ = write_frame(&mut *answers, &header, &payload);
        };
        if is_last {
            answer();
            return Ok(());
        }
        threads.retain(|thread: &std::thread::JoinHandle<()>| !thread.is_finished());
        if threads.len() >= COMMANDS_MAX {
            return Err(io::Error::other(format!("{COMMANDS_MAX} commands are under way; no more may")));
        }
        threads.push(std::thread::Builder::new().spawn(answer)?);
    }
    Ok(())
}

fn carry_out(subject: &dyn Subject, what: Do, payload: Vec<u8>) -> (Is, Vec<u8>) {
    let ended = |ended: Result<(), Is>| (ended.err().unwrap_or(Is::Done), Vec::new());
    let work = AssertUnwindSafe(|| match what {
        Do::Open(setup) => ended(subject.open(&setup)),
        Do::Put { key } => ended(subject.put(key, payload)),
        Do::Get { key } => get(subject, key),
        Do::GetMany { keys } => get_many(subject, &keys),
        Do::Delete { key } => ended(subject.delete(key)),
        Do::Flush => ended(subject.flush()),
        Do::Inject(fault) => (inject(subject, fault), Vec::new()),
        Do::Stat => {
            let played = Some(subject.faults().played());
            (Is::Stat { faults: subject.noticed(), played }, Vec::new())
        }
        Do::Close => ended(subject.close()),
    });
    let panicked = |_| (Is::Error { reason: "the store panicked".into() }, Vec::new());
    std::panic::catch_unwind(work).unwrap_or_else(panicked)
}

fn inject(subject: &dyn Subject, fault: Fault) -> Is {
    if let Some(why) = subject.cannot_play(&fault) {
        return Is::Unsupported { reason: why.into() };
    }
    subject.faults().inject(fault);
    Is::Done
}

fn get(subject: &dyn Subject, key: u64) -> (Is, Vec<u8>) {
    match subject.get_many(&[key]).map(|mut values| values.pop().flatten()) {
        Ok(Some(value)) => (Is::Hit, value),
        Ok(None) => (Is::Miss, Vec::new()),
        Err(other) => (other, Vec::new()),
    }
}

fn get_many(subject: &dyn Subject, keys: &[u64]) -> (Is, Vec<u8>) {
    match subject.get_many(keys) {
        Ok(values) => {
            let lengths = values.iter().map(|value| value.as_ref().map(|value| value.len() as u64)).collect();
            (Is::Many { lengths }, values.into_iter().flatten().flatten().collect())
        }
        Err(other) => (other, Vec::new()),
    }
}
