//! Commits: what makes the changes of a volume durable, in which order. This file turns changes
//! into pages, and writes them to the volume in that order.
//!
//! The order, and why it is enough:
//!
//! 1. *sync*: chunks whose records are in this commit, and their footers, are durable.
//! 2. *head*: headers of segments that were opened, and summaries of those that were sealed.
//! 3. *journal*: the records.
//! 4. *sync*: head and journal are durable. Only now is a segment that was freed given to new
//!    chunks, so bytes that a durable record speaks of are never overwritten.
//! 5. *tail*: a checkpoint, now and then, so that journal blocks may be used again; the last
//!    superblock when the log is closed. Then a *sync* again. Until then the blocks that it covers
//!    are not overwritten.
//!
//! A crash in between loses the records of this commit and nothing else. A record may be durable
//! without the header of its segment only if the crash came before step 4, and then the segment's
//! chunks are lost, never mistaken.

use super::format::{
    Checkpoint, Current, ENTRIES_PER_PAGE, JournalPosition, RECORDS_PER_BLOCK, Record, SegmentHeader,
    SegmentRow, SlotSet, SummaryEntry, SummaryPage,
};
use super::medium::Medium;
use super::segments::{LogSlot, Segment, State};
use super::tier::DiskTier;
use crate::entry::Row;
use crate::tenant::TenantId;
use std::io;

/// Pages to be written at offsets.
pub type Pages = Vec<(u64, Vec<u8>)>;

/// Everything that makes pending changes durable: [write](Commit::write_to) it, then
/// [end](DiskTier::end_commit) it.
#[derive(Debug)]
#[must_use = "the volume has no other commit until this one is ended"]
pub struct Commit {
    pub volume: usize,
    pub head: Pages,
    pub journal: Pages,
    pub tail: Pages,
    records: Vec<Record>,
    headers: Vec<SegmentHeader>,
    summarised: Vec<usize>,
    freed: Vec<usize>,
    next_block: JournalPosition,
    checkpoint: bool,
    closes: bool,
}

impl Commit {
    /// Writes all of it, in the order that the top of this file says.
    pub fn write_to(&self, medium: &dyn Medium) -> io::Result<()> {
        let write =
            |pages: &Pages| pages.iter().try_for_each(|(offset, page)| medium.write_at(*offset, page));
        medium.sync()?;
        write(&self.head)?;
        write(&self.journal)?;
        medium.sync()?;
        if self.tail.is_empty() {
            return Ok(());
        }
        write(&self.tail)?;
        medium.sync()
    }
}

impl DiskTier {
    /// What makes the pending changes of a volume durable, if there are any and no other commit is
    /// under way. Once it is [written](Commit::write_to), also if that failed, it is given to
    /// [`end_commit`](DiskTier::end_commit).
    pub fn next_commit(&mut self, now_us: u64, volume: usize) -> Option<Commit> {
        self.advance(now_us);
        let owner = self.space.volumes.get(volume)?;
        let due = owner.has_pending() && !owner.committing && !owner.closed;
        due.then(|| self.begin_commit(volume, false))
    }

    /// The last commit of a volume, which says that the log was closed in good order. `None` while
    /// another one is under way. Chunks whose writes have not ended are lost.
    pub fn close(&mut self, volume: usize) -> Option<Commit> {
        let owner = self.space.volumes.get(volume)?;
        (!owner.committing && !owner.closed).then(|| self.begin_commit(volume, true))
    }

    /// Whether a commit should not wait for others to join it: a segment waits to be free, or many
    /// changes wait.
    pub fn commit_is_urgent(&self, volume: usize) -> bool {
        let goal = self.space.free_goal(volume);
        self.space.volumes.get(volume).is_some_and(|owner| owner.is_urgent(goal))
    }

    /// Whether a volume has changes that are not durable.
    pub fn has_pending(&self, volume: usize) -> bool {
        self.space.volumes.get(volume).is_some_and(|owner| owner.has_pending() || owner.committing)
    }

    fn begin_commit(&mut self, volume: usize, closes: bool) -> Commit {
        if closes {
            // What is not open stays as it is.
            self.space.volumes[volume].segments().for_each(|number| self.space.seal(number));
        }
        let owner = &mut self.space.volumes[volume];
        owner.committing = true;
        let records = std::mem::take(&mut owner.pending);
        owner.committing_records = records.len();
        let headers = std::mem::take(&mut owner.headers);
        let summarised = std::mem::take(&mut owner.to_summarise);
        let freed = std::mem::take(&mut owner.freeing);
        owner.committing_freed = freed.len();
        let mut head = self.header_pages(volume, &headers);
        head.extend(summarised.iter().flat_map(|number| self.summary_pages(*number)));
        let (journal, next_block, room_left) = self.journal_pages(volume, &records);
        let checkpoint = closes || !room_left;
        let mut tail = Pages::new();
        if checkpoint {
            tail.push(self.checkpoint_page(volume, next_block));
        }
        if closes {
            let next =
                Current { superblock: self.space.volumes[volume].superblock, both_sound: true }.next(true);
            tail.push((next.place(), next.encode()));
        }
        Commit {
            volume,
            head,
            journal,
            tail,
            records,
            headers,
            summarised,
            freed,
            next_block,
            checkpoint,
            closes,
        }
    }

    /// A commit ended: everything of it is durable, or it is not known what is. In that case the
    /// changes come again.
    pub fn end_commit(&mut self, now_us: u64, commit: Commit, durable: bool) {
        self.advance(now_us);
        let owner = &mut self.space.volumes[commit.volume];
        owner.committing = false;
        owner.committing_records = 0;
        owner.committing_freed = 0;
        if !durable {
            // In the same order: blocks of this attempt that did reach the disk say the same. A
            // checkpoint of it that did expects the blocks after them, so the next attempt must
            // replace it, and writes no blocks before.
            owner.checkpoint_is_due |= commit.checkpoint;
            owner.pending.splice(0..0, commit.records);
            owner.headers.splice(0..0, commit.headers);
            owner.to_summarise.splice(0..0, commit.summarised);
            owner.freeing.splice(0..0, commit.freed);
            return;
        }
        owner.journal = commit.next_block;
        owner.closed = commit.closes;
        if commit.checkpoint {
            owner.replay_from = commit.next_block.sequence;
            owner.checkpoint += 1;
            owner.checkpoint_is_due = false;
        }
        for number in commit.freed {
            self.space.segments[number].state = State::Free;
            self.space.volume_of(number).free.push_back(number);
        }
    }

    fn header_pages(&self, volume: usize, headers: &[SegmentHeader]) -> Pages {
        let owner = &self.space.volumes[volume];
        let current = |header: &&SegmentHeader| {
            // A segment may have been freed since; its header is then another generation's, or
            // nobody's.
            self.space.segments[owner.first_segment + header.segment as usize].sequence == header.sequence
        };
        let page =
            |header: &SegmentHeader| (owner.layout.segment_at(header.segment), header.encode(owner.log));
        headers.iter().filter(current).map(page).collect()
    }

    /// Who is in which slot of a segment.
    fn summary_pages(&self, number: usize) -> Pages {
        let segment = &self.space.segments[number];
        let owner = &self.space.volumes[usize::from(segment.volume)];
        let local = owner.local(number);
        let entry = |occupant: &Option<Row>| match occupant {
            None => SummaryEntry { tenant: TenantId(0), chunk: None },
            Some(row) => SummaryEntry {
                tenant: self.entry(*row).tenant,
                chunk: Some((*self.id_of(*row), self.parent_id(*row))),
            },
        };
        let page = |(page, occupants): (usize, &[Option<Row>])| {
            let first = (page * ENTRIES_PER_PAGE) as u16;
            let summary = SummaryPage { segment: local, sequence: segment.sequence, first };
            let entries: Vec<SummaryEntry> = occupants.iter().map(entry).collect();
            let at = owner.layout.segment_at(local) + segment.slots.summary_at(first);
            (at, summary.encode(owner.log, &entries))
        };
        segment.occupants.chunks(ENTRIES_PER_PAGE).enumerate().map(page).collect()
    }

    /// The blocks of these records, where the next block goes, and whether more than half of the
    /// journal is left then. If the records do not fit there are no blocks: a checkpoint says what
    /// they say. So it is after a failed attempt whose checkpoint may be in the file: records that
    /// came since fill up its last block, which that checkpoint skips, and go on in blocks that it
    /// does not skip. Replayed without the former, a segment is freed whose chunks were relocated
    /// nowhere.
    fn journal_pages(&self, volume: usize, records: &[Record]) -> (Pages, JournalPosition, bool) {
        let owner = &self.space.volumes[volume];
        let mut at = JournalPosition { epoch: owner.superblock.epoch, ..owner.journal };
        let used = owner.journal.sequence - owner.replay_from;
        let total = used + records.len().div_ceil(RECORDS_PER_BLOCK) as u64;
        if total > owner.layout.journal_blocks() || owner.checkpoint_is_due {
            // Behind every block that an attempt which failed may have left: nobody is to replay
            // those now.
            at.sequence = owner.replay_from + owner.layout.journal_blocks();
            return (Pages::new(), at, false);
        }
        let mut pages = Pages::new();
        for block in records.chunks(RECORDS_PER_BLOCK) {
            pages.push((at.place(&owner.layout), at.encode(owner.log, block)));
            at.sequence += 1;
        }
        (pages, at, total * 2 <= owner.layout.journal_blocks())
    }

    fn checkpoint_page(&self, volume: usize, next_block: JournalPosition) -> (u64, Vec<u8>) {
        let owner = &self.space.volumes[volume];
        let own = owner.first_segment..owner.first_segment + owner.layout.segments as usize;
        let checkpoint = Checkpoint {
            serial: owner.checkpoint + 1,
            epoch: next_block.epoch,
            journal: next_block.sequence,
            next_sequence: owner.next_sequence(),
            doomed: owner.doomed.clone(),
            segments: own.map(|number| self.segment_row(number)).collect(),
        };
        let area = owner.layout.checkpoints[checkpoint.area()];
        (area.offset, checkpoint.encode(owner.log))
    }

    fn segment_row(&self, number: usize) -> SegmentRow {
        let segment = &self.space.segments[number];
        let state = segment.state.on_disk();
        let (clean, sequence) = (segment.clean, segment.sequence);
        if !matches!(segment.state, State::Open | State::Sealed) {
            return SegmentRow { state, clean, sequence, ..SegmentRow::unused() };
        }
        let mut live = SlotSet::new(segment.slots.count);
        self.durable_slots(number, segment).for_each(|slot| live.set(slot, true));
        let summarised = if segment.state == State::Sealed { segment.slots.count } else { 0 };
        SegmentRow {
            state,
            clean,
            slots: segment.slots.count,
            frontier: segment.frontier,
            summarised,
            sequence,
            live,
        }
    }

    /// Slots of whose chunks the records say that they are stored.
    fn durable_slots(&self, number: usize, segment: &Segment) -> impl Iterator<Item = u16> {
        let stored = move |(slot, occupant): (usize, &Option<Row>)| {
            let entry = self.entry((*occupant)?);
            let slot = slot as u16;
            let here = entry.is_resident() && entry.slot == Some(LogSlot::new(number, slot));
            here.then_some(slot)
        };
        segment.occupants.iter().enumerate().filter_map(stored).collect::<Vec<_>>().into_iter()
    }
}
