//! Copies over all paths, on the fake driver: every byte arrives over whichever path, in the order
//! of the caller's stream.
#![allow(clippy::unwrap_used)]

mod adaptive;
mod checksums;
mod common;
mod copy_stream;
mod cost;
mod lost;
mod refused;
mod untrusted;

use common::{Host, alone, pattern};
use copy_stream::pages;
use forebay_cuda::device::{Event, Stream};
use forebay_cuda::kernels::Piece;
use forebay_cuda::links::Direction;
use forebay_cuda::rates::Rates;
use forebay_cuda::stream_copy::DeclineReason;
use forebay_cuda::{CopierOptions, CopyError, Relay};
use forebay_transfer::{Class, End, Reason, Span, SpanPair, Transfer};
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

const MIB: u64 = 1 << 20;

#[test]
fn every_byte_arrives_over_every_kind_of_relay() {
    alone("every_byte_arrives_over_every_kind_of_relay", &[], |fake| {
        for relay in Relay::ALL {
            let (to_device, to_host) = (Some(relay), Some(relay));
            let world = fake.world(CopierOptions { to_device, to_host, ..CopierOptions::default() });
            let bytes = 24 * MIB + 4096 + 13;
            let (source, target) = (world.host(bytes), world.host(bytes));
            let memory = world.memory(0, bytes);
            source.fill(&pattern(1, bytes));
            let (from, to) = (world.register(&source), world.register(&target));
            // SAFETY: the memory outlives its region, and nothing else uses it.
            let device = unsafe { world.copier.register_device(0, memory.address(), bytes).unwrap() };
            let whole = |region| Span::new(region, 0, bytes);
            let over_peers = || world.fake.stat("bytes.h2d.1") + world.fake.stat("bytes.h2d.2");
            let before = over_peers();
            assert_eq!(world.copier.copy(whole(from), whole(device)).unwrap(), End::Done { bytes });
            assert_eq!(world.copier.copy(whole(device), whole(to)).unwrap(), End::Done { bytes });
            assert!(target.bytes() == pattern(1, bytes), "{relay:?}");
            assert!(over_peers() > before, "{relay:?}: no relay had a part in it");
            world.end();
        }
    });
}

#[test]
fn scattered_pages_arrive_where_they_belong() {
    alone("scattered_pages_arrive_where_they_belong", &[], |fake| {
        let world = fake.world(CopierOptions::default());
        let mut runner = TestRunner::new(Config { cases: 12, ..Config::default() });
        let cases = (
            prop_oneof![Just(1000_u64), Just(4096), Just(16 << 10), Just(64 << 10)],
            1..400_u64,
            any::<u64>(),
        );
        runner
            .run(&cases, |(page, count, seed)| {
                let bytes = page * count;
                let (source, target, memory) =
                    (world.host(bytes), world.host(bytes), world.memory(1, 2 * bytes));
                source.fill(&pattern(seed, bytes));
                let (from, to) = (world.register(&source), world.register(&target));
                // SAFETY: the memory outlives its region, and nothing else uses it.
                let device = unsafe { world.copier.register_device(1, memory.address(), 2 * bytes).unwrap() };
                // A permutation that leaves gaps: every other page, backwards.
                let place = |nth: u64| (count - 1 - nth) * 2 * page;
                let pairs = |host, out: bool| {
                    let pair = |nth: u64| {
                        let (host, page) =
                            (Span::new(host, nth * page, page), Span::new(device, place(nth), page));
                        if out { SpanPair::new(page, host) } else { SpanPair::new(host, page) }
                    };
                    (0..count).map(pair).collect::<Vec<_>>()
                };
                for (host, out) in [(from, false), (to, true)] {
                    let end =
                        world.copier.mover().run(Transfer::new(pairs(host, out), Class::Demand)).unwrap();
                    prop_assert_eq!(end, End::Done { bytes });
                }
                prop_assert!(target.bytes() == pattern(seed, bytes));
                for region in [from, to, device] {
                    world.copier.unregister(region).unwrap().unwrap();
                }
                Ok(())
            })
            .unwrap();
        world.end();
    });
}

#[test]
fn a_stream_copy_keeps_the_order_of_its_stream() {
    alone("a_stream_copy_keeps_the_order_of_its_stream", &[], |fake| {
        let world = fake.world(CopierOptions::default());
        let bytes = 12 * MIB;
        let (memory, other) = (world.memory(0, bytes), world.memory(0, bytes));
        let hosts: Vec<Arc<Host>> = (0..3).map(|_| world.host(bytes)).collect();
        let result = world.host(bytes);
        let stream = Stream::new(memory.device()).unwrap();
        let stream_copy = |from: u64, to: u64| {
            // SAFETY: all memory outlives the stream's work.
            unsafe { world.copier.stream_copies().copy(&[Piece { from, to, bytes }], stream.handle()) }
        };
        for (nth, host) in hosts.iter().enumerate() {
            host.fill(&pattern(nth as u64, bytes));
        }
        for round in 0..4 {
            let _current = memory.device().enter().unwrap();
            // What is in the stream before and after each stream copy would show bytes that came
            // too early or too late.
            for host in &hosts {
                stream_copy(host.address(), memory.address()).unwrap();
                // SAFETY: as above.
                unsafe { stream.copy(memory.address(), other.address(), bytes).unwrap() };
            }
            stream_copy(other.address(), result.address()).unwrap();
            stream.synchronize().unwrap();
            assert!(result.bytes() == pattern(2, bytes), "round {round}");
        }
        drop(stream);
        world.end();
    });
}

#[test]
fn a_stream_copy_waits_for_what_is_in_its_stream() {
    alone("a_stream_copy_waits_for_what_is_in_its_stream", &[], |fake| {
        let world = fake.world(CopierOptions::default());
        let bytes = 12 * MIB;
        let (first, memory) = (world.host(bytes), world.memory(0, bytes));
        let (late, result) = (world.memory(1, bytes), world.host(bytes));
        first.fill(&pattern(9, bytes));
        let (stream, upstream) = (Stream::new(memory.device()).unwrap(), Stream::new(late.device()).unwrap());
        let ready = Event::new(late.device()).unwrap();
        {
            let _current = late.device().enter().unwrap();
            // SAFETY: all memory outlives the streams' work.
            unsafe { upstream.copy(first.address(), late.address(), bytes).unwrap() };
            // SAFETY: as above.
            unsafe { upstream.copy(late.address(), memory.address(), bytes).unwrap() };
            ready.record(&upstream).unwrap();
        }
        let _current = memory.device().enter().unwrap();
        stream.wait_for(&ready).unwrap();
        let piece = Piece { from: memory.address(), to: result.address(), bytes };
        // SAFETY: as above.
        unsafe { world.copier.stream_copies().copy(&[piece], stream.handle()).unwrap() };
        stream.synchronize().unwrap();
        assert!(result.bytes() == pattern(9, bytes));
        drop((stream, upstream, ready));
        world.end();
    });
}

#[test]
fn what_is_not_understood_is_declined_and_left_alone() {
    alone("what_is_not_understood_is_declined_and_left_alone", &[], |fake| {
        let world = fake.world(CopierOptions::default());
        let bytes = 8 * MIB;
        let (host, memory) = (world.host(bytes), world.memory(0, bytes));
        let pageable = vec![7_u8; bytes as usize];
        let stream = Stream::new(memory.device()).unwrap();
        let _current = memory.device().enter().unwrap();
        let copy = |from: u64, to: u64, bytes: u64| {
            // SAFETY: all memory outlives the stream's work.
            unsafe { world.copier.stream_copies().copy(&[Piece { from, to, bytes }], stream.handle()) }
        };
        let (there, pageable) = (memory.address(), pageable.as_ptr() as u64);
        assert_eq!(copy(host.address(), there, 4096), Err(DeclineReason::Small));
        assert_eq!(copy(pageable, there, bytes), Err(DeclineReason::Pageable));
        assert_eq!(copy(there, there + bytes / 2, bytes / 2), Err(DeclineReason::SameKind));
        assert_eq!(copy(host.address(), there, bytes + 1), Err(DeclineReason::DriverJudges));
        world.fake.capture(stream.handle(), || {
            assert_eq!(copy(host.address(), there, bytes), Err(DeclineReason::Capturing));
        });
        assert_eq!(copy(host.address(), there, bytes), Ok(()));
        stream.synchronize().unwrap();
        drop(stream);
        world.end();
    });
}

#[test]
fn a_copy_of_another_stream_does_not_wait_for_one_that_cannot_go_on() {
    alone("a_copy_of_another_stream_does_not_wait_for_one_that_cannot_go_on", &[], |fake| {
        let world = fake.world(CopierOptions::default());
        let bytes = 8 * MIB;
        let (host, memory, target) = (world.host(bytes), world.memory(0, 2 * bytes), world.host(bytes));
        host.fill(&pattern(4, bytes));
        let (stuck, free) = (Stream::new(memory.device()).unwrap(), Stream::new(memory.device()).unwrap());
        let _current = memory.device().enter().unwrap();
        let held = world.fake.hold(memory.device(), stuck.handle());
        let stream_copies = world.copier.stream_copies();
        let piece = |from, to| Piece { from, to, bytes };
        // SAFETY: all memory outlives the streams' work.
        unsafe {
            stream_copies.copy(&[piece(host.address(), memory.address())], stuck.handle()).unwrap();
            let second = piece(host.address(), memory.address() + bytes);
            assert_eq!(
                world.copier.copy_in_stream(&[second], free.handle()).unwrap(),
                Some(DeclineReason::Busy)
            );
        }
        free.synchronize().unwrap();
        held.release();
        stuck.synchronize().unwrap();
        // SAFETY: as above; nothing else uses the memory.
        unsafe {
            let out = Piece { from: memory.address() + bytes, to: target.address(), bytes };
            world.copier.copy_and_wait(0, Direction::DeviceToHost, &[out]).unwrap();
        }
        assert!(target.bytes() == pattern(4, bytes));
        drop((stuck, free));
        world.end();
    });
}

#[test]
fn default_streams_of_two_gpus_are_not_taken_for_each_other() {
    alone("default_streams_of_two_gpus_are_not_taken_for_each_other", &[], |fake| {
        let bytes = 12 * MIB;
        let null = std::ptr::null_mut();
        for page in [64 << 10, bytes] {
            let world = fake.world(CopierOptions::default());
            let memories = [fake.closed_memory(0, 2 * bytes), fake.closed_memory(1, 2 * bytes)];
            let hosts = [world.host(bytes), world.host(bytes)];
            let there = |gpu: usize, page| {
                pages(Direction::HostToDevice, hosts[gpu].address(), memories[gpu], page, bytes)
            };
            hosts.iter().zip(1..).for_each(|(host, seed)| host.fill(&pattern(seed, bytes)));
            // GPU 0's stream copy has filled the slots on GPU 2, and its kernels have not read them
            // yet.
            fake.control("freeze compute.0");
            let copy = |gpu: usize, page| {
                let _current = world.device(gpu as u16).enter().unwrap();
                // SAFETY: all memory outlives the streams' work, and nothing else uses it.
                unsafe { world.copier.copy_in_stream(&there(gpu, page), null).unwrap() }
            };
            assert_eq!(copy(0, 64 << 10), None);
            copy(1, page);
            let passed = Event::new(world.device(1)).unwrap();
            let current = world.device(1).enter().unwrap();
            // SAFETY: the GPU's context is current.
            unsafe { passed.record_behind(null).unwrap() };
            drop(current);
            let begun = Instant::now();
            while !passed.is_passed().unwrap() {
                assert!(
                    begun.elapsed() < Duration::from_secs(60),
                    "GPU 1's copy waits for a kernel of GPU 0"
                );
                std::thread::sleep(Duration::from_millis(1));
            }
            fake.control("release compute.0");
            for (gpu, page) in [(0, 64 << 10), (1, page)] {
                let target = world.host(bytes);
                let back = pages(Direction::DeviceToHost, target.address(), memories[gpu], page, bytes);
                let _current = world.device(gpu as u16).enter().unwrap();
                let ended = Event::new(world.device(gpu as u16)).unwrap();
                // SAFETY: as above.
                unsafe {
                    world.copier.copy_in_stream(&back, null).unwrap();
                    ended.record_behind(null).unwrap();
                }
                ended.synchronize().unwrap();
                assert!(target.bytes() == pattern(gpu as u64 + 1, bytes), "GPU {gpu}");
            }
            drop((passed, hosts));
            world.end();
        }
    });
}

#[test]
fn memory_that_only_its_own_gpu_reaches_is_copied_over_all_paths_too() {
    alone("memory_that_only_its_own_gpu_reaches_is_copied_over_all_paths_too", &[], |fake| {
        let world = fake.world(CopierOptions::default());
        let bytes = 12 * MIB;
        let memory = world.fake.closed_memory(0, bytes);
        let (host, target) = (world.host(bytes), world.host(bytes));
        host.fill(&pattern(5, bytes));
        // SAFETY: all memory outlives the copies, and nothing else uses it.
        unsafe {
            let there = Piece { from: host.address(), to: memory, bytes };
            world.copier.copy_and_wait(0, Direction::HostToDevice, &[there]).unwrap();
            let back = Piece { from: memory, to: target.address(), bytes };
            world.copier.copy_and_wait(0, Direction::DeviceToHost, &[back]).unwrap();
        }
        assert!(target.bytes() == pattern(5, bytes));
        assert!(world.copier.stream_copies().counters().relayed_bytes.load(Ordering::Relaxed) > 0);
        world.end();
    });
}

#[test]
fn a_link_that_fails_leaves_its_lots_to_the_others() {
    alone("a_link_that_fails_leaves_its_lots_to_the_others", &[], |fake| {
        let world = fake.world(CopierOptions::default());
        let bytes = 24 * MIB;
        let (host, memory, target) = (world.host(bytes), world.memory(0, bytes), world.host(bytes));
        host.fill(&pattern(6, bytes));
        let (from, to) = (world.register(&host), world.register(&target));
        // SAFETY: the memory outlives its region, and nothing else uses it.
        let device = unsafe { world.copier.register_device(0, memory.address(), bytes).unwrap() };
        world.fake.control("fail cuMemcpyAsync 7 719");
        let whole = |region| Span::new(region, 0, bytes);
        assert_eq!(world.copier.copy(whole(from), whole(device)).unwrap(), End::Done { bytes });
        assert_eq!(world.copier.copy(whole(device), whole(to)).unwrap(), End::Done { bytes });
        assert!(target.bytes() == pattern(6, bytes));
        world.end();
    });
}

#[test]
fn gpus_that_copy_at_once_leave_each_others_links_alone() {
    alone("gpus_that_copy_at_once_leave_each_others_links_alone", &[], |fake| {
        let world = fake.world(CopierOptions::default());
        let bytes = 12 * MIB;
        let host = world.host(bytes);
        let memories = [world.memory(0, bytes), world.memory(1, bytes)];
        let copy = |gpu: usize, bytes: u64| {
            let piece = Piece { from: host.address(), to: memories[gpu].address(), bytes };
            // SAFETY: all memory outlives the copies, and nothing else uses it.
            unsafe { world.copier.copy_and_wait(gpu as u16, Direction::HostToDevice, &[piece]).unwrap() };
        };
        let over = |gpu: u16| world.fake.stat(&format!("bytes.h2d.{gpu}"));
        // On a busy machine too long a moment may pass between the two copies, but not always.
        let begun = Instant::now();
        loop {
            copy(1, 2 * MIB);
            let before = (over(1), over(2));
            copy(0, bytes);
            assert!(over(2) > before.1, "GPU 2 has been at rest all the time");
            if over(1) == before.0 {
                break;
            }
            assert!(begun.elapsed() < Duration::from_secs(60), "GPU 1 has had a copy just now");
        }
        // For a second after copies that came at the same time they are taken for one load.
        std::thread::sleep(Duration::from_millis(1100));
        let before = over(1);
        copy(0, bytes);
        assert!(over(1) > before, "a GPU that is at rest relays again");
        world.end();
    });
}

#[test]
fn a_copy_that_was_given_up_does_not_return_before_its_memory_is_quiet() {
    alone("a_copy_that_was_given_up_does_not_return_before_its_memory_is_quiet", &[], |fake| {
        // From the first byte on copies that are waited for are the mover's.
        let rates = Direction::BOTH
            .into_iter()
            .fold(Rates::default(), |rates, way| rates.with(way, |own| own.mover_bytes = 0));
        let world = fake.world(CopierOptions { rates: Some(rates), ..CopierOptions::default() });
        let bytes = 24 * MIB;
        let (memory, target) = (world.memory(0, bytes), world.host(bytes));
        let back = [Piece { from: memory.address(), to: target.address(), bytes }];
        // SAFETY: all memory outlives the copy, and nothing else uses it before the copy's end.
        let copy = || unsafe { world.copier.copy_and_wait(0, Direction::DeviceToHost, &back) };
        fake.control("freeze d2h.0");
        std::thread::scope(|scope| {
            let copying = scope.spawn(copy);
            let lost =
                || world.copier.telemetry().unwrap().links.iter().map(|link| link.timed_out).sum::<u64>();
            let begun = Instant::now();
            while lost() == 0 {
                assert!(begun.elapsed() < Duration::from_secs(60), "no operation was given up");
                std::thread::sleep(Duration::from_millis(10));
            }
            // Long enough for a return that comes too early to be seen.
            std::thread::sleep(Duration::from_millis(300));
            let came_too_early = copying.is_finished();
            fake.control("release d2h.0");
            assert!(!came_too_early, "GPU 0 may still write to the target");
            let error = copying.join().unwrap().unwrap_err();
            assert!(matches!(error, CopyError::Failed(Reason::TimedOut { .. })), "{error}");
        });
        // The PCIe link and the memory are as good as before.
        copy().unwrap();
        world.end();
    });
}
