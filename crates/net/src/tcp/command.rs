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

use super::error::{BadFrame, OP_BYTES_MAX, SPANS_MAX};
use super::runs::{self, RUN_BYTES, Run};
use crate::bytes::{Field, Reader, codes, fields, parse_text, put_text};

/// Memory that a peer offers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct PeerRegion {
    /// The region's name at the peer.
    pub key: u64,
    /// Which registration under this name is meant. Another one is never served in its place.
    pub generation: u64,
    pub len: u64,
}

fields!(PeerRegion { key, generation, len });

const REGION_BYTES: usize = 24;

pub(super) fn parse_regions(body: &[u8]) -> Option<Vec<PeerRegion>> {
    let mut reader = Reader(body);
    let regions = (0..body.len() / REGION_BYTES).map(|_| reader.get()).collect::<Option<_>>()?;
    reader.whole(regions)
}

/// Spans of one region.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Section {
    pub key: u64,
    pub generation: u64,
    pub lease: u64,
    pub runs: Vec<Run>,
}

/// The spans of an operation, in the order of its payload.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Command {
    pub sections: Vec<Section>,
}

impl Command {
    pub fn put(&self, out: &mut Vec<u8>) {
        (self.sections.len() as u32, 0u32).put(out);
        for Section { key, generation, lease, runs } in &self.sections {
            (*key, *generation, *lease, runs.len() as u32, 0u32).put(out);
            runs.iter().for_each(|run| run.put(out));
        }
    }

    /// A command whose spans are in number and bytes what an operation may have. Reserves no more
    /// than the body takes.
    pub fn parse(body: &[u8]) -> Result<Command, BadFrame> {
        let mut reader = Reader(body);
        let cut = BadFrame::Body { what: "a list of spans that is cut" };
        let (count, _): (u32, u32) = reader.get().ok_or(cut)?;
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
    let (key, generation, lease, count, _): (u64, u64, u64, u32, u32) = reader.get()?;
    let bytes = reader.take((count as usize).checked_mul(RUN_BYTES)?)?;
    Some(runs::parse(bytes).map(|runs| Section { key, generation, lease, runs }).map_err(BadFrame::Runs))
}

codes! {
    /// Why the peer did not carry out an operation.
    pub enum FaultCode: u16 {
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
        /// The owner could not copy the bytes between its GPU and what it sends and receives.
        Copy = 8,
        /// A code of a later version.
        Other = 0xffff,
    }
}

/// An operation that the peer did not carry out.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Fault {
    pub code: FaultCode,
    pub text: String,
}

impl Fault {
    pub fn new(code: FaultCode, text: impl Into<String>) -> Fault {
        Fault { code, text: text.into() }
    }

    pub fn withdrawn() -> Fault {
        Fault::new(FaultCode::StaleGeneration, "the region was withdrawn meanwhile")
    }

    pub fn put(&self, out: &mut Vec<u8>) {
        (self.code as u16).put(out);
        put_text(&self.text, out);
    }

    pub fn parse(body: &[u8]) -> Option<Fault> {
        let mut reader = Reader(body);
        let code = FaultCode::of(reader.get()?).unwrap_or(FaultCode::Other);
        parse_text(&mut reader).map(|text| Fault { code, text })
    }
}

impl std::fmt::Display for Fault {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "the peer said {:?}: {}", self.code, self.text)
    }
}
