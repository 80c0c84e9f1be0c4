//! How many blocks one data-parallel rank of an engine holds, by its KV events. It counts; it does
//! not know which blocks they are, nor in which order batches come.

use crate::kv_event_batch::{Batch, Change};

/// No engine has larger blocks.
const BLOCK_TOKENS_MAX: u64 = 1 << 20;
/// No GPU holds the KV of so many tokens.
const TOKENS_MAX: u64 = 1 << 40;

#[derive(Debug, Default)]
pub struct LiveBlocks {
    blocks: u64,
    /// Tokens of a block, and the group of layers whose blocks are counted: those of the first
    /// block that was stored.
    kind: Option<(u64, u64)>,
    /// How many it holds when it is full; `None` until it has evicted.
    room: Option<u64>,
}

/// What came of a batch.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct Counted {
    /// Everything that was held before went.
    pub cleared: bool,
    /// Tokens that came, after that.
    pub stored_tokens: u64,
    /// Events that were left out, because their blocks have another size.
    pub of_other_size: u64,
}

/// The numbers cannot be: more was removed than was there, or more is there than can be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Impossible;

impl LiveBlocks {
    pub fn blocks(&self) -> u64 {
        self.blocks
    }

    pub fn tokens(&self) -> u64 {
        self.blocks * self.block_tokens()
    }

    /// Tokens that it holds when it is full, as far as it has shown.
    pub fn room_tokens(&self) -> Option<u64> {
        self.room.map(|blocks| blocks * self.block_tokens())
    }

    fn block_tokens(&self) -> u64 {
        self.kind.map_or(0, |(tokens, _)| tokens)
    }

    /// Takes in the changes of a batch.
    pub fn count(&mut self, batch: &Batch) -> Result<Counted, Impossible> {
        let mut counted = Counted::default();
        let (mut most, mut evicted) = (self.blocks, false);
        for &change in &batch.changes {
            match change {
                Change::Stored { blocks, block_tokens, group } => {
                    self.store(blocks, block_tokens, group, &mut counted)?;
                }
                Change::Removed { blocks, group } if self.is_counted(group) => {
                    self.blocks = self.blocks.checked_sub(blocks).ok_or(Impossible)?;
                    evicted |= blocks > 0;
                }
                Change::Removed { .. } => {}
                Change::Cleared => {
                    *self = LiveBlocks { kind: self.kind, ..LiveBlocks::default() };
                    counted = Counted { cleared: true, ..counted };
                    counted.stored_tokens = 0;
                    (most, evicted) = (0, false);
                }
            }
        }
        most = most.max(self.blocks);
        self.room = if evicted { Some(most) } else { self.room.map(|room| room.max(most)) };
        Ok(counted)
    }

    fn store(
        &mut self,
        blocks: u64,
        block_tokens: u64,
        group: u64,
        counted: &mut Counted,
    ) -> Result<(), Impossible> {
        if !(1..=BLOCK_TOKENS_MAX).contains(&block_tokens) {
            counted.of_other_size += 1;
            return Ok(());
        }
        let (size, counted_group) = *self.kind.get_or_insert((block_tokens, group));
        if counted_group != group {
            return Ok(());
        }
        if size != block_tokens {
            counted.of_other_size += 1;
            return Ok(());
        }
        self.blocks = self.blocks.saturating_add(blocks);
        if self.blocks > TOKENS_MAX / size {
            return Err(Impossible);
        }
        counted.stored_tokens = counted.stored_tokens.saturating_add(blocks * size);
        Ok(())
    }

    fn is_counted(&self, group: u64) -> bool {
        self.kind.is_some_and(|(_, counted)| counted == group)
    }
}
