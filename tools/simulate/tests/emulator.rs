//! The simulated engine is held to the emulated engine's scheduler: of the same requests, both make
//! the same steps.

#![allow(clippy::unwrap_used)]

use forebay_emulator::scheduler::{RequestId, Scheduler, SchedulerConfig};
use forebay_kv::NamespaceKey;
use forebay_simulate::engine::{Admission, Ended, Engine, EngineConfig, Job};
use forebay_simulate::prefixes::{NodeId, Run};
use forebay_steps::{Launch, Profile, StepModel};
use proptest::prelude::*;
use std::collections::HashMap;

const BLOCK_TOKENS: u32 = 4;
const BUDGET: u32 = 24;
const SEQS: usize = 6;
const SYSTEM_TOKENS: u32 = 12;

/// A session's prompts: each continues the one before it and its answer.
struct Conversation {
    tokens: Vec<u32>,
    under_way: bool,
}

struct Pair {
    scheduler: Scheduler,
    engine: Engine,
    sessions: Vec<Conversation>,
    /// The session of each simulated request.
    session_of: Vec<usize>,
    /// The simulated request of each emulated one.
    twin_of: HashMap<RequestId, u32>,
}

impl Pair {
    fn new(pool_blocks: u32) -> Pair {
        let config = SchedulerConfig {
            namespace: NamespaceKey::from_bytes([7; 32]),
            pool_blocks,
            block_tokens: BLOCK_TOKENS as usize,
            max_batched_tokens: BUDGET as usize,
            max_seqs: SEQS,
            max_queued: 1_000,
            max_model_tokens: 1_000,
            chunk_tokens: None,
            max_store_blocks: 0,
        };
        let profile = Profile::shipped(Profile::DEFAULT).unwrap();
        let engine = EngineConfig {
            steps: StepModel::new(&profile, Launch::Graph),
            pool_tokens: u64::from(pool_blocks * BLOCK_TOKENS),
            block_tokens: BLOCK_TOKENS,
            max_batched_tokens: BUDGET,
            max_seqs: SEQS,
            admission: Admission::NextStep,
        };
        Pair {
            scheduler: Scheduler::new(config),
            engine: Engine::new(engine),
            sessions: Vec::new(),
            session_of: Vec::new(),
            twin_of: HashMap::new(),
        }
    }

    /// A turn of a session, unless its last one is under way or it would be too long.
    fn submit(&mut self, session: usize, new_tokens: u32, output_tokens: u32, most_tokens: u32) {
        while self.sessions.len() <= session {
            let system = self.sessions.len() as u32 % 2;
            let tokens = (0..SYSTEM_TOKENS).map(|position| 1_000 * system + position).collect();
            self.sessions.push(Conversation { tokens, under_way: false });
        }
        let conversation = &mut self.sessions[session];
        let from = conversation.tokens.len() as u32;
        let input_tokens = from + new_tokens;
        if conversation.under_way || input_tokens + output_tokens > most_tokens {
            return;
        }
        let fresh = (from..input_tokens).map(|position| 1_000_000 + 10_000 * session as u32 + position);
        conversation.tokens.extend(fresh);
        conversation.under_way = true;
        let id = self.scheduler.submit(conversation.tokens.clone(), output_tokens as usize).unwrap();
        let request = self.session_of.len() as u32;
        let end = input_tokens + output_tokens;
        let path = vec![
            Run { node: NodeId(session as u32 % 2), start: 0, end: SYSTEM_TOKENS },
            Run { node: NodeId(100 + session as u32), start: SYSTEM_TOKENS, end },
        ];
        self.engine.submit(Job { request, path, input_tokens, output_tokens });
        self.session_of.push(session);
        self.twin_of.insert(id, request);
    }

    /// A step of both. Says whether there was anything to do.
    fn step(&mut self) -> Result<bool, TestCaseError> {
        let step = self.scheduler.schedule(&mut |_| 0);
        let mut loads = Vec::new();
        let duration = self.engine.begin_step(&mut |_| 0, &mut loads);
        prop_assert!(step.failed.is_empty() && loads.is_empty());
        prop_assert_eq!(duration.is_some(), !step.shares.is_empty());
        let chunks: HashMap<u32, u32> = self.engine.chunks().collect();
        prop_assert_eq!(step.shares.len(), chunks.len() + self.engine.decoding() as usize);
        for share in &step.shares {
            let expected = chunks.get(&self.twin_of[&share.request]).copied().unwrap_or(1);
            prop_assert_eq!(share.tokens as u32, expected, "{:?} {:?}", share, chunks);
        }
        let answers: Vec<u32> = step.shares.iter().filter(|share| share.samples).map(|_| 9).collect();
        let completed = self.scheduler.complete(&step, &answers);
        let mut ended = Ended::default();
        if duration.is_some() {
            self.engine.end_step(&mut ended);
        }
        let finished: Vec<u32> = ended.finished.iter().map(|(job, _)| job.request).collect();
        let expected: Vec<u32> = completed.finished.iter().map(|(id, _)| self.twin_of[id]).collect();
        prop_assert_eq!(&finished, &expected);
        for (job, computed) in ended.finished {
            prop_assert_eq!(computed, job.input_tokens + job.output_tokens - 1);
            let conversation = &mut self.sessions[self.session_of[job.request as usize]];
            conversation.under_way = false;
            conversation.tokens.extend(vec![9; job.output_tokens as usize]);
        }
        prop_assert_eq!(self.engine.running().len(), self.scheduler.running());
        prop_assert_eq!(self.engine.counters.preemptions, self.scheduler.counters().preemptions);
        prop_assert_eq!(self.engine.pool().held(), self.scheduler.pool().held() as u64);
        Ok(duration.is_some())
    }
}

#[derive(Clone, Debug)]
enum Op {
    Submit { session: usize, new_tokens: u32, output_tokens: u32 },
    Step,
}

fn op() -> impl Strategy<Value = Op> {
    let submit = (0..9_usize, 1..40_u32, 1..30_u32);
    prop_oneof![
        1 => submit.prop_map(|(session, new_tokens, output_tokens)| Op::Submit { session, new_tokens, output_tokens }),
        3 => Just(Op::Step),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(500))]

    #[test]
    fn both_make_the_same_steps(
        pool_blocks in 30..70_u32,
        ops in prop::collection::vec(op(), 1..250),
    ) {
        let mut pair = Pair::new(pool_blocks);
        for op in ops {
            match op {
                Op::Submit { session, new_tokens, output_tokens } => {
                    pair.submit(session, new_tokens, output_tokens, pool_blocks * BLOCK_TOKENS);
                }
                Op::Step => {
                    pair.step()?;
                }
            }
        }
        while pair.step()? {}
    }
}
