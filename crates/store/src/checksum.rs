//! Checksums of bytes in registered memory. This file knows CRC-32C and how to reach bytes.

use crc_fast::{CrcAlgorithm, Digest};
use forebay_transfer::{Memory, Span};
use std::ptr::NonNull;

/// CRC-32C (Castagnoli) of the bytes of all spans, one after another, or `None` if one of them is
/// not host memory.
///
/// The caller keeps the spans registered and unwritten meanwhile.
pub fn of_spans(memory: &Memory, spans: &[Span]) -> Option<u32> {
    Regions::of(memory, spans)?.sum(spans)
}

/// The same of each of several lists, with one look at the memory for all of them: that takes
/// longer than the sum of a few KiB.
pub fn of_each(memory: &Memory, lists: &[&[Span]]) -> Vec<Option<u32>> {
    match Regions::of(memory, lists.iter().copied().flatten()) {
        Some(regions) => lists.iter().map(|spans| regions.sum(spans)).collect(),
        // One of them is not there, which is nothing to the others.
        None => lists.iter().map(|spans| of_spans(memory, spans)).collect(),
    }
}

/// Of each region that spans are in, the part from the first to the last of them, and where it
/// starts in memory.
struct Regions(Vec<(Span, NonNull<u8>)>);

impl Regions {
    /// `None` if one of the spans is not host memory.
    fn of<'a>(memory: &Memory, spans: impl IntoIterator<Item = &'a Span>) -> Option<Regions> {
        let mut parts: Vec<Span> = Vec::new();
        for span in spans {
            let end = span.offset.checked_add(span.len)?;
            match parts.iter_mut().find(|part| part.region == span.region) {
                Some(part) => {
                    let (first, last) = (part.offset.min(span.offset), (part.offset + part.len).max(end));
                    *part = Span::new(span.region, first, last - first);
                }
                None => parts.push(*span),
            }
        }
        let start = |part: Span| memory.host(&part).map(|(start, _)| (part, start));
        parts.into_iter().map(start).collect::<Option<_>>().map(Regions)
    }

    /// The sum of spans that were looked at.
    fn sum(&self, spans: &[Span]) -> Option<u32> {
        let mut sum = digest();
        for span in spans.iter().filter(|span| span.len > 0) {
            let (part, start) = self.0.iter().find(|(part, _)| part.region == span.region)?;
            let offset = span.offset.checked_sub(part.offset)?;
            if offset.checked_add(span.len)? > part.len {
                return None;
            }
            // SAFETY: the memory table has checked the bounds of the part, the span lies inside of
            // it, and the caller keeps it registered and unwritten.
            let bytes =
                unsafe { std::slice::from_raw_parts(start.as_ptr().add(offset as usize), span.len as usize) };
            sum.update(bytes);
        }
        Some(sum.finalize() as u32)
    }
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
            let (good, bad) = (Span::new(one, 90, 10), Span::new(beyond.0, beyond.1, beyond.2));
            let each = of_each(handle.memory(), &[&[good], &[bad], &[], &[good, good]]);
            let right = |pieces: &[&[u8]]| Some(of_pieces(pieces));
            let good = &bytes[90..100];
            assert_eq!(each, [right(&[good]), None, right(&[]), right(&[good, good])]);
        }
        let lists: [&[Span]; 2] =
            [&[Span::new(one, 90, 10)], &[Span::new(other, 3, 2), Span::new(one, 0, 1)]];
        let each = [&bytes[90..100], &[3, 4, 0]].map(|bytes| Some(of_pieces(&[bytes])));
        assert_eq!(of_each(handle.memory(), &lists), each);
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
