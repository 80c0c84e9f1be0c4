//! Making a checkpoint from nothing, for a log that lost both of its own: whatever segment headers
//! and footers prove is there. This file finds and writes; it must never touch a log that can be
//! opened.
//!
//! What a checkpoint alone knew is lost with it: chunks that were evicted or deleted, and whose
//! bytes are still whole, come back, unless the journal remembers their end. So may chunks of a
//! tenant that was being purged: purge it again.

use super::format::{
    Checkpoint, JournalPosition, NotOpened, PAGE_BYTES, Record, SegmentRow, SegmentState, SlotSet, Superblock,
};
use super::medium::Medium;
use super::recovery::{Reader, read, read_metadata, read_superblock};
use crate::tenant::TenantId;
use std::collections::{BTreeMap, HashSet};
use std::io;
use thiserror::Error;

/// What a log was rebuilt from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Rebuilt {
    /// Segments with a readable header.
    pub segments: u32,
    /// Slots with a readable footer. Their layers are checked when they are read.
    pub chunks: u64,
    /// Journal blocks that could be read.
    pub blocks: u64,
}

#[derive(Debug, Error)]
pub enum NotRebuilt {
    #[error("the log has a checkpoint that can be read: open it; nothing is to be rebuilt")]
    NotNeeded,
    /// It is not the checkpoints that are missing, or the disk does not give what a new one is made
    /// of.
    #[error(transparent)]
    NotOpened(#[from] NotOpened),
    #[error("the disk failed: {0}")]
    Io(#[from] io::Error),
}

/// Writes a checkpoint that says what headers, footers and the rest of the journal prove, and a
/// superblock.
pub fn rebuild(medium: &dyn Medium) -> Result<Rebuilt, NotRebuilt> {
    match read_metadata(medium) {
        Ok(_) => return Err(NotRebuilt::NotNeeded),
        Err(NotOpened::NoCheckpoint { .. }) => {}
        Err(error) => return Err(error.into()),
    }
    let superblock = read_superblock(medium)?.next(false);
    let ends = JournalEnds::read(medium, &superblock)?;
    let mut rebuilt = Rebuilt { blocks: ends.blocks, ..Rebuilt::default() };
    let reader = Reader { medium, superblock };
    let segments = (0..superblock.layout.segments)
        .map(|number| segment_row(&reader, &ends, number, &mut rebuilt))
        .collect::<Result<_, NotOpened>>()?;
    let checkpoint = Checkpoint {
        serial: 1,
        epoch: superblock.epoch,
        journal: ends.next_block,
        next_sequence: (superblock.epoch << 32) + 1,
        doomed: ends.doomed,
        segments,
    };
    let area = superblock.layout.checkpoints[checkpoint.area()];
    medium.write_at(area.offset, &checkpoint.encode(superblock.log))?;
    medium.sync()?;
    medium.write_at(superblock.place(), &superblock.encode())?;
    medium.sync()?;
    Ok(rebuilt)
}

/// What the journal says is over.
#[derive(Debug, Default)]
struct JournalEnds {
    /// Segment, generation and slot of chunks that are gone.
    forgotten: HashSet<(u32, u64, u16)>,
    /// Segments and generations.
    freed: HashSet<(u32, u64)>,
    withdrawn: HashSet<u32>,
    doomed: Vec<TenantId>,
    blocks: u64,
    next_block: u64,
}

impl JournalEnds {
    /// Reads all blocks that are there, in the order of their numbers.
    fn read(medium: &dyn Medium, superblock: &Superblock) -> Result<JournalEnds, NotOpened> {
        let Superblock { log, epoch, layout, .. } = superblock;
        let mut blocks = BTreeMap::new();
        for index in 0..layout.journal_blocks() {
            let place = layout.journal.offset + index * PAGE_BYTES as u64;
            let page = read(medium, place, PAGE_BYTES)?;
            let mut sequence = [0; 8];
            sequence.copy_from_slice(&page[40..48]);
            let at = JournalPosition { sequence: u64::from_le_bytes(sequence), epoch: 0 };
            if let Ok((records, next)) = at.parse(*log, *epoch, &page)
                && at.place(layout) == place
            {
                blocks.insert(next.sequence, records);
            }
        }
        let mut ends = JournalEnds { blocks: blocks.len() as u64, ..JournalEnds::default() };
        ends.next_block = blocks.last_key_value().map_or(0, |(next, _)| *next);
        blocks.into_values().flatten().for_each(|record| ends.apply(&record));
        Ok(ends)
    }

    fn apply(&mut self, record: &Record) {
        match *record {
            Record::Forgotten { at, sequence, .. } => {
                self.forgotten.insert((at.segment, sequence, at.slot));
            }
            Record::Freed { segment, sequence } => {
                self.freed.insert((segment, sequence));
            }
            Record::Withdrawn { segment } => {
                self.withdrawn.insert(segment);
            }
            Record::Restored { segment } => {
                self.withdrawn.remove(&segment);
            }
            Record::TenantDoomed { tenant } if !self.doomed.contains(&tenant) => self.doomed.push(tenant),
            Record::TenantGone { tenant } => self.doomed.retain(|doomed| *doomed != tenant),
            Record::TenantDoomed { .. }
            | Record::Opened { .. }
            | Record::Stored { .. }
            | Record::Sealed { .. } => {}
        }
    }
}

/// A segment as its own pages describe it.
fn segment_row(
    reader: &Reader,
    ends: &JournalEnds,
    number: u32,
    rebuilt: &mut Rebuilt,
) -> Result<SegmentRow, NotOpened> {
    let unused = SegmentRow { clean: false, ..SegmentRow::unused() };
    if ends.withdrawn.contains(&number) {
        return Ok(SegmentRow { state: SegmentState::Withdrawn, ..unused });
    }
    let Some(header) = reader.header(number)? else { return Ok(unused) };
    let (sequence, count) = (header.sequence, header.slots.count);
    if ends.freed.contains(&(number, sequence)) {
        return Ok(SegmentRow { sequence, ..unused });
    }
    rebuilt.segments += 1;
    let mut live = SlotSet::new(count);
    for slot in (0..count).filter(|slot| !ends.forgotten.contains(&(number, sequence, *slot))) {
        if reader.footer(&header, slot)?.is_some() {
            live.set(slot, true);
            rebuilt.chunks += 1;
        }
    }
    let state = SegmentState::Sealed;
    Ok(SegmentRow { state, clean: false, slots: count, frontier: count, summarised: 0, sequence, live })
}
