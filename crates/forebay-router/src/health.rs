//! Whether a backend may be used. It knows successes, failures and probes as they are reported; it must never know
//! how any of them was found out, nor the time.

/// Why a request, or an attempt at one, got no whole answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Failure {
    /// Nobody listens: the connection was refused.
    Refused,
    /// The connection was not made in time, or not for another reason than a refusal.
    Unreachable,
    /// The connection broke before the first byte of an answer.
    Closed,
    /// What came was not HTTP.
    Garbage,
    /// No first byte of an answer in time.
    FirstByteTimeout,
    /// The backend was ejected while the request waited for its first byte.
    Ejected,
    /// The backend answered 502, 503 or 504.
    Unavailable,
    /// The answer stopped coming for too long.
    ProgressTimeout,
    /// The answer broke off.
    BrokenOff,
    /// The answer began with status 200 and then said that the engine failed.
    ErrorEvent,
}

impl Failure {
    /// All failures, in the order of the journey of a request.
    pub const ALL: [Failure; 10] = [
        Failure::Refused,
        Failure::Unreachable,
        Failure::Closed,
        Failure::Garbage,
        Failure::FirstByteTimeout,
        Failure::Ejected,
        Failure::Unavailable,
        Failure::ProgressTimeout,
        Failure::BrokenOff,
        Failure::ErrorEvent,
    ];

    /// The name in metrics and records.
    pub fn name(self) -> &'static str {
        match self {
            Failure::Refused => "refused",
            Failure::Unreachable => "unreachable",
            Failure::Closed => "closed",
            Failure::Garbage => "garbage",
            Failure::FirstByteTimeout => "first-byte-timeout",
            Failure::Ejected => "ejected",
            Failure::Unavailable => "unavailable",
            Failure::ProgressTimeout => "progress-timeout",
            Failure::BrokenOff => "broken-off",
            Failure::ErrorEvent => "error-event",
        }
    }

    /// Does it speak against the backend's health? A backend that says it is busy or that one request failed is alive,
    /// and one that was ejected has been counted already.
    fn counts(self) -> bool {
        !matches!(self, Failure::Ejected | Failure::Unavailable | Failure::ErrorEvent)
    }
}

/// A change of a backend's state that others must learn of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Change {
    /// It must not be used any more.
    Ejected {
        /// Its process is gone, and its cache with it.
        gone: bool,
    },
    /// It may be used again.
    Readmitted,
}

/// The health of one backend. It starts up: the first requests need not wait for a probe.
#[derive(Debug)]
pub struct Health {
    up: bool,
    failures_in_a_row: u32,
    eject_after: u32,
}

impl Health {
    /// A backend that is ejected after `eject_after` failures in a row, or one refused connection.
    pub fn new(eject_after: u32) -> Health {
        Health { up: true, failures_in_a_row: 0, eject_after }
    }

    /// May it be used?
    pub fn is_up(&self) -> bool {
        self.up
    }

    /// A request was answered. This does not bring an ejected backend back: the answer was to an old request.
    pub fn answered(&mut self) {
        self.failures_in_a_row = 0;
    }

    /// A probe was answered.
    pub fn probe_answered(&mut self) -> Option<Change> {
        self.failures_in_a_row = 0;
        let was_up = std::mem::replace(&mut self.up, true);
        (!was_up).then_some(Change::Readmitted)
    }

    /// A request failed.
    pub fn failed(&mut self, failure: Failure) -> Option<Change> {
        if failure.counts() { self.probe_failed(failure) } else { None }
    }

    /// A probe failed: here even a polite refusal counts.
    pub fn probe_failed(&mut self, failure: Failure) -> Option<Change> {
        self.failures_in_a_row = self.failures_in_a_row.saturating_add(1);
        let gone = failure == Failure::Refused;
        if !self.up || !(gone || self.failures_in_a_row >= self.eject_after) {
            return None;
        }
        self.up = false;
        Some(Change::Ejected { gone })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_failures_in_a_row_eject() {
        let mut health = Health::new(3);
        assert_eq!(health.failed(Failure::Closed), None);
        assert_eq!(health.failed(Failure::FirstByteTimeout), None);
        health.answered();
        assert_eq!(health.failed(Failure::Garbage), None);
        assert_eq!(health.failed(Failure::Garbage), None);
        assert_eq!(health.failed(Failure::Garbage), Some(Change::Ejected { gone: false }));
        assert_eq!(health.failed(Failure::Garbage), None, "once");
        assert!(!health.is_up());
    }

    #[test]
    fn a_refused_connection_ejects_at_once() {
        let mut health = Health::new(3);
        assert_eq!(health.failed(Failure::Refused), Some(Change::Ejected { gone: true }));
    }

    #[test]
    fn only_a_probe_brings_a_backend_back() {
        let mut health = Health::new(1);
        health.failed(Failure::Closed);
        health.answered();
        assert!(!health.is_up());
        assert_eq!(health.probe_answered(), Some(Change::Readmitted));
        assert!(health.is_up());
        assert_eq!(health.probe_answered(), None);
    }

    #[test]
    fn a_busy_backend_is_not_a_sick_one() {
        let mut health = Health::new(1);
        assert_eq!(health.failed(Failure::Unavailable), None);
        assert_eq!(health.failed(Failure::Ejected), None);
        assert!(health.is_up());
        assert_eq!(health.probe_failed(Failure::Unavailable), Some(Change::Ejected { gone: false }));
    }
}
