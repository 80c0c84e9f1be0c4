//! Rates as they were measured lately. This file knows amounts and times; it must never know what is moved or computed.

/// A rate that follows measurements and returns to what was expected when there are none.
///
/// It is all that was done divided by all the time that took, where older measurements count less: half after each
/// half-life. The expectation counts as a measurement that never ages. A source that was slow once and has been avoided
/// since therefore gets another try, without anyone having to try it on purpose.
///
/// ```
/// use forebay_store::admission::MeasuredRate;
///
/// // 3,500 bytes/us are expected; what is measured for 0.1 s counts as much as that; half of it is forgotten in 10 s.
/// let mut disk = MeasuredRate::new(3_500.0, 100_000, 10_000_000);
/// disk.observe(500_000_000, 1_000_000, 0);
/// assert!(disk.per_us(0) < 800.0);
/// assert!(disk.per_us(120_000_000) > 3_400.0);
/// ```
#[derive(Debug, Clone, Copy)]
pub struct MeasuredRate {
    expected_per_us: f64,
    expected_weight_us: f64,
    half_life_us: f64,
    amount: f64,
    busy_us: f64,
    at_us: u64,
}

impl MeasuredRate {
    /// A rate without measurements. `expected_per_us` units are done in a microsecond, and are believed as if that had
    /// been measured for `expected_weight_us` just now. A weight or a half-life of 0 is taken as a microsecond, a rate that
    /// is not a positive number as 0.
    pub fn new(expected_per_us: f64, expected_weight_us: u64, half_life_us: u64) -> MeasuredRate {
        let usable = expected_per_us.is_finite() && expected_per_us > 0.0;
        MeasuredRate {
            expected_per_us: if usable { expected_per_us } else { 0.0 },
            expected_weight_us: expected_weight_us.max(1) as f64,
            half_life_us: half_life_us.max(1) as f64,
            amount: 0.0,
            busy_us: 0.0,
            at_us: 0,
        }
    }

    /// Notes that so much was done in `busy_us`, which ended now. Time during which the source served others as well
    /// counts for both only as far as each had its share.
    pub fn observe(&mut self, amount: u64, busy_us: u64, now_us: u64) {
        let kept = self.kept(now_us);
        self.amount = self.amount * kept + amount as f64;
        self.busy_us = self.busy_us * kept + busy_us as f64;
        self.at_us = self.at_us.max(now_us);
    }

    /// Units in a microsecond, as far as is known now.
    pub fn per_us(&self, now_us: u64) -> f64 {
        let kept = self.kept(now_us);
        let amount = self.expected_per_us * self.expected_weight_us + self.amount * kept;
        amount / (self.expected_weight_us + self.busy_us * kept)
    }

    /// What is left of the measurements.
    fn kept(&self, now_us: u64) -> f64 {
        (-(now_us.saturating_sub(self.at_us) as f64) / self.half_life_us).exp2()
    }
}

#[cfg(test)]
mod tests {
    use super::MeasuredRate;
    use proptest::prelude::*;

    #[test]
    fn without_measurements_it_is_what_was_expected() {
        assert_eq!(MeasuredRate::new(3_500.0, 100_000, 1_000_000).per_us(u64::MAX), 3_500.0);
        for nonsense in [f64::NAN, f64::INFINITY, -1.0, 0.0] {
            assert_eq!(MeasuredRate::new(nonsense, 0, 0).per_us(0), 0.0);
        }
    }

    #[test]
    fn small_and_large_amounts_count_by_the_time_they_took() {
        let mut rate = MeasuredRate::new(1.0, 1, 1_000_000);
        rate.observe(1_000, 1, 0);
        rate.observe(1_000, 999, 0);
        assert!((rate.per_us(0) - 2.0).abs() < 0.01, "2,000 units in 1,000 us, not the mean of 1,000 and 1");
    }

    #[test]
    fn half_of_a_measurement_is_forgotten_in_a_half_life() {
        let mut rate = MeasuredRate::new(100.0, 1_000, 10_000);
        rate.observe(10_000, 1_000, 0);
        assert_eq!(rate.per_us(0), 55.0);
        // 500 us at 10, against 1,000 at 100.
        assert!((rate.per_us(10_000) - 70.0).abs() < 1e-9);
    }

    proptest! {
        #[test]
        fn it_stays_between_the_slowest_and_the_fastest(
            measured in prop::collection::vec((1u64..1 << 40, 1u64..1 << 40, any::<u32>()), 1..50),
            expected in 0.001f64..1e6,
        ) {
            let mut rate = MeasuredRate::new(expected, 100_000, 1_000_000);
            let (mut slowest, mut fastest) = (expected, expected);
            for (amount, busy_us, now_us) in measured {
                rate.observe(amount, busy_us, now_us.into());
                slowest = slowest.min(amount as f64 / busy_us as f64);
                fastest = fastest.max(amount as f64 / busy_us as f64);
                let now = rate.per_us(now_us.into());
                prop_assert!(now >= slowest * 0.999 && now <= fastest * 1.001, "{now} {slowest} {fastest}");
            }
        }
    }
}
