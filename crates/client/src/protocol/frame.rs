//! Frames between a node and the processes of its host: a header and a body, one behind the other.
//! Pure: this file turns bytes into frames as they come.
//!
//! ```text
//! length  u32  of the body and the digest
//! kind    u16  what the body is
//! zero    u16
//! number  u64  of the request; an answer repeats it. 0: nobody answers it, or nobody has asked for it
//! body
//! digest  u64  the first bytes of BLAKE3 of: the digest of the request that this answers (0 if there is none), kind,
//!              number and body
//! ```
//!
//! So an answer names what it answers, and a frame is whole: an answer to another request, of
//! whomever, and bytes of two frames that were put together, are not taken for the answer.
//!
//! The first answer of a node, and that to a client that opens a ring, carry a descriptor, which
//! comes with the frame's first byte. No other frame does.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use thiserror::Error;

pub const HEADER_BYTES: usize = 16;
pub const BODY_BYTES_MAX: usize = 8 << 20;
/// Each connection has room for an unfinished frame of so many bytes, whatever others have. A hello
/// is shorter.
pub const SMALL_BYTES: usize = 64 << 10;

/// Length of the digest behind a body.
pub const DIGEST_BYTES: usize = 8;

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Frame {
    /// What the body is.
    pub kind: u16,
    /// Of the request.
    pub number: u64,
    pub body: Vec<u8>,
    /// What it answers and that it is whole, as its sender says.
    pub digest: u64,
}

/// A request, as its answer names it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Asked {
    pub number: u64,
    pub digest: u64,
}

/// What nobody has asked for names this.
pub const UNASKED: Asked = Asked { number: 0, digest: 0 };

/// Why bytes are not frames. The connection has to end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum BadFrame {
    #[error("a frame of {bytes} bytes; at most {allowed} may be")]
    TooLong { bytes: usize, allowed: usize },
    #[error(
        "a frame of {bytes} bytes, while clients have not finished frames of {taken}; limits.unfinished is {limit}"
    )]
    NoRoom { bytes: usize, taken: u64, limit: u64 },
    #[error("a frame of {bytes} bytes; at least the {DIGEST_BYTES} of its digest must be")]
    TooShort { bytes: u32 },
    #[error(
        "the frame of kind {kind} and number {number} is cut, or belongs to something else: its digest is wrong"
    )]
    Digest { kind: u16, number: u64 },
    #[error("the header's reserved bytes are {value:#06x}, not 0")]
    Reserved { value: u16 },
}

impl Frame {
    /// A frame of its own, not an answer.
    pub fn new(kind: u16, number: u64, body: Vec<u8>) -> Frame {
        Frame::answering(Asked { number, ..UNASKED }, kind, body)
    }

    /// The answer to a request.
    pub fn answering(asked: Asked, kind: u16, body: Vec<u8>) -> Frame {
        let digest = digest(asked.digest, kind, asked.number, &body);
        Frame { kind, number: asked.number, body, digest }
    }

    /// Refuses a frame that is not whole, or does not answer this.
    pub fn check(&self, asked: Asked) -> Result<(), BadFrame> {
        let Frame { kind, number, .. } = *self;
        let right = number == asked.number && self.digest == digest(asked.digest, kind, number, &self.body);
        if right { Ok(()) } else { Err(BadFrame::Digest { kind, number }) }
    }

    /// Refuses a frame that is not whole, or is an answer.
    pub fn check_unasked(&self) -> Result<(), BadFrame> {
        self.check(Asked { number: self.number, ..UNASKED })
    }

    /// This request, as its answer names it.
    pub fn asked(&self) -> Asked {
        Asked { number: self.number, digest: self.digest }
    }

    /// The bytes of the frame. A body beyond the limit is a mistake of the caller, which the other
    /// end refuses.
    pub fn encode(&self) -> Vec<u8> {
        let len = self.body.len() + DIGEST_BYTES;
        let mut bytes = Vec::with_capacity(HEADER_BYTES + len);
        bytes.extend_from_slice(&u32::try_from(len).unwrap_or(u32::MAX).to_le_bytes());
        bytes.extend_from_slice(&self.kind.to_le_bytes());
        bytes.extend_from_slice(&[0; 2]);
        bytes.extend_from_slice(&self.number.to_le_bytes());
        bytes.extend_from_slice(&self.body);
        bytes.extend_from_slice(&self.digest.to_le_bytes());
        bytes
    }
}

fn digest(asked: u64, kind: u16, number: u64, body: &[u8]) -> u64 {
    let mut hasher = blake3::Hasher::new();
    hasher
        .update(&asked.to_le_bytes())
        .update(&kind.to_le_bytes())
        .update(&number.to_le_bytes())
        .update(body);
    let mut first = [0; DIGEST_BYTES];
    hasher.finalize_xof().fill(&mut first);
    u64::from_le_bytes(first)
}

/// Bytes of unfinished frames, of all connections together.
///
/// A connection always has room for a [small](SMALL_BYTES) frame. A longer one takes its whole
/// length from here when its header has come, and gives it back when it is whole or its connection
/// ends; one for which there is not enough is refused.
#[derive(Debug)]
pub struct Unfinished {
    bytes_max: u64,
    bytes: AtomicU64,
    refused: AtomicU64,
}

impl Unfinished {
    /// Room for so many bytes.
    pub fn new(bytes_max: u64) -> Unfinished {
        Unfinished { bytes_max, bytes: AtomicU64::new(0), refused: AtomicU64::new(0) }
    }

    pub fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }

    /// Frames that were refused for want of room.
    pub fn refused(&self) -> u64 {
        self.refused.load(Ordering::Relaxed)
    }

    fn take(&self, bytes: usize) -> Result<(), BadFrame> {
        let room = |taken: u64| taken.checked_add(bytes as u64).filter(|sum| *sum <= self.bytes_max);
        let taken = self.bytes.fetch_update(Ordering::Relaxed, Ordering::Relaxed, room);
        taken.map(drop).map_err(|taken| {
            self.refused.fetch_add(1, Ordering::Relaxed);
            BadFrame::NoRoom { bytes, taken, limit: self.bytes_max }
        })
    }

    fn give_back(&self, bytes: usize) {
        self.bytes.fetch_sub(bytes as u64, Ordering::Relaxed);
    }
}

/// Bytes that have come and are no whole frame yet.
#[derive(Debug)]
pub struct Inbox {
    bytes: Vec<u8>,
    /// Frames up to here were taken.
    taken: usize,
    unfinished: Arc<Unfinished>,
    /// What the frame that is coming has taken of it.
    reserved: usize,
    /// Longest body now.
    body_bytes_max: usize,
}

impl Default for Inbox {
    /// For frames of whoever is trusted with as much as there may be.
    fn default() -> Inbox {
        let mut inbox = Inbox::new(Arc::new(Unfinished::new(u64::MAX)));
        inbox.open();
        inbox
    }
}

impl Inbox {
    /// Nothing has come. Until [`open`](Inbox::open) only small frames may.
    pub fn new(unfinished: Arc<Unfinished>) -> Inbox {
        Inbox { bytes: Vec::new(), taken: 0, unfinished, reserved: 0, body_bytes_max: SMALL_BYTES }
    }

    /// Frames may be as long as there are any: whoever sends them is let in.
    pub fn open(&mut self) {
        self.body_bytes_max = BODY_BYTES_MAX;
    }

    /// Whether a long frame has begun and not ended.
    pub fn holds_room(&self) -> bool {
        self.reserved > 0
    }

    /// More bytes have come.
    pub fn put(&mut self, bytes: &[u8]) {
        self.bytes.drain(..std::mem::take(&mut self.taken));
        // What a long frame took is not kept for the next ones.
        if self.reserved == 0 && self.bytes.capacity() > 4 * SMALL_BYTES {
            self.bytes.shrink_to(2 * SMALL_BYTES);
        }
        self.bytes.extend_from_slice(bytes);
    }

    /// The next whole frame.
    pub fn next_frame(&mut self) -> Result<Option<Frame>, BadFrame> {
        let bytes = &self.bytes[self.taken..];
        let Some((header, rest)) = bytes.split_first_chunk::<HEADER_BYTES>() else { return Ok(None) };
        let [a, b, c, d, kind_low, kind_high, zero_low, zero_high, number @ ..] = *header;
        let len = u32::from_le_bytes([a, b, c, d]);
        let zero = u16::from_le_bytes([zero_low, zero_high]);
        let body_bytes = (len as usize).checked_sub(DIGEST_BYTES).ok_or(BadFrame::TooShort { bytes: len })?;
        if body_bytes > self.body_bytes_max {
            return Err(BadFrame::TooLong { bytes: body_bytes, allowed: self.body_bytes_max });
        }
        if zero != 0 {
            return Err(BadFrame::Reserved { value: zero });
        }
        let Some((body, digest)) =
            rest.get(..len as usize).and_then(|rest| rest.split_last_chunk::<DIGEST_BYTES>())
        else {
            self.reserve(body_bytes)?;
            return Ok(None);
        };
        let (kind, digest) = (u16::from_le_bytes([kind_low, kind_high]), u64::from_le_bytes(*digest));
        let frame = Frame { kind, number: u64::from_le_bytes(number), body: body.to_vec(), digest };
        self.taken += HEADER_BYTES + len as usize;
        self.give_back();
        Ok(Some(frame))
    }

    fn reserve(&mut self, bytes: usize) -> Result<(), BadFrame> {
        if self.reserved == 0 && bytes > SMALL_BYTES {
            self.unfinished.take(bytes)?;
            self.reserved = bytes;
        }
        Ok(())
    }

    fn give_back(&mut self) {
        self.unfinished.give_back(std::mem::take(&mut self.reserved));
    }
}

impl Drop for Inbox {
    fn drop(&mut self) {
        self.give_back();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn begin(inbox: &mut Inbox, body: usize) -> Result<Option<Frame>, BadFrame> {
        let whole = Frame::new(1, 1, vec![0; body]).encode();
        inbox.put(&whole[..whole.len() - 1]);
        inbox.next_frame()
    }

    #[test]
    fn unfinished_frames_of_all_connections_together_are_bounded_in_bytes() {
        let all = Arc::new(Unfinished::new(1 << 20));
        let mut inboxes: Vec<Inbox> = (0..8).map(|_| Inbox::new(Arc::clone(&all))).collect();
        inboxes.iter_mut().for_each(Inbox::open);
        for inbox in &mut inboxes[..4] {
            assert_eq!(begin(inbox, 256 << 10), Ok(None));
        }
        assert_eq!((all.bytes(), all.refused()), (1 << 20, 0));
        let refused = begin(&mut inboxes[4], SMALL_BYTES + 1).unwrap_err();
        assert!(refused.to_string().contains("limits.unfinished is 1048576"), "{refused}");
        assert_eq!(all.refused(), 1);
        assert_eq!(begin(&mut inboxes[5], SMALL_BYTES), Ok(None), "a small one always has room");
        inboxes[0].put(&[0]);
        assert!(matches!(inboxes[0].next_frame(), Ok(Some(_))));
        assert_eq!(all.bytes(), 768 << 10, "what is whole gives its room back");
        inboxes[0].put(&[0]);
        assert!(inboxes[0].bytes.capacity() <= 4 * SMALL_BYTES, "and its memory");
        drop(inboxes);
        assert_eq!(all.bytes(), 0, "so does what goes");
    }

    #[test]
    fn who_is_not_let_in_sends_small_frames_only() {
        let mut inbox = Inbox::new(Arc::new(Unfinished::new(1 << 30)));
        let refused = begin(&mut inbox, SMALL_BYTES + 1).unwrap_err();
        assert!(refused.to_string().contains("at most 65536 may be"), "{refused}");
    }

    proptest! {
        #[test]
        fn frames_come_out_as_they_went_in_however_the_bytes_are_cut(
            frames in prop::collection::vec((any::<u16>(), any::<u64>(), prop::collection::vec(any::<u8>(), 0..50)), 0..8),
            cut in 1usize..40,
        ) {
            let frames: Vec<Frame> =
                frames.into_iter().map(|(kind, number, body)| Frame::new(kind, number, body)).collect();
            let bytes: Vec<u8> = frames.iter().flat_map(Frame::encode).collect();
            let (mut inbox, mut found) = (Inbox::default(), Vec::new());
            for part in bytes.chunks(cut) {
                inbox.put(part);
                while let Some(frame) = inbox.next_frame().unwrap() {
                    found.push(frame);
                }
            }
            prop_assert_eq!(found, frames);
        }

        #[test]
        fn arbitrary_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..100)) {
            let mut inbox = Inbox::default();
            inbox.put(&bytes);
            while let Ok(Some(_)) = inbox.next_frame() {}
        }
    }

    proptest! {
        #[test]
        fn an_answer_is_good_for_its_own_request_and_whole_only(
            question in prop::collection::vec(any::<u8>(), 0..50), other in prop::collection::vec(any::<u8>(), 0..50),
            body in prop::collection::vec(any::<u8>(), 0..50), at in any::<prop::sample::Index>(), flip in 1u8..,
        ) {
            let (request, crossed) = (Frame::new(3, 7, question.clone()), Frame::new(3, 7, other.clone()));
            let answer = Frame::answering(request.asked(), 3, body);
            prop_assert_eq!(answer.check(request.asked()), Ok(()));
            prop_assert_eq!(answer.check(crossed.asked()).is_ok(), question == other);
            prop_assert!(answer.check(Frame::new(4, 7, question.clone()).asked()).is_err());
            prop_assert!(answer.check(Frame::new(3, 8, question).asked()).is_err());
            prop_assert!(answer.check_unasked().is_err());
            let mut damaged = answer.clone();
            if let Some(at) = (!damaged.body.is_empty()).then(|| at.index(damaged.body.len())) {
                damaged.body[at] ^= flip;
                prop_assert!(damaged.check(request.asked()).is_err());
            }
        }
    }

    #[test]
    fn a_frame_that_is_too_long_is_refused_by_its_header() {
        let mut inbox = Inbox::default();
        inbox.put(b"GET /metrics HTT");
        assert!(matches!(inbox.next_frame(), Err(BadFrame::TooLong { .. })));
    }
}
