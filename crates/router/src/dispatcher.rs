//! The router's state: the load, health and presumed cache of every backend, and what was decided.
//! It joins the policy, the indexes and the learned token ratio. It takes time as an argument.
//!
//! Every assignment is ended exactly once, with how it ended; until then it counts as load.

use crate::chain::{CHUNK_BYTES, Chain};
use crate::decisions::{Decisions, Entry, Outcome};
use crate::engine_metrics::EngineMetrics;
use crate::engine_model::EngineModel;
use crate::generations::Generations;
use crate::health::{Cause, Change, Failure, Thresholds};
use crate::policy::{Candidate, Policy, Request, View, choose};
use crate::prediction::predict;
use crate::prefill::Prefill;
use crate::prefix::{Bounds, PrefixIndex, Visit};
use crate::rank_events::{Dropped, Report};
use crate::reported_cache::Noted;
use crate::reported_load::{self, Load, Unread};
use crate::request::Endpoint;
use crate::shadow_cache::is_more;
use crate::slots::{MAX_ENGINES, Serving};
use crate::stats::{BackendStats, RouterStats, StoreStats};
use crate::store_index::{Found, Sought, StoreIndex};
use crate::tokens::{AnswerTokens, AveragePrefill, BytesPerToken, Length};
use crate::usage::Usage;
use backend::Backend;
use std::sync::{Arc, OnceLock};

mod backend;

pub use backend::Membership;

/// Longer than any prompt takes. An engine that counts absurdly many tokens must not make the sum
/// for all requests overflow.
const PREFILL_US_MAX: f64 = 1e12;
/// Chunks remembered per backend: 128 MiB of prompts (about 32 million tokens of text) in about 10
/// MiB.
const CHUNKS_PER_BACKEND: usize = 256 * 1024;
/// Of all together: as many as 64 may have.
const INDEX_BOUNDS: Bounds =
    Bounds { chunks_per_engine: CHUNKS_PER_BACKEND, chunks: 64 * CHUNKS_PER_BACKEND };
/// Chunks remembered per store: it is larger than an engine's memory, and several engines write to
/// it.
const CHUNKS_PER_STORE: usize = 1024 * 1024;

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
    tenant: u32,
}

#[derive(Debug)]
pub struct Dispatcher {
    policy: Policy,
    engine_model: EngineModel,
    /// By slot; empty where nobody is.
    names: Arc<[String]>,
    backends: Vec<Backend>,
    index: PrefixIndex,
    stores: StoreIndex,
    thresholds: Thresholds,
    bytes_per_token: BytesPerToken,
    answer_tokens: AnswerTokens,
    average_prefill: AveragePrefill,
    homes: Generations<Home>,
    decisions: Decisions,
    turn: u64,
}

impl Dispatcher {
    /// A dispatcher without backends.
    pub fn new(policy: Policy, engine_model: EngineModel, thresholds: Thresholds) -> Dispatcher {
        Dispatcher {
            policy,
            engine_model,
            index: PrefixIndex::new(INDEX_BOUNDS),
            stores: StoreIndex::new(CHUNKS_PER_STORE),
            thresholds,
            names: Arc::default(),
            backends: Vec::new(),
            bytes_per_token: BytesPerToken::default(),
            answer_tokens: AnswerTokens::default(),
            average_prefill: AveragePrefill::default(),
            homes: Generations::new(SESSIONS),
            decisions: Decisions::default(),
            turn: 0,
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
        let tenant = self.backends.get(slot).map_or(0, |former| former.tenant.wrapping_add(1));
        let backend = Backend::new(name, tenant, self.thresholds);
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
        let backend = &mut self.backends[slot];
        if backend.membership != Membership::Leaving || backend.in_flight > 0 {
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

    /// Chooses a backend that may be used and is not in `tried`, and counts the request as its
    /// load. `None`: there is none.
    pub fn assign(&mut self, now_us: u64, routing: &RoutingFacts, tried: &[usize]) -> Option<Assignment> {
        let input_tokens = self.bytes_per_token.estimate(&routing.length);
        let candidates = self.candidates(now_us, routing, input_tokens, tried);
        let view = View { candidates: &candidates, turn: self.turn, engine_model: &self.engine_model };
        let former_home = self.homes.get(routing.session);
        let is_there = |home: &Home| {
            let backend = &self.backends[home.slot];
            backend.tenant == home.tenant && backend.membership != Membership::Gone
        };
        let home = former_home.filter(is_there);
        let home = home.map(|home| home.slot);
        let request = Request { input_tokens, output_tokens: self.answer_tokens.estimate(), home };
        let policy = if routing.endpoint.is_some() { self.policy } else { Policy::LeastLoaded };
        let decision = choose(policy, &view, &request)?;
        let chosen = decision.chosen;
        let prefill = Prefill::new(&self.engine_model, &candidates[chosen], input_tokens);
        let prefill_us = prefill.us().round().min(PREFILL_US_MAX) as u64;
        let predicted = predict(&self.engine_model, &candidates[chosen], &request);
        let number = self.turn;
        self.turn += 1;
        if routing.endpoint.is_some() {
            let tenant = self.backends[chosen].tenant;
            self.homes.insert(routing.session, Home { slot: chosen, tenant });
            self.average_prefill.learn(prefill.tokens, prefill_us);
        }
        let backend = &mut self.backends[chosen];
        backend.in_flight += 1;
        backend.waiting += 1;
        backend.pending_prefill_tokens += prefill.tokens;
        backend.pending_prefill_us += prefill_us;
        backend.context_tokens += input_tokens;
        let attempt = tried.len() as u32 + 1;
        let session = routing.session;
        let entry = Arc::new(Entry {
            number,
            at_us: now_us,
            session,
            input_tokens,
            output_tokens: request.output_tokens,
            home,
            policy,
            attempt,
            decision,
            predicted,
            names: self.names.clone(),
            candidates,
            outcome: OnceLock::new(),
        });
        self.decisions.push(entry.clone());
        Some(Assignment {
            backend: chosen,
            decision: entry,
            assigned_us: now_us,
            first_byte_us: None,
            input_tokens,
            new_tokens: prefill.tokens,
            prefill_us,
            sought: self.stores.seek(chosen, &routing.chain, prefill.load_us > 0.0),
            visit: self.index.visit(chosen, &routing.chain),
            former_home,
            computed: false,
        })
    }

    fn candidates(
        &self,
        now_us: u64,
        routing: &RoutingFacts,
        input_tokens: u64,
        tried: &[usize],
    ) -> Vec<Candidate> {
        let bytes_per_token = self.bytes_per_token.ratio(routing.length.kind);
        let stored = self.stores.hits(&routing.chain);
        let tokens = |chunks: usize| {
            let bytes = routing.hit_bytes(chunks);
            ((bytes as f64 / bytes_per_token) as u64).min(input_tokens)
        };
        let serves = |index: usize| routing.serving.as_ref().is_none_or(|slots| slots.contains(index));
        let may_have = |index: usize| serves(index) && !tried.contains(&index);
        let mut backends = self.backends.iter().enumerate();
        let one_is_up = backends.any(|(index, backend)| backend.is_up() && may_have(index));
        let candidate = |(index, backend): (usize, &Backend)| {
            let usable = backend.is_up() || (!one_is_up && backend.is_last_resort());
            let others = backend.reported.others(now_us);
            let others_in_flight = u32::try_from(others.requests).unwrap_or(u32::MAX);
            let (others_tokens, others_us) = self.average_prefill.of(others.waiting);
            let pool_tokens = backend.reported.pool_tokens(now_us);
            Candidate {
                eligible: usable && may_have(index),
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
        if assignment.computed {
            backend.totals.first_byte_seconds.observe(waited_us as f64 / 1e6);
        }
    }

    /// Ends an assignment: its load is gone, and what its end teaches is learned.
    pub fn end(&mut self, routing: &RoutingFacts, assignment: Assignment, end: End) -> Ended {
        let index = assignment.backend;
        let backend = &mut self.backends[index];
        backend.in_flight -= 1;
        backend.context_tokens -= assignment.input_tokens;
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
                    self.answer_tokens.learn(usage.completion_tokens);
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
        // It ends once, so this sets what was not set.
        let _ = assignment.decision.outcome.set(outcome);
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
            self.forget_home(routing.session, index, assignment.former_home);
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

    /// One of a backend's ranks reports what its KV events say of its cache. That only lowers what
    /// is believed to be there: answers say what is.
    pub fn noted_events(
        &mut self,
        now_us: u64,
        slot: usize,
        rank: usize,
        ranks: usize,
        report: &Report,
    ) -> Noted {
        let backend = &mut self.backends[slot];
        let noted = backend.cache.note(now_us, rank, ranks, report);
        let held = backend.cache.held();
        let totals = &mut backend.totals;
        totals.kv_events.add(&report.counts);
        (totals.kv_events_followed, totals.kv_live_blocks) =
            (held.is_some(), held.map_or(0, |held| held.blocks));
        if noted.is_doubted {
            totals.kv_events.dropped[Dropped::Contradicted as usize] += report.counts.batches;
        } else if report.emptied {
            self.index.forget(slot);
        }
        match held {
            Some(held) => {
                let bytes_per_token = self.bytes_per_token.average();
                let chunks = |tokens: u64| (tokens as f64 * bytes_per_token) as usize / CHUNK_BYTES;
                let room = held.room_tokens.map(chunks);
                self.index.told(slot, chunks(report.stored_tokens), chunks(held.tokens), room);
            }
            None => self.index.untold(slot),
        }
        noted
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
            backends: backends.collect(),
            stores: stores.collect(),
        }
    }

    /// The last decisions, oldest first.
    pub fn decisions(&self) -> Vec<Arc<Entry>> {
        self.decisions.entries()
    }
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
