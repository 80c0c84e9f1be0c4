//! Every parser of bytes from the disk, given pages that are whole and sound except for some
//! fields. The CRC is right, so the fields are reached: what is tested is not that damage is
//! noticed but that no bytes, however made, lead to a panic, to a loop, to memory reserved on their
//! word, or to a place outside of where they may point.
#![allow(clippy::unwrap_used)]

use forebay_kv::ChunkId;
use forebay_store::log::{
    Checkpoint, CheckpointHead, ChunkCopy, Current, Footer, JournalPosition, Layout, LogUuid,
    MAX_DISK_LAYERS, PAGE_BYTES, Record, SegmentHeader, SegmentRow, SegmentState, SlotRef, SlotSet,
    SlotShape, Slots, SummaryEntry, SummaryPage, Superblock, crc32c,
};
use forebay_store::{ChunkShape, TenantId};
use proptest::prelude::*;
use std::alloc::{GlobalAlloc, System};
use std::cell::Cell;
use std::sync::Arc;

const LOG: LogUuid = LogUuid([7; 16]);
const PAGE: u64 = PAGE_BYTES as u64;

/// What a parser may reserve at once for a page: the fields of its smallest structures, unpacked.
const PAGE_RESERVES_BYTES: usize = 8 * PAGE_BYTES;

/// The system's allocator, which notes the largest request of each thread.
struct Watched;

thread_local! {
    static LARGEST: Cell<usize> = const { Cell::new(0) };
}

// SAFETY: every request goes to the system's allocator as it came.
unsafe impl GlobalAlloc for Watched {
    unsafe fn alloc(&self, layout: std::alloc::Layout) -> *mut u8 {
        LARGEST.with(|largest| largest.set(largest.get().max(layout.size())));
        // SAFETY: the caller's promise is the one that is needed.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, start: *mut u8, layout: std::alloc::Layout) {
        // SAFETY: as above.
        unsafe { System.dealloc(start, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Watched = Watched;

/// Runs a parser, and fails if it reserves more than `limit` bytes at once.
fn frugally<T>(limit: usize, parse: impl FnOnce() -> T) -> T {
    LARGEST.set(0);
    let parsed = parse();
    let largest = LARGEST.get();
    assert!(largest <= limit, "{largest} bytes reserved at once, {limit} are enough");
    parsed
}

/// Bytes to overwrite: where, and with what.
type Changes = Vec<(usize, Vec<u8>)>;

/// Changes of fields, most of them near the start, where the fields are that say how many others
/// there are.
fn changes(len: usize) -> impl Strategy<Value = Changes> {
    let at = prop_oneof![6 => 32usize..160, 2 => 12usize..32, 1 => 0..len];
    let value = prop_oneof![
        any::<u8>().prop_map(|byte| vec![byte]),
        any::<u16>().prop_map(|value| value.to_le_bytes().to_vec()),
        any::<u32>().prop_map(|value| value.to_le_bytes().to_vec()),
        any::<u64>().prop_map(|value| value.to_le_bytes().to_vec()),
        (0u32..64).prop_map(|bit| (1u64 << bit).to_le_bytes().to_vec()),
        (1usize..9).prop_map(|count| vec![0xff; count]),
        (1usize..9).prop_map(|count| vec![0; count]),
    ];
    prop::collection::vec((at, value), 1..6)
}

/// The page with these changes and with a CRC that fits.
fn changed(mut page: Vec<u8>, changes: &Changes) -> Vec<u8> {
    overwrite(&mut page, changes);
    let crc = crc32c(&page[12..PAGE_BYTES]);
    page[8..12].copy_from_slice(&crc.to_le_bytes());
    page
}

fn overwrite(bytes: &mut [u8], changes: &Changes) {
    for (at, value) in changes {
        let end = (at + value.len()).min(bytes.len());
        bytes[*at..end].copy_from_slice(&value[..end - at]);
    }
}

fn layout() -> Layout {
    Layout::new(1 << 20, 64 << 10).unwrap()
}

fn shape() -> Arc<SlotShape> {
    Arc::new(SlotShape::new(&ChunkShape::new([3000, 100, 5000]).unwrap()).unwrap())
}

fn name() -> ChunkCopy {
    ChunkCopy { log: LOG, id: ChunkId::from_bytes([2; 32]), segment: 3, sequence: 4, slot: 5 }
}

fn checkpoint() -> Checkpoint {
    let mut checkpoint = Checkpoint::empty(&layout());
    let mut live = SlotSet::new(3);
    live.set(1, true);
    checkpoint.segments[2] = SegmentRow {
        state: SegmentState::Open,
        clean: false,
        slots: 3,
        frontier: 2,
        summarised: 1,
        sequence: 4,
        live,
    };
    checkpoint.doomed = vec![TenantId(3)];
    checkpoint
}

fn records() -> Vec<Record> {
    let (id, at) = (ChunkId::from_bytes([2; 32]), SlotRef { segment: 3, slot: 5 });
    vec![
        Record::Opened { segment: 3, sequence: 4, slots: 6 },
        Record::Stored { tenant: TenantId(1), id, at, sequence: 4, moved_from: Some(at) },
        Record::Forgotten { id, at, sequence: 4 },
        Record::TenantDoomed { tenant: TenantId(1) },
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn a_superblock_never_points_out_of_its_file(changes in changes(PAGE_BYTES)) {
        let page = changed(Superblock { log: LOG, epoch: 1, clean: false, layout: layout() }.encode(), &changes);
        if let Ok(superblock) = frugally(PAGE_RESERVES_BYTES, || Superblock::parse(&page)) {
            let Layout { file_bytes, journal, checkpoints, segments, .. } = superblock.layout;
            prop_assert!(superblock.layout.segment_at(segments) <= file_bytes);
            let mut end = 128 << 10;
            for area in [journal, checkpoints[0], checkpoints[1]] {
                prop_assert!(area.offset >= end && area.offset % PAGE == 0 && area.bytes % PAGE == 0);
                end = area.offset + area.bytes;
            }
            prop_assert!(end <= superblock.layout.segments_at);
            let block = JournalPosition { sequence: u64::MAX, epoch: 0 };
            prop_assert!(block.place(&superblock.layout) + PAGE <= journal.offset + journal.bytes);
        }
        if let Ok(current) = Current::choose(1 << 20, [&page, &page], None) {
            prop_assert!(current.superblock.layout.file_bytes <= 1 << 20);
            prop_assert!(current.next(false).epoch >= current.superblock.epoch);
        }
    }

    #[test]
    fn a_checkpoints_head_promises_no_more_than_its_area_holds(changes in changes(PAGE_BYTES)) {
        let layout = layout();
        let bytes = checkpoint().encode(LOG);
        let head = changed(bytes[..PAGE_BYTES].to_vec(), &changes);
        let parsed = frugally(PAGE_RESERVES_BYTES, || CheckpointHead::parse(LOG, &layout, &head));
        if let Ok(head) = parsed {
            prop_assert!(head.body_bytes() + PAGE <= layout.checkpoints[0].bytes);
            let _ = frugally(PAGE_RESERVES_BYTES, || head.with_body(&bytes[PAGE_BYTES..]));
        }
    }

    #[test]
    fn a_checkpoints_body_never_has_a_chunk_in_a_slot_that_is_not_there(changes in changes(256)) {
        let mut bytes = checkpoint().encode(LOG);
        let body_bytes = 16 * layout().segments as usize + 1;
        let body = &mut bytes[PAGE_BYTES..PAGE_BYTES + body_bytes];
        overwrite(body, &changes.into_iter().map(|(at, value)| (at % body_bytes, value)).collect());
        let body_crc = crc32c(body).to_le_bytes().to_vec();
        let (head, body) = bytes.split_at(PAGE_BYTES);
        let head = changed(head.to_vec(), &vec![(80, body_crc)]);
        let head = CheckpointHead::parse(LOG, &layout(), &head).unwrap();
        if let Ok(checkpoint) = frugally(PAGE_RESERVES_BYTES, || head.with_body(body)) {
            prop_assert_eq!(checkpoint.segments.len(), layout().segments as usize);
            for row in checkpoint.segments {
                prop_assert!(row.frontier <= row.slots && row.summarised <= row.slots);
                prop_assert!(row.live.iter().all(|slot| slot < row.slots), "{row:?}");
            }
        }
    }

    #[test]
    fn a_segments_slots_never_leave_the_segment(changes in changes(PAGE_BYTES)) {
        let slots = Slots::fit(shape(), 64 << 10).unwrap();
        let page = changed(SegmentHeader { segment: 3, sequence: 4, slots }.encode(LOG), &changes);
        let parsed = frugally(PAGE_RESERVES_BYTES, || SegmentHeader::parse(LOG, 64 << 10, &page));
        if let Ok(SegmentHeader { slots, .. }) = parsed {
            prop_assert!(slots.count > 0 && slots.slot_at(slots.count) <= 64 << 10);
            prop_assert!(slots.shape.window(0..slots.shape.layers()).unwrap().end <= slots.shape.footer_at());
        }
    }

    #[test]
    fn a_summary_never_has_more_entries_than_a_page(changes in changes(PAGE_BYTES)) {
        let (mut entries, mut summary) = (Vec::new(), SummaryPage { segment: 3, sequence: 4, first: 56 });
        let entry = SummaryEntry { tenant: TenantId(1), chunk: Some((name().id, None)) };
        let page = changed(summary.encode(LOG, &[entry; 56]), &changes);
        let _ = frugally(PAGE_RESERVES_BYTES, || summary.parse(LOG, &page, &mut entries));
        prop_assert!(entries.len() <= 56);
        summary.first = 0;
        prop_assert!(summary.parse(LOG, &page, &mut entries).is_err() || changes.iter().any(|(at, _)| *at < 38));
    }

    #[test]
    fn a_footer_bounds_its_layers_and_never_passes_other_bytes(changes in changes(PAGE_BYTES), byte in any::<u8>()) {
        let sound = Footer::new(name(), TenantId(1), None, shape(), &[1, 2, 3]);
        let page = changed(sound.encode(), &changes);
        if let Ok(footer) = frugally(PAGE_RESERVES_BYTES, || Footer::parse(LOG, &page)) {
            prop_assert!(footer.shape.layers() <= MAX_DISK_LAYERS);
            let end = footer.shape.layer(footer.shape.layers() - 1).unwrap().end;
            prop_assert!(end <= footer.shape.footer_at());
            let layer = [byte; 100];
            for number in 0..footer.shape.layers() + 1 {
                let passes = footer.verify(number, &[&layer]).is_ok();
                prop_assert!(!passes || footer.crc(number) == Some(crc32c(&layer)));
            }
        }
        if let Ok(footer) = Footer::of(&name(), &page) {
            prop_assert_eq!(footer.copy, name());
        }
    }

    #[test]
    fn a_block_never_has_more_records_than_a_page(changes in changes(PAGE_BYTES)) {
        let position = JournalPosition { sequence: 9, epoch: 2 };
        let page = changed(position.encode(LOG, &records()), &changes);
        let parsed = frugally(PAGE_RESERVES_BYTES, || position.parse(LOG, 5, &page));
        if let Ok((records, next)) = parsed {
            prop_assert!(records.len() <= 63);
            prop_assert!(next.sequence == 10 && (2..=5).contains(&next.epoch));
        }
    }

    #[test]
    fn bytes_that_are_no_page_at_all_are_refused(bytes in prop::collection::vec(any::<u8>(), 0..2 * PAGE_BYTES)) {
        let position = JournalPosition { sequence: 9, epoch: 2 };
        let summary = SummaryPage { segment: 3, sequence: 4, first: 0 };
        prop_assert!(Superblock::parse(&bytes).is_err());
        prop_assert!(CheckpointHead::parse(LOG, &layout(), &bytes).is_err());
        prop_assert!(SegmentHeader::parse(LOG, 64 << 10, &bytes).is_err());
        prop_assert!(summary.parse(LOG, &bytes, &mut Vec::new()).is_err());
        prop_assert!(Footer::parse(LOG, &bytes).is_err());
        prop_assert!(position.parse(LOG, 5, &bytes).is_err());
    }
}
