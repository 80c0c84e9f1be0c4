//! Where bytes lie in one stretch of memory.
//!
//! Knows offsets, lengths and strides, and how two places of the same bytes are cut alike. Must never know
//! whose memory it is, nor what the bytes mean.

use std::ops::Range;

/// A contiguous run of bytes, counted from the start of whatever holds it: a tensor, or a chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Extent {
    /// First byte.
    pub offset: u64,
    /// How many bytes.
    pub len: u64,
}

impl Extent {
    /// The first byte after the extent.
    pub const fn end(self) -> u64 {
        self.offset + self.len
    }
}

/// Equal pieces at equal distances: any rectangle of heads by tokens within a page has this form.
///
/// Pieces that touch are one piece, so `pieces` is 1 exactly when the bytes are contiguous.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Strided {
    /// First byte of the first piece.
    pub offset: u64,
    /// Bytes in each piece.
    pub piece_bytes: u64,
    /// Bytes from the start of one piece to the start of the next.
    pub stride_bytes: u64,
    /// How many pieces.
    pub pieces: u64,
}

impl Strided {
    /// Pieces as described, with touching pieces joined.
    pub(crate) const fn joined(offset: u64, piece_bytes: u64, stride_bytes: u64, pieces: u64) -> Self {
        if pieces == 1 || stride_bytes == piece_bytes {
            let bytes = piece_bytes * pieces;
            Self { offset, piece_bytes: bytes, stride_bytes: bytes, pieces: 1 }
        } else {
            Self { offset, piece_bytes, stride_bytes, pieces }
        }
    }

    /// Bytes in all pieces together.
    pub const fn bytes(&self) -> u64 {
        self.piece_bytes * self.pieces
    }

    /// The whole as one extent, if it is one.
    pub const fn contiguous(&self) -> Option<Extent> {
        if self.pieces == 1 { Some(Extent { offset: self.offset, len: self.piece_bytes }) } else { None }
    }

    /// The pieces in order.
    pub fn extents(&self) -> impl Iterator<Item = Extent> + use<> {
        let Self { offset, piece_bytes, stride_bytes, pieces } = *self;
        (0..pieces).map(move |piece| Extent { offset: offset + piece * stride_bytes, len: piece_bytes })
    }

    /// Cuts this place and `other` into the fewest pairs of equal length that hold the same bytes in the same
    /// order.
    ///
    /// Both must list the same heads and tokens in the same [`AxisOrder`](crate::AxisOrder): lengths are
    /// compared, meaning cannot be.
    ///
    /// # Errors
    /// When the two do not hold equally many bytes.
    pub fn pairs(
        &self,
        other: &Strided,
    ) -> Result<impl Iterator<Item = (Extent, Extent)> + use<>, UnequalBytes> {
        if self.bytes() != other.bytes() {
            return Err(UnequalBytes { from: self.bytes(), to: other.bytes() });
        }
        let (from, to, total) = (*self, *other, self.bytes());
        let mut done = 0;
        Ok(std::iter::from_fn(move || {
            if done == total {
                return None;
            }
            let (from, to) = (from.rest_of_piece(done), to.rest_of_piece(done));
            let len = from.len.min(to.len);
            done += len;
            Some((Extent { len, ..from }, Extent { len, ..to }))
        }))
    }

    /// What is left of the piece that holds the byte after the first `done` bytes.
    const fn rest_of_piece(&self, done: u64) -> Extent {
        let (piece, within) = (done / self.piece_bytes, done % self.piece_bytes);
        Extent { offset: self.offset + piece * self.stride_bytes + within, len: self.piece_bytes - within }
    }
}

/// Two places that cannot hold the same bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("cannot pair {from} bytes with {to} bytes")]
pub struct UnequalBytes {
    /// Bytes on the side that was asked.
    pub from: u64,
    /// Bytes on the other side.
    pub to: u64,
}

/// An index or a range that lies outside what there is.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{what} {start}..{end} is out of range; allowed: a range that is not empty within 0..{len}")]
pub struct OutOfRange {
    /// What was indexed: layer, block, head, token.
    pub what: &'static str,
    /// First index asked for.
    pub start: u64,
    /// Index after the last one asked for.
    pub end: u64,
    /// How many there are.
    pub len: u64,
}

/// Refuses a range that is empty, backwards or reaches beyond `len`.
pub(crate) fn check_range(what: &'static str, range: &Range<u32>, len: u32) -> Result<(), OutOfRange> {
    if range.start < range.end && range.end <= len {
        Ok(())
    } else {
        Err(OutOfRange { what, start: range.start.into(), end: range.end.into(), len: len.into() })
    }
}

/// Refuses an index that is not below `len`.
pub(crate) fn check_index(what: &'static str, index: u32, len: u32) -> Result<(), OutOfRange> {
    if index < len {
        Ok(())
    } else {
        Err(OutOfRange { what, start: index.into(), end: u64::from(index) + 1, len: len.into() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn bytes_of(extents: impl Iterator<Item = Extent>) -> Vec<u64> {
        extents.flat_map(|extent| extent.offset..extent.end()).collect()
    }

    #[test]
    fn pieces_that_touch_are_one() {
        let joined = Strided::joined(8, 4, 4, 3);
        assert_eq!(joined.contiguous(), Some(Extent { offset: 8, len: 12 }));
        assert_eq!(Strided::joined(8, 4, 6, 3).contiguous(), None);
    }

    #[test]
    fn unequal_places_are_not_paired() {
        let a = Strided::joined(0, 4, 8, 2);
        let b = Strided::joined(0, 4, 8, 3);
        assert_eq!(a.pairs(&b).err(), Some(UnequalBytes { from: 8, to: 12 }));
    }

    proptest! {
        #[test]
        fn pairs_list_every_byte_of_both_sides_in_order(
            pieces in (1u64..9, 1u64..9),
            unit in 1u64..9,
            gaps in (0u64..5, 0u64..5),
            offsets in (0u64..99, 0u64..99),
        ) {
            let (a, b) = (unit * pieces.1, unit * pieces.0);
            let from = Strided::joined(offsets.0, a, a + gaps.0, pieces.0);
            let to = Strided::joined(offsets.1, b, b + gaps.1, pieces.1);
            let pairs: Vec<_> = from.pairs(&to).unwrap().collect();
            prop_assert!(pairs.iter().all(|(from, to)| from.len == to.len));
            prop_assert_eq!(bytes_of(pairs.iter().map(|pair| pair.0)), bytes_of(from.extents()));
            prop_assert_eq!(bytes_of(pairs.iter().map(|pair| pair.1)), bytes_of(to.extents()));
            prop_assert!((pairs.len() as u64) < pieces.0 + pieces.1);
        }
    }
}
