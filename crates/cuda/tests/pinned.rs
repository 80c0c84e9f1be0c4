//! Pinned memory on a driver that counts: what is kept, what is refused, and that nothing stays
//! pinned.
#![allow(clippy::unwrap_used)]

use cuda_testkit::{Fake, alone};
use forebay_cuda::device::{Device, DeviceMemory, Stream};
use forebay_cuda::pinned::{PinError, PinnedBehind, PinnedBuffer, PinnedPool, PoolConfig};
use forebay_transfer::{Backing, HostBuffer};
use std::os::unix::fs::FileExt;
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

const MIB: u64 = 1 << 20;

/// A pool of slabs of 4 MiB.
fn pool(fake: &Fake, limit_bytes: u64) -> PinnedPool {
    let device = Device::open(fake.driver, 0).unwrap();
    PinnedPool::new(&device, PoolConfig { slab_bytes: 4 * MIB, ..PoolConfig::new(limit_bytes) })
}

/// Fills a buffer with a byte.
fn fill(buffer: &PinnedBuffer, byte: u8) {
    // SAFETY: the buffer is the test's alone.
    unsafe { buffer.as_ptr().write_bytes(byte, buffer.len()) };
}

fn holds_only(buffer: &PinnedBuffer, byte: u8) -> bool {
    // SAFETY: the buffer is the test's alone, and its pages are there.
    let bytes = unsafe { std::slice::from_raw_parts(buffer.as_ptr(), buffer.len()) };
    bytes.iter().all(|found| *found == byte)
}

#[test]
fn what_is_given_back_is_lent_again_without_pinning() {
    alone("what_is_given_back_is_lent_again_without_pinning", &[], |fake| {
        let pool = pool(fake, 16 * MIB);
        let first = pool.take(3 * MIB).unwrap();
        let address = first.as_ptr();
        drop(first);
        let again = pool.take(4 * MIB).unwrap();
        assert_eq!(again.as_ptr(), address);
        let counters = pool.counters();
        assert_eq!((counters.registrations, counters.held_bytes, counters.lent_bytes), (1, 4 * MIB, 4 * MIB));
        assert_eq!(fake.stat("cuMemHostRegister_v2"), 1);
        assert!(!counters.pinning.is_zero());
    });
}

#[test]
fn memory_that_was_warmed_is_lent_without_pinning() {
    alone("memory_that_was_warmed_is_lent_without_pinning", &[], |fake| {
        let pool = pool(fake, 16 * MIB);
        pool.warm(10 * MIB).unwrap();
        assert_eq!((pool.counters().held_bytes, pool.counters().registrations), (12 * MIB, 3));
        let lent: Vec<_> = [4, 4, 4].map(|mib| pool.take(mib * MIB).unwrap()).into();
        assert_eq!(pool.counters().registrations, 3);
        drop(lent);
        pool.warm(10 * MIB).unwrap();
        assert_eq!(fake.stat("cuMemHostRegister_v2"), 3);
        assert!(matches!(pool.warm(17 * MIB), Err(PinError::Full(_))));
        assert_eq!(pool.counters().held_bytes, 12 * MIB);
    });
}

#[test]
fn a_full_pool_refuses_and_says_what_is_left() {
    alone("a_full_pool_refuses_and_says_what_is_left", &[], |fake| {
        let pool = pool(fake, 10 * MIB);
        let _lent = pool.take(5 * MIB).unwrap();
        let Err(PinError::Full(full)) = pool.take(6 * MIB) else { panic!("6 of 10 MiB after 5 were lent") };
        assert_eq!((full.limit_bytes, full.lent_bytes, full.left_bytes), (10 * MIB, 5 * MIB, 5 * MIB));
        assert!(pool.take(full.left_bytes).is_ok());
        assert_eq!(pool.counters().refused, 1);
        assert!(matches!(pool.take(65 << 30), Err(PinError::TooLong { .. })));
    });
}

#[test]
fn a_longer_request_lies_in_one_registration_and_free_slabs_make_room_for_it() {
    alone("a_longer_request_lies_in_one_registration_and_free_slabs_make_room_for_it", &[], |fake| {
        let pool = pool(fake, 12 * MIB);
        pool.warm(12 * MIB).unwrap();
        assert_eq!(fake.stat("live.host"), 3);
        let long = pool.take(9 * MIB).unwrap();
        fill(&long, 7);
        assert!(holds_only(&long, 7));
        assert_eq!(fake.stat("live.host"), 1);
        assert_eq!(pool.counters().held_bytes, 9 * MIB);
    });
}

#[test]
fn nothing_stays_pinned_and_a_buffer_outlives_its_pool() {
    alone("nothing_stays_pinned_and_a_buffer_outlives_its_pool", &[], |fake| {
        let pool = pool(fake, 16 * MIB);
        let buffer = pool.take(MIB).unwrap();
        pool.warm(16 * MIB).unwrap();
        drop(pool);
        fill(&buffer, 1);
        assert!(holds_only(&buffer, 1));
        drop(buffer);
        assert_eq!(fake.stat("live.host"), 0);
    });
}

#[test]
fn what_the_driver_does_not_pin_is_an_error_with_the_reason_and_the_pool_goes_on() {
    alone("what_the_driver_does_not_pin_is_an_error_with_the_reason_and_the_pool_goes_on", &[], |fake| {
        let pool = pool(fake, 16 * MIB);
        fake.control("fail cuMemHostRegister_v2 1 2");
        let refused = pool.take(MIB).unwrap_err();
        assert!(matches!(&refused, PinError::Pin { bytes, .. } if *bytes == 4 * MIB));
        let said = refused.to_string();
        assert!(said.contains("CUDA_ERROR_OUT_OF_MEMORY") && said.contains("memory are available"), "{said}");
        assert_eq!(pool.counters().held_bytes, 0);
        pool.take(MIB).unwrap();
    });
}

#[test]
fn where_registering_is_refused_the_driver_allocates_and_copies_are_right() {
    alone("where_registering_is_refused_the_driver_allocates_and_copies_are_right", &[], |fake| {
        let device = Device::open(fake.driver, 1).unwrap();
        for (times, code) in (1..).zip([1, 304, 800, 801]) {
            fake.control(&format!("refuse cuMemHostRegister_v2 {code}"));
            let pool = pool(fake, 16 * MIB);
            let (one, other) = (pool.take(3 * MIB).unwrap(), pool.take(3 * MIB).unwrap());
            assert_eq!(fake.stat("cuMemHostRegister_v2"), times, "it was asked again after a refusal");
            let (stream, there) =
                (Stream::new(&device).unwrap(), DeviceMemory::new(&device, 3 * MIB).unwrap());
            fill(&one, 7);
            fill(&other, 8);
            let current = device.enter().unwrap();
            for (from, to) in
                [(one.as_ptr() as u64, there.address()), (there.address(), other.as_ptr() as u64)]
            {
                // SAFETY: all of it lives until the stream was waited for.
                unsafe { stream.copy(from, to, 3 * MIB).unwrap() };
            }
            stream.synchronize().unwrap();
            assert!(holds_only(&other, 7) && one.file().is_none());
            drop((one, other, pool, current));
            assert_eq!(fake.stat("live.host"), 0);
        }
        let shared = PinnedPool::new(&device, PoolConfig::shared(16 * MIB));
        assert!(matches!(shared.take(MIB), Err(PinError::Pin { .. })), "there is no file to share");
    });
}

#[test]
fn no_byte_has_two_borrowers_while_many_take_and_the_pool_is_warmed() {
    alone("no_byte_has_two_borrowers_while_many_take_and_the_pool_is_warmed", &[], |fake| {
        let pool = pool(fake, 24 * MIB);
        let warming = pool.warm_in_background(24 * MIB).unwrap();
        thread::scope(|scope| {
            for borrower in 1..=6u8 {
                let pool = &pool;
                scope.spawn(move || {
                    for round in 0..20 {
                        let bytes = 1 + u64::from(borrower) * 300_000 + round * 4096;
                        let buffer = pool.take(bytes).unwrap();
                        fill(&buffer, borrower);
                        thread::yield_now();
                        assert!(holds_only(&buffer, borrower));
                    }
                });
            }
        });
        warming.join().unwrap().unwrap();
        let counters = pool.counters();
        assert_eq!((counters.lent_bytes, counters.held_bytes), (0, 24 * MIB));
        assert_eq!(fake.stat("live.host"), 6);
    });
}

#[test]
fn another_process_finds_a_shared_buffer_at_its_offset_of_its_file() {
    alone("another_process_finds_a_shared_buffer_at_its_offset_of_its_file", &[], |fake| {
        let device = Device::open(fake.driver, 0).unwrap();
        let config = PoolConfig { slab_bytes: 4 * MIB, ..PoolConfig::shared(8 * MIB) };
        let pool = PinnedPool::new(&device, config);
        let _before = pool.take(MIB).unwrap();
        let buffer = pool.take(5000).unwrap();
        fill(&buffer, 9);
        let (file, offset) = buffer.file().unwrap();
        assert_eq!(offset, MIB);
        let mut read = [0; 5000];
        let file = std::fs::File::from(file.try_clone_to_owned().unwrap());
        file.read_exact_at(&mut read, offset).unwrap();
        assert_eq!(read, [9; 5000]);
        assert!(file.set_len(0).is_err(), "nobody can shorten it under the mapping");
    });
}

#[test]
fn gpus_read_and_write_a_buffer() {
    alone("gpus_read_and_write_a_buffer", &[], |fake| {
        let pool = pool(fake, 16 * MIB);
        let device = Device::open(fake.driver, 1).unwrap();
        let (stream, there) = (Stream::new(&device).unwrap(), DeviceMemory::new(&device, MIB).unwrap());
        let (from, to) = (pool.take(MIB).unwrap(), pool.take(MIB).unwrap());
        fill(&from, 5);
        fill(&to, 0);
        {
            let _current = device.enter().unwrap();
            // SAFETY: all of the memory outlives the synchronisation below, and nothing else
            // touches it.
            unsafe {
                stream.copy(from.as_ptr() as u64, there.address(), MIB).unwrap();
                stream.copy(there.address(), to.as_ptr() as u64, MIB).unwrap();
            }
            stream.synchronize().unwrap();
        }
        assert!(holds_only(&to, 5));
        assert_eq!((fake.stat("bytes.h2d.1"), fake.stat("bytes.d2h.1")), (MIB, MIB));
    });
}

#[test]
fn memory_is_pinned_behind_its_users() {
    alone("memory_is_pinned_behind_its_users", &[], |fake| {
        let device = Device::open(fake.driver, 0).unwrap();
        let memory: Arc<dyn Backing> = Arc::new(HostBuffer::new(16 * MIB as usize));
        let behind = PinnedBehind::start(&device, Arc::clone(&memory), MIB, 3).unwrap();
        let (told, outcome) = channel();
        for ranges in [vec![(14 * MIB, MIB), (3 * MIB - 1, 2)], vec![(0, 16 * MIB)], vec![]] {
            let told = told.clone();
            behind.when_pinned(ranges.into_iter(), Box::new(move |pinned| told.send(pinned).unwrap()));
        }
        for _ in 0..3 {
            assert_eq!(outcome.recv_timeout(Duration::from_secs(60)), Ok(Ok(())));
        }
        assert_eq!((behind.progress().0, fake.stat("cuMemHostRegister_v2")), (16 * MIB, 16));
        let told_at_once = told.clone();
        behind.when_pinned(
            [(5 * MIB, 1)].into_iter(),
            Box::new(move |pinned| told_at_once.send(pinned).unwrap()),
        );
        assert_eq!(outcome.try_recv(), Ok(Ok(())));
        behind.when_pinned([(16 * MIB, 1)].into_iter(), Box::new(move |pinned| told.send(pinned).unwrap()));
        assert!(outcome.try_recv().unwrap().is_err(), "there are no such bytes");
        behind.close();
        assert_eq!(fake.stat("live.host"), 0);
        assert_eq!(Arc::strong_count(&memory), 2, "the test's and the value's");
    });
}

#[test]
fn what_is_waited_for_is_pinned_first() {
    alone("what_is_waited_for_is_pinned_first", &[], |fake| {
        const PIECES: u64 = 64;
        let device = Device::open(fake.driver, 0).unwrap();
        let begun = Instant::now();
        // The thread that pins is held up while it tells of a piece. It may have come to the end
        // before that.
        let (behind, held, release) = loop {
            assert!(
                begun.elapsed() < Duration::from_secs(60),
                "pinning is over before anything can be asked for"
            );
            let memory: Arc<dyn Backing> = Arc::new(HostBuffer::new((PIECES * MIB) as usize));
            let behind = Arc::new(PinnedBehind::start(&device, memory, MIB, 1).unwrap());
            let (release, gate) = channel::<()>();
            let gate = Arc::new(Mutex::new(gate));
            let (told, outcome) = channel();
            let here = thread::current().id();
            let held = (0..PIECES / 2).find(|piece| {
                let (told, gate) = (told.clone(), Arc::clone(&gate));
                let hold = move |_: Result<(), String>| {
                    told.send(thread::current().id() != here).unwrap();
                    if thread::current().id() != here {
                        // It ends when the other side is dropped.
                        let _ = gate.lock().unwrap().recv();
                    }
                };
                behind.when_pinned([(piece * MIB, 1)].into_iter(), Box::new(hold));
                outcome.recv_timeout(Duration::from_secs(60)).unwrap()
            });
            if let Some(held) = held {
                break (behind, held, release);
            }
        };
        let before = behind.progress().0;
        assert!(before <= (held + 1) * MIB);
        let (told, outcome) = channel();
        let own = Arc::clone(&behind);
        let note = move |pinned: Result<(), String>| told.send((pinned, own.progress().0)).unwrap();
        behind.when_pinned([((PIECES - 1) * MIB, MIB)].into_iter(), Box::new(note));
        drop(release);
        let (pinned, at) = outcome.recv_timeout(Duration::from_secs(60)).unwrap();
        assert_eq!(
            (pinned, at),
            (Ok(()), before + MIB),
            "the last piece comes right after the one that was held up"
        );
        behind.close();
    });
}

#[test]
fn a_piece_that_cannot_be_pinned_is_refused_and_the_others_are_there() {
    let env = [("FAKE_CUDA_FAULTS", "fail cuMemHostRegister_v2 2 2")];
    alone("a_piece_that_cannot_be_pinned_is_refused_and_the_others_are_there", &env, |fake| {
        let device = Device::open(fake.driver, 0).unwrap();
        let memory: Arc<dyn Backing> = Arc::new(HostBuffer::new(4 * MIB as usize));
        let behind = PinnedBehind::start(&device, memory, MIB, 1).unwrap();
        let (told, outcome) = channel();
        for piece in 0..4 {
            let told = told.clone();
            let on_pinned = Box::new(move |pinned: Result<(), String>| told.send((piece, pinned)).unwrap());
            behind.when_pinned([(piece * MIB, MIB)].into_iter(), on_pinned);
        }
        let mut refused = 0;
        for _ in 0..4 {
            let (piece, pinned) = outcome.recv_timeout(Duration::from_secs(60)).unwrap();
            if let Err(why) = pinned {
                assert!(why.contains("OUT_OF_MEMORY"), "piece {piece}: {why}");
                refused += 1;
            }
        }
        assert_eq!((refused, behind.progress().0), (1, 3 * MIB));
        drop(behind);
        // It is unpinned on a thread of its own.
        while fake.stat("live.host") > 0 {
            thread::sleep(Duration::from_millis(1));
        }
    });
}

#[test]
fn a_piece_that_was_refused_is_pinned_when_it_is_asked_for_later() {
    let env = [("FAKE_CUDA_FAULTS", "fail cuMemHostRegister_v2 2 2")];
    alone("a_piece_that_was_refused_is_pinned_when_it_is_asked_for_later", &env, |fake| {
        let device = Device::open(fake.driver, 0).unwrap();
        let memory: Arc<dyn Backing> = Arc::new(HostBuffer::new(4 * MIB as usize));
        let begun = Instant::now();
        let behind = PinnedBehind::start(&device, memory, MIB, 1).unwrap();
        let ask = || {
            let (told, outcome) = channel();
            let on_pinned = Box::new(move |pinned: Result<(), String>| told.send(pinned).unwrap());
            behind.when_pinned([(0, 4 * MIB)].into_iter(), on_pinned);
            outcome.recv_timeout(Duration::from_secs(60)).unwrap()
        };
        while behind.progress().0 < 3 * MIB {
            thread::sleep(Duration::from_millis(1));
        }
        // Asking again and again does not keep the driver busy.
        let refused = (0..100).filter(|_| ask().is_err()).count();
        assert!(refused > 0 || begun.elapsed() > Duration::from_secs(1), "it was asked for at once");
        assert!(fake.stat("cuMemHostRegister_v2") <= 4 + begun.elapsed().as_secs());
        thread::sleep(Duration::from_millis(1100));
        assert_eq!((ask(), behind.progress().0), (Ok(()), 4 * MIB));
        assert_eq!(fake.stat("cuMemHostRegister_v2"), 5);
        behind.close();
        assert_eq!(fake.stat("live.host"), 0);
    });
}
