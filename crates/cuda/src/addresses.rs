//! Where regions of GPUs lie: the addresses behind region ids that the CPU must not follow.

use crate::driver::abi::Address;
use crate::kernels::Piece;
use forebay_transfer::lock::RwLock;
use forebay_transfer::{LinkOp, Memory, RegionId, Span};
use std::collections::HashMap;
use thiserror::Error;

/// The table of registered device memory.
#[derive(Debug, Default)]
pub struct Addresses {
    ranges: RwLock<HashMap<RegionId, (Address, u64)>>,
}

/// A span that has no address.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[error("no address: {0:?} is not registered with this process's GPUs or is too short")]
pub struct NoAddress(pub Span);

impl Addresses {
    pub fn insert(&self, region: RegionId, address: Address, bytes: u64) {
        self.ranges.write().insert(region, (address, bytes));
    }

    pub fn remove(&self, region: RegionId) {
        self.ranges.write().remove(&region);
    }

    /// Where a region lies, and how many bytes it has.
    pub fn range(&self, region: RegionId) -> Option<(Address, u64)> {
        self.ranges.read().get(&region).copied()
    }

    /// What an operation copies, by address. Pieces that continue each other on both sides become
    /// one.
    pub fn resolve(&self, op: &LinkOp, memory: &Memory) -> Result<Vec<Piece>, NoAddress> {
        let ranges = self.ranges.read();
        let (mut from, mut to) = (Side::new(&ranges, memory), Side::new(&ranges, memory));
        let mut pieces: Vec<Piece> = Vec::with_capacity(op.pairs.len());
        for pair in &op.pairs {
            let piece = Piece {
                from: from.address_of(&pair.from)?,
                to: to.address_of(&pair.to)?,
                bytes: pair.from.len,
            };
            match pieces.last_mut() {
                Some(last) if last.from + last.bytes == piece.from && last.to + last.bytes == piece.to => {
                    last.bytes += piece.bytes;
                }
                _ => pieces.push(piece),
            }
        }
        Ok(pieces)
    }
}

/// One side of an operation. The pages of a lot lie in few regions, so the last one is remembered.
struct Side<'a> {
    ranges: &'a HashMap<RegionId, (Address, u64)>,
    memory: &'a Memory,
    last: Option<(RegionId, Address, u64)>,
}

impl<'a> Side<'a> {
    fn new(ranges: &'a HashMap<RegionId, (Address, u64)>, memory: &'a Memory) -> Side<'a> {
        Side { ranges, memory, last: None }
    }

    fn address_of(&mut self, span: &Span) -> Result<Address, NoAddress> {
        let (start, bytes) = match self.last {
            Some((region, start, bytes)) if region == span.region => (start, bytes),
            _ => self.look_up(span)?,
        };
        let end = span.offset.checked_add(span.len).filter(|end| *end <= bytes);
        end.map(|_| start + span.offset).ok_or(NoAddress(*span))
    }

    fn look_up(&mut self, span: &Span) -> Result<(Address, u64), NoAddress> {
        let found = self.ranges.get(&span.region).copied().or_else(|| {
            let whole = self.memory.whole(span.region)?;
            Some((whole.0.as_ptr() as Address, whole.1 as u64))
        });
        let (start, bytes) = found.ok_or(NoAddress(*span))?;
        self.last = Some((span.region, start, bytes));
        Ok((start, bytes))
    }
}
