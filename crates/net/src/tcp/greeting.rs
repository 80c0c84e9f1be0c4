//! What two ends tell each other before the first operation: who they are, what they speak, and why
//! not. This file knows the bytes of HELLO, WELCOME and REFUSED.

use crate::bytes::{Reader, put_bytes};

/// First bytes of every HELLO.
const MAGIC: [u8; 8] = *b"FOREBAY\0";
/// Bytes of a token at most.
pub const TOKEN_BYTES_MAX: u16 = 256;
/// Bytes of a text for people at most.
pub(super) const TEXT_BYTES_MAX: u16 = 256;

/// Who an end of a flow is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Identity {
    /// The node, the same after every start.
    pub node: [u8; 16],
    /// This start of the node. What was said by another instance is void.
    pub instance: [u8; 16],
}

impl Identity {
    /// The node with an instance that never was before. Fails when the system has no random bytes.
    pub fn starting(node: [u8; 16]) -> std::io::Result<Identity> {
        let mut instance = [0; 16];
        let filled = rustix::rand::getrandom(&mut instance, rustix::rand::GetRandomFlags::empty())?;
        if filled < instance.len() {
            return Err(std::io::ErrorKind::UnexpectedEof.into());
        }
        Ok(Identity { node, instance })
    }

    fn put(&self, out: &mut Vec<u8>) {
        out.extend(self.node);
        out.extend(self.instance);
    }

    fn parse(reader: &mut Reader<'_>) -> Option<Identity> {
        Some(Identity { node: reader.array()?, instance: reader.array()? })
    }
}

/// The first frame of whoever connects.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Hello {
    /// Versions spoken, first and last.
    pub versions: (u16, u16),
    pub from: Identity,
    /// Whom the sender wants to speak to. Zeros: whoever answers.
    pub to_instance: [u8; 16],
    pub token: Vec<u8>,
}

impl Hello {
    pub fn put(&self, out: &mut Vec<u8>) {
        out.extend(MAGIC);
        out.extend(self.versions.0.to_le_bytes());
        out.extend(self.versions.1.to_le_bytes());
        // Capabilities: none are defined yet.
        out.extend(0u32.to_le_bytes());
        self.from.put(out);
        out.extend(self.to_instance);
        put_bytes(&self.token, TOKEN_BYTES_MAX, out);
    }

    pub fn parse(body: &[u8]) -> Option<Hello> {
        let mut reader = Reader(body);
        let magic = reader.array()?;
        let versions = (reader.u16()?, reader.u16()?);
        // Capabilities that this version does not know are no reason to refuse: only what both know
        // is used.
        let _capabilities = reader.u32()?;
        let from = Identity::parse(&mut reader)?;
        let to_instance = reader.array()?;
        let token = reader.bytes()?.to_vec();
        let whole = magic == MAGIC && token.len() <= TOKEN_BYTES_MAX.into() && reader.0.is_empty();
        whole.then_some(Hello { versions, from, to_instance, token })
    }
}

/// The answer to a HELLO that is let in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Welcome {
    /// What is spoken from now on.
    pub version: u16,
    /// Operations that may be under way.
    pub ops_max: u16,
    /// Spans of an operation at most.
    pub spans_max: u32,
    /// Bytes of an operation at most.
    pub op_bytes_max: u64,
    pub from: Identity,
}

impl Welcome {
    pub fn put(&self, out: &mut Vec<u8>) {
        out.extend(self.version.to_le_bytes());
        out.extend(self.ops_max.to_le_bytes());
        out.extend(self.spans_max.to_le_bytes());
        out.extend(self.op_bytes_max.to_le_bytes());
        out.extend(0u32.to_le_bytes());
        self.from.put(out);
    }

    pub fn parse(body: &[u8]) -> Option<Welcome> {
        let mut reader = Reader(body);
        let (version, ops_max) = (reader.u16()?, reader.u16()?);
        let (spans_max, op_bytes_max) = (reader.u32()?, reader.u64()?);
        let _capabilities = reader.u32()?;
        let from = Identity::parse(&mut reader)?;
        let whole = ops_max > 0 && spans_max > 0 && op_bytes_max > 0 && reader.0.is_empty();
        whole.then_some(Welcome { version, ops_max, spans_max, op_bytes_max, from })
    }
}

/// Why a connection is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u16)]
pub enum RefusalCode {
    /// What came is not this protocol.
    NotForebay = 1,
    /// No version is spoken by both.
    Version = 2,
    Token = 3,
    /// The instance that was asked for has ended.
    Instance = 4,
    /// The peer has as many flows as it may, or all peers together have.
    TooManyFlows = 5,
    /// The node is about to end.
    Closing = 6,
    /// The node speaks TLS only.
    NotEncrypted = 7,
    /// The TLS handshake failed, or the peer's certificate speaks for another node.
    Certificate = 8,
    /// The node speaks plain text only.
    Encrypted = 9,
    /// A code of a later version.
    Other = u16::MAX,
}

/// A refusal, with a text for people.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refusal {
    /// The reason.
    pub code: RefusalCode,
    /// The reason in words, with the values that did not fit.
    pub text: String,
}

impl Refusal {
    pub(super) fn put(&self, out: &mut Vec<u8>) {
        out.extend((self.code as u16).to_le_bytes());
        put_bytes(self.text.as_bytes(), TEXT_BYTES_MAX, out);
    }

    pub(super) fn parse(body: &[u8]) -> Option<Refusal> {
        let mut reader = Reader(body);
        let code = match reader.u16()? {
            1 => RefusalCode::NotForebay,
            2 => RefusalCode::Version,
            3 => RefusalCode::Token,
            4 => RefusalCode::Instance,
            5 => RefusalCode::TooManyFlows,
            6 => RefusalCode::Closing,
            7 => RefusalCode::NotEncrypted,
            8 => RefusalCode::Certificate,
            9 => RefusalCode::Encrypted,
            _ => RefusalCode::Other,
        };
        let text = reader.text()?;
        reader.0.is_empty().then_some(Refusal { code, text })
    }
}

impl std::fmt::Display for Refusal {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:?}: {}", self.code, self.text)
    }
}
