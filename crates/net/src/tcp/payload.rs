//! Where an operation's bytes lie: pieces of memory in the order of the wire, cut into parts, one
//! for each DATA. Beside this file only carriers (`socket.rs`, `tls_session.rs`) and `Scatter` in
//! `carrier.rs` read or write memory by its address.

use super::carrier::slice;
use super::export::{Export, Held, OpKind, Piece, Stretch};
use super::frame::crc32c;
use super::staging::SlotPlace;
use crc_fast::Digest;
use forebay_transfer::{Span, SpanPair};
use std::sync::Arc;

/// Pieces of a part that is sent at most, so that header, pieces and CRC are one system call
/// (`IOV_MAX` is 1,024).
pub(super) const PART_PIECES_MAX: usize = 1_000;

/// The bytes of an operation that are not in a part yet.
pub(super) struct Payload {
    stretches: Vec<Stretch>,
    next: usize,
    /// Bytes of the next stretch that were cut already.
    within: usize,
    left: u64,
    /// Some of it is memory of a GPU.
    is_staged: bool,
    exports: Arc<[Arc<Export>]>,
}

// SAFETY: stretches are addresses of memory that `Payload::new` was promised, which any thread may
// reach.
unsafe impl Send for Payload {}

impl Payload {
    /// The stretches in the order of the wire.
    ///
    /// # Safety
    ///
    /// Those of host memory must be readable and writable for as long as the payload and its parts
    /// live, by whoever holds `exports`, or by everybody if there are none.
    pub unsafe fn new(stretches: Vec<Stretch>, exports: Arc<[Arc<Export>]>) -> Payload {
        let left = stretches.iter().map(|stretch| stretch.len() as u64).sum();
        let is_staged = stretches.iter().any(|stretch| matches!(stretch, Stretch::Device(_)));
        Payload { stretches, next: 0, within: 0, left, is_staged, exports }
    }

    /// Whether parts have to be cut with a slot of staging: some of it is memory of a GPU.
    pub fn is_staged(&self) -> bool {
        self.is_staged
    }

    /// Whose memory it is.
    pub fn exports(&self) -> &[Arc<Export>] {
        &self.exports
    }

    /// Bytes that are not in a part yet.
    pub fn left(&self) -> u64 {
        self.left
    }

    /// Cuts the next part, of `bytes_max` bytes or fewer.
    pub fn cut(&mut self, bytes_max: usize) -> PayloadPart {
        self.cut_within(bytes_max, usize::MAX, None).0
    }

    /// Cuts the next part to be sent, of few enough pieces for one system call.
    pub fn cut_to_send(&mut self, bytes_max: usize) -> PayloadPart {
        self.cut_within(bytes_max, PART_PIECES_MAX, None).0
    }

    /// Cuts the next part, whose memory of GPUs is a slot instead. Says what is to be copied: from
    /// GPUs before a part of a READ is sent, to them after one of a WRITE has come.
    pub fn cut_staged(
        &mut self,
        op_kind: OpKind,
        bytes_max: usize,
        slot: SlotPlace,
    ) -> (PayloadPart, Vec<SpanPair>) {
        let bytes_max = bytes_max.min(slot.span.len as usize);
        let pieces_max = if op_kind == OpKind::Read { PART_PIECES_MAX } else { usize::MAX };
        let (part, staged) = self.cut_within(bytes_max, pieces_max, Some(slot));
        let pair = |(slot, device): (Span, Span)| match op_kind {
            OpKind::Read => SpanPair::new(device, slot),
            OpKind::Write => SpanPair::new(slot, device),
        };
        (part, staged.into_iter().map(pair).collect())
    }

    /// The next part, and which spans of the slot stand for which of GPUs.
    fn cut_within(
        &mut self,
        bytes_max: usize,
        pieces_max: usize,
        slot: Option<SlotPlace>,
    ) -> (PayloadPart, Vec<(Span, Span)>) {
        let mut pieces: Vec<Piece> = Vec::new();
        let (mut staged, mut in_slot, mut len) = (Vec::new(), 0, 0);
        while len < bytes_max && pieces.len() < pieces_max && self.next < self.stretches.len() {
            let stretch = self.stretches[self.next];
            let taken = (stretch.len() - self.within).min(bytes_max - len);
            match (stretch, slot) {
                (Stretch::Host(piece), _) => {
                    // SAFETY: `within` is below the piece's length.
                    let start = unsafe { piece.start.add(self.within) };
                    pieces.push(Piece { start, len: taken });
                }
                (Stretch::Device(span), Some(slot)) => {
                    let (offset, taken) = (span.offset + self.within as u64, taken as u64);
                    let here = Span::new(slot.span.region, slot.span.offset + in_slot as u64, taken);
                    staged.push((here, Span::new(span.region, offset, taken)));
                    // SAFETY: `in_slot` is at most `len`, which is below the slot's length.
                    let start = unsafe { slot.start.add(in_slot) };
                    in_slot += taken as usize;
                    match pieces.last_mut() {
                        // SAFETY: the end of a piece is at most one past its memory's.
                        Some(last) if unsafe { last.start.add(last.len) } == start => {
                            last.len += taken as usize
                        }
                        _ => pieces.push(Piece { start, len: taken as usize }),
                    }
                }
                (Stretch::Device(_), None) => break,
            }
            len += taken;
            self.within += taken;
            if self.within == stretch.len() {
                self.next += 1;
                self.within = 0;
            }
        }
        self.left -= len as u64;
        (PayloadPart { pieces, next: 0, len, left: len, exports: Some(Arc::clone(&self.exports)) }, staged)
    }
}

/// The payload of one DATA, and how much of it has moved.
pub(super) struct PayloadPart {
    pieces: Vec<Piece>,
    next: usize,
    len: usize,
    left: usize,
    /// `None`: the bytes are nobody's. Zeros are sent; what is received is thrown away.
    exports: Option<Arc<[Arc<Export>]>>,
}

// SAFETY: as for `Payload`.
unsafe impl Send for PayloadPart {}

/// Whom the bytes of a part belong to.
#[derive(Default)]
pub(super) struct Owners(Option<Arc<[Arc<Export>]>>);

impl Owners {
    /// `None`: some of it was withdrawn.
    pub fn hold(&self) -> Option<Vec<Held<'_>>> {
        self.0.iter().flat_map(|exports| exports.iter()).map(|export| export.hold()).collect()
    }
}

/// What nobody's bytes are sent from and received into.
const VOID_BYTES: usize = 64 << 10;
static ZEROS: [u8; VOID_BYTES] = [0; VOID_BYTES];

/// Memory to throw bytes into.
pub(super) struct Discard(Box<[u8]>);

impl Default for Discard {
    fn default() -> Discard {
        Discard(vec![0; VOID_BYTES].into())
    }
}

impl PayloadPart {
    /// `len` bytes of nobody's.
    pub fn hollow(len: usize) -> PayloadPart {
        PayloadPart { pieces: Vec::new(), next: 0, len, left: len, exports: None }
    }

    /// From now on the bytes are nobody's: their owner has withdrawn them.
    pub fn discard_rest(&mut self) {
        self.pieces.clear();
        self.exports = None;
    }

    pub fn is_hollow(&self) -> bool {
        self.exports.is_none()
    }

    pub fn len(&self) -> usize {
        self.len
    }

    pub fn left(&self) -> usize {
        self.left
    }

    /// Whom the bytes belong to. To be held while they are touched.
    pub fn owners(&self) -> Owners {
        Owners(self.exports.clone())
    }

    /// Appends what has not moved, to be sent, as long as `slices` stays within `slices_max`.
    pub fn outgoing(&self, slices: &mut Vec<libc::iovec>, slices_max: usize) {
        if self.is_hollow() {
            append_void(ZEROS.as_ptr().cast_mut(), self.left, slices, slices_max);
        } else {
            self.append_pieces(slices, slices_max);
        }
    }

    /// Appends where what has not moved is to be received, as long as `slices` stays within
    /// `slices_max`, and says whether all of it was appended.
    pub fn incoming(&self, void: &mut Discard, slices: &mut Vec<libc::iovec>, slices_max: usize) -> bool {
        if self.is_hollow() {
            append_void(void.0.as_mut_ptr(), self.left, slices, slices_max)
        } else {
            self.append_pieces(slices, slices_max)
        }
    }

    fn append_pieces(&self, slices: &mut Vec<libc::iovec>, slices_max: usize) -> bool {
        let rest = &self.pieces[self.next..];
        let room = slices_max.saturating_sub(slices.len()).min(rest.len());
        slices.extend(rest[..room].iter().map(|piece| slice(piece.start.as_ptr(), piece.len)));
        room == rest.len()
    }

    /// Notes that `len` bytes have moved, and adds them to `sum` if one is given. The caller holds
    /// the owners.
    pub fn advance(&mut self, mut len: usize, mut sum: Option<&mut Digest>) {
        self.left -= len;
        while len > 0 && !self.is_hollow() {
            let piece = &mut self.pieces[self.next];
            let moved = len.min(piece.len);
            if let Some(sum) = &mut sum {
                // SAFETY: as `Payload::new` was promised; the caller holds the exports.
                sum.update(unsafe { std::slice::from_raw_parts(piece.start.as_ptr(), moved) });
            }
            // SAFETY: `moved` is at most the piece's length.
            piece.start = unsafe { piece.start.add(moved) };
            piece.len -= moved;
            len -= moved;
            self.next += usize::from(piece.len == 0);
        }
    }

    /// Puts bytes that came with something else in place. The caller holds the owners; there are no
    /// more than are left.
    pub fn put(&mut self, mut bytes: &[u8], sum: &mut Digest) {
        debug_assert!(bytes.len() <= self.left);
        while let (false, Some(piece)) = (bytes.is_empty(), self.pieces.get(self.next)) {
            let (now, rest) = bytes.split_at(bytes.len().min(piece.len));
            // SAFETY: as `Payload::new` was promised; the caller holds the exports. A connection's
            // own buffer is never a piece.
            unsafe { std::ptr::copy_nonoverlapping(now.as_ptr(), piece.start.as_ptr(), now.len()) };
            self.advance(now.len(), Some(sum));
            bytes = rest;
        }
        if self.is_hollow() {
            self.advance(bytes.len(), None);
        }
    }

    /// CRC-32C of what has not moved. The caller holds the owners.
    pub fn crc(&self) -> u32 {
        let mut sum = crc32c();
        for piece in &self.pieces[self.next..] {
            // SAFETY: as `Payload::new` was promised; the caller holds the exports.
            sum.update(unsafe { std::slice::from_raw_parts(piece.start.as_ptr(), piece.len) });
        }
        sum.finalize() as u32
    }
}

fn append_void(start: *mut u8, mut left: usize, slices: &mut Vec<libc::iovec>, slices_max: usize) -> bool {
    while left > 0 && slices.len() < slices_max {
        let len = left.min(VOID_BYTES);
        slices.push(slice(start, len));
        left -= len;
    }
    left == 0
}

#[cfg(test)]
mod tests {
    use super::super::frame::crc32c_of;
    use super::*;
    use proptest::prelude::*;
    use std::ptr::NonNull;

    fn pieces(memory: &mut [u8], lens: &[usize]) -> Payload {
        let mut rest = memory;
        let mut pieces = Vec::new();
        for len in lens {
            let (piece, after) = rest.split_at_mut(*len);
            let start = NonNull::new(piece.as_mut_ptr()).unwrap();
            pieces.push(Stretch::Host(Piece { start, len: *len }));
            rest = after;
        }
        // SAFETY: the tests keep the memory longer than the payload, and do not touch it meanwhile.
        unsafe { Payload::new(pieces, Arc::new([])) }
    }

    proptest! {
        #[test]
        fn the_parts_are_the_payload_in_its_order(lens in prop::collection::vec(1usize..50, 1..40), cut in 1usize..200, step in 1usize..60) {
            let bytes: usize = lens.iter().sum();
            let sent: Vec<u8> = (0..bytes).map(|at| at as u8).collect();
            let mut memory = vec![0xee; bytes];
            let mut payload = pieces(&mut memory, &lens);
            let mut at = 0;
            while payload.left() > 0 {
                let mut part = payload.cut(cut);
                let whole = &sent[at..at + part.len()];
                let mut sum = crc32c();
                for bytes in whole.chunks(step) {
                    part.put(bytes, &mut sum);
                }
                prop_assert_eq!(part.left(), 0);
                prop_assert_eq!(sum.finalize() as u32, crc32c_of(whole));
                at += whole.len();
            }
            prop_assert_eq!(memory, sent);
        }

        #[test]
        fn the_crc_of_a_part_is_that_of_its_bytes(lens in prop::collection::vec(1usize..50, 1..40), cut in 1usize..200) {
            let bytes: usize = lens.iter().sum();
            let mut memory: Vec<u8> = (0..bytes).map(|at| (at * 7) as u8).collect();
            let sent = memory.clone();
            let mut payload = pieces(&mut memory, &lens);
            let mut at = 0;
            while payload.left() > 0 {
                let part = payload.cut_to_send(cut);
                prop_assert_eq!(part.crc(), crc32c_of(&sent[at..at + part.len()]));
                at += part.len();
            }
            prop_assert_eq!(at, bytes);
        }
    }
}
