//! Lists of memory made ready: each block resolved to a region of the mover, checked once, so that
//! a request is only a walk along two lists.

use crate::addresses::Addresses;
use crate::descriptors::{BLOCKS_MAX, Descriptors, Run, Select};
use forebay_transfer::{RegionId, Span, SpanPair};
use thiserror::Error;

/// Why blocks do not become a transfer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum BadBlocks {
    #[error("block {block}, {len} bytes at {address:#x}, does not lie in one registered region")]
    Outside { block: u64, address: u64, len: u64 },
    #[error("index {index} of a list of {blocks} blocks")]
    Index { index: u32, blocks: u64 },
    #[error("{local} local and {remote} remote blocks; both must be as many")]
    Count { local: u64, remote: u64 },
    #[error("pair {pair} has {local} bytes here and {remote} there")]
    Length { pair: u64, local: u64, remote: u64 },
    #[error("blocks of {len} bytes, {stride} apart, overlap; no target may")]
    Overlap { len: u64, stride: u64 },
    #[error("{blocks} blocks in one request; at most {BLOCKS_MAX} may be")]
    TooMany { blocks: u64 },
}

/// Blocks of one region, of one length, at equal distances.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Piece {
    region: RegionId,
    offset: u64,
    len: u64,
    count: u64,
    stride: u64,
    /// Blocks of the list before this one.
    before: u64,
}

/// A list of blocks that lie in regions of the mover.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Blocks {
    pieces: Vec<Piece>,
    count: u64,
}

impl Piece {
    fn span(&self, nth: u64) -> Span {
        Span::new(self.region, self.offset + nth * self.stride, self.len)
    }
}

impl Blocks {
    /// Resolves a list. Each block has to lie in one of the ranges; `region` says which region of
    /// the mover a range is.
    pub fn resolve<T, E: From<BadBlocks>>(
        list: &Descriptors,
        addresses: &Addresses<T>,
        mut region: impl FnMut(&T) -> Result<RegionId, E>,
    ) -> Result<Blocks, E> {
        let mut blocks = Blocks::default();
        for run in list.runs() {
            let mut rest = *run;
            while rest.count > 0 {
                let Run { address, len, .. } = rest;
                let outside = BadBlocks::Outside { block: blocks.count, address, len };
                let found = addresses.find(address).ok_or(outside)?;
                let offset = address - found.base;
                let count = fitting(found.len - offset, &rest).ok_or(outside)?;
                let (region, before) = (region(found.what)?, blocks.count);
                blocks.pieces.push(Piece { region, offset, len, count, stride: rest.stride, before });
                blocks.count += count;
                rest.count -= count;
                // The next block starts inside of the run, so this cannot overflow while there is
                // one.
                rest.address = address.wrapping_add(rest.stride.wrapping_mul(count));
            }
        }
        Ok(blocks)
    }

    pub fn len(&self) -> u64 {
        self.count
    }

    fn chosen(&self, select: &Select) -> u64 {
        match select {
            Select::All => self.count,
            Select::Indices(indices) => indices.len() as u64,
        }
    }

    /// The chosen blocks, in their order.
    fn spans<'a>(&'a self, select: &'a Select) -> Box<dyn Iterator<Item = Result<Span, BadBlocks>> + 'a> {
        match select {
            Select::All => {
                let spread = |piece: &'a Piece| (0..piece.count).map(|nth| Ok(piece.span(nth)));
                Box::new(self.pieces.iter().flat_map(spread))
            }
            Select::Indices(indices) => Box::new(indices.iter().map(|index| self.span(*index))),
        }
    }

    fn span(&self, index: u32) -> Result<Span, BadBlocks> {
        let nth = u64::from(index);
        let at = self.pieces.partition_point(|piece| piece.before + piece.count <= nth);
        let piece = self.pieces.get(at).ok_or(BadBlocks::Index { index, blocks: self.count })?;
        Ok(piece.span(nth - piece.before))
    }

    /// Whether no run of these blocks overlaps itself.
    fn check_target(&self) -> Result<(), BadBlocks> {
        let overlaps = |piece: &&Piece| piece.count > 1 && piece.stride < piece.len;
        match self.pieces.iter().find(overlaps) {
            None => Ok(()),
            Some(Piece { len, stride, .. }) => Err(BadBlocks::Overlap { len: *len, stride: *stride }),
        }
    }
}

/// How many of the run's next blocks lie in the `room` bytes from its start. `None`: not even one.
fn fitting(room: u64, run: &Run) -> Option<u64> {
    let behind_first = room.checked_sub(run.len)?;
    Some(match run.stride {
        0 => run.count,
        stride => run.count.min(behind_first / stride + 1),
    })
}

/// Which way bytes go.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Op {
    /// From the peer to here.
    Read,
    /// From here to the peer.
    Write,
}

/// What a request moves: pairs of spans, neighbours joined.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Pairs {
    pub pairs: Vec<SpanPair>,
    pub bytes: u64,
}

impl Pairs {
    /// Pairs the chosen blocks of two lists, in their orders.
    pub fn of(op: Op, local: (&Blocks, &Select), remote: (&Blocks, &Select)) -> Result<Pairs, BadBlocks> {
        let (here, there) = (local.0.chosen(local.1), remote.0.chosen(remote.1));
        if here != there {
            return Err(BadBlocks::Count { local: here, remote: there });
        }
        if here > BLOCKS_MAX {
            return Err(BadBlocks::TooMany { blocks: here });
        }
        match op {
            Op::Read => local.0.check_target()?,
            Op::Write => remote.0.check_target()?,
        }
        let mut pairs = Pairs { pairs: Vec::with_capacity(here as usize), bytes: 0 };
        for (number, (here, there)) in local.0.spans(local.1).zip(remote.0.spans(remote.1)).enumerate() {
            let (here, there) = (here?, there?);
            if here.len != there.len {
                let (pair, local, remote) = (number as u64, here.len, there.len);
                return Err(BadBlocks::Length { pair, local, remote });
            }
            pairs.push(match op {
                Op::Read => SpanPair::new(there, here),
                Op::Write => SpanPair::new(here, there),
            });
        }
        Ok(pairs)
    }

    /// Appends a pair, or lets the last one grow by it.
    fn push(&mut self, pair: SpanPair) {
        self.bytes += pair.from.len;
        if !self.pairs.last_mut().is_some_and(|last| last.merge(&pair)) {
            self.pairs.push(pair);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use forebay_transfer::{Limits, Mover, Place};
    use proptest::prelude::*;

    /// Ranges of memory with the regions that they are.
    fn ranges(lens: &[(u64, u64)]) -> Addresses<RegionId> {
        let mut mover = Mover::new(Limits::default());
        let mut addresses = Addresses::default();
        for (base, len) in lens {
            addresses.insert(*base, *len, mover.add_region(Place::Host(0), *len)).unwrap();
        }
        addresses
    }

    fn resolve(addresses: &Addresses<RegionId>, runs: &[Run]) -> Result<Blocks, BadBlocks> {
        let list = Descriptors::from_runs(runs.iter().copied()).unwrap();
        Blocks::resolve(&list, addresses, |region| Ok(*region))
    }

    #[test]
    fn neighbours_on_both_sides_become_one_pair() {
        let addresses = ranges(&[(0, 1000), (5000, 1000)]);
        let local = resolve(&addresses, &[Run { address: 0, len: 10, count: 100, stride: 10 }]).unwrap();
        let remote = resolve(&addresses, &[Run { address: 5000, len: 10, count: 100, stride: 10 }]).unwrap();
        let pairs = Pairs::of(Op::Read, (&local, &Select::All), (&remote, &Select::All)).unwrap();
        assert_eq!((pairs.pairs.len(), pairs.bytes), (1, 1000));
        assert_eq!(pairs.pairs[0].to.region, *addresses.find(0).unwrap().what);
        let every_other = Select::Indices((0..50).map(|nth| nth * 2).collect());
        let pairs = Pairs::of(Op::Write, (&local, &every_other), (&remote, &every_other)).unwrap();
        assert_eq!((pairs.pairs.len(), pairs.bytes), (50, 500));
        assert_eq!(pairs.pairs[1].to.offset, 20);
    }

    #[test]
    fn what_does_not_match_is_refused_with_its_place() {
        let addresses = ranges(&[(0, 1000)]);
        let tens = resolve(&addresses, &[Run { address: 0, len: 10, count: 3, stride: 10 }]).unwrap();
        let mixed =
            resolve(&addresses, &[Run::block(0, 10), Run::block(10, 11), Run::block(30, 10)]).unwrap();
        let all = &Select::All;
        let two = Select::Indices(vec![0, 1]);
        let refused = |local, remote| Pairs::of(Op::Read, local, remote).unwrap_err();
        assert_eq!(refused((&tens, all), (&tens, &two)), BadBlocks::Count { local: 3, remote: 2 });
        assert_eq!(
            refused((&tens, all), (&mixed, all)),
            BadBlocks::Length { pair: 1, local: 10, remote: 11 }
        );
        let beyond = Select::Indices(vec![0, 3]);
        assert_eq!(refused((&tens, &beyond), (&tens, &two)), BadBlocks::Index { index: 3, blocks: 3 });
        let same = resolve(&addresses, &[Run { address: 0, len: 10, count: 3, stride: 9 }]).unwrap();
        assert_eq!(refused((&same, all), (&tens, all)), BadBlocks::Overlap { len: 10, stride: 9 });
        assert!(Pairs::of(Op::Write, (&same, all), (&tens, all)).is_ok(), "a source may overlap itself");
        let outside = resolve(&addresses, &[Run { address: 980, len: 10, count: 3, stride: 10 }]);
        assert_eq!(outside, Err(BadBlocks::Outside { block: 2, address: 1000, len: 10 }));
    }

    proptest! {
        /// Against a model that looks at each block by itself.
        #[test]
        fn every_block_is_in_bounds_or_the_list_is_refused(
            lens in prop::collection::vec((0u64..40, 1u64..200), 1..5),
            runs in prop::collection::vec((0u64..900, 1u64..30, 1u64..20, 0u64..60), 1..6),
        ) {
            let (mut base, mut bases) = (0, Vec::new());
            for (gap, len) in lens {
                bases.push((base + gap, len));
                base += gap + len;
            }
            let addresses = ranges(&bases);
            let runs: Vec<Run> =
                runs.into_iter().map(|(address, len, count, stride)| Run { address, len, count, stride }).collect();
            let flat = runs.iter().flat_map(|run| (0..run.count).map(|nth| (run.address + nth * run.stride, run.len)));
            let model: Option<Vec<Span>> = flat
                .map(|(address, len)| {
                    let (base, size) = bases.iter().find(|(base, size)| (*base..base + size).contains(&address))?;
                    let region = *addresses.find(*base)?.what;
                    (address + len <= base + size).then(|| Span::new(region, address - base, len))
                })
                .collect();
            let found = resolve(&addresses, &runs).ok();
            let spans = found.as_ref().map(|blocks| blocks.spans(&Select::All).map(Result::unwrap).collect::<Vec<_>>());
            prop_assert_eq!(&spans, &model);
            if let (Some(blocks), Some(model)) = (found, model) {
                for (nth, span) in model.iter().enumerate() {
                    prop_assert_eq!(blocks.span(nth as u32), Ok(*span));
                }
            }
        }
    }
}
