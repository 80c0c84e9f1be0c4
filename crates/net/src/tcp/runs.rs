//! Lists of spans as they travel: runs of spans of one length at one stride, so that a million
//! equal blocks are a few bytes.
//!
//! ```text
//! run, 24 bytes, little endian:
//!  0  offset  u64   of the first span
//!  8  len     u32   of each span, not 0
//! 12  count   u32   spans, not 0
//! 16  stride  u64   from the start of one span to the start of the next; of a run of one span, 0
//! ```

use crate::bytes::{Reader, fields};
use thiserror::Error;

pub(super) const RUN_BYTES: usize = 24;

/// Spans of one length at equal distances.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Run {
    /// Start of the first span, in the region.
    pub offset: u64,
    /// Bytes of each span.
    pub len: u32,
    pub count: u32,
    /// From the start of one span to the start of the next.
    pub stride: u64,
}

fields!(Run { offset, len, count, stride });

/// Why bytes are not a list of runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum BadRuns {
    #[error("run {run} has spans of {len} bytes, {count} of them; both must be at least 1")]
    Empty { run: usize, len: u32, count: u32 },
    #[error("run {run} ends beyond 2^64")]
    Overflow { run: usize },
}

impl Run {
    pub fn bytes(&self) -> u64 {
        u64::from(self.len) * u64::from(self.count)
    }

    /// Start and length of each span.
    pub fn spans(&self) -> impl Iterator<Item = (u64, u64)> + use<> {
        let Run { offset, len, count, stride } = *self;
        (0..u64::from(count)).map(move |number| (offset + number * stride, u64::from(len)))
    }

    /// Appends a span if it continues the run.
    fn take(&mut self, offset: u64, len: u32) -> bool {
        let last = self.offset + self.stride * u64::from(self.count - 1);
        let Some(stride) = offset.checked_sub(last) else { return false };
        let fits = len == self.len && self.count < u32::MAX && (self.count == 1 || stride == self.stride);
        if fits {
            self.stride = stride;
            self.count += 1;
        }
        fits
    }

    fn check(&self, run: usize) -> Result<(), BadRuns> {
        let Run { offset, len, count, stride } = *self;
        if len == 0 || count == 0 {
            return Err(BadRuns::Empty { run, len, count });
        }
        let end = stride
            .checked_mul(u64::from(count - 1))
            .and_then(|last| last.checked_add(offset))
            .and_then(|last| last.checked_add(u64::from(len)));
        end.map(drop).ok_or(BadRuns::Overflow { run })
    }
}

/// The runs of these spans, in their order. Spans longer than a run can say become several.
pub fn runs(spans: impl IntoIterator<Item = (u64, u64)>) -> Vec<Run> {
    let mut runs: Vec<Run> = Vec::new();
    for (mut offset, mut left) in spans {
        while left > 0 {
            let len = u32::try_from(left).unwrap_or(u32::MAX);
            if !runs.last_mut().is_some_and(|run| run.take(offset, len)) {
                runs.push(Run { offset, len, count: 1, stride: 0 });
            }
            offset += u64::from(len);
            left -= u64::from(len);
        }
    }
    runs
}

/// The runs that these bytes say, which are whole runs. No list makes the reader reserve more
/// memory than the list takes itself.
pub(super) fn parse(bytes: &[u8]) -> Result<Vec<Run>, BadRuns> {
    let mut runs = Vec::with_capacity(bytes.len() / RUN_BYTES);
    let mut reader = Reader(bytes);
    while let Some(run) = reader.get::<Run>() {
        run.check(runs.len())?;
        runs.push(run);
    }
    Ok(runs)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bytes::Field;
    use proptest::prelude::*;

    #[test]
    fn equal_blocks_at_equal_distances_are_one_run() {
        let spans = (0..1_000_000).map(|block| (block * 65_536 + 4096, 26_000));
        assert_eq!(runs(spans), [Run { offset: 4096, len: 26_000, count: 1_000_000, stride: 65_536 }]);
    }

    #[test]
    fn a_span_longer_than_a_run_can_say_becomes_several() {
        let long = (u64::from(u32::MAX)) * 2 + 5;
        let found = runs([(0, long)]);
        assert_eq!(found.iter().map(Run::bytes).sum::<u64>(), long);
    }

    proptest! {
        #[test]
        fn spans_survive_the_wire(spans in prop::collection::vec((0u64..1 << 40, 1u64..1 << 20), 0..200)) {
            let mut bytes = Vec::new();
            runs(spans.iter().copied()).iter().for_each(|run| run.put(&mut bytes));
            let back: Vec<(u64, u64)> = parse(&bytes).unwrap().iter().flat_map(Run::spans).collect();
            prop_assert_eq!(back, spans);
        }

        #[test]
        fn any_bytes_are_runs_within_2_64_or_refused(bytes in prop::collection::vec(any::<u8>(), 0..480)) {
            if let Ok(runs) = parse(&bytes) {
                for run in runs {
                    let last = u128::from(run.offset) + u128::from(run.stride) * u128::from(run.count - 1);
                    prop_assert!(last + u128::from(run.len) <= 1 << 64);
                }
            }
        }
    }
}
