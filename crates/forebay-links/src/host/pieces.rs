//! The pieces of a lot: its spans as checked addresses. This file knows what may be copied; it must never know how or by
//! whom.

use forebay_mover::{LinkOp, Memory, Span};
use std::ptr::NonNull;
use thiserror::Error;

/// Bytes to copy from one address to another.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Piece {
    pub from: NonNull<u8>,
    pub to: NonNull<u8>,
    pub len: usize,
}

// SAFETY: a piece is two addresses, checked against registered memory, which any thread may reach. The mover keeps the
// regions registered, and the spans to itself, until the operation is finished.
unsafe impl Send for Piece {}
// SAFETY: as above; a shared piece can only be copied.
unsafe impl Sync for Piece {}

/// Why a lot is not copied.
#[derive(Debug, PartialEq, Eq, Error)]
pub(crate) enum Unsound {
    /// A span is not in host memory, or reaches outside its region.
    #[error("{0:?} is not host memory")]
    NotHost(Span),
    /// A pair's spans differ in length.
    #[error("a pair copies {from_bytes} bytes to {to_bytes}")]
    Length { from_bytes: usize, to_bytes: usize },
    /// A target overlaps a source, so what is copied would depend on the order.
    #[error("a target overlaps a source of the same lot")]
    Overlap,
}

/// The addresses of an operation's pairs, if copying them in any order, by any number of threads, is sound.
pub(crate) fn resolve(op: &LinkOp, memory: &Memory) -> Result<Vec<Piece>, Unsound> {
    let host = |span: &Span| memory.host(span).ok_or(Unsound::NotHost(*span));
    let mut pieces = Vec::with_capacity(op.pairs.len());
    for pair in &op.pairs {
        let ((from, from_bytes), (to, to_bytes)) = (host(&pair.from)?, host(&pair.to)?);
        if from_bytes != to_bytes {
            return Err(Unsound::Length { from_bytes, to_bytes });
        }
        pieces.push(Piece { from, to, len: from_bytes });
    }
    if overlaps(&pieces) { Err(Unsound::Overlap) } else { Ok(pieces) }
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
