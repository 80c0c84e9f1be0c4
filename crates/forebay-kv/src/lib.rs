//! What KV is: geometry, layouts, namespaces, chunk ids, slicing between TP sizes.
//!
//! Knows how many bytes a token's keys and values take in each layer of a model, where an engine puts them, how they
//! are cut into chunks, how chunks are named, and which heads each tensor-parallel rank holds. Pure: it does no I/O,
//! takes no time, and must never know where bytes are kept or how they move.

mod chunk_id;
mod digest;
mod dtype;
mod namespace;
mod order;
mod rank;

pub use chunk_id::{ChunkId, chunk_ids};
pub use digest::Digest;
pub use dtype::{KvDtype, UnknownDtype};
pub use namespace::{Namespace, NamespaceKey};
pub use order::{Axis, AxisOrder, UnknownOrder};
pub use rank::{MAX_RANKS, Rank, RankError};
