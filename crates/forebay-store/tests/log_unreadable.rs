//! What a log must do on a disk of which parts cannot be read, for a moment or for good: never lose what it could read
//! a moment later.
#![allow(clippy::unwrap_used)]

#[allow(dead_code, reason = "each test file uses a part of the simulation")]
mod sim;

use forebay_store::TenantId;
use forebay_store::log::*;
use sim::{Host, SimDisk, config, disks, id, shape};

const TENANT: TenantId = TenantId(3);
const PAGE: u64 = PAGE_BYTES as u64;
const NONE: Vec<u64> = Vec::new();
/// Chunks of the log, all of them durable. The segment of the last ones is open.
const CHUNKS: u64 = 28;

fn layout() -> Layout {
    Layout::with_journal(1 << 20, 64 << 10, 16 << 10).unwrap()
}

/// A log that was not closed, with a checkpoint, journal blocks since, sealed segments and an open one.
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
