//! What KV is: namespaces, chunk ids, data types, orders of axes and ranks. It says what separates the
//! KV of two engines, and how chunks are named. It does no I/O and takes no time.

mod chunk_id;
mod digest;
mod dtype;
mod namespace;
mod order;
mod rank;

pub use chunk_id::{ChunkId, MAX_CHUNK_TOKENS, chunk_ids};
pub use digest::Digest;
pub use dtype::{KvDtype, UnknownDtype};
pub use namespace::{Namespace, NamespaceKey};
pub use order::{AxisOrder, UnknownOrder};
pub use rank::{MAX_RANKS, Rank, RankError};
