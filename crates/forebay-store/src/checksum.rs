//! Checksums of bytes in registered memory. This file knows CRC-32C and how to reach bytes; it must never know whose they
//! are or what a mismatch means.

use crc_fast::{CrcAlgorithm, Digest};
use forebay_mover::{Memory, Span};

/// CRC-32C (Castagnoli) of the bytes of all spans, one after another, or `None` if one of them is not host memory.
///
/// The caller keeps the spans registered and unwritten meanwhile.
pub fn of_spans(memory: &Memory, spans: &[Span]) -> Option<u32> {
    let mut sum = crc32c();
    for span in spans {
        let (start, len) = memory.host(span)?;
        // SAFETY: the memory table has checked the bounds, and the caller keeps the spans registered and unwritten.
        sum.update(unsafe { std::slice::from_raw_parts(start.as_ptr(), len) });
    }
    Some(sum.finalize() as u32)
}

/// CRC-32C of the bytes of all pieces, one after another.
pub fn of_pieces(pieces: &[&[u8]]) -> u32 {
    let mut sum = crc32c();
    pieces.iter().for_each(|piece| sum.update(piece));
    sum.finalize() as u32
}

/// CRC-32C as iSCSI has it: RFC 3720.
fn crc32c() -> Digest {
    Digest::new(CrcAlgorithm::Crc32Iscsi)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_sum_like_the_whole_and_to_the_known_check_value() {
        // From the catalogue of parametrised CRC algorithms, CRC-32/ISCSI.
        assert_eq!(of_pieces(&[b"123456789"]), 0xe306_9283);
        assert_eq!(of_pieces(&[b"1234", b"", b"56789"]), 0xe306_9283);
    }
}
