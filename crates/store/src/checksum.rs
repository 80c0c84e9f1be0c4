//! Checksums of bytes in registered memory. This file knows CRC-32C and how to reach bytes.

use crc_fast::{CrcAlgorithm, Digest};
use forebay_transfer::{Memory, Span};

/// CRC-32C (Castagnoli) of the bytes of all spans, one after another, or `None` if one of them is
/// not host memory.
///
/// The caller keeps the spans registered and unwritten meanwhile.
pub fn of_spans(memory: &Memory, spans: &[Span]) -> Option<u32> {
    let mut sum = digest();
    // One look into the table, and at the memory, for all spans of a region that follow each other.
    for run in spans.chunk_by(|one, next| one.region == next.region) {
        let first = run.iter().map(|span| span.offset).min()?;
        let end =
            run.iter().try_fold(0, |end: u64, span| Some(end.max(span.offset.checked_add(span.len)?)))?;
        let all = Span::new(run.first()?.region, first, end - first);
        let (start, _) = memory.host(&all)?;
        for span in run.iter().filter(|span| span.len > 0) {
            // SAFETY: the memory table has checked the bounds of all spans together, and the caller
            // keeps them registered and unwritten.
            let bytes = unsafe {
                let start = start.as_ptr().add((span.offset - first) as usize);
                std::slice::from_raw_parts(start, span.len as usize)
            };
            sum.update(bytes);
        }
    }
    Some(sum.finalize() as u32)
}

/// CRC-32C (Castagnoli polynomial, reflected, initial value and final XOR all ones: RFC 3720,
/// appendix B.4).
///
/// ```
/// assert_eq!(forebay_store::log::crc32c(b"123456789"), 0xe306_9283);
/// ```
pub fn crc32c(bytes: &[u8]) -> u32 {
    of_pieces(&[bytes])
}

/// CRC-32C of the bytes of all pieces, one after another.
pub fn of_pieces(pieces: &[&[u8]]) -> u32 {
    let mut sum = digest();
    pieces.iter().for_each(|piece| sum.update(piece));
    sum.finalize() as u32
}

/// CRC-32C as iSCSI has it: RFC 3720.
fn digest() -> Digest {
    Digest::new(CrcAlgorithm::Crc32Iscsi)
}

#[cfg(test)]
mod tests {
    use super::*;
    use forebay_transfer::{HostBuffer, Limits, MoverThread, Place, RegionId};
    use proptest::prelude::*;
    use std::sync::Arc;

    #[test]
    fn spans_sum_like_their_pieces_in_their_order_and_none_beyond_a_region_does() {
        let mover = MoverThread::spawn(Limits::default()).unwrap();
        let memory = Arc::new(HostBuffer::new(100));
        assert!(memory.write(0, &(0..100).collect::<Vec<u8>>()));
        let handle = mover.handle();
        let one = handle.register(Place::Host(0), memory.clone()).unwrap();
        let other = handle.register(Place::Host(0), memory).unwrap();
        let sum = |spans: &[(RegionId, u64, u64)]| {
            let spans: Vec<Span> =
                spans.iter().map(|(region, at, len)| Span::new(*region, *at, *len)).collect();
            of_spans(handle.memory(), &spans)
        };
        let bytes: Vec<u8> = (0..100).collect();
        let pieces = [&bytes[90..100], &bytes[0..0], &bytes[3..5], &bytes[50..60]];
        let right = Some(of_pieces(&pieces));
        assert_eq!(sum(&[(one, 90, 10), (one, 7, 0), (one, 3, 2), (other, 50, 10)]), right);
        assert_eq!(sum(&[]), Some(of_pieces(&[])));
        for beyond in [(one, 91, 10), (one, 101, 0), (one, u64::MAX, 2)] {
            assert_eq!(sum(&[(one, 0, 1), beyond]), None);
        }
    }

    #[test]
    fn pieces_sum_like_the_whole_and_to_the_known_check_value() {
        // From the catalogue of parametrised CRC algorithms, CRC-32/ISCSI.
        assert_eq!(of_pieces(&[b"123456789"]), 0xe306_9283);
        assert_eq!(of_pieces(&[b"1234", b"", b"56789"]), 0xe306_9283);
    }

    proptest! {
        #[test]
        fn sums_are_those_of_the_reference(bytes in prop::collection::vec(any::<u8>(), 0..5000), cut in 0usize..5000) {
            let (head, tail) = bytes.split_at(cut.min(bytes.len()));
            prop_assert_eq!(crc32c(&bytes), crc32c::crc32c(&bytes));
            prop_assert_eq!(of_pieces(&[head, tail]), crc32c::crc32c(&bytes));
        }
    }
}
