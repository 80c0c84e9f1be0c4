//! Guarantees of the scheduler, over random histories of requests, steps, loads, stores and aborts.
//! A fake device keeps in every slot of every block the hash of the prefix it was computed for, and
//! each output token is a function of what the device really holds: a block that is used while it
//! has another content gives a wrong token.

use super::*;
use forebay_kv::NamespaceKey;
use proptest::prelude::*;
use std::collections::{BTreeMap, HashSet};

const BLOCK_TOKENS: usize = 4;
const CHUNK_TOKENS: usize = 8;
const POOL_BLOCKS: u32 = 24;

fn config(store: bool) -> SchedulerConfig {
    SchedulerConfig {
        namespace: NamespaceKey::from_bytes([9; 32]),
        pool_blocks: POOL_BLOCKS,
        block_tokens: BLOCK_TOKENS,
        max_batched_tokens: 16,
        max_seqs: 3,
        max_queued: 8,
        max_model_tokens: 80,
        chunk_tokens: store.then_some(CHUNK_TOKENS),
        max_store_blocks: 8,
    }
}

/// FNV-1a: what the fake device keeps for the last token of a prefix.
fn content(prefix: &[u32]) -> u64 {
    prefix.iter().fold(0xCBF2_9CE4_8422_2325, |hash, token| {
        (hash ^ u64::from(*token + 1)).wrapping_mul(0x0000_0100_0000_01B3)
    })
}

fn expected_output(prompt: &[u32], tokens: usize) -> Vec<u32> {
    let mut context = prompt.to_vec();
    (0..tokens).for_each(|_| context.push((content(&context) % 3) as u32));
    context.split_off(prompt.len())
}

struct Rig {
    scheduler: Scheduler,
    device: Vec<[u64; BLOCK_TOKENS]>,
    store: BTreeMap<ChunkId, Vec<u64>>,
    loads: Vec<Load>,
    stores: Vec<(ChunkStore, Vec<u64>)>,
    wanted: BTreeMap<RequestId, (Vec<u32>, usize)>,
    started: Vec<RequestId>,
    /// In the order in which they finished.
    finished: Vec<RequestId>,
}

impl Rig {
    fn new(config: SchedulerConfig) -> Rig {
        Rig {
            device: vec![[0; BLOCK_TOKENS]; config.pool_blocks as usize],
            scheduler: Scheduler::new(config),
            store: BTreeMap::new(),
            loads: Vec::new(),
            stores: Vec::new(),
            wanted: BTreeMap::new(),
            started: Vec::new(),
            finished: Vec::new(),
        }
    }

    fn submit(&mut self, prompt: Vec<u32>, max_tokens: usize) {
        if let Ok(id) = self.scheduler.submit(prompt.clone(), max_tokens) {
            self.wanted.insert(id, (prompt, max_tokens));
        }
    }

    /// One step: schedule, compute, complete. Says whether there was anything to compute.
    fn step(&mut self) -> bool {
        let store = &self.store;
        let mut longest_stored = |ids: &[ChunkId]| ids.iter().take_while(|id| store.contains_key(id)).count();
        let step = self.scheduler.schedule(&mut longest_stored);
        let budget: usize = step.shares.iter().map(|share| share.tokens).sum();
        assert!(budget <= self.scheduler.config.max_batched_tokens, "the budget is never exceeded");
        assert!(self.scheduler.running() <= self.scheduler.config.max_seqs);
        self.loads.extend(step.loads.iter().map(|load| Load {
            ids: load.ids.clone(),
            blocks: load.blocks.clone(),
            ..*load
        }));
        for id in &step.failed {
            self.wanted.remove(id);
        }
        let sampled: Vec<u32> = step.shares.iter().filter_map(|share| self.compute(share)).collect();
        let completed = self.scheduler.complete(&step, &sampled);
        for chunk in completed.stores {
            let held = self.contents(&chunk.blocks);
            self.stores.push((chunk, held));
        }
        for (id, request) in completed.finished {
            let (prompt, max_tokens) = self.wanted.remove(&id).expect("a request finishes once");
            assert_eq!(request.tokens[prompt.len()..], expected_output(&prompt, max_tokens), "{id:?}");
            self.finished.push(id);
        }
        self.check();
        !step.shares.is_empty()
    }

    fn compute(&mut self, share: &Share) -> Option<u32> {
        let request = self.scheduler.request(share.request).expect("a share is of a live request");
        assert!(share.tokens > 0 && share.start + share.tokens <= request.tokens.len());
        if !self.started.contains(&share.request) {
            self.started.push(share.request);
        }
        for position in share.start..share.start + share.tokens {
            let block = request.blocks[position / BLOCK_TOKENS];
            let value = content(&request.tokens[..=position]);
            self.device[block.index()][position % BLOCK_TOKENS] = value;
        }
        share.samples.then(|| {
            self.check_contents(request, request.tokens.len());
            (content(&request.tokens) % 3) as u32
        })
    }

    /// The first `tokens` slots of a request's blocks hold its KV and nobody else's.
    fn check_contents(&self, request: &Request, tokens: usize) {
        for position in 0..tokens {
            let read = self.device[request.blocks[position / BLOCK_TOKENS].index()][position % BLOCK_TOKENS];
            assert_eq!(read, content(&request.tokens[..=position]), "position {position} of {tokens}");
        }
    }

    fn contents(&self, blocks: &[BlockId]) -> Vec<u64> {
        blocks.iter().flat_map(|block| self.device[block.index()]).collect()
    }

    /// Ends a load after `good` of its chunks; the others hold garbage, and the last block may
    /// never be used again.
    fn end_load(&mut self, which: usize, good: usize, withdraw: bool) {
        if self.loads.is_empty() {
            return;
        }
        let load = self.loads.swap_remove(which % self.loads.len());
        let chunk_blocks = CHUNK_TOKENS / BLOCK_TOKENS;
        let wanted = load.blocks.len() / chunk_blocks;
        // A chunk that was evicted before it could be read is a failed one.
        let readable =
            load.ids[load.first_chunk..].iter().take_while(|id| self.store.contains_key(id)).count();
        let good = good.min(wanted).min(readable);
        for (index, block) in load.blocks.iter().enumerate() {
            let chunk = index / chunk_blocks;
            let slots = &mut self.device[block.index()];
            match chunk < good {
                true => {
                    let bytes = &self.store[&load.ids[load.first_chunk + chunk]];
                    slots.copy_from_slice(&bytes[index % chunk_blocks * BLOCK_TOKENS..][..BLOCK_TOKENS]);
                }
                false => *slots = [u64::MAX; BLOCK_TOKENS],
            }
        }
        let withdrawn: Vec<BlockId> =
            load.blocks.last().copied().filter(|_| withdraw && good < wanted).into_iter().collect();
        let (disk, peers) = (good / 2, good / 3);
        let loaded = Residence { memory: good - disk - peers, disk, peers };
        self.scheduler.load_ended(load.request, loaded, &withdrawn);
        self.check();
    }

    fn end_store(&mut self, which: usize) {
        if self.stores.is_empty() {
            return;
        }
        let (chunk, held) = self.stores.swap_remove(which % self.stores.len());
        assert_eq!(self.contents(&chunk.blocks), held, "a store reads what was computed");
        self.store.insert(chunk.id, held);
        self.scheduler.store_ended(&chunk.blocks, true);
        self.check();
    }

    /// What counts as computed is in its blocks, and blocks are conserved: each is held exactly as
    /// often as it is named in a table or read by a store.
    fn check(&self) {
        self.scheduler.requests.values().for_each(|request| self.check_contents(request, request.computed));
        let mut holders = vec![0; self.device.len()];
        let tables = self.scheduler.requests.values().flat_map(|request| &request.blocks);
        let stores = self.stores.iter().flat_map(|(chunk, _)| &chunk.blocks);
        tables.chain(stores).for_each(|block| holders[block.index()] += 1);
        let pool = &self.scheduler.pool;
        for (index, &expected) in holders.iter().enumerate() {
            assert_eq!(pool.holders(BlockId(index as u32)), expected, "holders of block {index}");
        }
        let held = holders.iter().filter(|holders| **holders > 0).count();
        assert_eq!((pool.held(), pool.free() + held + pool.lost()), (held, self.device.len()));
    }

    /// Everything ends, whatever happened before.
    fn drain(&mut self) {
        for _ in 0..10_000 {
            if self.wanted.is_empty() && self.stores.is_empty() && self.loads.is_empty() {
                return assert_eq!(self.scheduler.pool.held(), 0, "an idle engine holds no block");
            }
            if !self.step() {
                self.end_load(0, usize::MAX, false);
                self.end_store(0);
            }
        }
        panic!("stuck: {:?}", self.scheduler);
    }
}

#[derive(Clone, Debug)]
enum Op {
    Submit { family: u32, prompt_tokens: usize, max_tokens: usize },
    Step,
    EndLoad { which: usize, good: usize, withdraw: bool },
    EndStore { which: usize },
    Abort { which: usize },
    Evict { which: usize },
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        3 => (0u32..3, 1usize..60, 1usize..20)
            .prop_map(|(family, prompt_tokens, max_tokens)| Op::Submit { family, prompt_tokens, max_tokens }),
        6 => Just(Op::Step),
        2 => (any::<usize>(), 0usize..9, prop::bool::weighted(0.02))
            .prop_map(|(which, good, withdraw)| Op::EndLoad { which, good, withdraw }),
        2 => any::<usize>().prop_map(|which| Op::EndStore { which }),
        1 => any::<usize>().prop_map(|which| Op::Abort { which }),
        1 => any::<usize>().prop_map(|which| Op::Evict { which }),
    ]
}

/// Prompts of a family share prefixes: they differ from position 10 times the family on.
fn prompt(family: u32, tokens: usize) -> Vec<u32> {
    (0..tokens as u32)
        .map(|position| if position < 10 * family { position % 7 } else { position % 5 })
        .collect()
}

fn run(rig: &mut Rig, ops: &[Op]) {
    for op in ops {
        match *op {
            Op::Submit { family, prompt_tokens, max_tokens } => {
                rig.submit(prompt(family, prompt_tokens), max_tokens);
            }
            Op::Step => {
                rig.step();
            }
            Op::EndLoad { which, good, withdraw } => rig.end_load(which, good, withdraw),
            Op::EndStore { which } => rig.end_store(which),
            Op::Abort { which } => {
                let nth = which % rig.wanted.len().max(1);
                if let Some(id) = rig.wanted.keys().nth(nth).copied() {
                    rig.scheduler.abort(id);
                    rig.wanted.remove(&id);
                    rig.check();
                }
            }
            Op::Evict { which } => {
                let nth = which % rig.store.len().max(1);
                if let Some(id) = rig.store.keys().nth(nth).copied() {
                    rig.store.remove(&id);
                }
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn every_token_is_right_and_every_block_conserved(ops in prop::collection::vec(op(), 1..120)) {
        let mut rig = Rig::new(config(true));
        run(&mut rig, &ops);
        rig.drain();
    }

    #[test]
    fn without_a_store_requests_start_first_come_first_served(ops in prop::collection::vec(op(), 1..120)) {
        let mut rig = Rig::new(config(false));
        run(&mut rig, &ops);
        rig.drain();
        prop_assert!(rig.started.is_sorted(), "{:?}", rig.started);
    }

    #[test]
    fn events_tell_exactly_what_is_cached(ops in prop::collection::vec(op(), 1..120)) {
        let mut rig = Rig::new(config(true));
        run(&mut rig, &ops);
        rig.drain();
        let mut told = HashSet::new();
        for event in rig.scheduler.take_events() {
            match event {
                CacheEvent::Stored { hashes, tokens, .. } => {
                    prop_assert_eq!(hashes.len() * BLOCK_TOKENS, tokens.len());
                    hashes.into_iter().for_each(|hash| assert!(told.insert(hash), "stored twice"));
                }
                CacheEvent::Removed { hashes } => {
                    hashes.iter().for_each(|hash| assert!(told.remove(hash), "removed before it was stored"));
                }
            }
        }
        prop_assert_eq!(told, rig.scheduler.pool.names());
    }
}

#[test]
fn the_last_started_request_is_preempted_and_finishes_with_the_same_tokens() {
    let mut rig = Rig::new(config(false));
    // 24 blocks are 96 tokens: both fit at first, but not with their output.
    rig.submit(prompt(0, 40), 20);
    rig.submit(prompt(1, 44), 20);
    rig.drain();
    assert!(rig.scheduler.counters().preemptions > 0);
    assert_eq!(rig.finished.len(), 2);
}

#[test]
fn a_preempted_request_is_the_first_of_the_queue() {
    let mut rig = Rig::new(SchedulerConfig { max_seqs: 2, ..config(false) });
    rig.submit(prompt(0, 40), 20);
    rig.submit(prompt(1, 44), 20);
    rig.submit(prompt(2, 40), 20);
    while rig.scheduler.counters().preemptions == 0 {
        assert!(rig.step());
    }
    assert_eq!(rig.scheduler.running, [RequestId(0)]);
    assert_eq!(rig.scheduler.queue, [RequestId(1), RequestId(2)]);
    rig.drain();
}

#[test]
fn a_cached_prompt_still_computes_one_token() {
    let mut rig = Rig::new(config(false));
    rig.submit(prompt(0, 32), 1);
    rig.drain();
    rig.submit(prompt(0, 32), 1);
    rig.drain();
    // 32 tokens are 8 blocks, of which the last is computed again for its last token.
    assert_eq!(rig.scheduler.counters().gpu_hits_tokens, 28);
}

#[test]
fn what_the_store_holds_is_loaded_and_not_computed() {
    let mut rig = Rig::new(SchedulerConfig { max_store_blocks: 12, ..config(true) });
    rig.submit(prompt(0, 41), 1);
    rig.drain();
    let mut other = Rig::new(config(true));
    other.store = std::mem::take(&mut rig.store);
    other.submit(prompt(0, 41), 1);
    assert!(!other.step(), "nothing is computed while chunks are on their way");
    assert_eq!((other.loads.len(), other.scheduler.waiting()), (1, 1));
    other.drain();
    assert_eq!(other.scheduler.counters().store_hits_tokens, 40);
}

#[test]
fn stores_never_hold_more_blocks_than_allowed_and_what_they_miss_is_counted() {
    let mut rig = Rig::new(config(true));
    rig.submit(prompt(0, 41), 1);
    while rig.finished.is_empty() {
        rig.step();
        assert!(rig.scheduler.store_blocks <= 8);
    }
    // 41 tokens are 5 chunks of 2 blocks.
    assert_eq!((rig.stores.len(), rig.scheduler.counters().unstored_chunks), (4, 1));
}

#[test]
fn blocks_that_a_lost_store_may_read_are_never_given_out_again() {
    let mut rig = Rig::new(config(true));
    rig.submit(prompt(0, 17), 1);
    while rig.finished.is_empty() {
        rig.step();
    }
    for (chunk, _) in std::mem::take(&mut rig.stores) {
        rig.scheduler.store_ended(&chunk.blocks, false);
    }
    let pool = &rig.scheduler.pool;
    assert_eq!((pool.lost(), pool.held(), pool.usable()), (4, 4, 20));
    assert_eq!(rig.scheduler.submit(vec![1; 75], 5).map(drop), Ok(()), "80 tokens are 20 blocks");
    assert!(rig.scheduler.submit(vec![1; 76], 5).is_err());
}

#[test]
fn a_request_whose_load_failed_asks_the_store_only_once() {
    let mut rig = Rig::new(config(true));
    let ids = Request::new(prompt(0, 41), 1, &rig.scheduler.namer).chunk_ids;
    rig.store.extend(ids.into_iter().map(|id| (id, vec![0; CHUNK_TOKENS])));
    rig.submit(prompt(0, 41), 1);
    rig.step();
    rig.end_load(0, 0, false);
    while !rig.finished.contains(&RequestId(0)) {
        assert!(rig.step(), "it is computed without another load");
        assert!(rig.loads.is_empty());
    }
}

#[test]
fn loaded_requests_that_hold_all_blocks_make_room_for_the_first() {
    let mut rig = Rig::new(config(true));
    for family in 0..2 {
        let ids = Request::new(prompt(family, 72), 1, &rig.scheduler.namer).chunk_ids;
        let tokens = prompt(family, 72);
        for (chunk, id) in ids.into_iter().take(6).enumerate() {
            let held =
                (chunk * CHUNK_TOKENS..(chunk + 1) * CHUNK_TOKENS).map(|last| content(&tokens[..=last]));
            rig.store.insert(id, held.collect());
        }
    }
    // Each loads 12 of 24 blocks and needs 19.
    rig.submit(prompt(0, 72), 4);
    rig.submit(prompt(1, 72), 4);
    rig.step();
    assert_eq!(rig.loads.len(), 2);
    rig.drain();
    assert_eq!(rig.finished.len(), 2);
}

#[test]
fn requests_that_cannot_run_are_refused_with_the_limit() {
    let mut scheduler = Scheduler::new(config(false));
    assert_eq!(scheduler.submit(Vec::new(), 1), Err(Refused::EmptyPrompt));
    assert_eq!(scheduler.submit(vec![1], 0), Err(Refused::NoOutput));
    let too_long = Refused::TooLong { prompt_tokens: 70, max_tokens: 11, limit_tokens: 80 };
    assert_eq!(scheduler.submit(vec![1; 70], 11), Err(too_long));
    (0..8).for_each(|_| assert!(scheduler.submit(vec![1], 1).is_ok()));
    assert_eq!(scheduler.submit(vec![1], 1), Err(Refused::QueueFull { limit: 8 }));
}
