//! The pool of KV blocks and the prefix cache over it. This file knows blocks, their holders and
//! the names of their contents.
//!
//! A block is *held* (by requests that use it, by stores that read it) or *free*. A free block that
//! has a name still holds the KV of that name until it is given to somebody else: the prefix cache
//! is the set of named blocks, held or free. Free blocks are given out in the order in which they
//! became free, so the cache is an LRU.

use crate::truth::BlockHash;
use std::collections::{BTreeMap, HashMap};

/// Names a block of the pool: its position in device memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BlockId(pub u32);

impl BlockId {
    /// The position in device memory.
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

/// A change of the prefix cache, as vLLM's KV events report it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CacheEvent {
    /// Blocks that follow one another entered the cache.
    Stored {
        /// Their names, in order.
        hashes: Vec<BlockHash>,
        /// What the first one follows; `None` at the start of a sequence.
        parent: Option<BlockHash>,
        /// Their tokens, all together.
        tokens: Vec<u32>,
    },
    /// Blocks left the cache.
    Removed { hashes: Vec<BlockHash> },
}

/// Adds a block to the last event if it follows its last block, else starts another event.
pub(super) fn note_stored(
    events: &mut Vec<CacheEvent>,
    name: BlockHash,
    parent: Option<BlockHash>,
    block: &[u32],
) {
    if let Some(CacheEvent::Stored { hashes, tokens, .. }) = events.last_mut()
        && parent.is_some()
        && hashes.last().copied() == parent
    {
        hashes.push(name);
        tokens.extend_from_slice(block);
        return;
    }
    events.push(CacheEvent::Stored { hashes: vec![name], parent, tokens: block.to_vec() });
}

#[derive(Debug)]
struct Block {
    holders: u32,
    name: Option<BlockHash>,
    /// Whether one of the holders will never let go.
    stranded: bool,
    /// Its place among the free ones, while it is free.
    freed: u64,
}

/// The pool. Every block is held, free or, after an I/O that may still write it, withdrawn.
#[derive(Debug)]
pub struct BlockPool {
    blocks: Vec<Block>,
    /// The free blocks, those that were freed first in front.
    free: BTreeMap<u64, BlockId>,
    /// How often a block has become free.
    freed: u64,
    withdrawn: usize,
    stranded: usize,
    cached: HashMap<BlockHash, BlockId>,
    evicted: Vec<BlockHash>,
}

impl BlockPool {
    /// A pool of `blocks` free blocks without names.
    pub fn new(blocks: u32) -> BlockPool {
        let fresh = || Block { holders: 0, name: None, stranded: false, freed: 0 };
        let mut pool = BlockPool {
            blocks: (0..blocks).map(|_| fresh()).collect(),
            free: BTreeMap::new(),
            freed: 0,
            withdrawn: 0,
            stranded: 0,
            cached: HashMap::new(),
            evicted: Vec::new(),
        };
        (0..blocks).for_each(|index| pool.add_free(BlockId(index)));
        pool
    }

    pub fn blocks(&self) -> usize {
        self.blocks.len()
    }

    /// Blocks that may be given out.
    pub fn free(&self) -> usize {
        self.free.len()
    }

    /// Blocks in use by requests and stores, stranded ones included.
    pub fn held(&self) -> usize {
        self.blocks.len() - self.free() - self.withdrawn
    }

    /// Blocks that are or may become free.
    pub fn usable(&self) -> usize {
        self.blocks.len() - self.lost()
    }

    /// Blocks that an I/O may still touch and nobody gets again.
    pub fn lost(&self) -> usize {
        self.withdrawn + self.stranded
    }

    /// The blocks of the longest cached prefix of `names`. They are not held by this.
    pub fn longest_cached(&self, names: &[BlockHash]) -> Vec<BlockId> {
        names.iter().map_while(|name| self.cached.get(name).copied()).collect()
    }

    /// Whether `count` blocks could be allocated after `also_held` have been taken out of the free
    /// ones.
    pub fn has_room(&self, count: usize, also_held: &[BlockId]) -> bool {
        let taken = also_held.iter().filter(|id| self.blocks[id.index()].holders == 0).count();
        count + taken <= self.free()
    }

    /// Holds `count` blocks more, the longest free first; their names are forgotten. Nothing
    /// happens if there are fewer free ones.
    pub fn allocate(&mut self, count: usize) -> Option<Vec<BlockId>> {
        if count > self.free() {
            return None;
        }
        let longest_free = std::iter::from_fn(|| self.free.pop_first()).take(count);
        let ids = longest_free.map(|(_, id)| {
            let block = &mut self.blocks[id.index()];
            block.holders = 1;
            if let Some(name) = block.name.take() {
                self.cached.remove(&name);
                self.evicted.push(name);
            }
            id
        });
        Some(ids.collect())
    }

    /// Adds a holder.
    pub fn hold(&mut self, id: BlockId) {
        if self.blocks[id.index()].holders == 0 {
            self.free.remove(&self.blocks[id.index()].freed);
        }
        self.blocks[id.index()].holders += 1;
    }

    /// Removes a holder. Behind the last one the block is free, and is the last to be given out.
    pub fn release(&mut self, id: BlockId) {
        let block = &mut self.blocks[id.index()];
        debug_assert!(block.holders > 0, "a block is released as often as it is held");
        block.holders -= 1;
        if block.holders == 0 {
            self.add_free(id);
        }
    }

    /// Removes a holder of a block that an I/O may still touch. The holder must be the only one.
    /// Nobody gets the block again.
    pub fn withdraw(&mut self, id: BlockId) {
        let block = &mut self.blocks[id.index()];
        debug_assert!(block.holders == 1 && block.name.is_none(), "only a load's target is withdrawn");
        block.holders = 0;
        self.withdrawn += 1;
    }

    /// Turns a hold into one that never ends, because an I/O may still read the block.
    pub fn strand(&mut self, id: BlockId) {
        let block = &mut self.blocks[id.index()];
        if std::mem::replace(&mut block.stranded, true) {
            // One such hold is enough.
            self.release(id);
        } else {
            self.stranded += 1;
        }
    }

    /// Names the content of a held block, so that others find it. Says whether this was news: a
    /// name stays with the block that had it first.
    pub fn name(&mut self, id: BlockId, name: BlockHash) -> bool {
        debug_assert!(self.blocks[id.index()].holders > 0, "only a held block gets a name");
        if self.cached.contains_key(&name) {
            return false;
        }
        self.cached.insert(name, id);
        self.blocks[id.index()].name = Some(name);
        true
    }

    /// The names forgotten since this was asked last.
    pub fn take_evicted(&mut self) -> Vec<BlockHash> {
        std::mem::take(&mut self.evicted)
    }

    /// How many hold a block.
    #[cfg(test)]
    pub(super) fn holders(&self, id: BlockId) -> u32 {
        self.blocks[id.index()].holders
    }

    /// Everything in the cache.
    #[cfg(test)]
    pub(super) fn names(&self) -> std::collections::HashSet<BlockHash> {
        self.cached.keys().copied().collect()
    }

    fn add_free(&mut self, id: BlockId) {
        self.freed += 1;
        self.blocks[id.index()].freed = self.freed;
        self.free.insert(self.freed, id);
    }
}
