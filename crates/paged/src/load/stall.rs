//! Measures how long an engine waited for layers of a load that were not there yet. It reads no
//! clock: callers pass the times at which waits begin and end.

use crate::busy_time::BusyTime;
use std::collections::BTreeSet;
use std::time::{Duration, Instant};

/// What an engine waited for a load that a step of it waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LoadStall {
    pub job: u64,
    pub time: Duration,
    pub layers_late: u64,
}

/// Adds up the waits for the layers of one load.
#[derive(Debug, Default)]
pub struct StallClock {
    late: BTreeSet<u32>,
    threads: BusyTime,
    /// How long streams of a GPU have waited.
    streams: Duration,
    /// Who may still wait, or be about to say how long somebody else has.
    inside: u32,
    is_over: bool,
    /// It has been said how long it was waited for.
    is_told: bool,
}

impl StallClock {
    /// Somebody comes who will wait if something is not there yet.
    pub fn enter_wait(&mut self) {
        self.inside += 1;
    }

    /// Somebody goes. `true`: the load has ended meanwhile, and its stall is to be told now.
    pub fn leave(&mut self) -> bool {
        self.inside = self.inside.saturating_sub(1);
        self.is_due()
    }

    /// The load has ended. `true`: its stall is to be told now; else by who is the last to leave.
    pub fn over(&mut self) -> bool {
        self.is_over = true;
        self.is_due()
    }

    /// Somebody waits for a layer from now on.
    pub fn begin(&mut self, layer: u32, now: Instant) {
        self.late.insert(layer);
        self.threads.begin(now);
    }

    /// Somebody waits no more.
    pub fn end(&mut self, now: Instant) {
        self.threads.end(now);
    }

    /// Somebody else, as a GPU's stream, has waited for a layer for so long.
    pub fn waited(&mut self, layer: u32, time: Duration) {
        self.late.insert(layer);
        self.streams += time;
    }

    /// What was waited, when that is to be told.
    pub fn stall(&mut self, job: u64, now: Instant) -> LoadStall {
        let time = self.threads.take(now) + self.streams;
        LoadStall { job, time, layers_late: self.late.len() as u64 }
    }

    /// Once.
    fn is_due(&mut self) -> bool {
        let is_due = self.is_over && self.inside == 0 && !self.is_told;
        self.is_told |= is_due;
        is_due
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stall_is_the_time_in_which_somebody_waited_and_a_layer_is_late_once() {
        let start = Instant::now();
        let at = |second: u64| start + Duration::from_secs(second);
        let mut clock = StallClock::default();
        // Twice for one layer, as where it has to be begun first; then two threads beside each
        // other.
        clock.begin(0, at(0));
        clock.end(at(1));
        clock.begin(0, at(1));
        clock.end(at(3));
        clock.begin(4, at(10));
        clock.begin(5, at(11));
        clock.end(at(12));
        clock.end(at(14));
        clock.waited(6, Duration::from_secs(1));
        clock.waited(5, Duration::from_secs(2));
        assert_eq!(
            clock.stall(7, at(20)),
            LoadStall { job: 7, time: Duration::from_secs(3 + 4 + 3), layers_late: 4 }
        );
    }

    #[test]
    fn a_stall_is_told_once_when_the_load_has_ended_and_nobody_is_about_to_wait() {
        let mut clock = StallClock::default();
        clock.enter_wait();
        assert!(!clock.leave(), "it goes on");
        clock.enter_wait();
        clock.enter_wait();
        assert!(!clock.over() && !clock.leave(), "somebody may still say something");
        assert!(clock.leave());
        clock.enter_wait();
        assert!(!clock.leave(), "it has been told");
        let mut clock = StallClock::default();
        assert!(clock.over() && !clock.over());
    }
}
