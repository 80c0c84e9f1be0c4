//! Memory of GPUs as memory of agents, on the fake driver: over TCP and through staging, with the
//! guarantees that host memory has.
#![allow(clippy::unwrap_used)]

mod ipc;
#[path = "../common/log.rs"]
mod log;
mod peer;
mod rig;

use cuda_testkit::{Fake, alone};
use forebay_net::{Access, Descriptors, End, FLOW_SLOT_BYTES, FLOW_SLOTS, LeasedSpan, Op, STAGING_SLOTS};
use rig::*;
use std::sync::atomic::Ordering;
use std::time::Duration;
use testkit::eventually;

const BYTES: usize = 8 << 20;
const TWO: [(&str, &str); 1] = [("FAKE_CUDA_GPUS", "2")];

/// Reads and writes between these two ends, in small blocks and in large ones.
fn all_arrives(one: &Side, two: &Side) {
    one.knows(two);
    for (seed, block) in [(1, 26_000), (3, 1 << 20), (5, 64), (7, 600_000)] {
        let count = if block == 64 { 10_000 } else { BYTES / block };
        for op in [Op::Read, Op::Write] {
            let (ours, theirs) = (one.fill(seed), two.fill(seed + 1));
            let moved = (block * count) as u64;
            assert_eq!(run(&one.request(op, two, block as u64, count as u64)), End::Done { bytes: moved });
            let (from, to, kept) = match op {
                Op::Read => (&theirs, one, &ours),
                Op::Write => (&ours, two, &theirs),
            };
            let after = to.bytes();
            let (arrived, rest) = after.split_at(block * count);
            assert!(arrived == backwards(from, block, count), "{op:?} of {count} blocks of {block} bytes");
            assert!(rest == &kept[block * count..], "{op:?}: bytes were written that nobody named");
        }
    }
}

#[test]
fn bytes_read_from_gpu_memory_over_tcp_are_exact() {
    alone("bytes_read_from_gpu_memory_over_tcp_are_exact", &TWO, |fake| {
        all_arrives(&Side::on_host("one", BYTES), &Side::on_gpu(fake, "two", 0, BYTES));
        assert!(fake.stat("bytes.d2h.0") > 0 && fake.stat("bytes.h2d.0") > 0);
    });
}

#[test]
fn bytes_go_from_gpu_memory_here_to_host_memory_there_and_back() {
    alone("bytes_go_from_gpu_memory_here_to_host_memory_there_and_back", &TWO, |fake| {
        all_arrives(&Side::on_gpu(fake, "one", 0, BYTES), &Side::on_host("two", BYTES));
    });
}

#[test]
fn bytes_go_from_one_gpu_to_another_over_tcp() {
    alone("bytes_go_from_one_gpu_to_another_over_tcp", &TWO, |fake| {
        all_arrives(&Side::on_gpu(fake, "one", 0, BYTES), &Side::on_gpu(fake, "two", 1, BYTES));
    });
}

/// Waits until an engine has begun what it will not end.
fn something_waits(fake: &Fake, calls_before: u64) {
    eventually("a copy was begun", || fake.stat("cuMemcpyAsync") > calls_before);
}

#[test]
fn a_cancelled_write_into_gpu_memory_touches_it_no_more() {
    alone("a_cancelled_write_into_gpu_memory_touches_it_no_more", &TWO, |fake| {
        let (one, two) = (Side::on_host("one", BYTES), Side::on_gpu(fake, "two", 0, BYTES));
        one.knows(&two);
        // So few that all have their slots, and so many that the wire waits for some.
        for blocks in [1, 8] {
            one.fill(1);
            two.fill(2);
            let begun = fake.stat("cuMemcpyAsync");
            fake.control("freeze h2d.0");
            let request = one.request(Op::Write, &two, 1 << 20, blocks);
            let ended = post(&request);
            something_waits(fake, begun);
            std::thread::sleep(WHILE);
            std::thread::scope(|scope| {
                let (sender, returned) = std::sync::mpsc::channel();
                let request = &request;
                scope.spawn(move || {
                    request.cancel();
                    sender.send(()).unwrap();
                });
                let early = (returned.recv_timeout(WHILE), ended.try_recv());
                fake.control("release h2d.0");
                assert!(matches!(early, (Err(_), Err(_))), "it ended while a copy could still write");
                returned.recv_timeout(LONG).unwrap();
            });
            let end = ended.recv_timeout(LONG).unwrap();
            assert!(!matches!(end, End::Failed { .. }), "{end:?}");
            let theirs = two.fill(3);
            std::thread::sleep(WHILE);
            assert!(two.bytes() == theirs, "something was written after the cancel");
        }
    });
}

#[test]
fn a_device_copy_that_fails_fails_the_read_and_says_why() {
    alone("a_device_copy_that_fails_fails_the_read_and_says_why", &TWO, |fake| {
        let (one, two) = (Side::on_host("one", BYTES), Side::on_gpu(fake, "two", 0, BYTES));
        one.knows(&two);
        for (op, way) in [(Op::Read, "from"), (Op::Write, "into")] {
            fake.control("refuse cuMemcpyAsync 1");
            let end = run(&one.request(op, &two, 1 << 20, 4));
            let End::Failed { why, .. } = &end else { panic!("{end:?}") };
            let said = why.to_string();
            assert!(said.contains(&format!("the copy {way} GPU memory failed")), "{said}");
            fake.control("mend");
            let sent = if op == Op::Read { two.fill(4) } else { one.fill(5) };
            assert!(matches!(run(&one.request(op, &two, 1 << 20, 4)), End::Done { .. }));
            let there = if op == Op::Read { one.bytes() } else { two.bytes() };
            assert!(there[..4 << 20] == backwards(&sent, 1 << 20, 4), "{op:?} after a failure");
        }
    });
}

#[test]
fn staging_is_bounded_and_everything_still_arrives() {
    alone("staging_is_bounded_and_everything_still_arrives", &TWO, |fake| {
        let (one, two) = (Side::on_gpu(fake, "one", 0, BYTES), Side::on_gpu(fake, "two", 1, BYTES));
        one.knows(&two);
        let sent = one.fill(1);
        // Slow engines, so that the wire has to wait for slots.
        fake.control("delay h2d.1 2000; delay d2h.0 500");
        let requests: Vec<_> = (0..6).map(|_| one.request(Op::Write, &two, 1 << 20, 8)).collect();
        let read = Side::on_host("three", BYTES);
        read.knows(&two);
        let ends: Vec<_> = requests.iter().map(post).collect();
        for end in ends {
            assert_eq!(end.recv_timeout(LONG).unwrap(), End::Done { bytes: BYTES as u64 });
        }
        assert!(two.bytes() == backwards(&sent, 1 << 20, 8));
        assert!(matches!(run(&read.request(Op::Read, &two, 1 << 20, 8)), End::Done { .. }));
        let of_flow = (u64::from(FLOW_SLOTS) * FLOW_SLOT_BYTES) as usize;
        let of_direction = STAGING_SLOTS as usize * forebay_net::tcp::DATA_BYTES_MAX as usize;
        assert_eq!(one.pinned_bytes.load(Ordering::Relaxed), of_flow, "one connection to a peer");
        assert_eq!(two.pinned_bytes.load(Ordering::Relaxed), 2 * of_direction, "a WRITE's and a READ's");
    });
}

#[test]
fn a_region_is_not_released_before_its_copies_end() {
    alone("a_region_is_not_released_before_its_copies_end", &TWO, |fake| {
        for (op, engine) in [(Op::Read, "d2h.0"), (Op::Write, "h2d.0")] {
            let (one, two) = (Side::on_host("one", BYTES), Side::on_gpu(fake, "two", 0, BYTES));
            one.knows(&two);
            let begun = fake.stat("cuMemcpyAsync");
            fake.control(&format!("freeze {engine}"));
            let ended = post(&one.request(op, &two, 1 << 20, 8));
            something_waits(fake, begun);
            std::thread::scope(|scope| {
                let (sender, released) = std::sync::mpsc::channel();
                let two = &two;
                scope.spawn(move || sender.send(two.agent().deregister(two.registration)).unwrap());
                let early = released.recv_timeout(WHILE);
                fake.control(&format!("release {engine}"));
                assert!(early.is_err(), "{op:?}: the memory was given back under a copy");
                released.recv_timeout(LONG).unwrap().unwrap();
            });
            let end = ended.recv_timeout(LONG).unwrap();
            assert!(matches!(end, End::Failed { .. }), "{op:?}: {end:?}");
        }
    });
}

#[test]
fn a_peer_that_dies_in_a_write_leaves_staging_to_the_next_one() {
    alone("a_peer_that_dies_in_a_write_leaves_staging_to_the_next_one", &TWO, |fake| {
        let two = Side::on_gpu(fake, "two", 0, BYTES);
        for seed in 0..6 {
            let one = Side::on_host("one", BYTES);
            one.knows(&two);
            one.fill(seed);
            let begun = fake.stat("cuMemcpyAsync");
            fake.control("delay h2d.0 3000");
            let _ended = post(&one.request(Op::Write, &two, 1 << 20, 8));
            something_waits(fake, begun);
            // What is under way ends with its agent.
            drop(one);
        }
        fake.control("delay h2d.0 0");
        let one = Side::on_host("one", BYTES);
        one.knows(&two);
        let sent = one.fill(9);
        assert_eq!(run(&one.request(Op::Write, &two, 1 << 20, 8)), End::Done { bytes: BYTES as u64 });
        assert!(two.bytes() == backwards(&sent, 1 << 20, 8));
    });
}

#[test]
fn gpu_memory_under_a_lease_that_has_expired_is_not_read() {
    alone("gpu_memory_under_a_lease_that_has_expired_is_not_read", &TWO, |fake| {
        let one = Side::on_host("one", BYTES);
        let two = Side::leased_on_gpu(fake, "two", 0, BYTES, Access::LEASED_READ);
        one.knows(&two);
        one.agent().connect("two").unwrap();
        let sent = two.fill(1);
        let (offered, len) = (two.registration.offered(), BYTES as u64);
        let read = |lease| {
            let theirs = one.agent().region("two", offered, lease).unwrap();
            let span = |region| forebay_transfer::Span::new(region, 0, len);
            let pair = forebay_transfer::SpanPair::new(span(theirs), span(one.registration.region()));
            let transfer = forebay_transfer::Transfer::new(vec![pair], forebay_transfer::Class::Demand);
            one.agent().mover().run(transfer).unwrap()
        };
        let grant = |limit_us| {
            let spans = vec![LeasedSpan { region: offered, offset: 0, len }];
            two.agent().leases().grant(one.agent().identity().node, spans, limit_us, |_| {}).unwrap()
        };
        let end = read(grant(u64::MAX));
        assert_eq!(end, forebay_transfer::End::Done { bytes: len });
        assert!(one.bytes() == sent);
        // Copied while the lease lived, and sent after its end.
        fake.control("freeze d2h.0");
        let lease = grant(200_000);
        std::thread::scope(|scope| {
            let reading = scope.spawn(|| read(lease));
            std::thread::sleep(Duration::from_millis(400));
            fake.control("release d2h.0");
            let end = reading.join().unwrap();
            assert!(format!("{end:?}").contains("does not live"), "{end:?}");
        });
    });
}

#[test]
fn memory_that_is_not_the_named_gpus_is_refused_and_says_why() {
    alone("memory_that_is_not_the_named_gpus_is_refused_and_says_why", &TWO, |fake| {
        let side = Side::on_gpu(fake, "one", 0, BYTES);
        let Where::Gpu(gpu) = &side.memory else { panic!() };
        let refused = |device, address, bytes| {
            // SAFETY: nothing is copied.
            unsafe { gpu.places.register(device, address, bytes) }.unwrap_err().to_string()
        };
        let at = gpu.memory.address();
        assert_eq!(refused(2, at, 1), "device: 2 does not exist; 2 GPUs are visible, the first is 0");
        assert_eq!(refused(1, at, 1), format!("device: {at:#x} lies on GPU 0, not on 1"));
        assert!(refused(0, at, BYTES as u64 + (64 << 20)).contains("reach beyond their allocation"));
        assert!(refused(0, gpu.bounce.start() as u64, 1).contains("it is pinned host memory"));
        assert!(refused(0, 4096, 1).contains("the driver does not know it"));
        fake.control("foreign 0");
        assert!(refused(0, at, 1).contains("is of another context"));
        let again = (side.registration.region(), at, 4096);
        let place = forebay_transfer::Place::Device(0);
        let overlap = side.agent().register_device(place, again, Access::OPEN).unwrap_err();
        assert!(overlap.to_string().contains("overlaps what is registered"), "{overlap}");
        let unknown = side.agent().register_device(forebay_transfer::Place::Device(1), again, Access::OPEN);
        assert!(unknown.unwrap_err().to_string().contains("Device(1) is not a place of this agent"));
        let beyond = Descriptors::from_blocks([(at, BYTES as u64 + 1)]).unwrap();
        assert!(side.agent().prepare_local(&beyond).is_err());
    });
}
