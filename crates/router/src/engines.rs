//! The engines as all threads of a router see them: the dispatcher behind a lock and the engine in
//! each of its slots. Engines come and go.

use crate::config::{Backend, ConfigError, Target};
use crate::decision_log::DecisionLog;
use crate::decisions::DecisionRecord;
use crate::dispatcher::{
    Assignment, Dispatcher, End, Ended, HandOverEnded, Membership, Plan, RoutingFacts, Unassigned,
};
use crate::engine::Engine;
use crate::engine_metrics::EngineMetrics;
use crate::hand_over::HandOverEnd;
use crate::health::{Change, Failure};
use crate::log_lines::RouterLines;
use crate::models::Models;
use crate::rank_events::Report;
use crate::reported_load::{Load, Unread};
use crate::slots::{EngineSet, MAX_ENGINES};
use crate::stats::RouterStats;
use forebay_transfer::lock::Mutex;
use std::sync::Arc;
use std::time::Instant;
use tokio::sync::mpsc;

#[derive(Debug)]
pub struct Engines {
    /// Log lines about the router.
    pub lines: RouterLines,
    /// Which engine serves which models.
    pub models: Models,
    inner: Mutex<Inner>,
    /// Tells of each engine that comes.
    come: mpsc::UnboundedSender<Arc<Engine>>,
    /// Where decisions are logged when they have ended, if they are.
    decision_log: Option<DecisionLog>,
    started: Instant,
}

#[derive(Debug)]
struct Inner {
    dispatcher: Dispatcher,
    /// The engine in each slot of the dispatcher.
    slots: Vec<Option<Arc<Engine>>>,
}

/// Engines as they come, for whoever is to watch them.
pub type Comers = mpsc::UnboundedReceiver<Arc<Engine>>;

/// Why an engine cannot come, or go.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum MembershipError {
    #[error("engine {0} is there already, at another address or with another store")]
    Other(String),
    #[error("engine {0} is still leaving: requests that it has are not over")]
    Leaving(String),
    #[error("there are {MAX_ENGINES} engines, which is the most that are allowed")]
    Full,
    #[error("no engine is named '{0}'")]
    Unknown(String),
}

/// Why an engine cannot be added.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum AddError {
    #[error(transparent)]
    Bad(#[from] ConfigError),
    #[error(transparent)]
    Membership(#[from] MembershipError),
}

impl Engines {
    /// None yet.
    pub fn new(dispatcher: Dispatcher, decision_log: Option<DecisionLog>) -> (Engines, Comers) {
        let (come, comers) = mpsc::unbounded_channel();
        let engines = Engines {
            lines: RouterLines::default(),
            models: Models::default(),
            inner: Mutex::new(Inner { dispatcher, slots: Vec::new() }),
            come,
            decision_log,
            started: Instant::now(),
        };
        (engines, comers)
    }

    /// An engine comes, or serves again if it is there: draining or about to leave. Gives its id where
    /// it is there because of this.
    pub fn add(&self, target: &Target) -> Result<Option<u64>, MembershipError> {
        let mut inner = self.inner.lock();
        if let Some(known) = inner.find(&target.name) {
            let leaving = inner.dispatcher.membership(known.slot) == Membership::Leaving;
            if !known.target.is_same(target) {
                let name = target.name.clone();
                return Err(if leaving {
                    MembershipError::Leaving(name)
                } else {
                    MembershipError::Other(name)
                });
            }
            inner.dispatcher.set_membership(known.slot, Membership::Serving);
            self.models.add(&known);
            return Ok(leaving.then_some(known.id));
        }
        let slot = inner.dispatcher.add_backend(&target.name, target.store.as_deref());
        let slot = slot.ok_or(MembershipError::Full)?;
        let engine = Arc::new(Engine::new(slot, inner.dispatcher.id(slot), target.clone()));
        if inner.slots.len() <= slot {
            inner.slots.resize(slot + 1, None);
        }
        inner.slots[slot] = Some(engine.clone());
        self.models.add(&engine);
        drop(inner);
        engine.lines.come(&target.name, &target.authority);
        let id = engine.id;
        // Nobody watches engines of a router that has ended.
        let _ = self.come.send(engine);
        Ok(Some(id))
    }

    /// The same for one that has not been checked.
    pub fn add_backend(&self, backend: &Backend) -> Result<Option<u64>, AddError> {
        Ok(self.add(&backend.check()?)?)
    }

    /// An engine gets no new requests, until it is added again.
    pub fn drain(&self, name: &str) -> Result<(), MembershipError> {
        let mut inner = self.inner.lock();
        let engine = inner.find(name).ok_or_else(|| MembershipError::Unknown(name.into()))?;
        if inner.dispatcher.membership(engine.slot) == Membership::Leaving {
            return Err(MembershipError::Leaving(name.into()));
        }
        inner.dispatcher.set_membership(engine.slot, Membership::Draining);
        let in_flight = inner.dispatcher.own_load(engine.slot).requests;
        drop(inner);
        engine.lines.drains(name, in_flight);
        Ok(())
    }

    /// An engine gets no new requests, and is gone when those that it has have ended.
    pub fn remove(&self, name: &str) -> Result<(), MembershipError> {
        let mut inner = self.inner.lock();
        let engine = inner.find(name).ok_or_else(|| MembershipError::Unknown(name.into()))?;
        self.begin_to_leave(&mut inner, &engine);
        Ok(())
    }

    /// The same for the engine of this id, if it is there: another one may have its name by now.
    pub fn remove_id(&self, id: u64) {
        let mut inner = self.inner.lock();
        let engine = inner.slots.iter().flatten().find(|engine| engine.id == id).cloned();
        if let Some(engine) = engine {
            self.begin_to_leave(&mut inner, &engine);
        }
    }

    fn begin_to_leave(&self, inner: &mut Inner, engine: &Engine) {
        if inner.dispatcher.membership(engine.slot) == Membership::Leaving {
            return;
        }
        let in_flight = inner.dispatcher.own_load(engine.slot).requests;
        self.models.leave(engine);
        engine.lines.leaves(engine.name(), in_flight);
        if inner.dispatcher.set_membership(engine.slot, Membership::Leaving) {
            self.free(inner, engine);
        }
    }

    /// Chooses an engine for a request and counts it as load until the attempt ends.
    pub fn assign(
        self: &Arc<Engines>,
        routing: &Arc<RoutingFacts>,
        tried: &[u64],
        attempt: u32,
        may_hand_over: bool,
    ) -> Result<(Attempt, Option<(Attempt, Plan)>), Unassigned> {
        let now_us = self.now_us();
        let mut inner = self.inner.lock();
        let (assignment, prefill) =
            match inner.dispatcher.assign_with_prefiller(now_us, routing, tried, attempt, may_hand_over) {
                Ok(assigned) => assigned,
                Err(unassigned) => {
                    drop(inner);
                    self.tell_unassigned(&unassigned);
                    return Err(unassigned);
                }
            };
        let attempt = |assignment: Assignment| {
            let engine = inner.slots.get(assignment.backend)?.clone()?;
            let (engines, routing) = (self.clone(), routing.clone());
            Some(Attempt { engines, routing, engine, open: Some(assignment) })
        };
        let decode = attempt(assignment).ok_or(Unassigned::NoEngine)?;
        let prefill = prefill.and_then(|(assignment, plan)| Some((attempt(assignment)?, plan)));
        Ok((decode, prefill))
    }

    /// Tells of a refusal. That there is no engine is told by whoever asked for one.
    fn tell_unassigned(&self, unassigned: &Unassigned) {
        let Unassigned::TooLate { decision, earliest_us } = unassigned else { return };
        self.lines.too_late(decision.slo, *earliest_us);
        if let Some(log) = &self.decision_log {
            log.push(decision, 0);
        }
    }

    /// A hand-over has ended. `is_first_token`: the client gets its first token now.
    pub fn hand_over_ended(
        &self,
        plan: &Plan,
        [from, to]: [&Engine; 2],
        end: HandOverEnd,
        is_first_token: bool,
    ) {
        let now_us = self.now_us();
        let first_token_s = now_us.saturating_sub(plan.decision.at_us) as f64 / 1e6;
        let mut inner = self.inner.lock();
        let HandOverEnded { barred, is_gone } =
            inner.dispatcher.hand_over_ended(now_us, plan, end, is_first_token.then_some(first_token_s));
        if is_gone {
            self.free(&mut inner, from);
        }
        drop(inner);
        if end.fault().is_some() {
            from.lines.hand_over_failed(from.name(), to.name(), end);
        }
        let barred = barred.and_then(|slot| [from, to].into_iter().find(|engine| engine.slot == slot));
        if let Some(engine) = barred {
            engine.lines.takes_no_part(engine.name(), end);
        }
    }

    /// Reports how a probe of an engine ended.
    pub fn probed(&self, engine: &Engine, result: Result<(), Failure>) {
        let mut inner = self.inner.lock();
        if inner.has(engine) {
            let change = inner.dispatcher.probed(engine.slot, result);
            self.announce(&inner, engine, change);
        }
    }

    /// What the router itself has at an engine, for [`Engines::noted_metrics`].
    pub fn own_load(&self, engine: &Engine) -> Load {
        self.inner.lock().dispatcher.own_load(engine.slot)
    }

    /// Takes in an engine's metrics, or that they could not be read. `asked` is what the router had
    /// there when it asked.
    pub fn noted_metrics(&self, engine: &Engine, read: Result<EngineMetrics, Unread>, asked: Load) {
        let now_us = self.now_us();
        let mut inner = self.inner.lock();
        if inner.has(engine)
            && let Some(change) = inner.dispatcher.noted_metrics(now_us, engine.slot, read, asked)
        {
            engine.lines.metrics(engine.name(), change);
        }
    }

    /// Takes in what one of an engine's ranks reports of its cache. Returns whether that is not
    /// believed, so that all events have to be asked for anew.
    pub fn noted_events(&self, engine: &Engine, rank: usize, ranks: usize, report: &Report) -> bool {
        let now_us = self.now_us();
        let mut inner = self.inner.lock();
        if !inner.has(engine) {
            return false;
        }
        let noted = inner.dispatcher.noted_events(now_us, engine.slot, rank, ranks, report);
        drop(inner);
        if report.emptied && !noted.is_doubted {
            engine.lines.emptied(engine.name());
        }
        if let Some(change) = noted.change {
            engine.lines.events(engine.name(), change);
        }
        noted.must_ask
    }

    /// May the engine get requests, if only as the last resort?
    pub fn is_usable(&self, engine: &Engine) -> bool {
        let inner = self.inner.lock();
        inner.has(engine) && inner.dispatcher.is_usable(engine.slot)
    }

    /// All engines that are there, those about to leave as well.
    pub fn all(&self) -> Vec<Arc<Engine>> {
        self.inner.lock().slots.iter().flatten().cloned().collect()
    }

    /// The engines that may get requests.
    pub fn usable(&self) -> Vec<Arc<Engine>> {
        self.inner.lock().usable().cloned().collect()
    }

    /// May whoever waits for the engine wait for ever?
    pub fn is_silent(&self, engine: &Engine) -> bool {
        self.inner.lock().dispatcher.is_silent(engine.slot)
    }

    /// May an engine get requests that serves it and was not tried?
    pub fn has_other(&self, serving: Option<&EngineSet>, tried: &[u64]) -> bool {
        let inner = self.inner.lock();
        let serves = |engine: &Engine| serving.is_none_or(|serving| serving.contains(engine.slot, engine.id));
        inner.usable().any(|engine| serves(engine) && !tried.contains(&engine.id))
    }

    pub fn stats(&self) -> RouterStats {
        let now_us = self.now_us();
        let mut inner = self.inner.lock();
        inner.dispatcher.expire_held(now_us);
        inner.dispatcher.stats(now_us)
    }

    /// The last decisions, oldest first.
    pub fn decisions(&self) -> Vec<DecisionRecord> {
        // Names are copied when nobody waits for the lock.
        let entries = self.inner.lock().dispatcher.decisions();
        entries.iter().map(|entry| entry.record()).collect()
    }

    /// Where decisions are logged, if they are.
    pub fn decision_log(&self) -> Option<&DecisionLog> {
        self.decision_log.as_ref()
    }

    /// Tells the log that an engine failed a request which another one gets.
    pub fn tell_sent_elsewhere(&self, from: &Engine, to: &Engine, failure: Failure) {
        if from.id != to.id {
            from.lines.sent_elsewhere(from.name(), to.name(), failure);
        }
    }

    fn announce(&self, inner: &Inner, engine: &Engine, change: Option<Change>) {
        let Some(change) = change else { return };
        match change {
            Change::Ejected { .. } | Change::StillDown { .. } => engine.news.notify_waiters(),
            Change::Readmitted => {
                inner.slots.iter().flatten().for_each(|engine| engine.news.notify_waiters())
            }
        }
        let left = inner.usable().count();
        if left == 0 && matches!(change, Change::Ejected { .. }) {
            self.lines.no_engine(engine.name());
        }
        engine.lines.changed(engine.name(), change, left);
    }

    fn free(&self, inner: &mut Inner, engine: &Engine) {
        inner.slots[engine.slot] = None;
        self.models.remove(engine);
        engine.leave();
        engine.lines.gone(engine.name());
    }

    /// Since the router's start.
    pub fn now_us(&self) -> u64 {
        self.started.elapsed().as_micros() as u64
    }
}

impl Inner {
    fn find(&self, name: &str) -> Option<Arc<Engine>> {
        self.slots.iter().flatten().find(|engine| engine.name() == name).cloned()
    }

    /// Is it this engine that has its slot, and not one that came after it?
    fn has(&self, engine: &Engine) -> bool {
        self.slots.get(engine.slot).and_then(Option::as_ref).is_some_and(|here| here.id == engine.id)
    }

    fn usable(&self) -> impl Iterator<Item = &Arc<Engine>> {
        self.slots.iter().flatten().filter(|engine| self.dispatcher.is_usable(engine.slot))
    }
}

/// A request on its way to an engine. Ends once: as it is told to, or as cancelled when it is
/// dropped.
#[derive(Debug)]
pub struct Attempt {
    engines: Arc<Engines>,
    routing: Arc<RoutingFacts>,
    pub engine: Arc<Engine>,
    open: Option<Assignment>,
}

impl Attempt {
    /// The first byte of the answer has come, after this status.
    pub fn first_byte(&mut self, status: u16) {
        if let Some(assignment) = &mut self.open {
            let now_us = self.engines.now_us();
            let mut inner = self.engines.inner.lock();
            inner.dispatcher.first_byte(now_us, assignment, status);
        }
    }

    /// The answer has begun and will not come to its end. To be told before the end.
    pub fn is_broken(&self, failure: Failure) {
        self.engine.lines.broken(self.engine.name(), failure);
    }

    /// No other engine computes the prompt for this one after all.
    pub fn computes_itself(&mut self) {
        if let Some(assignment) = &mut self.open {
            self.engines.inner.lock().dispatcher.computes_itself(assignment);
        }
    }

    pub fn end(&mut self, end: End) {
        if let Some(assignment) = self.open.take() {
            let (decision, says_answer) = (assignment.decision.clone(), assignment.says_answer());
            let mut inner = self.engines.inner.lock();
            let Ended { change, is_gone } = inner.dispatcher.end(&self.routing, assignment, end);
            self.engines.announce(&inner, &self.engine, change);
            if is_gone {
                self.engines.free(&mut inner, &self.engine);
            }
            drop(inner);
            if let Some(log) = self.engines.decision_log.as_ref().filter(|_| says_answer) {
                let total_us = self.engines.now_us().saturating_sub(decision.at_us);
                log.push(&decision, total_us);
            }
        }
    }
}

impl Drop for Attempt {
    fn drop(&mut self) {
        self.end(End::Cancelled);
    }
}

#[cfg(test)]
pub mod tests {
    use super::*;
    use crate::config::RouterConfig;
    use crate::engine_model::EngineModel;
    use crate::health::{Cause, Thresholds};
    use crate::models::ListAnswer;
    use crate::policy::Policy;
    use forebay_steps::{Launch, Profile};

    pub fn engines() -> Arc<Engines> {
        let profile = Profile::shipped(Profile::DEFAULT).unwrap();
        let model = EngineModel::new(&profile, Launch::Graph);
        let thresholds = Thresholds { eject_after: 3, readmit_after: 1 };
        Arc::new(Engines::new(Dispatcher::new(Policy::Lpwl, model, thresholds), None).0)
    }

    fn target(name: &str, port: u16) -> Target {
        let backends = vec![Backend::new(name, format!("http://127.0.0.1:{port}"))];
        let profile = Profile::shipped(Profile::DEFAULT).unwrap();
        let model = EngineModel::new(&profile, Launch::Graph);
        let config = RouterConfig::new(([127, 0, 0, 1], 0).into(), backends, Policy::Lpwl, model);
        config.check().unwrap().remove(0)
    }

    fn assign(
        engines: &Arc<Engines>,
        routing: &Arc<RoutingFacts>,
        tried: &[u64],
    ) -> Result<Attempt, Unassigned> {
        engines.assign(routing, tried, tried.len() as u32 + 1, false).map(|(attempt, _)| attempt)
    }

    fn routing(serving: Option<EngineSet>) -> Arc<RoutingFacts> {
        let length = crate::tokens::Length { kind: crate::request::PromptKind::Text, bytes: 0, media: 0 };
        let chain = crate::chain::Chain::new(0, &[]);
        let serving = serving.map(Arc::new);
        let slo = crate::slo::Slo::default();
        Arc::new(RoutingFacts { length, preamble_bytes: 0, chain, session: 0, endpoint: None, serving, slo })
    }

    #[test]
    fn an_engine_that_comes_and_goes_is_two_lines_a_minute() {
        let engines = engines();
        engines.add(&target("a", 1)).unwrap();
        let engine = engines.all().remove(0);
        let ejected = Change::Ejected { cause: Cause::Gone, last: Failure::Refused };
        let lines = testkit::logged(|| {
            for change in [ejected, Change::Readmitted].repeat(5) {
                engines.announce(&engines.inner.lock(), &engine, Some(change));
            }
        });
        assert_eq!(lines.lines().count(), 2, "{lines}");
        assert!(lines.contains("ejected") && lines.contains("used again"), "{lines}");
    }

    #[test]
    fn metrics_that_come_and_go_are_two_lines_a_minute() {
        let engines = engines();
        engines.add(&target("a", 1)).unwrap();
        let engine = engines.all().remove(0);
        let page = EngineMetrics { running: 0, waiting: 0, pool_tokens: None, held_tokens: None };
        let lines = testkit::logged(|| {
            for read in [Err(Unread::Missing), Ok(page), Ok(page)].repeat(5) {
                engines.noted_metrics(&engine, read, Load::default());
            }
        });
        assert_eq!(lines.lines().count(), 2, "{lines}");
        assert!(lines.contains("cannot be read") && lines.contains("metrics are read"), "{lines}");
    }

    #[test]
    fn an_engine_that_drains_keeps_its_requests_and_gets_no_more_until_it_is_added_again() {
        let engines = engines();
        engines.add(&target("a", 1)).unwrap();
        let running = assign(&engines, &routing(None), &[]).unwrap();
        engines.drain("a").unwrap();
        assert!(assign(&engines, &routing(None), &[]).is_err() && engines.usable().is_empty());
        assert_eq!(engines.stats().backends[0].membership, "draining");
        drop(running);
        assert_eq!(engines.all().len(), 1, "drained is not removed");
        engines.add(&target("a", 1)).unwrap();
        assert!(assign(&engines, &routing(None), &[]).is_ok());
        assert_eq!(engines.drain("b"), Err(MembershipError::Unknown("b".into())));
    }

    #[test]
    fn a_removed_engine_is_gone_when_its_last_request_has_ended() {
        let engines = engines();
        engines.add(&target("a", 1)).unwrap();
        let mut running = assign(&engines, &routing(None), &[]).unwrap();
        engines.remove("a").unwrap();
        assert!(assign(&engines, &routing(None), &[]).is_err());
        assert_eq!(engines.all().len(), 1);
        assert_eq!(engines.add(&target("a", 2)), Err(MembershipError::Leaving("a".into())));
        running.end(End::Answered { status: 200, usage: None });
        assert!(engines.all().is_empty() && engines.stats().backends.is_empty());
        assert_eq!(engines.remove("a"), Err(MembershipError::Unknown("a".into())));
    }

    #[test]
    fn one_that_comes_to_a_slot_has_nothing_of_the_one_before() {
        let engines = engines();
        engines.add(&target("a", 1)).unwrap();
        let former = engines.all().remove(0);
        (0..3).for_each(|_| engines.probed(&former, Err(Failure::Refused)));
        assert!(!engines.stats().backends[0].up);
        engines.remove("a").unwrap();
        engines.add(&target("b", 2)).unwrap();
        let engine = engines.all().remove(0);
        assert_eq!((engine.slot, former.slot), (0, 0));
        engines.probed(&former, Err(Failure::Refused));
        assert!(engines.is_usable(&engine) && !engines.is_usable(&former), "a late probe of the former");
        assert_eq!(engines.stats().backends[0].name, "b");
    }

    #[test]
    fn a_request_that_knew_the_one_before_does_not_go_to_whoever_has_its_slot() {
        let engines = engines();
        engines.add(&target("a", 1)).unwrap();
        let former = engines.all().remove(0);
        let list = ListAnswer::List(crate::models::parse(br#"{"data":[{"id":"m"}]}"#).unwrap());
        engines.models.note(&former, &list, true);
        let serving = engines.models.serving("m");
        engines.remove("a").unwrap();
        engines.add(&target("b", 2)).unwrap();
        assert_eq!(engines.all().remove(0).slot, former.slot);
        let knew = routing(Some((*serving).clone()));
        assert!(assign(&engines, &knew, &[]).is_err() && !engines.has_other(Some(&serving), &[]));
        let tried = assign(&engines, &routing(None), &[former.id]).unwrap();
        assert_eq!(tried.engine.name(), "b", "only the former one was tried");
    }

    #[test]
    fn a_name_belongs_to_one_address_at_a_time() {
        let engines = engines();
        engines.add(&target("a", 1)).unwrap();
        engines.add(&target("a", 1)).unwrap();
        assert_eq!(engines.add(&target("a", 2)), Err(MembershipError::Other("a".into())));
        assert_eq!(engines.all().len(), 1);
    }

    #[test]
    fn there_may_be_hundreds_and_each_can_be_chosen() {
        let engines = engines();
        for number in 0..300 {
            engines.add(&target(&format!("e{number}"), 1 + number)).unwrap();
        }
        for slot in [0, 63, 64, 299] {
            let only = EngineSet { slots: [slot].into_iter().collect(), newest_id: 299 };
            let attempt = assign(&engines, &routing(Some(only.clone())), &[]).unwrap();
            assert_eq!(attempt.engine.slot, slot);
            assert!(
                !engines.has_other(Some(&only), &[attempt.engine.id])
                    && engines.has_other(None, &[attempt.engine.id])
            );
        }
    }
}
