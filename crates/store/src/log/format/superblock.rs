//! The superblock: what the file is and how it is divided. Two copies are written in turn. This
//! file knows both copies and which of them counts.
//!
//! ```text
//! 32  epoch   u64   raised with every superblock that is written
//! 40  clean   u8    1: the log was closed, and its last checkpoint says everything
//! 48  layout  file_bytes u64; offset and length u64 each of journal, checkpoint A, checkpoint B;
//!             segments_at u64, segment_bytes u64, segments u32
//! ```

use super::layout::{Layout, SUPERBLOCKS_AT};
use super::page::{Damaged, FORMAT_VERSION, Fields, LogUuid, PAGE_BYTES, PageKind, Parser, check};
use thiserror::Error;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Superblock {
    pub log: LogUuid,
    /// The time between two superblocks. Journal blocks bear the epoch in which they were written.
    pub epoch: u64,
    /// Whether the log was closed in good order.
    pub clean: bool,
    pub layout: Layout,
}

/// Why a file is not opened. It was not changed.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum NotOpened {
    #[error("reading the log takes a thread of its own, and the system gives none: {error}")]
    NoThread { error: String },
    /// Nothing in it says that it is a log.
    #[error(
        "the file is not a Forebay log (no superblock at 0 or at 65536: {first}; {second}): give another file, or make \
         a log of this one with `forebay store init`, which destroys what it holds"
    )]
    NotALog { first: Damaged, second: Damaged },
    #[error(
        "the log has format version {found}, this program reads version {FORMAT_VERSION}: use the program that wrote it, \
         or make a new log with `forebay store init`"
    )]
    Version { found: u16 },
    #[error(
        "the file holds superblocks of two logs, {first:?} and {second:?}: restore it, or make a new log"
    )]
    TwoLogs { first: LogUuid, second: LogUuid },
    /// The log is not the one that was asked for.
    #[error("the file holds log {found:?}, expected is {expected:?}: give the right file")]
    OtherLog { found: LogUuid, expected: LogUuid },
    #[error(
        "the file has {have_bytes} bytes, the log {need_bytes}: it was cut, restore it or make a new log"
    )]
    Cut { have_bytes: u64, need_bytes: u64 },
    #[error(
        "neither checkpoint can be read ({first}; {second}): rebuild the log from its footers with `forebay store recover`"
    )]
    NoCheckpoint { first: Damaged, second: Damaged },
    #[error("the disk failed at offset {offset}: {error}")]
    Io { offset: u64, error: String },
}

impl Superblock {
    pub fn encode(&self) -> Vec<u8> {
        let mut fields = Fields::page(PageKind::Superblock, self.log);
        fields.u64(self.epoch).u8(self.clean.into()).pad_to(48);
        self.layout.encode(&mut fields);
        fields.finish_page()
    }

    pub fn parse(bytes: &[u8]) -> Result<Superblock, Damaged> {
        let (log, mut fields) = Parser::any_page(PageKind::Superblock, bytes)?;
        let (epoch, clean) = (fields.u64()?, fields.u8()?);
        check("clean", clean, clean <= 1, "0 or 1")?;
        fields.slice(7)?;
        let layout = Layout::parse(&mut fields)?;
        fields.end()?;
        Ok(Superblock { log, epoch, clean: clean == 1, layout })
    }

    /// Where it is written: the two places take turns.
    pub fn place(&self) -> u64 {
        SUPERBLOCKS_AT[(self.epoch % 2) as usize]
    }
}

/// The superblock that counts, and what the next one's epoch must be at least.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Current {
    /// The newer of the two.
    pub superblock: Superblock,
    /// Whether the other one can be read.
    pub both_sound: bool,
}

impl Current {
    /// Chooses between the pages at [`SUPERBLOCKS_AT`] of a file.
    pub fn choose(
        file_bytes: u64,
        pages: [&[u8]; 2],
        expected: Option<LogUuid>,
    ) -> Result<Current, NotOpened> {
        let current = match pages.map(Superblock::parse) {
            [Ok(first), Ok(second)] if first.log != second.log => {
                return Err(NotOpened::TwoLogs { first: first.log, second: second.log });
            }
            [Ok(first), Ok(second)] => {
                let superblock = if first.epoch > second.epoch { first } else { second };
                Current { superblock, both_sound: true }
            }
            [Ok(superblock), Err(error)] | [Err(error), Ok(superblock)] => {
                not_newer(&error)?;
                Current { superblock, both_sound: false }
            }
            [Err(first), Err(second)] => {
                not_newer(&first)?;
                not_newer(&second)?;
                return Err(NotOpened::NotALog { first, second });
            }
        };
        let Superblock { log: found, layout, .. } = current.superblock;
        if let Some(expected) = expected.filter(|expected| *expected != found) {
            return Err(NotOpened::OtherLog { found, expected });
        }
        if file_bytes < layout.file_bytes {
            return Err(NotOpened::Cut { have_bytes: file_bytes, need_bytes: layout.file_bytes });
        }
        Ok(current)
    }

    /// The newest epoch in which the journal may have been written: maybe that of a copy that
    /// cannot be read.
    pub fn newest_epoch(&self) -> u64 {
        self.superblock.epoch.saturating_add(u64::from(!self.both_sound))
    }

    /// The superblock to write next.
    ///
    /// An epoch is never used twice, since it tells journal blocks of one from those of another. A
    /// copy that cannot be read may have had the epoch after this one's. It is the copy that is
    /// replaced, never the one that can be read.
    pub fn next(&self, clean: bool) -> Superblock {
        let step = if self.both_sound { 1 } else { 3 };
        let epoch = self.superblock.epoch.saturating_add(step);
        Superblock { epoch, clean, ..self.superblock }
    }
}

/// A log of another version is not to be touched, even if only one superblock says so.
fn not_newer(error: &Damaged) -> Result<(), NotOpened> {
    match error {
        Damaged::Version { found } => Err(NotOpened::Version { found: *found }),
        _ => Ok(()),
    }
}

/// The pages of an empty log, as offset and bytes: what makes a file a log. `forebay store init`
/// writes them.
///
/// The checkpoints, the journal and the segments need no particular contents: nothing in them is of
/// this log. The pages returned last make the file a log; write and sync the others first.
pub fn empty_log(log: LogUuid, layout: Layout) -> Vec<(u64, Vec<u8>)> {
    let checkpoint = super::checkpoint::Checkpoint::empty(&layout);
    let mut pages: Vec<(u64, Vec<u8>)> = vec![
        (layout.checkpoints[0].offset, checkpoint.encode(log)),
        (layout.checkpoints[1].offset, vec![0; PAGE_BYTES]),
    ];
    pages.extend([0, 1].map(|epoch| {
        let superblock = Superblock { log, epoch, clean: true, layout };
        (superblock.place(), superblock.encode())
    }));
    pages
}

#[cfg(test)]
mod tests {
    use super::super::page::with_version;
    use super::*;

    const LOG: LogUuid = LogUuid([3; 16]);

    fn superblock(epoch: u64) -> Superblock {
        Superblock { log: LOG, epoch, clean: false, layout: Layout::new(1 << 20, 64 << 10).unwrap() }
    }

    fn choose(first: &[u8], second: &[u8]) -> Result<Current, NotOpened> {
        Current::choose(1 << 20, [first, second], Some(LOG))
    }

    #[test]
    fn the_newer_of_two_counts_and_the_next_one_replaces_the_older() {
        let (older, newer) = (superblock(6), superblock(7));
        let current = choose(&older.encode(), &newer.encode()).unwrap();
        assert_eq!(current.superblock, newer);
        assert_eq!((current.next(true).epoch, current.next(true).place()), (8, older.place()));
    }

    #[test]
    fn a_torn_superblock_leaves_the_other_and_its_epoch_is_not_used_again() {
        let mut torn = superblock(7).encode();
        torn[40..].fill(0);
        let current = choose(&superblock(6).encode(), &torn).unwrap();
        assert_eq!(current.superblock.epoch, 6);
        assert!(current.next(false).epoch > 7);
        assert_eq!(
            current.next(false).place(),
            superblock(7).place(),
            "the sound copy stays until this one is"
        );
    }

    #[test]
    fn files_that_are_no_log_are_refused_with_what_to_do() {
        let zeros = [0; PAGE_BYTES];
        let refused = choose(&zeros, b"#!/bin/sh").unwrap_err();
        assert!(refused.to_string().contains("forebay store init"), "{refused}");
        let other = Superblock { log: LogUuid([9; 16]), ..superblock(7) };
        assert!(matches!(choose(&superblock(6).encode(), &other.encode()), Err(NotOpened::TwoLogs { .. })));
        assert!(matches!(choose(&other.encode(), &zeros), Err(NotOpened::OtherLog { .. })));
    }

    #[test]
    fn another_version_is_refused_even_beside_a_sound_copy() {
        let newer = with_version(superblock(7).encode(), 2);
        assert_eq!(choose(&superblock(6).encode(), &newer), Err(NotOpened::Version { found: 2 }));
        assert_eq!(choose(&newer, &newer), Err(NotOpened::Version { found: 2 }));
    }

    #[test]
    fn a_file_that_was_cut_is_refused() {
        let page = superblock(1).encode();
        let cut = Current::choose((1 << 20) - 1, [&page, &page], None).unwrap_err();
        assert!(matches!(cut, NotOpened::Cut { .. }));
        assert!(Current::choose(2 << 20, [&page, &page], None).is_ok(), "a longer file is no harm");
    }
}
