//! The endurance budget: how much may be written to the SSD. This file knows bytes and time.

const DAY_US: u64 = 86_400_000_000;

/// The share of a day's budget that may be written at once: one in so many, an hour's worth.
const BURST_ONE_IN: u64 = 24;

/// Once writes had to be refused, so large a share of the burst has to flow in before there are
/// any: one in so many.
const REOPEN_ONE_IN: u128 = 16;

/// How far down a write may draw the budget.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Claim {
    /// To nothing.
    Full,
    /// To one half, so that the other is there for better claims.
    Half,
}

/// A token bucket with gates. In any 24 hours at most the day's budget is taken: a burst, and what
/// flows in afterwards.
///
/// A bucket that is nearly empty all the time lets single chunks through as they happen to come,
/// and leaves holes in every chain. So a claim that was refused stays refused until a sixteenth of
/// the burst has flowed in, and whole chains are written or are not.
#[derive(Debug, Clone)]
pub(crate) struct Endurance {
    bytes_per_day: u64,
    /// In bytes times [`DAY_US`], so that nothing is lost to rounding.
    level: u128,
    at_us: u64,
    /// Whether the last of each claim was refused.
    refused: [bool; 2],
}

impl Endurance {
    /// A full bucket at a time.
    pub fn new(bytes_per_day: u64, now_us: u64) -> Endurance {
        let mut endurance = Endurance { bytes_per_day, level: 0, at_us: now_us, refused: [false; 2] };
        endurance.level = endurance.full();
        endurance
    }

    /// What can be written at once at most.
    fn burst_bytes(&self) -> u64 {
        self.bytes_per_day / BURST_ONE_IN
    }

    /// Takes bytes that are about to be written; whether they may be. Time that goes back is taken
    /// as standing still.
    pub fn take(&mut self, bytes: u64, claim: Claim, now_us: u64) -> bool {
        self.refill(now_us);
        let (reserved, full) = (self.reserved(claim), self.full());
        let refused = &mut self.refused[claim as usize];
        if *refused && self.level < reserved + full / REOPEN_ONE_IN {
            return false;
        }
        let cost = u128::from(bytes) * u128::from(DAY_US);
        *refused = cost + reserved > self.level;
        if *refused {
            return false;
        }
        self.level -= cost;
        true
    }

    fn refill(&mut self, now_us: u64) {
        let elapsed_us = now_us.saturating_sub(self.at_us);
        self.at_us = self.at_us.max(now_us);
        let flow_per_day = self.bytes_per_day - self.burst_bytes();
        let inflow = u128::from(elapsed_us) * u128::from(flow_per_day);
        self.level = self.level.saturating_add(inflow).min(self.full());
    }

    fn reserved(&self, claim: Claim) -> u128 {
        match claim {
            Claim::Full => 0,
            Claim::Half => self.full() / 2,
        }
    }

    fn full(&self) -> u128 {
        u128::from(self.burst_bytes()) * u128::from(DAY_US)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const HOUR_US: u64 = DAY_US / 24;
    const SECOND_US: u64 = 1_000_000;

    #[test]
    fn a_steady_day_uses_the_whole_budget() {
        let mut endurance = Endurance::new(24_000, 0);
        let written = (0..DAY_US / SECOND_US)
            .filter(|second| endurance.take(1, Claim::Full, second * SECOND_US))
            .count();
        assert!((23_900..=24_000).contains(&written), "{written}");
    }

    #[test]
    fn a_refused_claim_stays_refused_until_a_sixteenth_of_the_burst_is_back() {
        let mut endurance = Endurance::new(24_000, 0);
        assert!(endurance.take(1_000, Claim::Full, 0), "an hour's worth at once");
        assert!(!endurance.take(1, Claim::Full, SECOND_US));
        // 23 of 24 parts flow in: 958 bytes an hour.
        assert!(!endurance.take(1, Claim::Full, HOUR_US / 17));
        assert!(endurance.take(1, Claim::Full, HOUR_US / 15));
        assert!(endurance.take(1, Claim::Full, HOUR_US / 15), "open until it runs out");
    }

    #[test]
    fn half_of_the_burst_is_kept_for_better_claims() {
        let mut endurance = Endurance::new(24_000, 0);
        assert!(!endurance.take(501, Claim::Half, 0));
        assert!(endurance.take(500, Claim::Half, 0));
        assert!(!endurance.take(1, Claim::Half, 0));
        assert!(endurance.take(500, Claim::Full, 0), "one claim's refusal is not the other's");
    }

    #[test]
    fn what_cannot_fit_is_refused_for_ever() {
        let mut endurance = Endurance::new(24_000, 0);
        assert!(!endurance.take(1_001, Claim::Full, 0));
        assert!(!endurance.take(1_001, Claim::Full, DAY_US));
        assert!(!Endurance::new(0, 0).take(1, Claim::Full, u64::MAX));
        assert!(!Endurance::new(u64::MAX, 0).take(u64::MAX, Claim::Half, u64::MAX), "and nothing overflows");
    }

    #[test]
    fn time_that_goes_back_earns_nothing() {
        let mut endurance = Endurance::new(24_000, DAY_US);
        assert!(endurance.take(1_000, Claim::Full, DAY_US));
        assert!(!endurance.take(1, Claim::Full, 0));
        assert!(!endurance.take(1, Claim::Full, DAY_US));
    }

    proptest! {
        #[test]
        fn no_day_has_more_than_its_budget(
            bytes_per_day in 0u64..1_000_000,
            asks in prop::collection::vec((0u64..HOUR_US / 4, 0u64..400, any::<bool>()), 1..400),
        ) {
            let mut endurance = Endurance::new(bytes_per_day, 0);
            let mut taken: Vec<(u64, u64)> = Vec::new();
            let mut now_us = 0;
            for (pause_us, percent_of_burst, half) in asks {
                now_us += pause_us;
                let bytes = endurance.burst_bytes() * percent_of_burst / 400;
                if endurance.take(bytes, if half { Claim::Half } else { Claim::Full }, now_us) {
                    taken.push((now_us, bytes));
                }
                let day: u64 = taken.iter().filter(|(at, _)| at + DAY_US > now_us).map(|(_, bytes)| bytes).sum();
                prop_assert!(day <= bytes_per_day);
            }
        }
    }
}
