//! Lists of memory by address, as programs have them: runs of equal blocks at equal distances, so
//! that a million blocks of a KV cache are a few numbers.

use thiserror::Error;

/// Blocks of one length at equal distances.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Run {
    /// Of the first block.
    pub address: u64,
    pub len: u64,
    /// Blocks.
    pub count: u64,
    /// From the start of one block to the start of the next. Of a run of one block it means
    /// nothing.
    pub stride: u64,
}

/// A list of blocks, in order.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Descriptors {
    runs: Vec<Run>,
    count: u64,
}

/// Blocks in one list at most: as many as one transfer may have pairs.
pub const BLOCKS_MAX: u64 = 4 << 20;

/// Why a run is not taken in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum BadRun {
    #[error("a run needs blocks and bytes above 0: {count} blocks of {len} bytes")]
    Empty { count: u64, len: u64 },
    #[error("{count} blocks of {len} bytes, {stride} apart, from {address:#x}, end beyond 2^64")]
    Overflow { address: u64, count: u64, len: u64, stride: u64 },
    #[error("{blocks} blocks in one list; at most {BLOCKS_MAX} may be")]
    TooMany { blocks: u64 },
}

impl Run {
    pub fn block(address: u64, len: u64) -> Run {
        Run { address, len, count: 1, stride: 0 }
    }

    fn check(&self) -> Result<(), BadRun> {
        let Run { address, len, count, stride } = *self;
        if len == 0 || count == 0 {
            return Err(BadRun::Empty { count, len });
        }
        let last = stride.checked_mul(count - 1).and_then(|last| last.checked_add(address));
        let end = last.and_then(|last| last.checked_add(len));
        end.map(drop).ok_or(BadRun::Overflow { address, count, len, stride })
    }

    /// Grows this run by `next`, a run of one block, if that continues it.
    fn take(&mut self, next: &Run) -> bool {
        let last = self.address + self.stride * (self.count - 1);
        let Some(stride) = next.address.checked_sub(last) else { return false };
        let fits = next.count == 1 && next.len == self.len && (self.count == 1 || stride == self.stride);
        if fits {
            self.stride = stride;
            self.count += 1;
        }
        fits
    }
}

impl Descriptors {
    /// Appends a run. Single blocks at equal distances become one.
    pub fn push(&mut self, run: Run) -> Result<(), BadRun> {
        run.check()?;
        let blocks = self.count.saturating_add(run.count);
        if blocks > BLOCKS_MAX {
            return Err(BadRun::TooMany { blocks });
        }
        self.count = blocks;
        if !self.runs.last_mut().is_some_and(|last| last.take(&run)) {
            self.runs.push(run);
        }
        Ok(())
    }

    pub fn from_runs(runs: impl IntoIterator<Item = Run>) -> Result<Descriptors, BadRun> {
        let mut list = Descriptors::default();
        runs.into_iter().try_for_each(|run| list.push(run))?;
        Ok(list)
    }

    /// The list of these blocks, each an address and a length.
    pub fn from_blocks(blocks: impl IntoIterator<Item = (u64, u64)>) -> Result<Descriptors, BadRun> {
        Descriptors::from_runs(blocks.into_iter().map(|(address, len)| Run::block(address, len)))
    }

    pub fn len(&self) -> u64 {
        self.count
    }

    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    pub fn runs(&self) -> &[Run] {
        &self.runs
    }
}

/// Which blocks of a list are meant.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Select {
    All,
    /// These, in this order, counted from 0.
    Indices(Vec<u32>),
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn blocks(list: &Descriptors) -> Vec<(u64, u64)> {
        let spread = |run: &Run| {
            let Run { address, len, count, stride } = *run;
            (0..count).map(move |nth| (address + nth * stride, len))
        };
        list.runs().iter().flat_map(spread).collect()
    }

    #[test]
    fn a_million_equal_blocks_are_one_run() {
        let list = Descriptors::from_blocks((0..1_000_000).map(|nth| (4096 + nth * 65_536, 26_000))).unwrap();
        assert_eq!(list.runs(), [Run { address: 4096, len: 26_000, count: 1_000_000, stride: 65_536 }]);
        assert_eq!(list.len(), 1_000_000);
    }

    #[test]
    fn what_overflows_or_is_empty_is_refused() {
        let refused = |address, len, count, stride| {
            Descriptors::from_runs([Run { address, len, count, stride }]).unwrap_err()
        };
        assert!(matches!(refused(0, 0, 1, 0), BadRun::Empty { .. }));
        assert!(matches!(refused(0, 1, 0, 0), BadRun::Empty { .. }));
        assert!(matches!(refused(u64::MAX, 1, 1, 0), BadRun::Overflow { .. }));
        assert!(matches!(refused(0, 1, 3, u64::MAX / 2 + 1), BadRun::Overflow { .. }));
        assert!(matches!(refused(0, 1, BLOCKS_MAX + 1, 1), BadRun::TooMany { .. }));
    }

    proptest! {
        #[test]
        fn a_list_keeps_its_blocks_and_their_order(
            given in prop::collection::vec((0u64..50, 1u64..4, 1u64..5, 0u64..9), 0..60)
        ) {
            let runs: Vec<Run> =
                given.into_iter().map(|(address, len, count, stride)| Run { address, len, count, stride }).collect();
            let flat: Vec<(u64, u64)> = runs
                .iter()
                .flat_map(|run| (0..run.count).map(|nth| (run.address + nth * run.stride, run.len)))
                .collect();
            let list = Descriptors::from_runs(runs).unwrap();
            prop_assert_eq!(list.len(), flat.len() as u64);
            prop_assert_eq!(blocks(&list), flat.clone());
            prop_assert_eq!(blocks(&Descriptors::from_blocks(flat.clone()).unwrap()), flat);
        }
    }
}
