//! What clients have said of single chunks, counted, and how many are being fetched ahead. This
//! file counts and bounds.

use forebay_client::protocol::control::{Report, Verb, Verdict};
use std::sync::atomic::{AtomicUsize, Ordering};

/// Chunks that may be fetched ahead at a time, for all clients together.
const AHEAD_MAX: usize = 4096;

/// What clients have said of chunks, counted, and the chunks that are being fetched ahead.
#[derive(Debug, Default)]
pub struct Controls {
    /// By verb and verdict.
    counts: [[AtomicUsize; Verdict::NAMES.len()]; Verb::NAMES.len()],
    ahead: AtomicUsize,
    came: AtomicUsize,
    failed: AtomicUsize,
}

/// A snapshot of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ControlStat {
    pub chunks: [[usize; Verdict::NAMES.len()]; Verb::NAMES.len()],
    /// Chunks that were fetched ahead and are in memory, and those that did not come.
    pub came: usize,
    pub failed: usize,
}

impl Controls {
    pub fn count(&self, verb: Verb, reports: &[Report]) {
        let Some(at) = Verb::NAMES.iter().position(|name| *name == verb.name()) else { return };
        for report in reports {
            self.counts[at][report.verdict as usize].fetch_add(1, Ordering::Relaxed);
        }
    }

    /// How many of so many chunks may be fetched ahead; they are counted until they end.
    pub fn begin_ahead(&self, wanted: usize) -> usize {
        let mut granted = 0;
        let grant = |ahead: usize| {
            granted = wanted.min(AHEAD_MAX.saturating_sub(ahead));
            Some(ahead + granted)
        };
        // It always grants, if only nothing.
        let _ = self.ahead.fetch_update(Ordering::AcqRel, Ordering::Acquire, grant);
        granted
    }

    pub fn end_ahead(&self, came: bool) {
        self.ahead.fetch_sub(1, Ordering::AcqRel);
        if came { &self.came } else { &self.failed }.fetch_add(1, Ordering::Relaxed);
    }

    pub fn stat(&self) -> ControlStat {
        let load = |count: &AtomicUsize| count.load(Ordering::Relaxed);
        let chunks = self.counts.each_ref().map(|of_verb| of_verb.each_ref().map(load));
        ControlStat { chunks, came: load(&self.came), failed: load(&self.failed) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_storm_of_prefetches_is_granted_as_much_as_may_be_at_a_time() {
        let controls = Controls::default();
        assert_eq!((controls.begin_ahead(AHEAD_MAX - 1), controls.begin_ahead(5)), (AHEAD_MAX - 1, 1));
        assert_eq!(controls.begin_ahead(1), 0);
        controls.end_ahead(true);
        assert_eq!((controls.begin_ahead(7), controls.stat().came), (1, 1));
    }
}
