//! What all threads of a router share: the dispatcher behind a lock, the limits, and the count of
//! requests under way.

use crate::config::{Limits, RouterConfig, Target};
use crate::decisions::DecisionRecord;
use crate::dispatcher::{Ask, Assignment, BackendSet, Dispatcher, End};
use crate::health::{Change, Failure, Thresholds};
use crate::log_lines::{EngineLines, RouterLines};
use crate::metrics::{self, Counts};
use crate::models::Models;
use crate::request_log::RequestLog;
use crate::stats::RouterStats;
use forebay_transfer::LogGate;
use http::StatusCode;
use parking_lot::{Mutex, MutexGuard};
use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU64, AtomicUsize, Ordering};
use std::time::Instant;
use tokio::sync::futures::Notified;
use tokio::sync::{Notify, watch};

#[derive(Debug)]
pub struct Shared {
    /// The backends, by index.
    pub targets: Vec<Target>,
    /// Which of them serves which models.
    pub models: Models,
    /// Requests for models that no engine lists go to any.
    pub any_model: bool,
    /// Log lines about requests at each engine, by index.
    pub engine_lines: Vec<EngineLines>,
    /// Log lines about the router.
    pub lines: RouterLines,
    /// Where requests are logged, if they are.
    pub log: Option<Arc<RequestLog>>,
    pub limits: Limits,
    /// Differs from start to start, so that nobody can prepare prompts whose hashes collide.
    pub hash_seed: u64,
    dispatcher: Mutex<Dispatcher>,
    /// Wakes those who wait for a first byte of a backend when there is news of it, or another has
    /// come back.
    news: Vec<Notify>,
    log_gates: Vec<Gates>,
    phase: AtomicU8,
    /// Tells connections of the phase.
    phases: watch::Sender<Phase>,
    started: Instant,
    in_flight: AtomicUsize,
    /// Requests refused because of what the client sent.
    pub bad_requests: AtomicU64,
    overloaded: AtomicU64,
    /// Requests that no backend answered.
    pub unanswered: AtomicU64,
    /// Answers by status: those of each backend, and last the router's own.
    statuses: Vec<Statuses>,
}

/// Bound the log lines about one engine: one of each a minute, so that "ejected" is not left
/// without its "used again".
#[derive(Debug, Default)]
struct Gates {
    ejected: LogGate,
    still_out: LogGate,
    used_again: LogGate,
}

/// Counts of answers by their status, from 100.
#[derive(Debug)]
struct Statuses([AtomicU64; Statuses::COUNT]);

impl Statuses {
    const FIRST: u16 = 100;
    const COUNT: usize = 500;

    fn count(&self, status: StatusCode) {
        if let Some(count) = self.0.get(usize::from(status.as_u16().saturating_sub(Statuses::FIRST))) {
            count.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// The statuses that there were.
    fn counts(&self) -> Vec<(u16, u64)> {
        let counts =
            (Statuses::FIRST..).zip(&self.0).map(|(status, count)| (status, count.load(Ordering::Relaxed)));
        counts.filter(|&(_, count)| count > 0).collect()
    }
}

impl Shared {
    /// The state of a router that has just started.
    pub fn new(config: RouterConfig, targets: Vec<Target>, log: Option<RequestLog>) -> Arc<Shared> {
        let RouterConfig { policy, limits, any_model, .. } = config;
        let thresholds = Thresholds { eject_after: limits.eject_after, readmit_after: limits.readmit_after };
        let names = targets.iter().map(|target| target.name.clone()).collect();
        let statuses = || Statuses([const { AtomicU64::new(0) }; Statuses::COUNT]);
        Arc::new(Shared {
            models: Models::new(targets.len()),
            any_model,
            engine_lines: targets.iter().map(|_| EngineLines::default()).collect(),
            lines: RouterLines::default(),
            log: log.map(Arc::new),
            statuses: (0..=targets.len()).map(|_| statuses()).collect(),
            dispatcher: Mutex::new(Dispatcher::new(policy, names, thresholds)),
            news: targets.iter().map(|_| Notify::new()).collect(),
            log_gates: targets.iter().map(|_| Gates::default()).collect(),
            phase: AtomicU8::new(Phase::Serving as u8),
            phases: watch::Sender::new(Phase::Serving),
            targets,
            limits,
            hash_seed: RandomState::new().hash_one(0),
            started: Instant::now(),
            in_flight: AtomicUsize::new(0),
            bad_requests: AtomicU64::new(0),
            overloaded: AtomicU64::new(0),
            unanswered: AtomicU64::new(0),
        })
    }

    /// Chooses a backend for a request and counts it as load until the flight ends.
    pub fn assign(self: &Arc<Shared>, ask: &Arc<Ask>, tried: BackendSet) -> Option<Flight> {
        let assignment = self.dispatcher().assign(self.now_us(), ask, tried)?;
        Some(Flight {
            shared: self.clone(),
            ask: ask.clone(),
            backend: assignment.backend,
            open: Some(assignment),
        })
    }

    /// Counts a request as under way, or refuses it because too many are.
    pub fn admit(self: &Arc<Shared>) -> Option<Permit> {
        let permit = Permit(self.clone());
        if self.in_flight.fetch_add(1, Ordering::Relaxed) < self.limits.max_in_flight {
            return Some(permit);
        }
        self.overloaded.fetch_add(1, Ordering::Relaxed);
        None
    }

    /// Requests under way.
    pub fn in_flight(&self) -> usize {
        self.in_flight.load(Ordering::Relaxed)
    }

    /// Reports how a probe of a backend ended.
    pub fn probed(&self, backend: usize, result: Result<(), Failure>) {
        let change = self.dispatcher().probed(backend, result);
        self.announce(backend, change);
    }

    /// May the backend get requests, if only as the last resort?
    pub fn is_usable(&self, backend: usize) -> bool {
        self.dispatcher().is_usable(backend)
    }

    /// May whoever waits for the backend wait for ever?
    pub fn is_silent(&self, backend: usize) -> bool {
        self.dispatcher().is_silent(backend)
    }

    /// May a backend get requests that is not among these?
    pub fn has_other(&self, tried: BackendSet) -> bool {
        let dispatcher = self.dispatcher();
        (0..self.targets.len()).any(|backend| tried & (1 << backend) == 0 && dispatcher.is_usable(backend))
    }

    /// Ends when a backend has changed its state, or another one may be used again.
    pub fn news(&self, backend: usize) -> Notified<'_> {
        self.news[backend].notified()
    }

    /// How far the router is on its way to its end.
    pub fn phase(&self) -> Phase {
        Phase::ALL[usize::from(self.phase.load(Ordering::Relaxed))]
    }

    /// The phase, for those who must be woken when it changes.
    pub fn phases(&self) -> watch::Receiver<Phase> {
        self.phases.subscribe()
    }

    /// Enters a phase, unless a later one has begun.
    pub fn enter(&self, phase: Phase) {
        if self.phase.fetch_max(phase as u8, Ordering::Relaxed) < phase as u8 {
            self.phases.send_modify(|current| *current = phase.max(*current));
            let in_flight = self.in_flight();
            match phase {
                Phase::Serving => {}
                Phase::Leaving => tracing::info!(in_flight, "shutdown begins"),
                Phase::Draining => tracing::info!(in_flight, "drain begins"),
                Phase::Cut => tracing::warn!(in_flight, "drain is over, requests are cut off"),
            }
        }
    }

    /// The figures.
    pub fn stats(&self) -> RouterStats {
        self.dispatcher().stats()
    }

    /// The last decisions, oldest first.
    pub fn decisions(&self) -> Vec<DecisionRecord> {
        self.dispatcher().decisions()
    }

    /// Counts an answer that goes to a client: a backend's, or the router's own.
    pub fn count_status(&self, backend: Option<usize>, status: StatusCode) {
        self.statuses[backend.unwrap_or(self.targets.len())].count(status);
    }

    /// The figures as Prometheus text.
    pub fn metrics(&self) -> String {
        let counts = Counts {
            statuses: self.statuses.iter().map(Statuses::counts).collect(),
            log_lines_dropped: self.log.as_ref().map_or(0, |log| log.dropped()),
            bad_request: self.bad_requests.load(Ordering::Relaxed),
            overloaded: self.overloaded.load(Ordering::Relaxed),
            no_answer: self.unanswered.load(Ordering::Relaxed),
        };
        metrics::render(self.stats(), counts)
    }

    fn announce(&self, backend: usize, change: Option<Change>) {
        let Some(change) = change else { return };
        match change {
            Change::Ejected { .. } | Change::StillDown { .. } => self.news[backend].notify_waiters(),
            Change::Readmitted => self.news.iter().for_each(Notify::notify_waiters),
        }
        let left = (0..self.targets.len()).filter(|&other| self.is_usable(other)).count();
        if left == 0 && matches!(change, Change::Ejected { .. }) {
            self.lines.no_engine(&self.targets[backend].name);
        }
        let gates = &self.log_gates[backend];
        let gate = match change {
            Change::Ejected { .. } => &gates.ejected,
            Change::StillDown { .. } => &gates.still_out,
            Change::Readmitted => &gates.used_again,
        };
        let Some(repeated) = gate.pass() else { return };
        let engine = &self.targets[backend].name;
        match change {
            Change::Ejected { cause, last } => {
                let (reason, last) = (cause.name(), last.name());
                tracing::warn!(engine, reason, last, engines_left = left, repeated, "engine ejected");
            }
            Change::StillDown { cause } => {
                let reason = cause.name();
                tracing::warn!(engine, reason, engines_left = left, repeated, "engine is still out");
            }
            Change::Readmitted => {
                tracing::info!(engine, engines_left = left, repeated, "engine is used again");
            }
        }
    }

    fn now_us(&self) -> u64 {
        self.started.elapsed().as_micros() as u64
    }

    /// The dispatcher's methods leave it whole at every step, so a panic elsewhere while it was
    /// locked is no reason to stop.
    fn dispatcher(&self) -> MutexGuard<'_, Dispatcher> {
        self.dispatcher.lock()
    }
}

/// How far a router is on its way to its end, in order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Phase {
    Serving,
    /// It serves, and `/health` says that it will not for long.
    Leaving,
    /// It takes no more connections; requests under way may end.
    Draining,
    /// Requests under way end with an error.
    Cut,
}

impl Phase {
    const ALL: [Phase; 4] = [Phase::Serving, Phase::Leaving, Phase::Draining, Phase::Cut];
}

/// The right of one request to be under way.
#[derive(Debug)]
pub struct Permit(Arc<Shared>);

impl Drop for Permit {
    fn drop(&mut self) {
        self.0.in_flight.fetch_sub(1, Ordering::Relaxed);
    }
}

/// A request on its way to a backend. Ends once: as it is told to, or as cancelled when it is
/// dropped.
#[derive(Debug)]
pub struct Flight {
    shared: Arc<Shared>,
    ask: Arc<Ask>,
    /// Index of the backend.
    pub backend: usize,
    open: Option<Assignment>,
}

impl Flight {
    /// The first byte of the answer has come, after this status.
    pub fn first_byte(&mut self, status: u16) {
        if let Some(assignment) = &mut self.open {
            self.shared.dispatcher().first_byte(self.shared.now_us(), assignment, status);
        }
    }

    /// Must the answer end now?
    pub fn is_cut(&self) -> bool {
        self.shared.phase() == Phase::Cut
    }

    /// The answer has begun and will not come to its end. To be told before the end.
    pub fn is_broken(&self, failure: Failure) {
        let name = &self.shared.targets[self.backend].name;
        self.shared.engine_lines[self.backend].broken(name, failure);
    }

    pub fn end(&mut self, end: End) {
        if let Some(assignment) = self.open.take() {
            let change = self.shared.dispatcher().end(&self.ask, assignment, end);
            self.shared.announce(self.backend, change);
        }
    }
}

impl Drop for Flight {
    fn drop(&mut self) {
        self.end(End::Cancelled);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Backend;
    use crate::health::Cause;
    use crate::policy::Policy;

    #[test]
    fn an_engine_that_comes_and_goes_is_two_lines_a_minute() {
        let engine = Backend { name: "a".into(), url: "http://127.0.0.1:1".into() };
        let config = RouterConfig::new(([127, 0, 0, 1], 0).into(), vec![engine], Policy::Lpwl);
        let targets = config.check().unwrap();
        let shared = Shared::new(config, targets, None);
        let ejected = Change::Ejected { cause: Cause::Gone, last: Failure::Refused };
        let lines = testkit::logged(|| {
            for change in [ejected, Change::Readmitted].repeat(5) {
                shared.announce(0, Some(change));
            }
        });
        assert_eq!(lines.lines().count(), 2, "{lines}");
        assert!(lines.contains("ejected") && lines.contains("used again"), "{lines}");
    }
}
