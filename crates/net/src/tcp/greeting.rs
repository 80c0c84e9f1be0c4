//! What two ends tell each other before the first operation: who they are, what they speak, and why
//! not. This file knows the bytes of HELLO, WELCOME and REFUSED.

use crate::bytes::{Field, Reader, codes, fields, parse_text, put_bytes, put_text, random};

/// First bytes of every HELLO.
const MAGIC: [u8; 8] = *b"FOREBAY\0";
/// Bytes of a token at most.
pub const TOKEN_BYTES_MAX: u16 = 256;

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
        Ok(Identity { node, instance: random()? })
    }
}

fields!(Identity { node, instance });

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
        // Capabilities: none are defined yet.
        (MAGIC, self.versions, 0u32, self.from, self.to_instance).put(out);
        put_bytes(&self.token, TOKEN_BYTES_MAX, out);
    }

    pub fn parse(body: &[u8]) -> Option<Hello> {
        let mut reader = Reader(body);
        // Capabilities that this version does not know are no reason to refuse: only what both know
        // is used.
        let (magic, versions, _capabilities, from, to_instance): ([u8; 8], _, u32, _, _) = reader.get()?;
        let token = reader.bytes()?.to_vec();
        let sound = magic == MAGIC && token.len() <= TOKEN_BYTES_MAX.into();
        reader.whole(Hello { versions, from, to_instance, token }).filter(|_| sound)
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
        let Welcome { version, ops_max, spans_max, op_bytes_max, from } = *self;
        (version, ops_max, spans_max, op_bytes_max, 0u32, from).put(out);
    }

    pub fn parse(body: &[u8]) -> Option<Welcome> {
        let mut reader = Reader(body);
        let (version, ops_max, spans_max, op_bytes_max, _capabilities, from): (_, _, _, _, u32, _) =
            reader.get()?;
        let sound = ops_max > 0 && spans_max > 0 && op_bytes_max > 0;
        reader.whole(Welcome { version, ops_max, spans_max, op_bytes_max, from }).filter(|_| sound)
    }
}

codes! {
    /// Why a connection is refused.
    pub enum RefusalCode: u16 {
        /// What came is not this protocol.
        NotForebay = 1,
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
        Other = 0xffff,
    }
}

/// A refusal, with a text for people.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refusal {
    pub code: RefusalCode,
    /// The reason in words, with the values that did not fit.
    pub text: String,
}

impl Refusal {
    pub(super) fn put(&self, out: &mut Vec<u8>) {
        (self.code as u16).put(out);
        put_text(&self.text, out);
    }

    pub(super) fn parse(body: &[u8]) -> Option<Refusal> {
        let mut reader = Reader(body);
        let code = RefusalCode::of(reader.get()?).unwrap_or(RefusalCode::Other);
        parse_text(&mut reader).map(|text| Refusal { code, text })
    }
}

impl std::fmt::Display for Refusal {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:?}: {}", self.code, self.text)
    }
}
