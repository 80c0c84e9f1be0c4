//! Weka's Claude Code sessions: one JSON object a file, all of whose times count from its own
//! start. Here the files become one trace in order of arrival, with one request of each in memory;
//! what a file says is in [`session`].

mod ids;
mod session;
mod text;

use super::error::{LineError, Place, TraceError};
use super::input::Bytes;
use crate::request::TraceRequest;
use ids::Ids;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use session::Session;
use std::collections::{BTreeMap, VecDeque};
use std::fs::File;
use std::io::{self, BufReader, Read, Seek, SeekFrom};
use std::path::Path;
use std::sync::Arc;
use text::ReadError;

/// The most session files that one trace may have: each takes a buffer and a request in memory.
pub(super) const MAX_SESSION_FILES: usize = 10_000;

const BUFFER_BYTES: usize = 32 << 10;

/// What these traces do not record and a reader may add. Both are assumptions; neither changes a
/// time within a session.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct WekaOptions {
    /// Gives the sessions of one model their tool definitions and system prompt as a common prefix.
    /// The ids are local to a session, so that without this sessions share nothing.
    pub share_system_prompt: bool,
    /// Spreads the starts of the sessions evenly at random over this time. All files count from 0,
    /// so that without this all sessions start at once.
    pub spread_starts_us: u64,
    /// Seed of the random starts.
    pub seed: u64,
}

/// All session files as one trace.
pub(super) struct Weka {
    sessions: Vec<OpenFile>,
    /// The requests whose turn has not come, by their arrival and their position among all that
    /// were read; and, with one of a main line, the file to read on in when it is handed out.
    waiting: BTreeMap<(u64, u64), (TraceRequest, Option<usize>)>,
    errors: VecDeque<TraceError>,
    requests_read: u64,
}

struct OpenFile {
    file: Arc<Path>,
    session: Session<Bytes>,
}

impl Weka {
    /// A trace of session files, in this order where requests arrive at the same time.
    pub(super) fn open(files: impl IntoIterator<Item = (Arc<Path>, Bytes)>, options: WekaOptions) -> Weka {
        let mut random = StdRng::seed_from_u64(options.seed);
        let mut weka = Weka {
            sessions: Vec::new(),
            waiting: BTreeMap::new(),
            errors: VecDeque::new(),
            requests_read: 0,
        };
        for (number, (file, input)) in files.into_iter().enumerate() {
            let start_us = random.random_range(0..=options.spread_starts_us);
            let name = session_name(&file);
            match Session::open(input, name, start_us, Ids::new(number as u64, options.share_system_prompt)) {
                Ok(session) => weka.sessions.push(OpenFile { file, session }),
                Err(error) => weka.errors.push_back(located(&file, Place::Header, error)),
            }
        }
        (0..weka.sessions.len()).for_each(|index| weka.read_on(index));
        weka
    }

    /// Reads one session until a request of its main line waits. The sub-agents on the way wait as
    /// well: none of their requests can arrive before the entry that holds them.
    fn read_on(&mut self, index: usize) {
        let OpenFile { file, session } = &mut self.sessions[index];
        loop {
            let entry = session.next_entry();
            let place = Place::Request(session.entries);
            let requests = match entry {
                Ok(None) => return,
                Ok(Some(Ok(requests))) => requests,
                Ok(Some(Err(problem))) => {
                    self.errors.push_back(located(file, place, ReadError::Text(problem)));
                    continue;
                }
                Err(error) => return self.errors.push_back(located(file, place, error)),
            };
            let is_main = requests.iter().any(|request| request.parent_session.is_none());
            for request in requests {
                self.requests_read += 1;
                let key = (request.arrival_us, self.requests_read);
                self.waiting.insert(key, (request, is_main.then_some(index)));
            }
            if is_main {
                return;
            }
        }
    }
}

impl Iterator for Weka {
    type Item = Result<TraceRequest, TraceError>;

    fn next(&mut self) -> Option<Self::Item> {
        if let Some(error) = self.errors.pop_front() {
            return Some(Err(error));
        }
        let (_, (request, read_on_in)) = self.waiting.pop_first()?;
        if let Some(index) = read_on_in {
            self.read_on(index);
        }
        Some(Ok(request))
    }
}

/// The name of a file without `.json` and what a compressor added to it.
pub(super) fn session_name(file: &Path) -> String {
    let name = file.file_name().unwrap_or_default().to_string_lossy();
    let unpacked = name.strip_suffix(".gz").or_else(|| name.strip_suffix(".zst")).unwrap_or(&name);
    Path::new(unpacked).file_stem().unwrap_or_default().to_string_lossy().into_owned()
}

fn located(file: &Arc<Path>, place: Place, error: ReadError) -> TraceError {
    match error {
        ReadError::Io(source) => TraceError::Io { file: file.to_path_buf(), source },
        ReadError::Text(problem) => TraceError::Line(LineError { file: Arc::clone(file), place, problem }),
    }
}

/// A session file that is open only while it is read: a trace may have more files than a process
/// may hold open.
pub(super) fn reopening(file: Arc<Path>) -> Bytes {
    Box::new(BufReader::with_capacity(BUFFER_BYTES, Reopening { file, offset: 0 }))
}

struct Reopening {
    file: Arc<Path>,
    offset: u64,
}

impl Read for Reopening {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let mut file = File::open(&self.file)?;
        file.seek(SeekFrom::Start(self.offset))?;
        let read = file.read(into)?;
        self.offset += read as u64;
        Ok(read)
    }
}
