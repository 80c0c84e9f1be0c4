//! An engine that schedules as vLLM's V1 does, on a virtual clock: which requests compute how many
//! tokens in each step, and how long it takes. It knows requests, blocks and the step model. It
//! knows no clock, no store and no other engine.
//!
//! It is the emulated engine's scheduler without its tokens, and is held to it by a property test
//! (`tests/emulator.rs`). Running requests come first, in the order in which they started; then the
//! queue, first come, first served, until budget, places or blocks run out. Where blocks run out
//! for running requests, the one that started last gives all of its blocks back and is the first of
//! the queue. A request that decodes always has a place in the step, so a step's budget must be at
//! least the requests that may run.

use crate::cache::PrefixCache;
use crate::decoding::{Decode, Decoding};
use crate::prefixes::Run;
use forebay_steps::{StepModel, StepShare};
use std::collections::VecDeque;

/// When a prompt may leave the queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Admission {
    /// When there are blocks for what it computes in the next step, as in the emulated engine.
    NextStep,
    /// When there are blocks for all of it, as in vLLM.
    WholePrompt,
}

#[derive(Clone, Copy, Debug)]
pub struct EngineConfig {
    pub steps: StepModel,
    pub pool_tokens: u64,
    pub block_tokens: u32,
    /// Tokens computed in one step at most; at least `max_seqs`.
    pub max_batched_tokens: u32,
    /// Requests running at most.
    pub max_seqs: usize,
    pub admission: Admission,
}

/// A request as an engine gets it.
#[derive(Clone, Debug, Default)]
pub struct Job {
    /// The caller's name for it.
    pub request: u32,
    /// The runs of its prompt and answer.
    pub path: Vec<Run>,
    pub input_tokens: u32,
    pub output_tokens: u32,
}

/// A job on its way.
#[derive(Debug)]
struct Slot {
    job: Job,
    phase: Phase,
    /// Tokens whose KV it has, without those decoded in the present phase.
    computed: u32,
    /// Tokens said, without those decoded in the present phase.
    said: u32,
    /// Blocks in its table, those found in the cache included.
    blocks: u32,
    /// Blocks of the table that were found in the cache or named there.
    named: u32,
    /// What it found when it first ran.
    found: Option<Found>,
}

#[derive(Clone, Copy, Debug)]
enum Phase {
    Waiting,
    /// Loads up to so many tokens.
    Loading(u32),
    Prefilling,
    Decoding(Decode),
}

/// How many tokens of a prompt needed no computation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Found {
    pub gpu_tokens: u32,
    pub loaded_tokens: u32,
}

/// KV that a request waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Load {
    pub slot: u32,
    pub tokens: u32,
}

/// What came of a step.
#[derive(Debug, Default)]
pub struct Ended {
    /// Requests that said their first token.
    pub first_tokens: Vec<(u32, Found)>,
    /// Jobs that said their last one, and how many tokens of theirs have KV.
    pub finished: Vec<(Job, u32)>,
}

/// Sums since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Counters {
    pub steps: u64,
    pub busy_us: f64,
    /// Prompt tokens that were computed.
    pub prefill_tokens: u64,
    pub preemptions: u64,
}

#[derive(Debug)]
pub struct Engine {
    config: EngineConfig,
    pool: PrefixCache,
    /// Those in `free_slots` are nobody's.
    slots: Vec<Slot>,
    free_slots: Vec<u32>,
    queue: VecDeque<u32>,
    /// In the order in which they started. Only the last one may be in the middle of its prompt.
    running: Vec<u32>,
    decoding: Decoding,
    /// What each prompt computes in the present step.
    chunks: Vec<(u32, u32)>,
    is_busy: bool,
    loading: usize,
    pub counters: Counters,
}

enum ScheduleOutcome {
    Runs,
    Loads(Load),
    Later,
    NoRoom,
}

impl Engine {
    pub fn new(config: EngineConfig) -> Engine {
        Engine {
            pool: PrefixCache::new(config.pool_tokens, config.block_tokens),
            decoding: Decoding::new(config.block_tokens),
            config,
            slots: Vec::new(),
            free_slots: Vec::new(),
            queue: VecDeque::new(),
            running: Vec::new(),
            chunks: Vec::new(),
            is_busy: false,
            loading: 0,
            counters: Counters::default(),
        }
    }

    pub fn pool(&self) -> &PrefixCache {
        &self.pool
    }

    /// Whether a step is under way.
    pub fn is_busy(&self) -> bool {
        self.is_busy
    }

    /// Requests that take part in every step.
    pub fn running(&self) -> &[u32] {
        &self.running
    }

    /// What prompts compute in the present step: the caller's names and tokens.
    pub fn chunks(&self) -> impl Iterator<Item = (u32, u32)> {
        self.chunks.iter().map(|&(slot, tokens)| (self.slots[slot as usize].job.request, tokens))
    }

    /// Requests that decode in the present step.
    pub fn decoding(&self) -> u32 {
        self.decoding.requests()
    }

    pub fn submit(&mut self, job: Job) {
        let slot =
            Slot { job, phase: Phase::Waiting, computed: 0, said: 0, blocks: 0, named: 0, found: None };
        let index = match self.free_slots.pop() {
            Some(index) => {
                self.slots[index as usize] = slot;
                index
            }
            None => {
                self.slots.push(slot);
                self.slots.len() as u32 - 1
            }
        };
        self.queue.push_back(index);
    }

    /// Begins a step unless there is nothing to compute, and says how long it takes.
    /// `stored_tokens` says how many tokens of a job a store has; what must be loaded of them goes
    /// to `loads`.
    pub fn begin_step(
        &mut self,
        stored_tokens: &mut dyn FnMut(&Job) -> u32,
        loads: &mut Vec<Load>,
    ) -> Option<f64> {
        self.chunks.clear();
        let mut budget = self.config.max_batched_tokens;
        if !self.schedule_running(&mut budget) {
            self.schedule_queue(&mut budget, stored_tokens, loads);
        }
        while self.running.is_empty() && self.take_loaded_back() {
            self.schedule_queue(&mut budget, stored_tokens, loads);
        }
        if self.running.is_empty() {
            return None;
        }
        let shares = self.chunks.iter().map(|&(slot, tokens)| StepShare {
            context_tokens: self.slots[slot as usize].computed as usize,
            new_tokens: tokens as usize,
        });
        let (decodes, context_tokens) = (self.decoding.requests(), self.decoding.context_tokens());
        let step_us = self.config.steps.mixed_step_us(u64::from(decodes), context_tokens, shares);
        self.counters.steps += 1;
        self.counters.busy_us += step_us;
        self.is_busy = true;
        Some(step_us)
    }

    /// Gives running requests their blocks. Says whether one was preempted for it.
    fn schedule_running(&mut self, budget: &mut u32) -> bool {
        let preemptions = self.counters.preemptions;
        loop {
            let partial = self.running.last().copied().filter(|&slot| self.is_prefilling(slot));
            let mut left = budget.saturating_sub(self.decoding.requests());
            let chunk = partial.map(|slot| (slot, self.missing(slot).min(left)));
            let chunk_blocks = chunk.map_or(0, |(slot, tokens)| self.blocks_for(slot, tokens));
            let need = self.decoding.new_blocks() + chunk_blocks;
            if need <= self.pool.available() {
                self.pool.take(self.decoding.new_blocks());
                if let Some((slot, tokens)) = chunk.filter(|(_, tokens)| *tokens > 0) {
                    self.compute(slot, tokens);
                    left -= tokens;
                }
                *budget = left;
                return self.counters.preemptions > preemptions;
            }
            if let Some(last) = self.running.pop() {
                self.give_blocks_back(last);
                self.queue.push_front(last);
            }
        }
    }

    fn schedule_queue(
        &mut self,
        budget: &mut u32,
        stored_tokens: &mut dyn FnMut(&Job) -> u32,
        loads: &mut Vec<Load>,
    ) {
        let mut index = 0;
        while *budget > 0
            && self.running.len() < self.config.max_seqs
            && let Some(&slot) = self.queue.get(index)
        {
            match self.admit(slot, budget, stored_tokens) {
                ScheduleOutcome::Runs => {
                    self.queue.remove(index);
                    self.running.push(slot);
                }
                ScheduleOutcome::Loads(load) => {
                    loads.push(load);
                    index += 1;
                }
                ScheduleOutcome::Later => index += 1,
                ScheduleOutcome::NoRoom => return,
            }
        }
    }

    fn admit(
        &mut self,
        index: u32,
        budget: &mut u32,
        stored_tokens: &mut dyn FnMut(&Job) -> u32,
    ) -> ScheduleOutcome {
        let slot = &self.slots[index as usize];
        if matches!(slot.phase, Phase::Loading(_)) {
            return ScheduleOutcome::Later;
        }
        let tokens = slot.job.input_tokens + slot.said;
        if slot.blocks == 0 {
            let hit = self.pool.hit_tokens(&slot.job.path).min(self.whole_blocks(tokens - 1));
            let stored = self.whole_blocks(stored_tokens(&slot.job).min(tokens));
            if stored > hit {
                return self.start_load(index, hit, stored);
            }
            if !self.has_room(index, hit, *budget) {
                return ScheduleOutcome::NoRoom;
            }
            self.start_behind(index, hit);
            let found = Found { gpu_tokens: hit, loaded_tokens: 0 };
            self.slots[index as usize].found.get_or_insert(found);
        } else if !self.has_room(index, slot.computed, *budget) {
            return ScheduleOutcome::NoRoom;
        }
        let chunk = self.missing(index).min(*budget);
        *budget -= chunk;
        self.slots[index as usize].phase = Phase::Prefilling;
        self.compute(index, chunk);
        ScheduleOutcome::Runs
    }

    /// Whether a request finds the blocks that it needs beside those that it has, or will have of
    /// the first `found` tokens.
    fn has_room(&self, index: u32, found: u32, budget: u32) -> bool {
        let slot = &self.slots[index as usize];
        let tokens = slot.job.input_tokens + slot.said;
        let end = match self.config.admission {
            Admission::NextStep => tokens.min(found + budget),
            Admission::WholePrompt => tokens,
        };
        let (held, idle) = match slot.blocks {
            0 => (found / self.config.block_tokens, self.pool.idle_blocks(&slot.job.path)),
            blocks => (blocks, 0),
        };
        let need = end.div_ceil(self.config.block_tokens).saturating_sub(held);
        u64::from(need) + idle <= self.pool.available()
    }

    /// A request gets the cached blocks of its first tokens.
    fn start_behind(&mut self, index: u32, hit: u32) {
        let block_tokens = self.config.block_tokens;
        let slot = &mut self.slots[index as usize];
        self.pool.hold(&slot.job.path);
        slot.computed = hit;
        slot.blocks = hit / block_tokens;
        slot.named = slot.blocks;
    }

    fn start_load(&mut self, index: u32, hit: u32, stored: u32) -> ScheduleOutcome {
        let blocks = (stored - hit) / self.config.block_tokens;
        let idle = self.pool.idle_blocks(&self.slots[index as usize].job.path);
        if u64::from(blocks) + idle > self.pool.available() {
            return ScheduleOutcome::NoRoom;
        }
        self.start_behind(index, hit);
        self.pool.take(u64::from(blocks));
        self.loading += 1;
        let slot = &mut self.slots[index as usize];
        slot.blocks += blocks;
        slot.phase = Phase::Loading(stored);
        let found = Found { gpu_tokens: hit, loaded_tokens: stored - hit };
        slot.found.get_or_insert(found);
        ScheduleOutcome::Loads(Load { slot: index, tokens: stored - hit })
    }

    /// What a request waited for is there.
    pub fn load_ended(&mut self, index: u32) {
        let Phase::Loading(tokens) = self.slots[index as usize].phase else { return };
        self.loading -= 1;
        let slot = &mut self.slots[index as usize];
        slot.phase = Phase::Waiting;
        slot.computed = tokens.min(slot.job.input_tokens + slot.said - 1);
        self.name(index, tokens);
    }

    /// A request computes so many tokens more in this step.
    fn compute(&mut self, index: u32, tokens: u32) {
        let blocks = self.blocks_for(index, tokens);
        self.pool.take(blocks);
        let slot = &mut self.slots[index as usize];
        slot.blocks += blocks as u32;
        let end = slot.computed + tokens;
        self.name(index, end);
        self.chunks.push((index, tokens));
        self.counters.prefill_tokens += u64::from(tokens);
    }

    /// Tells the cache what the first tokens of a request are.
    fn name(&mut self, index: u32, tokens: u32) {
        let slot = &mut self.slots[index as usize];
        slot.named += self.pool.name(&slot.job.path, tokens);
    }

    /// The last request that holds loaded blocks gives them back, so that the first can run.
    fn take_loaded_back(&mut self) -> bool {
        let waits = |slot: &&u32| matches!(self.slots[**slot as usize].phase, Phase::Waiting);
        let Some(first) = self.queue.iter().find(waits).copied() else { return false };
        let behind = self.queue.iter().rev().take_while(|&&slot| slot != first);
        let holder = behind.filter(waits).find(|&&slot| self.slots[slot as usize].blocks > 0).copied();
        holder.inspect(|&slot| self.give_blocks_back(slot)).is_some()
    }

    /// The step is over.
    pub fn end_step(&mut self, ended: &mut Ended) {
        self.is_busy = false;
        self.decoding.advance();
        let mut is_over = false;
        let chunks = std::mem::take(&mut self.chunks);
        for &(index, tokens) in &chunks {
            is_over |= self.end_chunk(index, tokens, ended);
        }
        self.chunks = chunks;
        while let Some(index) = self.decoding.next_ended() {
            self.stop_decoding(index);
            is_over = true;
        }
        if is_over {
            self.finish(ended);
        }
    }

    /// A prompt has computed a chunk. Says whether its answer is complete with that.
    fn end_chunk(&mut self, index: u32, tokens: u32, ended: &mut Ended) -> bool {
        let slot = &mut self.slots[index as usize];
        slot.computed += tokens;
        if slot.computed < slot.job.input_tokens + slot.said {
            return false;
        }
        slot.said += 1;
        if slot.said == 1 {
            ended.first_tokens.push((slot.job.request, slot.found.unwrap_or_default()));
        }
        let remaining = slot.job.output_tokens.saturating_sub(slot.said);
        if remaining == 0 {
            return true;
        }
        slot.phase = Phase::Decoding(self.decoding.add(index, slot.computed, remaining));
        false
    }

    /// Puts what was decoded into the request's own counts.
    fn stop_decoding(&mut self, index: u32) {
        let slot = &mut self.slots[index as usize];
        let Phase::Decoding(decode) = slot.phase else { return };
        let decoded = self.decoding.decoded(&decode);
        self.decoding.forget(&decode);
        slot.phase = Phase::Waiting;
        slot.computed += decoded;
        slot.said += decoded;
        slot.blocks = slot.blocks.max(slot.computed.div_ceil(self.config.block_tokens));
        let computed = slot.computed;
        self.name(index, computed);
    }

    /// Requests that have said all leave, in the order in which they started.
    fn finish(&mut self, ended: &mut Ended) {
        let running = std::mem::take(&mut self.running);
        for index in running {
            let slot = &self.slots[index as usize];
            if matches!(slot.phase, Phase::Decoding(_)) || slot.said < slot.job.output_tokens {
                self.running.push(index);
                continue;
            }
            let job = std::mem::take(&mut self.slots[index as usize].job);
            let slot = &self.slots[index as usize];
            self.pool.release(&job.path, u64::from(slot.blocks - slot.named));
            self.free_slots.push(index);
            ended.finished.push((job, slot.computed));
        }
    }

    /// Takes all blocks of a request, so that it starts over behind what is cached of it.
    fn give_blocks_back(&mut self, index: u32) {
        if let Phase::Decoding(_) = self.slots[index as usize].phase {
            self.decoding.cancel(index);
            self.stop_decoding(index);
        }
        let slot = &mut self.slots[index as usize];
        self.pool.release(&slot.job.path, u64::from(slot.blocks - slot.named));
        slot.phase = Phase::Waiting;
        (slot.computed, slot.blocks, slot.named) = (0, 0, 0);
        self.counters.preemptions += 1;
    }

    /// Tokens that a request computes before it says the next one.
    fn missing(&self, index: u32) -> u32 {
        let slot = &self.slots[index as usize];
        slot.job.input_tokens + slot.said - slot.computed
    }

    /// Blocks that it needs for so many tokens more.
    fn blocks_for(&self, index: u32, tokens: u32) -> u64 {
        let slot = &self.slots[index as usize];
        let blocks = (slot.computed + tokens).div_ceil(self.config.block_tokens);
        u64::from(blocks.saturating_sub(slot.blocks))
    }

    fn is_prefilling(&self, index: u32) -> bool {
        matches!(self.slots[index as usize].phase, Phase::Prefilling)
    }

    fn whole_blocks(&self, tokens: u32) -> u32 {
        tokens / self.config.block_tokens * self.config.block_tokens
    }
}
