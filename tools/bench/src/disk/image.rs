//! The log of a disk with ten million chunks, as it is after a process was killed: superblocks, a
//! checkpoint, and the header and summary of each segment. The slots themselves were never written,
//! so the file is sparse: a log that recovers from its checkpoint and summaries does not look at
//! them.

use crate::output::Error;
use forebay_kv::ChunkId;
use forebay_store::log::{
    Checkpoint, ENTRIES_PER_PAGE, Layout, LogUuid, SegmentHeader, SegmentRow, SegmentState, SlotSet,
    SlotShape, Slots, SummaryEntry, SummaryPage, Superblock, empty_log,
};
use forebay_store::{ChunkShape, TenantId};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use tempfile::TempPath;

const LOG: LogUuid = LogUuid([0x1b; 16]);
const SEGMENT_BYTES: u64 = 256 << 20;
/// Chunks of a conversation, each the parent of the next one.
const CHAIN: u64 = 100;
/// Segments that hold nothing.
const SPARE: u64 = 8;
/// Of the first life. Lives are numbered by the epoch in which they began.
const FIRST_SEQUENCE: u64 = (1 << 32) + 1;

/// Makes a log of `chunks` chunks with one layer of `layer_bytes`. It is removed when it is
/// dropped.
pub fn make(path: &Path, chunks: u64, layer_bytes: u64) -> Result<TempPath, Error> {
    let image = TempPath::try_from_path(path)?;
    write(path, chunks, layer_bytes)?;
    Ok(image)
}

fn write(path: &Path, chunks: u64, layer_bytes: u64) -> Result<(), Error> {
    let shape = Arc::new(SlotShape::new(&ChunkShape::new([layer_bytes])?)?);
    let slots = Slots::fit(shape, SEGMENT_BYTES)?;
    let full = chunks.div_ceil(u64::from(slots.count));
    let layout = layout_of(full + SPARE)?;
    let file = File::options().write(true).create_new(true).open(path)?;
    file.set_len(layout.file_bytes)?;
    for (at, page) in empty_log(LOG, layout) {
        file.write_all_at(&page, at)?;
    }
    let mut checkpoint =
        Checkpoint { serial: 1, next_sequence: FIRST_SEQUENCE + full, ..Checkpoint::empty(&layout) };
    let mut ids = Ids::new();
    let mut left = chunks;
    for segment in 0..full as u32 {
        let count = left.min(slots.count.into()) as u16;
        left -= u64::from(count);
        let header =
            SegmentHeader { segment, sequence: FIRST_SEQUENCE + u64::from(segment), slots: slots.clone() };
        file.write_all_at(&head(&header, count, &mut ids), layout.segment_at(segment))?;
        checkpoint.segments[segment as usize] = row(&header, count);
    }
    file.write_all_at(&checkpoint.encode(LOG), layout.checkpoints[checkpoint.area()].offset)?;
    let superblock = Superblock { log: LOG, epoch: 2, clean: false, layout };
    file.write_all_at(&superblock.encode(), superblock.place())?;
    Ok(file.sync_all()?)
}

/// The division of a file in which there is room for so many segments.
fn layout_of(segments: u64) -> Result<Layout, Error> {
    // Metadata takes less than a hundredth of the file.
    let mut layout = Layout::new((segments + segments / 100 + 2) * SEGMENT_BYTES, SEGMENT_BYTES)?;
    layout.file_bytes = layout.segment_at(layout.segments);
    Ok(layout)
}

/// Header and summary of a segment whose first `count` slots hold chunks.
fn head(header: &SegmentHeader, count: u16, ids: &mut Ids) -> Vec<u8> {
    let mut bytes = header.encode(LOG);
    let entries: Vec<SummaryEntry> = ids.take(count.into()).collect();
    for (entries, first) in entries.chunks(ENTRIES_PER_PAGE).zip((0..).step_by(ENTRIES_PER_PAGE)) {
        let page = SummaryPage { segment: header.segment, sequence: header.sequence, first };
        bytes.extend(page.encode(LOG, entries));
    }
    bytes
}

fn row(header: &SegmentHeader, count: u16) -> SegmentRow {
    let slots = header.slots.count;
    let mut live = SlotSet::new(slots);
    (0..count).for_each(|slot| live.set(slot, true));
    SegmentRow {
        state: SegmentState::Sealed,
        clean: false,
        slots,
        frontier: count,
        summarised: count,
        sequence: header.sequence,
        live,
    }
}

/// Chunks in the order in which conversations would have stored them.
struct Ids {
    random: StdRng,
    number: u64,
    last: Option<ChunkId>,
}

impl Ids {
    fn new() -> Ids {
        Ids { random: StdRng::seed_from_u64(1), number: 0, last: None }
    }
}

impl Iterator for &mut Ids {
    type Item = SummaryEntry;

    fn next(&mut self) -> Option<SummaryEntry> {
        let mut id = [0; 32];
        self.random.fill_bytes(&mut id);
        let id = ChunkId::from_bytes(id);
        let parent = self.last.filter(|_| !self.number.is_multiple_of(CHAIN));
        self.number += 1;
        self.last = Some(id);
        Some(SummaryEntry { tenant: TenantId(0), chunk: Some((id, parent)) })
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use forebay_store::log::{DiskTier, DiskTierConfig};
    use forebay_store::ssd::FileMedium;

    #[test]
    fn a_log_recovers_every_chunk_of_its_image_and_reads_no_footer() {
        let dir = tempfile::tempdir().unwrap();
        let image = make(&dir.path().join("log"), 10_000, 80 << 10).unwrap();
        let medium = FileMedium::open(&image).unwrap();
        let (tier, recovered) = DiskTier::open(&DiskTierConfig::default(), &[&medium]).unwrap();
        assert_eq!((tier.stat().chunks, recovered[0].chunks), (10_000, 10_000));
        assert_eq!((recovered[0].footers_read, recovered[0].lost), (0, 0));
        let ids: Vec<ChunkId> = (&mut Ids::new()).take(200).map(|entry| entry.chunk.unwrap().0).collect();
        assert_eq!(
            (tier.lookup(TenantId(0), &ids[..100]), tier.lookup(TenantId(0), &ids[100..])),
            (100, 100)
        );
    }
}
