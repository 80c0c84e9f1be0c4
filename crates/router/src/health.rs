//! Whether an engine may be used: a state machine that is told of answered and failed requests and
//! probes.
//!
//! Probes and requests are counted apart: an answered probe does not excuse failed requests, and
//! an answered request does not excuse failed probes. Time limits on requests say nothing as long
//! as probes are answered: long prompts and long answers are slow on a healthy engine, too.

/// Why a request, or an attempt at one, got no whole answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Failure {
    /// Nobody listens: the connection was refused.
    Refused,
    /// The connection was not made in time, or not for another reason than a refusal.
    Unreachable,
    /// The connection broke before the first byte of an answer.
    Closed,
    /// The connection had served an earlier request, and broke before the first byte of an answer:
    /// the engine may just have closed it for being idle.
    ClosedKept,
    /// What came was not HTTP.
    Garbage,
    /// No first byte of an answer in time.
    FirstByteTimeout,
    /// The engine stopped answering probes while the request waited for its first byte.
    Ejected,
    /// The engine answered 404: it does not serve this model.
    NotFound,
    /// The engine answered 429.
    TooManyRequests,
    /// The engine answered 502, 503 or 504.
    Unavailable,
    /// The engine answered another status of 500 and more.
    ServerError,
    /// The answer stopped coming for too long.
    ProgressTimeout,
    /// The answer broke off.
    BrokenOff,
    /// The answer began with status 200 and then said that the engine failed.
    ErrorEvent,
    /// Envoy had another engine answer, and does not say what this one did.
    PassedOver,
    /// The router ended before the answer did.
    Shutdown,
}

impl Failure {
    /// All failures, in the order of the journey of a request, with their names in metrics and
    /// records.
    pub const NAMES: [(Failure, &str); 16] = [
        (Failure::Refused, "refused"),
        (Failure::Unreachable, "unreachable"),
        (Failure::Closed, "closed"),
        (Failure::ClosedKept, "closed-kept"),
        (Failure::Garbage, "garbage"),
        (Failure::FirstByteTimeout, "first-byte-timeout"),
        (Failure::Ejected, "ejected"),
        (Failure::NotFound, "not-found"),
        (Failure::TooManyRequests, "too-many-requests"),
        (Failure::Unavailable, "unavailable"),
        (Failure::ServerError, "server-error"),
        (Failure::ProgressTimeout, "progress-timeout"),
        (Failure::BrokenOff, "broken-off"),
        (Failure::ErrorEvent, "error-event"),
        (Failure::PassedOver, "passed-over"),
        (Failure::Shutdown, "shutdown"),
    ];

    pub fn name(self) -> &'static str {
        Failure::NAMES[self as usize].1
    }

    /// The failure that a status means for which another engine may do better.
    pub fn of_status(status: u16) -> Option<Failure> {
        match status {
            404 => Some(Failure::NotFound),
            429 => Some(Failure::TooManyRequests),
            502..=504 => Some(Failure::Unavailable),
            500.. => Some(Failure::ServerError),
            _ => None,
        }
    }

    fn weight(self) -> Weight {
        match self {
            Failure::Refused
            | Failure::Unreachable
            | Failure::Closed
            | Failure::Garbage
            | Failure::TooManyRequests
            | Failure::Unavailable
            | Failure::ServerError
            | Failure::BrokenOff
            | Failure::PassedOver => Weight::Full,
            Failure::FirstByteTimeout | Failure::ProgressTimeout => Weight::WithProbes,
            Failure::ClosedKept
            | Failure::Ejected
            | Failure::NotFound
            | Failure::ErrorEvent
            | Failure::Shutdown => Weight::None,
        }
    }
}

/// What a failed request says against its engine's health.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Weight {
    Full,
    /// Only if the last probe failed, too.
    WithProbes,
    None,
}

/// The numbers that decide.
#[derive(Debug, Clone, Copy)]
pub struct Thresholds {
    /// Failures in a row that eject.
    pub eject_after: u32,
    /// Answered probes in a row that bring an engine back.
    pub readmit_after: u32,
}

/// Why an engine is not used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cause {
    /// Its process is gone, and its cache with it: a connection was refused.
    Gone,
    /// Probes are not answered. Who waits for it may wait for ever.
    Silent,
    /// Probes are answered with an error. Requests under way may still be answered.
    Unwell,
    /// Requests fail although probes are answered.
    Failing,
}

impl Cause {
    pub fn name(self) -> &'static str {
        match self {
            Cause::Gone => "gone",
            Cause::Silent => "silent",
            Cause::Unwell => "unwell",
            Cause::Failing => "failing",
        }
    }
}

/// A change of an engine's state that others must learn of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Change {
    /// It must not be used any more.
    Ejected {
        cause: Cause,
        /// The failure that settled it.
        last: Failure,
    },
    /// It is still not used, and now for another reason.
    StillDown { cause: Cause },
    /// It may be used again.
    Readmitted,
}

/// Answered probes that bring an engine back whose requests failed, the first time. Each further
/// time without an answered request in between it takes twice as many.
const FIRST_TRIAL_PROBES: u32 = 2;

/// The most answered probes it takes.
const LAST_TRIAL_PROBES: u32 = 64;

/// The health of one engine. It starts up: the first requests need not wait for a probe.
#[derive(Debug)]
pub struct Health {
    thresholds: Thresholds,
    /// Why it is not used; `None` while it is.
    down: Option<Cause>,
    failed_probes: u32,
    failed_requests: u32,
    answered_probes: u32,
    /// Answered probes in a row that bring it back.
    needed_probes: u32,
    /// The same, for the next time that requests fail although probes are answered.
    trial_probes: u32,
}

impl Health {
    /// An engine that is up.
    pub fn new(thresholds: Thresholds) -> Health {
        Health {
            thresholds,
            down: None,
            failed_probes: 0,
            failed_requests: 0,
            answered_probes: 0,
            needed_probes: thresholds.readmit_after,
            trial_probes: FIRST_TRIAL_PROBES,
        }
    }

    pub fn is_up(&self) -> bool {
        self.down.is_none()
    }

    /// May it be used when no engine is up? It may if only requests failed: those of one client
    /// must not take all engines from all others.
    pub fn is_last_resort(&self) -> bool {
        self.down == Some(Cause::Failing)
    }

    /// Is it not to be expected that requests under way are ever answered?
    pub fn is_silent(&self) -> bool {
        self.down == Some(Cause::Silent)
    }

    /// A request was answered, with a status below 400: others say nothing of the engine behind
    /// the HTTP server. This does not bring an ejected engine back; that is the probes' business.
    pub fn answered(&mut self) {
        self.failed_requests = 0;
        self.trial_probes = FIRST_TRIAL_PROBES;
        self.needed_probes = self.thresholds.readmit_after;
    }

    /// A request failed.
    pub fn failed(&mut self, failure: Failure) -> Option<Change> {
        let counts = match failure.weight() {
            Weight::Full => true,
            Weight::WithProbes => self.failed_probes > 0,
            Weight::None => false,
        };
        if !counts {
            return None;
        }
        self.failed_requests = self.failed_requests.saturating_add(1);
        self.judge(failure, Cause::Failing)
    }

    pub fn probe_answered(&mut self) -> Option<Change> {
        self.failed_probes = 0;
        self.answered_probes = self.answered_probes.saturating_add(1);
        let cause = self.down?;
        if self.answered_probes < self.needed_probes {
            return None;
        }
        self.down = None;
        // What failed requests ejected comes back on trial: one more failure, and it is out again.
        self.failed_requests = match cause {
            Cause::Failing => self.failed_requests.min(self.thresholds.eject_after - 1),
            Cause::Gone | Cause::Silent | Cause::Unwell => 0,
        };
        Some(Change::Readmitted)
    }

    pub fn probe_failed(&mut self, failure: Failure) -> Option<Change> {
        self.answered_probes = 0;
        self.failed_probes = self.failed_probes.saturating_add(1);
        let cause = match failure {
            Failure::Unavailable | Failure::ServerError => Cause::Unwell,
            _ => Cause::Silent,
        };
        self.judge(failure, cause)
    }

    /// `cause` is what follows if enough probes have failed.
    fn judge(&mut self, last: Failure, cause: Cause) -> Option<Change> {
        let eject_after = self.thresholds.eject_after;
        let cause = if last == Failure::Refused {
            Cause::Gone
        } else if self.failed_probes >= eject_after {
            cause
        } else if self.failed_probes.saturating_add(self.failed_requests) >= eject_after {
            Cause::Failing
        } else {
            return None;
        };
        if let Some(was) = self.down {
            // A request tells nothing new of an engine that is not used.
            return (cause != Cause::Failing && cause != was).then(|| {
                self.go_down(cause);
                Change::StillDown { cause }
            });
        }
        self.answered_probes = 0;
        self.go_down(cause);
        Some(Change::Ejected { cause, last })
    }

    fn go_down(&mut self, cause: Cause) {
        self.down = Some(cause);
        self.needed_probes = self.thresholds.readmit_after;
        if cause == Cause::Failing {
            self.needed_probes = self.needed_probes.max(self.trial_probes);
            self.trial_probes = (2 * self.trial_probes).min(LAST_TRIAL_PROBES);
        }
    }
}

#[cfg(test)]
mod tests;
