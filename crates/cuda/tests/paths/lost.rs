//! Relays whose context is lost while copies are under way, or before: no copy ends as success with
//! bytes that did not arrive, and copies go on over the others. And calls that are refused once: no
//! direction ends with them.

use crate::common::{Log, World, alone, pattern};
use crate::copy_stream::pages;
use forebay_cuda::CopierOptions;
use forebay_cuda::device::Stream;
use forebay_cuda::kernels::Piece;
use forebay_cuda::links::Direction;
use forebay_cuda::stream_copy::DeclineReason;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

const MIB: u64 = 1 << 20;
const BYTES: u64 = 12 * MIB;

fn over(world: &World, gpu: u16) -> u64 {
    world.fake.stat(&format!("bytes.h2d.{gpu}")) + world.fake.stat(&format!("bytes.d2h.{gpu}"))
}

#[test]
fn a_relay_that_was_lost_carries_nothing_and_the_others_go_on() {
    alone("lost::a_relay_that_was_lost_carries_nothing_and_the_others_go_on", &[], |fake| {
        let log = Log::start();
        let world = fake.world(CopierOptions::default());
        let (source, target, memory) = (world.host(BYTES), world.host(BYTES), world.memory(0, BYTES));
        let stream = Stream::new(memory.device()).unwrap();
        fake.control("poison 1 700");
        for seed in 0..3 {
            source.fill(&pattern(seed, BYTES));
            let before = [over(&world, 1), over(&world, 2)];
            let _current = memory.device().enter().unwrap();
            for (from, to) in [(source.address(), memory.address()), (memory.address(), target.address())] {
                let whole = [Piece { from, to, bytes: BYTES }];
                // SAFETY: all memory outlives the stream's work.
                let declined = unsafe { world.copier.copy_in_stream(&whole, stream.handle()).unwrap() };
                assert_eq!(declined, None, "the other relay is there");
                stream.synchronize().unwrap();
            }
            assert!(target.bytes() == pattern(seed, BYTES));
            assert_eq!(over(&world, 1), before[0], "the relay that was lost had a part in it");
            assert!(over(&world, 2) > before[1], "the other relay had none");
        }
        assert_eq!(world.copier.stream_copies().losses(), 2, "in each direction");
        assert_eq!(log.count("relay lost gpu=1 reason="), 1);
    });
}

/// Loses a relay while a copy of each kind is under way, in both directions.
fn lose_meanwhile(how: &'static str, name: &str, expects_success: bool) {
    for way in [Direction::HostToDevice, Direction::DeviceToHost] {
        for page in [BYTES, 64 << 10] {
            let (test, case) = (format!("lost::{name}"), format!("{way:?} {page}"));
            alone(&test, &[("CASE", &case)], |fake| {
                // Each in a process of its own: what is lost there stays lost.
                if std::env::var("CASE").is_ok_and(|chosen| chosen != case) {
                    return;
                }
                let world = fake.world(CopierOptions::default());
                let (host, memory) = (world.host(BYTES), world.memory(0, 2 * BYTES));
                let (there, back) = (Direction::HostToDevice, Direction::DeviceToHost);
                let pieces = |way| pages(way, host.address(), memory.address(), page, BYTES);
                let copy = |way| {
                    // SAFETY: all memory outlives the copies, and nothing else uses it.
                    unsafe { world.copier.copy_and_wait(0, way, &pieces(way)) }
                };
                host.fill(&pattern(1, BYTES));
                copy(there).unwrap();
                let engine = if way == there { "h2d.1" } else { "d2h.1" };
                if way == there {
                    host.fill(&pattern(2, BYTES));
                } else {
                    host.fill(&vec![0; BYTES as usize]);
                }
                fake.control(&format!("freeze {engine}"));
                let (is_over, asked) = (AtomicBool::new(false), fake.stat("cuEventQuery"));
                let copied = std::thread::scope(|scope| {
                    let copied = scope.spawn(|| {
                        let copied = copy(way);
                        is_over.store(true, Ordering::Release);
                        copied
                    });
                    // All is queued when the end is asked for again and again. The relay has its
                    // part, which it never finishes.
                    while fake.stat("cuEventQuery") < asked + 100 && !is_over.load(Ordering::Acquire) {
                        std::thread::yield_now();
                    }
                    assert!(!is_over.load(Ordering::Acquire), "no relay had a part in it");
                    fake.control(&format!("{how} 1 700; release {engine}"));
                    copied.join().unwrap()
                });
                assert_eq!(copied.is_ok(), expects_success, "{copied:?}");
                if copied.is_ok() {
                    if way == there {
                        host.fill(&vec![0; BYTES as usize]);
                        copy(back).unwrap();
                    }
                    let seed = if way == there { 2 } else { 1 };
                    assert!(host.bytes() == pattern(seed, BYTES), "success, and wrong bytes");
                }
            });
        }
    }
}

#[test]
fn a_copy_whose_relay_is_lost_meanwhile_does_not_end_as_success() {
    lose_meanwhile("poison", "a_copy_whose_relay_is_lost_meanwhile_does_not_end_as_success", false);
}

#[test]
fn a_copy_whose_relay_is_lost_meanwhile_is_right_also_where_the_driver_says_nothing() {
    let name = "a_copy_whose_relay_is_lost_meanwhile_is_right_also_where_the_driver_says_nothing";
    lose_meanwhile("abandon", name, true);
}

/// Copies in a stream with a call refused, and again. Says whether there was such a call.
fn goes_on(world: &World, way: Direction, page: u64, refused: &str) -> bool {
    let bytes = 4 * MIB;
    let (host, memory) = (world.host(bytes), world.memory(0, 2 * bytes));
    let stream = Stream::new(memory.device()).unwrap();
    let _current = memory.device().enter().unwrap();
    let copy = || {
        let pieces = pages(way, host.address(), memory.address(), page, bytes);
        // SAFETY: all memory outlives the stream's work.
        let copied = unsafe { world.copier.copy_in_stream(&pieces, stream.handle()) };
        stream.synchronize().unwrap();
        copied
    };
    world.fake.control(refused);
    let first = copy();
    let was_met = world.fake.stat("live.failing") == 0;
    world.fake.control("mend");
    assert!(first.is_ok() || was_met, "{refused}: {first:?}");
    // What was left behind of the refused stream copy ends by itself.
    let is_taken = (0..500).any(|_| {
        let again = copy().unwrap();
        assert!(again.is_none() || again == Some(DeclineReason::Busy), "{refused}: {again:?}");
        if again.is_some() {
            std::thread::sleep(Duration::from_millis(2));
        }
        again.is_none()
    });
    assert!(is_taken, "{way:?}, {refused}: the direction has ended");
    was_met
}

#[test]
fn a_refused_call_ends_no_direction_for_ever() {
    alone("lost::a_refused_call_ends_no_direction_for_ever", &[], |fake| {
        let world = fake.world(CopierOptions::default());
        for (page, call) in [4 * MIB, 16 << 10]
            .into_iter()
            .flat_map(|page| ["cuEventRecord", "cuStreamWaitEvent", "cuMemcpyAsync"].map(|call| (page, call)))
        {
            for way in Direction::BOTH {
                let met = |nth: &u64| goes_on(&world, way, page, &format!("fail {call} {nth} 2"));
                assert!((1..1000).take_while(met).count() < 999, "{way:?} {call}");
            }
        }
    });
}
