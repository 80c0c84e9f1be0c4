//! A store of one file per value, as most KV caches keep their disk tier: a temporary file that is
//! renamed, no checksum, no sync, an index in memory that is built from the directory, least
//! recently used values removed by accounted bytes. Its code is careful, so what it fails at is the
//! design's. This file knows file names and bytes; faults are `files`' matter.

use super::files;
use crate::faults::Faults;
use crate::protocol::{Fault, Is, Setup};
use crate::serve::Subject;
use forebay_transfer::lock::Mutex;
use std::collections::HashMap;
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

#[derive(Debug, Default)]
pub struct FilePerObject {
    faults: Faults,
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

impl FilePerObject {
    fn with<T>(&self, work: impl FnOnce(&mut State) -> T) -> Result<T, Is> {
        let state: &mut Option<State> = &mut self.state.lock();
        state.as_mut().map(work).ok_or_else(|| Is::Error { reason: "not open".into() })
    }

    fn store(&self, key: u64, value: &[u8]) -> Result<(), Is> {
        let bytes = value.len() as u64;
        let (path, temporary) = self.with(|state| {
            state.make_room(bytes);
            state.accounted_bytes += bytes;
            state.temporaries += 1;
            let path = state.path(key);
            (path.clone(), path.with_extension(format!("tmp{}", state.temporaries)))
        })?;
        let written =
            files::write(&self.faults, &temporary, value).and_then(|()| std::fs::rename(&temporary, &path));
        self.with(|state| match written {
            Ok(()) => {
                let replaced = state.index.insert(path, (bytes, SystemTime::now()));
                state.accounted_bytes -= replaced.map_or(0, |(bytes, _)| bytes);
                Ok(())
            }
            Err(error) => {
                // What cannot be removed either is found by the next start.
                let _ = std::fs::remove_file(&temporary);
                state.accounted_bytes -= bytes;
                Err(Is::Refused { reason: error.to_string() })
            }
        })?
    }

    fn load(&self, key: u64) -> Result<Option<Vec<u8>>, Is> {
        let known = self.with(|state| {
            let path = state.path(key);
            let entry = state.index.get_mut(&path)?;
            entry.1 = SystemTime::now();
            Some((path, entry.0))
        })?;
        let Some((path, bytes)) = known else { return Ok(None) };
        match files::read(&self.faults, &path, bytes as usize) {
            Ok(mut value) => {
                if let Some((at, bit)) = self.faults.flip(value.len()) {
                    value[at] ^= bit;
                }
                Ok(Some(value))
            }
            Err(_) => {
                self.with(|state| state.forget(&path))?;
                Ok(None)
            }
        }
    }
}

impl Subject for FilePerObject {
    fn open(&self, setup: &Setup) -> Result<(), Is> {
        let state = State::scan(setup).map_err(|error| Is::Refused { reason: error.to_string() })?;
        *self.state.lock() = Some(state);
        Ok(())
    }

    fn put(&self, key: u64, value: Vec<u8>) -> Result<(), Is> {
        self.store(key, &value)
    }

    fn get_many(&self, keys: &[u64]) -> Result<Vec<Option<Vec<u8>>>, Is> {
        keys.iter().map(|key| self.load(*key)).collect()
    }

    fn delete(&self, key: u64) -> Result<(), Is> {
        self.with(|state| {
            let path = state.path(key);
            state.forget(&path);
        })
    }

    /// Stores of this kind have no flush: what was answered lies in the system's cache.
    fn flush(&self) -> Result<(), Is> {
        Ok(())
    }

    fn faults(&self) -> &Faults {
        &self.faults
    }

    fn cannot_play(&self, fault: &Fault) -> Option<&'static str> {
        matches!(fault, Fault::Torn { .. }).then_some("it has no ring")
    }

    fn noticed(&self) -> Option<u64> {
        None
    }

    fn close(&self) -> Result<(), Is> {
        Ok(())
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
