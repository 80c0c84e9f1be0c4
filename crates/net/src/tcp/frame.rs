//! Frames: what travels on a flow. This file knows the bytes of headers, which bodies they go with,
//! and the limits of both. `docs/reference/wire.md` shows the same in diagrams.
//!
//! ```text
//! header, 24 bytes, little endian:
//!  0  kind       u8
//!  1  flags      u8    0
//!  2  version    u16   of the protocol
//!  4  body       u32   bytes that follow, the CRC-32C at their end included; 0: no body
//!  8  operation  u64   which one, or which call; 0 outside of both
//! 16  payload    u32   bytes that follow the body, then their CRC-32C; only of DATA
//! 20  crc        u32   CRC-32C of bytes 0..20
//! ```

use super::command::{Command, Fault, PeerRegion, parse_regions};
use super::error::{BadFrame, VERSION};
use super::greeting::{Hello, Refusal, Welcome};
use crate::bytes::{Field, Reader, codes, parse_text, put_text};
use crc_fast::{CrcAlgorithm, Digest};

pub(super) const HEADER_BYTES: usize = 24;
pub(super) const CRC_BYTES: usize = 4;
/// Operations under way on a flow at most.
pub const OPS_MAX: u16 = 32;
/// Regions that a peer is told of at most when it connects.
pub const REGIONS_MAX: usize = 16_384;
/// Payload of one DATA at most. Little enough to stay in the cache between the CRC and the copy
/// into the socket.
pub const DATA_BYTES_MAX: u32 = 512 << 10;
/// Bytes of a call, and of a reply, at most.
pub const CALL_BYTES_MAX: u32 = 1 << 20;
/// Calls of a flow at most that the peer has not answered.
pub const CALLS_MAX: u16 = 64;
/// Bytes of a body with a list at most: one section for each span.
const LIST_BYTES_MAX: u32 = 1 << 20;
/// Bytes of any other body at most.
const SMALL_BYTES_MAX: u32 = 1 << 10;

codes! {
    /// Kinds of frames, as numbered on the wire.
    pub(super) enum Kind: u8 {
        Hello = 1,
        Welcome = 2,
        Refused = 3,
        Regions = 4,
        Read = 5,
        Write = 6,
        Data = 7,
        Done = 8,
        Failed = 9,
        Cancel = 10,
        Cancelled = 11,
        Ping = 12,
        Pong = 13,
        Call = 14,
        Reply = 15,
        Declined = 16,
    }
}

impl Kind {
    /// Bytes of a body at most, the CRC at its end included. 0: frames of the kind have none.
    fn body_bytes_max(self) -> u32 {
        match self {
            Kind::Regions | Kind::Read | Kind::Write => LIST_BYTES_MAX,
            Kind::Call | Kind::Reply => CALL_BYTES_MAX + CRC_BYTES as u32,
            Kind::Hello | Kind::Welcome | Kind::Refused | Kind::Failed | Kind::Declined => SMALL_BYTES_MAX,
            Kind::Data | Kind::Done | Kind::Cancel | Kind::Cancelled | Kind::Ping | Kind::Pong => 0,
        }
    }

    fn payload_bytes_max(self) -> u32 {
        if self == Kind::Data { DATA_BYTES_MAX } else { 0 }
    }
}

/// A frame without its payload.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Frame {
    Hello(Hello),
    Welcome(Welcome),
    Refused(Refusal),
    Regions(Vec<PeerRegion>),
    Read(Command),
    Write(Command),
    /// As many bytes follow.
    Data(u32),
    Done,
    Failed(Fault),
    Cancel,
    Cancelled,
    Ping,
    Pong,
    Call(Vec<u8>),
    Reply(Vec<u8>),
    /// Instead of a REPLY, with the reason.
    Declined(String),
}

/// A CRC-32C to be fed.
pub(super) fn crc32c() -> Digest {
    Digest::new(CrcAlgorithm::Crc32Iscsi)
}

/// The CRC-32C of `bytes`.
pub(super) fn crc32c_of(bytes: &[u8]) -> u32 {
    crc_fast::checksum(CrcAlgorithm::Crc32Iscsi, bytes) as u32
}

/// A checked header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Header {
    pub kind: Kind,
    pub body: u32,
    pub operation: u64,
    pub payload: u32,
}

impl Header {
    fn put(&self, out: &mut Vec<u8>) {
        let start = out.len();
        (self.kind as u8, 0u8, VERSION, self.body, self.operation, self.payload).put(out);
        crc32c_of(&out[start..]).put(out);
    }

    pub fn parse(bytes: &[u8; HEADER_BYTES]) -> Result<Header, BadFrame> {
        let mut reader = Reader(bytes);
        let (kind, flags, version, body, operation, payload): (u8, u8, u16, _, _, _) =
            reader.get().ok_or(stranger(bytes))?;
        if reader.get() != Some(crc32c_of(&bytes[..HEADER_BYTES - CRC_BYTES])) {
            return Err(stranger(bytes));
        }
        if version != VERSION {
            return Err(BadFrame::Version { version });
        }
        let known = Kind::of(kind).filter(|_| flags == 0);
        let header = Header { kind: known.ok_or(BadFrame::Kind { kind, flags })?, body, operation, payload };
        if header.lengths_fit() { Ok(header) } else { Err(BadFrame::TooLong { kind, body, payload }) }
    }

    /// Whether there are bytes where frames of the kind have some, and no more than they may have.
    fn lengths_fit(&self) -> bool {
        let (body_max, payload_max) = (self.kind.body_bytes_max(), self.kind.payload_bytes_max());
        let fits = |bytes: u32, max: u32| (bytes > 0) == (max > 0) && bytes <= max;
        fits(self.body, body_max) && fits(self.payload, payload_max)
    }
}

/// Whoever sends something else from the first byte on is named, if known.
fn stranger(bytes: &[u8; HEADER_BYTES]) -> BadFrame {
    const STARTS: [&[u8]; 9] =
        [b"GET ", b"POST ", b"PUT ", b"HEAD ", b"OPTIONS ", b"DELETE ", b"CONNECT ", b"PRI * HTTP", b"HTTP/"];
    match bytes {
        [0x16, 0x03, ..] => BadFrame::Tls,
        _ if STARTS.iter().any(|start| bytes.starts_with(start)) => BadFrame::Http,
        [a, b, c, d, ..] => BadFrame::Header { start: [*a, *b, *c, *d] },
    }
}

impl Frame {
    /// Appends the frame. A DATA's payload and CRC follow from elsewhere.
    pub fn put(&self, operation: u64, out: &mut Vec<u8>) {
        let mut body = Vec::new();
        let kind = match self {
            Frame::Hello(hello) => (hello.put(&mut body), Kind::Hello).1,
            Frame::Welcome(welcome) => (welcome.put(&mut body), Kind::Welcome).1,
            Frame::Refused(refusal) => (refusal.put(&mut body), Kind::Refused).1,
            Frame::Regions(regions) => {
                (regions.iter().for_each(|region| region.put(&mut body)), Kind::Regions).1
            }
            Frame::Read(command) => (command.put(&mut body), Kind::Read).1,
            Frame::Write(command) => (command.put(&mut body), Kind::Write).1,
            Frame::Failed(fault) => (fault.put(&mut body), Kind::Failed).1,
            Frame::Data(_) => Kind::Data,
            Frame::Done => Kind::Done,
            Frame::Cancel => Kind::Cancel,
            Frame::Cancelled => Kind::Cancelled,
            Frame::Ping => Kind::Ping,
            Frame::Pong => Kind::Pong,
            Frame::Call(call) => (body.extend(call), Kind::Call).1,
            Frame::Reply(reply) => (body.extend(reply), Kind::Reply).1,
            Frame::Declined(why) => (put_text(why, &mut body), Kind::Declined).1,
        };
        let payload = if let Frame::Data(bytes) = self { *bytes } else { 0 };
        let has_body = kind.body_bytes_max() > 0;
        let body_bytes = if has_body { (body.len() + CRC_BYTES) as u32 } else { 0 };
        Header { kind, body: body_bytes, operation, payload }.put(out);
        if has_body {
            out.extend(&body);
            crc32c_of(&body).put(out);
        }
    }

    /// The frame that a header and its whole body make.
    pub fn parse(header: &Header, body: &[u8]) -> Result<Frame, BadFrame> {
        let body = match body.split_last_chunk::<CRC_BYTES>() {
            Some((body, crc)) if crc32c_of(body) == u32::from_le_bytes(*crc) => body,
            None if header.body == 0 => body,
            _ => return Err(BadFrame::BodyCrc { bytes: header.body }),
        };
        let bad = |what| BadFrame::Body { what };
        Ok(match header.kind {
            Kind::Hello => Frame::Hello(Hello::parse(body).ok_or(bad("a HELLO that is none"))?),
            Kind::Welcome => Frame::Welcome(Welcome::parse(body).ok_or(bad("a WELCOME that is none"))?),
            Kind::Refused => Frame::Refused(Refusal::parse(body).ok_or(bad("a refusal that is none"))?),
            Kind::Regions => Frame::Regions(parse_regions(body).ok_or(bad("regions that are none"))?),
            Kind::Read => Frame::Read(Command::parse(body)?),
            Kind::Write => Frame::Write(Command::parse(body)?),
            Kind::Failed => Frame::Failed(Fault::parse(body).ok_or(bad("a fault that is none"))?),
            Kind::Data => Frame::Data(header.payload),
            Kind::Done => Frame::Done,
            Kind::Cancel => Frame::Cancel,
            Kind::Cancelled => Frame::Cancelled,
            Kind::Ping => Frame::Ping,
            Kind::Pong => Frame::Pong,
            Kind::Call => Frame::Call(body.to_vec()),
            Kind::Reply => Frame::Reply(body.to_vec()),
            Kind::Declined => {
                Frame::Declined(parse_text(&mut Reader(body)).ok_or(bad("a reason that is none"))?)
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::super::command::{FaultCode, Section};
    use super::super::error::SPANS_MAX;
    use super::super::greeting::{Identity, RefusalCode};
    use super::super::runs::runs;
    use super::*;
    use proptest::prelude::*;

    fn read_back(bytes: &[u8]) -> Result<(u64, Frame), BadFrame> {
        let header = Header::parse(bytes.first_chunk().unwrap())?;
        let body = &bytes[HEADER_BYTES..];
        assert_eq!(body.len(), header.body as usize);
        Frame::parse(&header, body).map(|frame| (header.operation, frame))
    }

    fn identity() -> impl Strategy<Value = Identity> {
        any::<([u8; 16], [u8; 16])>().prop_map(|(node, instance)| Identity { node, instance })
    }

    fn command() -> impl Strategy<Value = Command> {
        let spans = prop::collection::vec((0u64..1 << 40, 1u64..4096), 1..40);
        let section = (any::<[u64; 3]>(), spans).prop_map(|([key, generation, lease], spans)| Section {
            key,
            generation,
            lease,
            runs: runs(spans),
        });
        prop::collection::vec(section, 1..4).prop_map(|sections| Command { sections })
    }

    fn frame() -> impl Strategy<Value = Frame> {
        let region = any::<[u64; 3]>().prop_map(|[key, generation, len]| PeerRegion { key, generation, len });
        let token = prop::collection::vec(any::<u8>(), 0..256);
        prop_oneof![
            (any::<(u16, u16)>(), identity(), any::<[u8; 16]>(), token).prop_map(
                |(versions, from, to_instance, token)| Frame::Hello(Hello {
                    versions,
                    from,
                    to_instance,
                    token
                })
            ),
            (identity(), 1u16.., 1u32.., 1u64..).prop_map(|(from, ops_max, spans_max, op_bytes_max)| {
                Frame::Welcome(Welcome { version: VERSION, ops_max, spans_max, op_bytes_max, from })
            }),
            "[a-z ]{0,80}".prop_map(|text| Frame::Refused(Refusal { code: RefusalCode::Token, text })),
            "[a-z ]{0,80}".prop_map(|text| Frame::Failed(Fault { code: FaultCode::NoLease, text })),
            prop::collection::vec(region, 0..20).prop_map(Frame::Regions),
            command().prop_map(Frame::Read),
            command().prop_map(Frame::Write),
            (1..=DATA_BYTES_MAX).prop_map(Frame::Data),
            Just(Frame::Done),
            Just(Frame::Cancel),
            Just(Frame::Cancelled),
            Just(Frame::Ping),
            Just(Frame::Pong),
            prop::collection::vec(any::<u8>(), 0..2000).prop_map(Frame::Call),
            prop::collection::vec(any::<u8>(), 0..2000).prop_map(Frame::Reply),
            "[a-z ]{0,80}".prop_map(Frame::Declined),
        ]
    }

    proptest! {
        #[test]
        fn frames_survive_the_wire(frame in frame(), operation in any::<u64>()) {
            let mut bytes = Vec::new();
            frame.put(operation, &mut bytes);
            prop_assert_eq!(read_back(&bytes), Ok((operation, frame)));
        }

        #[test]
        fn a_flipped_bit_is_no_frame(frame in frame(), at in any::<prop::sample::Index>(), bit in 0u8..8) {
            let mut bytes = Vec::new();
            frame.put(7, &mut bytes);
            let at = at.index(bytes.len());
            bytes[at] ^= 1 << bit;
            prop_assert!(read_back(&bytes).is_err());
        }

        /// Hostile bytes come with correct CRCs.
        #[test]
        fn any_body_is_parsed_or_refused(kind in 1u8..=16, body in prop::collection::vec(any::<u8>(), 1..300)) {
            let header = Header { kind: Kind::of(kind).unwrap(), body: 1, operation: 1, payload: 0 };
            let mut whole = body.clone();
            whole.extend(crc32c_of(&body).to_le_bytes());
            let _ = Frame::parse(&header, &whole);
        }

        #[test]
        fn any_header_is_parsed_or_refused(mut bytes in any::<[u8; HEADER_BYTES]>(), honest in any::<bool>()) {
            if honest {
                bytes[2..4].copy_from_slice(&VERSION.to_le_bytes());
                let crc = crc32c_of(&bytes[..20]);
                bytes[20..].copy_from_slice(&crc.to_le_bytes());
            }
            if let Ok(header) = Header::parse(&bytes) {
                prop_assert!(header.body <= CALL_BYTES_MAX + CRC_BYTES as u32 && header.payload <= DATA_BYTES_MAX);
            }
        }
    }

    #[test]
    fn other_protocols_are_named() {
        let named = |bytes: &[u8]| Header::parse(bytes.first_chunk().unwrap()).unwrap_err();
        assert_eq!(named(b"GET / HTTP/1.1\r\nHost: example"), BadFrame::Http);
        assert_eq!(named(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"), BadFrame::Http);
        assert_eq!(named(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03aaaaaaaaaaaaaaa"), BadFrame::Tls);
        assert!(matches!(named(&[0; HEADER_BYTES]), BadFrame::Header { .. }));
    }

    #[test]
    fn an_operation_has_no_more_spans_and_bytes_than_one_may() {
        let parse = |runs: Vec<Run>| {
            let mut body = Vec::new();
            Command { sections: vec![Section { key: 1, generation: 1, lease: 0, runs }] }.put(&mut body);
            Command::parse(&body)
        };
        use super::super::runs::Run;
        let run = |len, count| Run { offset: 0, len, count, stride: 0 };
        assert!(parse(vec![run(4096, SPANS_MAX)]).is_ok());
        assert!(matches!(parse(vec![run(1, SPANS_MAX), run(1, 1)]), Err(BadFrame::TooManySpans { .. })));
        assert!(matches!(parse(vec![run(1, u32::MAX); 9]), Err(BadFrame::TooManySpans { .. })));
        assert!(matches!(parse(vec![run(u32::MAX, 9)]), Err(BadFrame::TooManyBytes { .. })));
        assert!(matches!(parse(vec![]), Err(BadFrame::Body { .. })));
    }
}
