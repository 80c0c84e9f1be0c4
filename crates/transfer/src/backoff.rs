//! How long to wait before the next attempt: twice as long after each failure in a row, up to a
//! limit. It knows no clock, so that state machines can use it as well as threads.

use std::time::Duration;

/// Waiting times that double.
#[derive(Debug, Clone)]
pub struct Backoff {
    first: Duration,
    max: Duration,
    next: Duration,
}

impl Backoff {
    /// The first wait, and the longest one.
    pub const fn new(first: Duration, max: Duration) -> Backoff {
        Backoff { first, max, next: first }
    }

    /// How long to wait after one more failure.
    pub fn pause(&mut self) -> Duration {
        let now = self.next;
        self.next = now.saturating_mul(2).min(self.max);
        now
    }

    /// An attempt has succeeded: the next failure is a first one again.
    pub fn reset(&mut self) {
        self.next = self.first;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_double_up_to_the_limit_and_begin_anew_after_a_success() {
        let mut backoff = Backoff::new(Duration::from_secs(1), Duration::from_secs(5));
        assert_eq!([(); 5].map(|()| backoff.pause().as_secs()), [1, 2, 4, 5, 5]);
        backoff.reset();
        assert_eq!(backoff.pause().as_secs(), 1);
    }
}
