//! How long an engine waited for layers of a load, its *bubble*. Sans-IO: this file knows moments that it is told; it must never know
//! why a layer is late.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

/// What an engine waited for a load that a step of it waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Bubble {
    /// Which load.
    pub job: u64,
    /// How long.
    pub time: Duration,
    /// For how many layers.
    pub layers_late: u64,
}

/// Waits for the layers of one load.
#[derive(Debug, Default)]
pub struct Waits {
    late: BTreeSet<u32>,
    /// Threads that wait.
    waiting: u32,
    /// Since when there was always one.
    since: Option<Instant>,
    time: Duration,
}

impl Waits {
    /// Somebody waits for a layer from now on.
    pub fn begin(&mut self, layer: u32, now: Instant) {
        self.late.insert(layer);
        self.waiting += 1;
        self.since.get_or_insert(now);
    }

    /// Somebody waits no more.
    pub fn end(&mut self, now: Instant) {
        self.waiting = self.waiting.saturating_sub(1);
        if self.waiting == 0 {
            self.count(now);
        }
    }

    /// Somebody else, as a GPU's stream, has waited for a layer for so long.
    pub fn waited(&mut self, layer: u32, time: Duration) {
        self.late.insert(layer);
        self.time += time;
    }

    /// What was waited until now, when the load has ended. Who waits still is about to hear of that.
    pub fn bubble(&mut self, job: u64, now: Instant) -> Bubble {
        self.count(now);
        Bubble { job, time: self.time, layers_late: self.late.len() as u64 }
    }

    fn count(&mut self, now: Instant) {
        self.time += self.since.take().map_or(Duration::ZERO, |since| now.saturating_duration_since(since));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bubble_is_the_time_in_which_somebody_waited_and_a_layer_is_late_once() {
        let start = Instant::now();
        let at = |second: u64| start + Duration::from_secs(second);
        let mut waits = Waits::default();
        // Twice for one layer, as where it has to be begun first; then two threads beside each other.
        waits.begin(0, at(0));
        waits.end(at(1));
        waits.begin(0, at(1));
        waits.end(at(3));
        waits.begin(4, at(10));
        waits.begin(5, at(11));
        waits.end(at(12));
        waits.end(at(14));
        // The load ends while somebody waits, who says so a little later.
        waits.begin(6, at(20));
        let bubble = Bubble { job: 7, time: Duration::from_secs(3 + 4 + 2), layers_late: 4 };
        assert_eq!(waits.bubble(7, at(22)), bubble);
        waits.end(at(23));
        assert_eq!(waits.bubble(7, at(30)), bubble);
        waits.waited(6, Duration::from_secs(1));
        waits.waited(8, Duration::from_secs(2));
        let bubble = Bubble { job: 7, time: Duration::from_secs(9 + 3), layers_late: 5 };
        assert_eq!(waits.bubble(7, at(30)), bubble);
    }
}
