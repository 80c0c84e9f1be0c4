//! The router's log lines about engines and requests. A line that could repeat is written once a
//! minute for each engine. `docs/reference/logs.md` says what each means.

use crate::hand_over::HandOverEnd;
use crate::health::{Change, Failure};
use crate::reported_cache;
use crate::reported_load;
use crate::slo::Slo;
use forebay_transfer::LogGate;

/// What is told of one engine. Each kind of change has a gate of its own, so that "ejected" is not
/// left without its "used again".
#[derive(Debug, Default)]
pub struct EngineLines {
    sent_elsewhere: LogGate,
    broken: LogGate,
    ejected: LogGate,
    still_out: LogGate,
    used_again: LogGate,
    metrics_read: LogGate,
    metrics_unread: LogGate,
    hand_over_failed: LogGate,
    events_followed: LogGate,
    events_not_followed: LogGate,
    emptied: LogGate,
}

impl EngineLines {
    /// It may get requests from now on.
    pub fn come(&self, engine: &str, address: &str) {
        tracing::info!(engine, address, "engine added");
    }

    /// It gets no new ones.
    pub fn drains(&self, engine: &str, in_flight: u64) {
        tracing::info!(engine, in_flight, "engine drains");
    }

    /// It gets no new ones, and will be gone without those.
    pub fn leaves(&self, engine: &str, in_flight: u64) {
        tracing::info!(engine, in_flight, "engine is to leave");
    }

    pub fn gone(&self, engine: &str) {
        tracing::info!(engine, "engine is gone");
    }

    /// This engine failed a request, and another one gets it.
    pub fn sent_elsewhere(&self, engine: &str, to: &str, failure: Failure) {
        if let Some(repeated) = self.sent_elsewhere.pass() {
            let reason = failure.name();
            tracing::warn!(engine, to, reason, repeated, "request sent to another engine");
        }
    }

    /// An answer that had begun did not come to its end.
    pub fn broken(&self, engine: &str, failure: Failure) {
        // The router's own end has its own line.
        if failure == Failure::Shutdown {
            return;
        }
        if let Some(repeated) = self.broken.pass() {
            tracing::warn!(engine, reason = failure.name(), repeated, "answer broke off");
        }
    }

    /// It did not hand a prompt over to another engine, which then answers without.
    pub fn hand_over_failed(&self, engine: &str, to: &str, end: HandOverEnd) {
        if let Some(repeated) = self.hand_over_failed.pass() {
            tracing::warn!(engine, to, reason = end.name(), repeated, "hand-over failed");
        }
    }

    /// It has failed too often in hand-overs, and never done one.
    pub fn takes_no_part(&self, engine: &str, last: HandOverEnd) {
        tracing::warn!(engine, last = last.name(), "engine takes part in no hand-overs");
    }

    /// Its metrics can be read from now on, or no longer.
    pub fn metrics(&self, engine: &str, change: reported_load::Change) {
        let gate = if change.is_ok() { &self.metrics_read } else { &self.metrics_unread };
        let Some(repeated) = gate.pass() else { return };
        match change {
            Ok(()) => tracing::info!(engine, repeated, "engine's metrics are read"),
            Err(unread) => {
                let reason = unread.name();
                tracing::info!(engine, reason, repeated, "engine's metrics cannot be read");
            }
        }
    }

    /// It is known from now on what its KV events say is cached, or no longer.
    pub fn events(&self, engine: &str, change: reported_cache::Change) {
        let gate = if change.is_ok() { &self.events_followed } else { &self.events_not_followed };
        let Some(repeated) = gate.pass() else { return };
        match change {
            Ok(()) => tracing::info!(engine, repeated, "engine's KV events are followed"),
            Err(unknown) => {
                let reason = unknown.name();
                tracing::info!(engine, reason, repeated, "engine's KV events are not followed");
            }
        }
    }

    /// Its KV events say that its cache was emptied.
    pub fn emptied(&self, engine: &str) {
        if let Some(repeated) = self.emptied.pass() {
            tracing::info!(engine, repeated, "engine's cache was emptied");
        }
    }

    /// Its health changed, and so many engines may be used now.
    pub fn changed(&self, engine: &str, change: Change, engines_left: usize) {
        let gate = match change {
            Change::Ejected { .. } => &self.ejected,
            Change::StillDown { .. } => &self.still_out,
            Change::Readmitted => &self.used_again,
        };
        let Some(repeated) = gate.pass() else { return };
        match change {
            Change::Ejected { cause, last } => {
                let (reason, last) = (cause.name(), last.name());
                tracing::warn!(engine, reason, last, engines_left, repeated, "engine ejected");
            }
            Change::StillDown { cause } => {
                let reason = cause.name();
                tracing::warn!(engine, reason, engines_left, repeated, "engine is still out");
            }
            Change::Readmitted => tracing::info!(engine, engines_left, repeated, "engine is used again"),
        }
    }
}

/// What is told of the router.
#[derive(Debug, Default)]
pub struct RouterLines {
    no_engine: LogGate,
    unanswered: LogGate,
    too_late: LogGate,
    answered_by_unknown: LogGate,
    ext_proc_ended: LogGate,
}

impl RouterLines {
    /// The last engine was ejected.
    pub fn no_engine(&self, last: &str) {
        if let Some(repeated) = self.no_engine.pass() {
            tracing::error!(last, repeated, "no engine is left");
        }
    }

    /// A request is refused, because no engine would keep to its SLO.
    pub fn too_late(&self, slo: Slo, earliest_us: u64) {
        if let Some(repeated) = self.too_late.pass() {
            let [slo_ttft_ms, earliest_ms] =
                [slo.ttft_us.unwrap_or_default(), earliest_us].map(|us| us / 1_000);
            tracing::warn!(slo_ttft_ms, earliest_ms, repeated, "request refused for its SLO");
        }
    }

    /// Envoy had an engine answer that the router does not know.
    pub fn answered_by_unknown(&self, address: &str) {
        if let Some(repeated) = self.answered_by_unknown.pass() {
            tracing::warn!(address, repeated, "request answered by an unknown engine");
        }
    }

    /// Envoy says what the protocol, or the endpoint picker, does not allow.
    pub fn ext_proc_ended(&self, reason: &str) {
        if let Some(repeated) = self.ext_proc_ended.pass() {
            tracing::warn!(reason, repeated, "ext_proc stream ended");
        }
    }

    /// A client gets an error, because no engine answered. Without a failure none could be asked.
    pub fn unanswered(&self, attempts: u32, failure: Option<Failure>) {
        if let Some(repeated) = self.unanswered.pass() {
            let reason = failure.map_or("no-engine", Failure::name);
            tracing::warn!(reason, attempts, repeated, "no engine answered a request");
        }
    }
}
