//! Checksums of bytes in registered memory. This file knows CRC-32C and how to reach bytes; it must never know whose they
//! are or what a mismatch means.

use forebay_mover::{Memory, Span};

/// CRC-32C (Castagnoli) of the bytes of all spans, one after another, or `None` if one of them is not host memory.
///
/// The caller keeps the spans registered and unwritten meanwhile.
pub(crate) fn of_spans(memory: &Memory, spans: &[Span]) -> Option<u32> {
    spans.iter().try_fold(0, |crc, span| {
        let (start, len) = memory.host(span)?;
        // SAFETY: the memory table has checked the bounds, and the caller keeps the spans registered and unwritten.
        let bytes = unsafe { std::slice::from_raw_parts(start.as_ptr(), len) };
        Some(crc32c::crc32c_append(crc, bytes))
    })
}

/// CRC-32C of the bytes of all pieces, one after another.
pub(crate) fn of_pieces(pieces: &[&[u8]]) -> u32 {
    pieces.iter().fold(0, |crc, piece| crc32c::crc32c_append(crc, piece))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_sum_like_the_whole_and_to_the_known_check_value() {
        // The check value of CRC-32C for "123456789": RFC 3720 gives the polynomial, the catalogue of CRCs the value.
        assert_eq!(of_pieces(&[b"123456789"]), 0xe306_9283);
        assert_eq!(of_pieces(&[b"1234", b"", b"56789"]), 0xe306_9283);
    }
}
