//! The pieces of a lot: its spans as checked addresses.

use crate::{LinkOp, Memory, Span};
use std::ptr::NonNull;
use thiserror::Error;

/// Bytes to copy from one address to another.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Piece {
    pub from: NonNull<u8>,
    pub to: NonNull<u8>,
    pub len: usize,
}

// SAFETY: a piece is two addresses, checked against registered memory, which any thread may reach.
// The mover keeps the regions registered, and the spans to itself, until the operation is finished.
unsafe impl Send for Piece {}
// SAFETY: as above; a shared piece can only be copied.
unsafe impl Sync for Piece {}

/// Why a lot is not copied.
#[derive(Debug, PartialEq, Eq, Error)]
pub(crate) enum Unsound {
    #[error("{0:?} is not host memory, or is not mapped any more")]
    NotHost(Span),
    #[error("a pair copies {from_bytes} bytes to {to_bytes}")]
    Length { from_bytes: u64, to_bytes: u64 },
    #[error("a target overlaps a source of the same lot")]
    Overlap,
}

/// The addresses of an operation's pairs, if copying them in any order, by any number of threads,
/// is sound.
pub(crate) fn resolve(op: &LinkOp, memory: &Memory) -> Result<Vec<Piece>, Unsound> {
    let regions = Regions::of(op, memory)?;
    let mut pieces = Vec::with_capacity(op.pairs.len());
    for pair in &op.pairs {
        let (from, to) = (regions.address(&pair.from)?, regions.address(&pair.to)?);
        if pair.from.len != pair.to.len {
            return Err(Unsound::Length { from_bytes: pair.from.len, to_bytes: pair.to.len });
        }
        pieces.push(Piece { from, to, len: pair.from.len as usize });
    }
    if overlaps(&pieces) { Err(Unsound::Overlap) } else { Ok(pieces) }
}

/// The regions that an operation names: of each, all up to the last byte that is used, and where it
/// starts. A lot has hundreds of spans in two regions or three: one look into the memory table for
/// each region, not for each span.
struct Regions(Vec<(Span, NonNull<u8>)>);

impl Regions {
    fn of(op: &LinkOp, memory: &Memory) -> Result<Regions, Unsound> {
        // Of each region the last byte that is used, and whether any is written.
        let mut parts: Vec<(Span, bool)> = Vec::new();
        let spans = op.pairs.iter().flat_map(|pair| [(&pair.from, false), (&pair.to, true)]);
        for (span, is_written) in spans {
            let end = span.offset.saturating_add(span.len);
            match parts.iter_mut().find(|(part, _)| part.region == span.region) {
                Some((part, written)) => {
                    part.len = part.len.max(end);
                    *written |= is_written;
                }
                None => parts.push((Span::new(span.region, 0, end), is_written)),
            }
        }
        let start = |(part, written): (Span, bool)| {
            let found = if written { memory.target(&part) } else { memory.host(&part) };
            found.map(|(start, _)| (part, start)).ok_or(Unsound::NotHost(part))
        };
        parts.into_iter().map(start).collect::<Result<_, _>>().map(Regions)
    }

    /// Where a span of the operation starts.
    fn address(&self, span: &Span) -> Result<NonNull<u8>, Unsound> {
        let region = self.0.iter().find(|(part, _)| part.region == span.region);
        let (_, start) = region.ok_or(Unsound::NotHost(*span))?;
        // SAFETY: the memory table has checked that the region's part, of which the span is a part,
        // lies in one allocation; an offset inside an allocation fits into usize.
        Ok(unsafe { start.add(span.offset as usize) })
    }
}

/// Whether any target shares a byte with any source.
fn overlaps(pieces: &[Piece]) -> bool {
    let sources = || pieces.iter().map(|piece| (piece.from.addr().get(), piece.len));
    let targets = || pieces.iter().map(|piece| (piece.to.addr().get(), piece.len));
    let envelope = |ranges: &mut dyn Iterator<Item = (usize, usize)>| {
        ranges.fold((usize::MAX, 0), |(low, high), (start, len)| (low.min(start), high.max(start + len)))
    };
    let (source, target) = (envelope(&mut sources()), envelope(&mut targets()));
    let apart = source.1 <= target.0 || target.1 <= source.0;
    if apart {
        return false;
    }
    // Interleaved in the same memory: sweep over both in the order of addresses.
    let mut ranges: Vec<(usize, usize, bool)> = sources()
        .map(|(start, len)| (start, start + len, false))
        .chain(targets().map(|(start, len)| (start, start + len, true)))
        .filter(|(start, end, _)| start < end)
        .collect();
    ranges.sort_unstable();
    let mut ends = [0, 0];
    ranges.into_iter().any(|(start, end, is_target)| {
        let hit = start < ends[usize::from(!is_target)];
        let own = &mut ends[usize::from(is_target)];
        *own = end.max(*own);
        hit
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn pieces(pairs: &[(u16, u16, u8)]) -> Vec<Piece> {
        let at = |address: u16| {
            NonNull::without_provenance(std::num::NonZeroUsize::MIN.saturating_add(address.into()))
        };
        pairs
            .iter()
            .map(|(from, to, len)| Piece { from: at(*from), to: at(*to), len: (*len).into() })
            .collect()
    }

    proptest! {
        #[test]
        fn an_overlap_is_found_exactly_when_a_byte_is_shared(pairs in prop::collection::vec((0u16..400, 0u16..400, 0u8..40), 0..6)) {
            let bytes = |start: u16, len: u8| start..start + u16::from(len);
            let shared = pairs.iter().any(|(from, _, from_len)| {
                pairs.iter().any(|(_, to, to_len)| bytes(*from, *from_len).any(|byte| bytes(*to, *to_len).contains(&byte)))
            });
            prop_assert_eq!(overlaps(&pieces(&pairs)), shared);
        }
    }
}
