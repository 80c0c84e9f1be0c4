//! What KV is: namespaces, chunk ids, data types, orders of axes, and slicing between TP sizes.
//!
//! It says what separates the KV of two engines, how chunks are named, and which heads each
//! tensor-parallel rank holds. It does no I/O and takes no time. Where bytes are kept and how they
//! move is not its business.

mod chunk_id;
mod digest;
mod dtype;
mod namespace;
mod order;
mod rank;
mod slice;

pub use chunk_id::{ChunkId, MAX_CHUNK_TOKENS, chunk_ids};
pub use digest::Digest;
pub use dtype::{KvDtype, UnknownDtype};
pub use namespace::{Namespace, NamespaceKey};
pub use order::{AxisOrder, UnknownOrder};
pub use rank::{MAX_RANKS, Rank, RankError};
pub use slice::{HeadMove, HeadSplit, SplitError};
