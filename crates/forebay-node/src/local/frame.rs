//! Frames between a node and the processes of its host: a header and a body, one behind the other. Pure: this file turns
//! bytes into frames as they come; it must never know what a body says.
//!
//! ```text
//! length  u32  of the body
//! kind    u16  what the body is
//! zero    u16
//! number  u64  of the request; an answer repeats it
//! ```
//!
//! The first answer of a node, and no other frame, carries a descriptor, which comes with the frame's first byte.

use thiserror::Error;

/// Length of a header.
pub const HEADER_BYTES: usize = 16;
/// Longest body.
pub const BODY_BYTES_MAX: usize = 8 << 20;

/// A frame.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Frame {
    /// What the body is.
    pub kind: u16,
    /// Of the request.
    pub number: u64,
    /// What it says.
    pub body: Vec<u8>,
}

/// Why bytes are not frames. The connection has to end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum BadFrame {
    /// A longer body than there may be.
    #[error("a frame of {bytes} bytes; at most {BODY_BYTES_MAX} may be")]
    TooLong {
        /// What the header says.
        bytes: u32,
    },
    /// Bytes that must be zero are not.
    #[error("the header's reserved bytes are {value:#06x}, not 0")]
    Reserved {
        /// What they are.
        value: u16,
    },
}

impl Frame {
    /// The bytes of the frame. A body beyond the limit is a mistake of the caller, which the other end refuses.
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(HEADER_BYTES + self.body.len());
        bytes.extend_from_slice(&u32::try_from(self.body.len()).unwrap_or(u32::MAX).to_le_bytes());
        bytes.extend_from_slice(&self.kind.to_le_bytes());
        bytes.extend_from_slice(&[0; 2]);
        bytes.extend_from_slice(&self.number.to_le_bytes());
        bytes.extend_from_slice(&self.body);
        bytes
    }
}

/// Bytes that have come and are no whole frame yet.
#[derive(Debug, Default)]
pub struct Inbox {
    bytes: Vec<u8>,
    /// Frames up to here were taken.
    taken: usize,
}

impl Inbox {
    /// More bytes have come.
    pub fn put(&mut self, bytes: &[u8]) {
        self.bytes.drain(..std::mem::take(&mut self.taken));
        self.bytes.extend_from_slice(bytes);
    }

    /// The next whole frame.
    pub fn next(&mut self) -> Result<Option<Frame>, BadFrame> {
        let bytes = &self.bytes[self.taken..];
        let Some((header, rest)) = bytes.split_first_chunk::<HEADER_BYTES>() else { return Ok(None) };
        let [a, b, c, d, kind_low, kind_high, zero_low, zero_high, number @ ..] = *header;
        let len = u32::from_le_bytes([a, b, c, d]);
        let zero = u16::from_le_bytes([zero_low, zero_high]);
        if len as usize > BODY_BYTES_MAX {
            return Err(BadFrame::TooLong { bytes: len });
        }
        if zero != 0 {
            return Err(BadFrame::Reserved { value: zero });
        }
        let Some(body) = rest.get(..len as usize) else { return Ok(None) };
        let kind = u16::from_le_bytes([kind_low, kind_high]);
        let frame = Frame { kind, number: u64::from_le_bytes(number), body: body.to_vec() };
        self.taken += HEADER_BYTES + body.len();
        Ok(Some(frame))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn frames_come_out_as_they_went_in_however_the_bytes_are_cut(
            frames in prop::collection::vec((any::<u16>(), any::<u64>(), prop::collection::vec(any::<u8>(), 0..50)), 0..8),
            cut in 1usize..40,
        ) {
            let frames: Vec<Frame> =
                frames.into_iter().map(|(kind, number, body)| Frame { kind, number, body }).collect();
            let bytes: Vec<u8> = frames.iter().flat_map(Frame::encode).collect();
            let (mut inbox, mut found) = (Inbox::default(), Vec::new());
            for part in bytes.chunks(cut) {
                inbox.put(part);
                while let Some(frame) = inbox.next().unwrap() {
                    found.push(frame);
                }
            }
            prop_assert_eq!(found, frames);
        }

        #[test]
        fn arbitrary_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..100)) {
            let mut inbox = Inbox::default();
            inbox.put(&bytes);
            while let Ok(Some(_)) = inbox.next() {}
        }
    }

    #[test]
    fn a_frame_that_is_too_long_is_refused_by_its_header() {
        let mut inbox = Inbox::default();
        inbox.put(b"GET /metrics HTT");
        assert!(matches!(inbox.next(), Err(BadFrame::TooLong { .. })));
    }
}
