//! What holds when the system below misbehaves.

use crate::world::{DEPTH, PAGE, World, faulty_world, for_each_driver, world};
use forebay_store::disk::{Driver, IDLE_RESULTS_MAX};
use forebay_torture::faults::Ending;
use forebay_torture::faulty_kernel::Gate;
use forebay_transfer::{End, Transfer};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// A world whose requests end as `choose` says, told at once.
fn ending(driver: Driver, bytes: u64, choose: impl Fn(u64) -> Ending + Send + 'static) -> World {
    faulty_world(driver, bytes, Gate::default(), move |nth| (choose(nth), 0))
}

#[test]
fn a_short_read_is_never_success() {
    for_each_driver(|driver| {
        let world = ending(driver, 64 * PAGE, |nth| match nth % 4 {
            3 => Ending::Honest,
            // Shares that end inside a page and inside a device block, then the rest.
            nth => Ending::Short([4096, 512, 1536][nth as usize]),
        });
        let written = world.fill(0, 16, 1);
        world.run_fully(world.writing(&[(0, 8, 16)]));
        world.run_fully(world.reading(&[(40, 8, 3), (20, 11, 10), (50, 21, 3)]));
        let read = [world.bytes(40, 3), world.bytes(20, 10), world.bytes(50, 3)].concat();
        assert!(read == written, "{driver:?}");
        assert!(world.disk.stats().short >= 6, "{:?}", world.disk.stats());
    });
}

#[test]
fn a_file_that_was_truncated_is_a_failure_and_never_a_hit() {
    for_each_driver(|driver| {
        let world = world(driver, 64 * PAGE);
        world.fill(0, 64, 1);
        world.run_fully(world.writing(&[(0, 0, 64)]));
        let file = std::fs::OpenOptions::new().write(true).open(&world.path).unwrap();
        // At a page, inside a page, and inside a device block.
        for end in [8 * PAGE, 6 * PAGE + 512, 4 * PAGE + 100] {
            file.set_len(end).unwrap();
            let error = world.error_of(world.reading(&[(0, 0, 16)]));
            assert!(error.contains("truncated"), "{driver:?}: {error}");
            let error = world.error_of(world.reading(&[(0, 32, 16)]));
            assert!(error.contains("the file ends 65536 bytes too early"), "{driver:?}: {error}");
        }
        assert!(world.disk.stats().truncated >= 6);
    });
}

#[test]
fn results_without_progress_are_failures_with_their_reason() {
    for_each_driver(|driver| {
        let read = |world: &World| world.reading(&[(0, 0, 4)]);
        let write = |world: &World| world.writing(&[(0, 0, 4)]);
        for (result, message) in [
            (-libc::EIO, "the device failed"),
            (-libc::ENOSPC, "the disk is full"),
            (-libc::EINTR, "no progress after 1024 attempts"),
            (-libc::EAGAIN, "no progress after 1024 attempts"),
            (-libc::EBADF, "os error 9"),
            (1 << 20, "reports 1048576 bytes where 16384 were asked for"),
        ] {
            let world = ending(driver, 64 * PAGE, move |_| Ending::Instead(result));
            for transfer in [read(&world), write(&world)] {
                let error = world.error_of(transfer);
                assert!(error.contains(message), "{driver:?}: {error}");
                assert!(error.contains("16384 bytes at file offset 0"), "{driver:?}: {error}");
            }
            assert!(world.file_bytes(0, 64).iter().all(|byte| *byte == 0));
        }
        let world = ending(driver, 64 * PAGE, |_| Ending::Instead(0));
        assert!(world.error_of(read(&world)).contains("truncated"));
        assert!(world.error_of(write(&world)).contains("wrote nothing of the last 16384 bytes"));
    });
}

#[test]
fn an_error_that_passes_is_survived() {
    for_each_driver(|driver| {
        let first = |nth| if nth == 0 { Ending::Instead(-libc::EIO) } else { Ending::Honest };
        let world = ending(driver, 64 * PAGE, first);
        let written = world.fill(0, 16, 1);
        world.run_fully(world.writing(&[(0, 0, 16)]));
        assert!(world.file_bytes(0, 16) == written);
        assert_eq!((world.disk.stats().device, world.disk.stats().faults()), (1, 1));
    });
}

#[test]
fn storms_of_interruptions_are_survived() {
    for_each_driver(|driver| {
        let storm = u64::from(IDLE_RESULTS_MAX) - 1;
        let world = ending(driver, 64 * PAGE, move |nth| match nth % (storm + 1) {
            calm if calm == storm => Ending::Honest,
            odd if odd % 2 == 1 => Ending::Instead(-libc::EAGAIN),
            _ => Ending::Instead(-libc::EINTR),
        });
        let written = world.fill(0, 16, 1);
        world.run_fully(world.writing(&[(0, 0, 16)]));
        assert!(world.file_bytes(0, 16) == written);
        assert_eq!(world.disk.stats().again, storm);
    });
}

#[test]
fn any_mix_of_faults_and_orders_leaves_every_byte_right() {
    for_each_driver(|driver| {
        for seed in 0..4 {
            let mut random = Random(seed * 2 + 1);
            let choose = move |_| match random.below(8) {
                0 => (Ending::Short(512 * (1 + random.below(40) as usize)), 0),
                1 => (Ending::Instead(-libc::EINTR), 0),
                2 => (Ending::Instead(-libc::EAGAIN), 0),
                3 | 4 => (Ending::Honest, random.below(10) as usize),
                _ => (Ending::Honest, 0),
            };
            let world = faulty_world(driver, 256 * PAGE, Gate::default(), choose);
            let written = world.fill(0, 128, seed);
            run_all(&world, (0..128).step_by(8).map(|page| world.writing(&[(page, 2 * page, 8)])));
            let scattered = |page: u64| [(255 - page, 2 * page, 1), (254 - page, 2 * page + 1, 1)];
            run_all(&world, (0..128).step_by(8).map(|page| world.reading(&scattered(page))));
            for page in (0..128).step_by(8) {
                let read = [world.bytes(255 - page, 1), world.bytes(254 - page, 1)].concat();
                let at = (page * PAGE) as usize;
                assert!(read == written[at..at + 2 * PAGE as usize], "{driver:?} seed {seed} page {page}");
            }
            assert_eq!(world.disk.stats().faults(), 0);
        }
    });
}

/// Submits all transfers at once; all must succeed.
fn run_all(world: &World, transfers: impl Iterator<Item = Transfer>) {
    let (sender, receiver) = std::sync::mpsc::channel();
    for transfer in transfers {
        let sender = sender.clone();
        world.mover.submit(transfer, move |end| sender.send(end).unwrap()).unwrap();
    }
    drop(sender);
    receiver.iter().for_each(|end| assert!(matches!(end, End::Done { .. }), "{end:?}"));
}

#[test]
fn the_driver_never_has_more_requests_than_the_depth() {
    for_each_driver(|driver| {
        let gate = Gate::default();
        let started = Arc::new(AtomicU64::new(0));
        let counter = Arc::clone(&started);
        let choose = move |_| {
            counter.fetch_add(1, Ordering::SeqCst);
            (Ending::Honest, 0)
        };
        let world = faulty_world(driver, 256 * PAGE, gate.clone(), choose);
        gate.close();
        // 32 I/Os that do not adjoin on disk, in one operation.
        let pages: Vec<_> = (0..32).map(|io| (io, 2 * io, 1)).collect();
        let (sender, receiver) = std::sync::mpsc::channel();
        world.mover.submit(world.reading(&pages), move |end| sender.send(end).unwrap()).unwrap();
        while started.load(Ordering::SeqCst) < u64::from(DEPTH) {
            std::thread::yield_now();
        }
        // One that must not come would come now.
        std::thread::sleep(std::time::Duration::from_millis(50));
        assert_eq!(started.load(Ordering::SeqCst), u64::from(DEPTH));
        gate.open();
        assert_eq!(receiver.recv().unwrap(), End::Done { bytes: 32 * PAGE });
        assert_eq!(started.load(Ordering::SeqCst), 32);
    });
}

/// Xorshift, seeded with an odd number.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % bound
    }
}
