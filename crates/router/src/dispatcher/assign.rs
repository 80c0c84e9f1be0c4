//! How a request becomes a backend's load, or that of two where one hands its prompt over to the
//! other.

use super::hand_overs::{Chosen, Plan, Prefiller};
use super::{Assignment, Dispatcher, Home, Membership, Role, RoutingFacts, Unassigned, prefill_us};
use crate::decisions::{Entry, Outcome};
use crate::policy::{Policy, Request, View};
use crate::prediction::predict;
use crate::prefill::Prefill;
use crate::slo::RefusalReason;
use std::sync::{Arc, OnceLock};

impl Dispatcher {
    /// Chooses a backend that may be used and whose id is not in `tried`, and counts the request as
    /// its load. At the first attempt another backend may compute the prompt, if `may_hand_over`. A
    /// request that was tried already is not refused for its SLO.
    pub fn assign_with_prefiller(
        &mut self,
        now_us: u64,
        routing: &RoutingFacts,
        tried: &[u64],
        attempt: u32,
        may_hand_over: bool,
    ) -> Result<(Assignment, Option<(Assignment, Plan)>), Unassigned> {
        self.expire_held(now_us);
        if attempt == 1 {
            self.chunks.note(routing.chain.keys());
        }
        let (entry, prefiller) = self.decide(now_us, routing, tried, attempt, may_hand_over)?;
        let chosen = entry.decision.chosen;
        if routing.endpoint.is_some() {
            self.note_move(now_us, routing.session, entry.home, chosen);
        }
        let Some(prefiller) = prefiller else {
            let work = Prefill::new(&self.engine_model, &entry.candidates[chosen], entry.input_tokens);
            return Ok((self.open(routing, chosen, entry, Some(work), Role::Whole), None));
        };
        let decode = self.open(routing, chosen, entry, None, Role::Decode);
        let prefill = self.open_hand_over(routing, &decode, prefiller);
        Ok((decode, prefill))
    }

    /// Decides, and remembers it.
    fn decide(
        &mut self,
        now_us: u64,
        routing: &RoutingFacts,
        tried: &[u64],
        attempt: u32,
        may_hand_over: bool,
    ) -> Result<(Arc<Entry>, Option<Prefiller>), Unassigned> {
        let input_tokens = self.bytes_per_token.estimate(&routing.length);
        let candidates = self.candidates(now_us, routing, input_tokens, tried);
        let view = View { candidates: &candidates, turn: self.turn, engine_model: &self.engine_model };
        let home = self.home(routing.session).map(|home| home.slot);
        let request = Request { input_tokens, output_tokens: self.answer_tokens.estimate(), home };
        let policy = if routing.endpoint.is_some() { self.policy } else { Policy::LeastLoaded };
        let may_hand_over = may_hand_over && attempt == 1 && routing.endpoint.is_some();
        let session = may_hand_over.then_some(routing.session);
        let chosen = self.choose(now_us, policy, &view, &request, session, routing.slo);
        let Chosen { decision, too_late_us, options, prefill: prefiller } =
            chosen.ok_or(Unassigned::NoEngine)?;
        let mut predicted = predict(&self.engine_model, &candidates[decision.chosen], &request);
        if let Some(Prefiller { expected, .. }) = &prefiller {
            predicted.first_byte_us = expected.prefill_us.saturating_add(expected.hand_us);
        }
        let entry = Arc::new(Entry {
            number: self.turn,
            at_us: now_us,
            session: routing.session,
            input_tokens,
            output_tokens: request.output_tokens,
            home,
            policy,
            attempt,
            decision,
            predicted,
            slo: routing.slo,
            names: self.names.clone(),
            candidates,
            options,
            prefill: prefiller.as_ref().map(|prefiller| prefiller.slot),
            prefilled: OnceLock::new(),
            handed: OnceLock::new(),
            outcome: OnceLock::new(),
        });
        self.turn += 1;
        self.decisions.push(entry.clone());
        if let Some(earliest_us) = too_late_us.filter(|_| attempt == 1) {
            let refused = Some(RefusalReason::TtftSlo);
            // It has had none.
            let _ = entry.outcome.set(Outcome { refused, ..Outcome::default() });
            return Err(Unassigned::TooLate { decision: entry, earliest_us });
        }
        self.reasons[entry.decision.reason as usize] += 1;
        Ok((entry, prefiller))
    }

    /// The backend that a session had last, if it is still there.
    fn home(&self, session: u64) -> Option<Home> {
        let is_there = |home: &Home| {
            let backend = &self.backends[home.slot];
            backend.id == home.id && backend.membership != Membership::Gone
        };
        self.homes.get(session).filter(is_there)
    }

    /// Counts a request, and the work on its prompt, as a backend's load.
    pub(super) fn open(
        &mut self,
        routing: &RoutingFacts,
        slot: usize,
        decision: Arc<Entry>,
        work: Option<Prefill>,
        role: Role,
    ) -> Assignment {
        let former_home = self.homes.get(routing.session);
        let (new_tokens, prefill_us) = work.as_ref().map_or((0, 0), |work| (work.tokens, prefill_us(work)));
        if routing.endpoint.is_some() {
            if role != Role::Prefill {
                let id = self.backends[slot].id;
                self.homes.insert(routing.session, Home { slot, id });
            }
            if work.is_some() {
                self.average_prefill.learn(new_tokens, prefill_us);
            }
        }
        let backend = &mut self.backends[slot];
        backend.in_flight += 1;
        backend.waiting += 1;
        backend.pending_prefill_tokens += new_tokens;
        backend.pending_prefill_us += prefill_us;
        backend.context_tokens += decision.input_tokens;
        Assignment {
            backend: slot,
            assigned_us: decision.at_us,
            first_byte_us: None,
            input_tokens: decision.input_tokens,
            decision,
            new_tokens,
            prefill_us,
            sought: work.and_then(|work| self.stores.seek(slot, &routing.chain, work.load_us > 0.0)),
            visit: self.index.visit(slot, &routing.chain),
            former_home,
            computed: false,
            is_stream: false,
            role,
        }
    }
}
