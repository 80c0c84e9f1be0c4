//! What KV is: geometry, layouts, namespaces, chunk ids, slicing between TP sizes.
//!
//! Knows how many bytes a token's keys and values take in each layer of a model, where an engine puts them,
//! how they are cut into chunks, how chunks are named, and which heads each tensor-parallel rank holds. Pure:
//! it does no I/O, takes no time, and must never know where bytes are kept or how they move.

mod chunk_id;
mod chunk_layout;
mod chunking;
mod digest;
mod dtype;
mod extent;
mod geometry;
mod layout;
mod namespace;
mod order;
mod rank;
mod slice;

pub use chunk_id::{ChunkId, chunk_ids};
pub use chunk_layout::ChunkLayout;
pub use chunking::{Chunking, ChunkingError, MAX_CHUNK_TOKENS};
pub use digest::Digest;
pub use dtype::{KvDtype, UnknownDtype};
pub use extent::{Extent, OutOfRange, Strided, UnequalBytes};
pub use geometry::{
    Cache, Geometry, GeometryError, Group, MAX_BYTES_PER_TOKEN, MAX_LAYERS, MAX_STATE_BYTES, StateShape,
    attention_parameters,
};
pub use layout::{Layout, LayoutError, MAX_LAYOUT_BYTES, PoolShape};
pub use namespace::{Namespace, NamespaceKey};
pub use order::{Axis, AxisOrder, UnknownOrder};
pub use rank::{MAX_RANKS, Rank, RankError};
pub use slice::{HeadMove, HeadSplit, SplitError};
