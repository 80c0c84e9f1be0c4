//! The scheduler of the engine, after vLLM's V1: which request computes which tokens in each step,
//! in which blocks.
//!
//! Sans-IO: it is asked for a [`Step`] and told what came of it. It knows requests, tokens, blocks
//! and chunk ids.
//!
//! # What it does
//!
//! A step has a budget of tokens. Running requests take their shares first, in the order in which
//! they started; then requests are admitted from the queue, first come, first served, until budget,
//! places or blocks run out. A prompt larger than the budget is computed in chunks. Whole blocks
//! enter the prefix cache when they are scheduled; a new request starts behind the longest cached
//! prefix, but always computes at least one token, because the first output token follows from it.
//! When a running request finds no free block, the one that started last gives all of its blocks
//! back and returns to the head of the queue; it is recomputed later.
//!
//! With a store, a request whose chunks reach beyond the cached blocks is given blocks for them and
//! waits, with its place in the queue, until [`Scheduler::load_ended`]; requests behind it may
//! start before it. Complete chunks go to the store; their blocks stay held until the store has
//! read them.
//!
//! Where this differs from vLLM: of two blocks with the same content only the first is in the
//! prefix cache; a load starts at a chunk boundary; and loaded requests that together hold all
//! blocks while none can run give theirs back, the last first, so that the first can run.

mod blocks;
mod cache;
mod config;
mod external;
mod handed;
mod request;
mod step;
#[cfg(test)]
mod tests;

pub use blocks::{BlockId, BlockPool, CacheEvent};
pub use config::{Counters, Refused, SchedulerConfig};
pub use forebay_store::chunk_store::Residence;
pub use handed::HandedBlocks;
pub use request::{CacheHit, Request, RequestId};
pub use step::{ChunkStore, Completed, Load, Share, Step};

use crate::truth::BlockHasher;
use forebay_kv::ChunkId;
use request::{Namer, Phase};
use std::collections::{HashMap, VecDeque};

/// The scheduler. See the module's documentation.
#[derive(Debug)]
pub struct Scheduler {
    config: SchedulerConfig,
    namer: Namer,
    pool: BlockPool,
    /// Every id in `queue` or `running` is here, and every id here is in one of them.
    requests: HashMap<RequestId, Request>,
    /// Waiting and loading requests, first come first.
    queue: VecDeque<RequestId>,
    /// In the order in which they started.
    running: Vec<RequestId>,
    next_id: u64,
    loading: usize,
    store_blocks: usize,
    events: Vec<CacheEvent>,
    counters: Counters,
}

/// What admitting the next request of the queue came to.
enum Admission {
    Run(Share),
    Load(Load),
    Read(HandedBlocks),
    StillLoading,
    NoRoom,
}

impl Scheduler {
    /// An idle scheduler.
    pub fn new(config: SchedulerConfig) -> Scheduler {
        let namer = Namer {
            hasher: BlockHasher::new(&config.namespace, config.block_tokens),
            namespace: config.namespace,
            chunk_tokens: config.chunk_tokens,
        };
        Scheduler {
            pool: BlockPool::new(config.pool_blocks),
            namer,
            config,
            requests: HashMap::new(),
            queue: VecDeque::new(),
            running: Vec::new(),
            next_id: 0,
            loading: 0,
            store_blocks: 0,
            events: Vec::new(),
            counters: Counters::default(),
        }
    }

    /// Queues a request for `max_tokens` tokens of output.
    pub fn submit(&mut self, prompt: Vec<u32>, max_tokens: usize) -> Result<RequestId, Refused> {
        self.check(prompt.len(), max_tokens)?;
        let id = RequestId(self.next_id);
        self.next_id += 1;
        self.requests.insert(id, Request::new(prompt, max_tokens, &self.namer));
        self.queue.push_back(id);
        Ok(id)
    }

    fn check(&self, prompt_tokens: usize, max_tokens: usize) -> Result<(), Refused> {
        let limit_tokens =
            self.config.max_model_tokens.min(self.pool.usable().saturating_mul(self.config.block_tokens));
        let total_tokens = prompt_tokens.saturating_add(max_tokens);
        match () {
            () if prompt_tokens == 0 => Err(Refused::EmptyPrompt),
            () if max_tokens == 0 => Err(Refused::NoOutput),
            () if total_tokens > limit_tokens => {
                Err(Refused::TooLong { prompt_tokens, max_tokens, limit_tokens })
            }
            () if self.queue.len() >= self.config.max_queued => {
                Err(Refused::QueueFull { limit: self.config.max_queued })
            }
            () => Ok(()),
        }
    }

    /// Forgets a request. Blocks that a load writes stay held until it has ended. Unknown ids are
    /// ignored: the request may have finished in the meantime.
    pub fn abort(&mut self, id: RequestId) {
        match self.requests.get_mut(&id).map(|request| &mut request.phase) {
            Some(Phase::Loading { aborted, .. }) => *aborted = true,
            Some(phase @ (Phase::Waiting | Phase::Running | Phase::Reading)) => {
                // What is read later finds no request, and writes nothing.
                self.loading -= usize::from(*phase == Phase::Reading);
                self.queue.retain(|queued| *queued != id);
                self.running.retain(|running| *running != id);
                self.forget(id);
            }
            None => {}
        }
    }

    /// The next step. `longest_stored` says how many of the given chunks, from the first on, the
    /// store holds.
    ///
    /// An empty step while requests are queued means that a load or a store must end first.
    pub fn schedule(&mut self, longest_stored: &mut dyn FnMut(&[ChunkId]) -> usize) -> Step {
        let mut step = Step::default();
        let mut budget_tokens = self.config.max_batched_tokens;
        let preempted = self.schedule_running(&mut step, &mut budget_tokens);
        if !preempted {
            self.schedule_queue(&mut step, &mut budget_tokens, longest_stored);
        }
        while step.shares.is_empty() && self.make_room(&mut step) {
            self.schedule_queue(&mut step, &mut budget_tokens, longest_stored);
        }
        self.note_evictions();
        step
    }

    /// Gives every running request its share. Says whether a request was preempted for it.
    fn schedule_running(&mut self, step: &mut Step, budget_tokens: &mut usize) -> bool {
        let mut preempted = false;
        let mut index = 0;
        while index < self.running.len() && *budget_tokens > 0 {
            let id = self.running[index];
            let share = self.share(id, *budget_tokens);
            while self.running.len() > index && !self.grow(id, share.start + share.tokens) {
                // The last one started gives way; if that is this one itself, the loop ends.
                if let Some(victim) = self.running.pop() {
                    self.give_blocks_back(victim, step);
                    self.queue.push_front(victim);
                    preempted = true;
                }
            }
            if index < self.running.len() {
                *budget_tokens -= share.tokens;
                step.shares.push(share);
            }
            index += 1;
        }
        preempted
    }

    fn schedule_queue(
        &mut self,
        step: &mut Step,
        budget_tokens: &mut usize,
        longest_stored: &mut dyn FnMut(&[ChunkId]) -> usize,
    ) {
        let mut index = 0;
        while *budget_tokens > 0 && self.running.len() < self.config.max_seqs {
            let Some(&id) = self.queue.get(index) else { return };
            match self.admit(id, *budget_tokens, longest_stored) {
                Admission::Run(share) => {
                    self.queue.remove(index);
                    self.running.push(id);
                    *budget_tokens -= share.tokens;
                    step.shares.push(share);
                }
                Admission::Load(load) => {
                    step.loads.push(load);
                    index += 1;
                }
                Admission::Read(read) => {
                    step.reads.push(read);
                    index += 1;
                }
                Admission::StillLoading => index += 1,
                Admission::NoRoom => return,
            }
        }
    }

    fn admit(
        &mut self,
        id: RequestId,
        budget_tokens: usize,
        longest_stored: &mut dyn FnMut(&[ChunkId]) -> usize,
    ) -> Admission {
        let request = &self.requests[&id];
        if matches!(request.phase, Phase::Loading { .. } | Phase::Reading) {
            return Admission::StillLoading;
        }
        if request.blocks.is_empty() {
            let hits = self.longest_hit(id);
            if request.is_handed && hits.len() < self.most_handed(id) {
                return self.start_read(id, hits);
            }
            let stored_chunks = if request.load_failed {
                0
            } else {
                longest_stored(&request.chunk_ids).min(request.chunk_ids.len())
            };
            let stored_tokens = stored_chunks * self.namer.chunk_tokens.unwrap_or(0);
            if stored_tokens > hits.len() * self.config.block_tokens {
                return self.start_load(id, hits, stored_chunks);
            }
            if !self.start_behind(id, hits, stored_chunks, budget_tokens) {
                return Admission::NoRoom;
            }
        }
        let share = self.share(id, budget_tokens);
        if !self.grow(id, share.start + share.tokens) {
            return Admission::NoRoom;
        }
        self.note_start(id);
        Admission::Run(share)
    }

    /// Gives a request the cached blocks `hits`, if its first share then finds room too.
    fn start_behind(
        &mut self,
        id: RequestId,
        hits: Vec<BlockId>,
        stored_chunks: usize,
        budget_tokens: usize,
    ) -> bool {
        let request = &self.requests[&id];
        let start = hits.len() * self.config.block_tokens;
        let end = request.tokens.len().min(start + budget_tokens);
        if !self.pool.has_room(end.div_ceil(self.config.block_tokens) - hits.len(), &hits) {
            return false;
        }
        self.take_hits(id, hits);
        let Some(request) = self.requests.get_mut(&id) else { return false };
        request.stored_chunks = stored_chunks;
        true
    }

    /// A step has been computed. `sampled` are the tokens that follow, one for each share that
    /// samples, in order.
    pub fn complete(&mut self, step: &Step, sampled: &[u32]) -> Completed {
        let mut completed = Completed::default();
        let mut sampled = sampled.iter();
        for share in &step.shares {
            let Some(request) = self.requests.get_mut(&share.request) else { continue };
            request.computed = share.start + share.tokens;
            if share.samples
                && let Some(token) = sampled.next()
            {
                request.push_output(*token, &self.namer);
            }
            let finished = request.output_tokens() >= request.max_tokens;
            self.collect_stores(share.request, &mut completed.stores);
            if finished {
                self.running.retain(|running| *running != share.request);
                completed.finished.extend(self.finish(share.request));
            }
        }
        completed
    }

    /// What a request computes next within `budget_tokens`.
    fn share(&self, id: RequestId, budget_tokens: usize) -> Share {
        let request = &self.requests[&id];
        let missing = request.tokens.len() - request.computed;
        let tokens = missing.min(budget_tokens);
        Share { request: id, start: request.computed, tokens, samples: tokens == missing }
    }

    /// Sees to it that a request has blocks for its first `tokens` tokens, and names those that
    /// will be full. Says whether there were enough.
    fn grow(&mut self, id: RequestId, tokens: usize) -> bool {
        let Some(request) = self.requests.get_mut(&id) else { return false };
        let missing = tokens.div_ceil(self.config.block_tokens).saturating_sub(request.blocks.len());
        let Some(blocks) = self.pool.allocate(missing) else { return false };
        request.blocks.extend(blocks);
        self.name_blocks(id, tokens);
        true
    }

    /// Lets the queue go on when nothing runs and its first request finds no room: the last request
    /// that holds loaded chunks gives them back, or, where there is none and nothing else will free
    /// blocks, the first request fails. Says whether anything changed.
    fn make_room(&mut self, step: &mut Step) -> bool {
        let waits = |id: &RequestId| self.requests[id].phase == Phase::Waiting;
        if !self.running.is_empty() {
            return false;
        }
        let Some(first) = self.queue.iter().position(waits) else { return false };
        let holder = self
            .queue
            .iter()
            .skip(first + 1)
            .rev()
            .find(|id| waits(id) && !self.requests[*id].blocks.is_empty());
        if let Some(&holder) = holder {
            self.give_blocks_back(holder, step);
            return true;
        }
        if self.loading > 0 || self.store_blocks > 0 {
            return false;
        }
        if let Some(id) = self.queue.remove(first) {
            self.forget(id);
            step.failed.push(id);
        }
        true
    }

    /// Takes all blocks of a request, so that it starts over.
    fn give_blocks_back(&mut self, id: RequestId, step: &mut Step) {
        if let Some(request) = self.requests.get_mut(&id) {
            request.phase = Phase::Waiting;
            (request.computed, request.named) = (0, 0);
            let blocks = std::mem::take(&mut request.blocks);
            blocks.into_iter().rev().for_each(|block| self.pool.release(block));
            self.counters.preemptions += 1;
            step.preempted.push(id);
        }
    }

    fn finish(&mut self, id: RequestId) -> Option<(RequestId, Request)> {
        let request = self.forget(id)?;
        let complete_chunks = self.namer.chunk_tokens.map_or(0, |tokens| request.computed / tokens);
        self.counters.unstored_chunks += complete_chunks.saturating_sub(request.stored_chunks) as u64;
        Some((id, request))
    }

    /// Removes a request and frees its blocks, the last first: what follows a prefix leaves the
    /// cache before it.
    fn forget(&mut self, id: RequestId) -> Option<Request> {
        let request = self.requests.remove(&id)?;
        request.blocks.iter().rev().for_each(|block| self.pool.release(*block));
        Some(request)
    }

    fn note_start(&mut self, id: RequestId) {
        let Some(request) = self.requests.get_mut(&id) else { return };
        request.phase = Phase::Running;
        if std::mem::replace(&mut request.started, true) {
            return;
        }
        let tokens = request.tokens.len();
        self.counters.gpu_queries_tokens += tokens as u64;
        self.counters.gpu_hits_tokens += request.hit.gpu_tokens as u64;
        if self.namer.chunk_tokens.is_some() {
            self.counters.store_queries_tokens += (tokens - request.hit.gpu_tokens) as u64;
            self.counters.store_hits_tokens += request.hit.store_tokens as u64;
            self.counters.disk_hits_tokens += request.hit.disk_tokens as u64;
            self.counters.peer_hits_tokens += request.hit.peer_tokens as u64;
        }
    }

    /// A request that is neither finished nor forgotten.
    pub fn request(&self, id: RequestId) -> Option<&Request> {
        self.requests.get(&id)
    }

    /// Requests that take part in every step.
    pub fn running(&self) -> usize {
        self.running.len()
    }

    /// Requests in the queue, loading ones included.
    pub fn waiting(&self) -> usize {
        self.queue.len()
    }

    pub fn pool(&self) -> &BlockPool {
        &self.pool
    }

    pub fn counters(&self) -> Counters {
        self.counters
    }
}
