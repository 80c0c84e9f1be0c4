//! The engines as all threads of a router see them: the dispatcher behind a lock, who waits for news
//! of an engine, and what the log is told of it.

use crate::config::Target;
use crate::decision_log::DecisionLog;
use crate::decisions::DecisionRecord;
use crate::dispatcher::{Assignment, BackendSet, Dispatcher, End, RoutingFacts};
use crate::health::{Change, Failure};
use crate::log_lines::{EngineLines, RouterLines};
use crate::stats::RouterStats;
use forebay_transfer::lock::Mutex;
use std::sync::Arc;
use std::time::Instant;
use tokio::sync::Notify;
use tokio::sync::futures::Notified;

#[derive(Debug)]
pub struct Engines {
    /// The engines, by index.
    pub targets: Vec<Target>,
    /// Log lines about the router.
    pub lines: RouterLines,
    /// Log lines about each engine, by index.
    engine_lines: Vec<EngineLines>,
    dispatcher: Mutex<Dispatcher>,
    /// Wakes those who wait for a first byte of an engine when there is news of it, or another has
    /// come back.
    news: Vec<Notify>,
    /// Where decisions are logged when they have ended, if they are.
    decision_log: Option<DecisionLog>,
    started: Instant,
}

impl Engines {
    pub fn new(targets: Vec<Target>, dispatcher: Dispatcher, decision_log: Option<DecisionLog>) -> Engines {
        Engines {
            lines: RouterLines::default(),
            engine_lines: targets.iter().map(|_| EngineLines::default()).collect(),
            dispatcher: Mutex::new(dispatcher),
            news: targets.iter().map(|_| Notify::new()).collect(),
            decision_log,
            started: Instant::now(),
            targets,
        }
    }

    /// Chooses an engine for a request and counts it as load until the attempt ends.
    pub fn assign(self: &Arc<Engines>, routing: &Arc<RoutingFacts>, tried: BackendSet) -> Option<Attempt> {
        let assignment = self.dispatcher.lock().assign(self.now_us(), routing, tried)?;
        let (engines, routing, backend) = (self.clone(), routing.clone(), assignment.backend);
        Some(Attempt { engines, routing, backend, open: Some(assignment) })
    }

    /// Reports how a probe of an engine ended.
    pub fn probed(&self, backend: usize, result: Result<(), Failure>) {
        let change = self.dispatcher.lock().probed(backend, result);
        self.announce(backend, change);
    }

    /// May the engine get requests, if only as the last resort?
    pub fn is_usable(&self, backend: usize) -> bool {
        self.dispatcher.lock().is_usable(backend)
    }

    /// The engines that may get requests.
    pub fn usable(&self) -> impl Iterator<Item = usize> {
        (0..self.targets.len()).filter(|&backend| self.is_usable(backend))
    }

    /// May whoever waits for the engine wait for ever?
    pub fn is_silent(&self, backend: usize) -> bool {
        self.dispatcher.lock().is_silent(backend)
    }

    /// May an engine get requests that is not among these?
    pub fn has_other(&self, tried: BackendSet) -> bool {
        let dispatcher = self.dispatcher.lock();
        (0..self.targets.len()).any(|backend| tried & (1 << backend) == 0 && dispatcher.is_usable(backend))
    }

    /// Ends when an engine has changed its state, or another one may be used again.
    pub fn news(&self, backend: usize) -> Notified<'_> {
        self.news[backend].notified()
    }

    pub fn stats(&self) -> RouterStats {
        self.dispatcher.lock().stats()
    }

    /// The last decisions, oldest first.
    pub fn decisions(&self) -> Vec<DecisionRecord> {
        self.dispatcher.lock().decisions()
    }

    /// Where decisions are logged, if they are.
    pub fn decision_log(&self) -> Option<&DecisionLog> {
        self.decision_log.as_ref()
    }

    /// Tells the log that an engine failed a request which another one gets.
    pub fn tell_sent_elsewhere(&self, from: usize, to: usize, failure: Failure) {
        if from != to {
            let name = |backend: usize| &self.targets[backend].name;
            self.engine_lines[from].sent_elsewhere(name(from), name(to), failure);
        }
    }

    fn announce(&self, backend: usize, change: Option<Change>) {
        let Some(change) = change else { return };
        match change {
            Change::Ejected { .. } | Change::StillDown { .. } => self.news[backend].notify_waiters(),
            Change::Readmitted => self.news.iter().for_each(Notify::notify_waiters),
        }
        let (left, name) = (self.usable().count(), &self.targets[backend].name);
        if left == 0 && matches!(change, Change::Ejected { .. }) {
            self.lines.no_engine(name);
        }
        self.engine_lines[backend].changed(name, change, left);
    }

    fn now_us(&self) -> u64 {
        self.started.elapsed().as_micros() as u64
    }
}

/// A request on its way to an engine. Ends once: as it is told to, or as cancelled when it is
/// dropped.
#[derive(Debug)]
pub struct Attempt {
    engines: Arc<Engines>,
    routing: Arc<RoutingFacts>,
    /// Index of the engine.
    pub backend: usize,
    open: Option<Assignment>,
}

impl Attempt {
    /// The first byte of the answer has come, after this status.
    pub fn first_byte(&mut self, status: u16) {
        if let Some(assignment) = &mut self.open {
            self.engines.dispatcher.lock().first_byte(self.engines.now_us(), assignment, status);
        }
    }

    /// The answer has begun and will not come to its end. To be told before the end.
    pub fn is_broken(&self, failure: Failure) {
        let name = &self.engines.targets[self.backend].name;
        self.engines.engine_lines[self.backend].broken(name, failure);
    }

    pub fn end(&mut self, end: End) {
        if let Some(assignment) = self.open.take() {
            let decision = assignment.decision.clone();
            let change = self.engines.dispatcher.lock().end(&self.routing, assignment, end);
            self.engines.announce(self.backend, change);
            if let Some(log) = &self.engines.decision_log {
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
mod tests {
    use super::*;
    use crate::config::{Backend, RouterConfig};
    use crate::engine_model::EngineModel;
    use crate::health::{Cause, Thresholds};
    use crate::policy::Policy;
    use forebay_steps::{Launch, Profile};

    #[test]
    fn an_engine_that_comes_and_goes_is_two_lines_a_minute() {
        let engine = Backend { name: "a".into(), url: "http://127.0.0.1:1".into() };
        let profile = Profile::shipped(Profile::DEFAULT).unwrap();
        let model = EngineModel::new(&profile, Launch::Graph);
        let config = RouterConfig::new(([127, 0, 0, 1], 0).into(), vec![engine], Policy::Lpwl, model);
        let thresholds = Thresholds { eject_after: 3, readmit_after: 1 };
        let dispatcher = Dispatcher::new(Policy::Lpwl, model, vec!["a".into()], thresholds);
        let engines = Engines::new(config.check().unwrap(), dispatcher, None);
        let ejected = Change::Ejected { cause: Cause::Gone, last: Failure::Refused };
        let lines = testkit::logged(|| {
            for change in [ejected, Change::Readmitted].repeat(5) {
                engines.announce(0, Some(change));
            }
        });
        assert_eq!(lines.lines().count(), 2, "{lines}");
        assert!(lines.contains("ejected") && lines.contains("used again"), "{lines}");
    }
}
