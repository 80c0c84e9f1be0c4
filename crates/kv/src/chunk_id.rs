//! The names of chunks.
//!
//! Knows how a chunk's id follows from its namespace, its parent and its tokens.
//!
//! # Encoding, version 1
//!
//! An id is `blake3::keyed_hash(namespace key, bytes)` with
//!
//! ```text
//! parent     u8        0: first chunk of a sequence, 1: has a parent
//! parent id  [u8; 32]  zeros for a first chunk
//! tokens     u32 LE each
//! ```
//!
//! The id of the parent stands for all tokens before the chunk, so equal ids mean equal prefixes.
//! The version is part of the namespace key.

use std::fmt;

use crate::digest::write_hex;
use crate::namespace::NamespaceKey;

/// The most tokens that a chunk may have.
pub const MAX_CHUNK_TOKENS: u32 = 1 << 20;

/// Tokens that are turned into bytes at a time: one BLAKE3 chunk.
const BATCH_TOKENS: usize = 256;

/// The name of a chunk: of its namespace, its tokens and all tokens before it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ChunkId([u8; 32]);

impl ChunkId {
    /// The id of the chunk that holds `tokens` and follows `parent`, or starts a sequence.
    pub fn derive(namespace: &NamespaceKey, parent: Option<&ChunkId>, tokens: &[u32]) -> ChunkId {
        let mut head = [0; 33];
        if let Some(parent) = parent {
            head[0] = 1;
            head[1..].copy_from_slice(&parent.0);
        }
        let mut hasher = blake3::Hasher::new_keyed(namespace.as_bytes());
        hasher.update(&head);
        let mut bytes = [0; BATCH_TOKENS * 4];
        for batch in tokens.chunks(BATCH_TOKENS) {
            for (slot, token) in bytes.chunks_exact_mut(4).zip(batch) {
                slot.copy_from_slice(&token.to_le_bytes());
            }
            hasher.update(&bytes[..batch.len() * 4]);
        }
        ChunkId(*hasher.finalize().as_bytes())
    }

    /// An id that was derived before and kept.
    pub const fn from_bytes(bytes: [u8; 32]) -> Self {
        Self(bytes)
    }

    pub const fn as_bytes(&self) -> &[u8; 32] {
        &self.0
    }
}

impl fmt::Display for ChunkId {
    /// The whole id as 64 hexadecimal digits.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write_hex(&self.0, f)
    }
}

impl fmt::Debug for ChunkId {
    /// The first 8 digits, enough to tell chunks apart in a log.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ChunkId(")?;
        write_hex(&self.0[..4], f)?;
        f.write_str("..)")
    }
}

/// The ids of the whole chunks of a sequence, each the parent of the next. Tokens after the last
/// whole chunk have no id: they may still grow. With `chunk_tokens` of 0 there are no chunks.
///
/// ```
/// use forebay_kv::{ChunkId, NamespaceKey, chunk_ids};
///
/// let namespace = NamespaceKey::from_bytes([7; 32]);
/// let tokens: Vec<u32> = (0..700).collect();
/// let ids = chunk_ids(&namespace, &tokens, 256);
/// assert_eq!(ids.len(), 2);
/// assert_eq!(ids[1], ChunkId::derive(&namespace, Some(&ids[0]), &tokens[256..512]));
/// ```
pub fn chunk_ids(namespace: &NamespaceKey, tokens: &[u32], chunk_tokens: usize) -> Vec<ChunkId> {
    if chunk_tokens == 0 {
        return Vec::new();
    }
    let mut ids: Vec<ChunkId> = Vec::with_capacity(tokens.len() / chunk_tokens);
    for chunk in tokens.chunks_exact(chunk_tokens) {
        ids.push(ChunkId::derive(namespace, ids.last(), chunk));
    }
    ids
}
