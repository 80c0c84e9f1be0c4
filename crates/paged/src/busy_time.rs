//! How long there was always one of something: chunks on their way from a tier, threads that wait
//! for a layer. Sans-IO: it is told moments.

use std::time::{Duration, Instant};

/// Adds up the time in which there was at least one.
#[derive(Debug, Clone, Copy, Default)]
pub struct BusyTime {
    count: u32,
    /// Since when there was always one.
    since: Option<Instant>,
    /// How long there was one before.
    before: Duration,
}

impl BusyTime {
    pub fn begin(&mut self, now: Instant) {
        self.count += 1;
        self.since.get_or_insert(now);
    }

    pub fn end(&mut self, now: Instant) {
        self.count = self.count.saturating_sub(1);
        if self.count == 0 {
            self.before +=
                self.since.take().map_or(Duration::ZERO, |since| now.saturating_duration_since(since));
        }
    }

    /// How long there was one, since this was asked last.
    pub fn take(&mut self, now: Instant) -> Duration {
        let going_on =
            self.since.replace(now).map_or(Duration::ZERO, |since| now.saturating_duration_since(since));
        self.since = self.since.filter(|_| self.count > 0);
        std::mem::take(&mut self.before) + going_on
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_time_is_that_in_which_there_was_one_however_many_beside_each_other() {
        let start = Instant::now();
        let at = |second: u64| start + Duration::from_secs(second);
        let mut time = BusyTime::default();
        assert_eq!(time.take(at(1)), Duration::ZERO);
        // Two beside each other, a pause, and one that goes on.
        [(2, true), (3, true), (4, false), (6, false), (9, true)]
            .into_iter()
            .for_each(|(second, begins)| if begins { time.begin(at(second)) } else { time.end(at(second)) });
        assert_eq!(time.take(at(10)), Duration::from_secs(4 + 1));
        time.end(at(12));
        assert_eq!(time.take(at(20)), Duration::from_secs(2));
        assert_eq!(time.take(at(30)), Duration::ZERO);
    }
}
