//! The router's state: the load, health and presumed cache of every backend, and what was decided.
//! It joins the policy, the prefix index and the learned token ratio. It takes time as an argument.
//!
//! Every assignment is ended exactly once, with how it ended; until then it counts as load.

use crate::decisions::{DecisionRecord, Decisions, Entry, Outcome};
use crate::engine_model::EngineModel;
use crate::generations::Generations;
use crate::health::{Cause, Change, Failure, Health, Thresholds};
use crate::policy::{Candidate, Policy, Request, View, choose};
use crate::prediction::predict;
use crate::prefix::{CHUNK_BYTES, Chain, PrefixIndex, Visit};
use crate::request::Endpoint;
use crate::stats::{BackendStats, RouterStats};
use crate::tokens::{AnswerTokens, BytesPerToken, Length};
use crate::usage::Usage;
use std::sync::{Arc, OnceLock};

/// Longer than any prompt takes. An engine that counts absurdly many tokens must not make the sum
/// for all requests overflow.
const PREFILL_US_MAX: f64 = 1e12;
/// Chunks remembered per backend: 128 MiB of prompts (about 32 million tokens of text) in about 10
/// MiB.
const CHUNKS_PER_BACKEND: usize = 256 * 1024;

/// Sessions whose backend is remembered.
const SESSIONS: usize = 64 * 1024;

/// So many answers without cached tokens, to prompts that should have been cached, are told in the
/// log.
const SILENT_HITS: u32 = 8;

/// A set of backends, one bit each.
pub type BackendSet = u64;

/// More backends than a [`BackendSet`] has bits cannot be served.
pub const MAX_BACKENDS: usize = BackendSet::BITS as usize;

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
    pub serving: BackendSet,
}

/// A request on its way to a backend. To be given back with [`Dispatcher::end`].
#[derive(Debug)]
#[must_use = "an assignment that is not ended counts as load for ever"]
pub struct Assignment {
    /// Index of the backend.
    pub backend: usize,
    /// What was decided. It gets its outcome when the assignment ends.
    pub decision: Arc<Entry>,
    assigned_us: u64,
    first_byte_us: Option<u64>,
    input_tokens: u64,
    new_tokens: u64,
    prefill_us: u64,
    visit: Visit,
    /// The engine that the session had before.
    former_home: Option<usize>,
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

#[derive(Debug)]
pub struct Dispatcher {
    policy: Policy,
    engine_model: EngineModel,
    names: Arc<[String]>,
    backends: Vec<Backend>,
    index: PrefixIndex,
    bytes_per_token: BytesPerToken,
    answer_tokens: AnswerTokens,
    homes: Generations<usize>,
    decisions: Decisions,
    turn: u64,
}

#[derive(Debug)]
struct Backend {
    health: Health,
    in_flight: u32,
    pending_prefill_tokens: u64,
    pending_prefill_us: u64,
    context_tokens: u64,
    /// Calls whose answers have reported what was cached, one bit each.
    reports_cached: u8,
    /// Answers that should have reported it and did not.
    silent_hits: u32,
    totals: BackendStats,
}

impl Dispatcher {
    /// Backends with the given names, all up and idle. At most [`MAX_BACKENDS`] are used.
    pub fn new(
        policy: Policy,
        engine_model: EngineModel,
        names: Vec<String>,
        thresholds: Thresholds,
    ) -> Dispatcher {
        let backends = names.iter().take(MAX_BACKENDS).map(|name| Backend {
            health: Health::new(thresholds),
            in_flight: 0,
            pending_prefill_tokens: 0,
            pending_prefill_us: 0,
            context_tokens: 0,
            reports_cached: 0,
            silent_hits: 0,
            totals: BackendStats::new(name),
        });
        let backends: Vec<Backend> = backends.collect();
        Dispatcher {
            policy,
            engine_model,
            index: PrefixIndex::new(backends.len(), CHUNKS_PER_BACKEND),
            names: names.into(),
            backends,
            bytes_per_token: BytesPerToken::default(),
            answer_tokens: AnswerTokens::default(),
            homes: Generations::new(SESSIONS),
            decisions: Decisions::default(),
            turn: 0,
        }
    }

    /// Chooses a backend that may be used and is not in `tried`, and counts the request as its
    /// load. `None`: there is none.
    pub fn assign(&mut self, now_us: u64, routing: &RoutingFacts, tried: BackendSet) -> Option<Assignment> {
        let input_tokens = self.bytes_per_token.estimate(&routing.length);
        let candidates = self.candidates(routing, input_tokens, tried);
        let view = View { candidates: &candidates, turn: self.turn, engine_model: &self.engine_model };
        let home = self.homes.get(routing.session);
        let request = Request { input_tokens, output_tokens: self.answer_tokens.estimate(), home };
        let policy = if routing.endpoint.is_some() { self.policy } else { Policy::LeastLoaded };
        let decision = choose(policy, &view, &request)?;
        let chosen = decision.chosen;
        let hit_tokens = candidates[chosen].hit_tokens;
        let new_tokens = input_tokens.saturating_sub(hit_tokens).max(1);
        let prefill_us = self.engine_model.prefill_us(input_tokens, hit_tokens).round();
        let prefill_us = prefill_us.min(PREFILL_US_MAX) as u64;
        let predicted = predict(&self.engine_model, &candidates[chosen], &request);
        let number = self.turn;
        self.turn += 1;
        if routing.endpoint.is_some() {
            self.homes.insert(routing.session, chosen);
        }
        let backend = &mut self.backends[chosen];
        backend.in_flight += 1;
        backend.pending_prefill_tokens += new_tokens;
        backend.pending_prefill_us += prefill_us;
        backend.context_tokens += input_tokens;
        let attempt = tried.count_ones() + 1;
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
            new_tokens,
            prefill_us,
            visit: self.index.visit(chosen, &routing.chain),
            former_home: home,
            computed: false,
        })
    }

    fn candidates(&self, routing: &RoutingFacts, input_tokens: u64, tried: BackendSet) -> Vec<Candidate> {
        let bytes_per_token = self.bytes_per_token.ratio(routing.length.kind);
        let may_have = |index: usize| routing.serving & !tried & (1 << index) != 0;
        let mut backends = self.backends.iter().enumerate();
        let one_is_up = backends.any(|(index, backend)| backend.health.is_up() && may_have(index));
        let candidate = |(index, backend): (usize, &Backend)| {
            let hit_bytes = routing.hit_bytes(self.index.hit_chunks(index, &routing.chain));
            let usable = backend.health.is_up() || (!one_is_up && backend.health.is_last_resort());
            Candidate {
                eligible: usable && may_have(index),
                in_flight: backend.in_flight,
                pending_prefill_tokens: backend.pending_prefill_tokens,
                pending_prefill_us: backend.pending_prefill_us,
                context_tokens: backend.context_tokens,
                hit_tokens: ((hit_bytes as f64 / bytes_per_token) as u64).min(input_tokens),
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
        backend.release_prefill(assignment);
        if assignment.computed {
            backend.totals.first_byte_seconds.observe(waited_us as f64 / 1e6);
        }
    }

    /// Ends an assignment: its load is gone, and what its end teaches is learned.
    pub fn end(&mut self, routing: &RoutingFacts, assignment: Assignment, end: End) -> Option<Change> {
        let index = assignment.backend;
        let backend = &mut self.backends[index];
        backend.in_flight -= 1;
        backend.context_tokens -= assignment.input_tokens;
        if assignment.first_byte_us.is_none() {
            backend.release_prefill(&assignment);
        }
        let mut outcome = Outcome { first_byte_us: assignment.first_byte_us, ..Outcome::default() };
        let mut change = None;
        let mut cached_bytes = None;
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
                    cached_bytes =
                        learn(&mut self.bytes_per_token, backend, routing, &assignment, usage, &mut outcome);
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
            self.index.settle(assignment.visit, cached_bytes);
        } else {
            self.forget_home(routing.session, index, assignment.former_home);
            self.index.abandon(assignment.visit, &routing.chain);
        }
        self.apply(index, change)
    }

    /// A session that got no answer from a backend is where it was before.
    fn forget_home(&mut self, session: u64, backend: usize, former: Option<usize>) {
        if self.homes.get(session) != Some(backend) {
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
        let health = &self.backends[backend].health;
        health.is_up() || health.is_last_resort()
    }

    /// May whoever waits for a backend wait for ever?
    pub fn is_silent(&self, backend: usize) -> bool {
        self.backends[backend].health.is_silent()
    }

    pub fn stats(&self) -> RouterStats {
        let backends = self.backends.iter().enumerate().map(|(index, backend)| BackendStats {
            up: backend.health.is_up(),
            in_flight: backend.in_flight,
            pending_prefill_tokens: backend.pending_prefill_tokens,
            context_tokens: backend.context_tokens,
            index_chunks: self.index.len(index),
            ..backend.totals.clone()
        });
        RouterStats { policy: self.policy.name(), decisions: self.turn, backends: backends.collect() }
    }

    /// The last decisions, oldest first.
    pub fn decisions(&self) -> Vec<DecisionRecord> {
        self.decisions.records()
    }
}

impl Backend {
    /// Its prompt is computed, or never will be.
    fn release_prefill(&mut self, assignment: &Assignment) {
        self.pending_prefill_tokens -= assignment.new_tokens;
        self.pending_prefill_us -= assignment.prefill_us;
    }

    /// What of a prompt was cached. vLLM leaves the count out where it is zero, and everywhere
    /// unless it is asked to report it: what is left out means zero only where other answers to the
    /// same call have it.
    fn cached_tokens(&mut self, endpoint: Endpoint, usage: Usage, expected: bool) -> Option<u64> {
        let bit = 1 << endpoint as u8;
        if usage.cached_tokens.is_some() {
            self.reports_cached |= bit;
        } else if self.reports_cached & bit == 0 {
            self.totals.without_cached_tokens += 1;
            self.silent_hits = self.silent_hits.saturating_add(u32::from(expected));
            if expected && self.silent_hits == SILENT_HITS {
                let engine = &self.totals.name;
                tracing::warn!(engine, prompts = SILENT_HITS, "engine reports no cached tokens");
            }
            return None;
        }
        Some(usage.cached_tokens.unwrap_or(0))
    }
}

impl RoutingFacts {
    /// Bytes of the prompt and what stands before it that `chunks` chunks of the chain stand for.
    fn hit_bytes(&self, chunks: usize) -> usize {
        if chunks == 0 { 0 } else { self.preamble_bytes + chunks * CHUNK_BYTES }
    }
}

/// Learns from the usage of an answered request, and returns how many bytes of the chain were
/// cached.
fn learn(
    ratio: &mut BytesPerToken,
    backend: &mut Backend,
    routing: &RoutingFacts,
    assignment: &Assignment,
    usage: Usage,
    outcome: &mut Outcome,
) -> Option<usize> {
    outcome.prompt_tokens = Some(usage.prompt_tokens);
    outcome.completion_tokens = Some(usage.completion_tokens);
    let endpoint = routing.endpoint?;
    ratio.learn(&routing.length, usage.prompt_tokens);
    let cached_tokens = backend.cached_tokens(endpoint, usage, assignment.visit.predicted_chunks() > 0)?;
    // This answer's own ratio, so that a wrong guess of the prompt's length is not taken for a
    // wrong hit.
    let bytes_per_token = routing.length.bytes as f64 / usage.prompt_tokens.max(1) as f64;
    let predicted_bytes = routing.hit_bytes(assignment.visit.predicted_chunks());
    let predicted_tokens = (predicted_bytes as f64 / bytes_per_token.max(f64::MIN_POSITIVE)) as u64;
    outcome.predicted_tokens = Some(predicted_tokens);
    outcome.cached_tokens = Some(cached_tokens);
    let totals = &mut backend.totals;
    totals.prompt_tokens += usage.prompt_tokens;
    totals.cached_tokens += cached_tokens;
    totals.predicted_tokens += predicted_tokens;
    totals.over_predicted_tokens += predicted_tokens.saturating_sub(cached_tokens);
    totals.under_predicted_tokens += cached_tokens.saturating_sub(predicted_tokens);
    Some(((cached_tokens as f64 * bytes_per_token) as usize).saturating_sub(routing.preamble_bytes))
}

#[cfg(test)]
mod tests;
