//! Where regions lie in the file, and what an operation of the mover means there. This file knows
//! spans and addresses.

use super::kernel::Action;
use super::plan::{Piece, Plan, PlanError};
use forebay_transfer::{LinkOp, Memory, RegionId, Span, SpanPair};
use std::collections::HashMap;
use thiserror::Error;

/// Which bytes of the file each region on disk is.
#[derive(Debug, Default)]
pub(crate) struct Regions {
    extents: HashMap<RegionId, Extent>,
}

/// Bytes `base .. base + len` of the file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Extent {
    pub base: u64,
    pub len: u64,
}

/// Why an operation cannot be carried out by this link.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub(crate) enum Unusable {
    #[error("exactly one side must lie on this disk: {0:?}")]
    Sides(SpanPair),
    #[error("an operation either reads or writes: {0:?} goes the other way")]
    Directions(SpanPair),
    #[error("source and target differ in length: {0:?}")]
    Lengths(SpanPair),
    #[error("{0:?} reaches outside its region on disk")]
    Outside(Span),
    #[error("{0:?} has no address in host memory")]
    NoAddress(Span),
    #[error(transparent)]
    Plan(#[from] PlanError),
}

impl Regions {
    pub fn map(&mut self, region: RegionId, extent: Extent) {
        self.extents.insert(region, extent);
    }

    /// Plans an operation into an empty plan, and says what it does.
    pub fn plan(
        &self,
        op: &LinkOp,
        memory: &Memory,
        io_bytes_max: u64,
        plan: &mut Plan,
    ) -> Result<Action, Unusable> {
        let mut action = None;
        for pair in &op.pairs {
            let (direction, piece) = self.piece(pair, memory)?;
            if *action.get_or_insert(direction) != direction {
                return Err(Unusable::Directions(*pair));
            }
            plan.push(piece, io_bytes_max)?;
        }
        Ok(action.unwrap_or(Action::Read))
    }

    fn piece(&self, pair: &SpanPair, memory: &Memory) -> Result<(Action, Piece), Unusable> {
        let on_disk = |span: &Span| self.extents.get(&span.region).copied();
        let (action, disk, extent, host) = match (on_disk(&pair.from), on_disk(&pair.to)) {
            (Some(extent), None) => (Action::Read, pair.from, extent, pair.to),
            (None, Some(extent)) => (Action::Write, pair.to, extent, pair.from),
            _ => return Err(Unusable::Sides(*pair)),
        };
        let inside = disk.offset.checked_add(disk.len).is_some_and(|end| end <= extent.len);
        if !inside {
            return Err(Unusable::Outside(disk));
        }
        let (address, len) = memory.host(&host).ok_or(Unusable::NoAddress(host))?;
        if len as u64 != disk.len {
            return Err(Unusable::Lengths(*pair));
        }
        Ok((action, Piece { offset: extent.base + disk.offset, address, len }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use forebay_transfer::{HostBuffer, Limits, MoverThread, Place};
    use std::sync::Arc;

    const PAGE: u64 = 4096;

    #[test]
    fn operations_that_are_not_between_this_disk_and_memory_are_refused() {
        let mover = MoverThread::spawn(Limits::default()).unwrap();
        let handle = mover.handle();
        let host = handle.register(Place::Host(0), Arc::new(HostBuffer::new(4 * PAGE as usize))).unwrap();
        let elsewhere = handle.register_opaque(Place::Device(0), 4 * PAGE).unwrap();
        let disk = handle.register_opaque(Place::Disk(0), 4 * PAGE).unwrap();
        let mut regions = Regions::default();
        regions.map(disk, Extent { base: 8 * PAGE, len: 4 * PAGE });

        let span = |region, page: u64, pages: u64| Span::new(region, page * PAGE, pages * PAGE);
        let plan = |pairs: &[(Span, Span)]| {
            let pairs: Vec<_> = pairs.iter().map(|(from, to)| SpanPair::new(*from, *to)).collect();
            let op = LinkOp { bytes: pairs.iter().map(|pair| pair.from.len).sum(), pairs };
            let mut plan = Plan::default();
            let action = regions.plan(&op, handle.memory(), 1 << 20, &mut plan)?;
            Ok((action, plan.ios().iter().map(|io| (io.offset, io.bytes)).collect::<Vec<_>>()))
        };

        let read = plan(&[(span(disk, 1, 2), span(host, 0, 2))]).unwrap();
        assert_eq!(read, (Action::Read, vec![(9 * PAGE, 2 * PAGE)]));
        let write = plan(&[(span(host, 2, 1), span(disk, 3, 1))]).unwrap();
        assert_eq!(write, (Action::Write, vec![(11 * PAGE, PAGE)]));

        let refusal = |pairs: &[(Span, Span)]| plan(pairs).unwrap_err();
        assert!(matches!(refusal(&[(span(host, 0, 1), span(host, 1, 1))]), Unusable::Sides(_)));
        assert!(matches!(refusal(&[(span(disk, 0, 1), span(disk, 1, 1))]), Unusable::Sides(_)));
        let there_and_back = [(span(disk, 0, 1), span(host, 0, 1)), (span(host, 1, 1), span(disk, 1, 1))];
        assert!(matches!(refusal(&there_and_back), Unusable::Directions(_)));
        assert!(matches!(refusal(&[(span(disk, 0, 1), span(host, 0, 2))]), Unusable::Lengths(_)));
        assert!(matches!(refusal(&[(span(disk, 3, 2), span(host, 0, 2))]), Unusable::Outside(_)));
        let beyond = Span::new(disk, u64::MAX - 1, PAGE);
        assert!(matches!(refusal(&[(beyond, span(host, 0, 1))]), Unusable::Outside(_)));
        assert!(matches!(refusal(&[(span(disk, 0, 1), span(elsewhere, 0, 1))]), Unusable::NoAddress(_)));
        assert!(matches!(refusal(&[(span(disk, 0, 1), span(host, 4, 1))]), Unusable::NoAddress(_)));
    }
}
