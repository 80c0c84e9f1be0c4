//! KV that another engine has computed and that comes straight into a request's blocks, and blocks
//! that are kept for other engines: which blocks, and what the end of a read means for a request.

use super::request::Phase;
use super::{Admission, BlockId, RequestId, Scheduler};

/// Blocks to be filled from another engine. It ends with [`Scheduler::read_ended`].
#[derive(Debug, PartialEq, Eq)]
pub struct HandedBlocks {
    pub request: RequestId,
    /// The first of the prompt's blocks that is wanted.
    pub first_block: usize,
    pub blocks: Vec<BlockId>,
}

impl Scheduler {
    /// The KV of a waiting request's prompt is to be read from another engine.
    pub fn hand_over(&mut self, id: RequestId) {
        if let Some(request) = self.requests.get_mut(&id) {
            request.is_handed = true;
        }
    }

    /// Gives a request all blocks that its prompt needs, behind `hits`.
    pub(super) fn start_read(&mut self, id: RequestId, hits: Vec<BlockId>) -> Admission {
        let (first_block, most) = (hits.len(), self.most_handed(id));
        if !self.pool.has_room(most - first_block, &hits) {
            return Admission::NoRoom;
        }
        self.take_hits(id, hits);
        let (Some(blocks), Some(request)) =
            (self.pool.allocate(most - first_block), self.requests.get_mut(&id))
        else {
            return Admission::NoRoom;
        };
        request.blocks.extend_from_slice(&blocks);
        request.phase = Phase::Reading;
        self.loading += 1;
        Admission::Read(HandedBlocks { request: id, first_block, blocks })
    }

    /// Whole blocks of a prompt that leave at least one token to compute.
    pub(super) fn most_handed(&self, id: RequestId) -> usize {
        (self.requests[&id].prompt_tokens - 1) / self.config.block_tokens
    }

    /// The prompt's blocks, while a read of some of them is under way.
    pub fn reading(&self, id: RequestId) -> Option<&[BlockId]> {
        let request = self.requests.get(&id).filter(|request| request.phase == Phase::Reading)?;
        Some(&request.blocks)
    }

    pub fn block_tokens(&self) -> usize {
        self.config.block_tokens
    }

    /// A read has ended: all of its blocks are filled, or none.
    pub fn read_ended(&mut self, id: RequestId, first_block: usize, filled: bool) {
        let Some(request) = self.requests.get_mut(&id) else { return };
        if request.phase != Phase::Reading {
            return;
        }
        self.loading -= 1;
        request.phase = Phase::Waiting;
        request.is_handed = false;
        if !filled {
            for block in request.blocks.split_off(first_block).into_iter().rev() {
                self.pool.release(block);
            }
        }
        let block_tokens = self.config.block_tokens;
        request.computed = request.blocks.len() * block_tokens;
        if !request.started {
            request.hit.store_tokens = request.computed - request.hit.gpu_tokens;
            request.hit.peer_tokens = request.hit.store_tokens;
        }
        // One without blocks looks into the cache again.
        let computed = request.computed;
        self.name_blocks(id, computed);
    }

    /// Keeps blocks of a request that has just finished, so that nobody gets them.
    pub fn keep(&mut self, blocks: &[BlockId]) {
        blocks.iter().for_each(|block| self.pool.hold(*block));
    }

    /// Lets blocks go that were kept.
    pub fn let_go(&mut self, blocks: &[BlockId]) {
        blocks.iter().rev().for_each(|block| self.pool.release(*block));
    }
}
