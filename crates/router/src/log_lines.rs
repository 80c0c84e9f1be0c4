//! The router's log lines about requests and its own end. A line that many requests could repeat is
//! written once a minute for each engine. `docs/reference/logs.md` says what each means.

use crate::health::Failure;
use forebay_transfer::LogGate;

/// What is told of one engine's requests.
#[derive(Debug, Default)]
pub struct EngineLines {
    sent_elsewhere: LogGate,
    broken: LogGate,
}

impl EngineLines {
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
}

/// What is told of the router.
#[derive(Debug, Default)]
pub struct RouterLines {
    no_engine: LogGate,
    unanswered: LogGate,
}

impl RouterLines {
    /// The last engine was ejected.
    pub fn no_engine(&self, last: &str) {
        if let Some(repeated) = self.no_engine.pass() {
            tracing::error!(last, repeated, "no engine is left");
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
