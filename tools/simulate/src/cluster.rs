//! The cluster on its virtual clock: sessions ask, the router chooses, engines compute, links
//! carry. Events happen in the order of their time, and those of one time in the order in which
//! they were made, so that a run is the same every time.

use crate::cache::PrefixCache;
use crate::engine::{Ended, Engine, EngineConfig, Found, Job, Load};
use crate::link::Link;
use crate::prefixes::{NodeId, Run};
use crate::router::{Ask, Assigned, Router, RouterConfig};
use crate::sent::Visit;
use crate::sessions::{Next, Pacing, Sessions};
use crate::workload::{Turn, Workload};
use forebay_router::elastic::Choice;
use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// Tokens that a chunk of the store holds.
const CHUNK_TOKENS: u32 = 64;

/// Host memory for KV.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TierConfig {
    /// Of each host.
    pub tokens: u64,
    /// Whether all hosts can read what one has.
    pub shared: bool,
    /// Of each host to its engine, in 10^9 bytes per second.
    pub link_gb_per_s: f64,
}

#[derive(Clone, Copy, Debug)]
pub struct ClusterConfig {
    pub engines: usize,
    pub engine: EngineConfig,
    pub kv_bytes_per_token: u64,
    pub tier: Option<TierConfig>,
    pub router: RouterConfig,
    /// Of each host to all others, in 10^9 bytes per second.
    pub network_gb_per_s: f64,
    pub pacing: Pacing,
    /// Counted answers after which the run ends.
    pub most_answers: usize,
    pub seed: u64,
}

/// One counted answer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Answer {
    pub asked_us: u64,
    pub first_token_us: u64,
    pub end_us: u64,
    pub input_tokens: u32,
    pub output_tokens: u32,
    pub found: Found,
}

/// What came of a run.
#[derive(Debug, Default)]
pub struct Outcome {
    pub answers: Vec<Answer>,
    /// When counting began and ended.
    pub counted_us: (u64, u64),
    /// Of all engines.
    pub steps: u64,
    pub prefill_tokens: u64,
    pub preemptions: u64,
    /// Requests whose KV was pulled first, and those that were handed over.
    pub pulls: u64,
    pub hand_overs: u64,
    pub requests: u64,
}

/// Nothing is left to happen, and yet not all is answered: a defect of the simulator.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{left} of {requests} requests were never answered: the simulated engines stand still")]
pub struct Stuck {
    pub left: u64,
    pub requests: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    /// The next turn of a session.
    Turn {
        session: u32,
        turn: u32,
    },
    /// A request has passed the API of the engine that computes its prompt, and what is pulled
    /// for it is there.
    Arrival {
        request: u32,
    },
    /// A prompt's KV is at the host of the engine that says the answer.
    HandedOver {
        request: u32,
    },
    StepEnd {
        engine: u32,
    },
    LoadEnd {
        engine: u32,
        slot: u32,
    },
}

/// A host with an engine.
struct Host {
    engine: Engine,
    /// From host memory to the GPU.
    link: Link,
    /// To and from other hosts.
    network: Link,
}

/// A request that has not ended.
struct Request {
    session: u32,
    turn: u32,
    asked_us: u64,
    first_token_us: u64,
    found: Found,
    assigned: Assigned,
    visit: Visit,
    /// Tokens of the prompt that were brought to the host of its engine for it.
    delivered_tokens: u32,
    /// Whether its present engine computes the prompt only.
    prefill_only: bool,
}

pub struct Cluster<'a> {
    config: ClusterConfig,
    workload: &'a Workload,
    hosts: Vec<Host>,
    /// One for each host, or one for all.
    tiers: Vec<PrefixCache>,
    router: Router,
    sessions: Sessions,
    events: BinaryHeap<Reverse<(u64, u64, Event)>>,
    made: u64,
    now_us: u64,
    requests: Vec<Request>,
    free_requests: Vec<u32>,
    ended: Ended,
    outcome: Outcome,
}

impl<'a> Cluster<'a> {
    pub fn new(config: ClusterConfig, workload: &'a Workload) -> Cluster<'a> {
        let host = || {
            let link_gb_per_s = config.tier.map_or(1.0, |tier| tier.link_gb_per_s);
            let network = Link::new(config.network_gb_per_s);
            Host { engine: Engine::new(config.engine), link: Link::new(link_gb_per_s), network }
        };
        let tiers = match config.tier {
            None => Vec::new(),
            Some(TierConfig { tokens, shared: true, .. }) => {
                vec![PrefixCache::new(tokens * config.engines as u64, CHUNK_TOKENS)]
            }
            Some(TierConfig { tokens, .. }) => {
                (0..config.engines).map(|_| PrefixCache::new(tokens, CHUNK_TOKENS)).collect()
            }
        };
        let (nodes, sessions) = (workload.prefixes.nodes(), workload.sessions.len());
        Cluster {
            hosts: (0..config.engines).map(|_| host()).collect(),
            tiers,
            router: Router::new(config.router, config.engines, nodes, sessions, config.seed),
            sessions: Sessions::new(config.pacing, workload, config.seed),
            config,
            workload,
            events: BinaryHeap::new(),
            made: 0,
            now_us: 0,
            requests: Vec::new(),
            free_requests: Vec::new(),
            ended: Ended::default(),
            outcome: Outcome::default(),
        }
    }

    /// Runs until all is answered, or as many as were wanted.
    pub fn run(mut self) -> Result<Outcome, Stuck> {
        for next in self.sessions.start() {
            self.ask_next(next);
        }
        while self.outcome.answers.len() < self.config.most_answers
            && let Some(Reverse((at_us, _, event))) = self.events.pop()
        {
            self.now_us = at_us;
            match event {
                Event::Turn { session, turn } => self.ask(session, turn),
                Event::Arrival { request } => self.arrive(request),
                Event::HandedOver { request } => self.take_over(request),
                Event::StepEnd { engine } => self.end_step(engine),
                Event::LoadEnd { engine, slot } => {
                    self.hosts[engine as usize].engine.load_ended(slot);
                    self.begin_step(engine);
                }
            }
        }
        let left = (self.requests.len() - self.free_requests.len()) as u64;
        if self.events.is_empty() && left > 0 {
            return Err(Stuck { left, requests: self.outcome.requests });
        }
        debug_assert!(!self.events.is_empty() || self.router.is_idle(), "the books are empty");
        self.outcome.counted_us = self.sessions.counted_us(self.now_us);
        for Host { engine, .. } in &self.hosts {
            self.outcome.steps += engine.counters.steps;
            self.outcome.prefill_tokens += engine.counters.prefill_tokens;
            self.outcome.preemptions += engine.counters.preemptions;
        }
        Ok(self.outcome)
    }

    fn at(&mut self, at_us: u64, event: Event) {
        self.made += 1;
        self.events.push(Reverse((at_us, self.made, event)));
    }

    fn ask_next(&mut self, Next { at_us, session, turn }: Next) {
        self.at(at_us, Event::Turn { session, turn });
    }

    fn turn(&self, session: u32, turn: u32) -> Turn {
        self.workload.sessions[session as usize].turns[turn as usize]
    }

    fn ask(&mut self, session: u32, turn: u32) {
        let Turn { leaf, input_tokens, .. } = self.turn(session, turn);
        let path = self.workload.prefixes.path(leaf, input_tokens);
        let ask = Ask { session, turn, path: &path, input_tokens };
        let (tiers, hosts) = (&self.tiers, &self.hosts);
        let stored_tokens = |engine: usize| tier_of(tiers, engine).map_or(0, |tier| tier.hit_tokens(&path));
        let truth = |engine: usize| hosts[engine].engine.pool().hit_tokens(&path);
        let truth: Option<&dyn Fn(usize) -> u32> = match self.config.router.knows_hits {
            true => Some(&truth),
            false => None,
        };
        let (assigned, visit) = self.router.choose(self.now_us, &ask, stored_tokens, truth);
        let api_us = self.config.engine.steps.api_us(input_tokens as usize).round() as u64;
        let (delivered_tokens, there_us) = self.pull(&assigned.choice, &path);
        self.outcome.requests += 1;
        let request = self.open(Request {
            session,
            turn,
            asked_us: self.now_us,
            first_token_us: 0,
            found: Found::default(),
            assigned,
            visit,
            delivered_tokens,
            prefill_only: matches!(assigned.choice, Choice::HandOver { .. }),
        });
        self.at(there_us.max(self.now_us + api_us), Event::Arrival { request });
    }

    fn open(&mut self, request: Request) -> u32 {
        match self.free_requests.pop() {
            Some(index) => {
                self.requests[index as usize] = request;
                index
            }
            None => {
                self.requests.push(request);
                self.requests.len() as u32 - 1
            }
        }
    }

    /// Brings KV of a prompt to the engine that computes it. Returns how many tokens it has then,
    /// and when.
    fn pull(&mut self, choice: &Choice, path: &[Run]) -> (u32, u64) {
        let (from, to) = match *choice {
            Choice::Place { .. } => return (0, self.now_us),
            Choice::Pull { from, engine } => {
                self.outcome.pulls += 1;
                (from, engine)
            }
            Choice::HandOver { prefill, decode } => {
                self.outcome.hand_overs += 1;
                (decode, prefill)
            }
        };
        let [there, here] = [from, to].map(|engine| self.held_tokens(engine, path));
        if there <= here {
            return (0, self.now_us);
        }
        let there_us = self.carry(from, to, there - here, self.now_us);
        (there, there_us)
    }

    /// Tokens of a path that an engine or its host has.
    fn held_tokens(&self, engine: usize, path: &[Run]) -> u32 {
        let stored = tier_of(&self.tiers, engine).map_or(0, |tier| tier.hit_tokens(path));
        self.hosts[engine].engine.pool().hit_tokens(path).max(stored)
    }

    /// Moves KV between two hosts, from `begin_us` on, and says when it is there.
    fn carry(&mut self, from: usize, to: usize, tokens: u32, begin_us: u64) -> u64 {
        let bytes = u64::from(tokens) * self.config.kv_bytes_per_token;
        let begin_us = self.hosts[from].network.free_us(self.hosts[to].network.free_us(begin_us));
        let begin_us = begin_us + self.config.router.network.start_us as u64;
        self.hosts[from].network.carry(begin_us, bytes);
        self.hosts[to].network.carry(begin_us, bytes)
    }

    fn arrive(&mut self, index: u32) {
        let Request { session, turn, assigned, delivered_tokens, prefill_only, .. } =
            self.requests[index as usize];
        let Turn { leaf, input_tokens, output_tokens, .. } = self.turn(session, turn);
        let engine = assigned.choice.prefill();
        if delivered_tokens > 0 {
            let path = self.workload.prefixes.path(leaf, input_tokens);
            self.store(engine as u32, &path, delivered_tokens);
        }
        let output_tokens = if prefill_only { 1 } else { output_tokens };
        self.submit(index, engine, leaf, input_tokens, output_tokens);
    }

    fn submit(&mut self, index: u32, engine: usize, leaf: NodeId, input_tokens: u32, output_tokens: u32) {
        let path = self.workload.prefixes.path(leaf, input_tokens + output_tokens);
        self.hosts[engine].engine.submit(Job { request: index, path, input_tokens, output_tokens });
        self.begin_step(engine as u32);
    }

    /// A prompt is computed: its KV goes to the engine that says the answer. It goes layer by layer
    /// while it is computed, so that at least the last layer is left.
    fn hand_over(&mut self, index: u32) {
        let Request { session, turn, assigned, found, .. } = self.requests[index as usize];
        let (from, to) = (assigned.choice.prefill(), assigned.choice.home());
        let Turn { leaf, input_tokens, .. } = self.turn(session, turn);
        let path = self.workload.prefixes.path(leaf, input_tokens);
        let moved = input_tokens - self.held_tokens(to, &path);
        let context = found.gpu_tokens + found.loaded_tokens;
        let steps = &self.config.engine.steps;
        let prefill_us = steps.prefill_us(u64::from(input_tokens - context), u64::from(context)) as u64;
        let there_us = self.carry(from, to, moved, self.now_us.saturating_sub(prefill_us));
        let layers = u64::from(self.config.router.network.layers);
        let bytes = u64::from(moved) * self.config.kv_bytes_per_token;
        let last_layer_us = self.hosts[to].network.time_us(bytes / layers.max(1));
        self.at(there_us.max(self.now_us + last_layer_us), Event::HandedOver { request: index });
    }

    fn take_over(&mut self, index: u32) {
        let request = &mut self.requests[index as usize];
        let Request { session, turn, assigned, .. } = *request;
        let Turn { leaf, input_tokens, output_tokens, .. } =
            self.workload.sessions[session as usize].turns[turn as usize];
        (request.prefill_only, request.delivered_tokens) = (false, input_tokens);
        self.router.prefilled(self.now_us, assigned);
        let path = self.workload.prefixes.path(leaf, input_tokens);
        let engine = assigned.choice.home();
        self.store(engine as u32, &path, input_tokens);
        self.submit(index, engine, leaf, input_tokens, output_tokens);
    }

    /// Begins a step of an engine that has none under way.
    fn begin_step(&mut self, engine: u32) {
        let host = &mut self.hosts[engine as usize];
        if host.engine.is_busy() {
            return;
        }
        let (tier, requests) = (tier_of(&self.tiers, engine as usize), &self.requests);
        let mut stored_tokens = |job: &Job| {
            let stored = tier.map_or(0, |tier| tier.hit_tokens(&job.path));
            stored.max(requests[job.request as usize].delivered_tokens)
        };
        let mut loads = Vec::new();
        let step_us = host.engine.begin_step(&mut stored_tokens, &mut loads);
        for Load { slot, tokens } in loads {
            let end_us = self.load(engine, u64::from(tokens) * self.config.kv_bytes_per_token);
            self.at(end_us, Event::LoadEnd { engine, slot });
        }
        if let Some(step_us) = step_us {
            self.at(self.now_us + (step_us.round() as u64).max(1), Event::StepEnd { engine });
        }
    }

    /// Loads KV into an engine, and says when it is there. Of a tier that all hosts share, each has
    /// as much as any other, and what others have takes their networks, too.
    fn load(&mut self, engine: u32, bytes: u64) -> u64 {
        let mut there_us = self.hosts[engine as usize].link.carry(self.now_us, bytes);
        if !self.config.tier.is_some_and(|tier| tier.shared) {
            return there_us;
        }
        let part = bytes / self.hosts.len() as u64;
        let begin_us = self.now_us + self.config.router.network.start_us as u64;
        for (index, host) in self.hosts.iter_mut().enumerate() {
            let carried = if index == engine as usize { bytes - part } else { part };
            if carried > 0 {
                there_us = there_us.max(host.network.carry(begin_us, carried));
            }
        }
        there_us
    }

    fn end_step(&mut self, engine: u32) {
        let mut ended = std::mem::take(&mut self.ended);
        self.hosts[engine as usize].engine.end_step(&mut ended);
        for (index, found) in ended.first_tokens.drain(..) {
            self.first_token(index, found);
        }
        for (job, computed_tokens) in ended.finished.drain(..) {
            self.store(engine, &job.path, computed_tokens);
            match self.requests[job.request as usize].prefill_only {
                true => self.hand_over(job.request),
                false => self.end(&job),
            }
        }
        self.ended = ended;
        self.begin_step(engine);
    }

    /// The KV of a prompt and its answer goes to host memory.
    fn store(&mut self, engine: u32, path: &[Run], tokens: u32) {
        let shared = self.tiers.len() == 1;
        let Some(tier) = self.tiers.get_mut(if shared { 0 } else { engine as usize }) else { return };
        let runs = path.iter().filter(|run| run.start < tokens);
        tier.store(&runs.map(|run| Run { end: run.end.min(tokens), ..*run }).collect::<Vec<_>>());
    }

    fn first_token(&mut self, index: u32, found: Found) {
        let request = &mut self.requests[index as usize];
        if request.prefill_only {
            request.found = found;
            return;
        }
        request.first_token_us = self.now_us;
        // Of a prompt that was handed over, what counts is what its prefiller found.
        if request.assigned.choice.prefill() == request.assigned.choice.home() {
            request.found = found;
            self.router.prefilled(self.now_us, request.assigned);
        }
        let ttft_s = (self.now_us - request.asked_us) as f64 / 1e6;
        self.router.first_token(self.now_us, request.assigned, ttft_s);
    }

    fn end(&mut self, job: &Job) {
        self.free_requests.push(job.request);
        let request = &mut self.requests[job.request as usize];
        let visit = std::mem::take(&mut request.visit);
        let Request { session, turn, asked_us, first_token_us, found, assigned, .. } = *request;
        self.router.end(self.now_us, (assigned, visit), job.output_tokens, found.gpu_tokens);
        let answered = self.sessions.answered(self.now_us, self.workload, session, turn);
        if answered.counts {
            self.outcome.answers.push(Answer {
                asked_us,
                first_token_us,
                end_us: self.now_us,
                input_tokens: job.input_tokens,
                output_tokens: job.output_tokens,
                found,
            });
        }
        for next in answered.next {
            self.ask_next(next);
        }
    }
}

/// The tier that an engine reads.
fn tier_of(tiers: &[PrefixCache], engine: usize) -> Option<&PrefixCache> {
    tiers.get(if tiers.len() == 1 { 0 } else { engine })
}
