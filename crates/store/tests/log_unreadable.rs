//! What a log must do on a disk of which parts cannot be read, for a moment or for good: never lose
//! what it could read a moment later, unless it is told to give up what can never be read, and then
//! nothing else.
#![allow(clippy::unwrap_used)]

#[allow(dead_code, reason = "each test file uses a part of the simulation")]
mod sim;

use forebay_store::TenantId;
use forebay_store::log::*;
use sim::{Host, SimDisk, config, disks, id, shape};
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};

const TENANT: TenantId = TenantId(3);
const PAGE: u64 = PAGE_BYTES as u64;
const NONE: Vec<u64> = Vec::new();
/// Chunks of the log, all of them durable. The segment of the last ones is open.
const CHUNKS: u64 = 28;

fn layout() -> Layout {
    Layout::with_journal(1 << 20, 64 << 10, 16 << 10).unwrap()
}

/// A log that was not closed, with a checkpoint, journal blocks since, sealed segments and an open
/// one.
fn filled() -> SimDisk {
    let disk = disks(1).remove(0);
    let mut host = Host::open(&config(), std::slice::from_ref(&disk)).unwrap();
    for number in 0..CHUNKS {
        assert!(host.store(TENANT, &id(number), None, &shape(0)).unwrap());
        host.commit().unwrap();
    }
    disk
}

fn open(disk: &SimDisk) -> Result<Host, NotOpened> {
    Host::open(&config(), std::slice::from_ref(disk))
}

fn missing(host: &Host) -> Vec<u64> {
    (0..CHUNKS).filter(|number| !host.tier.contains(&id(*number))).collect()
}

/// Whether a page tells which segments hold what, and nothing else does.
fn is_needed(layout: &Layout, disk: &SimDisk, page: u64) -> bool {
    let area = |area: &Area| (area.offset..area.offset + area.bytes).contains(&page);
    let image = disk.image();
    let magic = &image[page as usize..page as usize + 8];
    // The body of a checkpoint of so few segments is one page.
    let in_checkpoint = |area: &Area| page == area.offset || page == area.offset + PAGE;
    layout.checkpoints.iter().any(in_checkpoint)
        || area(&layout.journal)
        || magic == b"FBLOGSEG"
        || (magic == b"FBLOGFTR" && page >= layout.segment_at(CHUNKS as u32 / 5))
}

#[test]
fn a_page_that_cannot_be_read_costs_nothing_or_keeps_the_log_closed_until_it_can() {
    let disk = filled();
    let image = disk.image();
    let layout = layout();
    let mut refused = Vec::new();
    for page in (0..image.len() as u64).step_by(PAGE_BYTES) {
        disk.set_image(&image);
        disk.make_unreadable(page..page + PAGE, false);
        match open(&disk) {
            Ok(host) => assert_eq!(missing(&host), NONE, "page {page}"),
            Err(NotOpened::Io { offset, .. }) => {
                assert_eq!(offset, page);
                assert!(disk.image() == image, "page {page}: written to, although it was not opened");
                assert!(is_needed(&layout, &disk, page), "page {page} is not needed");
                refused.push(page);
            }
            Err(other) => panic!("page {page}: {other}"),
        }
        disk.make_unreadable(0..0, false);
        assert_eq!(missing(&open(&disk).unwrap()), NONE, "page {page} can be read again");
    }
    assert!((5..30).contains(&refused.len()), "{refused:?}");
    let journal = layout.journal.offset..layout.journal.offset + layout.journal.bytes;
    let in_journal = refused.iter().filter(|page| journal.contains(page)).count() as u64;
    assert!(
        in_journal < layout.journal_blocks(),
        "pages behind the journal's end are not needed: {refused:?}"
    );
}

#[test]
fn one_superblock_is_enough_to_find_all_that_was_durable() {
    for place in SUPERBLOCKS_AT {
        let disk = filled();
        disk.make_unreadable(place..place + PAGE, false);
        assert_eq!(missing(&open(&disk).unwrap()), NONE, "the one at {place} cannot be read");
        let disk = filled();
        disk.flip(place as usize * 8 + 800);
        assert_eq!(missing(&open(&disk).unwrap()), NONE, "the one at {place} is damaged");
    }
}

#[test]
fn a_superblock_that_can_never_be_read_keeps_the_log_closed_and_costs_nothing() {
    for place in SUPERBLOCKS_AT {
        let disk = filled();
        disk.make_unreadable(place..place + PAGE, true);
        for _ in 0..2 {
            let refused = open(&disk).map(|_| ()).unwrap_err();
            assert!(matches!(refused, NotOpened::Io { offset, .. } if offset == place), "{refused}");
        }
        disk.make_unreadable(0..0, false);
        assert_eq!(missing(&open(&disk).unwrap()), NONE);
    }
}

#[test]
fn a_disk_that_gives_nothing_is_an_error_at_once_and_not_an_empty_log() {
    let disk = filled();
    let image = disk.image();
    // Without both superblocks, without anything, without any segment.
    let unreadable = [0..2 * SUPERBLOCKS_AT[1], 0..1 << 20, layout().segments_at..1 << 20];
    for stretch in unreadable {
        let before = disk.failed_reads();
        disk.make_unreadable(stretch.clone(), true);
        let refused = open(&disk).map(|_| ()).unwrap_err();
        assert!(
            matches!(refused, NotOpened::Io { offset, .. } if stretch.contains(&offset)),
            "{stretch:?}: {refused}"
        );
        let tries = disk.failed_reads() - before;
        assert!(tries <= 8, "{stretch:?}: {tries} tries");
        assert!(disk.image() == image);
    }
    // One that is damaged does not make the other one, which cannot be read, a file that is no log.
    disk.flip(800);
    disk.make_unreadable(SUPERBLOCKS_AT[1]..SUPERBLOCKS_AT[1] + PAGE, true);
    assert!(matches!(open(&disk), Err(NotOpened::Io { offset, .. }) if offset == SUPERBLOCKS_AT[1]));
}

/// Gives up what cannot be read, and says which pages that were.
fn give_up(disk: &SimDisk) -> (Result<Reopened, NotReopened>, Vec<GivenUp>) {
    let mut pages = Vec::new();
    (give_up_unreadable(disk, |page| pages.push(page)), pages)
}

/// Pages that are not what they were, all of them zeros now.
fn zeroed(disk: &SimDisk, before: &[u8]) -> Vec<u64> {
    let image = disk.image();
    let pages = image.chunks(PAGE_BYTES).zip(before.chunks(PAGE_BYTES)).enumerate();
    let changed = pages.filter(|(_, (now, before))| now != before);
    changed
        .map(|(number, (now, _))| {
            assert!(now.iter().all(|byte| *byte == 0), "page {number}");
            number as u64 * PAGE
        })
        .collect()
}

/// A page is given up and nothing else is; then the log opens. Says which chunks are missing.
fn missing_without(disk: &SimDisk, page: u64, was: PageUse) -> Vec<u64> {
    let before = disk.image();
    disk.make_unreadable(page..page + PAGE, false);
    let (reopened, pages) = give_up(disk);
    let chunks = reopened.unwrap().inspection.recovered.chunks;
    assert_eq!(pages, [GivenUp { offset: page, was }]);
    assert_eq!(zeroed(disk, &before), [page]);
    let missing = missing(&open(disk).unwrap());
    assert_eq!(chunks, CHUNKS - missing.len() as u64);
    missing
}

/// Where a chunk's footer is, and in which segment.
fn footer_of(disk: &SimDisk, number: u64) -> (u64, u32) {
    let mut found = None;
    let look = |chunk: &ChunkInLog| {
        if chunk.copy.id == id(number) {
            found = Some((chunk.slot_at + chunk.shape.footer_at(), chunk.copy.segment));
        }
    };
    inspect(disk, look).unwrap();
    found.unwrap()
}

#[test]
fn a_segments_header_that_is_given_up_costs_its_segment_and_nothing_else() {
    let header = layout().segment_at(2);
    assert_eq!(missing_without(&filled(), header, PageUse::SegmentHeader(2)), [8, 9, 10, 11]);
}

#[test]
fn a_footer_that_is_given_up_costs_its_chunk_and_nothing_else() {
    let disk = filled();
    let (footer, segment) = footer_of(&disk, 26);
    assert_eq!(missing_without(&disk, footer, PageUse::Footer(segment)), [26]);
}

#[test]
fn a_checkpoint_that_is_given_up_costs_nothing_that_the_other_one_and_the_journal_know() {
    for checkpoint in [0, 1] {
        let Area { offset: head, .. } = layout().checkpoints[checkpoint];
        for page in [head, head + PAGE] {
            let missing = missing_without(&filled(), page, PageUse::Checkpoint(checkpoint));
            assert_eq!(missing, NONE, "checkpoint {checkpoint}, page {page}");
        }
    }
}

#[test]
fn of_a_checkpoint_of_many_pages_only_the_one_that_cannot_be_read_is_given_up() {
    let disk = SimDisk::with_log(24 << 20, 64 << 10, 16 << 10);
    let layout = Layout::with_journal(24 << 20, 64 << 10, 16 << 10).unwrap();
    let mut host = open(&disk).unwrap();
    for number in 0..CHUNKS {
        assert!(host.store(TENANT, &id(number), None, &shape(0)).unwrap());
        host.commit().unwrap();
    }
    let second_of_body = layout.checkpoints[0].offset + 2 * PAGE;
    disk.make_unreadable(second_of_body..second_of_body + PAGE, false);
    let refused = open(&disk).map(|_| ()).unwrap_err();
    assert!(matches!(refused, NotOpened::Io { offset, .. } if offset == second_of_body - PAGE), "{refused}");
    let before = disk.image();
    let (reopened, pages) = give_up(&disk);
    reopened.unwrap();
    assert_eq!(pages, [GivenUp { offset: second_of_body, was: PageUse::Checkpoint(0) }]);
    assert_eq!(zeroed(&disk, &before), [second_of_body]);
    open(&disk).unwrap();
}

#[test]
fn a_page_of_the_journal_that_is_given_up_costs_nothing_that_the_open_segment_still_proves() {
    let mut given_up = 0;
    for block in 0..layout().journal_blocks() {
        let disk = filled();
        let (image, page) = (disk.image(), layout().journal.offset + block * PAGE);
        disk.make_unreadable(page..page + PAGE, false);
        let (reopened, pages) = give_up(&disk);
        let chunks = reopened.unwrap().inspection.recovered.chunks;
        assert_eq!(zeroed(&disk, &image).len(), pages.len(), "block {block}");
        assert!(pages.is_empty() || pages == [GivenUp { offset: page, was: PageUse::Journal }], "{pages:?}");
        given_up += pages.len();
        assert_eq!((chunks, missing(&open(&disk).unwrap())), (CHUNKS, NONE), "block {block}");
    }
    assert!((1..layout().journal_blocks() as usize).contains(&given_up), "{given_up}");
}

#[test]
fn a_page_that_can_be_read_after_all_is_never_given_up() {
    let disk = filled();
    let header = layout().segment_at(2);
    // One fails while the log is read, one when the page is looked at, up to three when it is tried
    // again.
    for failures in 1..=4 {
        let image = disk.image();
        let steps = disk.steps();
        disk.fail_reads(header..header + PAGE, failures);
        let (reopened, pages) = give_up(&disk);
        assert_eq!(reopened.unwrap().inspection.recovered.chunks, CHUNKS, "{failures} failures");
        assert_eq!(pages, []);
        assert!(disk.image() == image && disk.steps() == steps, "{failures} failures: written to");
    }
    assert_eq!(missing(&open(&disk).unwrap()), NONE);
}

#[test]
fn nothing_is_given_up_without_a_superblock() {
    let both = 0..SUPERBLOCKS_AT[1] + PAGE;
    let second = SUPERBLOCKS_AT[1]..SUPERBLOCKS_AT[1] + PAGE;
    for (stretch, damaged) in [(both, false), (second, true), (0..1 << 20, false)] {
        let disk = filled();
        if damaged {
            disk.flip(800);
        }
        let (image, steps) = (disk.image(), disk.steps());
        disk.make_unreadable(stretch.clone(), false);
        let (refused, pages) = give_up(&disk);
        assert!(matches!(refused, Err(NotReopened::NoSuperblock(NotOpened::Io { .. }))), "{stretch:?}");
        assert_eq!(pages, []);
        assert!(disk.image() == image && disk.steps() == steps, "{stretch:?}: written to");
    }
}

#[test]
fn superblocks_that_cannot_be_read_for_a_moment_stay_as_they_are() {
    let disk = filled();
    let image = disk.image();
    disk.fail_reads(0..SUPERBLOCKS_AT[1] + PAGE, 4);
    assert_eq!(give_up(&disk).0.unwrap().inspection.recovered.chunks, CHUNKS);
    assert!(disk.image() == image);
}

#[test]
fn one_superblock_that_is_given_up_costs_nothing() {
    for place in SUPERBLOCKS_AT {
        assert_eq!(missing_without(&filled(), place, PageUse::Superblock), NONE, "the one at {place}");
    }
}

#[test]
fn a_disk_that_does_not_give_back_what_is_written_is_given_no_second_page() {
    for page in [SUPERBLOCKS_AT[1], layout().segment_at(2)] {
        let disk = filled();
        let image = disk.image();
        disk.make_unreadable(page..page + PAGE, true);
        let (refused, pages) = give_up(&disk);
        assert!(matches!(refused, Err(NotReopened::StaysUnreadable { offset, .. }) if offset == page));
        assert_eq!(pages, []);
        assert_eq!(zeroed(&disk, &image), [page]);
    }
    let disk = filled();
    let header = layout().segment_at(2);
    disk.make_unreadable(header..header + PAGE, false);
    disk.fail_after(0);
    assert!(matches!(give_up(&disk).0, Err(NotReopened::NotWritten { offset, .. }) if offset == header));
}

#[test]
fn a_log_without_any_checkpoint_that_can_be_read_is_rebuilt_from_what_can() {
    let disk = filled();
    let layout = layout();
    let until_first_header = layout.checkpoints[0].offset..layout.segments_at + PAGE;
    disk.make_unreadable(until_first_header, false);
    let (reopened, pages) = give_up(&disk);
    let Reopened { inspection, rebuilt } = reopened.unwrap();
    assert_eq!(inspection.recovered.chunks, CHUNKS - 4);
    assert_eq!(rebuilt.unwrap().chunks, CHUNKS - 4);
    let was: Vec<PageUse> = pages.iter().map(|page| page.was).collect();
    assert_eq!(was, [PageUse::Checkpoint(0), PageUse::Checkpoint(1), PageUse::SegmentHeader(0)]);
    assert_eq!(missing(&open(&disk).unwrap()), [0, 1, 2, 3]);
}

#[test]
fn whichever_page_can_never_be_read_the_log_opens_and_misses_at_most_a_segment() {
    let disk = filled();
    let image = disk.image();
    for page in (0..image.len() as u64).step_by(PAGE_BYTES) {
        disk.set_image(&image);
        disk.make_unreadable(page..page + PAGE, false);
        let kept_it_closed = inspect(&disk, |_| ()).is_err() || SUPERBLOCKS_AT.contains(&page);
        let (reopened, pages) = give_up(&disk);
        assert!(reopened.is_ok(), "page {page}: {reopened:?}");
        let offsets: Vec<u64> = pages.iter().map(|given_up| given_up.offset).collect();
        assert_eq!(offsets, if kept_it_closed { vec![page] } else { Vec::new() });
        assert_eq!(zeroed(&disk, &image), offsets);
        disk.make_unreadable(0..0, false);
        assert!(missing(&open(&disk).unwrap()).len() <= 4, "page {page}");
    }
}

#[test]
fn a_log_that_can_be_read_stays_as_it_is() {
    let disk = filled();
    let (image, steps) = (disk.image(), disk.steps());
    let (reopened, pages) = give_up(&disk);
    assert_eq!((reopened.unwrap().rebuilt, pages), (None, Vec::new()));
    assert!(disk.image() == image && disk.steps() == steps);
}

#[test]
fn a_disk_of_which_everything_fails_now_and_then_ends_the_search() {
    let disk = filled();
    let header = layout().segment_at(2);
    let before = disk.image();
    let flickering = Flickering { disk: disk.clone(), at: header, reads: AtomicU64::new(0) };
    let refused = give_up_unreadable(&flickering, |page| panic!("{page:?}")).unwrap_err();
    assert!(matches!(refused, NotReopened::TooMany { offset } if offset == header), "{refused}");
    assert!(disk.image() == before);
}

/// A disk of which every other read of a page fails.
struct Flickering {
    disk: SimDisk,
    at: u64,
    reads: AtomicU64,
}

impl Medium for Flickering {
    fn bytes(&self) -> u64 {
        self.disk.bytes()
    }

    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> io::Result<()> {
        let here = (offset..offset + buffer.len() as u64).contains(&self.at);
        match here && self.reads.fetch_add(1, Ordering::Relaxed).is_multiple_of(2) {
            true => Err(io::Error::other("not now")),
            false => self.disk.read_at(offset, buffer),
        }
    }

    fn write_at(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        self.disk.write_at(offset, bytes)
    }

    fn sync(&self) -> io::Result<()> {
        self.disk.sync()
    }

    fn withdraw(&self, offset: u64, bytes: u64) -> io::Result<()> {
        self.disk.withdraw(offset, bytes)
    }

    fn restore(&self, offset: u64, bytes: u64) -> io::Result<()> {
        self.disk.restore(offset, bytes)
    }
}
