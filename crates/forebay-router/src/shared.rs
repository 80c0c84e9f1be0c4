//! What all threads of a router share: the dispatcher behind a lock, the limits, and the count of requests under way.
//! It knows time and who must be woken; it must never know HTTP messages.

use crate::config::{Limits, Target};
use crate::decisions::DecisionRecord;
use crate::dispatcher::{Ask, Assignment, BackendSet, Dispatcher, End};
use crate::health::{Change, Failure};
use crate::metrics::{self, Refusals};
use crate::policy::Policy;
use crate::stats::RouterStats;
use std::hash::{BuildHasher, RandomState};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;
use tokio::sync::Notify;

/// See the module.
#[derive(Debug)]
pub struct Shared {
    /// The backends, by index.
    pub targets: Vec<Target>,
    /// The limits.
    pub limits: Limits,
    /// Differs from start to start, so that nobody can prepare prompts whose hashes collide.
    pub hash_seed: u64,
    dispatcher: Mutex<Dispatcher>,
    /// Wakes those who wait for a first byte of a backend when it is ejected.
    ejected: Vec<Notify>,
    started: Instant,
    in_flight: AtomicUsize,
    /// Requests refused because of what the client sent.
    pub bad_requests: AtomicU64,
    overloaded: AtomicU64,
    /// Requests that no backend answered.
    pub unanswered: AtomicU64,
}

impl Shared {
    /// The state of a router that has just started.
    pub fn new(policy: Policy, targets: Vec<Target>, limits: Limits) -> Arc<Shared> {
        let names = targets.iter().map(|target| target.name.clone()).collect();
        Arc::new(Shared {
            dispatcher: Mutex::new(Dispatcher::new(policy, names, limits.eject_after)),
            ejected: targets.iter().map(|_| Notify::new()).collect(),
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

    /// Reports how a probe of a backend ended.
    pub fn probed(&self, backend: usize, result: Result<(), Failure>) {
        let change = self.dispatcher().probed(backend, result);
        self.announce(backend, change);
    }

    /// May the backend be used?
    pub fn is_up(&self, backend: usize) -> bool {
        self.dispatcher().is_up(backend)
    }

    /// Is a backend up that is not among these?
    pub fn has_other(&self, tried: BackendSet) -> bool {
        let dispatcher = self.dispatcher();
        (0..self.targets.len()).any(|backend| tried & (1 << backend) == 0 && dispatcher.is_up(backend))
    }

    /// Waits until the backend is ejected.
    pub async fn ejection(&self, backend: usize) {
        let ejected = self.ejected[backend].notified();
        // It may have happened between the decision and this moment; from here on the waiting sees it.
        if self.is_up(backend) {
            ejected.await;
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

    /// The figures as Prometheus text.
    pub fn metrics(&self) -> String {
        let refusals = Refusals {
            bad_request: self.bad_requests.load(Ordering::Relaxed),
            overloaded: self.overloaded.load(Ordering::Relaxed),
            no_answer: self.unanswered.load(Ordering::Relaxed),
        };
        metrics::render(&self.stats(), refusals)
    }

    fn announce(&self, backend: usize, change: Option<Change>) {
        if let Some(Change::Ejected { .. }) = change {
            self.ejected[backend].notify_waiters();
        }
    }

    fn now_us(&self) -> u64 {
        self.started.elapsed().as_micros() as u64
    }

    /// The dispatcher's methods leave it whole at every step, so a panic elsewhere while it was locked is no reason to
    /// stop.
    fn dispatcher(&self) -> MutexGuard<'_, Dispatcher> {
        self.dispatcher.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The right of one request to be under way.
#[derive(Debug)]
pub struct Permit(Arc<Shared>);

impl Drop for Permit {
    fn drop(&mut self) {
        self.0.in_flight.fetch_sub(1, Ordering::Relaxed);
    }
}

/// A request on its way to a backend. Ends once: as it is told to, or as cancelled when it is dropped.
#[derive(Debug)]
pub struct Flight {
    shared: Arc<Shared>,
    ask: Arc<Ask>,
    /// Index of the backend.
    pub backend: usize,
    open: Option<Assignment>,
}

impl Flight {
    /// The first byte of the answer has come.
    pub fn first_byte(&mut self) {
        if let Some(assignment) = &mut self.open {
            self.shared.dispatcher().first_byte(self.shared.now_us(), assignment);
        }
    }

    /// Ends it.
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
