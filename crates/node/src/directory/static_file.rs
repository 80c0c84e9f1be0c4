//! A directory that is a file: a list of nodes, written by people or by their tools.
//!
//! ```toml
//! [[nodes]]
//! name = "left"
//! address = "10.0.0.1:7600"
//! node = "00112233445566778899aabbccddeeff"  # optional: follows from the name otherwise
//! ```
//!
//! The file says who is there, not who holds what, so that is [`Holders::Unknown`]. A changed file
//! is read again when somebody asks for the nodes; no thread waits for that. A file that cannot be
//! read changes nothing and is counted.

use super::record::{check_name, id_of, node_of_name};
use super::{Directory, DirectoryFaults, DirectoryStat, Holders, NodeRecord, RecordError};
use forebay_kv::ChunkId;
use forebay_transfer::lock::{Mutex, MutexGuard};
use serde::Deserialize;
use std::collections::HashSet;
use std::fs::{File, Metadata};
use std::io::{self, Read};
use std::net::SocketAddr;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use thiserror::Error;

const FILE_BYTES_MAX: u64 = 1 << 20;
/// The file is looked at no more often than this.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// Why a file is not a list of nodes.
#[derive(Debug, Error)]
pub enum StaticError {
    #[error("{path}: {error}")]
    Io { path: PathBuf, error: io::Error },
    #[error("{path} has {bytes} bytes; allowed: {FILE_BYTES_MAX}")]
    TooLong { path: PathBuf, bytes: u64 },
    #[error("{path}: {message}")]
    Toml { path: PathBuf, message: String },
    #[error("{path}: node {name:?}: {error}")]
    Record { path: PathBuf, name: String, error: RecordError },
    #[error("{path}: node {name:?} has the id or the address of another entry")]
    Twice { path: PathBuf, name: String },
}

/// A list of nodes in a file.
#[derive(Debug)]
pub struct StaticDirectory {
    path: PathBuf,
    me: [u8; 16],
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    nodes: Vec<NodeRecord>,
    version: Option<Version>,
    looked_at: Instant,
    lists: u64,
    faults: DirectoryFaults,
}

/// What changes when a file is written or replaced.
type Version = (u64, u64, i64, i64);

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct WrittenList {
    #[serde(default)]
    nodes: Vec<WrittenNode>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct WrittenNode {
    name: String,
    address: SocketAddr,
    node: Option<String>,
}

impl StaticDirectory {
    /// The nodes that a list has now.
    pub fn read(path: &Path) -> Result<Vec<NodeRecord>, StaticError> {
        read(path).map(|(nodes, _)| nodes)
    }

    /// Reads the list. `me` is the node that asks; it may be in the list.
    pub fn open(path: &Path, me: [u8; 16]) -> Result<StaticDirectory, StaticError> {
        let (nodes, version) = read(path)?;
        let state = State {
            nodes,
            version: Some(version),
            looked_at: Instant::now(),
            lists: 1,
            faults: DirectoryFaults::default(),
        };
        Ok(StaticDirectory { path: path.to_owned(), me, state: Mutex::new(state) })
    }

    /// The state, after a look at the file if the last one was a while ago.
    fn state(&self) -> MutexGuard<'_, State> {
        let mut state = self.state.lock();
        if state.looked_at.elapsed() >= LOOK_EVERY {
            state.looked_at = Instant::now();
            state.look(&self.path);
        }
        state
    }
}

impl State {
    /// Reads the file again if it changed. A bad one is counted once, not at every look.
    fn look(&mut self, path: &Path) {
        let version = std::fs::metadata(path).ok().map(|metadata| version_of(&metadata));
        if version == self.version {
            return;
        }
        self.version = version;
        match read(path) {
            Ok((nodes, version)) => {
                self.nodes = nodes;
                self.version = Some(version);
                self.lists += 1;
                tracing::info!(path = %path.display(), nodes = self.nodes.len(), "node list read");
            }
            Err(error) => {
                tracing::warn!(path = %path.display(), reason = %error, "node list not read");
                match error {
                    StaticError::Io { .. } => self.faults.unreachable += 1,
                    _ => self.faults.bad_entries += 1,
                }
            }
        }
    }
}

impl Directory for StaticDirectory {
    fn nodes(&self) -> Vec<NodeRecord> {
        self.state().nodes.iter().filter(|record| record.node != self.me).cloned().collect()
    }

    fn holders(&self, _: &[ChunkId]) -> Holders {
        Holders::Unknown
    }

    fn stat(&self) -> DirectoryStat {
        let state = self.state();
        let nodes = state.nodes.iter().filter(|record| record.node != self.me).count();
        DirectoryStat { nodes, lists: state.lists, faults: state.faults, ..DirectoryStat::default() }
    }
}

fn version_of(metadata: &Metadata) -> Version {
    (metadata.ino(), metadata.len(), metadata.mtime(), metadata.mtime_nsec())
}

fn read(path: &Path) -> Result<(Vec<NodeRecord>, Version), StaticError> {
    let io_error = |error| StaticError::Io { path: path.to_owned(), error };
    let file = File::open(path).map_err(io_error)?;
    let metadata = file.metadata().map_err(io_error)?;
    let mut bytes = Vec::new();
    file.take(FILE_BYTES_MAX + 1).read_to_end(&mut bytes).map_err(io_error)?;
    if bytes.len() as u64 > FILE_BYTES_MAX {
        return Err(StaticError::TooLong { path: path.to_owned(), bytes: metadata.len() });
    }
    let text = String::from_utf8_lossy(&bytes);
    Ok((parse(path, &text)?, version_of(&metadata)))
}

fn parse(path: &Path, text: &str) -> Result<Vec<NodeRecord>, StaticError> {
    let list: WrittenList = toml::from_str(text)
        .map_err(|error| StaticError::Toml { path: path.to_owned(), message: error.to_string() })?;
    let (mut ids, mut addresses) = (HashSet::new(), HashSet::new());
    let mut nodes = Vec::with_capacity(list.nodes.len());
    for written in list.nodes {
        let record = written.record().map_err(|(name, error)| StaticError::Record {
            path: path.to_owned(),
            name,
            error,
        })?;
        if !ids.insert(record.node) || !addresses.insert(record.address) {
            return Err(StaticError::Twice { path: path.to_owned(), name: record.name });
        }
        nodes.push(record);
    }
    Ok(nodes)
}

impl WrittenNode {
    fn record(self) -> Result<NodeRecord, (String, RecordError)> {
        let node = match &self.node {
            Some(digits) => id_of("node", digits),
            None => Ok(node_of_name(&self.name)),
        };
        let checked = check_name(&self.name).and(node);
        match checked {
            Ok(node) => Ok(NodeRecord { node, instance: [0; 16], name: self.name, address: self.address }),
            Err(error) => Err((self.name, error)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use testkit::eventually;

    const TWO: &str = r#"
        [[nodes]]
        name = "left"
        address = "127.0.0.1:7001"
        [[nodes]]
        name = "right"
        address = "127.0.0.1:7002"
        node = "00112233445566778899aabbccddeeff"
    "#;

    fn written(text: &str) -> (tempfile::TempDir, PathBuf) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("nodes.toml");
        std::fs::write(&path, text).unwrap();
        (folder, path)
    }

    fn names(directory: &StaticDirectory) -> Vec<String> {
        directory.nodes().into_iter().map(|record| record.name).collect()
    }

    #[test]
    fn the_list_is_without_the_node_that_asks_and_holders_are_unknown() {
        let (_folder, path) = written(TWO);
        let directory = StaticDirectory::open(&path, node_of_name("left")).unwrap();
        assert_eq!(names(&directory), ["right"]);
        assert_eq!(directory.nodes()[0].node[..3], [0x00, 0x11, 0x22]);
        assert_eq!(directory.holders(&[ChunkId::from_bytes([1; 32])]), Holders::Unknown);
    }

    #[test]
    fn a_changed_file_is_read_again_and_a_bad_one_changes_nothing() {
        let (_folder, path) = written(TWO);
        let directory = StaticDirectory::open(&path, [0; 16]).unwrap();
        std::fs::write(&path, "[[nodes]]\nname = \"third\"\naddress = \"127.0.0.1:7003\"\n").unwrap();
        eventually("the changed list", || names(&directory) == ["third"]);
        std::fs::write(&path, "[[nodes]]\nname = \"fourth\"\naddress = \"nowhere\"\n").unwrap();
        eventually("the fault", || directory.stat().faults.bad_entries == 1);
        std::fs::remove_file(&path).unwrap();
        eventually("the other fault", || directory.stat().faults.unreachable == 1);
        assert_eq!(names(&directory), ["third"]);
        std::fs::write(&path, "").unwrap();
        eventually("the empty list", || names(&directory).is_empty());
        assert_eq!(directory.stat().faults.bad_entries, 1);
    }

    #[test]
    fn a_bad_file_is_refused_with_what_is_wrong() {
        let wrong = |text: &str| {
            let (_folder, path) = written(text);
            StaticDirectory::open(&path, [0; 16]).unwrap_err().to_string()
        };
        assert!(wrong(&TWO.replace("eeff", "eefx")).contains("allowed: 32 hexadecimal digits"));
        assert!(wrong(&TWO.replace("7002", "7001")).contains("\"right\" has the id or the address"));
        assert!(wrong(&TWO.replace("right", "")).contains("allowed: 1 to 255"));
        assert!(wrong(&TWO.replace("node =", "nodes =")).contains("unknown field"));
        assert!(wrong(&"#".repeat(FILE_BYTES_MAX as usize + 1)).contains("allowed: 1048576"));
    }
}
