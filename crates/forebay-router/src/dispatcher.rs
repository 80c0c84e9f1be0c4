//! The router's state: the load, health and presumed cache of every backend, and what was decided. It joins the policy,
//! the prefix index and the learned token ratio. It takes time as an argument and must never know sockets or HTTP.
//!
//! Every assignment is ended exactly once, with how it ended; until then it counts as load.

use crate::decisions::{DecisionRecord, Decisions, Entry, Outcome};
use crate::generations::Generations;
use crate::health::{Cause, Change, Failure, Health, Thresholds};
use crate::policy::{Candidate, Policy, Request, View, choose};
use crate::prefix::{CHUNK_BYTES, Chain, PrefixIndex, Visit};
use crate::request::Endpoint;
use crate::stats::{BackendStats, RouterStats};
use crate::tokens::{BytesPerToken, Length};
use crate::usage::Usage;

/// Chunks remembered per backend: 128 MiB of prompts (about 32 million tokens of text) in about 10 MiB.
const CHUNKS_PER_BACKEND: usize = 256 * 1024;

/// Sessions whose backend is remembered.
const SESSIONS: usize = 64 * 1024;

/// So many answers without cached tokens, to prompts that should have been cached, are told in the log.
const SILENT_HITS: u32 = 8;

/// A set of backends, one bit each.
pub type BackendSet = u64;

/// More backends than a [`BackendSet`] has bits cannot be served.
pub const MAX_BACKENDS: usize = BackendSet::BITS as usize;

/// What routing needs to know of a request.
#[derive(Debug)]
pub struct Ask {
    /// How long it is, as far as bytes tell.
    pub length: Length,
    /// Bytes that stand before the prompt and are cached with its beginning: tools and documents.
    pub lead_bytes: usize,
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
    decision: u64,
    assigned_us: u64,
    first_byte_us: Option<u64>,
    input_tokens: u64,
    new_tokens: u64,
    visit: Visit,
    /// The engine that the session had before.
    former_home: Option<usize>,
    /// An answer with a status below 400 has begun: its prompt is computed.
    computed: bool,
}

/// How an assignment ended.
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

/// The state. See the module.
#[derive(Debug)]
pub struct Dispatcher {
    policy: Policy,
    names: Vec<String>,
    backends: Vec<Backend>,
    index: PrefixIndex,
    bytes_per_token: BytesPerToken,
    homes: Generations<usize>,
    decisions: Decisions,
    turn: u64,
}

#[derive(Debug)]
struct Backend {
    health: Health,
    in_flight: u32,
    pending_prefill_tokens: u64,
    context_tokens: u64,
    /// Calls whose answers have reported what was cached, one bit each.
    reports_cached: u8,
    /// Answers that should have reported it and did not.
    silent_hits: u32,
    totals: BackendStats,
}

impl Dispatcher {
    /// Backends with the given names, all up and idle. At most [`MAX_BACKENDS`] are used.
    pub fn new(policy: Policy, names: Vec<String>, thresholds: Thresholds) -> Dispatcher {
        let backends = names.iter().take(MAX_BACKENDS).map(|name| Backend {
            health: Health::new(thresholds),
            in_flight: 0,
            pending_prefill_tokens: 0,
            context_tokens: 0,
            reports_cached: 0,
            silent_hits: 0,
            totals: BackendStats::new(name),
        });
        let backends: Vec<Backend> = backends.collect();
        Dispatcher {
            policy,
            index: PrefixIndex::new(backends.len(), CHUNKS_PER_BACKEND),
            names,
            backends,
            bytes_per_token: BytesPerToken::default(),
            homes: Generations::new(SESSIONS),
            decisions: Decisions::default(),
            turn: 0,
        }
    }

    /// Chooses a backend that may be used and is not in `tried`, and counts the request as its load. `None`: there is
    /// none.
    pub fn assign(&mut self, now_us: u64, ask: &Ask, tried: BackendSet) -> Option<Assignment> {
        let input_tokens = self.bytes_per_token.estimate(&ask.length);
        let candidates = self.candidates(ask, input_tokens, tried);
        let view = View { candidates: &candidates, turn: self.turn };
        let home = self.homes.get(ask.session);
        let request = Request { input_tokens, home };
        let policy = if ask.endpoint.is_some() { self.policy } else { Policy::LeastLoaded };
        let decision = choose(policy, &view, &request)?;
        let chosen = decision.chosen;
        let new_tokens = input_tokens.saturating_sub(candidates[chosen].hit_tokens).max(1);
        self.turn += 1;
        if ask.endpoint.is_some() {
            self.homes.insert(ask.session, chosen);
        }
        let backend = &mut self.backends[chosen];
        backend.in_flight += 1;
        backend.pending_prefill_tokens += new_tokens;
        backend.context_tokens += input_tokens;
        let attempt = tried.count_ones() + 1;
        let session = ask.session;
        let entry =
            Entry { at_us: now_us, session, input_tokens, attempt, decision, candidates, outcome: None };
        Some(Assignment {
            backend: chosen,
            decision: self.decisions.push(entry),
            assigned_us: now_us,
            first_byte_us: None,
            input_tokens,
            new_tokens,
            visit: self.index.visit(chosen, &ask.chain),
            former_home: home,
            computed: false,
        })
    }

    fn candidates(&self, ask: &Ask, input_tokens: u64, tried: BackendSet) -> Vec<Candidate> {
        let bytes_per_token = self.bytes_per_token.ratio(ask.length.kind);
        let may_have = |index: usize| ask.serving & !tried & (1 << index) != 0;
        let mut backends = self.backends.iter().enumerate();
        let one_is_up = backends.any(|(index, backend)| backend.health.is_up() && may_have(index));
        let candidate = |(index, backend): (usize, &Backend)| {
            let hit_bytes = ask.hit_bytes(self.index.hit_chunks(index, &ask.chain));
            let usable = backend.health.is_up() || (!one_is_up && backend.health.is_last_resort());
            Candidate {
                eligible: usable && may_have(index),
                in_flight: backend.in_flight,
                pending_prefill_tokens: backend.pending_prefill_tokens,
                context_tokens: backend.context_tokens,
                hit_tokens: ((hit_bytes as f64 / bytes_per_token) as u64).min(input_tokens),
            }
        };
        self.backends.iter().enumerate().map(candidate).collect()
    }

    /// The first byte of the answer's body has come, after this status. If it is below 400 the prompt is computed; other
    /// answers teach nothing.
    pub fn first_byte(&mut self, now_us: u64, assignment: &mut Assignment, status: u16) {
        if assignment.first_byte_us.is_some() {
            return;
        }
        let waited_us = now_us.saturating_sub(assignment.assigned_us);
        assignment.first_byte_us = Some(waited_us);
        assignment.computed = status < 400;
        let backend = &mut self.backends[assignment.backend];
        backend.pending_prefill_tokens -= assignment.new_tokens;
        if assignment.computed {
            backend.totals.first_byte_seconds.observe(waited_us as f64 / 1e6);
        }
    }

    /// Ends an assignment: its load is gone, and what its end teaches is learned.
    pub fn end(&mut self, ask: &Ask, assignment: Assignment, end: End) -> Option<Change> {
        let index = assignment.backend;
        let backend = &mut self.backends[index];
        backend.in_flight -= 1;
        backend.context_tokens -= assignment.input_tokens;
        if assignment.first_byte_us.is_none() {
            backend.pending_prefill_tokens -= assignment.new_tokens;
        }
        let mut outcome = Outcome {
            status: None,
            failure: None,
            cancelled: false,
            first_byte_us: assignment.first_byte_us,
            prompt_tokens: None,
            predicted_tokens: None,
            cached_tokens: None,
        };
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
                    cached_bytes =
                        learn(&mut self.bytes_per_token, backend, ask, &assignment, usage, &mut outcome);
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
        self.decisions.finish(assignment.decision, outcome);
        if assignment.computed {
            self.index.settle(assignment.visit, cached_bytes);
        } else {
            self.forget_home(ask.session, index, assignment.former_home);
            self.index.abandon(assignment.visit, &ask.chain);
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

    /// The state as numbers.
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
        self.decisions.records(&self.names)
    }
}

impl Backend {
    /// What of a prompt was cached. vLLM leaves the count out where it is zero, and everywhere unless it is asked to
    /// report it: what is left out means zero only where other answers to the same call have it.
    fn cached_tokens(&mut self, endpoint: Endpoint, usage: Usage, expected: bool) -> Option<u64> {
        let bit = 1 << endpoint as u8;
        if usage.cached_tokens.is_some() {
            self.reports_cached |= bit;
        } else if self.reports_cached & bit == 0 {
            self.totals.without_cached_tokens += 1;
            self.silent_hits = self.silent_hits.saturating_add(u32::from(expected));
            if expected && self.silent_hits == SILENT_HITS {
                tracing::warn!(
                    engine = self.totals.name,
                    "the engine has reported cached tokens of none of {SILENT_HITS} prompts that it should have held, \
                     so the router cannot learn what it keeps: start vLLM with --enable-prompt-tokens-details, SGLang \
                     with --enable-cache-report"
                );
            }
            return None;
        }
        Some(usage.cached_tokens.unwrap_or(0))
    }
}

impl Ask {
    /// Bytes of the prompt and what stands before it that `chunks` chunks of the chain stand for.
    fn hit_bytes(&self, chunks: usize) -> usize {
        if chunks == 0 { 0 } else { self.lead_bytes + chunks * CHUNK_BYTES }
    }
}

/// Learns from the usage of an answered request, and returns how many bytes of the chain were cached.
fn learn(
    ratio: &mut BytesPerToken,
    backend: &mut Backend,
    ask: &Ask,
    assignment: &Assignment,
    usage: Usage,
    outcome: &mut Outcome,
) -> Option<usize> {
    outcome.prompt_tokens = Some(usage.prompt_tokens);
    let endpoint = ask.endpoint?;
    ratio.learn(&ask.length, usage.prompt_tokens);
    let cached_tokens = backend.cached_tokens(endpoint, usage, assignment.visit.predicted_chunks() > 0)?;
    // This answer's own ratio, so that a wrong guess of the prompt's length is not taken for a wrong hit.
    let bytes_per_token = ask.length.bytes as f64 / usage.prompt_tokens.max(1) as f64;
    let predicted_bytes = ask.hit_bytes(assignment.visit.predicted_chunks());
    let predicted_tokens = (predicted_bytes as f64 / bytes_per_token.max(f64::MIN_POSITIVE)) as u64;
    outcome.predicted_tokens = Some(predicted_tokens);
    outcome.cached_tokens = Some(cached_tokens);
    let totals = &mut backend.totals;
    totals.prompt_tokens += usage.prompt_tokens;
    totals.cached_tokens += cached_tokens;
    totals.predicted_tokens += predicted_tokens;
    totals.over_predicted_tokens += predicted_tokens.saturating_sub(cached_tokens);
    totals.under_predicted_tokens += cached_tokens.saturating_sub(predicted_tokens);
    Some(((cached_tokens as f64 * bytes_per_token) as usize).saturating_sub(ask.lead_bytes))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::request::PromptKind;
    use proptest::prelude::*;

    fn ask(session: u64, bytes: usize) -> Ask {
        let prompt = vec![session as u8; bytes];
        let chain = Chain::new(1, &prompt);
        let length = Length { kind: PromptKind::Text, bytes, media: 0 };
        let endpoint = Some(Endpoint::Completions);
        Ask { length, lead_bytes: 0, chain, session, endpoint, serving: BackendSet::MAX }
    }

    const THREE: Thresholds = Thresholds { eject_after: 3, readmit_after: 1 };

    fn two(policy: Policy) -> Dispatcher {
        Dispatcher::new(policy, vec!["a".into(), "b".into()], THREE)
    }

    fn answered(prompt_tokens: u64, cached_tokens: u64) -> End {
        let usage = Usage { prompt_tokens, completion_tokens: 1, cached_tokens: Some(cached_tokens) };
        End::Answered { status: 200, usage: Some(usage) }
    }

    #[test]
    fn a_session_returns_to_the_backend_that_holds_its_prefix() {
        for policy in [Policy::SessionSticky, Policy::Linear, Policy::Lmetric, Policy::Lpwl] {
            let mut dispatcher = two(policy);
            let mut homes = Vec::new();
            for turn in 0..4 {
                for session in [1, 2] {
                    let ask = ask(session, 40_000 + 4_000 * turn);
                    let mut assignment = dispatcher.assign(0, &ask, 0).unwrap();
                    dispatcher.first_byte(5, &mut assignment, 200);
                    homes.push(assignment.backend);
                    dispatcher.end(&ask, assignment, End::Answered { status: 200, usage: None });
                }
            }
            assert!(homes.chunks(2).all(|pair| pair == &homes[..2]), "{policy}: {homes:?}");
        }
    }

    #[test]
    fn pending_tokens_are_released_at_the_first_byte_and_load_at_the_end() {
        let mut dispatcher = two(Policy::Lpwl);
        let ask = ask(1, 4_000);
        let mut assignment = dispatcher.assign(0, &ask, 0).unwrap();
        let index = assignment.backend;
        let load = |dispatcher: &Dispatcher| {
            let backend = &dispatcher.stats().backends[index];
            (backend.in_flight, backend.pending_prefill_tokens, backend.context_tokens)
        };
        assert_eq!(load(&dispatcher), (1, 1_000, 1_000));
        dispatcher.first_byte(10, &mut assignment, 200);
        dispatcher.first_byte(20, &mut assignment, 200);
        assert_eq!(load(&dispatcher), (1, 0, 1_000));
        dispatcher.end(&ask, assignment, End::Cancelled);
        assert_eq!(load(&dispatcher), (0, 0, 0));
    }

    #[test]
    fn a_backend_that_was_tried_is_not_tried_again_and_none_left_is_none() {
        let mut dispatcher = two(Policy::RoundRobin);
        let ask = ask(1, 100);
        let first = dispatcher.assign(0, &ask, 0).unwrap();
        let second = dispatcher.assign(0, &ask, 1 << first.backend).unwrap();
        assert_ne!(first.backend, second.backend);
        assert!(dispatcher.assign(0, &ask, 0b11).is_none());
        for assignment in [first, second] {
            dispatcher.end(&ask, assignment, End::Failed(Failure::Refused));
        }
        assert!(dispatcher.assign(0, &ask, 0).is_none(), "both are ejected");
        assert_eq!(dispatcher.probed(1, Ok(())), Some(Change::Readmitted));
        let third = dispatcher.assign(0, &ask, 0).unwrap();
        assert_eq!(third.backend, 1);
        dispatcher.end(&ask, third, End::Cancelled);
    }

    #[test]
    fn the_prediction_error_is_counted_and_falls_after_correction() {
        let mut dispatcher = Dispatcher::new(Policy::Lpwl, vec!["a".into()], THREE);
        let mut over = Vec::new();
        for turn in 0..12_usize {
            let before = dispatcher.stats().backends[0].over_predicted_tokens;
            for session in 1..4 {
                let ask = ask(session, 40_000 + 2_000 * turn);
                let mut assignment = dispatcher.assign(0, &ask, 0).unwrap();
                dispatcher.first_byte(1, &mut assignment, 200);
                // An engine that never has anything cached.
                dispatcher.end(&ask, assignment, answered(10_000 + 500 * turn as u64, 0));
            }
            over.push(dispatcher.stats().backends[0].over_predicted_tokens - before);
        }
        assert!(over[1] > 10_000, "{over:?}");
        assert!(over[6..].iter().all(|&tokens| tokens < over[1] / 20), "{over:?}");
        let record = dispatcher.decisions().pop().unwrap();
        let outcome = record.outcome.unwrap();
        assert_eq!((outcome.cached_tokens, outcome.prompt_tokens), (Some(0), Some(15_500)));
    }

    #[test]
    fn an_engine_that_does_not_report_cached_tokens_is_counted_and_teaches_no_misses() {
        let mut dispatcher = Dispatcher::new(Policy::Lpwl, vec!["a".into()], THREE);
        let mut answer = |cached_tokens| {
            let ask = ask(1, 40_000);
            let mut assignment = dispatcher.assign(0, &ask, 0).unwrap();
            dispatcher.first_byte(1, &mut assignment, 200);
            let usage = Usage { prompt_tokens: 10_000, completion_tokens: 1, cached_tokens };
            dispatcher.end(&ask, assignment, End::Answered { status: 200, usage: Some(usage) });
            let totals = dispatcher.stats().backends.remove(0);
            (totals.without_cached_tokens, totals.over_predicted_tokens > 0)
        };
        for asked in 1..20 {
            assert_eq!(answer(None), (asked, false));
        }
        assert_eq!(answer(Some(9_900)).0, 19);
        assert_eq!(answer(None), (19, true), "vLLM leaves out a zero: now that is known");
    }

    #[test]
    fn requests_by_load_go_to_the_idlest_that_serve_them_and_teach_nothing() {
        let mut dispatcher =
            Dispatcher::new(Policy::SessionSticky, vec!["a".into(), "b".into(), "c".into()], THREE);
        let by_load = |serving| Ask { endpoint: None, serving, ..ask(1, 0) };
        let held: Vec<(Ask, Assignment)> = [0b111, 0b111, 0b111, 0b011, 0b010, 0b001]
            .map(by_load)
            .map(|ask| {
                let assignment = dispatcher.assign(0, &ask, 0).unwrap();
                assert_ne!(ask.serving & (1 << assignment.backend), 0);
                (ask, assignment)
            })
            .into();
        let in_flight =
            |dispatcher: &Dispatcher| dispatcher.stats().backends.into_iter().map(|b| b.in_flight);
        assert_eq!(in_flight(&dispatcher).sum::<u32>(), 6);
        assert!(in_flight(&dispatcher).all(|requests| (1..=3).contains(&requests)));
        assert!(dispatcher.assign(0, &by_load(0b1000), 0).is_none());
        for (ask, assignment) in held {
            dispatcher.end(&ask, assignment, answered(7, 3));
        }
        let taught = dispatcher
            .stats()
            .backends
            .iter()
            .map(|b| b.prompt_tokens + b.without_cached_tokens)
            .sum::<u64>();
        assert_eq!((taught, in_flight(&dispatcher).sum::<u32>()), (0, 0));
    }

    #[test]
    fn an_answer_of_400_and_more_teaches_nothing_and_makes_no_home() {
        for status in [400, 404, 429, 500, 503] {
            for policy in Policy::ALL {
                let mut dispatcher = two(policy);
                let known = ask(1, 40_000);
                let mut assignment = dispatcher.assign(0, &known, 0).unwrap();
                let home = assignment.backend;
                dispatcher.first_byte(1, &mut assignment, 200);
                dispatcher.end(&known, assignment, answered(10_000, 0));
                let state = |dispatcher: &Dispatcher| {
                    let backends = dispatcher.stats().backends.into_iter();
                    let indexed: Vec<usize> = backends.map(|backend| backend.index_chunks).collect();
                    let homes = [1, 2].map(|session| dispatcher.homes.get(session));
                    (indexed, homes, dispatcher.bytes_per_token.ratio(PromptKind::Text))
                };
                let before = state(&dispatcher);
                for (session, bytes) in [(1, 60_000), (2, 30_000)] {
                    let ask = ask(session, bytes);
                    let mut assignment = dispatcher.assign(2, &ask, 1 << home).unwrap();
                    dispatcher.first_byte(3, &mut assignment, status);
                    let usage = Usage { prompt_tokens: 7, completion_tokens: 0, cached_tokens: Some(7) };
                    dispatcher.end(&ask, assignment, End::Answered { status, usage: Some(usage) });
                }
                assert_eq!(state(&dispatcher), before, "{policy} {status}");
                assert_eq!(dispatcher.stats().backends[1 - home].first_byte_seconds.sum, 0.0);
            }
        }
    }

    #[test]
    fn one_client_whose_requests_fail_does_not_take_all_engines_from_the_others() {
        let mut dispatcher = two(Policy::Lpwl);
        let bad = ask(1, 100);
        for _ in 0..20 {
            let assignment = dispatcher.assign(0, &bad, 0).unwrap();
            dispatcher.end(&bad, assignment, End::Answered { status: 500, usage: None });
        }
        assert!(dispatcher.stats().backends.iter().all(|backend| !backend.up));
        let good = ask(2, 100);
        let assignment = dispatcher.assign(0, &good, 0).unwrap();
        dispatcher.end(&good, assignment, End::Cancelled);
        dispatcher.probed(0, Ok(()));
        dispatcher.probed(0, Ok(()));
        for _ in 0..4 {
            let assignment = dispatcher.assign(0, &good, 0).unwrap();
            assert_eq!(assignment.backend, 0, "one that is up comes before one that is not");
            dispatcher.end(&good, assignment, End::Cancelled);
        }
    }

    #[test]
    fn tools_before_a_prompt_are_part_of_its_length_and_of_a_hit() {
        let mut dispatcher = two(Policy::Lpwl);
        let mut ask = ask(1, 8_192);
        ask.lead_bytes = 40_000;
        ask.length.bytes += ask.lead_bytes;
        for _ in 0..3 {
            let mut assignment = dispatcher.assign(0, &ask, 0).unwrap();
            let cached = if assignment.visit.predicted_chunks() > 0 { 12_000 } else { 0 };
            dispatcher.first_byte(1, &mut assignment, 200);
            dispatcher.end(&ask, assignment, answered(12_048, cached));
        }
        let record = dispatcher.decisions().pop().unwrap();
        let outcome = record.outcome.unwrap();
        assert!(outcome.predicted_tokens.unwrap().abs_diff(12_000) < 100, "{outcome:?}");
        assert!(record.input_tokens.abs_diff(12_048) < 200, "{}", record.input_tokens);
    }

    #[test]
    fn a_restarted_backend_is_not_believed_to_hold_anything() {
        let mut dispatcher = two(Policy::Lpwl);
        let ask = ask(1, 40_000);
        let mut assignment = dispatcher.assign(0, &ask, 0).unwrap();
        let home = assignment.backend;
        dispatcher.first_byte(1, &mut assignment, 200);
        dispatcher.end(&ask, assignment, End::Answered { status: 200, usage: None });
        assert!(dispatcher.stats().backends[home].index_chunks > 0);
        assert_eq!(
            dispatcher.probed(home, Err(Failure::Refused)),
            Some(Change::Ejected { cause: Cause::Gone, last: Failure::Refused })
        );
        assert_eq!(dispatcher.stats().backends[home].index_chunks, 0);
    }

    #[test]
    fn a_backend_that_was_out_already_when_its_process_ended_holds_nothing_either() {
        let mut dispatcher = two(Policy::Lpwl);
        let ask = ask(1, 40_000);
        let mut assignment = dispatcher.assign(0, &ask, 0).unwrap();
        let home = assignment.backend;
        dispatcher.first_byte(1, &mut assignment, 200);
        dispatcher.end(&ask, assignment, End::Answered { status: 200, usage: None });
        for _ in 0..3 {
            dispatcher.probed(home, Err(Failure::FirstByteTimeout));
        }
        assert!(dispatcher.is_silent(home) && dispatcher.stats().backends[home].index_chunks > 0);
        let gone = Some(Change::StillDown { cause: Cause::Gone });
        assert_eq!(dispatcher.probed(home, Err(Failure::Refused)), gone);
        let backend = &dispatcher.stats().backends[home];
        assert_eq!((backend.index_chunks, backend.ejections), (0, 1));
    }

    proptest! {
        #[test]
        fn load_is_never_lost_nor_left_behind(
            steps in prop::collection::vec((0..4_u8, 0..9_000_usize, 0..5_u8), 0..120),
            policy in prop::sample::select(Policy::ALL.to_vec()),
        ) {
            let names = (0..3).map(|index| index.to_string()).collect();
            let thresholds = Thresholds { eject_after: 2, readmit_after: 1 };
            let mut dispatcher = Dispatcher::new(policy, names, thresholds);
            let mut under_way: Vec<(Ask, Assignment)> = Vec::new();
            for (action, bytes, detail) in steps {
                match action {
                    0 | 1 => {
                        let ask = ask(u64::from(detail), bytes);
                        if let Some(assignment) = dispatcher.assign(0, &ask, u64::from(detail) & 0b11) {
                            prop_assert!(dispatcher.is_usable(assignment.backend));
                            under_way.push((ask, assignment));
                        }
                    }
                    2 if !under_way.is_empty() => {
                        let place = bytes % under_way.len();
                        dispatcher.first_byte(9, &mut under_way[place].1, 200);
                    }
                    _ if !under_way.is_empty() => {
                        let (ask, assignment) = under_way.swap_remove(bytes % under_way.len());
                        let end = match detail {
                            0 => End::Cancelled,
                            1 => End::Failed(Failure::Closed),
                            2 => End::Answered { status: 500, usage: None },
                            _ => answered(bytes as u64, u64::from(detail)),
                        };
                        dispatcher.end(&ask, assignment, end);
                    }
                    _ => {
                        dispatcher.probed(bytes % 3, Ok(()));
                    }
                }
                let in_flight: u32 = dispatcher.stats().backends.iter().map(|backend| backend.in_flight).sum();
                prop_assert_eq!(in_flight as usize, under_way.len());
            }
            for (ask, assignment) in under_way {
                dispatcher.end(&ask, assignment, End::Cancelled);
            }
            for backend in dispatcher.stats().backends {
                prop_assert_eq!((backend.in_flight, backend.pending_prefill_tokens, backend.context_tokens), (0, 0, 0));
            }
        }
    }
}
