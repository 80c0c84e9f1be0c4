//! What the old and the new node say to each other, in frames of the clients' socket. Pure.

use forebay_client::protocol::bytes::{BadBytes, Reader, Writer};
use forebay_client::protocol::frame::Frame;
use thiserror::Error;

/// The version of the hand-over and of its table; another one is refused.
pub const VERSION: u16 = 1;

/// Kinds of frames. No request of a client has one of them.
pub const TAKE_OVER: u16 = 32;
const PART: u16 = 33;
const READY: u16 = 34;
const YOURS: u16 = 35;
const TAKEN: u16 = 36;
const GAVE_UP: u16 = 37;

/// Where chunks can lie in an arena: the same for both.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Layout {
    /// `memory.size`.
    pub memory_bytes: u64,
    /// `memory.largest_chunk`.
    pub largest_chunk: u64,
}

/// Why a node does not give its memory away. It goes on as it was.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum NotGiven {
    #[error("user {uid} may not take over; root and the node's own may")]
    User { uid: u32 },
    #[error("the hand-over has version {theirs} there and {VERSION} here; end this node and start the other")]
    Version { theirs: u16 },
    #[error("{field} is {theirs} there and {ours} here; they have to be the same")]
    Layout { field: &'static str, theirs: u64, ours: u64 },
    #[error(transparent)]
    Bytes(#[from] BadBytes),
    #[error("this node hands over to nobody")]
    Nobody,
    #[error("clients still write {slots} slots; none may be written while the memory changes hands")]
    Written { slots: usize },
}

/// The first frame of a new node.
pub fn offer(layout: Layout) -> Frame {
    let body = Writer::default().u16(VERSION).u64(layout.memory_bytes).u64(layout.largest_chunk);
    Frame::new(TAKE_OVER, 0, body.0)
}

/// Refuses a new node that cannot go on with this memory.
pub fn check_offer(body: &[u8], ours: Layout) -> Result<(), NotGiven> {
    let mut body = Reader(body);
    let theirs = body.u16("the version of a hand-over")?;
    if theirs != VERSION {
        return Err(NotGiven::Version { theirs });
    }
    let same = |field, theirs, ours| match theirs == ours {
        true => Ok(()),
        false => Err(NotGiven::Layout { field, theirs, ours }),
    };
    same("memory.size", body.u64("memory.size")?, ours.memory_bytes)?;
    same("memory.largest_chunk", body.u64("memory.largest_chunk")?, ours.largest_chunk)?;
    Ok(body.end()?)
}

/// What is said after that.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Message {
    /// A descriptor comes with it, the arena's first, then the table's with its length, then the
    /// socket's.
    Part {
        bytes: u64,
    },
    Ready,
    Yours,
    Taken,
    GaveUp(String),
}

impl Message {
    pub fn encode(&self) -> Frame {
        let start = Writer::default();
        let (kind, Writer(body)) = match self {
            Message::Part { bytes } => (PART, start.u64(*bytes)),
            Message::Ready => (READY, start),
            Message::Yours => (YOURS, start),
            Message::Taken => (TAKEN, start),
            Message::GaveUp(why) => (GAVE_UP, start.text(why)),
        };
        Frame::new(kind, 0, body)
    }

    pub fn decode(frame: &Frame) -> Result<Message, BadBytes> {
        let mut body = Reader(&frame.body);
        let message = match frame.kind {
            PART => Message::Part { bytes: body.u64("a length")? },
            READY => Message::Ready,
            YOURS => Message::Yours,
            TAKEN => Message::Taken,
            GAVE_UP => Message::GaveUp(body.text("a reason")?),
            kind => {
                let (what, allowed) = ("the kind of a message of a hand-over", "33 to 37");
                return Err(BadBytes::Value { what, value: kind.into(), allowed });
            }
        };
        body.end()?;
        Ok(message)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const OURS: Layout = Layout { memory_bytes: 1 << 30, largest_chunk: 1 << 24 };

    #[test]
    fn every_message_comes_back_and_none_can_be_cut_or_lengthened() {
        let why = || "a disk failed".to_owned();
        for message in [
            Message::Part { bytes: 7 },
            Message::Ready,
            Message::Yours,
            Message::Taken,
            Message::GaveUp(why()),
        ] {
            let frame = message.encode();
            assert_eq!(Message::decode(&frame).as_ref(), Ok(&message));
            for cut in 0..frame.body.len() {
                let short = Frame { body: frame.body[..cut].to_vec(), ..frame.clone() };
                assert!(Message::decode(&short).is_err(), "{message:?} cut to {cut}");
            }
            let long = Frame { body: [frame.body.clone(), vec![0]].concat(), ..frame };
            assert!(Message::decode(&long).is_err(), "{message:?} with a byte more");
        }
    }

    #[test]
    fn a_successor_of_another_version_or_layout_is_refused_by_name() {
        assert_eq!(check_offer(&offer(OURS).body, OURS), Ok(()));
        let said = |body: &[u8]| check_offer(body, OURS).unwrap_err().to_string();
        let larger = Layout { memory_bytes: 2 << 30, ..OURS };
        let expected = "memory.size is 2147483648 there and 1073741824 here; they have to be the same";
        assert_eq!(said(&offer(larger).body), expected);
        assert!(
            said(&offer(Layout { largest_chunk: 1, ..OURS }).body).starts_with("memory.largest_chunk is 1")
        );
        let mut other = offer(OURS).body;
        other[0] = 9;
        assert!(said(&other).starts_with("the hand-over has version 9 there and 1 here"));
        // What follows another version's number may be anything.
        assert!(said(&other[..2]).contains("version 9"));
        assert!(
            said(&offer(OURS).body[..12]).contains("memory.largest_chunk needs 8 bytes")
                || said(&offer(OURS).body[..12]).contains("needs 8 bytes")
        );
    }

    proptest! {
        #[test]
        fn arbitrary_bodies_never_panic(kind in 30u16..40, body in prop::collection::vec(any::<u8>(), 0..64)) {
            let _ = check_offer(&body, OURS);
            let _ = Message::decode(&Frame::new(kind, 0, body));
        }
    }
}
