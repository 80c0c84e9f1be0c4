//! The books of hand-overs: which are under way, whose blocks wait at their prefillers, and which
//! engines have failed in them. It takes time as an argument.

use super::{Assignment, Dispatcher, End, Role, RoutingFacts};
use crate::decisions::{Entry, HandedRecord};
use crate::elastic::{Choice, ElasticDecision, Fleet, KvNetwork, WeighedOption, choose_elastic};
use crate::hand_over::{Expected, Fault, HandOverEnd, Protocol};
use crate::policy::{Candidate, Decision, Policy, Reason, Request, View};
use crate::prefill::Prefill;
use crate::slo::{Slo, Within, choose_within};
use crate::transfers::{TransferKind, Transfers};
use std::sync::Arc;

/// An engine that has failed in a hand-over is in none for this time.
const PAUSE_US: u64 = 10_000_000;
/// One that never was in one that went well, and failed so often, is in none any more.
const FAILURES_MAX: u32 = 3;

/// How engines hand prompts over.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct HandOverConfig {
    pub protocol: Protocol,
    /// What the KV goes over.
    pub network: KvNetwork,
}

#[derive(Debug)]
pub struct HandOvers {
    config: HandOverConfig,
    transfers: Transfers,
    open: Vec<Open>,
    held: Vec<Held>,
}

/// A hand-over under way.
#[derive(Debug)]
struct Open {
    number: u64,
    prefill: usize,
}

/// A prompt that a prefiller has computed, and keeps.
#[derive(Debug)]
struct Held {
    number: u64,
    slot: usize,
    id: u64,
    tokens: u64,
    until_us: u64,
}

/// How an engine did in hand-overs.
#[derive(Debug, Default)]
pub struct Partner {
    has_done: bool,
    /// In a row.
    failures: u32,
    not_before_us: u64,
}

/// A hand-over as it was decided. To be given back with [`Dispatcher::hand_over_ended`].
#[derive(Debug)]
pub struct Plan {
    pub decision: Arc<Entry>,
    pub prefill: usize,
    pub decode: usize,
    pub expected: Expected,
    /// It is the one that is tried after many were predicted badly.
    is_tried: bool,
}

/// What came of the end of a hand-over.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct HandOverEnded {
    /// The engine that takes no part in others any more, if one does not.
    pub barred: Option<usize>,
    /// It was the last that a prefiller had to do that was to leave.
    pub is_gone: bool,
}

/// What was decided, by which of the ways.
pub(super) struct Chosen {
    pub decision: Decision,
    /// Without hope to keep to its SLO: when its first token would come at the earliest.
    pub too_late_us: Option<u64>,
    pub options: Vec<WeighedOption>,
    /// The engine that computes the prompt for the chosen one.
    pub prefill: Option<Prefiller>,
}

/// An engine that is to compute a prompt for another one.
pub(super) struct Prefiller {
    pub slot: usize,
    pub work: Prefill,
    pub expected: Expected,
}

impl Partner {
    fn may_take_part(&self, now_us: u64) -> bool {
        now_us >= self.not_before_us && (self.has_done || self.failures < FAILURES_MAX)
    }

    /// Says whether it takes no part any more.
    fn failed(&mut self, now_us: u64) -> bool {
        self.failures = self.failures.saturating_add(1);
        self.not_before_us = now_us + PAUSE_US;
        !self.has_done && self.failures == FAILURES_MAX
    }

    fn has_done_it(&mut self) {
        *self = Partner { has_done: true, ..Partner::default() };
    }
}

impl HandOvers {
    pub fn new(config: HandOverConfig) -> HandOvers {
        HandOvers { config, transfers: Transfers::default(), open: Vec::new(), held: Vec::new() }
    }

    /// Whether a prompt that this engine computes, or has computed, has yet to be handed over.
    pub(super) fn are_open_at(&self, slot: usize) -> bool {
        self.open.iter().any(|open| open.prefill == slot)
    }

    fn of_prefillers(&self, engines: usize) -> Vec<u32> {
        let mut counts = vec![0; engines];
        self.open.iter().for_each(|open| counts[open.prefill] += 1);
        counts
    }
}

impl Dispatcher {
    /// The same dispatcher, which hands prompts over where that is worth it.
    pub fn with_hand_overs(self, config: HandOverConfig) -> Dispatcher {
        Dispatcher { hand_overs: Some(HandOvers::new(config)), ..self }
    }

    /// Chooses an engine, or two for a request of this session. One with SLOs is placed: when a
    /// hand-over would keep to them is not known.
    pub(super) fn choose(
        &self,
        now_us: u64,
        policy: Policy,
        view: &View,
        request: &Request,
        session: Option<u64>,
        slo: Slo,
    ) -> Option<Chosen> {
        let session = session.filter(|_| slo.is_empty());
        let (Some(hand_overs), Some(session)) = (&self.hand_overs, session) else {
            let Within { decision, too_late_us } = choose_within(policy, view, request, slo)?;
            return Some(Chosen { decision, too_late_us, options: Vec::new(), prefill: None });
        };
        let waiting: Vec<u32> = self.backends.iter().map(|backend| backend.waiting(now_us)).collect();
        let barred: Vec<usize> = (0..self.backends.len())
            .filter(|&slot| !self.backends[slot].partner.may_take_part(now_us))
            .collect();
        let fleet = Fleet {
            view: *view,
            waiting: &waiting,
            hand_overs: &hand_overs.of_prefillers(self.backends.len()),
            network: hand_overs.config.network,
            kinds: &[TransferKind::HandOver],
            // What an engine can load from where others put it, `stored_tokens` has already.
            prefillers_pull: false,
            barred: &barred,
        };
        let ElasticDecision { choice, own_s, placed, options, .. } =
            choose_elastic(&fleet, request, &hand_overs.transfers, session, now_us)?;
        let Choice::HandOver { prefill, decode } = choice else {
            return Some(Chosen { decision: placed, too_late_us: None, options, prefill: None });
        };
        let at = &view.candidates[prefill];
        let work = Prefill::new(view.engine_model, at, request.input_tokens);
        let prefill_us = at.pending_prefill_us.saturating_add(work.us() as u64);
        let hand_us = ((own_s * 1e6) as u64).saturating_sub(prefill_us);
        let decision = Decision { chosen: decode, reason: Reason::HandOver, ..placed };
        let prefill = Prefiller { slot: prefill, work, expected: Expected { prefill_us, hand_us } };
        Some(Chosen { decision, too_late_us: None, options, prefill: Some(prefill) })
    }

    /// Counts the prompt of a hand-over as its prefiller's load.
    pub(super) fn open_hand_over(
        &mut self,
        routing: &RoutingFacts,
        decode: &Assignment,
        prefiller: Prefiller,
    ) -> Option<(Assignment, Plan)> {
        let hand_overs = self.hand_overs.as_mut()?;
        let is_tried = hand_overs.transfers.started(TransferKind::HandOver);
        let Prefiller { slot, work, expected } = prefiller;
        hand_overs.open.push(Open { number: decode.decision.number, prefill: slot });
        let entry = decode.decision.clone();
        let plan =
            Plan { decision: entry.clone(), prefill: slot, decode: decode.backend, expected, is_tried };
        Some((self.open(routing, slot, entry, Some(work), Role::Prefill), plan))
    }

    /// The decoder of a hand-over computes the prompt itself.
    pub fn computes_itself(&mut self, assignment: &mut Assignment) {
        if assignment.role != Role::Decode {
            return;
        }
        assignment.role = Role::Whole;
        let candidates: &[Candidate] = &assignment.decision.candidates;
        let work = Prefill::new(&self.engine_model, &candidates[assignment.backend], assignment.input_tokens);
        if assignment.first_byte_us.is_none() {
            (assignment.new_tokens, assignment.prefill_us) = (work.tokens, super::prefill_us(&work));
            let backend = &mut self.backends[assignment.backend];
            backend.pending_prefill_tokens += assignment.new_tokens;
            backend.pending_prefill_us += assignment.prefill_us;
        }
    }

    /// A session's requests go elsewhere from now on.
    pub(super) fn note_move(&mut self, now_us: u64, session: u64, from: Option<usize>, to: usize) {
        if let (Some(hand_overs), Some(from)) = (&mut self.hand_overs, from.filter(|&from| from != to)) {
            hand_overs.transfers.moved(session, from, now_us);
        }
    }

    /// Whether a prefiller keeps the blocks of a prompt that it has computed: its hand-over is
    /// under way. They count as used until it has ended, or the lease.
    pub(super) fn keeps_blocks(&mut self, assignment: &Assignment, end: &End) -> bool {
        let Some(hand_overs) = &mut self.hand_overs else { return false };
        let number = assignment.decision.number;
        let is_computed = matches!(end, End::Answered { status, .. } if *status < 400);
        let is_open = hand_overs.open.iter().any(|open| open.number == number);
        if assignment.role != Role::Prefill || !is_computed || !is_open {
            return false;
        }
        let answered_us = assignment.assigned_us + assignment.first_byte_us.unwrap_or(0);
        let lease_us = hand_overs.config.protocol.lease().as_micros() as u64;
        let slot = assignment.backend;
        hand_overs.held.push(Held {
            number,
            slot,
            id: self.backends[slot].id,
            tokens: assignment.input_tokens,
            until_us: answered_us.saturating_add(lease_us),
        });
        true
    }

    /// Ends a hand-over. `first_byte_s` is how long the client waited, if that can be seen.
    pub fn hand_over_ended(
        &mut self,
        now_us: u64,
        plan: &Plan,
        end: HandOverEnd,
        first_byte_s: Option<f64>,
    ) -> HandOverEnded {
        let Some(hand_overs) = self.hand_overs.as_mut() else { return HandOverEnded::default() };
        let number = plan.decision.number;
        hand_overs.open.retain(|open| open.number != number);
        let kind = TransferKind::HandOver;
        let predicted_s = plan.decision.predicted.first_byte_us as f64 / 1e6;
        let elapsed_s = now_us.saturating_sub(plan.decision.at_us) as f64 / 1e6;
        match (end.fault(), first_byte_s) {
            // One that failed is as bad as one that took twice as long, at least.
            (Some(_), _) => hand_overs.transfers.ended(
                kind,
                plan.is_tried,
                predicted_s,
                elapsed_s.max(2.0 * predicted_s),
                now_us,
            ),
            (None, Some(first_byte_s)) => {
                hand_overs.transfers.ended(kind, plan.is_tried, predicted_s, first_byte_s, now_us);
            }
            (None, None) => hand_overs.transfers.untold(kind, plan.is_tried),
        }
        // Without parameters there is nothing that anybody could fetch.
        if matches!(end, HandOverEnd::Handed | HandOverEnd::NoParameters) {
            self.release_held(|held| held.number == number);
        }
        self.backends[plan.prefill].totals.hand_overs[end as usize] += 1;
        // It ends once, so this sets what was not set.
        let _ = plan.decision.handed.set(HandedRecord { end, after_us: (elapsed_s * 1e6) as u64 });
        let barred = self.note_partners(now_us, plan, end);
        HandOverEnded { barred, is_gone: self.free_if_left(plan.prefill) }
    }

    fn note_partners(&mut self, now_us: u64, plan: &Plan, end: HandOverEnd) -> Option<usize> {
        let at_fault = match end.fault() {
            Some(Fault::Prefiller) => plan.prefill,
            Some(Fault::Decoder) => plan.decode,
            None => {
                if end == HandOverEnd::Handed {
                    [plan.prefill, plan.decode]
                        .iter()
                        .for_each(|&slot| self.backends[slot].partner.has_done_it());
                }
                return None;
            }
        };
        self.backends[at_fault].partner.failed(now_us).then_some(at_fault)
    }

    /// Blocks whose lease has ended are free.
    pub fn expire_held(&mut self, now_us: u64) {
        self.release_held(|held| held.until_us <= now_us);
    }

    fn release_held(&mut self, is_released: impl Fn(&Held) -> bool) {
        let Some(hand_overs) = &mut self.hand_overs else { return };
        for held in hand_overs.held.extract_if(.., |held| is_released(held)) {
            let backend = &mut self.backends[held.slot];
            // Another engine may have the slot by now.
            if backend.id == held.id {
                backend.context_tokens -= held.tokens;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_engine_that_failed_has_a_pause_and_one_that_never_did_it_is_asked_three_times() {
        let mut partner = Partner::default();
        let mut now_us = 0;
        for failure in 1..=FAILURES_MAX {
            assert!(partner.may_take_part(now_us));
            assert_eq!(partner.failed(now_us), failure == FAILURES_MAX);
            assert!(!partner.may_take_part(now_us + PAUSE_US - 1));
            now_us += PAUSE_US;
        }
        assert!(!partner.may_take_part(u64::MAX));
        let mut proven = Partner::default();
        proven.has_done_it();
        assert!((0..9).all(|_| !proven.failed(0)), "it is told once, of those that never did it");
        assert!(!proven.may_take_part(PAUSE_US - 1) && proven.may_take_part(PAUSE_US));
    }
}
