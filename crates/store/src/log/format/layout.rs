//! The division of the file: where superblocks, journal, checkpoints and segments lie. This file
//! knows offsets and lengths.
//!
//! ```text
//! 0        superblock A      4 KiB
//! 64 KiB   superblock B      4 KiB
//! 128 KiB  journal
//!          checkpoint A
//!          checkpoint B
//!          segment 0, segment 1, ...
//! ```
//!
//! The superblocks lie apart so that one bad stretch of the medium does not take both.

use super::page::{Damaged, Fields, PAGE_BYTES, Parser, check};
use super::segment::{MAX_SLOTS, MIN_STRIDE_BYTES};
use std::ops::RangeInclusive;
use thiserror::Error;

/// Where the two superblocks lie.
pub const SUPERBLOCKS_AT: [u64; 2] = [0, 64 << 10];

pub const SEGMENT_BYTES: RangeInclusive<u64> = 64 << 10..=1 << 30;

/// Segments of a log. One is being filled, one is kept for chunks that are relocated, and something
/// must rest.
pub const SEGMENTS: RangeInclusive<u64> = 4..=1 << 20;

pub const JOURNAL_BYTES: RangeInclusive<u64> = 16 << 10..=1 << 30;

/// Bytes of the table of segments per segment, without its slots.
pub(crate) const SEGMENT_ENTRY_BYTES: u64 = 16;

const PAGE: u64 = PAGE_BYTES as u64;
const METADATA_FROM: u64 = 128 << 10;

/// A stretch of the file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Area {
    pub offset: u64,
    pub bytes: u64,
}

impl Area {
    fn end(&self) -> Option<u64> {
        self.offset.checked_add(self.bytes)
    }
}

/// How a file is divided.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Layout {
    pub file_bytes: u64,
    pub journal: Area,
    pub checkpoints: [Area; 2],
    /// Where segment 0 starts.
    pub segments_at: u64,
    pub segment_bytes: u64,
    pub segments: u32,
}

/// Why a file cannot be divided.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum LayoutError {
    #[error(
        "segment_bytes is {segment_bytes}, allowed are multiples of {PAGE} from {} to {}",
        SEGMENT_BYTES.start(), SEGMENT_BYTES.end()
    )]
    SegmentBytes { segment_bytes: u64 },
    #[error(
        "journal_bytes is {journal_bytes}, allowed are multiples of {PAGE} from {} to {}",
        JOURNAL_BYTES.start(), JOURNAL_BYTES.end()
    )]
    JournalBytes { journal_bytes: u64 },
    #[error(
        "a file of {file_bytes} bytes holds {segments} segments of {segment_bytes} bytes, allowed are {} to {}: \
         change the size of the file or of the segments",
        SEGMENTS.start(), SEGMENTS.end()
    )]
    Segments { file_bytes: u64, segment_bytes: u64, segments: u64 },
}

impl Layout {
    /// Divides a file of `file_bytes` into segments, with a journal of a thousandth of the file,
    /// but 64 KiB to 64 MiB.
    ///
    /// ```
    /// use forebay_store::log::Layout;
    ///
    /// let layout = Layout::new(100 << 30, 256 << 20)?;
    /// assert_eq!((layout.segments, layout.journal.bytes), (399, 64 << 20));
    /// # Ok::<(), forebay_store::log::LayoutError>(())
    /// ```
    pub fn new(file_bytes: u64, segment_bytes: u64) -> Result<Layout, LayoutError> {
        let journal_bytes = (file_bytes / 1000 / PAGE * PAGE).clamp(64 << 10, 64 << 20);
        Layout::with_journal(file_bytes, segment_bytes, journal_bytes)
    }

    /// Divides a file, with a journal of a given length.
    pub fn with_journal(
        file_bytes: u64,
        segment_bytes: u64,
        journal_bytes: u64,
    ) -> Result<Layout, LayoutError> {
        if !is_length(segment_bytes, &SEGMENT_BYTES) {
            return Err(LayoutError::SegmentBytes { segment_bytes });
        }
        if !is_length(journal_bytes, &JOURNAL_BYTES) {
            return Err(LayoutError::JournalBytes { journal_bytes });
        }
        let left = file_bytes.saturating_sub(METADATA_FROM + journal_bytes);
        // A segment takes at most so much with its share of the checkpoints, whose heads and
        // padding take four pages.
        let share = segment_bytes + 2 * segment_checkpoint_bytes(segment_bytes);
        let segments = left.saturating_sub(4 * PAGE) / share;
        if !SEGMENTS.contains(&segments) {
            return Err(LayoutError::Segments { file_bytes, segment_bytes, segments });
        }
        let bytes = checkpoint_bytes(segments, segment_bytes);
        let checkpoints_at = METADATA_FROM + journal_bytes;
        Ok(Layout {
            file_bytes,
            journal: Area { offset: METADATA_FROM, bytes: journal_bytes },
            checkpoints: [checkpoints_at, checkpoints_at + bytes].map(|offset| Area { offset, bytes }),
            segments_at: checkpoints_at + 2 * bytes,
            segment_bytes,
            segments: segments as u32,
        })
    }

    pub fn segment_at(&self, segment: u32) -> u64 {
        self.segments_at + u64::from(segment) * self.segment_bytes
    }

    pub fn journal_blocks(&self) -> u64 {
        self.journal.bytes / PAGE
    }

    pub(crate) fn encode(&self, fields: &mut Fields) {
        fields.u64(self.file_bytes);
        for area in [&self.journal, &self.checkpoints[0], &self.checkpoints[1]] {
            fields.u64(area.offset).u64(area.bytes);
        }
        fields.u64(self.segments_at).u64(self.segment_bytes).u32(self.segments);
    }

    pub(crate) fn parse(fields: &mut Parser<'_>) -> Result<Layout, Damaged> {
        let file_bytes = fields.u64()?;
        let mut area = || Ok(Area { offset: fields.u64()?, bytes: fields.u64()? });
        let (journal, checkpoints) = (area()?, [area()?, area()?]);
        let (segments_at, segment_bytes, segments) = (fields.u64()?, fields.u64()?, fields.u32()?);
        let layout = Layout { file_bytes, journal, checkpoints, segments_at, segment_bytes, segments };
        layout.check()?;
        Ok(layout)
    }

    /// Fails unless areas have lengths that they may have, follow one another and lie in the file.
    fn check(&self) -> Result<(), Damaged> {
        let (segment_bytes, segments) = (self.segment_bytes, u64::from(self.segments));
        let range = |range: &RangeInclusive<u64>| format!("{} to {}", range.start(), range.end());
        check(
            "segment_bytes",
            segment_bytes,
            is_length(segment_bytes, &SEGMENT_BYTES),
            range(&SEGMENT_BYTES),
        )?;
        check("segments", segments, SEGMENTS.contains(&segments), range(&SEGMENTS))?;
        let journal_bytes = self.journal.bytes;
        check(
            "journal_bytes",
            journal_bytes,
            is_length(journal_bytes, &JOURNAL_BYTES),
            range(&JOURNAL_BYTES),
        )?;
        let need = checkpoint_bytes(segments, segment_bytes);
        let mut end = METADATA_FROM;
        for area in [self.journal, self.checkpoints[0], self.checkpoints[1]] {
            check(
                "an area's offset",
                area.offset,
                area.offset >= end && is_aligned(area.offset),
                format!("{end} or more"),
            )?;
            end = area.end().filter(|end| is_aligned(*end)).unwrap_or(u64::MAX);
        }
        for area in self.checkpoints {
            check("checkpoint_bytes", area.bytes, area.bytes >= need, format!("{need} or more"))?;
        }
        let at = self.segments_at;
        check("segments_at", at, at >= end && is_aligned(at), format!("{end} or more"))?;
        let end = at.saturating_add(segments * segment_bytes);
        check("file_bytes", self.file_bytes, self.file_bytes >= end, format!("{end} or more"))
    }
}

fn is_aligned(offset: u64) -> bool {
    offset.is_multiple_of(PAGE)
}

fn is_length(bytes: u64, range: &RangeInclusive<u64>) -> bool {
    is_aligned(bytes) && range.contains(&bytes)
}

fn checkpoint_bytes(segments: u64, segment_bytes: u64) -> u64 {
    PAGE + (segments * segment_checkpoint_bytes(segment_bytes)).next_multiple_of(PAGE)
}

/// Bytes of a segment in a checkpoint if it has as many slots as it can have, one bit each.
fn segment_checkpoint_bytes(segment_bytes: u64) -> u64 {
    SEGMENT_ENTRY_BYTES + (segment_bytes / MIN_STRIDE_BYTES).min(MAX_SLOTS).div_ceil(8)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reparsed(layout: &Layout) -> Result<Layout, Damaged> {
        let mut fields = Fields::new();
        layout.encode(&mut fields);
        Layout::parse(&mut Parser::new(&fields.finish()))
    }

    #[test]
    fn areas_tile_the_file_up_to_a_remainder_smaller_than_a_segment() {
        for (file_bytes, segment_bytes) in
            [(1 << 20, 64 << 10), (100 << 30, 256 << 20), (3 << 40, 1 << 30), (77_777_777, 128 << 10)]
        {
            let layout = Layout::new(file_bytes, segment_bytes).unwrap();
            assert_eq!(reparsed(&layout), Ok(layout));
            let end = layout.segment_at(layout.segments);
            assert!(end <= file_bytes);
            assert!(
                file_bytes - end < segment_bytes + 2 * segment_checkpoint_bytes(segment_bytes) + 4 * PAGE
            );
        }
    }

    #[test]
    fn sizes_that_do_not_fit_are_refused_with_what_is_allowed() {
        let segments = Layout::new(300 << 10, 64 << 10).unwrap_err();
        assert!(matches!(segments, LayoutError::Segments { segments: 0..4, .. }), "{segments}");
        assert!(
            Layout::new(1 << 30, 65_537).unwrap_err().to_string().contains("allowed are multiples of 4096")
        );
        assert!(matches!(Layout::new(1 << 30, 2 << 30), Err(LayoutError::SegmentBytes { .. })));
        assert!(matches!(
            Layout::with_journal(1 << 30, 1 << 20, 4096),
            Err(LayoutError::JournalBytes { .. })
        ));
        assert!(matches!(Layout::new(u64::MAX, 64 << 10), Err(LayoutError::Segments { .. })));
        assert!(Layout::new(0, 64 << 10).is_err());
    }

    #[test]
    fn a_division_with_overlaps_or_beyond_the_file_is_refused() {
        let layout = Layout::new(1 << 20, 64 << 10).unwrap();
        let overlapping = Layout { segments_at: layout.checkpoints[1].offset, ..layout };
        let beyond = Layout { segments: layout.segments + 1, ..layout };
        let huge = Layout { journal: Area { offset: u64::MAX - 4095, bytes: 64 << 10 }, ..layout };
        for bad in [overlapping, beyond, huge] {
            assert!(matches!(reparsed(&bad), Err(Damaged::Field { .. })));
        }
    }
}
