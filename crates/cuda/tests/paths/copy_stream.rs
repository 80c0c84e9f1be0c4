//! Copy streams: batches that follow each other without a gap keep their bytes and their order all
//! the same.

use crate::common::{Fake, World, alone, pattern};
use forebay_cuda::device::{Event, Stream};
use forebay_cuda::driver::Driver;
use forebay_cuda::event_waiter::EventWaiter;
use forebay_cuda::kernels::Piece;
use forebay_cuda::links::Direction;
use forebay_cuda::stream_copy::{BATCH_PIECES_MAX, Batch, CopyStream, Sent};
use forebay_cuda::{CopierOptions, start_stream_copies};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

const MIB: u64 = 1 << 20;

pub fn copy_stream(world: &World, direction: Direction) -> CopyStream {
    world.copier.stream_copies().copy_stream(0, direction).unwrap().unwrap()
}

/// Sends a batch, again if it has to be later; its event.
fn send(world: &World, copy_stream: &CopyStream, pieces: &[Piece], after: Option<&Event>) -> Arc<Event> {
    send_batch(world, copy_stream, &Batch { pieces, after, is_open: true, awaited_bytes: None, sums: None })
}

pub fn send_batch(world: &World, copy_stream: &CopyStream, batch: &Batch) -> Arc<Event> {
    let ended = Arc::new(Event::to_sleep_for(copy_stream.device()).unwrap());
    loop {
        // SAFETY: tests keep the memory until the events have passed, and use it for nothing else.
        match unsafe { world.copier.stream_copies().send(copy_stream, batch, &ended) } {
            Ok(Sent::Queued(Ok(_))) => return ended,
            Ok(Sent::Later) => std::thread::sleep(Duration::from_millis(1)),
            other => panic!("{other:?}"),
        }
    }
}

/// Pieces between contiguous host memory and every other page of the GPU's, backwards.
pub fn pages(direction: Direction, host: u64, memory: u64, page: u64, bytes: u64) -> Vec<Piece> {
    let count = bytes / page;
    let piece = |nth: u64| {
        let (near, far) = (host + nth * page, memory + (count - 1 - nth) * 2 * page);
        match direction {
            Direction::HostToDevice => Piece { from: near, to: far, bytes: page },
            Direction::DeviceToHost => Piece { from: far, to: near, bytes: page },
        }
    };
    (0..count).map(piece).collect()
}

fn both_ways(fake: &Fake) {
    let world = fake.world(CopierOptions::default());
    let (to_gpu, to_host) =
        (copy_stream(&world, Direction::HostToDevice), copy_stream(&world, Direction::DeviceToHost));
    // Small pages are handed over, large ones go in slot streams, and both use the same slots.
    let sizes = [16 << 10, 512 << 10, 64 << 10, 4 << 20, 4096, 16 << 10];
    let bytes = 12 * MIB;
    let batches: Vec<_> = (0..)
        .zip(sizes)
        .map(|(seed, page)| {
            let (source, target, memory) = (world.host(bytes), world.host(bytes), world.memory(0, 2 * bytes));
            source.fill(&pattern(seed, bytes));
            (source, target, memory, page)
        })
        .collect();
    for _ in 0..3 {
        let loaded: Vec<_> = batches
            .iter()
            .map(|(source, _, memory, page)| {
                let there = pages(Direction::HostToDevice, source.address(), memory.address(), *page, bytes);
                send(&world, &to_gpu, &there, None)
            })
            .collect();
        let stored: Vec<_> = batches
            .iter()
            .zip(&loaded)
            .map(|((_, target, memory, page), loaded)| {
                let back = pages(Direction::DeviceToHost, target.address(), memory.address(), *page, bytes);
                send(&world, &to_host, &back, Some(loaded))
            })
            .collect();
        for (seed, ((_, target, ..), stored)) in (0..).zip(batches.iter().zip(&stored)) {
            stored.synchronize().unwrap();
            assert!(target.bytes() == pattern(seed, bytes), "batch {seed}");
            target.fill(&vec![0; bytes as usize]);
        }
    }
    world.copier.stream_copies().settle(&to_gpu);
    drop((batches, to_gpu, to_host));
    world.end();
}

#[test]
fn a_copy_streams_batches_arrive_whole_over_all_paths() {
    alone("copy_stream::a_copy_streams_batches_arrive_whole_over_all_paths", &[], both_ways);
}

#[test]
fn a_copy_streams_batches_arrive_whole_over_one_link() {
    let one = [("FAKE_CUDA_GPUS", "1")];
    alone("copy_stream::a_copy_streams_batches_arrive_whole_over_one_link", &one, both_ways);
}

/// Kernels of all GPUs are late from here on.
const HOLD_KERNELS: &str = "freeze compute.0; freeze compute.1; freeze compute.2";
const LET_KERNELS_GO: &str = "release compute.0; release compute.1; release compute.2";

/// Loads small pages in all slots, by handover if peers do not reach them, then a few long ones in
/// slot streams and in two, then many of these, while the kernels that empty the slots are late.
/// `refused` has a call of the batch in the middle refused; says whether there was such a call.
fn few_slots_between_many(world: &World, in_turns: bool, refused: &str) -> bool {
    let to_gpu = copy_stream(world, Direction::HostToDevice);
    let batches = [(64 << 10, 24 * MIB), (512 << 10, 3 * MIB), (512 << 10, 24 * MIB)]
        .map(|(page, bytes)| (page, bytes, world.host(bytes), world.memory(0, 2 * bytes)));
    world.fake.control(HOLD_KERNELS);
    let (mut sent, mut was_met) = (Vec::new(), false);
    for (nth, (page, bytes, source, memory)) in batches.iter().enumerate() {
        source.fill(&pattern(nth as u64, *bytes));
        let pieces = pages(Direction::HostToDevice, source.address(), memory.address(), *page, *bytes);
        let is_open = nth > 0 || !in_turns;
        let batch = Batch { pieces: &pieces, after: None, is_open, awaited_bytes: None, sums: None };
        let ended = Event::to_sleep_for(to_gpu.device()).unwrap();
        world.fake.control(if nth == 1 { refused } else { "" });
        // SAFETY: the memory outlives the copies, and is used for nothing else.
        let queued = unsafe { world.copier.stream_copies().send(&to_gpu, &batch, &ended) };
        was_met |= nth == 1 && world.fake.stat("live.failing") == 0;
        world.fake.control("mend");
        sent.push((matches!(queued, Ok(Sent::Queued(Ok(_)))), ended));
    }
    // What does not wait for the kernels goes on.
    std::thread::sleep(Duration::from_millis(20));
    world.fake.control(LET_KERNELS_GO);
    world.copier.stream_copies().settle(&to_gpu);
    for (nth, ((page, bytes, _, memory), (is_queued, _))) in batches.iter().zip(&sent).enumerate() {
        assert!(*is_queued || nth == 1, "batch {nth} after {refused:?}");
        let target = world.host(*bytes);
        let back = pages(Direction::DeviceToHost, target.address(), memory.address(), *page, *bytes);
        send(world, &copy_stream(world, Direction::DeviceToHost), &back, None).synchronize().unwrap();
        assert!(!is_queued || target.bytes() == pattern(nth as u64, *bytes), "batch {nth} after {refused:?}");
    }
    was_met
}

#[test]
fn a_slot_is_not_filled_before_it_was_read_however_few_of_them_the_batch_between_used() {
    let test =
        "copy_stream::a_slot_is_not_filled_before_it_was_read_however_few_of_them_the_batch_between_used";
    alone(test, &[], |fake| {
        let world = fake.world(CopierOptions::default());
        for in_turns in [true, false] {
            few_slots_between_many(&world, in_turns, "");
        }
        world.end();
    });
}

#[test]
fn a_slot_is_not_filled_before_it_was_read_although_the_batch_between_was_refused_a_wait() {
    let test =
        "copy_stream::a_slot_is_not_filled_before_it_was_read_although_the_batch_between_was_refused_a_wait";
    alone(test, &[], |fake| {
        let world = fake.world(CopierOptions::default());
        for in_turns in [true, false] {
            let refused = |nth: &u64| format!("fail cuStreamWaitEvent {nth} 719");
            let met = |nth: &u64| few_slots_between_many(&world, in_turns, &refused(nth));
            let count = (1..100).take_while(met).count();
            let waits = if in_turns { 12..100 } else { 3..100 };
            assert!(waits.contains(&count), "{count} {in_turns}");
        }
        world.end();
    });
}

#[test]
fn host_memory_in_small_pieces_is_the_gpus_own_kernels_to_read() {
    let test = "copy_stream::host_memory_in_small_pieces_is_the_gpus_own_kernels_to_read";
    alone(test, &[], |fake| {
        let world = fake.world(CopierOptions::default());
        let (bytes, page) = (8 * MIB, 16 << 10);
        let (source, target, memory) = (world.host(2 * bytes), world.host(bytes), world.memory(0, 2 * bytes));
        source.fill(&pattern(3, 2 * bytes));
        let mut there = pages(Direction::HostToDevice, source.address(), memory.address(), page, bytes);
        there.iter_mut().for_each(|piece| piece.from += piece.from - source.address());
        let before = fake.stat("cuMemcpyAsync");
        let loaded = send(&world, &copy_stream(&world, Direction::HostToDevice), &there, None);
        loaded.synchronize().unwrap();
        assert_eq!(fake.stat("cuMemcpyAsync"), before, "no call for each page");
        let back = pages(Direction::DeviceToHost, target.address(), memory.address(), page, bytes);
        send(&world, &copy_stream(&world, Direction::DeviceToHost), &back, Some(&loaded))
            .synchronize()
            .unwrap();
        let all = pattern(3, 2 * bytes);
        let every_other: Vec<u8> = all.chunks(page as usize).step_by(2).flatten().copied().collect();
        assert!(target.bytes() == every_other);
        drop((loaded, source, target, memory));
        world.end();
    });
}

#[test]
fn a_batch_waits_for_what_it_comes_after_and_the_next_one_for_nothing_else() {
    let test = "copy_stream::a_batch_waits_for_what_it_comes_after_and_the_next_one_for_nothing_else";
    alone(test, &[], |fake| {
        let world = fake.world(CopierOptions::default());
        let bytes = 8 * MIB;
        let (source, target, memory) = (world.host(bytes), world.host(bytes), world.memory(0, 2 * bytes));
        source.fill(&pattern(4, bytes));
        let engine = Stream::new(memory.device()).unwrap();
        let (to_gpu, to_host) =
            (copy_stream(&world, Direction::HostToDevice), copy_stream(&world, Direction::DeviceToHost));
        let current = memory.device().enter().unwrap();
        let (held, begun) =
            (fake.hold(memory.device(), engine.handle()), Event::new(memory.device()).unwrap());
        begun.record(&engine).unwrap();
        let ends = EventWaiter::spawn(world.copier.driver(), "ends").unwrap();
        let there = pages(Direction::HostToDevice, source.address(), memory.address(), 64 << 10, bytes);
        let loaded = send(&world, &to_gpu, &there, Some(&begun));
        let (told, ended) = channel();
        let on_passed = {
            let told = told.clone();
            Box::new(move |passed: Result<(), _>| told.send(("first", passed.is_ok())).unwrap())
        };
        ends.when_passed(Arc::clone(&loaded), on_passed);
        // A batch of the other direction waits for nothing, and has come to its end meanwhile.
        let (other, free) = (world.memory(0, 2 * bytes), world.host(bytes));
        let away = pages(Direction::DeviceToHost, free.address(), other.address(), 64 << 10, bytes);
        send(&world, &to_host, &away, None).synchronize().unwrap();
        assert!(!loaded.is_passed().unwrap());
        // The engine goes on only when the batch has: nothing that it does then comes too early.
        held.release();
        // SAFETY: the stream lives.
        unsafe { loaded.come_before(engine.handle()).unwrap() };
        let back = pages(Direction::DeviceToHost, target.address(), memory.address(), 64 << 10, bytes);
        let behind = Event::new(memory.device()).unwrap();
        behind.record(&engine).unwrap();
        let stored = send(&world, &to_host, &back, Some(&behind));
        let on_passed = Box::new(move |passed: Result<(), _>| told.send(("second", passed.is_ok())).unwrap());
        ends.when_passed(Arc::clone(&stored), on_passed);
        let limit = Duration::from_secs(60);
        assert_eq!(ended.recv_timeout(limit), Ok(("first", true)));
        assert_eq!(ended.recv_timeout(limit), Ok(("second", true)));
        assert!(target.bytes() == pattern(4, bytes));
        drop(current);
        drop((ends, engine, to_gpu, to_host, begun, behind, loaded, stored, held, memory, other));
        world.end();
    });
}

#[test]
fn what_is_many_pieces_goes_by_the_drivers_batches_unless_little_is_awaited() {
    let test = "copy_stream::what_is_many_pieces_goes_by_the_drivers_batches_unless_little_is_awaited";
    alone(test, &[("FAKE_CUDA_GPUS", "1")], |fake| {
        let world = fake.world(CopierOptions::default());
        let to_gpu = copy_stream(&world, Direction::HostToDevice);
        let (page, long) = (64 << 10, MIB);
        for (number, (awaited_bytes, bytes, page, by_batch)) in (0..).zip([
            (Some(7 * MIB), 7 * MIB, page, false),
            (Some(8 * MIB), 8 * MIB, page, true),
            (Some(32 * MIB), 32 * MIB, long, true),
            // The end of more than it is itself.
            (Some(32 * MIB), 4 * MIB, page, true),
            (None, 32 * MIB, page, true),
            (None, 32 * MIB, long, true),
            // A few pieces are not worth a batch, if an engine copies each well enough.
            (None, 31 * MIB, long, false),
        ]) {
            let (source, target, memory) = (world.host(bytes), world.host(bytes), world.memory(0, 2 * bytes));
            source.fill(&pattern(number, bytes));
            let pages = |direction, host| pages(direction, host, memory.address(), page, bytes);
            let before = fake.stat("cuMemcpyBatchAsync");
            let pieces = pages(Direction::HostToDevice, source.address());
            let batch = Batch { pieces: &pieces, after: None, is_open: true, awaited_bytes, sums: None };
            send_batch(&world, &to_gpu, &batch).synchronize().unwrap();
            assert_eq!(
                fake.stat("cuMemcpyBatchAsync") > before,
                by_batch,
                "{awaited_bytes:?} {bytes} {page}"
            );
            let back = pages(Direction::DeviceToHost, target.address());
            send(&world, &copy_stream(&world, Direction::DeviceToHost), &back, None).synchronize().unwrap();
            assert!(target.bytes() == pattern(number, bytes), "{awaited_bytes:?} {bytes} {page}");
        }
        drop(to_gpu);
        world.end();
    });
}

#[test]
fn what_is_awaited_goes_by_kernels_unless_a_call_for_each_piece_is_as_fast() {
    let test = "copy_stream::what_is_awaited_goes_by_kernels_unless_a_call_for_each_piece_is_as_fast";
    alone(test, &[("FAKE_CUDA_GPUS", "1")], |fake| {
        let world = fake.world(CopierOptions::default());
        let to_gpu = copy_stream(&world, Direction::HostToDevice);
        let bytes = 4 * MIB;
        let cases = [(true, 256 << 10, true), (true, MIB, false), (false, 512 << 10, false)];
        for (number, (is_awaited, page, by_kernel)) in (0..).zip(cases) {
            let (source, target, memory) = (world.host(bytes), world.host(bytes), world.memory(0, 2 * bytes));
            source.fill(&pattern(number, bytes));
            let pages = |direction, host| pages(direction, host, memory.address(), page, bytes);
            let before = fake.stat("cuLaunchKernel");
            let pieces = pages(Direction::HostToDevice, source.address());
            let awaited_bytes = is_awaited.then_some(bytes);
            let batch = Batch { pieces: &pieces, after: None, is_open: true, awaited_bytes, sums: None };
            send_batch(&world, &to_gpu, &batch).synchronize().unwrap();
            assert_eq!(fake.stat("cuLaunchKernel") > before, by_kernel, "{is_awaited} {page}");
            let back = pages(Direction::DeviceToHost, target.address());
            send(&world, &copy_stream(&world, Direction::DeviceToHost), &back, None).synchronize().unwrap();
            assert!(target.bytes() == pattern(number, bytes), "{is_awaited} {page}");
        }
        drop(to_gpu);
        world.end();
    });
}

#[test]
fn what_is_awaited_and_short_goes_over_its_own_link() {
    alone("copy_stream::what_is_awaited_and_short_goes_over_its_own_link", &[], |fake| {
        let world = fake.world(CopierOptions::default());
        let to_gpu = copy_stream(&world, Direction::HostToDevice);
        let bytes = 48 * MIB;
        // Where peers do not reach the GPU's side, its own kernels have a part in what relays
        // bring.
        let cases = [
            (Some(15 * MIB), true, false),
            (Some(16 * MIB), true, true),
            (Some(95 * MIB), false, false),
            (Some(96 * MIB), false, true),
            (None, true, true),
        ];
        for (awaited_bytes, is_open, is_relayed) in cases {
            let (source, memory) = (world.host(bytes), world.memory(0, 2 * bytes));
            let relayed = || world.copier.stream_copies().counters().relayed_bytes.load(Ordering::Relaxed);
            let before = relayed();
            let pieces = pages(Direction::HostToDevice, source.address(), memory.address(), 256 << 10, bytes);
            let batch = Batch { pieces: &pieces, after: None, is_open, awaited_bytes, sums: None };
            send_batch(&world, &to_gpu, &batch).synchronize().unwrap();
            assert_eq!(relayed() > before, is_relayed, "{awaited_bytes:?} {is_open}");
        }
        drop(to_gpu);
        world.end();
    });
}

#[test]
fn what_goes_to_a_gpu_over_relays_waits_for_none_of_its_kernels_and_takes_few_calls() {
    let test =
        "copy_stream::what_goes_to_a_gpu_over_relays_waits_for_none_of_its_kernels_and_takes_few_calls";
    alone(test, &[], |fake| {
        let world = fake.world(CopierOptions::default());
        let to_gpu = copy_stream(&world, Direction::HostToDevice);
        let bytes = 48 * MIB;
        let cases = [(Some(128 * MIB), 64 << 10), (Some(128 * MIB), 256 << 10), (None, 64 << 10)];
        for (number, (awaited_bytes, page)) in (0..).zip(cases) {
            let (source, target, memory) = (world.host(bytes), world.host(bytes), world.memory(0, 2 * bytes));
            source.fill(&pattern(number, bytes));
            let pages = |direction, host| pages(direction, host, memory.address(), page, bytes);
            let calls = ["cuLaunchKernel", "cuMemcpyAsync", "cuMemcpyBatchAsync"];
            let counts = || calls.map(|call| fake.stat(call));
            let relayed = || world.copier.stream_copies().counters().relayed_bytes.load(Ordering::Relaxed);
            let (before, relayed_before) = (counts(), relayed());
            let pieces = pages(Direction::HostToDevice, source.address());
            let batch = Batch { pieces: &pieces, after: None, is_open: true, awaited_bytes, sums: None };
            // As if the GPU computed, and had no room for kernels.
            fake.control("freeze compute.0");
            let ended = send_batch(&world, &to_gpu, &batch);
            let counted = counts();
            let [launches, copies, batches] = [0, 1, 2].map(|call| counted[call] - before[call]);
            let segments = (relayed() - relayed_before).div_ceil(2 * MIB);
            let until = Instant::now() + Duration::from_secs(20);
            while !ended.is_passed().unwrap() && Instant::now() < until {
                std::thread::sleep(Duration::from_millis(1));
            }
            let has_ended = ended.is_passed().unwrap();
            fake.control("release compute.0");
            assert!(has_ended, "{awaited_bytes:?} {page} waits for a kernel");
            assert!(segments > 8, "{segments}");
            // The side of the host is one run here.
            assert!(copies <= segments + 2, "{copies} calls for {segments} segments");
            assert!(
                launches <= if page < 128 << 10 { segments + 2 } else { 0 },
                "{launches} for {segments} segments"
            );
            // The direct way has 16 MiB, beside relays in calls for no more than 128 copies.
            assert!(batches >= 16 * MIB / page / 128, "{batches}");
            let back = pages(Direction::DeviceToHost, target.address());
            send(&world, &copy_stream(&world, Direction::DeviceToHost), &back, None).synchronize().unwrap();
            assert!(target.bytes() == pattern(number, bytes), "{awaited_bytes:?} {page}");
        }
        drop(to_gpu);
        world.end();
    });
}

#[test]
fn a_call_of_the_direct_way_that_comes_back_late_holds_up_no_relay() {
    alone("copy_stream::a_call_of_the_direct_way_that_comes_back_late_holds_up_no_relay", &[], |fake| {
        let world = fake.world(CopierOptions::default());
        let to_gpu = copy_stream(&world, Direction::HostToDevice);
        let bytes = 48 * MIB;
        let (source, target, memory) = (world.host(bytes), world.host(bytes), world.memory(0, 2 * bytes));
        source.fill(&pattern(8, bytes));
        let pages = |direction, host| pages(direction, host, memory.address(), 64 << 10, bytes);
        let pieces = pages(Direction::HostToDevice, source.address());
        // A third of 48 MiB is for each of the two.
        let came = || [1, 2].map(|relay| fake.stat(&format!("bytes.h2d.{relay}")));
        let before = came();
        // Only the direct way uses these here: the side of the host is one run.
        fake.control("stall cuMemcpyBatchAsync");
        let ended = Event::to_sleep_for(to_gpu.device()).unwrap();
        let batch = Batch { pieces: &pieces, after: None, is_open: true, awaited_bytes: None, sums: None };
        let stream_copies = world.copier.stream_copies();
        let relayed = std::thread::scope(|scope| {
            // SAFETY: the memory outlives the copies, and is used for nothing else.
            let sender = scope.spawn(|| unsafe { stream_copies.send(&to_gpu, &batch, &ended) });
            let until = Instant::now() + Duration::from_secs(20);
            let bytes = || [0, 1].map(|relay| came()[relay] - before[relay]);
            while bytes().iter().any(|bytes| *bytes < 8 * MIB) && Instant::now() < until {
                std::thread::sleep(Duration::from_millis(1));
            }
            let bytes = bytes();
            fake.control("resume cuMemcpyBatchAsync");
            assert!(matches!(sender.join().unwrap(), Ok(Sent::Queued(Ok(_)))));
            bytes
        });
        assert!(relayed.iter().all(|bytes| *bytes >= 8 * MIB), "{relayed:?} bytes came to relays");
        ended.synchronize().unwrap();
        let back = pages(Direction::DeviceToHost, target.address());
        send(&world, &copy_stream(&world, Direction::DeviceToHost), &back, None).synchronize().unwrap();
        assert!(target.bytes() == pattern(8, bytes));
        drop((to_gpu, ended));
        world.end();
    });
}

#[test]
fn what_is_too_much_is_sent_later_and_nothing_is_listed_over_what_a_kernel_still_reads() {
    let test =
        "copy_stream::what_is_too_much_is_sent_later_and_nothing_is_listed_over_what_a_kernel_still_reads";
    alone(test, &[("FAKE_CUDA_GPUS", "1")], |fake| {
        let world = fake.world(CopierOptions::default());
        let page = 256;
        let bytes = page * BATCH_PIECES_MAX as u64 / 2;
        let to_gpu = copy_stream(&world, Direction::HostToDevice);
        let (source, target, memory) = (world.host(bytes), world.host(bytes), world.memory(0, 2 * bytes));
        source.fill(&pattern(5, bytes));
        let pieces = pages(Direction::HostToDevice, source.address(), memory.address(), page, bytes);
        fake.control("freeze h2d.0; freeze compute.0");
        let (mut sent, mut last) = (0, None);
        while last.is_none() {
            let ended = Event::to_sleep_for(memory.device()).unwrap();
            let batch =
                Batch { pieces: &pieces, after: None, is_open: true, awaited_bytes: None, sums: None };
            // SAFETY: the memory outlives the copies. That batches write the same bytes in no order
            // does no harm: they are equal.
            match unsafe { world.copier.stream_copies().send(&to_gpu, &batch, &ended).unwrap() } {
                Sent::Queued(queued) => queued.map(|_| sent += 1).unwrap(),
                Sent::Later => last = Some(sent),
            }
        }
        assert!((2..16).contains(&sent), "{sent} batches of {} pieces", pieces.len());
        fake.control("release h2d.0; release compute.0");
        send(&world, &to_gpu, &pieces, None).synchronize().unwrap();
        let back = pages(Direction::DeviceToHost, target.address(), memory.address(), page, bytes);
        send(&world, &copy_stream(&world, Direction::DeviceToHost), &back, None).synchronize().unwrap();
        assert!(target.bytes() == pattern(5, bytes));
        assert_eq!(world.copier.stream_copies().counters().stream_copies.load(Ordering::Relaxed), sent + 2);
        drop((to_gpu, source, target, memory));
        world.end();
    });
}

/// Batches that go all ways there are, by handover and in slot streams by the driver's batches, one
/// behind the other; of the one in the middle a call is refused. Says whether there was such a
/// call.
fn mixed(world: &World, direction: Direction, middle: usize, refused: &str) -> bool {
    let copy_stream = copy_stream(world, direction);
    let (short, long) = (Some(6 * MIB), Some(128 * MIB));
    let kinds = [
        (64 << 10, 6 * MIB, None),
        (16 << 10, 6 * MIB, long),
        (64 << 10, 9 * MIB, long),
        (64 << 10, 6 * MIB, short),
        (128 << 10, 9 * MIB, long),
        (512 << 10, 6 * MIB, long),
        (64 << 10, 6 * MIB, short),
    ];
    let sites = kinds.map(|(page, bytes, _)| (page, bytes, world.host(bytes), world.memory(0, 2 * bytes)));
    if direction == Direction::DeviceToHost {
        let filler = self::copy_stream(world, Direction::HostToDevice);
        for (seed, (page, bytes, _, memory)) in (0..).zip(&sites) {
            let source = world.host(*bytes);
            source.fill(&pattern(seed, *bytes));
            let there = pages(Direction::HostToDevice, source.address(), memory.address(), *page, *bytes);
            send(world, &filler, &there, None).synchronize().unwrap();
        }
    } else {
        (0..).zip(&sites).for_each(|(seed, (_, bytes, host, _))| host.fill(&pattern(seed, *bytes)));
    }
    world.fake.control(HOLD_KERNELS);
    let (mut sent, mut was_met) = (Vec::new(), false);
    for (nth, ((page, bytes, host, memory), (_, _, awaited_bytes))) in sites.iter().zip(kinds).enumerate() {
        let pieces = pages(direction, host.address(), memory.address(), *page, *bytes);
        let batch = Batch { pieces: &pieces, after: None, is_open: true, awaited_bytes, sums: None };
        let ended = Event::to_sleep_for(copy_stream.device()).unwrap();
        world.fake.control(if nth == middle { refused } else { "" });
        // SAFETY: the memory outlives the copies, and is used for nothing else.
        let queued = unsafe { world.copier.stream_copies().send(&copy_stream, &batch, &ended) };
        was_met |= nth == middle && world.fake.stat("live.failing") == 0;
        world.fake.control("mend");
        sent.push((matches!(queued, Ok(Sent::Queued(Ok(_)))), ended));
    }
    world.fake.control(LET_KERNELS_GO);
    // As the connector does it: each is waited for by its own event, and only what was refused is
    // settled.
    for (nth, (is_queued, ended)) in sent.iter().enumerate() {
        if *is_queued {
            ended.synchronize().unwrap();
            if direction == Direction::DeviceToHost {
                assert!(sites[nth].2.bytes() == pattern(nth as u64, sites[nth].1), "batch {nth} {refused:?}");
            }
        }
    }
    world.copier.stream_copies().settle(&copy_stream);
    for (nth, ((page, bytes, _, memory), (is_queued, _))) in sites.iter().zip(&sent).enumerate() {
        assert!(*is_queued || nth == middle, "batch {nth} after {refused:?}");
        let target = world.host(*bytes);
        let back = pages(Direction::DeviceToHost, target.address(), memory.address(), *page, *bytes);
        send(world, &self::copy_stream(world, Direction::DeviceToHost), &back, None).synchronize().unwrap();
        assert!(!is_queued || target.bytes() == pattern(nth as u64, *bytes), "batch {nth} after {refused:?}");
    }
    was_met
}

#[test]
fn batches_of_all_kinds_arrive_whole_whatever_call_of_one_of_them_is_refused() {
    let test = "copy_stream::batches_of_all_kinds_arrive_whole_whatever_call_of_one_of_them_is_refused";
    alone(test, &[], |fake| {
        let world = fake.world(CopierOptions::default());
        for direction in Direction::BOTH {
            mixed(&world, direction, usize::MAX, "");
            let calls = [
                "cuMemcpyBatchAsync",
                "cuMemcpyAsync",
                "cuLaunchKernel",
                "cuEventRecord",
                "cuStreamWaitEvent",
                "cuCtxPushCurrent_v2",
            ];
            for call in calls {
                let met = |nth: &u64| mixed(&world, direction, 2, &format!("fail {call} {nth} 719"));
                let count = (1..200).take_while(met).count();
                assert!((1..199).contains(&count), "{count} of {call} {direction:?}");
            }
        }
        world.end();
    });
}

#[test]
fn copies_of_an_engines_cache_start_no_mover() {
    alone("copy_stream::copies_of_an_engines_cache_start_no_mover", &[], |_| {
        let driver = Driver::load().unwrap();
        let copies = start_stream_copies(driver, None).unwrap();
        let _there = copies.copy_stream(0, Direction::HostToDevice).unwrap().unwrap();
        let names = || -> Vec<String> {
            let tasks = std::fs::read_dir("/proc/self/task").unwrap();
            tasks.map(|task| std::fs::read_to_string(task.unwrap().path().join("comm")).unwrap()).collect()
        };
        // A thread has its name once it runs.
        let begun = Instant::now();
        while !names().iter().any(|name| name.starts_with("forebay-queue")) {
            assert!(begun.elapsed() < Duration::from_secs(60), "{:?}", names());
            std::thread::sleep(Duration::from_millis(1));
        }
        // The mover's thread and the poller that sees its operations end.
        let is_its = |name: &&String| ["forebay-mover", "forebay-cuda"].contains(&name.trim());
        assert_eq!(names().iter().find(is_its), None);
    });
}
