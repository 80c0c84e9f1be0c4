//! What all threads of a router share: engines, models and limits, the phase of its end, and what
//! is counted beside the engines' figures.

use crate::admin_token::AdminToken;
use crate::config::{Limits, RouterConfig};
use crate::decision_log::DecisionLog;
use crate::dispatcher::Dispatcher;
use crate::engines::{Comers, Engines};
use crate::hand_over::Protocol;
use crate::health::Thresholds;
use crate::metrics::{self, Counters, LostLines};
use crate::request_log::RequestLog;
use crate::request_trace::Tracing;
use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicUsize, Ordering};
use tokio::sync::watch;

#[derive(Debug)]
pub struct RouterState {
    pub engines: Arc<Engines>,
    /// Requests for models that no engine lists go to any.
    pub any_model: bool,
    /// Where requests are logged, if they are.
    pub log: Option<Arc<RequestLog>>,
    /// How engines hand prompts over to each other, if they do.
    pub hand_over: Option<Protocol>,
    /// Hints about KV come from headers, and are taken out of what clients send.
    pub hints_from_headers: bool,
    /// Who shows it may add, drain and remove engines.
    pub admin_token: Option<AdminToken>,
    pub limits: Limits,
    /// Differs from start to start, so that nobody can prepare prompts whose hashes collide.
    pub hash_seed: u64,
    pub counters: Counters,
    pub tracing: Tracing,
    in_flight: AtomicUsize,
    phase: AtomicU8,
    /// Tells connections of the phase.
    phases: watch::Sender<Phase>,
}

impl RouterState {
    /// The state of a router that has just started.
    pub fn new(
        config: RouterConfig,
        log: Option<RequestLog>,
        decision_log: Option<DecisionLog>,
        tracing: Tracing,
    ) -> (Arc<RouterState>, Comers) {
        let RouterConfig {
            policy,
            engine_model,
            limits,
            any_model,
            admin_token,
            hand_over,
            by_address,
            hints_from_headers,
            ..
        } = config;
        let thresholds = Thresholds { eject_after: limits.eject_after, readmit_after: limits.readmit_after };
        let mut dispatcher = Dispatcher::new(policy, engine_model, thresholds);
        if let Some(config) = hand_over {
            dispatcher = dispatcher.with_hand_overs(config);
        }
        let (engines, comers) = Engines::new(dispatcher, decision_log, by_address);
        let state = Arc::new(RouterState {
            any_model,
            hand_over: hand_over.map(|config| config.protocol),
            hints_from_headers,
            admin_token,
            log: log.map(Arc::new),
            counters: Counters::default(),
            tracing,
            engines: Arc::new(engines),
            limits,
            hash_seed: RandomState::new().hash_one(0),
            in_flight: AtomicUsize::new(0),
            phase: AtomicU8::new(Phase::Serving as u8),
            phases: watch::Sender::new(Phase::Serving),
        });
        (state, comers)
    }

    /// Counts a request as under way, or refuses it because too many are.
    pub fn admit(self: &Arc<RouterState>) -> Option<Permit> {
        let permit = Permit(self.clone());
        if self.in_flight.fetch_add(1, Ordering::Relaxed) < self.limits.max_in_flight {
            return Some(permit);
        }
        self.counters.overloaded.fetch_add(1, Ordering::Relaxed);
        None
    }

    /// Requests under way.
    pub fn in_flight(&self) -> usize {
        self.in_flight.load(Ordering::Relaxed)
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

    /// The figures as Prometheus text.
    pub fn metrics(&self) -> String {
        let requests = self.log.as_ref().map_or(0, |log| log.dropped());
        let decisions = self.engines.decision_log().map_or(0, DecisionLog::dropped);
        let lost = LostLines { requests, decisions };
        let engines = self.engines.all();
        let counts = self.counters.counts(&engines, lost, self.tracing.counts());
        metrics::render(self.engines.stats(), counts)
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
pub struct Permit(Arc<RouterState>);

impl Permit {
    /// Must the answer end now?
    pub fn is_cut(&self) -> bool {
        self.0.phase() == Phase::Cut
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        self.0.in_flight.fetch_sub(1, Ordering::Relaxed);
    }
}
