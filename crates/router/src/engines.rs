//! The engines as all threads of a router see them: the dispatcher behind a lock and the engine in
//! each of its slots. Engines come and go.

use crate::config::{Backend, ConfigError, Target};
use crate::decision_log::DecisionLog;
use crate::decisions::DecisionRecord;
use crate::dispatcher::{Assignment, Dispatcher, HandOverEnded, Membership, Plan, RoutingFacts, Unassigned};
use crate::engine::Engine;
use crate::engine_metrics::EngineMetrics;
use crate::hand_over::HandOverEnd;
use crate::health::{Change, Failure};
use crate::log_lines::RouterLines;
use crate::models::Models;
use crate::rank_events::Report;
use crate::reported_load::{Load, Unread};
use crate::slots::{EngineSet, MAX_ENGINES, Serving};
use crate::stats::RouterStats;
use forebay_transfer::lock::Mutex;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Instant;
use tokio::sync::mpsc;

mod attempt;

pub use attempt::Attempt;

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
    /// Others are told where they are, by addresses.
    by_address: bool,
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
    #[error(
        "engine {name}: '{host}' is the name of a host; Envoy is told addresses, which --backend-dns finds"
    )]
    HostName { name: String, host: String },
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
    pub fn new(
        dispatcher: Dispatcher,
        decision_log: Option<DecisionLog>,
        by_address: bool,
    ) -> (Engines, Comers) {
        let (come, comers) = mpsc::unbounded_channel();
        let engines = Engines {
            lines: RouterLines::default(),
            models: Models::default(),
            inner: Mutex::new(Inner { dispatcher, slots: Vec::new() }),
            come,
            decision_log,
            by_address,
            started: Instant::now(),
        };
        (engines, comers)
    }

    /// An engine comes, or serves again if it is there: draining or about to leave. Gives its id
    /// where it is there because of this.
    pub fn add(&self, target: &Target) -> Result<Option<u64>, MembershipError> {
        if self.by_address && target.address.is_none() {
            let (name, host) = (target.name.clone(), target.authority.clone());
            return Err(MembershipError::HostName { name, host });
        }
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
            Some(Attempt::new(self.clone(), routing.clone(), engine, assignment))
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

    /// The engine at an address.
    pub fn at(&self, address: SocketAddr) -> Option<Arc<Engine>> {
        let inner = self.inner.lock();
        inner.slots.iter().flatten().find(|engine| engine.target.address == Some(address)).cloned()
    }

    /// Of the engines that may serve a request, those whose addresses are wanted.
    pub fn serving_at(&self, serving: Serving, is_wanted: impl Fn(SocketAddr) -> bool) -> Arc<EngineSet> {
        let inner = self.inner.lock();
        let serves =
            |engine: &Engine| serving.as_ref().is_none_or(|set| set.contains(engine.slot, engine.id));
        let wanted = |engine: &&Arc<Engine>| engine.target.address.is_some_and(&is_wanted) && serves(engine);
        let engines: Vec<&Arc<Engine>> = inner.slots.iter().flatten().filter(wanted).collect();
        let newest_id = engines.iter().map(|engine| engine.id).max().unwrap_or_default();
        Arc::new(EngineSet { slots: engines.iter().map(|engine| engine.slot).collect(), newest_id })
    }

    /// All engines that are there, those about to leave as well.
    pub fn all(&self) -> Vec<Arc<Engine>> {
        self.inner.lock().slots.iter().flatten().cloned().collect()
    }

    /// There is none, not even one that is down.
    pub fn is_empty(&self) -> bool {
        self.inner.lock().slots.iter().all(Option::is_none)
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
            Change::Ejected { .. } | Change::StillDown { .. } => {
                // It may come back as another process, which has nothing of what that one said.
                engine.set_ticket(None);
                engine.news.notify_waiters();
            }
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

#[cfg(test)]
pub mod tests;
