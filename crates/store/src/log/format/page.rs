//! Pages of metadata: 4 KiB that say what they are, of which log, in which version, with a CRC over
//! all of it. This file knows the head that all of them share and how fields follow one another.
//!
//! ```text
//!  0  magic    8 bytes  says which structure this is
//!  8  crc      u32      CRC-32C of bytes 12..4096
//! 12  version  u16      of the format
//! 14  zero     u16
//! 16  log      16 bytes which log the page belongs to
//! 32  fields, then zeros
//! ```
//!
//! The head is the same in every version of the format, so that a newer page is told from a damaged
//! one.

use crate::checksum::of_pieces;
use std::fmt;
use thiserror::Error;

/// Bytes of a page, the unit in which everything on the disk is aligned.
pub const PAGE_BYTES: usize = 4096;

/// The version of the format that this code reads and writes.
pub const FORMAT_VERSION: u16 = 1;

const CRC_FROM: usize = 12;

/// Names a log. Drawn at random when the file is made, so that pages of another log are never taken
/// for this one's.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct LogUuid(pub [u8; 16]);

impl fmt::Debug for LogUuid {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(out, "{byte:02x}"))
    }
}

/// The structures that are pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PageKind {
    /// What the file is and how it is divided.
    Superblock,
    /// A block of the journal.
    Journal,
    /// The head of a checkpoint.
    Checkpoint,
    /// The start of a segment: the shape of its chunks.
    Segment,
    /// Who is in which slot of a segment.
    Summary,
    /// The end of a chunk: its identity and the checksums of its layers.
    Footer,
}

impl PageKind {
    const fn magic(self) -> &'static [u8; 8] {
        match self {
            PageKind::Superblock => b"FBLOGSUP",
            PageKind::Journal => b"FBLOGJRN",
            PageKind::Checkpoint => b"FBLOGCHK",
            PageKind::Segment => b"FBLOGSEG",
            PageKind::Summary => b"FBLOGSUM",
            PageKind::Footer => b"FBLOGFTR",
        }
    }
}

/// Why bytes from the disk are not what they should be.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum Damaged {
    #[error("{have} bytes where at least {need} are needed")]
    Short { need: usize, have: usize },
    #[error("not a {0:?} page")]
    Magic(PageKind),
    #[error("format version {found}; this program reads version {FORMAT_VERSION}")]
    Version { found: u16 },
    #[error("the CRC-32C does not match")]
    Crc,
    #[error("the page belongs to log {found:?}")]
    OtherLog { found: LogUuid },
    /// A field has a value that it cannot have.
    #[error("{field} is {value}, allowed is {allowed}")]
    Field { field: &'static str, value: u64, allowed: String },
}

/// Fails unless a field holds what it may hold.
pub(crate) fn check(
    field: &'static str,
    value: impl Into<u64>,
    is_allowed: bool,
    allowed: impl fmt::Display,
) -> Result<(), Damaged> {
    match is_allowed {
        true => Ok(()),
        false => Err(Damaged::Field { field, value: value.into(), allowed: allowed.to_string() }),
    }
}

/// The same page as a program with another version of the format would have written it.
#[cfg(test)]
pub(crate) fn with_version(page: Vec<u8>, version: u16) -> Vec<u8> {
    with_bytes(page, CRC_FROM, &version.to_le_bytes())
}

/// The same page with other bytes at a place, and a CRC that matches them.
#[cfg(test)]
pub(crate) fn with_bytes(mut page: Vec<u8>, at: usize, bytes: &[u8]) -> Vec<u8> {
    page[at..at + bytes.len()].copy_from_slice(bytes);
    let crc = of_pieces(&[&page[CRC_FROM..]]);
    page[8..CRC_FROM].copy_from_slice(&crc.to_le_bytes());
    page
}

/// Appends fields, little-endian and without padding.
#[derive(Debug)]
pub(crate) struct Fields {
    bytes: Vec<u8>,
}

impl Fields {
    pub fn new() -> Fields {
        Fields { bytes: Vec::new() }
    }

    /// The head of a page, its CRC not yet known.
    pub fn page(kind: PageKind, log: LogUuid) -> Fields {
        let mut fields = Fields { bytes: Vec::with_capacity(PAGE_BYTES) };
        fields.bytes(kind.magic()).u32(0).u16(FORMAT_VERSION).u16(0).bytes(&log.0);
        fields
    }

    pub fn u8(&mut self, value: u8) -> &mut Fields {
        self.bytes(&[value])
    }

    pub fn u16(&mut self, value: u16) -> &mut Fields {
        self.bytes(&value.to_le_bytes())
    }

    pub fn u32(&mut self, value: u32) -> &mut Fields {
        self.bytes(&value.to_le_bytes())
    }

    pub fn u64(&mut self, value: u64) -> &mut Fields {
        self.bytes(&value.to_le_bytes())
    }

    pub fn bytes(&mut self, value: &[u8]) -> &mut Fields {
        self.bytes.extend_from_slice(value);
        self
    }

    pub fn pad_to(&mut self, len: usize) -> &mut Fields {
        debug_assert!(self.bytes.len() <= len, "fields fit their place");
        self.bytes.resize(len, 0);
        self
    }

    pub fn finish(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.bytes)
    }

    /// The page, padded and with its CRC.
    pub fn finish_page(&mut self) -> Vec<u8> {
        let mut page = self.pad_to(PAGE_BYTES).finish();
        let crc = of_pieces(&[&page[CRC_FROM..]]);
        page[8..CRC_FROM].copy_from_slice(&crc.to_le_bytes());
        page
    }
}

/// Takes fields off bytes, in the order in which they were appended.
#[derive(Debug, Clone)]
pub(crate) struct Parser<'a> {
    rest: &'a [u8],
}

impl<'a> Parser<'a> {
    pub fn new(bytes: &'a [u8]) -> Parser<'a> {
        Parser { rest: bytes }
    }

    /// The fields of a page, whatever log it belongs to.
    pub fn any_page(kind: PageKind, bytes: &'a [u8]) -> Result<(LogUuid, Parser<'a>), Damaged> {
        let short = Damaged::Short { need: PAGE_BYTES, have: bytes.len() };
        let page = bytes.get(..PAGE_BYTES).ok_or(short)?;
        let mut fields = Parser::new(page);
        if fields.bytes::<8>()? != *kind.magic() {
            return Err(Damaged::Magic(kind));
        }
        let crc = fields.u32()?;
        if crc != of_pieces(&[&page[CRC_FROM..]]) {
            return Err(Damaged::Crc);
        }
        let found = fields.u16()?;
        if found != FORMAT_VERSION {
            return Err(Damaged::Version { found });
        }
        fields.u16()?;
        Ok((LogUuid(fields.bytes()?), fields))
    }

    /// The fields of a page of this log.
    pub fn page(kind: PageKind, log: LogUuid, bytes: &'a [u8]) -> Result<Parser<'a>, Damaged> {
        let (found, fields) = Parser::any_page(kind, bytes)?;
        if found == log { Ok(fields) } else { Err(Damaged::OtherLog { found }) }
    }

    pub fn u8(&mut self) -> Result<u8, Damaged> {
        Ok(u8::from_le_bytes(self.bytes()?))
    }

    pub fn u16(&mut self) -> Result<u16, Damaged> {
        Ok(u16::from_le_bytes(self.bytes()?))
    }

    pub fn u32(&mut self) -> Result<u32, Damaged> {
        Ok(u32::from_le_bytes(self.bytes()?))
    }

    pub fn u64(&mut self) -> Result<u64, Damaged> {
        Ok(u64::from_le_bytes(self.bytes()?))
    }

    pub fn bytes<const N: usize>(&mut self) -> Result<[u8; N], Damaged> {
        let short = Damaged::Short { need: N, have: self.rest.len() };
        let (bytes, rest) = self.rest.split_first_chunk().ok_or(short)?;
        self.rest = rest;
        Ok(*bytes)
    }

    pub fn slice(&mut self, len: usize) -> Result<&'a [u8], Damaged> {
        let short = Damaged::Short { need: len, have: self.rest.len() };
        let (bytes, rest) = self.rest.split_at_checked(len).ok_or(short)?;
        self.rest = rest;
        Ok(bytes)
    }

    /// Fails unless all that is left is zero.
    pub fn end(&self) -> Result<(), Damaged> {
        let first = self.rest.iter().copied().find(|byte| *byte != 0);
        check("padding", first.unwrap_or(0), first.is_none(), "0")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOG: LogUuid = LogUuid([9; 16]);

    fn page() -> Vec<u8> {
        Fields::page(PageKind::Footer, LOG).u64(7).bytes(&[1, 2]).finish_page()
    }

    #[test]
    fn fields_come_back_in_order() {
        let page = page();
        let mut fields = Parser::page(PageKind::Footer, LOG, &page).unwrap();
        assert_eq!((fields.u64(), fields.bytes()), (Ok(7), Ok([1, 2])));
        assert_eq!(fields.end(), Ok(()));
        assert!(matches!(fields.slice(PAGE_BYTES), Err(Damaged::Short { .. })));
    }

    #[test]
    fn every_flipped_bit_of_a_page_is_noticed() {
        let page = page();
        for bit in 0..PAGE_BYTES * 8 {
            let mut bad = page.clone();
            bad[bit / 8] ^= 1 << (bit % 8);
            assert!(Parser::page(PageKind::Footer, LOG, &bad).is_err(), "bit {bit}");
        }
    }

    #[test]
    fn a_page_that_is_something_else_is_refused_with_the_reason() {
        let page = page();
        let other = LogUuid([8; 16]);
        assert_eq!(
            Parser::page(PageKind::Summary, LOG, &page).unwrap_err(),
            Damaged::Magic(PageKind::Summary)
        );
        assert_eq!(
            Parser::page(PageKind::Footer, other, &page).unwrap_err(),
            Damaged::OtherLog { found: LOG }
        );
        let short = Parser::page(PageKind::Footer, LOG, &page[..100]).unwrap_err();
        assert_eq!(short, Damaged::Short { need: PAGE_BYTES, have: 100 });
    }

    #[test]
    fn a_page_of_another_version_is_told_from_a_damaged_one() {
        let newer = with_version(page(), 2);
        assert_eq!(Parser::page(PageKind::Footer, LOG, &newer).unwrap_err(), Damaged::Version { found: 2 });
    }
}
