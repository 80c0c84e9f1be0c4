//! How much write-back a disk bears: additive increase, multiplicative decrease of the write lots
//! in flight, driven by how long reads take meanwhile. This file knows latencies and ages.
//!
//! Reads come first: in an epoch in which more than one read in a hundred took longer than its
//! goal, the window is halved; after any other epoch it grows by one lot. KV that waits to be
//! written takes memory that others need, so its age is bounded too: past half of the bound the
//! window is raised with age, and at the bound the owner is told to drop what is older, since a
//! cache may forget but must not hold everybody up.

/// The fixed numbers of a pacer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PacerLimits {
    /// Write lots that are always allowed.
    pub lots_min: u32,
    /// Write lots allowed at most.
    pub lots_max: u32,
    /// How long a read should take beside the time for its bytes.
    pub read_goal_us: u64,
    /// How fast a read's bytes should come; from the link's measured rate and what reads must keep
    /// of it.
    pub read_goal_bytes_per_s: u64,
    /// How long the window stays before it is judged.
    pub epoch_us: u64,
    /// How old KV may become before it is written or dropped.
    pub dirty_age_max_us: u64,
}

/// Reads beyond their goal, in percent, that an epoch may have without being judged congested.
const MISSES_ALLOWED_PERCENT: u64 = 1;

/// Says how many write lots may be in flight.
///
/// ```
/// use forebay_store::disk::{PacerLimits, WriteBackPacer};
/// let mut pacer = WriteBackPacer::new(PacerLimits {
///     lots_min: 1,
///     lots_max: 16,
///     read_goal_us: 2_000,
///     read_goal_bytes_per_s: 1_000_000_000,
///     epoch_us: 100_000,
///     dirty_age_max_us: 10_000_000,
/// });
/// assert_eq!(pacer.window_lots(0, None), 16);
/// pacer.read_ended(50_000, 9_000, 1 << 20); // 9 ms for 1 MiB, where about 3 ms would be good
/// assert_eq!(pacer.window_lots(100_000, None), 8);
/// assert_eq!(pacer.window_lots(200_000, None), 9);
/// ```
#[derive(Debug, Clone)]
pub struct WriteBackPacer {
    limits: PacerLimits,
    window_lots: u32,
    epoch_began_us: u64,
    reads: u64,
    misses: u64,
}

impl WriteBackPacer {
    /// A pacer that allows everything until reads show that it is too much. At least one lot is
    /// always allowed, and `lots_max` is at least `lots_min`.
    pub fn new(limits: PacerLimits) -> WriteBackPacer {
        let lots_min = limits.lots_min.max(1);
        let lots_max = limits.lots_max.max(lots_min);
        let limits = PacerLimits { lots_min, lots_max, epoch_us: limits.epoch_us.max(1), ..limits };
        WriteBackPacer { limits, window_lots: lots_max, epoch_began_us: 0, reads: 0, misses: 0 }
    }

    /// Notes a read of `bytes` bytes that ended at `now_us` after `took_us` on the link.
    pub fn read_ended(&mut self, now_us: u64, took_us: u64, bytes: u64) {
        self.judge(now_us);
        self.reads += 1;
        self.misses += u64::from(took_us > self.goal_us(bytes));
    }

    /// Write lots that may be in flight now, given when the oldest bytes that wait to be written
    /// became dirty.
    pub fn window_lots(&mut self, now_us: u64, oldest_dirty_us: Option<u64>) -> u32 {
        self.judge(now_us);
        let age_us = oldest_dirty_us.map_or(0, |since_us| now_us.saturating_sub(since_us));
        self.window_lots.max(self.window_for_age(age_us))
    }

    /// Write lots that reads leave room for, as judged last.
    pub fn judged_lots(&self) -> u32 {
        self.window_lots
    }

    /// Whether bytes that have been dirty since `since_us` are to be dropped rather than written.
    pub fn is_too_old(&self, now_us: u64, since_us: u64) -> bool {
        now_us.saturating_sub(since_us) > self.limits.dirty_age_max_us
    }

    fn goal_us(&self, bytes: u64) -> u64 {
        let transfer_us =
            u128::from(bytes) * 1_000_000 / u128::from(self.limits.read_goal_bytes_per_s.max(1));
        self.limits.read_goal_us.saturating_add(u64::try_from(transfer_us).unwrap_or(u64::MAX))
    }

    /// Ends the epoch if its time is over. Epochs in which nothing happened count as one.
    fn judge(&mut self, now_us: u64) {
        if now_us.saturating_sub(self.epoch_began_us) < self.limits.epoch_us {
            return;
        }
        let PacerLimits { lots_min, lots_max, .. } = self.limits;
        let congested = self.misses * 100 > self.reads * MISSES_ALLOWED_PERCENT;
        let window_lots = if congested { self.window_lots / 2 } else { self.window_lots + 1 };
        self.window_lots = window_lots.clamp(lots_min, lots_max);
        (self.reads, self.misses, self.epoch_began_us) = (0, 0, now_us);
    }

    /// What age alone demands: `lots_min` up to half of the bound, `lots_max` at the bound, in
    /// proportion between.
    fn window_for_age(&self, age_us: u64) -> u32 {
        let PacerLimits { lots_min, lots_max, dirty_age_max_us, .. } = self.limits;
        let half_us = dirty_age_max_us / 2;
        let urgent_us = age_us.saturating_sub(half_us);
        let range_us = (dirty_age_max_us - half_us).max(1);
        let extra =
            u128::from(lots_max - lots_min) * u128::from(urgent_us.min(range_us)) / u128::from(range_us);
        lots_min + extra as u32
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn limits() -> PacerLimits {
        PacerLimits {
            lots_min: 2,
            lots_max: 32,
            read_goal_us: 1_000,
            read_goal_bytes_per_s: 1_000_000_000,
            epoch_us: 1_000,
            dirty_age_max_us: 1_000_000,
        }
    }

    /// Runs epochs of 100 reads each, `misses` of them beyond their goal; the window after each.
    fn run(pacer: &mut WriteBackPacer, epochs: u64, misses: u64) -> Vec<u32> {
        let first_us = pacer.epoch_began_us;
        let epoch = |epoch: u64| {
            let began_us = first_us + epoch * 1_000;
            (0..100).for_each(|read| pacer.read_ended(began_us, 1_000 + u64::from(read < misses), 0));
            pacer.window_lots(began_us + 1_000, None)
        };
        (0..epochs).map(epoch).collect()
    }

    #[test]
    fn slow_reads_halve_the_window_and_good_ones_raise_it_by_one() {
        let mut pacer = WriteBackPacer::new(limits());
        assert_eq!(run(&mut pacer, 5, 2), [16, 8, 4, 2, 2]);
        assert_eq!(run(&mut pacer, 3, 1), [3, 4, 5]);
        assert_eq!(run(&mut pacer, 40, 0).last(), Some(&32));
    }

    #[test]
    fn a_long_read_may_take_as_long_as_its_bytes_do() {
        let mut pacer = WriteBackPacer::new(limits());
        pacer.read_ended(0, 11_000, 10_000_000);
        assert_eq!(pacer.window_lots(1_000, None), 32);
        pacer.read_ended(1_000, 11_001, 10_000_000);
        assert_eq!(pacer.window_lots(2_000, None), 16);
    }

    #[test]
    fn age_opens_the_window_and_then_drops() {
        let mut pacer = WriteBackPacer::new(limits());
        run(&mut pacer, 10, 100);
        let now_us = pacer.epoch_began_us;
        let mut at_age = |age_us: u64| pacer.window_lots(now_us + age_us, Some(now_us));
        let lots = [0, 500_000, 750_000, 1_000_000, 9_000_000].map(&mut at_age);
        // The window itself grows by a lot for each look that ends an epoch without reads.
        assert_eq!((lots[0], lots[3], lots[4]), (2, 32, 32));
        assert!(lots[1] < lots[2] && lots[2] < lots[3], "{lots:?}");
        assert!(!pacer.is_too_old(1_000_000, 0) && pacer.is_too_old(1_000_001, 0));
    }

    proptest! {
        /// Any limits and any history: the window stays within its bounds, never shrinks with age,
        /// and at the bound of age everything is allowed.
        #[test]
        fn the_window_stays_within_its_bounds(
            lots in (0u32..100, 0u32..100),
            goal in (0u64..10_000, 0u64..1 << 40),
            times in (0u64..100_000, 0u64..10_000_000),
            history in proptest::collection::vec((0u64..1 << 20, 0u64..1 << 20, any::<u32>()), 0..200),
            ages in (0u64..1 << 40, 0u64..1 << 40),
        ) {
            let mut pacer = WriteBackPacer::new(PacerLimits {
                lots_min: lots.0,
                lots_max: lots.1,
                read_goal_us: goal.0,
                read_goal_bytes_per_s: goal.1,
                epoch_us: times.0,
                dirty_age_max_us: times.1,
            });
            let (min, max) = (lots.0.max(1), lots.1.max(lots.0.max(1)));
            let mut now_us = 1 << 40;
            for (passed_us, took_us, bytes) in history {
                now_us += passed_us;
                pacer.read_ended(now_us, took_us, u64::from(bytes));
                prop_assert!((min..=max).contains(&pacer.window_lots(now_us, None)));
            }
            let (young, old) = (ages.0.min(ages.1), ages.0.max(ages.1));
            let at_young = pacer.window_lots(now_us, Some(now_us - young));
            let at_old = pacer.window_lots(now_us, Some(now_us - old));
            prop_assert!(at_young <= at_old);
            if old >= times.1.max(1) {
                prop_assert_eq!(at_old, max);
            }
        }
    }
}
