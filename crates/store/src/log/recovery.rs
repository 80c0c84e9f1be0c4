//! Opening a log after whatever happened to it: the newest checkpoint, the journal since, then who
//! is in which slot from summaries and footers. This file reads a volume and says what it holds.
//!
//! What is trusted, and why: a slot is live if checkpoint and journal say so, and a record is
//! written only after its chunk and footer are durable. Chunks without a durable record are looked
//! for behind the last known slot of segments that were open; each of them is read in full and
//! believed only if every layer matches its footer.
//!
//! What cannot be read, maybe only now, is no reason to think that nothing is there: live chunks
//! would be overwritten. So it keeps the log from opening, unless it is said elsewhere too or
//! promises nothing: one of two superblocks, pages behind the journal's end, summaries, and what
//! lies behind the last known slot.

use super::format::{
    Checkpoint, CheckpointHead, ChunkCopy, Current, ENTRIES_PER_PAGE, Footer, JournalPosition, Layout,
    LogUuid, NotOpened, PAGE_BYTES, Record, SUPERBLOCKS_AT, SegmentHeader, SegmentRow, SegmentState, SlotSet,
    Slots, SummaryEntry, SummaryPage, Superblock,
};
use super::medium::Medium;
use crate::tenant::TenantId;
use forebay_kv::ChunkId;
use forebay_transfer::lock::Mutex;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};

const PAGE: usize = PAGE_BYTES;

/// Blocks of the journal that are read at a time.
const BLOCKS_AT_ONCE: usize = 64;

/// Slots behind the last known one that may be unreadable in a row before the search for more
/// chunks ends.
const GAPS_MAX: u32 = 16;

/// Readers of segments at a time.
const READERS: usize = 4;

/// What opening a volume found.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Recovered {
    /// Chunks that can be read.
    pub chunks: u64,
    /// Whether the log was closed in good order.
    pub clean: bool,
    /// Journal blocks since the checkpoint.
    pub blocks_replayed: u64,
    /// Footers that were read because no summary said who is in a slot.
    pub footers_read: u64,
    /// Chunks of which no durable record speaks, and that were verified in full.
    pub salvaged: u64,
    /// Chunks that records speak of, and that neither summary nor footer could name.
    pub lost: u64,
    /// Chunks that the index had no room for: they are on disk, and nobody finds them.
    pub left_out: u64,
}

#[derive(Debug, Clone, Copy)]
pub(super) struct Found {
    pub slot: u16,
    pub tenant: TenantId,
    pub id: ChunkId,
    pub parent: Option<ChunkId>,
}

#[derive(Debug)]
pub(super) struct FoundSegment {
    pub number: u32,
    pub row: SegmentRow,
    /// How it is divided, if anything lives in it.
    pub slots: Slots,
    pub chunks: Vec<Found>,
}

/// All that a volume's metadata say, before any segment was looked at.
#[derive(Debug)]
pub(super) struct Metadata {
    pub superblock: Superblock,
    pub both_sound: bool,
    pub checkpoint: u64,
    pub journal: JournalPosition,
    pub replay_from: u64,
    pub rows: Vec<SegmentRow>,
    pub doomed: Vec<TenantId>,
    pub recovered: Recovered,
}

/// Reads superblocks. A file that ends before one has none there: that is no failure of the disk.
/// One is enough.
pub fn read_superblock(medium: &dyn Medium) -> Result<Current, NotOpened> {
    let pages = SUPERBLOCKS_AT.map(|offset| match medium.bytes() < offset + PAGE as u64 {
        true => Ok(Vec::new()),
        false => read(medium, offset, PAGE),
    });
    let [first, second] = [0, 1].map(|copy| pages[copy].as_deref().unwrap_or_default());
    match Current::choose(medium.bytes(), [first, second], None) {
        // It is not known what the page that cannot be read says.
        Err(NotOpened::NotALog { first, second }) => {
            Err(pages.into_iter().find_map(Result::err).unwrap_or(NotOpened::NotALog { first, second }))
        }
        chosen => chosen,
    }
}

/// Reads superblocks, checkpoint and journal.
pub(super) fn read_metadata(medium: &dyn Medium) -> Result<Metadata, NotOpened> {
    let current = read_superblock(medium)?;
    let Superblock { log, clean, layout, .. } = current.superblock;
    let Checkpoint { serial, epoch: from_epoch, journal, doomed, segments, .. } =
        newest_checkpoint(medium, log, &layout)?;
    let mut state = Replay { rows: segments, doomed };
    let from = JournalPosition { sequence: journal, epoch: from_epoch };
    let end = replay(medium, log, &layout, current.newest_epoch(), from, &mut state)?;
    Ok(Metadata {
        superblock: current.superblock,
        both_sound: current.both_sound,
        checkpoint: serial,
        journal: end,
        replay_from: journal,
        rows: state.rows,
        doomed: state.doomed,
        recovered: Recovered { clean, blocks_replayed: end.sequence - journal, ..Recovered::default() },
    })
}

/// Reads a stretch; says where it starts if that fails.
pub(super) fn read(medium: &dyn Medium, offset: u64, bytes: usize) -> Result<Vec<u8>, NotOpened> {
    let mut buffer = vec![0; bytes];
    let failed = |error: std::io::Error| NotOpened::Io { offset, error: error.to_string() };
    medium.read_at(offset, &mut buffer).map_err(failed)?;
    Ok(buffer)
}

fn newest_checkpoint(medium: &dyn Medium, log: LogUuid, layout: &Layout) -> Result<Checkpoint, NotOpened> {
    let read_one = |area: usize| {
        let area = layout.checkpoints[area];
        let head = CheckpointHead::parse(log, layout, &read(medium, area.offset, PAGE)?);
        Ok(match head {
            Err(damaged) => Err(damaged),
            Ok(head) => {
                let bytes = (head.body_bytes() as usize).next_multiple_of(PAGE);
                head.with_body(&read(medium, area.offset + PAGE as u64, bytes)?)
            }
        })
    };
    match (read_one(0)?, read_one(1)?) {
        (Ok(first), Ok(second)) => Ok(if first.serial > second.serial { first } else { second }),
        (Ok(checkpoint), Err(_)) | (Err(_), Ok(checkpoint)) => Ok(checkpoint),
        (Err(first), Err(second)) => Err(NotOpened::NoCheckpoint { first, second }),
    }
}

/// The state of the segments while records are applied to it.
#[derive(Debug)]
struct Replay {
    rows: Vec<SegmentRow>,
    doomed: Vec<TenantId>,
}

/// Applies the blocks of the journal from `at` on, and says where the next one goes.
fn replay(
    medium: &dyn Medium,
    log: LogUuid,
    layout: &Layout,
    epoch_limit: u64,
    mut at: JournalPosition,
    state: &mut Replay,
) -> Result<JournalPosition, NotOpened> {
    let begin = at.sequence;
    let mut stretch: Vec<u8> = Vec::new();
    let mut stretch_at = 0;
    while at.sequence - begin < layout.journal_blocks() {
        let place = at.place(layout);
        let inside = place.checked_sub(stretch_at).map(|skipped| skipped as usize);
        if inside.is_none_or(|skipped| skipped >= stretch.len()) {
            let to_end = layout.journal.offset + layout.journal.bytes - place;
            // What cannot be read of a stretch may lie behind the journal's end.
            stretch = read(medium, place, (BLOCKS_AT_ONCE * PAGE).min(to_end as usize))
                .or_else(|_| read(medium, place, PAGE))?;
            stretch_at = place;
        }
        let skipped = (place - stretch_at) as usize;
        let Ok((records, next)) = at.parse(log, epoch_limit, &stretch[skipped..skipped + PAGE]) else {
            break;
        };
        records.into_iter().for_each(|record| state.apply(record));
        at = next;
    }
    Ok(at)
}

impl Replay {
    /// The row of a segment in this generation of it. Records of other generations were overtaken.
    fn row(&mut self, segment: u32, sequence: u64) -> Option<&mut SegmentRow> {
        self.rows.get_mut(segment as usize).filter(|row| row.sequence == sequence)
    }

    fn apply(&mut self, record: Record) {
        match record {
            Record::Opened { segment, sequence, slots } => {
                if let Some(row) = self.rows.get_mut(segment as usize) {
                    let live = SlotSet::new(slots);
                    let (state, clean) = (SegmentState::Open, row.clean);
                    *row = SegmentRow { state, clean, slots, frontier: 0, summarised: 0, sequence, live };
                }
            }
            Record::Stored { at, sequence, moved_from, .. } => {
                if let Some(from) = moved_from
                    .and_then(|from| self.rows.get_mut(from.segment as usize).map(|row| (row, from.slot)))
                {
                    from.0.live.set(from.1, false);
                }
                if let Some(row) = self.row(at.segment, sequence).filter(|row| at.slot < row.slots) {
                    row.live.set(at.slot, true);
                    row.frontier = row.frontier.max(at.slot + 1);
                }
            }
            Record::Forgotten { at, sequence, .. } => {
                if let Some(row) = self.row(at.segment, sequence) {
                    row.live.set(at.slot, false);
                }
            }
            Record::Sealed { segment, sequence } => {
                if let Some(row) = self.row(segment, sequence).filter(|row| row.state == SegmentState::Open) {
                    row.state = SegmentState::Sealed;
                }
            }
            Record::Freed { segment, sequence } => {
                if let Some(row) = self.row(segment, sequence) {
                    *row = SegmentRow { clean: false, sequence, ..SegmentRow::unused() };
                }
            }
            Record::Withdrawn { segment } => self.set_free(segment, SegmentState::Withdrawn),
            Record::Restored { segment } => self.set_free(segment, SegmentState::Free),
            Record::TenantDoomed { tenant } => {
                if !self.doomed.contains(&tenant) {
                    self.doomed.push(tenant);
                }
            }
            Record::TenantGone { tenant } => self.doomed.retain(|doomed| *doomed != tenant),
        }
    }

    /// A segment was to be given to the file system, or came back. Whether that was done, and it
    /// holds zeros, is not known.
    fn set_free(&mut self, segment: u32, state: SegmentState) {
        if let Some(row) = self.rows.get_mut(segment as usize) {
            let (clean, sequence) = (row.clean, row.sequence);
            *row = SegmentRow { state, clean, sequence, ..SegmentRow::unused() };
        }
    }
}

/// Finds out who is in the live slots of all segments, several at a time, and hands each segment to
/// `each`: older lives first, since of two copies of a chunk the newer one counts, and what was
/// stored last was used last.
pub(super) fn read_segments(
    medium: &dyn Medium,
    metadata: &mut Metadata,
    mut each: impl FnMut(FoundSegment),
) -> Result<(), NotOpened> {
    let rows = std::mem::take(&mut metadata.rows);
    let mut order: Vec<u32> = (0..rows.len() as u32).collect();
    order.sort_by_key(|number| rows[*number as usize].sequence);
    let reader = Reader { medium, superblock: metadata.superblock };
    let next = AtomicUsize::new(0);
    let failure = Mutex::new(None);
    let (sender, found) = std::sync::mpsc::sync_channel(READERS * 4);
    std::thread::scope(|scope| {
        for number in 0..READERS {
            let (sender, rows, order, next, failure, reader) =
                (sender.clone(), &rows, &order, &next, &failure, &reader);
            let read = move || {
                loop {
                    let turn = next.fetch_add(1, Ordering::Relaxed);
                    let Some(number) = order.get(turn) else { return };
                    match reader.segment(*number, &rows[*number as usize]) {
                        // The receiver lives until all senders are gone.
                        Ok((found, counts)) => drop(sender.send((turn, found, counts))),
                        Err(error) => {
                            *failure.lock() = Some(error);
                            return;
                        }
                    }
                }
            };
            // Those that there are do the work of all.
            if let Err(error) = std::thread::Builder::new().spawn_scoped(scope, read) {
                if number == 0 {
                    let none = NotOpened::NoThread { error: error.to_string() };
                    *failure.lock() = Some(none);
                }
                break;
            }
        }
        drop(sender);
        let mut early = BTreeMap::new();
        let mut due = 0;
        for (turn, segment, counts) in found {
            metadata.recovered.footers_read += counts.footers_read;
            metadata.recovered.salvaged += counts.salvaged;
            metadata.recovered.lost += counts.lost;
            early.insert(turn, segment);
            while let Some(segment) = early.remove(&due) {
                each(segment);
                due += 1;
            }
        }
    });
    failure.into_inner().map_or(Ok(()), Err)
}

/// Reads what segments say of themselves.
pub(super) struct Reader<'a> {
    pub medium: &'a dyn Medium,
    pub superblock: Superblock,
}

impl Reader<'_> {
    fn log(&self) -> LogUuid {
        self.superblock.log
    }

    fn segment(&self, number: u32, row: &SegmentRow) -> Result<(FoundSegment, Recovered), NotOpened> {
        let mut counts = Recovered::default();
        let mut found = FoundSegment { number, row: row.clone(), slots: Slots::none(), chunks: Vec::new() };
        let in_use = matches!(row.state, SegmentState::Open | SegmentState::Sealed);
        if !in_use {
            return Ok((found, counts));
        }
        let layout = &self.superblock.layout;
        let header = self.header(number)?.filter(|header| header.sequence == row.sequence);
        let Some(header) = header else {
            // Without its header nobody knows where its slots are.
            counts.lost = row.live.len() as u64;
            found.row.live = SlotSet::new(0);
            return Ok((found, counts));
        };
        let head_bytes = header.slots.head_bytes() as usize;
        let at = layout.segment_at(number);
        // A segment that is still open has no summary. Footers say the same as one that cannot be
        // read.
        let head = match row.state {
            SegmentState::Sealed => read(self.medium, at, head_bytes).ok(),
            _ => None,
        };
        let summary = head.map_or_else(Vec::new, |head| self.summary(&header, &head));
        found.slots = header.slots.clone();
        for slot in row.live.iter().take_while(|slot| *slot < header.slots.count) {
            let entry = summary.get(usize::from(slot)).copied().flatten();
            let chunk = match entry.and_then(|entry: SummaryEntry| Some((entry.tenant, entry.chunk?))) {
                Some((tenant, (id, parent))) => Some(Found { slot, tenant, id, parent }),
                None => {
                    counts.footers_read += 1;
                    self.footer(&header, slot)?.map(|footer| found_by(&footer))
                }
            };
            match chunk {
                Some(chunk) => found.chunks.push(chunk),
                None => counts.lost += 1,
            }
        }
        if row.state == SegmentState::Open && !self.superblock.clean {
            self.salvage(&header, row.frontier, &mut found, &mut counts);
        }
        Ok((found, counts))
    }

    pub fn header(&self, number: u32) -> Result<Option<SegmentHeader>, NotOpened> {
        let layout = &self.superblock.layout;
        let page = read(self.medium, layout.segment_at(number), PAGE)?;
        let header = SegmentHeader::parse(self.log(), layout.segment_bytes, &page).ok();
        Ok(header.filter(|header| header.segment == number))
    }

    /// What the summary says of each slot; nothing where a page of it is damaged or of another
    /// generation.
    fn summary(&self, header: &SegmentHeader, head: &[u8]) -> Vec<Option<SummaryEntry>> {
        let mut entries = Vec::with_capacity(usize::from(header.slots.count));
        for (page, bytes) in head[PAGE..].chunks(PAGE).enumerate() {
            let first = (page * ENTRIES_PER_PAGE) as u16;
            let expected = SummaryPage { segment: header.segment, sequence: header.sequence, first };
            let mut known = Vec::with_capacity(ENTRIES_PER_PAGE);
            // What a damaged page said before the damage is not used either.
            let known = expected.parse(self.log(), bytes, &mut known).map_or(Vec::new(), |()| known);
            entries.extend(known.into_iter().map(Some));
            entries.resize((page + 1) * ENTRIES_PER_PAGE, None);
        }
        entries
    }

    fn slot_at(&self, header: &SegmentHeader, slot: u16) -> u64 {
        self.superblock.layout.segment_at(header.segment) + header.slots.slot_at(slot)
    }

    /// The footer of a slot, if it is of this generation of the segment.
    pub fn footer(&self, header: &SegmentHeader, slot: u16) -> Result<Option<Footer>, NotOpened> {
        let at = self.slot_at(header, slot) + header.slots.shape.footer_at();
        let page = read(self.medium, at, PAGE)?;
        Ok(Footer::parse(self.log(), &page).ok().filter(|footer| is_of(footer, header, slot)))
    }

    /// Looks for chunks that were written and of which no record is durable. Nothing promises
    /// those, so that one that cannot be read is as good as none.
    fn salvage(
        &self,
        header: &SegmentHeader,
        frontier: u16,
        found: &mut FoundSegment,
        counts: &mut Recovered,
    ) {
        let mut gaps = 0;
        for slot in frontier..header.slots.count {
            if gaps == GAPS_MAX {
                break;
            }
            let Ok(Some(footer)) = self.footer(header, slot) else {
                gaps += 1;
                continue;
            };
            gaps = 0;
            found.row.frontier = slot + 1;
            if self.is_whole(header, slot, &footer) {
                counts.salvaged += 1;
                found.chunks.push(found_by(&footer));
            }
        }
        // Writes that never reached the disk may have been under way to the slots after these.
        found.row.frontier = found.row.frontier.saturating_add(GAPS_MAX as u16).min(header.slots.count);
    }

    fn is_whole(&self, header: &SegmentHeader, slot: u16, footer: &Footer) -> bool {
        let layers_bytes = footer.shape.footer_at() as usize;
        let Ok(bytes) = read(self.medium, self.slot_at(header, slot), layers_bytes) else { return false };
        let sound = |layer: usize| {
            let place = footer.shape.layer(layer)?;
            footer.verify(layer, &[bytes.get(place.start as usize..place.end as usize)?]).ok()
        };
        (0..footer.shape.layers()).all(|layer| sound(layer).is_some())
    }
}

/// Whether a footer belongs to a slot in this generation of its segment.
fn is_of(footer: &Footer, header: &SegmentHeader, slot: u16) -> bool {
    let ChunkCopy { segment, sequence, slot: named, .. } = footer.copy;
    (segment, sequence, named) == (header.segment, header.sequence, slot)
        && footer.shape == header.slots.shape
}

fn found_by(footer: &Footer) -> Found {
    Found { slot: footer.copy.slot, tenant: footer.tenant, id: footer.copy.id, parent: footer.parent }
}
