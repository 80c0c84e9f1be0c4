//! Giving up pages that can never be read, so that the rest of the log can be used again. This file
//! knows which pages may be overwritten with zeros: those are then damaged as a torn write damages,
//! which recovery handles. It must never overwrite a page that could be read, nor anything while no
//! superblock says what the pages are for.
//!
//! A disk that is gone for a moment fails everywhere. So a page is given up only if it fails again
//! and again while a superblock can be read in between.

use super::format::{Area, CheckpointHead, Layout, NotOpened, PAGE_BYTES, SUPERBLOCKS_AT, Superblock};
use super::inspect::{Inspection, inspect};
use super::medium::Medium;
use super::rebuild::{NotRebuilt, Rebuilt, rebuild};
use super::recovery::{read, read_superblock};
use std::fmt;
use std::ops::Range;
use thiserror::Error;

const PAGE: u64 = PAGE_BYTES as u64;

/// Times that a page which failed must fail again before it is given up.
const TRIES: usize = 3;

/// Failures of the disk after which the search for the next one ends. So many are no bad sector but
/// a bad disk.
const ROUNDS: usize = 64;

/// What a page was for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PageUse {
    Superblock,
    /// A part of checkpoint A or B: 0 or 1.
    Checkpoint(usize),
    Journal,
    SegmentHeader(u32),
    /// The footer of a chunk in a segment.
    Footer(u32),
    Unknown,
}

/// A page that holds zeros now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GivenUp {
    pub offset: u64,
    pub was: PageUse,
}

/// A log that can be opened again.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Reopened {
    pub inspection: Inspection,
    /// What its checkpoint was rebuilt from, if neither was left.
    pub rebuilt: Option<Rebuilt>,
}

/// Why a log still cannot be opened. Pages that were given up before stay so.
#[derive(Debug, Error)]
pub enum NotReopened {
    /// No superblock is sound, and not all can be read.
    #[error(
        "{0}, and no other superblock is sound: without one nobody knows what pages are for, and none is given up; replace \
         the disk, or start cold with `forebay store init --force`"
    )]
    NoSuperblock(NotOpened),
    /// It is not the disk that keeps it closed.
    #[error(transparent)]
    NotOpened(#[from] NotOpened),
    /// It has no checkpoint, and none could be made.
    #[error(transparent)]
    NotRebuilt(NotRebuilt),
    /// The disk does not take zeros in place of the page.
    #[error(
        "the page at offset {offset} cannot be read and cannot be overwritten ({error}): replace the disk"
    )]
    NotWritten { offset: u64, error: String },
    /// The disk took zeros in place of the page, and does not give them back.
    #[error(
        "the page at offset {offset} cannot be read even after it was overwritten ({error}): replace the disk"
    )]
    StaysUnreadable { offset: u64, error: String },
    #[error(
        "the disk failed {ROUNDS} times, the last time at offset {offset}: replace it, or run the command again to give up \
         more"
    )]
    TooMany { offset: u64 },
}

/// Overwrites with zeros what keeps a log closed because it cannot be read, tells `each` page once
/// it is done, and rebuilds the checkpoint if neither is left. A log that can be opened stays as it
/// is, but for a superblock that cannot be read while the other one can.
pub fn give_up_unreadable(
    medium: &dyn Medium,
    mut each: impl FnMut(GivenUp),
) -> Result<Reopened, NotReopened> {
    let superblock = any_superblock(medium)?;
    // Opening needs only one, but it writes the other one and must be able to read it again.
    for place in SUPERBLOCKS_AT {
        give_up(medium, &superblock.layout, place..place + PAGE, &mut each)?;
    }
    let (mut rebuilt, mut failed_at) = (None, 0);
    for _ in 0..ROUNDS {
        match look(medium, &mut rebuilt) {
            Err(NotReopened::NotOpened(NotOpened::Io { offset, .. })) => {
                failed_at = offset;
                let stretch = was_being_read(medium, &superblock, offset);
                give_up(medium, &superblock.layout, stretch, &mut each)?;
            }
            ended => return ended.map(|inspection| Reopened { inspection, rebuilt }),
        }
    }
    Err(NotReopened::TooMany { offset: failed_at })
}

/// Reads what opening would read, with a new checkpoint if there is none.
fn look(medium: &dyn Medium, rebuilt: &mut Option<Rebuilt>) -> Result<Inspection, NotReopened> {
    match inspect(medium, |_| ()) {
        Err(NotOpened::NoCheckpoint { .. }) => {
            *rebuilt = Some(rebuild(medium)?);
            Ok(inspect(medium, |_| ())?)
        }
        ended => Ok(ended?),
    }
}

/// The superblock that counts. That none can be read may be for a moment only.
fn any_superblock(medium: &dyn Medium) -> Result<Superblock, NotReopened> {
    let mut found = read_superblock(medium);
    for _ in 0..TRIES {
        if matches!(found, Err(NotOpened::Io { .. })) {
            found = read_superblock(medium);
        }
    }
    match found {
        Ok(current) => Ok(current.superblock),
        Err(error @ NotOpened::Io { .. }) => Err(NotReopened::NoSuperblock(error)),
        Err(error) => Err(error.into()),
    }
}

/// What a read that failed at `offset` was to give: a page, or the whole body of a checkpoint.
fn was_being_read(medium: &dyn Medium, superblock: &Superblock, offset: u64) -> Range<u64> {
    let Superblock { log, layout, .. } = superblock;
    let body_bytes = |area: &Area| {
        let head = read(medium, area.offset, PAGE_BYTES).ok()?;
        Some(CheckpointHead::parse(*log, layout, &head).ok()?.body_bytes().next_multiple_of(PAGE))
    };
    let area = layout.checkpoints.iter().find(|area| area.offset + PAGE == offset);
    offset..offset + area.and_then(body_bytes).unwrap_or(PAGE)
}

/// Gives up those pages of a stretch that cannot be read.
fn give_up(
    medium: &dyn Medium,
    layout: &Layout,
    stretch: Range<u64>,
    each: &mut impl FnMut(GivenUp),
) -> Result<(), NotReopened> {
    for offset in stretch.step_by(PAGE_BYTES) {
        if keeps_failing(medium, offset)? {
            overwrite(medium, offset)?;
            each(GivenUp { offset, was: PageUse::of(layout, offset) });
        }
    }
    Ok(())
}

fn keeps_failing(medium: &dyn Medium, offset: u64) -> Result<bool, NotReopened> {
    let fails = || read(medium, offset, PAGE_BYTES).is_err();
    if !fails() {
        return Ok(false);
    }
    for _ in 0..TRIES {
        any_superblock(medium)?;
        if !fails() {
            return Ok(false);
        }
    }
    Ok(true)
}

fn overwrite(medium: &dyn Medium, offset: u64) -> Result<(), NotReopened> {
    let zeros = vec![0; PAGE_BYTES];
    let written = medium.write_at(offset, &zeros).and_then(|()| medium.sync());
    written.map_err(|error| NotReopened::NotWritten { offset, error: error.to_string() })?;
    let mut page = vec![0; PAGE_BYTES];
    let stays = |error: String| NotReopened::StaysUnreadable { offset, error };
    medium.read_at(offset, &mut page).map_err(|error| stays(error.to_string()))?;
    match page == zeros {
        true => Ok(()),
        false => Err(stays("it gives back other bytes than were written".to_owned())),
    }
}

impl PageUse {
    fn of(layout: &Layout, offset: u64) -> PageUse {
        let is_in = |area: &Area| (area.offset..area.offset + area.bytes).contains(&offset);
        if SUPERBLOCKS_AT.contains(&offset) {
            return PageUse::Superblock;
        }
        if is_in(&layout.journal) {
            return PageUse::Journal;
        }
        match layout.checkpoints.iter().position(is_in) {
            Some(checkpoint) => PageUse::Checkpoint(checkpoint),
            None => PageUse::in_segments(layout, offset),
        }
    }

    fn in_segments(layout: &Layout, offset: u64) -> PageUse {
        let number = offset.checked_sub(layout.segments_at).map(|inside| inside / layout.segment_bytes);
        match number.and_then(|number| u32::try_from(number).ok()).filter(|number| *number < layout.segments)
        {
            None => PageUse::Unknown,
            Some(number) if layout.segment_at(number) == offset => PageUse::SegmentHeader(number),
            // Nothing else in a segment keeps a log closed.
            Some(number) => PageUse::Footer(number),
        }
    }

    /// What is lost with it.
    pub fn loss(&self) -> &'static str {
        match self {
            PageUse::Superblock => "nothing is lost, the other one counts",
            PageUse::Checkpoint(_) => "the other one counts, or a new one is made of the segments",
            PageUse::Journal => {
                "what changed after it is lost, and a purge does not overwrite segments that were opened since"
            }
            PageUse::SegmentHeader(_) => "the segment's chunks are lost",
            PageUse::Footer(_) => "its chunk is lost",
            PageUse::Unknown => "nothing is lost",
        }
    }

    /// Whether with it is forgotten that chunks were deleted.
    pub fn knew_deletions(&self) -> bool {
        matches!(self, PageUse::Checkpoint(_) | PageUse::Journal)
    }
}

impl fmt::Display for PageUse {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            PageUse::Superblock => write!(out, "a superblock"),
            PageUse::Checkpoint(0) => write!(out, "checkpoint A"),
            PageUse::Checkpoint(_) => write!(out, "checkpoint B"),
            PageUse::Journal => write!(out, "the journal"),
            PageUse::SegmentHeader(number) => write!(out, "the header of segment {number}"),
            PageUse::Footer(number) => write!(out, "a chunk's footer in segment {number}"),
            PageUse::Unknown => write!(out, "nothing that is known"),
        }
    }
}

impl From<NotRebuilt> for NotReopened {
    fn from(error: NotRebuilt) -> NotReopened {
        match error {
            // What is needed for rebuilding can be given up too.
            NotRebuilt::NotOpened(error) => NotReopened::NotOpened(error),
            other => NotReopened::NotRebuilt(other),
        }
    }
}
