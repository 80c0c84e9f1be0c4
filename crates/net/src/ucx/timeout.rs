//! How long to wait for something that only the waiting thread brings about.

use std::time::{Duration, Instant};

/// The most that counts between two looks at the clock.
const TURN_MAX: Duration = Duration::from_millis(1);

/// A wait that only the time counts for in which its thread had turns. What was stopped for a
/// second, or had no processor for so long, has not tried for a second.
pub(super) struct TurnTimeout {
    left: Duration,
    looked: Instant,
}

impl TurnTimeout {
    pub fn new(limit: Duration, now: Instant) -> TurnTimeout {
        TurnTimeout { left: limit, looked: now }
    }

    /// Whether it is over. Is asked between any two tries.
    pub fn is_over(&mut self, now: Instant) -> bool {
        let passed = now.saturating_duration_since(self.looked).min(TURN_MAX);
        self.looked = now;
        self.left = self.left.saturating_sub(passed);
        self.left.is_zero()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: Duration = Duration::from_millis(50);

    /// How many of such steps a wait lasts.
    fn steps(step: Duration) -> usize {
        let mut now = Instant::now();
        let mut timeout = TurnTimeout::new(LIMIT, now);
        let mut tries = 0;
        loop {
            now += step;
            tries += 1;
            if timeout.is_over(now) {
                return tries;
            }
        }
    }

    #[test]
    fn a_wait_lasts_as_long_as_it_says() {
        assert_eq!(steps(Duration::from_micros(50)), 1_000);
        assert_eq!(steps(Duration::from_micros(500)), 100);
    }

    #[test]
    fn time_without_turns_is_no_wait() {
        assert_eq!(steps(Duration::from_secs(1)), 50);
    }
}
