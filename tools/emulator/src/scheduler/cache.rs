//! The prefix cache as requests use it: what they find there and what they add.

use super::{BlockId, CacheEvent, CacheHit, RequestId, Scheduler, blocks};

impl Scheduler {
    /// The cached blocks of the longest prefix that leaves at least one token to compute.
    pub(super) fn longest_hit(&self, id: RequestId) -> Vec<BlockId> {
        let request = &self.requests[&id];
        let most = (request.tokens.len() - 1) / self.config.block_tokens;
        self.pool.longest_cached(&request.block_names[..most])
    }

    /// Makes `hits` the first blocks of a request that has none.
    pub(super) fn take_hits(&mut self, id: RequestId, hits: Vec<BlockId>) {
        hits.iter().for_each(|block| self.pool.hold(*block));
        if let Some(request) = self.requests.get_mut(&id) {
            request.computed = hits.len() * self.config.block_tokens;
            request.named = hits.len();
            request.blocks = hits;
            if !request.started {
                request.hit = CacheHit { gpu_tokens: request.computed, ..CacheHit::default() };
            }
        }
    }

    /// Tells the prefix cache about the whole blocks among a request's first `tokens` tokens.
    pub(super) fn name_blocks(&mut self, id: RequestId, tokens: usize) {
        self.note_evictions();
        let block_tokens = self.config.block_tokens;
        let Some(request) = self.requests.get_mut(&id) else { return };
        let full = tokens / block_tokens;
        for index in request.named..full {
            let name = request.block_names[index];
            if !self.pool.name(request.blocks[index], name) {
                continue;
            }
            let parent = index.checked_sub(1).map(|parent| request.block_names[parent]);
            let tokens = &request.tokens[index * block_tokens..(index + 1) * block_tokens];
            blocks::note_stored(&mut self.events, name, parent, tokens);
        }
        request.named = request.named.max(full);
    }

    pub(super) fn note_evictions(&mut self) {
        let hashes = self.pool.take_evicted();
        if !hashes.is_empty() {
            self.events.push(CacheEvent::Removed { hashes });
        }
    }

    /// Changes of the prefix cache since this was asked last.
    pub fn take_events(&mut self) -> Vec<CacheEvent> {
        std::mem::take(&mut self.events)
    }
}
