//! How far a peer's clock is from this host's: the time that it tells, against the middle of the
//! question and its answer. Certificates have dates, and times of two hosts are compared in traces
//! and logs; leases count seconds, and do not mind.

use crate::cmd::preflight::net::finding::{Check, Finding};
use forebay_cuda::preflight::Severity::{Fault, Warning};

/// Further apart than this, logs and traces of two hosts do not fit together.
const APART_US: u64 = 100_000;
/// And further than this, certificates seem not to be valid yet, or any more.
const FAR_APART_US: u64 = 60_000_000;

/// One question for a peer's time: when it left and when the answer came, by this host's clock, and
/// what the answer said. In microseconds since 1970.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sample {
    pub asked_us: u64,
    pub told_us: u64,
    pub heard_us: u64,
}

/// How far a clock is ahead of this host's, and by how much that may be wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Offset {
    pub ahead_us: i64,
    pub error_us: u64,
}

impl Sample {
    pub fn round_trip_us(&self) -> u64 {
        self.heard_us.saturating_sub(self.asked_us)
    }

    fn offset(&self) -> Offset {
        let error_us = self.round_trip_us() / 2;
        Offset { ahead_us: self.told_us as i64 - (self.asked_us + error_us) as i64, error_us }
    }
}

/// By the quickest answer, which leaves least open.
pub fn offset(samples: &[Sample]) -> Option<Offset> {
    samples.iter().min_by_key(|sample| sample.round_trip_us()).map(Sample::offset)
}

pub fn judge(peer: &str, offset: Offset) -> Finding {
    let Offset { ahead_us, error_us } = offset;
    let at_least = ahead_us.unsigned_abs().saturating_sub(error_us);
    if at_least <= APART_US {
        return Finding::ok(Check::Clocks, peer, "its clock is within 100 ms of this host's");
    }
    let severity = if at_least > FAR_APART_US { Fault } else { Warning };
    let way = if ahead_us > 0 { "ahead of" } else { "behind" };
    let seen = format!("its clock is {:.3} s {way} this host's", ahead_us.unsigned_abs() as f64 / 1e6);
    let action = "have one of chrony, systemd-timesyncd and ntpd run on both, and look at its state";
    Finding::bad(Check::Clocks, severity, peer, seen, "at most 100 ms between the two", action)
}

#[cfg(test)]
mod tests {
    use super::*;
    use forebay_cuda::preflight::Severity;
    use proptest::prelude::*;

    #[test]
    fn a_clock_that_is_off_is_told_with_its_direction() {
        let at = |ahead_us| judge("left", Offset { ahead_us, error_us: 1_000 });
        assert_eq!(at(101_000).severity, Severity::Ok, "it may be 100 ms");
        assert_eq!((at(101_001).severity, at(-101_001).severity), (Warning, Warning));
        assert!(at(250_000).seen.contains("0.250 s ahead of") && at(-250_000).seen.contains("behind"));
        assert_eq!(at(-120_000_000).severity, Fault);
    }

    proptest! {
        #[test]
        fn the_true_offset_is_always_within_the_error(
            ahead_us in -1_000_000i64..1_000_000,
            delays in prop::collection::vec((0u64..50_000, 0u64..50_000), 1..8),
        ) {
            let samples: Vec<Sample> = delays.iter().map(|(there, back)| {
                let asked_us = 1_700_000_000_000_000;
                let told_us = (asked_us + there).saturating_add_signed(ahead_us);
                Sample { asked_us, told_us, heard_us: asked_us + there + back }
            }).collect();
            let found = offset(&samples).unwrap();
            // Half a microsecond is lost where the round trip is odd.
            prop_assert!((found.ahead_us - ahead_us).unsigned_abs() <= found.error_us + 1);
        }
    }
}
