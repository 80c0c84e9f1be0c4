//! Copies of which the driver refuses a call, each call in its turn: what is said to be copied is,
//! and when the copy returns nothing of it is under way any more.

use crate::common::{Fake, Host, World, alone, pattern};
use crate::copy_stream::pages;
use forebay_cuda::CopierOptions;
use forebay_cuda::device::{DeviceMemory, Event, Stream};
use forebay_cuda::kernels::Piece;
use forebay_cuda::links::Direction;
use forebay_cuda::rates::Rates;
use forebay_cuda::stream_copy::DeclineReason;
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::Duration;

const MIB: u64 = 1 << 20;
const CALLS: [&str; 5] =
    ["cuMemcpyBatchAsync", "cuMemcpyAsync", "cuLaunchKernel", "cuEventRecord", "cuStreamWaitEvent"];

/// Memory to copy between.
struct Site<'a> {
    world: &'a World<'a>,
    page: u64,
    bytes: u64,
    source: Arc<Host>,
    target: Arc<Host>,
    memory: DeviceMemory,
}

impl Site<'_> {
    fn new<'a>(world: &'a World<'a>, page: u64, bytes: u64) -> Site<'a> {
        let (source, target, memory) = (world.host(bytes), world.host(bytes), world.memory(0, 2 * bytes));
        Site { world, page, bytes, source, target, memory }
    }

    /// Copies there and back, one of the two with a call refused, and then both with none. Says
    /// whether there was such a call.
    fn there_and_back(&self, refused_way: Direction, refused: &str) -> bool {
        let mut was_met = false;
        for seed in 1..3 {
            self.source.fill(&pattern(seed, self.bytes));
            let mut is_copied = true;
            for (way, host) in
                [(Direction::HostToDevice, &self.source), (Direction::DeviceToHost, &self.target)]
            {
                let pieces = pages(way, host.address(), self.memory.address(), self.page, self.bytes);
                let is_refused = seed == 1 && way == refused_way;
                self.world.fake.control(if is_refused { refused } else { "" });
                // SAFETY: all memory outlives the copies, and nothing else uses it.
                let copied = unsafe { self.world.copier.copy_and_wait(0, way, &pieces) };
                was_met |= is_refused && self.world.fake.stat("live.failing") == 0;
                self.world.fake.control("mend");
                assert!(copied.is_ok() || is_refused, "after {refused}: {copied:?}");
                is_copied &= copied.is_ok();
            }
            assert!(!is_copied || self.target.bytes() == pattern(seed, self.bytes), "{refused}");
        }
        was_met
    }
}

/// Copies of a run, of small pages, and of pages that batches take.
fn with_each_call_refused(options: CopierOptions, fake: &Fake) {
    let world = fake.world(options);
    for (page, bytes) in [(6 * MIB, 6 * MIB), (16 << 10, 2 * MIB), (64 << 10, 4 * MIB)] {
        let site = Site::new(&world, page, bytes);
        for (way, call) in Direction::BOTH.into_iter().flat_map(|way| CALLS.map(|call| (way, call))) {
            let met = |nth: &u64| site.there_and_back(way, &format!("fail {call} {nth} 719"));
            assert!((1..1000).take_while(met).count() < 999, "{call} in copies of {bytes} bytes");
        }
    }
    world.end();
}

#[test]
fn a_refused_call_costs_a_stream_copy_at_most_and_leaves_nothing_under_way() {
    alone("refused::a_refused_call_costs_a_stream_copy_at_most_and_leaves_nothing_under_way", &[], |fake| {
        with_each_call_refused(CopierOptions::default(), fake);
    });
}

#[test]
fn a_refused_call_costs_a_transfer_at_most_and_leaves_nothing_under_way() {
    alone("refused::a_refused_call_costs_a_transfer_at_most_and_leaves_nothing_under_way", &[], |fake| {
        let movers = |rates: Rates, way| rates.with(way, |own| own.mover_bytes = MIB);
        let rates = Direction::BOTH.into_iter().fold(Rates::default(), movers);
        with_each_call_refused(CopierOptions { rates: Some(rates), ..CopierOptions::default() }, fake);
    });
}

/// Queues a stream copy with a call refused and another one behind it, in a stream that goes on
/// only then. Says whether there was such a call.
fn two_in_a_stream(world: &World, refused: &str) -> bool {
    let (page, bytes) = (16 << 10, 2 * MIB);
    let (first, second) = (Site::new(world, page, bytes), Site::new(world, page, bytes));
    first.source.fill(&pattern(1, bytes));
    second.source.fill(&pattern(2, bytes));
    let device = first.memory.device();
    let (stream, before) = (Stream::new(device).unwrap(), world.host(2 * bytes));
    before.fill(&pattern(3, 2 * bytes));
    let _current = device.enter().unwrap();
    // SAFETY: all memory outlives the streams' work, and nothing else uses it.
    unsafe { stream.copy(before.address(), second.memory.address(), 2 * bytes).unwrap() };
    stream.synchronize().unwrap();
    before.fill(&vec![0; 2 * bytes as usize]);
    let held = world.fake.hold(device, stream.handle());
    let load = |site: &Site| {
        let there = pages(Direction::HostToDevice, site.source.address(), site.memory.address(), page, bytes);
        // SAFETY: as above.
        unsafe { world.copier.copy_in_stream(&there, stream.handle()) }
    };
    world.fake.control(refused);
    let queued = load(&first);
    let was_met = world.fake.stat("live.failing") == 0;
    world.fake.control("mend");
    // SAFETY: as above.
    unsafe { stream.copy(second.memory.address(), before.address(), 2 * bytes).unwrap() };
    let behind = load(&second).unwrap();
    assert!(behind.is_none() || (was_met && behind == Some(DeclineReason::Busy)), "{refused}: {behind:?}");
    held.release();
    stream.synchronize().unwrap();
    world.copier.stream_copies().settle_direction(0, Direction::HostToDevice);
    assert!(queued.is_ok() || was_met, "{refused}: {queued:?}");
    assert!(
        before.bytes() == pattern(3, 2 * bytes),
        "{refused}: what comes later was copied before its time"
    );
    let back = pages(Direction::DeviceToHost, second.target.address(), second.memory.address(), page, bytes);
    // SAFETY: as above.
    unsafe { world.copier.copy_and_wait(0, Direction::DeviceToHost, &back).unwrap() };
    assert!(second.target.bytes() == pattern(2, bytes), "{refused}");
    assert_eq!(load(&first).unwrap(), None, "{refused}: stream copies go on once nothing is under way");
    stream.synchronize().unwrap();
    was_met
}

#[test]
fn a_stream_copy_whose_end_nobody_knows_keeps_its_lists() {
    alone("refused::a_stream_copy_whose_end_nobody_knows_keeps_its_lists", &[], |fake| {
        let world = fake.world(CopierOptions::default());
        for call in ["cuEventRecord", "cuStreamWaitEvent"] {
            let met = |nth: &u64| two_in_a_stream(&world, &format!("fail {call} {nth} 719"));
            assert!((1..1000).take_while(met).count() < 999, "{call}");
        }
        // What the refused stream copy left behind is in no order with the driver's copy of the
        // same bytes, and is counted.
    });
}

#[test]
fn a_refused_copy_waits_for_no_stream_copy_of_another_gpus() {
    alone("refused::a_refused_copy_waits_for_no_stream_copy_of_another_gpus", &[], |fake| {
        let world = fake.world(CopierOptions::default());
        let bytes = 24 * MIB;
        let (other, memory) = (world.host(bytes), world.memory(1, bytes));
        let stuck = Stream::new(memory.device()).unwrap();
        let current = memory.device().enter().unwrap();
        let held = fake.hold(memory.device(), stuck.handle());
        let whole = [Piece { from: other.address(), to: memory.address(), bytes }];
        // SAFETY: all memory outlives the copies, and nothing else uses it.
        assert_eq!(unsafe { world.copier.copy_in_stream(&whole, stuck.handle()).unwrap() }, None);
        drop(current);
        let site = Site::new(&world, 16 << 10, 2 * MIB);
        let (over, copied) = channel();
        let releasing = std::thread::spawn(move || {
            let ended_first = copied.recv_timeout(Duration::from_secs(5)).is_ok();
            held.release();
            (held, ended_first)
        });
        assert!(site.there_and_back(Direction::HostToDevice, "fail cuLaunchKernel 1 719"));
        // Nobody hears it any more where the copy came second.
        let _ = over.send(());
        let (held, ended_first) = releasing.join().unwrap();
        stuck.synchronize().unwrap();
        assert!(ended_first, "it waited for a stream that somebody else holds up");
        drop((stuck, held, memory, site));
        world.end();
    });
}

/// Queues a stream copy with an event's record refused, whose kernels are late, and another one.
/// Says whether there was such a call.
fn with_late_kernels(world: &World, way: Direction, nth: u64) -> bool {
    let (page, bytes) = (16 << 10, 2 * MIB);
    let sites = [Site::new(world, page, bytes), Site::new(world, page, bytes)];
    let device = sites[0].memory.device();
    let (stream, behind) = (Stream::new(device).unwrap(), Event::new(device).unwrap());
    let _current = device.enter().unwrap();
    let copy = |site: &Site| {
        let pieces = pages(way, site.target.address(), site.memory.address(), page, bytes);
        // SAFETY: all memory outlives the streams' work, and nothing else uses it.
        unsafe { world.copier.copy_in_stream(&pieces, stream.handle()) }
    };
    world.fake.control("freeze compute.0");
    let launched = world.fake.stat("cuLaunchKernel");
    world.fake.control(&format!("fail cuEventRecord {nth} 719"));
    let first = copy(&sites[0]);
    let (was_met, launched) =
        (world.fake.stat("live.failing") == 0, world.fake.stat("cuLaunchKernel") > launched);
    world.fake.control("mend");
    behind.record(&stream).unwrap();
    std::thread::sleep(Duration::from_millis(5));
    let is_over = behind.is_passed().unwrap();
    let second = copy(&sites[1]).unwrap();
    world.fake.control("release compute.0");
    stream.synchronize().unwrap();
    world.copier.stream_copies().settle_direction(0, way);
    assert!(first.is_ok() || was_met, "{way:?} {nth}: {first:?}");
    let is_safe = !launched || !is_over || second == Some(DeclineReason::Busy);
    assert!(is_safe, "{way:?} {nth}: the stream went on before a kernel that reads its list later");
    was_met
}

#[test]
fn no_kernel_is_left_behind_unless_its_lists_are_kept() {
    alone("refused::no_kernel_is_left_behind_unless_its_lists_are_kept", &[], |fake| {
        let world = fake.world(CopierOptions::default());
        for way in Direction::BOTH {
            let met = |nth: &u64| with_late_kernels(&world, way, *nth);
            assert!((1..1000).take_while(met).count() < 999, "{way:?}");
        }
    });
}

#[test]
fn a_copy_that_is_refused_before_it_has_the_set_waits_for_no_stream_copy_of_another_stream() {
    alone(
        "refused::a_copy_that_is_refused_before_it_has_the_set_waits_for_no_stream_copy_of_another_stream",
        &[],
        |fake| {
            let world = fake.world(CopierOptions::default());
            let (page, bytes) = (16 << 10, 2 * MIB);
            let (stuck_site, site) = (Site::new(&world, page, bytes), Site::new(&world, page, bytes));
            let device = stuck_site.memory.device();
            let stuck = Stream::new(device).unwrap();
            let current = device.enter().unwrap();
            let held = fake.hold(device, stuck.handle());
            let there = pages(
                Direction::HostToDevice,
                stuck_site.source.address(),
                stuck_site.memory.address(),
                page,
                bytes,
            );
            // SAFETY: all memory outlives the copies, and nothing else uses it.
            assert_eq!(unsafe { world.copier.copy_in_stream(&there, stuck.handle()).unwrap() }, None);
            drop(current);
            let (over, copied) = channel();
            let releasing = std::thread::spawn(move || {
                let ended_first = copied.recv_timeout(Duration::from_secs(5)).is_ok();
                held.release();
                (held, ended_first)
            });
            assert!(site.there_and_back(Direction::HostToDevice, "fail cuStreamGetId 1 719"));
            let _ = over.send(());
            let (held, ended_first) = releasing.join().unwrap();
            stuck.synchronize().unwrap();
            assert!(ended_first, "it waited for a stream that somebody else holds up");
            drop((stuck, held, stuck_site, site));
            world.end();
        },
    );
}
