//! ZMTP 3, the protocol of ZeroMQ, as far as a subscriber to KV events needs it: one connection
//! that we make, without security, with messages of a bounded length. It knows bytes; what messages
//! mean is others' business.
//!
//! The crate `zeromq` is not used here because it allocates whatever length a peer names.

use bytes::{Buf, Bytes, BytesMut};
use rustix::net::sockopt;
use std::io;
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

/// A message may have so many bytes, and so many frames.
pub const MESSAGE_BYTES_MAX: usize = 16 << 20;
const FRAMES_MAX: usize = 16;

/// A peer that is silent is asked by TCP after so long, so often, and so many times: one whose host
/// is gone is noticed in 20 s.
const KEEPALIVE: Duration = Duration::from_secs(5);
const KEEPALIVE_PROBES: u32 = 3;

const READ_BYTES: usize = 64 << 10;
const GREETING_BYTES: usize = 64;
const MECHANISM: &[u8] = b"NULL";

const MORE: u8 = 1;
const LONG: u8 = 2;
const COMMAND: u8 = 4;

/// What this end of a connection is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SocketType {
    /// Gets what is published.
    Sub,
    /// Asks and is answered.
    Dealer,
}

impl SocketType {
    fn name(self) -> &'static [u8] {
        match self {
            SocketType::Sub => b"SUB",
            SocketType::Dealer => b"DEALER",
        }
    }
}

#[derive(Debug, thiserror::Error)]
pub enum ZmtpError {
    #[error(transparent)]
    Io(#[from] io::Error),
    #[error("the other end does not speak ZMTP 3")]
    NotZmtp,
    #[error("the other end wants another security mechanism than NULL")]
    Mechanism,
    #[error("a message has more than the {MESSAGE_BYTES_MAX} bytes or {FRAMES_MAX} frames that are allowed")]
    TooLong,
}

/// A message is its frames.
pub type Message = Vec<Bytes>;

#[derive(Debug)]
pub struct Connection {
    stream: TcpStream,
    decoder: Decoder,
}

/// A subscriber never sends: without this it would wait for ever at a host that is gone.
fn keep_alive(stream: &TcpStream) -> io::Result<()> {
    sockopt::set_socket_keepalive(stream, true)?;
    sockopt::set_tcp_keepidle(stream, KEEPALIVE)?;
    sockopt::set_tcp_keepintvl(stream, KEEPALIVE)?;
    sockopt::set_tcp_keepcnt(stream, KEEPALIVE_PROBES)?;
    Ok(())
}

impl Connection {
    /// Connects to `HOST:PORT` and greets whoever is there. May take for ever.
    pub async fn open(authority: &str, socket_type: SocketType) -> Result<Connection, ZmtpError> {
        let mut stream = TcpStream::connect(authority).await?;
        stream.set_nodelay(true)?;
        keep_alive(&stream)?;
        stream.write_all(&greeting()).await?;
        let mut theirs = [0; GREETING_BYTES];
        stream.read_exact(&mut theirs).await?;
        check_greeting(&theirs)?;
        let mut connection = Connection { stream, decoder: Decoder::default() };
        connection.stream.write_all(&ready(socket_type)).await?;
        match connection.next().await? {
            Incoming::Command(command) if command.starts_with(b"\x05READY") => {}
            _ => return Err(ZmtpError::NotZmtp),
        }
        if socket_type == SocketType::Sub {
            // To everything.
            connection.send(&[b"\x01"]).await?;
        }
        Ok(connection)
    }

    pub async fn send(&mut self, frames: &[&[u8]]) -> Result<(), ZmtpError> {
        let mut bytes = Vec::new();
        for (number, frame) in frames.iter().enumerate() {
            let more = if number + 1 < frames.len() { MORE } else { 0 };
            put_frame(&mut bytes, more, frame);
        }
        Ok(self.stream.write_all(&bytes).await?)
    }

    /// The next message. Dropping the future loses nothing.
    pub async fn receive(&mut self) -> Result<Message, ZmtpError> {
        loop {
            if let Incoming::Message(message) = self.next().await? {
                return Ok(message);
            }
        }
    }

    async fn next(&mut self) -> Result<Incoming, ZmtpError> {
        loop {
            if let Some(incoming) = self.decoder.next()? {
                return Ok(incoming);
            }
            self.decoder.buffer.reserve(READ_BYTES);
            if self.stream.read_buf(&mut self.decoder.buffer).await? == 0 {
                return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into());
            }
        }
    }
}

fn greeting() -> [u8; GREETING_BYTES] {
    let mut greeting = [0; GREETING_BYTES];
    (greeting[0], greeting[9], greeting[10]) = (0xFF, 0x7F, 3);
    greeting[12..12 + MECHANISM.len()].copy_from_slice(MECHANISM);
    greeting
}

fn check_greeting(theirs: &[u8; GREETING_BYTES]) -> Result<(), ZmtpError> {
    if theirs[0] != 0xFF || theirs[9] & 1 != 1 || theirs[10] < 3 {
        return Err(ZmtpError::NotZmtp);
    }
    let mechanism = &theirs[12..32];
    let known = mechanism.strip_prefix(MECHANISM).is_some_and(|rest| rest.iter().all(|&byte| byte == 0));
    known.then_some(()).ok_or(ZmtpError::Mechanism)
}

fn ready(socket_type: SocketType) -> Vec<u8> {
    let mut command = b"\x05READY\x0BSocket-Type".to_vec();
    command.extend((socket_type.name().len() as u32).to_be_bytes());
    command.extend(socket_type.name());
    let mut bytes = Vec::new();
    put_frame(&mut bytes, COMMAND, &command);
    bytes
}

fn put_frame(bytes: &mut Vec<u8>, flags: u8, frame: &[u8]) {
    match u8::try_from(frame.len()) {
        Ok(length) => bytes.extend([flags, length]),
        Err(_) => {
            bytes.push(flags | LONG);
            bytes.extend((frame.len() as u64).to_be_bytes());
        }
    }
    bytes.extend(frame);
}

#[derive(Debug, PartialEq, Eq)]
enum Incoming {
    Command(Bytes),
    Message(Message),
}

/// Bytes in, messages out.
#[derive(Debug, Default)]
struct Decoder {
    buffer: BytesMut,
    /// Of a message whose last frame has not come.
    frames: Message,
    /// Bytes of those.
    bytes: usize,
}

impl Decoder {
    fn next(&mut self) -> Result<Option<Incoming>, ZmtpError> {
        while let Some((flags, header, length)) = self.header()? {
            if self.buffer.len() < header + length {
                return Ok(None);
            }
            self.buffer.advance(header);
            let frame = self.buffer.split_to(length).freeze();
            if flags & COMMAND != 0 {
                return Ok(Some(Incoming::Command(frame)));
            }
            self.frames.push(frame);
            self.bytes += length;
            if flags & MORE == 0 {
                self.bytes = 0;
                return Ok(Some(Incoming::Message(std::mem::take(&mut self.frames))));
            }
        }
        Ok(None)
    }

    /// The next frame's flags, the length of its header and its own.
    fn header(&self) -> Result<Option<(u8, usize, usize)>, ZmtpError> {
        let mut rest = &self.buffer[..];
        let (flags, length) = match rest.first() {
            Some(flags) if flags & LONG != 0 && rest.len() >= 9 => (rest.get_u8(), rest.get_u64()),
            Some(flags) if flags & LONG == 0 && rest.len() >= 2 => (rest.get_u8(), rest.get_u8().into()),
            _ => return Ok(None),
        };
        let room = MESSAGE_BYTES_MAX - self.bytes;
        if length > room as u64 || self.frames.len() == FRAMES_MAX {
            return Err(ZmtpError::TooLong);
        }
        Ok(Some((flags, self.buffer.len() - rest.len(), length as usize)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn encoded(message: &[Vec<u8>]) -> Vec<u8> {
        let mut bytes = Vec::new();
        for (number, frame) in message.iter().enumerate() {
            put_frame(&mut bytes, u8::from(number + 1 < message.len()), frame);
        }
        bytes
    }

    /// Messages of bytes that come in pieces of this size.
    fn decode(bytes: &[u8], piece: usize) -> (Vec<Incoming>, Option<ZmtpError>) {
        let (mut decoder, mut decoded) = (Decoder::default(), Vec::new());
        for bytes in bytes.chunks(piece) {
            decoder.buffer.extend_from_slice(bytes);
            loop {
                match decoder.next() {
                    Ok(Some(incoming)) => decoded.push(incoming),
                    Ok(None) => break,
                    Err(error) => return (decoded, Some(error)),
                }
            }
        }
        (decoded, None)
    }

    #[test]
    fn a_length_that_is_too_great_is_refused_before_anything_is_allocated_for_it() {
        for (claimed, frames) in
            [(u64::MAX, 0), (1 << 62, 0), (MESSAGE_BYTES_MAX as u64 + 1, 0), (0, FRAMES_MAX)]
        {
            let mut bytes = encoded(&vec![Vec::new(); frames + 1]);
            bytes.truncate(2 * frames);
            bytes.iter_mut().step_by(2).for_each(|flags| *flags |= MORE);
            bytes.push(LONG);
            bytes.extend(claimed.to_be_bytes());
            assert!(matches!(decode(&bytes, 3), (none, Some(ZmtpError::TooLong)) if none.is_empty()));
        }
    }

    #[test]
    fn who_does_not_speak_zmtp_3_without_security_is_refused() {
        assert!(check_greeting(&greeting()).is_ok());
        let with = |at: usize, byte: u8| {
            let mut theirs = greeting();
            theirs[at] = byte;
            check_greeting(&theirs).unwrap_err().to_string()
        };
        for (at, byte) in [(0, b'H'), (9, 0), (10, 2)] {
            assert!(with(at, byte).contains("ZMTP 3"));
        }
        assert!(with(12, b'C').contains("security"));
    }

    proptest! {
        #[test]
        fn messages_are_what_they_were_however_they_are_cut(
            messages in prop::collection::vec(
                prop::collection::vec(prop::collection::vec(any::<u8>(), 0..400), 1..5), 0..6),
            piece in 1..700_usize,
        ) {
            let bytes: Vec<u8> = messages.iter().flat_map(|message| encoded(message)).collect();
            let (decoded, error) = decode(&bytes, piece);
            prop_assert!(error.is_none());
            let sent = messages.into_iter().map(|message| {
                Incoming::Message(message.into_iter().map(Bytes::from).collect())
            });
            prop_assert_eq!(decoded, sent.collect::<Vec<_>>());
        }

        #[test]
        fn foreign_bytes_are_decoded_or_refused_and_nothing_else(
            bytes in prop::collection::vec(any::<u8>(), 0..600),
            piece in 1..100_usize,
        ) {
            decode(&bytes, piece);
        }
    }
}
