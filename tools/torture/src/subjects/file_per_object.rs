//! A store of one file per value, as most KV caches keep their disk tier: a temporary file that is
//! renamed, no checksum, no sync, an index in memory that is built from the directory, least
//! recently used values removed by accounted bytes. Its code is careful, so what it fails at is the
//! design's. This file knows file names and bytes; faults are `files`' matter.

use super::files::Files;
use crate::faults::Faults;
use crate::protocol::{Fault, Is, Setup};
use crate::serve::Subject;
use parking_lot::Mutex;
use std::collections::HashMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

#[derive(Debug)]
pub struct FilePerObject {
    faults: Arc<Faults>,
    files: Files,
    state: Mutex<Option<State>>,
}

#[derive(Debug)]
struct State {
    setup: Setup,
    /// Length and last use of each file.
    index: HashMap<PathBuf, (u64, SystemTime)>,
    accounted_bytes: u64,
    temporaries: u64,
}

impl Default for FilePerObject {
    fn default() -> FilePerObject {
        let faults = Arc::new(Faults::default());
        FilePerObject { files: Files::new(Arc::clone(&faults)), faults, state: Mutex::default() }
    }
}

impl FilePerObject {
    fn with<T>(&self, work: impl FnOnce(&mut State) -> T) -> Result<T, Is> {
        let state: &mut Option<State> = &mut self.state.lock();
        state.as_mut().map(work).ok_or_else(|| Is::Error { reason: "not open".into() })
    }

    fn store(&self, key: u64, value: &[u8]) -> Result<Is, Is> {
        let bytes = value.len() as u64;
        let (path, temporary) = self.with(|state| {
            state.make_room(bytes);
            state.accounted_bytes += bytes;
            state.temporaries += 1;
            let path = state.path(key);
            (path.clone(), path.with_extension(format!("tmp{}", state.temporaries)))
        })?;
        let written = self.files.write(&temporary, value).and_then(|()| std::fs::rename(&temporary, &path));
        self.with(|state| match written {
            Ok(()) => {
                let replaced = state.index.insert(path, (bytes, SystemTime::now()));
                state.accounted_bytes -= replaced.map_or(0, |(bytes, _)| bytes);
                Is::Done
            }
            Err(error) => {
                // What cannot be removed either is found by the next start.
                let _ = std::fs::remove_file(&temporary);
                state.accounted_bytes -= bytes;
                Is::Refused { reason: error.to_string() }
            }
        })
    }

    fn load(&self, key: u64) -> Result<Option<Vec<u8>>, Is> {
        let known = self.with(|state| {
            let path = state.path(key);
            let entry = state.index.get_mut(&path)?;
            entry.1 = SystemTime::now();
            Some((path, entry.0))
        })?;
        let Some((path, bytes)) = known else { return Ok(None) };
        match self.files.read(&path, bytes as usize) {
            Ok(value) => Ok(Some(value)),
            Err(_) => {
                self.with(|state| state.forget(&path))?;
                Ok(None)
            }
        }
    }
}

impl Subject for FilePerObject {
    fn open(&self, setup: &Setup) -> Is {
        match State::scan(setup) {
            Ok(state) => {
                *self.state.lock() = Some(state);
                Is::Done
            }
            Err(error) => Is::Refused { reason: error.to_string() },
        }
    }

    fn put(&self, key: u64, value: Vec<u8>) -> Is {
        self.store(key, &value).unwrap_or_else(|error| error)
    }

    fn get_many(&self, keys: &[u64]) -> Result<Vec<Option<Vec<u8>>>, Is> {
        keys.iter().map(|key| self.load(*key)).collect()
    }

    fn delete(&self, key: u64) -> Is {
        let deleted = self.with(|state| {
            let path = state.path(key);
            state.forget(&path);
        });
        deleted.map_or_else(|error| error, |()| Is::Done)
    }

    /// Stores of this kind have no flush: what was answered lies in the system's cache.
    fn flush(&self) -> Is {
        Is::Done
    }

    fn inject(&self, fault: Fault) -> Is {
        self.faults.inject(fault);
        Is::Done
    }

    fn faults(&self) -> Option<u64> {
        None
    }

    fn close(&self) -> Is {
        Is::Done
    }
}

impl State {
    /// Takes up what a directory holds, with the files' times as their last use.
    fn scan(setup: &Setup) -> io::Result<State> {
        let (mut index, mut accounted_bytes) = (HashMap::new(), 0);
        for entry in std::fs::read_dir(&setup.dir)? {
            let (path, metadata) = entry.and_then(|entry| Ok((entry.path(), entry.metadata()?)))?;
            let is_value = path.extension().is_some_and(|extension| extension == "kv");
            if is_value {
                accounted_bytes += metadata.len();
                index.insert(path, (metadata.len(), metadata.modified()?));
            } else {
                std::fs::remove_file(&path)?;
            }
        }
        let mut state = State { setup: setup.clone(), index, accounted_bytes, temporaries: 0 };
        state.make_room(0);
        Ok(state)
    }

    fn path(&self, key: u64) -> PathBuf {
        self.setup.dir.join(format!("{}@{key:016x}.kv", self.setup.namespace))
    }

    fn make_room(&mut self, bytes: u64) {
        while self.accounted_bytes + bytes > self.setup.capacity_bytes {
            let age = |(_, (_, used)): &(&PathBuf, &(u64, SystemTime))| {
                used.duration_since(SystemTime::UNIX_EPOCH).unwrap_or(Duration::ZERO)
            };
            let Some(oldest) = self.index.iter().min_by_key(age).map(|(path, _)| path.clone()) else {
                return;
            };
            self.forget(&oldest);
        }
    }

    fn forget(&mut self, path: &Path) {
        if let Some((bytes, _)) = self.index.remove(path) {
            self.accounted_bytes -= bytes;
            // A file that is gone already needs no removal.
            let _ = std::fs::remove_file(path);
        }
    }
}
