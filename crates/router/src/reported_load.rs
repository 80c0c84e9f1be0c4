//! What an engine's own metrics add to what the router knows of its load: requests that came by
//! another way, and how large its KV pool is. It knows the readings of one engine and the router's
//! own counts, and takes time as an argument.
//!
//! A reading counts for a while only. What is missing, stale or nonsense is unknown, and then the
//! router's own counts are all there is.

use crate::engine_metrics::EngineMetrics;

/// A reading is no longer believed after this time.
pub const FRESH_US: u64 = 5_000_000;

/// Requests at an engine, how many of them wait to be computed, and the KV that they hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Load {
    pub requests: u64,
    pub waiting: u64,
    pub context_tokens: u64,
}

impl Load {
    pub fn max(self, other: Load) -> Load {
        Load {
            requests: self.requests.max(other.requests),
            waiting: self.waiting.max(other.waiting),
            context_tokens: self.context_tokens.max(other.context_tokens),
        }
    }

    fn min(self, other: Load) -> Load {
        Load {
            requests: self.requests.min(other.requests),
            waiting: self.waiting.min(other.waiting),
            context_tokens: self.context_tokens.min(other.context_tokens),
        }
    }
}

/// How an attempt to read an engine's metrics ended without a reading.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unread {
    /// No answer, or one that says that there is no such page.
    NoPage,
    /// The page lacks what is looked for.
    Missing,
    /// It says what cannot be.
    Nonsense,
}

impl Unread {
    pub const NAMES: [(Unread, &'static str); 3] =
        [(Unread::NoPage, "no-page"), (Unread::Missing, "missing"), (Unread::Nonsense, "nonsense")];

    pub fn name(self) -> &'static str {
        Unread::NAMES[self as usize].1
    }
}

#[derive(Debug, Default)]
pub struct ReportedLoad {
    last: Option<Reading>,
    /// As the log was told last; `None` before the first attempt.
    state: Option<Result<(), Unread>>,
}

#[derive(Debug, Clone, Copy)]
struct Reading {
    at_us: u64,
    metrics: EngineMetrics,
    /// What the router has not sent.
    others: Load,
    /// The same, of this reading and the one before it.
    lasting: Load,
}

/// An engine's metrics can be read from now on, or no longer.
pub type Change = Result<(), Unread>;

impl ReportedLoad {
    /// Takes in what came of reading the metrics. `own` is what the router itself had sent there,
    /// at most, while they were read.
    pub fn note(&mut self, now_us: u64, read: Result<EngineMetrics, Unread>, own: Load) -> Option<Change> {
        let state = match read {
            Ok(metrics) => {
                let others = Load {
                    requests: metrics.running.saturating_add(metrics.waiting).saturating_sub(own.requests),
                    waiting: metrics.waiting.saturating_sub(own.waiting),
                    context_tokens: metrics.held_tokens.unwrap_or(0).saturating_sub(own.context_tokens),
                };
                // An engine counts a request for a moment longer than the router does. Only what
                // two readings show is others' traffic.
                let before = self.fresh(now_us).map_or(Load::default(), |before| before.others);
                self.last = Some(Reading { at_us: now_us, metrics, others, lasting: others.min(before) });
                Ok(())
            }
            // One answer that is late changes nothing yet.
            Err(Unread::NoPage) if self.fresh(now_us).is_some() => return None,
            Err(unread) => {
                self.last = None;
                Err(unread)
            }
        };
        let changed = self.state != Some(state);
        self.state = Some(state);
        changed.then_some(state)
    }

    /// What is at the engine that the router has not sent there.
    pub fn others(&self, now_us: u64) -> Load {
        self.fresh(now_us).map_or(Load::default(), |reading| reading.lasting)
    }

    /// Tokens whose KV fits its GPU.
    pub fn pool_tokens(&self, now_us: u64) -> Option<u64> {
        self.fresh(now_us)?.metrics.pool_tokens
    }

    fn fresh(&self, now_us: u64) -> Option<&Reading> {
        self.last.as_ref().filter(|reading| now_us.saturating_sub(reading.at_us) < FRESH_US)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: u64 = 1_000_000;

    fn page(running: u64, waiting: u64) -> Result<EngineMetrics, Unread> {
        Ok(EngineMetrics { running, waiting, pool_tokens: Some(1_000), held_tokens: Some(100) })
    }

    fn own(requests: u64, waiting: u64) -> Load {
        Load { requests, waiting, context_tokens: 60 }
    }

    #[test]
    fn traffic_of_others_is_what_exceeds_our_own_in_two_readings() {
        let mut load = ReportedLoad::default();
        assert_eq!(load.note(0, page(6, 4), own(3, 1)), Some(Ok(())));
        assert_eq!(load.others(0), Load::default(), "it may be a request of ours that has just ended");
        assert_eq!(load.note(SECOND, page(8, 2), own(3, 1)), None);
        assert_eq!(load.others(SECOND), Load { requests: 7, waiting: 1, context_tokens: 40 });
        load.note(2 * SECOND, page(1, 0), own(3, 1));
        let held = Load { context_tokens: 40, ..Load::default() };
        assert_eq!(load.others(2 * SECOND), held, "less than our own is nobody else's");
    }

    #[test]
    fn a_stale_reading_is_unknown_and_told_once() {
        let mut load = ReportedLoad::default();
        load.note(0, page(9, 9), own(0, 0));
        load.note(SECOND, page(9, 9), own(0, 0));
        let unread = Err(Unread::NoPage);
        assert_eq!(load.note(2 * SECOND, unread, own(0, 0)), None, "one late answer is no change");
        assert_eq!((load.others(2 * SECOND).requests, load.pool_tokens(2 * SECOND)), (18, Some(1_000)));
        let stale = SECOND + FRESH_US;
        assert_eq!((load.others(stale), load.pool_tokens(stale)), (Load::default(), None));
        assert_eq!(load.note(stale, unread, own(0, 0)), Some(Err(Unread::NoPage)));
        assert_eq!(load.note(stale + 1, unread, own(0, 0)), None);
        assert_eq!(load.note(stale + 2, page(0, 0), own(0, 0)), Some(Ok(())));
    }

    #[test]
    fn nonsense_is_unknown_at_once() {
        for unread in [Unread::Nonsense, Unread::Missing] {
            let mut load = ReportedLoad::default();
            load.note(0, page(9, 9), own(0, 0));
            load.note(1, page(9, 9), own(0, 0));
            assert_eq!(load.note(2, Err(unread), own(0, 0)), Some(Err(unread)));
            assert_eq!((load.others(2), load.pool_tokens(2)), (Load::default(), None));
        }
    }

    #[test]
    fn a_clock_that_jumps_back_breaks_nothing() {
        let mut load = ReportedLoad::default();
        load.note(9 * SECOND, page(9, 9), own(0, 0));
        assert_eq!(load.pool_tokens(SECOND), Some(1_000));
    }
}
