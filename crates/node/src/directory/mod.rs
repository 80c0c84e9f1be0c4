//! Who holds which chunks, as far as is known without asking.
//!
//! A directory is a hint. It may be late, down or wrong: a wrong answer costs one refused request
//! to a peer, and without any directory everything but finding chunks elsewhere works. From whom a
//! chunk is read is decided elsewhere.

mod etcd;
mod record;
mod static_file;

pub use etcd::{EtcdConfig, EtcdDirectory, EtcdError};
pub(crate) use etcd::{PREFIX_BYTES_MAX, TTL_S};
pub(crate) use record::check_name;
pub use record::{NAME_BYTES_MAX, NodeRecord, RecordError, node_of_name};
pub use static_file::{StaticDirectory, StaticError};

use forebay_kv::ChunkId;

/// Where nodes find each other, and each other's chunks.
pub trait Directory: Send + Sync {
    /// Nodes that are known to live, without this one.
    fn nodes(&self) -> Vec<NodeRecord>;

    /// Which nodes are said to hold chunks. Answered from memory, without waiting for anything.
    fn holders(&self, ids: &[ChunkId]) -> Holders;

    /// Says which chunks this node has from now on, and which no more. Remembered and sent later:
    /// never waits. A directory that does not say who has what takes no notice.
    fn announce(&self, _added: &[ChunkId], _removed: &[ChunkId]) {}

    /// Says that this node has these chunks and no others from now on. As
    /// [`announce`](Directory::announce).
    fn announce_all(&self, _here: &[ChunkId]) {}

    /// Another live node with this one's name, in a sentence. Each hides the other from all others.
    fn conflict(&self) -> Option<String> {
        None
    }

    /// What the directory says about itself.
    fn stat(&self) -> DirectoryStat;
}

/// Which nodes are said to hold chunks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Holders {
    /// The directory does not know: only asking the nodes helps.
    Unknown,
    /// For each id asked for, in order, nodes that are listed in [`Directory::nodes`]; never this
    /// one.
    Said(Vec<Vec<[u8; 16]>>),
}

/// The directory of a node that was told of none: nobody is known, and nobody is told.
#[derive(Debug)]
pub(crate) struct NoDirectory;

impl Directory for NoDirectory {
    fn nodes(&self) -> Vec<NodeRecord> {
        Vec::new()
    }

    fn holders(&self, ids: &[ChunkId]) -> Holders {
        Holders::Said(vec![Vec::new(); ids.len()])
    }

    fn stat(&self) -> DirectoryStat {
        DirectoryStat::default()
    }
}

/// A snapshot of a directory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct DirectoryStat {
    /// Nodes known, without this one.
    pub nodes: usize,
    /// Pairs of a chunk and a node that is said to hold it, this node's included.
    pub holdings: usize,
    /// Chunks of this node that others can see.
    pub announced: usize,
    /// Changes of this node's chunks that others cannot see yet.
    pub waiting: usize,
    /// For how long what is known may be out of date; `None` while changes arrive as they happen.
    pub stale_us: Option<u64>,
    /// How often everything was read anew.
    pub lists: u64,
    /// Whether another live node has this one's name.
    pub name_conflict: bool,
    /// How often this node had to begin anew as a member: at the start, and after it was given up
    /// for dead.
    pub joins: u64,
    pub faults: DirectoryFaults,
}

/// What went wrong, by kind. None of it harms anything but the directory's freshness.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct DirectoryFaults {
    /// The directory's service, or its file, could not be reached or did not answer in time.
    pub unreachable: u64,
    /// It refused what was asked, or answered what cannot be understood.
    pub refused: u64,
    /// Entries that were ignored because they are not what they should be.
    pub bad_entries: u64,
    /// Entries that were ignored because there are too many.
    pub over_limit: u64,
}
