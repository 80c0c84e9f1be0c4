//! What an engine needs of whatever keeps its chunks: to ask what is there, to lease it, to bring
//! it into blocks, to check what arrived, and to hand over what was computed. This file knows the
//! questions.

mod in_process;
mod node;

pub use in_process::InProcess;

use crate::scheduler::Residence;
use forebay_kv::ChunkId;
use forebay_store::{NotVerified, StoreEnd, Unreadable};
use forebay_transfer::{Class, End, Span};
use std::fmt::Debug;

/// Told how a load ended.
pub type OnLoaded = Box<dyn FnOnce(End) + Send>;

/// Told how a chunk was stored, or not.
pub type OnStored = Box<dyn FnOnce(StoreEnd) + Send>;

/// Something that keeps chunks for an engine. Ids are always a sequence from its first chunk on.
pub trait KvStore: Debug + Send + Sync {
    /// Whether it answers at all. One that does not has nothing and takes nothing, and may come back.
    fn is_reachable(&self) -> bool;

    /// How many of `ids`, from the first on, are there.
    fn lookup(&self, ids: &[ChunkId]) -> usize;

    /// A request uses these chunks, wherever they are or if they have to be computed.
    fn used(&self, ids: &[ChunkId], chunk_bytes: u64);

    /// Leases the longest prefix of `ids` that is there, for `ttl_us` at most.
    fn lease(&self, ids: &[ChunkId], ttl_us: u64) -> Box<dyn KvLease>;

    /// Takes a chunk in: for each layer the spans whose bytes, one after another, are the layer. They stay unchanged until
    /// `on_end`, which is called once, from any thread, unless the chunk is refused.
    fn store_chunk(
        &self,
        id: ChunkId,
        parent: Option<ChunkId>,
        layers: &[Vec<Span>],
        class: Class,
        on_end: OnStored,
    ) -> Result<(), Refused>;
}

/// The right to load the chunks of a prefix, until it is dropped or dies.
pub trait KvLease: Debug + Send {
    /// Where its chunks are.
    fn residence(&self) -> Residence;

    /// Loads a chunk into `targets`, a list of spans for each layer. `on_end` is called once, from any thread, unless this
    /// is a miss. What arrived must be verified before it is used.
    fn load_chunk(
        &self,
        chunk: usize,
        targets: &[Vec<Span>],
        class: Class,
        deadline_us: Option<u64>,
        on_end: OnLoaded,
    ) -> Result<(), Miss>;

    /// Whether `bytes` are what a layer of a chunk had when it was stored.
    fn verify(&self, chunk: usize, layer: usize, bytes: &[u8]) -> Result<(), Miss>;
}

/// A chunk that was not taken in, for whatever reason; `on_end` will not be called.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Refused;

/// Why a chunk that was found cannot be used. Its tokens, and those behind it, are computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Miss {
    /// Whoever kept it does not answer any more.
    NodeGone,
    /// The lease ended before the chunk was in use.
    DeadLease,
    /// It is not there any more.
    Missing,
    /// Its bytes are wrong.
    Corrupt,
    /// It was not moved: the transfer failed or was refused.
    Unmoved,
}

impl From<Unreadable> for Miss {
    fn from(why: Unreadable) -> Miss {
        match why {
            Unreadable::DeadLease => Miss::DeadLease,
            Unreadable::Gone { .. } | Unreadable::Outside { .. } => Miss::Missing,
        }
    }
}

impl From<NotVerified> for Miss {
    fn from(why: NotVerified) -> Miss {
        match why {
            NotVerified::Corrupt { .. } => Miss::Corrupt,
            NotVerified::Unreadable(why) => why.into(),
            NotVerified::Length { .. } => Miss::Missing,
        }
    }
}
