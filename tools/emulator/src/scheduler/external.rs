//! KV that comes from the store and goes there: which blocks it is for, and what its end means for
//! a request.

use super::request::Phase;
use super::{Admission, BlockId, ChunkStore, Load, RequestId, Residence, Scheduler};

impl Scheduler {
    /// Gives a request blocks for `chunks` chunks of the store, behind those of `hits` that fill
    /// whole chunks.
    pub(super) fn start_load(&mut self, id: RequestId, mut hits: Vec<BlockId>, chunks: usize) -> Admission {
        let chunk_blocks = self.chunk_blocks();
        let first_chunk = hits.len() / chunk_blocks;
        hits.truncate(first_chunk * chunk_blocks);
        let wanted = (chunks - first_chunk) * chunk_blocks;
        if !self.pool.has_room(wanted, &hits) {
            return Admission::NoRoom;
        }
        self.take_hits(id, hits);
        let (Some(blocks), Some(request)) = (self.pool.allocate(wanted), self.requests.get_mut(&id)) else {
            return Admission::NoRoom;
        };
        request.blocks.extend_from_slice(&blocks);
        request.stored_chunks = chunks;
        request.phase = Phase::Loading { first_chunk, aborted: false };
        self.loading += 1;
        let (tokens, ids) = (request.tokens.len(), request.chunk_ids[..chunks].to_vec());
        Admission::Load(Load { request: id, tokens, ids, first_chunk, blocks })
    }

    /// A load has ended: its first chunks, as many as `loaded` has, are in their blocks, every byte
    /// checked. `withdrawn` are blocks among the others that may still be written and are never
    /// used again.
    pub fn load_ended(&mut self, id: RequestId, loaded: Residence, withdrawn: &[BlockId]) {
        let chunk_blocks = self.chunk_blocks();
        let Some(request) = self.requests.get_mut(&id) else { return };
        let Phase::Loading { first_chunk, aborted } = request.phase else { return };
        self.loading -= 1;
        request.phase = Phase::Waiting;
        let good_chunks = (first_chunk + loaded.chunks()).min(request.stored_chunks);
        request.load_failed = good_chunks < request.stored_chunks;
        request.stored_chunks = good_chunks;
        for block in request.blocks.split_off(good_chunks * chunk_blocks).into_iter().rev() {
            match withdrawn.contains(&block) {
                true => self.pool.withdraw(block),
                false => self.pool.release(block),
            }
        }
        let loaded_tokens = good_chunks * chunk_blocks * self.config.block_tokens;
        request.computed = loaded_tokens.min(request.tokens.len() - 1);
        if !request.started {
            let behind = |tokens: usize| request.computed.saturating_sub(tokens);
            let gpu_tokens = request.hit.gpu_tokens;
            let chunk_tokens = chunk_blocks * self.config.block_tokens;
            let near_tokens = loaded_tokens - loaded.peers * chunk_tokens;
            let in_memory_tokens = near_tokens - loaded.disk * chunk_tokens;
            request.hit.store_tokens = behind(gpu_tokens);
            request.hit.peer_tokens = behind(gpu_tokens.max(near_tokens));
            request.hit.disk_tokens = behind(gpu_tokens.max(in_memory_tokens)) - request.hit.peer_tokens;
        }
        let computed = request.computed;
        if aborted {
            self.queue.retain(|queued| *queued != id);
            self.forget(id);
        } else {
            self.name_blocks(id, computed);
        }
    }

    /// A store has ended, well or not. Unless `quiet`, a lost operation may still read its blocks,
    /// so that they are held for ever; what they contain stays of use.
    pub fn store_ended(&mut self, blocks: &[BlockId], quiet: bool) {
        self.store_blocks -= blocks.len();
        for block in blocks.iter().rev() {
            match quiet {
                true => self.pool.release(*block),
                false => self.pool.strand(*block),
            }
        }
    }

    /// Holds the blocks of complete chunks that the store has not been given yet.
    pub(super) fn collect_stores(&mut self, id: RequestId, stores: &mut Vec<ChunkStore>) {
        let (Some(chunk_tokens), Some(request)) = (self.namer.chunk_tokens, self.requests.get_mut(&id))
        else {
            return;
        };
        let chunk_blocks = chunk_tokens / self.config.block_tokens;
        while (request.stored_chunks + 1) * chunk_tokens <= request.computed
            && self.store_blocks + chunk_blocks <= self.config.max_store_blocks
        {
            let chunk = request.stored_chunks;
            let blocks = request.blocks[chunk * chunk_blocks..(chunk + 1) * chunk_blocks].to_vec();
            blocks.iter().for_each(|block| self.pool.hold(*block));
            self.store_blocks += chunk_blocks;
            request.stored_chunks += 1;
            let parent = chunk.checked_sub(1).map(|parent| request.chunk_ids[parent]);
            stores.push(ChunkStore { id: request.chunk_ids[chunk], parent, blocks });
        }
    }

    fn chunk_blocks(&self) -> usize {
        self.namer.chunk_tokens.map_or(1, |tokens| tokens / self.config.block_tokens).max(1)
    }
}
