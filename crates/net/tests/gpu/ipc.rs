//! Bytes between GPUs of one host, copied by the asking end's GPU: the guarantees that hold over
//! connections hold here too, whoever is killed, stopped or lies.

use crate::log;
use crate::peer::{Peer, from_hex, sum};
use crate::rig::*;
use crate::{BYTES, TWO, all_arrives};
use cuda_testkit::{Fake, alone};
use forebay_cuda::ipc_memory::IpcMemory;
use forebay_net::{Access, AgentError, End, IPC, LeasedSpan, Op, PeerRegion, TCP};
use forebay_transfer::{Class, End as Moved, Ipc, Place, RegionId, Span, SpanPair, Transfer};
use rustix::process::Signal;
use std::sync::mpsc;
use testkit::eventually;

const MIB: u64 = 1 << 20;
/// By what a GPU copies blocks of some bytes: what the driver is called for, and what executes it.
const MEANS: [(u64, &str, &str); 2] =
    [(1 << 14, "cuLaunchKernel", "compute.0"), (MIB, "cuMemcpyBatchAsync", "p2p.0")];
/// Blocks that the copy engine moves.
const LARGE: (u64, &str) = (MEANS[1].0, MEANS[1].2);

fn copies(fake: &Fake) -> u64 {
    MEANS.iter().map(|(_, symbol, _)| fake.stat(symbol)).sum::<u64>() + fake.stat("cuMemcpyAsync")
}

fn went_by_ipc(side: &Side) {
    assert!(side.moved(IPC) > 0);
    assert_eq!(side.moved(TCP), 0, "bytes went over TCP as well");
}

/// Counted with its reason, and right all the same.
fn goes_over_tcp(one: &Side, two: &Side) {
    all_arrives(one, two);
    let stats = one.agent().stats();
    assert!(stats[0].counts.faults["ipc_not_used"] >= 1, "{:?}", stats[0].counts.faults);
    assert_eq!(one.moved(IPC), 0);
    assert!(one.moved(TCP) > 0);
}

#[test]
fn bytes_between_gpus_of_one_process_go_by_ipc_and_are_exact() {
    alone("ipc::bytes_between_gpus_of_one_process_go_by_ipc_and_are_exact", &TWO, |fake| {
        for gpu in [0, 1] {
            let (one, two) = (Side::by_ipc(fake, "one", 0, BYTES), Side::by_ipc(fake, "two", gpu, BYTES));
            all_arrives(&one, &two);
            went_by_ipc(&one);
        }
        assert_eq!(fake.stat("cuIpcOpenMemHandle_v2"), 0, "the driver opens none of this process");
    });
}

#[test]
fn bytes_between_gpus_of_two_processes_go_by_ipc_and_are_exact() {
    alone("ipc::bytes_between_gpus_of_two_processes_go_by_ipc_and_are_exact", &TWO, |fake| {
        for gpu in [0, 1] {
            let (one, mut two) = (Side::by_ipc(fake, "one", 0, BYTES), Peer::spawn(gpu, BYTES));
            let opened = fake.stat("cuIpcOpenMemHandle_v2");
            one.agent().add_peer(&two.metadata).unwrap();
            for (seed, block) in [(1, 26_001), (2, MIB as usize), (3, 64), (4, 599_999)] {
                let count = (BYTES / block).min(10_000);
                let request = |op| one.request_at(op, two.at(), block as u64, count as u64);
                let [read, write] = [Op::Read, Op::Write].map(request);
                let theirs: u64 = two.ask(&format!("fill {seed}")).parse().unwrap();
                let moved = (block * count) as u64;
                let before = one.fill(seed + 100);
                assert_eq!(run(&read), End::Done { bytes: moved });
                let ours = one.bytes();
                assert!(ours[block * count..] == before[block * count..], "more than was named");
                // Back in the same order: what was read is what is there.
                assert_eq!(run(&write), End::Done { bytes: moved });
                assert_eq!(two.ask("sum").parse::<u64>().unwrap(), theirs, "blocks of {block} bytes");
                let ours = one.fill(seed + 200);
                assert_eq!(run(&write), End::Done { bytes: moved });
                let mut there = vec![0; BYTES];
                let whole = one.request_at(Op::Read, two.at(), BYTES as u64, 1);
                assert_eq!(run(&whole), End::Done { bytes: BYTES as u64 });
                there.copy_from_slice(&one.bytes());
                assert!(there[..block * count] == backwards(&ours, block, count), "{block}");
                assert_eq!(sum(&there), two.ask("sum").parse::<u64>().unwrap());
            }
            went_by_ipc(&one);
            assert_eq!(
                fake.stat("cuIpcOpenMemHandle_v2") - opened,
                2,
                "the memory, and what it is tried with"
            );
        }
    });
}

#[test]
fn a_driver_that_copies_one_block_a_call_copies_all_of_them() {
    let env = [TWO[0], ("FAKE_CUDA_FAULTS", "missing cuMemcpyBatchAsync")];
    alone("ipc::a_driver_that_copies_one_block_a_call_copies_all_of_them", &env, |fake| {
        let (one, two) = (Side::by_ipc(fake, "one", 0, BYTES), Side::by_ipc(fake, "two", 1, BYTES));
        all_arrives(&one, &two);
        went_by_ipc(&one);
        assert_eq!(fake.stat("cuMemcpyBatchAsync"), 0);
    });
}

#[test]
fn memory_that_cannot_be_exported_goes_over_tcp() {
    alone("ipc::memory_that_cannot_be_exported_goes_over_tcp", &TWO, |fake| {
        log::capture();
        fake.control("refuse cuIpcGetMemHandle 801");
        goes_over_tcp(&Side::by_ipc(fake, "one", 0, BYTES), &Side::by_ipc(fake, "two", 1, BYTES));
        let line = log::line(&["WARN", "GPU IPC not used", "peer=\"two\""]);
        assert!(line.contains("cuIpcGetMemHandle"), "it says why: {line}");
    });
}

#[test]
fn a_handle_that_cannot_be_opened_goes_over_tcp() {
    alone("ipc::a_handle_that_cannot_be_opened_goes_over_tcp", &TWO, |fake| {
        fake.control("refuse cuIpcOpenMemHandle_v2 201");
        let (one, mut two) = (Side::by_ipc(fake, "one", 0, BYTES), Peer::spawn(1, BYTES));
        one.agent().add_peer(&two.metadata).unwrap();
        let theirs: u64 = two.ask("fill 1").parse().unwrap();
        let read = one.request_at(Op::Read, two.at(), BYTES as u64, 1);
        assert_eq!(run(&read), End::Done { bytes: BYTES as u64 });
        assert_eq!((sum(&one.bytes()), one.moved(IPC)), (theirs, 0));
        assert_eq!(one.agent().stats()[0].counts.faults["ipc_not_used"], 1);
    });
}

#[test]
fn gpus_that_do_not_reach_each_other_go_over_tcp() {
    alone("ipc::gpus_that_do_not_reach_each_other_go_over_tcp", &TWO, |fake| {
        fake.control("p2p off");
        goes_over_tcp(&Side::by_ipc(fake, "one", 0, BYTES), &Side::by_ipc(fake, "two", 1, BYTES));
    });
}

#[test]
fn gpus_whose_copies_arrive_wrong_go_over_tcp() {
    alone("ipc::gpus_whose_copies_arrive_wrong_go_over_tcp", &TWO, |fake| {
        for how in ["lost", "zero"] {
            fake.control(&format!("p2p copies {how}"));
            goes_over_tcp(&Side::by_ipc(fake, "one", 0, BYTES), &Side::by_ipc(fake, "two", 1, BYTES));
        }
    });
}

#[test]
fn an_owner_that_exports_nothing_is_read_over_tcp() {
    alone("ipc::an_owner_that_exports_nothing_is_read_over_tcp", &TWO, |fake| {
        goes_over_tcp(&Side::by_ipc(fake, "one", 0, BYTES), &Side::on_gpu(fake, "two", 1, BYTES));
        // Host memory is nobody's fault.
        let (one, host) = (Side::by_ipc(fake, "one", 0, BYTES), Side::on_host("host", BYTES));
        all_arrives(&one, &host);
        assert_eq!(one.agent().stats()[0].counts.faults.get("ipc_not_used"), None);
    });
}

#[test]
fn a_copy_that_fails_is_made_over_tcp() {
    alone("ipc::a_copy_that_fails_is_made_over_tcp", &TWO, |fake| {
        let (one, two) = (Side::by_ipc(fake, "one", 0, BYTES), Side::by_ipc(fake, "two", 1, BYTES));
        one.knows(&two);
        // What is opened is tried first, which goes well.
        assert!(matches!(run(&one.request(Op::Read, &two, 64, 1)), End::Done { .. }));
        went_by_ipc(&one);
        for (op, (block, symbol, _)) in [Op::Read, Op::Write].into_iter().zip(MEANS) {
            let count = BYTES as u64 / block;
            let sent = if op == Op::Read { two.fill(4) } else { one.fill(5) };
            let failed = one.agent().stats()[0].counts.faults.get("ipc_not_used").copied();
            fake.control(&format!("fail {symbol} 1 1"));
            assert_eq!(run(&one.request(op, &two, block, count)), End::Done { bytes: BYTES as u64 });
            let there = if op == Op::Read { one.bytes() } else { two.bytes() };
            assert!(there == backwards(&sent, block as usize, count as usize), "{symbol}");
            let faults = &one.agent().stats()[0].counts.faults;
            assert_eq!(faults["ipc_not_used"], failed.unwrap_or(0) + 1, "{symbol}");
        }
        assert!(one.moved(TCP) >= 2 * BYTES as u64);
        // The owner was told that nothing is under way.
        two.agent().deregister(two.registration).unwrap();
    });
}

/// A region of the other end that the mover of this one copies by IPC.
fn region(one: &Side, two: &Side, offered: PeerRegion, lease: u64) -> Option<RegionId> {
    one.agent().ipc_region(two.agent().name(), Place::Device(0), offered, lease).unwrap()
}

fn read(one: &Side, theirs: RegionId, offset: u64, len: u64) -> Moved {
    let pair = SpanPair::new(Span::new(theirs, offset, len), Span::new(one.registration.region(), 0, len));
    one.agent().mover().run(Transfer::new(vec![pair], Class::Demand)).unwrap()
}

#[test]
fn a_read_by_ipc_after_the_lease_ended_gives_no_bytes() {
    alone("ipc::a_read_by_ipc_after_the_lease_ended_gives_no_bytes", &TWO, |fake| {
        let one = Side::by_ipc(fake, "one", 0, BYTES);
        let two = Side::leased_by_ipc(fake, "two", 1, BYTES, Access::LEASED_READ);
        one.knows(&two);
        one.agent().connect("two").unwrap();
        let (sent, offered, len) = (two.fill(1), two.registration.offered(), BYTES as u64);
        let grant = |limit_us| {
            let spans = vec![LeasedSpan { region: offered, offset: 0, len }];
            two.agent().leases().grant(one.agent().identity().node, spans, limit_us, |_| {}).unwrap()
        };
        let lease = grant(u64::MAX);
        let theirs = region(&one, &two, offered, lease).unwrap();
        assert_eq!(read(&one, theirs, 0, len), Moved::Done { bytes: len });
        assert!(one.bytes() == sent);
        // It ends while bytes are copied, all of which were granted: they do not count.
        let (ended, lived) = std::thread::scope(|scope| {
            let begun = copies(fake);
            fake.control("freeze p2p.0");
            let reading = scope.spawn(|| read(&one, theirs, 0, 4096));
            eventually("a copy is under way", || copies(fake) > begun);
            let lived = two.agent().leases().revoke(lease);
            fake.control("release p2p.0");
            (reading.join().unwrap(), lived)
        });
        assert!(lived);
        assert!(format!("{ended:?}").contains("NoLease"), "{ended:?}");
        // It has ended before: nothing is copied.
        let ours = one.fill(2);
        let ended = read(&one, theirs, 0, len);
        assert!(format!("{ended:?}").contains("NoLease"), "{ended:?}");
        assert!(one.bytes() == ours, "bytes came without a lease");
        one.agent().forget_region(theirs).unwrap();
    });
}

#[test]
fn a_write_under_a_lease_is_not_granted() {
    alone("ipc::a_write_under_a_lease_is_not_granted", &TWO, |fake| {
        let access = Access { read: true, write: true, leased: true };
        let one = Side::by_ipc(fake, "one", 0, BYTES);
        let two = Side::leased_by_ipc(fake, "two", 1, BYTES, access);
        one.knows(&two);
        one.agent().connect("two").unwrap();
        let (kept, offered, len) = (two.fill(1), two.registration.offered(), BYTES as u64);
        let spans = vec![LeasedSpan { region: offered, offset: 0, len }];
        let node = one.agent().identity().node;
        let lease = two.agent().leases().grant(node, spans, u64::MAX, |_| {}).unwrap();
        let theirs = region(&one, &two, offered, lease).unwrap();
        let pair = SpanPair::new(Span::new(one.registration.region(), 0, len), Span::new(theirs, 0, len));
        let end = one.agent().mover().run(Transfer::new(vec![pair], Class::Demand)).unwrap();
        assert!(format!("{end:?}").contains("no GPU of a peer writes under a lease"), "{end:?}");
        assert!(two.bytes() == kept);
    });
}

#[test]
fn what_a_peer_may_not_touch_is_not_granted() {
    alone("ipc::what_a_peer_may_not_touch_is_not_granted", &TWO, |fake| {
        let (one, two) = (Side::by_ipc(fake, "one", 0, BYTES), Side::by_ipc(fake, "two", 1, BYTES / 2));
        one.knows(&two);
        one.agent().connect("two").unwrap();
        let offered = two.registration.offered();
        // A region that is said to be longer than it is.
        let longer = PeerRegion { len: BYTES as u64, ..offered };
        let theirs = region(&one, &two, longer, 0).unwrap();
        let half = BYTES as u64 / 2;
        for (offset, len) in [(half - 1, 2), (half, 1), (0, half + 1), (BYTES as u64 - 1, 1)] {
            let end = read(&one, theirs, offset, len);
            assert!(format!("{end:?}").contains("OutOfBounds"), "{offset} {len}: {end:?}");
        }
        let ours = one.fill(1);
        // Another registration of that memory.
        for generation in [offered.generation - 1, offered.generation + 1] {
            assert_eq!(region(&one, &two, PeerRegion { generation, ..offered }, 0), None);
        }
        // One that has been released, by the handle of before.
        assert_eq!(read(&one, theirs, half - 1, 1), Moved::Done { bytes: 1 });
        let ours = [&two.bytes()[BYTES / 2 - 1..], &ours[1..]].concat();
        two.agent().deregister(two.registration).unwrap();
        let end = read(&one, theirs, 0, 1);
        assert!(format!("{end:?}").contains("UnknownRegion"), "{end:?}");
        assert!(one.bytes() == ours, "bytes came that were not granted");
    });
}

#[test]
fn what_a_peer_exports_is_not_believed() {
    alone("ipc::what_a_peer_exports_is_not_believed", &TWO, |fake| {
        let (one, two) = (Side::by_ipc(fake, "one", 0, BYTES), Side::by_ipc(fake, "two", 1, BYTES));
        let [own, theirs] = [&one, &two].map(|side| IpcMemory::new(&side.gpu().places));
        let exported = theirs.export(two.registration.region()).unwrap();
        let region = one.registration.region();
        let refused = |bytes: &[u8]| own.open(Place::Device(0), bytes, region).map(drop).unwrap_err();
        let set = |at: usize, number: u64| {
            let mut bytes = exported.clone();
            bytes[at..at + 8].copy_from_slice(&number.to_le_bytes());
            bytes
        };
        let (offset, bytes, check_offset) = (64, 72, 160);
        for number in [1 << 40, u64::MAX] {
            assert!(refused(&set(offset, number)).contains("of an allocation of"));
            assert!(refused(&set(bytes, number)).contains("of an allocation of"));
        }
        let new = IpcMemory::new(&one.gpu().places);
        let refused = |bytes: &[u8]| new.open(Place::Device(0), bytes, region).map(drop).unwrap_err();
        assert!(refused(&set(check_offset, u64::MAX)).contains("no memory to try it with"));
        assert!(refused(&exported[1..]).contains("means nothing here"));
        assert!(!refused(&set(0, 1)).is_empty(), "a handle that is none");
    });
}

/// Posts a request in blocks whose copies do not end before the engine is released.
fn post_frozen(
    fake: &Fake,
    one: &Side,
    op: Op,
    there: (&str, u64),
    (block, engine): (u64, &str),
) -> mpsc::Receiver<End> {
    // What is opened first is tried first, which has to come to its end.
    assert!(matches!(run(&one.request_at(op, there, MIB, 1)), End::Done { .. }));
    let begun = copies(fake);
    fake.control(&format!("freeze {engine}"));
    let ended = post(&one.request_at(op, there, block, BYTES as u64 / block));
    eventually("a copy is under way", || copies(fake) > begun);
    ended
}

#[test]
fn memory_is_not_released_under_a_copy_of_a_peer() {
    alone("ipc::memory_is_not_released_under_a_copy_of_a_peer", &TWO, |fake| {
        let all = MEANS.iter().flat_map(|means| [(Op::Read, means), (Op::Write, means)]);
        for (op, (block, _, engine)) in all {
            let (one, two) = (Side::by_ipc(fake, "one", 0, BYTES), Side::by_ipc(fake, "two", 1, BYTES));
            one.knows(&two);
            let ended = post_frozen(fake, &one, op, ("two", two.registration.base()), (*block, engine));
            std::thread::scope(|scope| {
                let (sender, released) = mpsc::channel();
                let two = &two;
                scope.spawn(move || sender.send(two.agent().deregister(two.registration)).unwrap());
                let early = released.recv_timeout(WHILE);
                fake.control(&format!("release {engine}"));
                assert!(early.is_err(), "{op:?} {engine}: the memory was given back under a copy");
                released.recv_timeout(LONG).unwrap().unwrap();
            });
            let end = ended.recv_timeout(LONG).unwrap();
            // Lots that were granted before may have been all of it.
            assert!(!matches!(end, End::Cancelled { .. }), "{op:?}: {end:?}");
            if op == Op::Write {
                let theirs = two.fill(3);
                std::thread::sleep(WHILE);
                assert!(two.bytes() == theirs, "something was written after the release");
            }
        }
    });
}

#[test]
fn a_cancelled_write_by_ipc_touches_the_memory_no_more() {
    alone("ipc::a_cancelled_write_by_ipc_touches_the_memory_no_more", &TWO, |fake| {
        let (one, two) = (Side::by_ipc(fake, "one", 0, BYTES), Side::by_ipc(fake, "two", 1, BYTES));
        one.knows(&two);
        assert!(matches!(run(&one.request(Op::Write, &two, MIB, 1)), End::Done { .. }));
        let begun = copies(fake);
        fake.control("freeze p2p.0");
        let request = one.request(Op::Write, &two, MIB, 8);
        let ended = post(&request);
        eventually("a copy is under way", || copies(fake) > begun);
        std::thread::scope(|scope| {
            let (sender, returned) = mpsc::channel();
            let request = &request;
            scope.spawn(move || {
                request.cancel();
                sender.send(()).unwrap();
            });
            let early = (returned.recv_timeout(WHILE), ended.try_recv());
            fake.control("release p2p.0");
            assert!(matches!(early, (Err(_), Err(_))), "it ended while a copy could still write");
            returned.recv_timeout(LONG).unwrap();
        });
        let end = ended.recv_timeout(LONG).unwrap();
        assert!(!matches!(end, End::Failed { .. }), "{end:?}");
        let theirs = two.fill(3);
        std::thread::sleep(WHILE);
        assert!(two.bytes() == theirs, "something was written after the cancel");
    });
}

/// A peer whose GPU copies to or from this side's memory and does not come to an end.
fn peer_in_a_copy(side: &Side, op: &str) -> Peer {
    let mut peer = Peer::spawn(0, BYTES);
    peer.knows(side);
    let (name, base) = (side.agent().name(), side.registration.base());
    assert_eq!(peer.ask(&format!("post {op} {name} {base} 4096 1")), "ok");
    assert!(peer.ask("wait").contains("Done"));
    assert_ne!(peer.ask("moved ipc"), "0");
    let begun = peer.ask("copies");
    assert_eq!(peer.ask("freeze p2p.0"), "ok");
    assert_eq!(peer.ask(&format!("post {op} {name} {base} {MIB} 8")), "ok");
    eventually("a copy is under way", || peer.ask("copies") != begun);
    peer
}

#[test]
fn memory_is_free_again_when_a_peer_in_a_copy_was_killed() {
    alone("ipc::memory_is_free_again_when_a_peer_in_a_copy_was_killed", &TWO, |fake| {
        for op in ["read", "write"] {
            let side = Side::by_ipc(fake, "one", 1, BYTES);
            let peer = peer_in_a_copy(&side, op);
            std::thread::scope(|scope| {
                let (sender, released) = mpsc::channel();
                let side = &side;
                scope.spawn(move || sender.send(side.agent().deregister(side.registration)).unwrap());
                assert!(released.recv_timeout(WHILE).is_err(), "{op}: given back under a copy");
                peer.signal(Signal::KILL);
                released.recv_timeout(LONG).unwrap().unwrap();
            });
        }
    });
}

#[test]
fn memory_that_a_stopped_peer_may_still_reach_stays_registered() {
    alone("ipc::memory_that_a_stopped_peer_may_still_reach_stays_registered", &TWO, |fake| {
        let side = Side::by_ipc(fake, "one", 1, BYTES);
        let mut peer = peer_in_a_copy(&side, "write");
        peer.signal(Signal::STOP);
        let refused = side.agent().deregister(side.registration);
        assert!(matches!(refused, Err(AgentError::Reached { peers: 1, .. })), "{refused:?}");
        let again = side.agent().register_device(
            Place::Device(1),
            (side.registration.region(), side.registration.base(), 4096),
            Access::OPEN,
        );
        assert!(again.unwrap_err().to_string().contains("overlaps"), "it may still be touched");
        peer.signal(Signal::CONT);
        assert_eq!(peer.ask("release p2p.0"), "ok");
        // Whatever became of the request, its copies have ended.
        assert!(peer.ask("wait").starts_with("Ok"));
        eventually("the peer says so", || side.agent().deregister(side.registration).is_ok());
        let ours = side.fill(3);
        std::thread::sleep(WHILE);
        assert!(side.bytes() == ours, "something was written after the release");
    });
}

#[test]
fn a_request_ends_when_the_owner_was_killed_under_its_copies() {
    alone("ipc::a_request_ends_when_the_owner_was_killed_under_its_copies", &TWO, |fake| {
        for op in [Op::Read, Op::Write] {
            let (one, two) = (Side::by_ipc(fake, "one", 0, BYTES), Peer::spawn(1, BYTES));
            one.agent().add_peer(&two.metadata).unwrap();
            let ended = post_frozen(fake, &one, op, two.at(), LARGE);
            two.signal(Signal::KILL);
            let early = ended.recv_timeout(WHILE);
            fake.control("release p2p.0");
            assert!(early.is_err(), "it ended while a copy was under way");
            let end = ended.recv_timeout(LONG).unwrap();
            assert!(matches!(end, End::Failed { .. }), "{end:?}");
            let ours = one.fill(3);
            std::thread::sleep(WHILE);
            assert!(one.bytes() == ours, "something was written after the end");
            // What was open of it is not kept.
            eventually("it is closed", || {
                fake.stat("cuIpcCloseMemHandle") == fake.stat("cuIpcOpenMemHandle_v2")
            });
        }
    });
}

#[test]
fn an_owner_that_was_stopped_has_its_memory_back_when_it_goes_on() {
    alone("ipc::an_owner_that_was_stopped_has_its_memory_back_when_it_goes_on", &TWO, |fake| {
        let (one, mut two) = (Side::by_ipc(fake, "one", 0, BYTES), Peer::spawn(1, BYTES));
        one.agent().add_peer(&two.metadata).unwrap();
        let ended = post_frozen(fake, &one, Op::Write, two.at(), LARGE);
        two.signal(Signal::STOP);
        fake.control("release p2p.0");
        // All bytes may be there, but nobody says that they count.
        let end = ended.recv_timeout(LONG).unwrap();
        assert!(matches!(end, End::Failed { .. }), "{end:?}");
        two.signal(Signal::CONT);
        eventually("the owner hears that its memory is not used", || two.ask("deregister") == "Ok(())");
    });
}

#[test]
fn memory_is_not_released_under_a_copy_whose_connection_is_lost() {
    alone("ipc::memory_is_not_released_under_a_copy_whose_connection_is_lost", &TWO, |fake| {
        let (one, mut two) = (Side::by_ipc(fake, "one", 0, BYTES), Peer::spawn(1, BYTES));
        one.agent().add_peer(&two.metadata).unwrap();
        let ended = post_frozen(fake, &one, Op::Write, two.at(), LARGE);
        // Something is due meanwhile, so that the silence is seen.
        two.signal(Signal::STOP);
        one.agent().notify("other", b"there?".to_vec(), |_| {}).unwrap();
        eventually("the connection is given up", || one.agent().stats()[0].flows.is_empty());
        two.signal(Signal::CONT);
        let (refused, early) = (two.ask("deregister"), ended.try_recv());
        fake.control("release p2p.0");
        assert!(refused.contains("Reached"), "{refused}");
        assert!(early.is_err(), "it ended while a copy was under way");
        let end = ended.recv_timeout(LONG).unwrap();
        // Lots that were granted before may have been all of it.
        assert!(!matches!(end, End::Cancelled { .. }), "{end:?}");
        eventually("the owner hears that its memory is not used", || two.ask("deregister") == "Ok(())");
    });
}

#[test]
fn what_is_open_is_closed_when_its_owner_says_no_more_of_it() {
    alone("ipc::what_is_open_is_closed_when_its_owner_says_no_more_of_it", &TWO, |fake| {
        let (one, mut two) = (Side::by_ipc(fake, "one", 0, BYTES), Peer::spawn(1, BYTES));
        one.agent().add_peer(&two.metadata).unwrap();
        let request = one.request_at(Op::Read, two.at(), MIB, 8);
        for _ in 0..3 {
            assert_eq!(run(&request), End::Done { bytes: BYTES as u64 });
        }
        let opened = fake.stat("cuIpcOpenMemHandle_v2");
        assert_eq!(opened, 2, "once for each allocation");
        assert_eq!(two.ask("deregister"), "Ok(())");
        let metadata = two.ask("metadata");
        one.agent().add_peer(&from_hex(&metadata)).unwrap();
        eventually("it is closed", || fake.stat("cuIpcCloseMemHandle") == opened);
        assert!(matches!(run(&request), End::Failed { .. }));
    });
}
