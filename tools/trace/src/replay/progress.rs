//! How far a replay has come, for a live display.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// One moment of a replay.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Progress {
    /// Model time since the start.
    pub at_s: f64,
    /// Requests under way.
    pub in_flight: usize,
    /// Requests answered in full.
    pub done: u64,
    /// Requests that failed.
    pub failed: u64,
    /// Wrong tokens so far; `None` when nobody checks.
    pub wrong_tokens: Option<u64>,
    /// Median time to first token so far.
    pub ttft_p50_s: Option<f64>,
}

/// The median of all values so far; adding one takes logarithmic time.
#[derive(Debug, Default)]
pub(super) struct RunningMedian {
    /// The smaller half, largest first; it has as many values as the larger half or one more.
    low: BinaryHeap<u64>,
    high: BinaryHeap<Reverse<u64>>,
}

impl RunningMedian {
    pub(super) fn add(&mut self, value: u64) {
        self.low.push(value);
        if let Some(largest) = self.low.pop() {
            self.high.push(Reverse(largest));
        }
        if self.high.len() > self.low.len()
            && let Some(Reverse(smallest)) = self.high.pop()
        {
            self.low.push(smallest);
        }
    }

    /// The lower of the two middle values, or the middle one.
    pub(super) fn get(&self) -> Option<u64> {
        self.low.peek().copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn the_running_median_is_the_middle_of_the_sorted_values(values in prop::collection::vec(0u64..100, 0..50)) {
            let mut median = RunningMedian::default();
            let mut seen = Vec::new();
            prop_assert_eq!(median.get(), None);
            for value in values {
                median.add(value);
                seen.push(value);
                seen.sort_unstable();
                prop_assert_eq!(median.get(), Some(seen[(seen.len() - 1) / 2]));
            }
        }
    }
}
