//! Which stretches of the staging memory are free. Whole pages; the smallest stretch that is long
//! enough is cut, and what comes back joins its neighbours. This file knows offsets and lengths.

use crate::log::PAGE_BYTES;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

/// A stretch that somebody has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Block {
    pub offset: u64,
    pub bytes: u64,
}

impl Block {
    pub fn range(&self) -> Range<u64> {
        self.offset..self.offset + self.bytes
    }
}

/// Free stretches of `0..capacity`.
#[derive(Debug)]
pub(super) struct FreeSpace {
    /// Length of each free stretch, by where it starts. No two touch.
    lengths: BTreeMap<u64, u64>,
    /// The same, shortest first.
    by_length: BTreeSet<(u64, u64)>,
    free_bytes: u64,
}

impl FreeSpace {
    /// All of `capacity_bytes`, rounded down to pages, is free.
    pub fn new(capacity_bytes: u64) -> FreeSpace {
        let mut space = FreeSpace { lengths: BTreeMap::new(), by_length: BTreeSet::new(), free_bytes: 0 };
        let bytes = capacity_bytes - capacity_bytes % PAGE_BYTES as u64;
        space.give_back(Block { offset: 0, bytes });
        space
    }

    pub fn free_bytes(&self) -> u64 {
        self.free_bytes
    }

    /// A block for each length, or for none of them.
    pub fn take_all(&mut self, lengths: &[u64]) -> Option<Vec<Block>> {
        let mut blocks = Vec::with_capacity(lengths.len());
        for bytes in lengths {
            match self.take(*bytes) {
                Some(block) => blocks.push(block),
                None => {
                    blocks.into_iter().for_each(|block| self.give_back(block));
                    return None;
                }
            }
        }
        Some(blocks)
    }

    fn take(&mut self, bytes: u64) -> Option<Block> {
        let bytes = bytes.checked_next_multiple_of(PAGE_BYTES as u64)?;
        let (length, offset) = *self.by_length.range((bytes, 0)..).next()?;
        self.remove(offset, length);
        if length > bytes {
            self.insert(offset + bytes, length - bytes);
        }
        Some(Block { offset, bytes })
    }

    pub fn give_back(&mut self, block: Block) {
        let Block { mut offset, mut bytes } = block;
        if bytes == 0 {
            return;
        }
        if let Some((&before, &length)) = self.lengths.range(..offset).next_back()
            && before + length == offset
        {
            self.remove(before, length);
            (offset, bytes) = (before, bytes + length);
        }
        if let Some(&length) = self.lengths.get(&(offset + bytes)) {
            self.remove(offset + bytes, length);
            bytes += length;
        }
        self.insert(offset, bytes);
    }

    fn insert(&mut self, offset: u64, bytes: u64) {
        self.lengths.insert(offset, bytes);
        self.by_length.insert((bytes, offset));
        self.free_bytes += bytes;
    }

    fn remove(&mut self, offset: u64, bytes: u64) {
        self.lengths.remove(&offset);
        self.by_length.remove(&(bytes, offset));
        self.free_bytes -= bytes;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const PAGE: u64 = PAGE_BYTES as u64;

    #[test]
    fn all_lengths_get_a_block_or_none_does() {
        let mut space = FreeSpace::new(10 * PAGE + 1);
        assert_eq!(space.take_all(&[4 * PAGE, 7 * PAGE]), None);
        assert_eq!(space.free_bytes(), 10 * PAGE);
        let blocks = space.take_all(&[4 * PAGE, 1, 5 * PAGE]).unwrap();
        assert_eq!((space.free_bytes(), blocks[1].bytes), (0, PAGE));
        assert_eq!(space.take_all(&[u64::MAX]), None);
        blocks.into_iter().for_each(|block| space.give_back(block));
        assert_eq!(space.take_all(&[10 * PAGE]), Some(vec![Block { offset: 0, bytes: 10 * PAGE }]));
    }

    proptest! {
        /// Takes (some pages) and gives back (the n-th block held), against one flag per page.
        #[test]
        fn no_page_is_ever_held_twice_and_none_is_lost(steps in prop::collection::vec((any::<bool>(), 1u64..9), 1..200)) {
            let mut space = FreeSpace::new(64 * PAGE);
            let mut used = [false; 64];
            let mut held: Vec<Block> = Vec::new();
            let pages = |block: &Block| (block.offset / PAGE) as usize..((block.offset + block.bytes) / PAGE) as usize;
            for (take, number) in steps {
                if take {
                    let longest = used.split(|used| *used).map(<[bool]>::len).max().unwrap();
                    let blocks = space.take_all(&[number * PAGE]);
                    prop_assert_eq!(blocks.is_some(), longest as u64 >= number);
                    for block in blocks.into_iter().flatten() {
                        prop_assert!(used[pages(&block)].iter().all(|used| !used));
                        used[pages(&block)].fill(true);
                        held.push(block);
                    }
                } else if !held.is_empty() {
                    let block = held.swap_remove(number as usize % held.len());
                    used[pages(&block)].fill(false);
                    space.give_back(block);
                }
                let free = used.iter().filter(|used| !**used).count() as u64;
                prop_assert_eq!(space.free_bytes(), free * PAGE);
            }
        }
    }
}
