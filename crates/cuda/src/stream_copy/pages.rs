//! Reading on through the pieces of a copy: each path has its share of them, and segments are taken
//! off its front one after another, while those before are on their way. Nothing is copied or
//! allocated for that. Pure.

use crate::kernels::Piece;

/// A row of pieces, the first of which may have been begun and the last of which may belong to
/// others from some byte on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pages<'a> {
    pieces: &'a [Piece],
    /// Bytes of the first piece that are taken already.
    begun: u64,
    bytes: u64,
}

impl<'a> Pages<'a> {
    /// All of these pieces, which have `bytes` in all.
    pub fn new(pieces: &'a [Piece], bytes: u64) -> Pages<'a> {
        Pages { pieces, begun: 0, bytes }
    }

    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Pieces that are left, with those that are left in part.
    pub fn pieces(&self) -> usize {
        self.pieces.len()
    }

    /// Takes off the first `bytes` bytes as a row of their own, or all if there are not so many.
    pub fn share(&mut self, bytes: u64) -> Pages<'a> {
        let bytes = bytes.min(self.bytes);
        let (begun, mut after, mut whole) = (self.begun, self.begun + bytes, 0);
        while let Some(piece) = self.pieces.get(whole)
            && after >= piece.bytes
        {
            after -= piece.bytes;
            whole += 1;
        }
        let with_part = self.pieces.len().min(whole + usize::from(after > 0));
        let share = Pages { pieces: &self.pieces[..with_part], begun, bytes };
        *self = Pages { pieces: &self.pieces[whole..], begun: after, bytes: self.bytes - bytes };
        share
    }

    /// Takes the first piece, or as much of it as `most` bytes are.
    pub fn next(&mut self, most: u64) -> Option<Piece> {
        let most = most.min(self.bytes);
        while let (true, Some(first)) = (most > 0, self.pieces.first()) {
            let left = first.bytes - self.begun;
            if left == 0 {
                (self.pieces, self.begun) = (&self.pieces[1..], 0);
                continue;
            }
            let (from, to, bytes) = (first.from + self.begun, first.to + self.begun, left.min(most));
            self.begun += bytes;
            self.bytes -= bytes;
            return Some(Piece { from, to, bytes });
        }
        None
    }
}

/// Whether these are several pieces, on average shorter than that.
pub fn are_shorter(than: u64, pieces: usize, bytes: u64) -> bool {
    pieces > 1 && bytes < than * pieces as u64
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn pieces(lens: &[u64]) -> Vec<Piece> {
        let piece =
            |(nth, bytes): (u64, &u64)| Piece { from: nth << 20, to: (1 << 40) + (nth << 21), bytes: *bytes };
        (0..).zip(lens).map(piece).collect()
    }

    #[test]
    fn a_share_ends_inside_of_a_piece_and_the_next_goes_on_there() {
        let all = pieces(&[100, 100]);
        let mut pages = Pages::new(&all, 200);
        let mut first = pages.share(150);
        assert_eq!((first.pieces(), first.bytes(), pages.pieces(), pages.bytes()), (2, 150, 1, 50));
        assert_eq!(first.next(u64::MAX), Some(all[0]));
        assert_eq!(first.next(u64::MAX), Some(Piece { bytes: 50, ..all[1] }));
        assert_eq!(first.next(u64::MAX), None);
        let Piece { from, to, .. } = all[1];
        assert_eq!(pages.next(u64::MAX), Some(Piece { from: from + 50, to: to + 50, bytes: 50 }));
    }

    proptest! {
        #[test]
        fn every_byte_is_in_one_share_and_in_order(
            lens in prop::collection::vec(0..5000_u64, 0..40),
            shares in prop::collection::vec(0..9000_u64, 0..8),
            most in 1..3000_u64,
        ) {
            let all = pieces(&lens);
            let mut rest = Pages::new(&all, lens.iter().sum());
            let mut rows: Vec<_> = shares.iter().map(|bytes| rest.share(*bytes)).collect();
            rows.push(rest);
            let mut taken = Vec::new();
            for mut row in rows {
                let before = taken.iter().map(|piece: &Piece| piece.bytes).sum::<u64>();
                let bytes = row.bytes();
                while let Some(piece) = row.next(most) {
                    prop_assert!(piece.bytes <= most && piece.bytes > 0);
                    taken.push(piece);
                }
                prop_assert_eq!(taken.iter().map(|piece| piece.bytes).sum::<u64>(), before + bytes);
            }
            let byte = |piece: &Piece| (0..piece.bytes).map(|at| (piece.from + at, piece.to + at)).collect::<Vec<_>>();
            let expected: Vec<_> = all.iter().flat_map(byte).collect();
            prop_assert_eq!(taken.iter().flat_map(byte).collect::<Vec<_>>(), expected);
        }
    }
}
