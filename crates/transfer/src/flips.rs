//! A link that damages what passes through it, for showing that damage is caught. It wraps any link
//! whose targets are host memory. It knows bits and chances.

use crate::{Completion, Link, LinkOp, Memory, Outcome, SpanPair, SplitMix};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use thiserror::Error;

/// Wraps a link: after each operation every byte of its targets has one bit flipped with the same
/// small probability.
pub struct BitFlips<L> {
    inner: L,
    chance_per_byte: f64,
    seed: u64,
    operations: u64,
    flipped: Arc<AtomicU64>,
}

/// A probability that is none.
#[derive(Debug, Clone, Copy, PartialEq, Error)]
#[error("the chance of a flipped bit is {0}; allowed: above 0, at most 1")]
pub struct ChanceError(pub f64);

impl<L: Link> BitFlips<L> {
    /// Damages what `inner` moves. Equal seeds damage equal operations alike. `flipped` counts the
    /// flipped bits.
    pub fn new(
        inner: L,
        chance_per_byte: f64,
        seed: u64,
        flipped: Arc<AtomicU64>,
    ) -> Result<Self, ChanceError> {
        if !(chance_per_byte > 0.0 && chance_per_byte <= 1.0) {
            return Err(ChanceError(chance_per_byte));
        }
        Ok(BitFlips { inner, chance_per_byte, seed, operations: 0, flipped })
    }
}

impl<L: Link> Link for BitFlips<L> {
    fn start(&mut self, op: LinkOp, memory: &Arc<Memory>, done: Completion) {
        self.operations += 1;
        let mut dice = SplitMix(self.seed ^ self.operations.wrapping_mul(0xD6E8_FEB8_6659_FD93));
        let (pairs, chance, flipped) = (op.pairs.clone(), self.chance_per_byte, Arc::clone(&self.flipped));
        let memory_then = Arc::clone(memory);
        let done = done.inspect(move |outcome| {
            if matches!(outcome, Outcome::Moved { .. }) {
                flipped.fetch_add(damage(&pairs, &memory_then, chance, &mut dice), Ordering::Relaxed);
            }
        });
        self.inner.start(op, memory, done);
    }
}

/// Flips bits in the targets of `pairs` and says how many.
fn damage(pairs: &[SpanPair], memory: &Memory, chance: f64, dice: &mut SplitMix) -> u64 {
    let mut flipped = 0;
    let mut next = gap(dice, chance);
    for pair in pairs {
        let Some((target, len)) = memory.host(&pair.to) else { continue };
        while next < len as u64 {
            // SAFETY: `next` lies inside the span, which was resolved from registered memory and
            // belongs to this operation until its completion is finished, which happens after this.
            unsafe { *target.as_ptr().add(next as usize) ^= 1 << (dice.draw() % 8) };
            flipped += 1;
            next = next.saturating_add(1).saturating_add(gap(dice, chance));
        }
        next -= len as u64;
    }
    flipped
}

/// Bytes that stay whole before the next that does not: geometrically distributed.
fn gap(dice: &mut SplitMix, chance: f64) -> u64 {
    let gap = (1.0 - dice.draw_unit()).ln() / (1.0 - chance).ln();
    // A chance of 1 divides by minus infinity, and 0 by it is no number: no byte stays whole.
    if gap.is_finite() { gap as u64 } else { 0 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::HostLink;
    use crate::{Class, End, HostBuffer, Limits, LinkSpec, MoverThread, PathSpec, Place, Span, Transfer};

    #[test]
    fn about_as_many_bits_are_flipped_as_asked_for_and_all_are_counted() {
        let mover = MoverThread::spawn(Limits::default()).unwrap();
        let handle = mover.handle();
        let flipped = Arc::new(AtomicU64::new(0));
        let link = BitFlips::new(HostLink::new(1).unwrap(), 1e-3, 7, Arc::clone(&flipped)).unwrap();
        let host = Place::Host(0);
        let link = handle.add_link(LinkSpec::new("damaged", 2, 64 << 20), Box::new(link)).unwrap();
        handle.add_path(PathSpec::direct(host, host, link)).unwrap().unwrap();
        let len = 1 << 20;
        let target = Arc::new(HostBuffer::new(len));
        let from = handle.register(host, Arc::new(HostBuffer::new(len))).unwrap();
        let to = handle.register(host, Arc::clone(&target) as _).unwrap();
        let blocks = (0..256u64).map(|block| {
            let offset = block * 4096;
            SpanPair::new(Span::new(from, offset, 4096), Span::new(to, (255 * 4096) - offset, 4096))
        });
        let end = handle.run(Transfer::new(blocks.collect(), Class::Demand)).unwrap();
        assert_eq!(end, End::Done { bytes: len as u64 });
        let mut bytes = vec![0; len];
        target.read(0, &mut bytes);
        let ones: u64 = bytes.iter().map(|byte| u64::from(byte.count_ones())).sum();
        assert_eq!(ones, flipped.load(Ordering::Relaxed));
        assert!((850..1250).contains(&ones), "{ones} bits flipped, about 1049 expected");
    }

    #[test]
    fn impossible_chances_are_refused() {
        for chance in [0.0, -1.0, 1.5, f64::NAN] {
            let link = BitFlips::new(HostLink::new(1).unwrap(), chance, 7, Arc::default());
            assert!(link.is_err());
        }
    }
}
