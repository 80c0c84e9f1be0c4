//! What an operation says of the peer's memory, and how the peer says no. This file knows the bytes
//! of READ, WRITE, FAILED and REGIONS.
//!
//! ```text
//! READ and WRITE, little endian:
//!  0  sections  u32
//!  4  zero      u32
//!  8  sections, each 32 bytes and its runs:
//!     0  key         u64   of the region
//!     8  generation  u64   of the region
//!    16  lease       u64   under which the operation runs; 0: none
//!    24  runs        u32
//!    28  zero        u32
//!    32  runs, 24 bytes each
//! ```

use super::bad_frame::{BadFrame, OP_BYTES_MAX, SPANS_MAX};
use super::greeting::TEXT_BYTES_MAX;
use super::runs::{self, RUN_BYTES, Run};
use crate::bytes::{Reader, put_bytes};

/// Memory that a peer offers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct PeerRegion {
    /// The region's name at the peer.
    pub key: u64,
    /// Which registration under this name is meant. Another one is never served in its place.
    pub generation: u64,
    /// Length in bytes.
    pub len: u64,
}

const REGION_BYTES: usize = 24;

pub(super) fn put_regions(regions: &[PeerRegion], out: &mut Vec<u8>) {
    for region in regions {
        out.extend(region.key.to_le_bytes());
        out.extend(region.generation.to_le_bytes());
        out.extend(region.len.to_le_bytes());
    }
}

pub(super) fn parse_regions(body: &[u8]) -> Option<Vec<PeerRegion>> {
    let mut reader = Reader(body);
    let mut one = || Some(PeerRegion { key: reader.u64()?, generation: reader.u64()?, len: reader.u64()? });
    if body.len().is_multiple_of(REGION_BYTES) {
        (0..body.len() / REGION_BYTES).map(|_| one()).collect()
    } else {
        None
    }
}

/// Spans of one region.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Section {
    pub key: u64,
    pub generation: u64,
    pub lease: u64,
    pub runs: Vec<Run>,
}

/// The spans of an operation, in the order of its payload.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(super) struct Command {
    pub sections: Vec<Section>,
}

impl Command {
    pub fn put(&self, out: &mut Vec<u8>) {
        out.extend((self.sections.len() as u32).to_le_bytes());
        out.extend(0u32.to_le_bytes());
        for section in &self.sections {
            out.extend(section.key.to_le_bytes());
            out.extend(section.generation.to_le_bytes());
            out.extend(section.lease.to_le_bytes());
            out.extend((section.runs.len() as u32).to_le_bytes());
            out.extend(0u32.to_le_bytes());
            runs::encode(&section.runs, out);
        }
    }

    /// A command whose spans are in number and bytes what an operation may have. Reserves no more
    /// than the body takes.
    pub fn parse(body: &[u8]) -> Result<Command, BadFrame> {
        let mut reader = Reader(body);
        let cut = BadFrame::Body { what: "a list of spans that is cut" };
        let count = reader.u32().ok_or(cut)?;
        reader.u32().ok_or(cut)?;
        let mut command = Command::default();
        for _ in 0..count {
            command.sections.push(parse_section(&mut reader).ok_or(cut)??);
        }
        if !reader.0.is_empty() {
            return Err(BadFrame::Body { what: "bytes after the list of spans" });
        }
        match (command.spans(), command.bytes()) {
            (0, _) => Err(BadFrame::Body { what: "an operation without spans" }),
            (spans, _) if spans > u64::from(SPANS_MAX) => Err(BadFrame::TooManySpans { spans }),
            (_, bytes) if bytes > OP_BYTES_MAX => Err(BadFrame::TooManyBytes { bytes }),
            _ => Ok(command),
        }
    }

    /// All spans. Saturates, since it is asked of what a peer sent.
    pub fn spans(&self) -> u64 {
        self.runs().fold(0u64, |sum, run| sum.saturating_add(run.count.into()))
    }

    /// Bytes of all spans. Saturates as well.
    pub fn bytes(&self) -> u64 {
        self.runs().fold(0u64, |sum, run| sum.saturating_add(run.bytes()))
    }

    fn runs(&self) -> impl Iterator<Item = &Run> {
        self.sections.iter().flat_map(|section| &section.runs)
    }
}

/// `None`: cut.
fn parse_section(reader: &mut Reader<'_>) -> Option<Result<Section, BadFrame>> {
    let (key, generation, lease) = (reader.u64()?, reader.u64()?, reader.u64()?);
    let count = reader.u32()?;
    reader.u32()?;
    let bytes = reader.take((count as usize).checked_mul(RUN_BYTES)?)?;
    Some(runs::parse(bytes).map(|runs| Section { key, generation, lease, runs }).map_err(BadFrame::Runs))
}

/// Why the peer did not carry out an operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u16)]
pub enum FaultCode {
    /// No region has this key.
    UnknownRegion = 1,
    /// The region was registered anew, or withdrawn, since the requester heard of it.
    StaleGeneration = 2,
    /// A span does not lie in its region.
    OutOfBounds = 3,
    /// The region is not offered for this.
    NotAllowed = 4,
    /// The lease has ended, or there is none where one is needed.
    NoLease = 5,
    /// The bytes that arrived are not those that were sent.
    Corrupt = 6,
    /// The node is about to end and begins nothing new.
    Closing = 7,
    /// A code of a later version.
    Other = u16::MAX,
}

/// An operation that the peer did not carry out.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Fault {
    pub code: FaultCode,
    pub text: String,
}

impl Fault {
    pub fn put(&self, out: &mut Vec<u8>) {
        out.extend((self.code as u16).to_le_bytes());
        put_bytes(self.text.as_bytes(), TEXT_BYTES_MAX, out);
    }

    pub fn parse(body: &[u8]) -> Option<Fault> {
        let mut reader = Reader(body);
        let code = match reader.u16()? {
            1 => FaultCode::UnknownRegion,
            2 => FaultCode::StaleGeneration,
            3 => FaultCode::OutOfBounds,
            4 => FaultCode::NotAllowed,
            5 => FaultCode::NoLease,
            6 => FaultCode::Corrupt,
            7 => FaultCode::Closing,
            _ => FaultCode::Other,
        };
        let text = reader.text()?;
        reader.0.is_empty().then_some(Fault { code, text })
    }
}

impl std::fmt::Display for Fault {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "the peer said {:?}: {}", self.code, self.text)
    }
}
