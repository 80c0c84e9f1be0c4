//! How a sequence is cut into chunks, and chunks into blocks.
//!
//! Knows counts of tokens only. Must never know bytes, layers or ids.

use std::ops::Range;

/// The most tokens that a chunk may have.
pub const MAX_CHUNK_TOKENS: u32 = 1 << 20;

/// A chunk size together with the engine's block size, which divides it.
///
/// ```
/// use forebay_kv::Chunking;
///
/// let chunking = Chunking::new(256, 16)?;
/// assert_eq!(chunking.whole_chunks(1000), 3);
/// assert_eq!(chunking.blocks_of(2), 32..48);
/// assert_eq!(chunking.chunk_of_block(37), (2, 5));
/// # Ok::<(), forebay_kv::ChunkingError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Chunking {
    chunk_tokens: u32,
    block_tokens: u32,
}

/// Sizes that do not go together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ChunkingError {
    /// The block size is zero or larger than any chunk.
    #[error("block_tokens is {block_tokens}; allowed: 1 to {MAX_CHUNK_TOKENS}")]
    Block {
        /// The block size that was asked for.
        block_tokens: u32,
    },
    /// The chunk size is zero, too large, or cuts a block.
    #[error(
        "chunk_tokens is {chunk_tokens}; allowed: multiples of block_tokens, {block_tokens}, \
         up to {MAX_CHUNK_TOKENS}"
    )]
    Chunk {
        /// The chunk size that was asked for.
        chunk_tokens: u32,
        /// The block size, which is valid.
        block_tokens: u32,
    },
}

impl Chunking {
    /// Chunks of `chunk_tokens`, for an engine with blocks of `block_tokens`.
    ///
    /// # Errors
    /// When a size is zero, a chunk exceeds [`MAX_CHUNK_TOKENS`], or it is not a whole number of blocks.
    pub const fn new(chunk_tokens: u32, block_tokens: u32) -> Result<Self, ChunkingError> {
        if block_tokens == 0 || block_tokens > MAX_CHUNK_TOKENS {
            Err(ChunkingError::Block { block_tokens })
        } else if chunk_tokens == 0
            || chunk_tokens > MAX_CHUNK_TOKENS
            || !chunk_tokens.is_multiple_of(block_tokens)
        {
            Err(ChunkingError::Chunk { chunk_tokens, block_tokens })
        } else {
            Ok(Self { chunk_tokens, block_tokens })
        }
    }

    /// Tokens in a chunk.
    pub const fn chunk_tokens(&self) -> u32 {
        self.chunk_tokens
    }

    /// Tokens in a block.
    pub const fn block_tokens(&self) -> u32 {
        self.block_tokens
    }

    /// Blocks in a chunk; at least 1.
    pub const fn blocks_per_chunk(&self) -> u32 {
        self.chunk_tokens / self.block_tokens
    }

    /// How many whole chunks a sequence of `tokens` has.
    pub const fn whole_chunks(&self, tokens: u32) -> u32 {
        tokens / self.chunk_tokens
    }

    /// The blocks of a sequence that a chunk covers, both counted from the start of the sequence.
    pub const fn blocks_of(&self, chunk: u32) -> Range<u64> {
        let per_chunk = self.blocks_per_chunk() as u64;
        let first = chunk as u64 * per_chunk;
        first..first + per_chunk
    }

    /// The tokens of a sequence that a chunk covers.
    pub const fn tokens_of(&self, chunk: u32) -> Range<u64> {
        let first = chunk as u64 * self.chunk_tokens as u64;
        first..first + self.chunk_tokens as u64
    }

    /// The chunk that covers a block of a sequence, and which of the chunk's blocks it is.
    pub const fn chunk_of_block(&self, block: u32) -> (u32, u32) {
        (block / self.blocks_per_chunk(), block % self.blocks_per_chunk())
    }

    /// The chunks that some tokens of a sequence touch, wholly or in part.
    pub const fn chunks_touching(&self, tokens: &Range<u32>) -> Range<u32> {
        if tokens.start >= tokens.end {
            return 0..0;
        }
        tokens.start / self.chunk_tokens..(tokens.end - 1) / self.chunk_tokens + 1
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_chunk_is_a_whole_number_of_blocks() {
        assert_eq!(Chunking::new(256, 0), Err(ChunkingError::Block { block_tokens: 0 }));
        for chunk_tokens in [0, 8, 250, MAX_CHUNK_TOKENS + 16, u32::MAX] {
            let error = ChunkingError::Chunk { chunk_tokens, block_tokens: 16 };
            assert_eq!(Chunking::new(chunk_tokens, 16), Err(error));
        }
    }

    proptest! {
        #[test]
        fn every_block_belongs_to_the_chunk_that_lists_it(
            block_tokens in 1u32..300,
            blocks_per_chunk in 1u32..300,
            block in any::<u32>(),
        ) {
            let chunking = Chunking::new(block_tokens * blocks_per_chunk, block_tokens).unwrap();
            let (chunk, index) = chunking.chunk_of_block(block);
            let blocks = chunking.blocks_of(chunk);
            prop_assert_eq!(blocks.start + u64::from(index), u64::from(block));
            prop_assert!(blocks.contains(&block.into()));
            prop_assert_eq!(chunking.tokens_of(chunk).start, blocks.start * u64::from(block_tokens));
            prop_assert_eq!(chunking.tokens_of(chunk).end, blocks.end * u64::from(block_tokens));
        }

        #[test]
        fn whole_chunks_end_within_the_sequence_and_one_more_would_not(
            block_tokens in 1u32..300,
            blocks_per_chunk in 1u32..300,
            tokens in any::<u32>(),
        ) {
            let chunking = Chunking::new(block_tokens * blocks_per_chunk, block_tokens).unwrap();
            let whole = chunking.whole_chunks(tokens);
            prop_assert!(whole == 0 || chunking.tokens_of(whole - 1).end <= tokens.into());
            prop_assert!(chunking.tokens_of(whole).end > tokens.into());
        }

        #[test]
        fn touched_chunks_hold_all_the_tokens_and_no_chunk_idles(
            chunk_tokens in 1u32..300,
            start in 0u32..100_000,
            len in 0u32..5_000,
        ) {
            let chunking = Chunking::new(chunk_tokens, 1).unwrap();
            let chunks = chunking.chunks_touching(&(start..start + len));
            prop_assert_eq!(chunks.is_empty(), len == 0);
            if len > 0 {
                let (first, last) = (chunking.tokens_of(chunks.start), chunking.tokens_of(chunks.end - 1));
                prop_assert!(first.contains(&start.into()));
                prop_assert!(last.contains(&(start + len - 1).into()));
            }
        }
    }
}
