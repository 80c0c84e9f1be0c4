//! What holds for every driver without faults.

use crate::world::{DISK, PAGE, World, faulty_world, for_each_driver, world};
use forebay_torture::faults::Ending;
use forebay_torture::faulty_kernel::Gate;
use forebay_transfer::HostLink;
use forebay_transfer::{
    Class, End, HostBuffer, LinkSpec, PathSpec, Place, RegionId, Span, SpanPair, Staging, Transfer,
};
use proptest::prelude::*;
use proptest::test_runner::TestRunner;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::time::Duration;

/// Pages of disk and of memory that the larger tests use.
const PAGES: u64 = 1024;

#[test]
fn what_was_written_is_read_however_memory_is_scattered() {
    for_each_driver(|driver| {
        let world = world(driver, PAGES * PAGE);
        let written = world.fill(0, PAGES, 1);
        // Blocks of 3 pages go to disk in reverse order, in transfers of 16 blocks.
        let blocks: Vec<_> =
            (0..PAGES / 3).map(|block| (block * 3, (PAGES / 3 - 1 - block) * 3, 3)).collect();
        blocks.chunks(16).for_each(|blocks| world.run_fully(world.writing(blocks)));
        world.fill(0, PAGES, 2);
        let upwards: Vec<_> = blocks.iter().rev().copied().collect();
        upwards.chunks(40).for_each(|blocks| world.run_fully(world.reading(blocks)));
        let used = PAGES / 3 * 3;
        assert!(world.bytes(0, used) == written[..(used * PAGE) as usize], "{driver:?}");
    });
}

#[test]
fn transfers_of_any_size_are_cut_where_direct_io_can_go_on() {
    const PAGES: u64 = (32 << 20) / PAGE;
    for_each_driver(|driver| {
        let world = world(driver, PAGES * PAGE);
        let far = add_staged_routes(&world, [25, 9]);
        // Blocks of 84 KiB and of a page, with gaps, and all as one.
        let block = |at: u64| (at, PAGES - 24 - at, if at.is_multiple_of(5) { 1 } else { 21 });
        let blocks: Vec<_> = (0..PAGES - 24).step_by(24).map(block).collect();
        for blocks in [&blocks[..], &[(0, 0, PAGES)]] {
            for is_far in [false, true] {
                let written = world.fill(0, PAGES, 1);
                world.run_fully(world.writing(blocks));
                world.fill(0, PAGES, 2);
                let mut reading = world.reading(blocks);
                let target = if is_far { far } else { world.memory };
                reading.pairs.iter_mut().for_each(|pair| pair.to.region = target);
                world.run_fully(reading);
                for (page, _, pages) in blocks {
                    let bytes = (page * PAGE) as usize..((page + pages) * PAGE) as usize;
                    assert!(world.bytes(*page, *pages) == written[bytes], "{driver:?}: page {page}");
                }
            }
        }
    });
}

/// Makes the world's memory reachable as another place, by a route for each size of slots, in
/// pages.
fn add_staged_routes(world: &World, slot_pages: [u64; 2]) -> RegionId {
    const FAR: Place = Place::Host(2);
    let copies = Box::new(HostLink::new(1).unwrap());
    let copies = world.mover.add_link(LinkSpec::new("copies", 2, 64 << 20), copies).unwrap();
    for pages in slot_pages {
        let memory = Arc::new(HostBuffer::new((4 * pages * PAGE) as usize));
        let region = world.mover.register(Place::Host(1), memory).unwrap();
        let staging = Staging { region, slots: 4, slot_bytes: pages * PAGE };
        let route = PathSpec::relayed(DISK, FAR, [world.link, copies], staging, false);
        world.mover.add_path(route).unwrap().unwrap();
    }
    world.mover.register(FAR, Arc::clone(&world.buffer) as _).unwrap()
}

/// One transfer of random pairs: to disk or from it, then for each pair the pages that it skips and
/// its own.
type Step = (bool, u64, Vec<(u64, u64)>);

fn any_steps() -> impl Strategy<Value = Vec<Step>> {
    let pairs = proptest::collection::vec((0u64..4, 1u64..8), 1..12);
    proptest::collection::vec((any::<bool>(), 0u64..60, pairs), 1..40)
}

#[test]
fn any_sequence_of_transfers_behaves_like_copies_between_two_arrays() {
    for_each_driver(|driver| {
        let world = world(driver, 128 * PAGE);
        let mut runner = TestRunner::new(ProptestConfig::with_cases(12));
        let ran = runner.run(&any_steps(), |steps| {
            let (mut memory, mut disk) = (world.fill(0, 128, steps.len() as u64), world.file_bytes(0, 128));
            for (to_disk, first, pairs) in steps {
                // Pairs go up on disk and down in memory, so that none overlap.
                let (mut on_disk, mut in_memory, mut pages) = (first, 128, Vec::new());
                for (skip, len) in pairs {
                    (on_disk, in_memory) = (on_disk + skip + len, in_memory - skip - len);
                    pages.push((in_memory, on_disk - len, len));
                }
                pages.retain(|(_, on_disk, len)| on_disk + len <= 128);
                world.run_fully(if to_disk { world.writing(&pages) } else { world.reading(&pages) });
                for (in_memory, on_disk, len) in pages {
                    let [in_memory, on_disk] = [in_memory, on_disk]
                        .map(|page| (page * PAGE) as usize..((page + len) * PAGE) as usize);
                    match to_disk {
                        true => disk[on_disk].copy_from_slice(&memory[in_memory]),
                        false => memory[in_memory].copy_from_slice(&disk[on_disk]),
                    }
                }
            }
            prop_assert!(world.bytes(0, 128) == memory && world.file_bytes(0, 128) == disk);
            Ok(())
        });
        ran.unwrap_or_else(|error| panic!("{driver:?}: {error}"));
    });
}

#[test]
fn bytes_land_in_the_file_where_the_span_says() {
    for_each_driver(|driver| {
        let world = world(driver, 16 * PAGE);
        let written = world.fill(3, 2, 7);
        world.run_fully(world.writing(&[(3, 9, 2)]));
        assert!(world.file_bytes(9, 2) == written);
        assert!(world.file_bytes(0, 9).iter().chain(&world.file_bytes(11, 5)).all(|byte| *byte == 0));
    });
}

#[test]
fn a_region_is_a_window_into_the_file() {
    for_each_driver(|driver| {
        let world = world(driver, 16 * PAGE);
        let part = world.disk.register(&world.mover, DISK, 4 * PAGE, 2 * PAGE).unwrap();
        let written = world.fill(0, 2, 3);
        let pair = SpanPair::new(Span::new(world.memory, 0, 2 * PAGE), Span::new(part, 0, 2 * PAGE));
        world.run_fully(Transfer::new(vec![pair], Class::WriteBack));
        assert!(world.file_bytes(4, 2) == written);
        let unregistered = world.mover.unregister(part).unwrap();
        assert_eq!(unregistered, Ok(()));
        for (base, len) in
            [(0, 17 * PAGE), (15 * PAGE, 2 * PAGE), (512, PAGE), (0, 100), (0, 0), (u64::MAX, PAGE)]
        {
            assert!(world.disk.register(&world.mover, DISK, base, len).is_err(), "{base} {len}");
        }
    });
}

#[test]
fn a_layer_into_scattered_blocks_is_one_io() {
    for_each_driver(|driver| {
        let world = world(driver, 64 * PAGE);
        let blocks: Vec<_> = (0..16).map(|block| (60 - block * 4, block * 2, 2)).collect();
        world.run_fully(world.reading(&blocks));
        assert_eq!(world.disk.stats().ios, 1, "{driver:?}");
        assert_eq!(world.disk.stats().read_bytes, 32 * PAGE);
    });
}

#[test]
fn unaligned_spans_are_errors_that_name_the_value_and_write_nothing() {
    for_each_driver(|driver| {
        let world = world(driver, 16 * PAGE);
        world.fill(0, 16, 5);
        for (memory, disk, len, named) in [
            (0, 512, PAGE, "file offset 512"),
            (64, 0, PAGE, "memory address"),
            (0, 0, 100, "length 100"),
            (0, 0, PAGE + 8, "length 4104"),
        ] {
            let good = SpanPair::new(Span::new(world.memory, 0, PAGE), Span::new(world.kept, 8 * PAGE, PAGE));
            let bad = SpanPair::new(Span::new(world.memory, memory, len), Span::new(world.kept, disk, len));
            let error = world.error_of(Transfer::new(vec![good, bad], Class::WriteBack));
            assert!(error.contains(named), "{driver:?}: {error}");
        }
        assert!(world.file_bytes(0, 16).iter().all(|byte| *byte == 0));
        assert_eq!(world.disk.stats().written_bytes, 0);
    });
}

#[test]
fn operations_of_many_threads_do_not_mix() {
    for_each_driver(|driver| {
        let world = world(driver, PAGES * PAGE);
        let written = world.fill(0, PAGES / 2, 11);
        let (ends, received) = mpsc::channel();
        std::thread::scope(|scope| {
            for thread in 0..4 {
                let (world, ends) = (&world, ends.clone());
                scope.spawn(move || write_then_read(world, thread, &ends));
            }
        });
        drop(ends);
        assert_eq!(received.iter().count(), 4 * 32 * 2);
        assert!(world.bytes(PAGES / 2, PAGES / 2) == written, "{driver:?}");
    });
}

/// Writes a quarter of the first half of memory in transfers of 4 pages, all at once, then reads it
/// into the second half.
fn write_then_read(world: &World, thread: u64, ends: &mpsc::Sender<u64>) {
    let share = PAGES / 8;
    for into_second_half in [false, true] {
        let (sender, receiver) = mpsc::channel();
        for page in (thread * share..(thread + 1) * share).step_by(4) {
            let transfer = match into_second_half {
                false => world.writing(&[(page, page, 4)]),
                true => world.reading(&[(page + PAGES / 2, page, 4)]),
            };
            let sender = sender.clone();
            world.mover.submit(transfer, move |end| sender.send(end).unwrap()).unwrap();
        }
        drop(sender);
        for end in receiver {
            assert_eq!(end, End::Done { bytes: 4 * PAGE });
            ends.send(4 * PAGE).unwrap();
        }
    }
}

#[test]
fn pinned_memory_holds_the_same_bytes() {
    for_each_driver(|driver| {
        let world = world(driver, PAGES * PAGE);
        match world.disk.pin(Arc::clone(&world.buffer) as _) {
            Ok(()) => assert!(world.disk.pin(Arc::clone(&world.buffer) as _).is_err(), "pinned twice"),
            Err(error) => testkit::skipped(format_args!("{driver:?}: {error}")),
        }
        let written = world.fill(0, PAGES, 1);
        let pages = (0..PAGES).step_by(32);
        pages.clone().for_each(|page| world.run_fully(world.writing(&[(page, PAGES - 32 - page, 32)])));
        world.fill(0, PAGES, 2);
        pages.for_each(|page| {
            // One piece, and two that are apart in memory but one I/O.
            let half = [(page, PAGES - 32 - page, 16), (page + 16, PAGES - 16 - page, 16)];
            world.run_fully(world.reading(if page % 64 == 0 { &half[..] } else { &half[..1] }));
            world.run_fully(world.reading(&half[1..]));
        });
        assert!(world.bytes(0, PAGES) == written, "{driver:?}");
    });
}

#[test]
fn a_cancelled_operation_is_quiet_at_its_end() {
    for_each_driver(|driver| {
        let gate = Gate::default();
        let world = faulty_world(driver, 16 * PAGE, gate.clone(), |_| (Ending::Honest, 0));
        gate.close();
        let (ends, received) = mpsc::channel();
        let transfer = world.reading(&[(0, 0, 4)]);
        let submitted = world.mover.submit(transfer, move |end| ends.send(end).unwrap()).unwrap();
        while world.mover.telemetry().unwrap().links[0].in_flight_lots == 0 {
            std::thread::yield_now();
        }
        world.mover.cancel(submitted);
        assert!(
            received.recv_timeout(Duration::from_millis(50)).is_err(),
            "ended while an I/O was under way"
        );
        gate.open();
        let end = received.recv().unwrap();
        assert_eq!(end, End::Cancelled { moved_bytes: 4 * PAGE, quarantined: Vec::new() });
    });
}

#[test]
fn the_file_closes_after_the_last_operation_and_not_before() {
    for_each_driver(|driver| {
        let gate = Gate::default();
        let mut world = faulty_world(driver, 16 * PAGE, gate.clone(), |_| (Ending::Honest, 0));
        let written = world.fill(0, 4, 9);
        assert!(descriptors_of(&world) > 0);
        gate.close();
        let transfer = world.writing(&[(0, 0, 4)]);
        world.mover.submit(transfer, |_| ()).unwrap();
        while world.mover.telemetry().unwrap().links[0].in_flight_lots == 0 {
            std::thread::yield_now();
        }
        let opened = Arc::new(AtomicBool::new(false));
        let (opener, opens) = (gate.clone(), Arc::clone(&opened));
        let opening = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(50));
            opens.store(true, Ordering::SeqCst);
            opener.open();
        });
        world.end();
        assert!(opened.load(Ordering::SeqCst), "ended while an I/O was under way");
        opening.join().unwrap();
        assert_eq!(descriptors_of(&world), 0, "{driver:?}");
        assert!(world.file_bytes(0, 4) == written);
    });
}

/// Descriptors of this process that refer to the world's file.
fn descriptors_of(world: &World) -> usize {
    let path = world.path.canonicalize().unwrap();
    let links = std::fs::read_dir("/proc/self/fd").unwrap();
    links.filter(|link| std::fs::read_link(link.as_ref().unwrap().path()).is_ok_and(|to| to == path)).count()
}
