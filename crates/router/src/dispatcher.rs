//! The router's state: the load, health and presumed cache of every backend, and what was decided.
//! It joins the policy, the indexes and the learned token ratio. It takes time as an argument.
//!
//! Every assignment is ended exactly once, with how it ended; until then it counts as load.

use crate::chain::{CHUNK_BYTES, Chain};
use crate::decisions::{Decisions, Entry, Outcome, PrefilledRecord};
use crate::distinct_chunks::DistinctChunks;
use crate::engine_metrics::EngineMetrics;
use crate::engine_model::EngineModel;
use crate::generations::Generations;
use crate::health::{Cause, Change, Failure, Thresholds};
use crate::policy::{Candidate, Policy, Reason};
use crate::prefill::Prefill;
use crate::prefix::{Bounds, PrefixIndex, Visit};
use crate::reported_load::{self, Load, Unread};
use crate::request::Endpoint;
use crate::shadow_cache::is_more;
use crate::slo::Slo;
use crate::slots::{MAX_ENGINES, Serving};
use crate::stats::{BackendStats, RouterStats, StoreStats};
use crate::store_index::{Found, Sought, StoreIndex};
use crate::tokens::{AnswerTokens, AveragePrefill, BytesPerToken, Length};
use crate::usage::Usage;
use backend::Backend;
use hand_overs::HandOvers;
use std::sync::Arc;

mod assign;
mod backend;
mod cache_reports;
mod hand_overs;

pub use backend::Membership;
pub use hand_overs::{HandOverConfig, HandOverEnded, Plan};

/// Longer than any prompt takes. An engine that counts absurdly many tokens must not make the sum
/// for all requests overflow.
const PREFILL_US_MAX: f64 = 1e12;
/// Chunks remembered per backend: 128 MiB of prompts (about 32 million tokens of text) in about 10
/// MiB.
const CHUNKS_PER_BACKEND: usize = 256 * 1024;
/// Of all together: as many as 64 may have.
const INDEX_BOUNDS: Bounds = Bounds { chunks_each: CHUNKS_PER_BACKEND, chunks: 64 * CHUNKS_PER_BACKEND };
/// Chunks remembered per store: it is larger than an engine's memory, and several engines write to
/// it.
const CHUNKS_PER_STORE: usize = 1024 * 1024;
/// Of all together: as many as 16 may have.
const STORE_BOUNDS: Bounds = Bounds { chunks_each: CHUNKS_PER_STORE, chunks: 16 * CHUNKS_PER_STORE };

/// Sessions whose backend is remembered.
const SESSIONS: usize = 64 * 1024;

/// What routing needs to know of a request.
#[derive(Debug)]
pub struct RoutingFacts {
    /// How long it is, as far as bytes tell.
    pub length: Length,
    /// Bytes that stand before the prompt and are cached with its beginning: tools and documents.
    pub preamble_bytes: usize,
    /// The prompt's chunks.
    pub chain: Chain,
    /// Identifies the session.
    pub session: u64,
    /// The call it belongs to; `None` where caches do not matter, and it goes by load alone.
    pub endpoint: Option<Endpoint>,
    /// The backends that may serve it.
    pub serving: Serving,
    /// How long it may take.
    pub slo: Slo,
}

/// A request on its way to a backend. To be given back with [`Dispatcher::end`].
#[derive(Debug)]
#[must_use = "an assignment that is not ended counts as load for ever"]
pub struct Assignment {
    /// Slot of the backend.
    pub backend: usize,
    /// What was decided. It gets its outcome when the assignment ends.
    pub decision: Arc<Entry>,
    assigned_us: u64,
    first_byte_us: Option<u64>,
    input_tokens: u64,
    new_tokens: u64,
    prefill_us: u64,
    visit: Visit,
    /// What the engine's store was believed to hold of it, if there is one.
    sought: Option<Sought>,
    /// The engine that the session had before.
    former_home: Option<Home>,
    /// An answer with a status below 400 has begun: its prompt is computed.
    computed: bool,
    /// The answer comes piece by piece, as its tokens do.
    is_stream: bool,
    role: Role,
}

/// What a backend does for a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Role {
    /// All of it.
    Whole,
    /// It computes the prompt for another backend.
    Prefill,
    /// It says the answer to a prompt that another backend computes.
    Decode,
}

#[derive(Debug, Clone, Copy)]
pub enum End {
    /// With a whole answer.
    Answered {
        /// Its HTTP status.
        status: u16,
        /// What it reported.
        usage: Option<Usage>,
    },
    /// Without one.
    Failed(Failure),
    /// The client went away.
    Cancelled,
}

/// Why a request goes nowhere.
#[derive(Debug)]
pub enum Unassigned {
    /// There is no backend that may have it.
    NoEngine,
    /// No backend is expected to begin its answer in time, and all are full.
    TooLate {
        decision: Arc<Entry>,
        /// When its first token would come at the earliest.
        earliest_us: u64,
    },
}

/// What came of an end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ended {
    /// The backend's health has changed.
    pub change: Option<Change>,
    /// It was the last request of a backend that was to leave.
    pub is_gone: bool,
}

/// The engine that a session had last.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Home {
    slot: usize,
    /// Another engine may have the slot by now.
    id: u64,
}

#[derive(Debug)]
pub struct Dispatcher {
    policy: Policy,
    engine_model: EngineModel,
    /// By slot; empty where nobody is.
    names: Arc<[String]>,
    backends: Vec<Backend>,
    /// Of the next backend that comes.
    next_id: u64,
    index: PrefixIndex,
    /// Of all prompts.
    chunks: DistinctChunks,
    stores: StoreIndex,
    thresholds: Thresholds,
    bytes_per_token: BytesPerToken,
    answer_tokens: AnswerTokens,
    average_prefill: AveragePrefill,
    homes: Generations<Home>,
    decisions: Decisions,
    /// Where prompts are handed over.
    hand_overs: Option<HandOvers>,
    turn: u64,
    /// Requests that were sent somewhere, in the order of [`Reason::NAMES`].
    reasons: [u64; Reason::NAMES.len()],
}

impl Dispatcher {
    /// A dispatcher without backends.
    pub fn new(policy: Policy, engine_model: EngineModel, thresholds: Thresholds) -> Dispatcher {
        Dispatcher {
            policy,
            engine_model,
            index: PrefixIndex::new(INDEX_BOUNDS),
            chunks: DistinctChunks::default(),
            stores: StoreIndex::new(STORE_BOUNDS),
            thresholds,
            names: Arc::default(),
            backends: Vec::new(),
            next_id: 0,
            bytes_per_token: BytesPerToken::default(),
            answer_tokens: AnswerTokens::default(),
            average_prefill: AveragePrefill::default(),
            homes: Generations::new(SESSIONS),
            decisions: Decisions::default(),
            hand_overs: None,
            turn: 0,
            reasons: [0; Reason::NAMES.len()],
        }
    }

    /// Adds a backend, up and idle, with the name of the store that it shares. Gives its slot;
    /// `None` if there are [`MAX_ENGINES`].
    pub fn add_backend(&mut self, name: &str, store: Option<&str>) -> Option<usize> {
        let is_free = |backend: &Backend| backend.membership == Membership::Gone;
        let slot = self.backends.iter().position(is_free).unwrap_or(self.backends.len());
        if slot == MAX_ENGINES {
            return None;
        }
        let backend = Backend::new(name, self.next_id, self.thresholds);
        self.next_id += 1;
        match self.backends.get_mut(slot) {
            Some(free) => *free = backend,
            None => {
                self.backends.push(backend);
                self.index.add_slot();
            }
        }
        self.stores.set_engine(slot, store);
        self.name_anew();
        Some(slot)
    }

    /// What tells the backend in a slot from all that were there before.
    pub fn id(&self, slot: usize) -> u64 {
        self.backends[slot].id
    }

    /// Whether a backend takes part; it does not come back from [`Membership::Gone`].
    pub fn membership(&self, backend: usize) -> Membership {
        self.backends[backend].membership
    }

    /// A backend gets no new requests from now on, or gets some again. One that is to leave is gone
    /// at once, or when its last request has ended; returns whether it is.
    pub fn set_membership(&mut self, backend: usize, membership: Membership) -> bool {
        self.backends[backend].membership = membership;
        self.free_if_left(backend)
    }

    fn free_if_left(&mut self, slot: usize) -> bool {
        let is_handing_over = self.hand_overs.as_ref().is_some_and(|hand_overs| hand_overs.are_open_at(slot));
        let backend = &mut self.backends[slot];
        if backend.membership != Membership::Leaving || backend.in_flight > 0 || is_handing_over {
            return false;
        }
        backend.membership = Membership::Gone;
        self.index.forget(slot);
        self.stores.set_engine(slot, None);
        self.name_anew();
        true
    }

    /// Decisions keep the names that there were.
    fn name_anew(&mut self) {
        let name = |backend: &Backend| match backend.membership {
            Membership::Gone => String::new(),
            _ => backend.totals.name.clone(),
        };
        self.names = self.backends.iter().map(name).collect();
    }

    fn candidates(
        &self,
        now_us: u64,
        routing: &RoutingFacts,
        input_tokens: u64,
        tried: &[u64],
    ) -> Vec<Candidate> {
        let bytes_per_token = self.bytes_per_token.ratio(routing.length.kind);
        let stored = self.stores.hits(&routing.chain);
        let tokens = |chunks: usize| {
            let bytes = routing.hit_bytes(chunks);
            ((bytes as f64 / bytes_per_token) as u64).min(input_tokens)
        };
        let serves =
            |index: usize, id: u64| routing.serving.as_ref().is_none_or(|set| set.contains(index, id));
        let may_have = |index, backend: &Backend| serves(index, backend.id) && !tried.contains(&backend.id);
        let mut backends = self.backends.iter().enumerate();
        let one_is_up = backends.any(|(index, backend)| backend.is_up() && may_have(index, backend));
        let candidate = |(index, backend): (usize, &Backend)| {
            let usable = backend.is_up() || (!one_is_up && backend.is_last_resort());
            let others = backend.reported.others(now_us);
            let others_in_flight = u32::try_from(others.requests).unwrap_or(u32::MAX);
            let (others_tokens, others_us) = self.average_prefill.of(others.waiting);
            let pool_tokens = backend.reported.pool_tokens(now_us);
            Candidate {
                eligible: usable && may_have(index, backend),
                in_flight: backend.in_flight.saturating_add(others_in_flight),
                pending_prefill_tokens: backend.pending_prefill_tokens.saturating_add(others_tokens),
                pending_prefill_us: backend.pending_prefill_us.saturating_add(others_us),
                context_tokens: backend.context_tokens.saturating_add(others.context_tokens),
                pool_tokens: pool_tokens.unwrap_or(self.engine_model.pool_tokens),
                hit_tokens: tokens(self.index.hit_chunks(index, &routing.chain)),
                stored_tokens: tokens(stored.chunks(index)),
                load_us_per_token: self.engine_model.load_us_per_token,
            }
        };
        self.backends.iter().enumerate().map(candidate).collect()
    }

    /// The first byte of the answer's body has come, after this status. If it is below 400 the
    /// prompt is computed; other answers teach nothing.
    pub fn first_byte(&mut self, now_us: u64, assignment: &mut Assignment, status: u16) {
        if assignment.first_byte_us.is_some() {
            return;
        }
        let waited_us = now_us.saturating_sub(assignment.assigned_us);
        assignment.first_byte_us = Some(waited_us);
        assignment.computed = status < 400;
        let backend = &mut self.backends[assignment.backend];
        backend.release_prefill(assignment.new_tokens, assignment.prefill_us);
        if assignment.computed && assignment.says_answer() {
            backend.totals.count_first_byte(waited_us, assignment.decision.predicted.first_byte_us);
        }
    }

    /// Ends an assignment: its load is gone, and what its end teaches is learned.
    pub fn end(&mut self, now_us: u64, routing: &RoutingFacts, assignment: Assignment, end: End) -> Ended {
        let index = assignment.backend;
        let keeps_blocks = self.keeps_blocks(&assignment, &end);
        let backend = &mut self.backends[index];
        backend.in_flight -= 1;
        if !keeps_blocks {
            backend.context_tokens -= assignment.input_tokens;
        }
        if assignment.first_byte_us.is_none() {
            backend.release_prefill(assignment.new_tokens, assignment.prefill_us);
        }
        let mut outcome = Outcome { first_byte_us: assignment.first_byte_us, ..Outcome::default() };
        let mut change = None;
        let mut cached = None;
        match end {
            End::Answered { status, usage } => {
                backend.totals.answered += 1;
                outcome.status = Some(status);
                assignment.count_times(now_us, usage, &mut backend.totals);
                change = match Failure::of_status(status) {
                    Some(failure) => backend.health.failed(failure),
                    None => {
                        if status < 400 {
                            backend.health.answered();
                        }
                        None
                    }
                };
                if let Some(usage) = usage.filter(|_| assignment.computed) {
                    if assignment.role != Role::Prefill {
                        self.answer_tokens.learn(usage.completion_tokens);
                    }
                    cached =
                        learn(&mut self.bytes_per_token, backend, routing, &assignment, usage, &mut outcome);
                    if outcome.cached_tokens.is_some_and(|tokens| backend.cache.answered(tokens)) {
                        self.index.untold(index);
                    }
                }
            }
            End::Failed(failure) => {
                backend.totals.count_failure(failure);
                outcome.failure = Some(failure);
                change = backend.health.failed(failure);
            }
            End::Cancelled => {
                backend.totals.cancelled += 1;
                outcome.cancelled = true;
            }
        }
        // It ends once, so these set what was not set.
        let _ = match assignment.role {
            Role::Whole | Role::Decode => assignment.decision.outcome.set(outcome).is_ok(),
            Role::Prefill => assignment.note_prefilled(&outcome),
        };
        if assignment.computed {
            let of_engine = cached.map(|cached| cached.in_engine_bytes);
            self.index.used(&assignment.visit, &routing.chain);
            self.index.settle(assignment.visit, of_engine);
            if let Some(sought) = assignment.sought {
                self.stores.computed(&sought, &routing.chain);
                if let Some(cached) = cached {
                    self.stores.settle(&sought, cached.found);
                }
            }
        } else {
            if assignment.role != Role::Prefill {
                self.forget_home(routing.session, index, assignment.former_home);
            }
            self.index.abandon(assignment.visit, &routing.chain);
        }
        let change = self.apply(index, change);
        Ended { change, is_gone: self.free_if_left(index) }
    }

    /// A session that got no answer from a backend is where it was before.
    fn forget_home(&mut self, session: u64, backend: usize, former: Option<Home>) {
        if self.homes.get(session).map(|home| home.slot) != Some(backend) {
            return;
        }
        match former {
            Some(former) => {
                self.homes.insert(session, former);
            }
            None => self.homes.remove(session),
        }
    }

    /// A probe of a backend ended.
    pub fn probed(&mut self, backend: usize, result: Result<(), Failure>) -> Option<Change> {
        let health = &mut self.backends[backend].health;
        let change = match result {
            Ok(()) => health.probe_answered(),
            Err(failure) => health.probe_failed(failure),
        };
        self.apply(backend, change)
    }

    /// What the router itself has at a backend.
    pub fn own_load(&self, backend: usize) -> Load {
        let Backend { in_flight, waiting, context_tokens, .. } = self.backends[backend];
        Load { requests: in_flight.into(), waiting: waiting.into(), context_tokens }
    }

    /// A backend's metrics were read, or could not be. `asked` is what the router had there when it
    /// asked.
    pub fn noted_metrics(
        &mut self,
        now_us: u64,
        backend: usize,
        read: Result<EngineMetrics, Unread>,
        asked: Load,
    ) -> Option<reported_load::Change> {
        let own = asked.max(self.own_load(backend));
        let backend = &mut self.backends[backend];
        if let Err(unread) = read {
            backend.totals.unread_metrics[unread as usize] += 1;
        }
        backend.reported.note(now_us, read, own)
    }

    fn apply(&mut self, backend: usize, change: Option<Change>) -> Option<Change> {
        if let Some(Change::Ejected { .. }) = change {
            self.backends[backend].totals.ejections += 1;
        }
        if let Some(Change::Ejected { cause: Cause::Gone, .. } | Change::StillDown { cause: Cause::Gone }) =
            change
        {
            self.index.forget(backend);
        }
        change
    }

    /// May a backend get requests, if only as the last resort?
    pub fn is_usable(&self, backend: usize) -> bool {
        let backend = &self.backends[backend];
        backend.is_up() || backend.is_last_resort()
    }

    /// May whoever waits for a backend wait for ever?
    pub fn is_silent(&self, backend: usize) -> bool {
        self.backends[backend].health.is_silent()
    }

    pub fn stats(&self, now_us: u64) -> RouterStats {
        let here = |(_, backend): &(usize, &Backend)| backend.membership != Membership::Gone;
        let backends = self.backends.iter().enumerate().filter(here);
        let backends = backends.map(|(index, backend)| BackendStats {
            up: backend.is_up(),
            membership: backend.membership.name(),
            in_flight: backend.in_flight,
            others_in_flight: backend.reported.others(now_us).requests,
            pool_tokens: backend.reported.pool_tokens(now_us).unwrap_or(self.engine_model.pool_tokens),
            pending_prefill_tokens: backend.pending_prefill_tokens,
            context_tokens: backend.context_tokens,
            index_chunks: self.index.len(index),
            ..backend.totals.clone()
        });
        let stores = self.stores.lens().map(|(name, chunks)| StoreStats { name: name.to_owned(), chunks });
        RouterStats {
            policy: self.policy.name(),
            decisions: self.turn,
            reasons: self.reasons,
            prompt_chunks: self.chunks.noted(),
            distinct_prompt_chunks: self.chunks.distinct(),
            backends: backends.collect(),
            stores: stores.collect(),
        }
    }

    /// The last decisions, oldest first.
    pub fn decisions(&self) -> Vec<Arc<Entry>> {
        self.decisions.entries()
    }
}

impl Assignment {
    /// The backend says the answer, and does not only compute the prompt for another one.
    pub fn says_answer(&self) -> bool {
        self.role != Role::Prefill
    }

    /// The answer is a stream. To be told before its end.
    pub fn is_streamed(&mut self) {
        self.is_stream = true;
    }

    /// Counts how long a whole answer took, if it is one that the client gets.
    fn count_times(&self, now_us: u64, usage: Option<Usage>, totals: &mut BackendStats) {
        let took_us = now_us.saturating_sub(self.assigned_us);
        let Some(first_byte_us) = self.first_byte_us.filter(|_| self.computed && self.says_answer()) else {
            return;
        };
        totals.request_seconds.observe(took_us as f64 / 1e6);
        if let Some(usage) = usage.filter(|_| self.is_stream) {
            totals.count_output_tokens(took_us.saturating_sub(first_byte_us), usage.completion_tokens);
        }
    }

    /// The prompt of a hand-over is computed, or will not be. Says whether that was noted.
    fn note_prefilled(&self, outcome: &Outcome) -> bool {
        let Outcome { prompt_tokens, cached_tokens, .. } = *outcome;
        let Some(after_us) = self.first_byte_us.filter(|_| self.computed) else { return false };
        self.decision.prefilled.set(PrefilledRecord { after_us, prompt_tokens, cached_tokens }).is_ok()
    }
}

/// Microseconds of work on a prompt, as they are summed up.
fn prefill_us(work: &Prefill) -> u64 {
    work.us().round().min(PREFILL_US_MAX) as u64
}

impl RoutingFacts {
    /// Bytes of the prompt and what stands before it that `chunks` chunks of the chain stand for.
    fn hit_bytes(&self, chunks: usize) -> usize {
        if chunks == 0 { 0 } else { self.preamble_bytes + chunks * CHUNK_BYTES }
    }
}

/// What an answer says was cached of its prompt.
#[derive(Debug, Clone, Copy)]
struct Cached {
    /// Bytes of the chain that the engine itself held, as far as is said.
    in_engine_bytes: usize,
    /// What was found in all.
    found: Found,
}

/// Learns from the usage of an answered request, and returns what was cached.
fn learn(
    ratio: &mut BytesPerToken,
    backend: &mut Backend,
    routing: &RoutingFacts,
    assignment: &Assignment,
    usage: Usage,
    outcome: &mut Outcome,
) -> Option<Cached> {
    outcome.prompt_tokens = Some(usage.prompt_tokens);
    outcome.completion_tokens = Some(usage.completion_tokens);
    let endpoint = routing.endpoint?;
    ratio.learn(&routing.length, usage.prompt_tokens);
    if assignment.role == Role::Decode {
        // What it had before it got the prompt from the other backend is not said.
        return None;
    }
    let in_engine = assignment.visit.predicted_chunks();
    let predicted = assignment.sought.as_ref().map_or(0, Sought::predicted_chunks).max(in_engine);
    let cached_tokens = backend.cached_tokens(endpoint, usage, predicted > 0)?;
    // This answer's own ratio, so that a wrong guess of the prompt's length is not taken for a
    // wrong hit.
    let bytes_per_token = routing.length.bytes as f64 / usage.prompt_tokens.max(1) as f64;
    let predicted_bytes = routing.hit_bytes(predicted);
    let predicted_tokens = (predicted_bytes as f64 / bytes_per_token.max(f64::MIN_POSITIVE)) as u64;
    outcome.predicted_tokens = Some(predicted_tokens);
    outcome.cached_tokens = Some(cached_tokens);
    let totals = &mut backend.totals;
    totals.prompt_tokens += usage.prompt_tokens;
    totals.cached_tokens += cached_tokens;
    totals.predicted_tokens += predicted_tokens;
    totals.over_predicted_tokens += predicted_tokens.saturating_sub(cached_tokens);
    totals.under_predicted_tokens += cached_tokens.saturating_sub(predicted_tokens);
    let bytes =
        |tokens: u64| ((tokens as f64 * bytes_per_token) as usize).saturating_sub(routing.preamble_bytes);
    let found = bytes(cached_tokens);
    // Without a store that the router knows of, what was loaded counts as the engine's own.
    let loaded_tokens = usage.loaded_tokens.filter(|_| assignment.sought.is_some());
    let in_engine_bytes = bytes(cached_tokens.saturating_sub(loaded_tokens.unwrap_or(0)));
    let in_store = match loaded_tokens {
        Some(tokens) => tokens > 0,
        // What the engine was not believed to hold itself.
        None => is_more(found / CHUNK_BYTES, in_engine),
    };
    Some(Cached { in_engine_bytes, found: Found { bytes: found, in_store } })
}

#[cfg(test)]
mod tests;
