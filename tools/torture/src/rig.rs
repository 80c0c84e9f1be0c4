//! A store in the hands of a case: its directory, its worker, and the model that judges every value
//! that comes back. Cases say what happens; this file carries it out and keeps count.

use crate::disk::Disk;
use crate::model::Model;
use crate::protocol::{COMMANDS_MAX, Do, Fault, Is, Setup};
use crate::random::Random;
use crate::value;
use crate::worker::{Broken, Launch, Sent, Timeouts, Worker, was_killed};
use std::collections::VecDeque;
use std::ops::Range;
use std::path::PathBuf;

/// How much is done.
#[derive(Debug, Clone)]
pub struct Scale {
    /// Keys of most cases. Their values fill a fraction of the store.
    pub keys: u64,
    pub value_bytes: u64,
    /// What a store may take of the disk.
    pub capacity_bytes: u64,
    /// What a store may take of memory for values on their way.
    pub staging_bytes: u64,
    /// Times that a worker is killed while it writes.
    pub kills: u32,
    /// Writes at which the power fails.
    pub crash_points: u32,
    /// Decides all that is random.
    pub seed: u64,
}

/// What was seen during a case.
#[derive(Debug, Clone, Default)]
pub struct Seen {
    /// Values that came back.
    pub hits: u64,
    /// Values that were asked for and not there.
    pub misses: u64,
    pub wrong_values: u64,
    pub wrong_bytes: u64,
    pub first_wrong: Option<String>,
    /// Answers that no interface speaks of.
    pub errors: u64,
    pub first_error: Option<String>,
    /// Values that were asked for and that only eviction might have taken.
    pub due: u64,
    /// How many of them came back.
    pub due_hits: u64,
    pub crash_points: u64,
    /// What a reader of the table should know.
    pub notes: Vec<String>,
}

/// What a worker has counted since its start, where it counts.
#[derive(Debug, Clone, Copy)]
pub struct Stat {
    /// Faults that its store has noticed.
    pub faults: Option<u64>,
    /// Faults that it has played.
    pub played: Option<u64>,
}

#[derive(Debug)]
pub struct Rig {
    launch: Launch,
    timeouts: Timeouts,
    pub scale: Scale,
    /// How the store is opened; cases may change it before.
    pub setup: Setup,
    pub seen: Seen,
    pub random: Random,
    model: Model,
    worker: Option<Worker>,
}

impl Rig {
    /// A store that has not been opened, on a directory that is empty.
    pub fn new(launch: Launch, timeouts: Timeouts, scale: Scale, dir: PathBuf) -> Rig {
        let setup = Setup {
            dir,
            capacity_bytes: scale.capacity_bytes,
            staging_bytes: scale.staging_bytes,
            value_bytes: scale.value_bytes,
            namespace: "model-a".into(),
        };
        let random = Random::new(scale.seed);
        let (seen, model) = (Seen::default(), Model::default());
        Rig { launch, timeouts, scale, setup, seen, random, model, worker: None }
    }

    pub fn disk(&self) -> Disk {
        Disk::of(&self.setup.dir)
    }

    pub fn keys(&self) -> Range<u64> {
        0..self.scale.keys
    }

    pub fn model(&mut self) -> &mut Model {
        &mut self.model
    }

    /// Starts a worker that has not opened the store yet.
    pub fn start(&mut self) -> Result<(), Broken> {
        self.worker = Some(Worker::start(&self.launch, self.timeouts)?);
        Ok(())
    }

    /// Starts another worker on the same store, which the rig does not count or judge.
    pub fn start_another(&self) -> Result<Worker, Broken> {
        Worker::start(&self.launch, self.timeouts)
    }

    /// Opens the store, in a new worker unless one was started.
    pub fn open(&mut self) -> Result<(), Broken> {
        if self.worker.is_none() {
            self.start()?;
        }
        let setup = self.setup.clone();
        let opened = self.worker()?.open(setup);
        if opened.is_err() {
            self.worker = None;
        }
        opened
    }

    /// Opens the store, puts the next version of every key and flushes.
    pub fn open_and_fill(&mut self) -> Result<(), Broken> {
        self.open()?;
        self.put_all(self.keys())?;
        self.flush()?;
        Ok(())
    }

    /// Opens a store whose files were damaged. It may refuse, with a reason: then this notes it and
    /// is false.
    pub fn open_damaged(&mut self) -> Result<bool, Broken> {
        match self.open() {
            Ok(()) => Ok(true),
            Err(Broken::NotOpened { reason }) => {
                self.note(format!("refuses to open: {reason}"));
                Ok(false)
            }
            Err(broken) => Err(broken),
        }
    }

    pub fn close(&mut self) -> Result<(), Broken> {
        self.model.has_flushed();
        self.model.has_crashed();
        self.worker.take().map_or(Ok(()), Worker::close)
    }

    pub fn kill(&mut self) -> Result<(), Broken> {
        self.model.has_crashed();
        self.worker.take().map_or(Ok(()), |mut worker| worker.kill().map(drop))
    }

    /// Puts the next version of a key. False if the store declines.
    pub fn put(&mut self, key: u64) -> Result<bool, Broken> {
        let (version, sent) = self.send_put(key)?;
        self.end_put(key, version, sent)
    }

    /// Puts the next version of every key, one after another. How many were stored.
    pub fn put_all(&mut self, keys: Range<u64>) -> Result<u64, Broken> {
        let mut stored = 0;
        for key in keys {
            stored += u64::from(self.put(key)?);
        }
        Ok(stored)
    }

    /// Sends a put without waiting.
    pub fn send_put(&mut self, key: u64) -> Result<(u32, Sent), Broken> {
        let version = self.model.next_version(key);
        self.model.putting(key, version);
        let bytes = value::value(key, version, self.scale.value_bytes as usize);
        Ok((version, self.worker()?.send(Do::Put { key }, bytes)))
    }

    pub fn end_put(&mut self, key: u64, version: u32, sent: Sent) -> Result<bool, Broken> {
        let answer = self.worker()?.answer(sent)?.0;
        let stored = self.is_done("put", answer)?;
        if stored {
            self.model.has_put(key, version);
        }
        Ok(stored)
    }

    pub fn delete(&mut self, key: u64) -> Result<(), Broken> {
        self.model.deleting(key);
        let answer = self.worker()?.ask(Do::Delete { key }, Vec::new())?.0;
        if self.is_done("delete", answer)? {
            self.model.has_deleted(key);
        }
        Ok(())
    }

    /// Makes durable what was put. False if the store says that it could not.
    pub fn flush(&mut self) -> Result<bool, Broken> {
        let answer = self.worker()?.ask(Do::Flush, Vec::new())?.0;
        let flushed = self.is_done("flush", answer)?;
        if flushed {
            self.model.has_flushed();
        }
        Ok(flushed)
    }

    /// Asks for values, many at a time, and judges each. How many were hits.
    pub fn get_all(&mut self, keys: impl IntoIterator<Item = u64>) -> Result<u64, Broken> {
        let (mut under_way, mut hits) = (VecDeque::new(), 0);
        for key in keys {
            if under_way.len() == COMMANDS_MAX / 4
                && let Some((key, sent)) = under_way.pop_front()
            {
                hits += u64::from(self.end_get(key, sent)?);
            }
            under_way.push_back((key, self.send_get(key)?));
        }
        for (key, sent) in under_way {
            hits += u64::from(self.end_get(key, sent)?);
        }
        Ok(hits)
    }

    /// Asks for a value without waiting.
    pub fn send_get(&mut self, key: u64) -> Result<Sent, Broken> {
        Ok(self.worker()?.send(Do::Get { key }, Vec::new()))
    }

    /// Waits for a value and judges it.
    pub fn end_get(&mut self, key: u64, sent: Sent) -> Result<bool, Broken> {
        match self.worker()?.answer(sent)? {
            (Is::Hit, bytes) => {
                self.judge(key, &bytes);
                Ok(true)
            }
            (Is::Miss, _) => {
                self.miss(key);
                Ok(false)
            }
            (Is::Error { reason }, _) => {
                self.miss(key);
                Ok(self.error("get", &reason))
            }
            (answer, _) => Err(Broken::Unexpected { command: "get", answer }),
        }
    }

    /// Asks for values with one call of the store and judges each. How many were hits.
    pub fn get_many(&mut self, keys: &[u64]) -> Result<u64, Broken> {
        match self.worker()?.ask(Do::GetMany { keys: keys.to_vec() }, Vec::new())? {
            (Is::Many { lengths }, payload) => {
                let mut rest = &payload[..];
                for (key, length) in keys.iter().zip(&lengths) {
                    let Some(length) = *length else {
                        self.seen.misses += 1;
                        continue;
                    };
                    let (bytes, others) = rest.split_at((length as usize).min(rest.len()));
                    rest = others;
                    self.judge(*key, bytes);
                }
                Ok(lengths.iter().flatten().count() as u64)
            }
            (Is::Refused { .. }, _) => Ok(0),
            (Is::Error { reason }, _) => Ok(u64::from(self.error("get_many", &reason))),
            (answer, _) => Err(Broken::Unexpected { command: "get_many", answer }),
        }
    }

    /// Has something go wrong below the store. Says why, if this worker cannot play it.
    pub fn inject(&mut self, fault: Fault) -> Result<Option<String>, Broken> {
        match self.worker()?.ask(Do::Inject(fault), Vec::new())?.0 {
            Is::Done => Ok(None),
            Is::Unsupported { reason } => Ok(Some(reason)),
            answer => Err(Broken::Unexpected { command: "inject", answer }),
        }
    }

    /// Notes how many faults the store has noticed, if it counts them, and tells.
    pub fn note_faults(&mut self) -> Result<Stat, Broken> {
        let answer = self.worker()?.ask(Do::Stat, Vec::new())?.0;
        let Is::Stat { faults, played } = answer else {
            return Err(Broken::Unexpected { command: "stat", answer });
        };
        if let Some(faults) = faults {
            self.note(format!("{faults} faults counted"));
        }
        Ok(Stat { faults, played })
    }

    /// Tells the reader of the table something.
    pub fn note(&mut self, note: impl Into<String>) {
        let note = note.into();
        if !self.seen.notes.contains(&note) {
            self.seen.notes.push(note);
        }
    }

    /// Whether a worker ended because its power failed, as it was told to.
    pub fn lost_power(&mut self, broken: &Broken) -> bool {
        let lost = matches!(broken, Broken::Died { status, .. } if was_killed(*status));
        if lost {
            self.worker = None;
            self.model.has_crashed();
        }
        lost
    }

    fn miss(&mut self, key: u64) {
        self.seen.misses += 1;
        self.seen.due += u64::from(self.model.is_due(key));
        self.model.has_missed(key);
    }

    fn judge(&mut self, key: u64, bytes: &[u8]) {
        let is_due = self.model.is_due(key);
        let length = self.scale.value_bytes as usize;
        let (keys, versions) = (self.model.keys(), self.model.versions());
        self.seen.hits += 1;
        self.seen.due += u64::from(is_due);
        match value::judge(bytes, key, &self.model.allowed(key), length, keys, versions) {
            Ok(_) => self.seen.due_hits += u64::from(is_due),
            Err(wrong) => {
                self.seen.wrong_values += 1;
                self.seen.wrong_bytes += wrong.bytes;
                self.seen.first_wrong.get_or_insert_with(|| format!("key {key}: {wrong}"));
            }
        }
    }

    /// Whether a command was carried out. A store may decline.
    fn is_done(&mut self, command: &'static str, answer: Is) -> Result<bool, Broken> {
        match answer {
            Is::Done => Ok(true),
            Is::Refused { .. } => Ok(false),
            Is::Error { reason } => Ok(self.error(command, &reason)),
            answer => Err(Broken::Unexpected { command, answer }),
        }
    }

    /// Counts an answer that no interface speaks of. Always false.
    fn error(&mut self, command: &str, reason: &str) -> bool {
        self.seen.errors += 1;
        self.seen.first_error.get_or_insert_with(|| format!("{command}: {reason}"));
        false
    }

    fn worker(&mut self) -> Result<&mut Worker, Broken> {
        self.worker.as_mut().ok_or_else(|| Broken::System(std::io::Error::other("the store is not open")))
    }
}
