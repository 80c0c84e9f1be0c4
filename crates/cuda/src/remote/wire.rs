//! What an engine and a node say to each other over their socket. Only attaching goes this way;
//! requests go through rings.
//!
//! One packet is one message, as JSON. The engine speaks, the node answers each message once.

use super::socket;
use serde::{Deserialize, Serialize};
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};

/// The version of the messages and of what is in the ring.
pub const VERSION: u32 = 2;

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Message {
    /// The engine's first.
    Hello {
        /// The engine's [`VERSION`].
        version: u32,
        token: String,
        gpu: Uuid,
    },
    /// Relays, one after another as the ring has their queues. The ring and its bell come along.
    Welcome {
        relays: Vec<Offer>,
    },
    /// Memory that requests will name by this number; its file comes along.
    Memory {
        memory: u64,
    },
    /// Memory that no request will name any more.
    Forget {
        memory: u64,
    },
    /// The message was taken in.
    Done,
    Refused {
        reason: String,
    },
    /// The engine goes, and nothing of it touches staging any more.
    Bye,
}

/// One relay: staging on a GPU, both directions side by side.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Offer {
    pub gpu: Uuid,
    /// What its memory is opened by.
    pub handle: Hex<64>,
    /// What its first bytes are, to be sure that the right memory was opened.
    pub nonce: Hex<16>,
    pub slot_bytes: u64,
    /// Slots in one direction.
    pub slots: u32,
}

impl Offer {
    pub fn staging_bytes(&self) -> Option<u64> {
        self.slot_bytes.checked_mul(u64::from(self.slots)).filter(|bytes| *bytes > 0)
    }
}

/// What names a GPU in every process.
pub type Uuid = Hex<16>;

/// Bytes that are written as hexadecimal digits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Hex<const N: usize>(pub [u8; N]);

impl<const N: usize> From<Hex<N>> for String {
    fn from(hex: Hex<N>) -> String {
        hex.0.iter().map(|byte| format!("{byte:02x}")).collect()
    }
}

impl<const N: usize> std::fmt::Display for Hex<N> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&String::from(*self))
    }
}

impl<const N: usize> TryFrom<String> for Hex<N> {
    type Error = String;

    fn try_from(text: String) -> Result<Hex<N>, String> {
        let wrong = || format!("{text:?} is not {} hexadecimal digits", 2 * N);
        let (pairs, rest) = text.as_bytes().as_chunks::<2>();
        if pairs.len() != N || !rest.is_empty() {
            return Err(wrong());
        }
        let mut bytes = [0; N];
        for (byte, pair) in bytes.iter_mut().zip(pairs) {
            let digit = |digit: u8| char::from(digit).to_digit(16);
            let (high, low) = digit(pair[0]).zip(digit(pair[1])).ok_or_else(wrong)?;
            *byte = (high << 4 | low) as u8;
        }
        Ok(Hex(bytes))
    }
}

pub fn send(socket: &OwnedFd, message: &Message, descriptors: &[BorrowedFd<'_>]) -> io::Result<()> {
    socket::send(socket, &serde_json::to_vec(message)?, descriptors)
}

/// Receives a message, and the descriptors that came along. The end of the other side is an error.
pub fn receive(socket: &OwnedFd) -> io::Result<(Message, Vec<OwnedFd>)> {
    let (packet, descriptors) = socket::receive(socket)?;
    Ok((serde_json::from_slice(&packet)?, descriptors))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use rustix::net::{AddressFamily, SendFlags, SocketFlags, SocketType, socketpair};
    use std::os::fd::AsFd;

    fn pair() -> (OwnedFd, OwnedFd) {
        socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap()
    }

    #[test]
    fn a_word_arrives_with_its_descriptors() {
        let (ours, theirs) = pair();
        let offer = Offer {
            gpu: Hex([1; 16]),
            handle: Hex([0xab; 64]),
            nonce: Hex([3; 16]),
            slot_bytes: 1 << 20,
            slots: 3,
        };
        let message = Message::Welcome { relays: vec![offer; 15] };
        let (one, other) = socket::bell().unwrap();
        send(&ours, &message, &[one.as_fd(), other.as_fd()]).unwrap();
        let (received, descriptors) = receive(&theirs).unwrap();
        assert_eq!((received, descriptors.len()), (message, 2));
        drop(ours);
        assert_eq!(receive(&theirs).unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
    }

    proptest! {
        #[test]
        fn whatever_is_sent_is_a_word_or_an_error(bytes in prop::collection::vec(any::<u8>(), 1..200)) {
            let (ours, theirs) = pair();
            rustix::net::send(&ours, &bytes, SendFlags::NOSIGNAL).unwrap();
            let _ = receive(&theirs);
        }
    }

    #[test]
    fn digits_that_are_none_are_refused() {
        assert!(Uuid::try_from("0".repeat(32)).is_ok());
        for text in ["0".repeat(31), "0".repeat(33), "g".repeat(32), "+1".repeat(16), "é".repeat(16)] {
            assert!(Uuid::try_from(text).is_err());
        }
    }

    #[test]
    fn the_last_word_of_who_left_without_hearing_is_heard() {
        let (here, there) = pair();
        let refused = Message::Refused { reason: "no".into() };
        send(&here, &Message::Bye, &[]).unwrap();
        send(&there, &refused, &[]).unwrap();
        drop(there);
        assert_eq!(receive(&here).unwrap().0, refused);
        assert!(receive(&here).is_err());
    }
}
