//! Two agents in one process, over real sockets: memory moves both ways, requests end once,
//! notifications come once.
#![allow(clippy::unwrap_used)]

mod common;

use common::*;
use forebay_net::{
    Absent, Access, Agent, AgentConfig, AgentError, Descriptors, Identity, NOTIFICATIONS_OPEN_MAX, Op, Reply,
    Run, Select,
};
use forebay_net::{End, LeasedSpan, PeerError, PeerRegion, Service, State};
use forebay_transfer::{Backing, Class, HostBuffer, Reason, Span, SpanPair, Transfer};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::time::{Duration, Instant};
use testkit::eventually;

#[test]
fn ten_thousand_scattered_blocks_arrive_both_ways() {
    let (block, count) = (2_600, 10_000);
    let len = (block * count) as usize;
    let (one, two) = two(len);
    let order = shuffled(count);
    for op in [Op::Write, Op::Read] {
        let (ours, theirs) = (fill(&one.memory, len, 1), fill(&two.memory, len, 2));
        let request = scattered(&one, "two", two.registration.base(), op, block, count);
        assert_eq!(request.state(), State::Ready);
        assert_eq!(run(&request), End::Done { bytes: len as u64 });
        let (from, to, is) = match op {
            Op::Write => (&ours, bytes(&two.memory, len), [0, 1]),
            Op::Read => (&theirs, bytes(&one.memory, len), [1, 0]),
        };
        for (nth, other) in order.iter().enumerate() {
            let at = [nth, *other as usize].map(|nth| nth * block as usize);
            let piece = |bytes: &[u8], at: usize| bytes[at..at + block as usize].to_vec();
            assert!(piece(from, at[is[0]]) == piece(&to, at[is[1]]), "{op:?} {nth}");
        }
    }
}

#[test]
fn a_million_descriptors_are_one_request_that_can_be_posted_again() {
    let (one, two) = two(48 << 20);
    let list = |base| {
        Descriptors::from_runs([Run { address: base, len: 24, count: 1_000_000, stride: 48 }]).unwrap()
    };
    let sent = fill(&one.memory, 48 << 20, 3);
    let local = one.agent.prepare_local(&list(one.registration.base())).unwrap();
    let remote = one.agent.prepare_remote("two", &list(two.registration.base())).unwrap();
    let request =
        one.agent.request(Op::Write, (&local, Select::All), (&remote, Select::All), None, None).unwrap();
    for _ in 0..2 {
        assert_eq!(run(&request), End::Done { bytes: 24_000_000 });
        assert_eq!(request.state(), State::Ended(End::Done { bytes: 24_000_000 }));
    }
    let received = bytes(&two.memory, 48 << 20);
    for nth in (0..1_000_000usize).step_by(997) {
        assert!(received[nth * 48..nth * 48 + 24] == sent[nth * 48..nth * 48 + 24]);
        assert!(received[nth * 48 + 24..nth * 48 + 48] == [0; 24]);
    }
}

#[test]
fn nothing_is_connected_before_it_is_needed() {
    let (one, two) = two(4096);
    let request = scattered(&one, "two", two.registration.base(), Op::Read, 64, 64);
    assert_eq!((one.agent.stats()[0].state, one.agent.stats()[0].flows.len()), ("idle", 0));
    assert_eq!(run(&request), End::Done { bytes: 4096 });
    assert_eq!((one.agent.stats()[0].state, one.agent.stats()[0].flows.len()), ("up", 1));
    let counts = one.agent.stats()[0].counts.clone();
    assert_eq!((counts.moved_bytes(), counts.done, counts.in_flight_lots()), (4096, 1, 0));
    assert_eq!((counts.stages.queued.count(), counts.wire().count()), (1, 1));
}

#[test]
fn a_request_under_way_cannot_be_posted() {
    let (one, two) = two(64 << 20);
    let request = scattered(&one, "two", two.registration.base(), Op::Read, 4096, 16_384);
    let ended = post(&request);
    // It takes longer than this, because the connection does.
    let again = request.post(|_| panic!("it was not posted"));
    assert!(matches!(again, Err(AgentError::UnderWay)), "{again:?}");
    assert_eq!(ended.recv_timeout(LONG).unwrap(), End::Done { bytes: 64 << 20 });
}

#[test]
fn overlapping_memory_is_refused_with_both_names() {
    let (one, _two) = two(4096);
    let again = one.agent.register(Arc::clone(&one.memory) as _, Access::OPEN);
    let Err(AgentError::Overlap { given, registered }) = again else { panic!("{again:?}") };
    let whole = one.registration.base()..one.registration.base() + 4096;
    assert_eq!((given, registered), (whole.clone(), whole));
}

#[test]
fn memory_that_was_deregistered_is_touched_by_nobody() {
    let (one, two) = two(64 << 20);
    let request = scattered(&one, "two", two.registration.base(), Op::Write, 4096, 16_384);
    let ended = post(&request);
    two.agent.deregister(two.registration).unwrap();
    fill(&two.memory, 64 << 20, 4);
    let before = bytes(&two.memory, 64 << 20);
    let end = ended.recv_timeout(LONG).unwrap();
    assert!(matches!(end, End::Failed { why: PeerError::Unmoved(_), .. }), "{end:?}");
    assert!(bytes(&two.memory, 64 << 20) == before);
    // And this end's: what uses it is cancelled.
    let third = end_with(AgentConfig::named("three"), 64 << 20);
    one.agent.add_peer(&third.agent.metadata()).unwrap();
    let request = scattered(&one, "three", third.registration.base(), Op::Read, 4096, 16_384);
    let ended = post(&request);
    one.agent.deregister(one.registration).unwrap();
    let end = ended.recv_timeout(LONG).unwrap();
    assert!(matches!(end, End::Cancelled { .. } | End::Done { .. }), "{end:?}");
    let again = run(&request);
    assert!(matches!(again, End::Failed { why: PeerError::Unmoved(_), .. }), "{again:?}");
    let Err(AgentError::NotRegistered { .. }) = one.agent.deregister(one.registration) else { panic!() };
}

#[test]
fn a_notification_comes_once_and_after_the_bytes() {
    let (one, two) = two(1 << 20);
    let fd = two.agent.event_fd().unwrap();
    two.agent.clear_event();
    let local = one.agent.prepare_local(&blocks(one.registration.base(), 1024, 1024)).unwrap();
    let remote = one.agent.prepare_remote("two", &blocks(two.registration.base(), 1024, 1024)).unwrap();
    for round in 0..20u8 {
        let sent = fill(&one.memory, 1 << 20, round.into());
        let said = Some(vec![round]);
        let request =
            one.agent.request(Op::Write, (&local, Select::All), (&remote, Select::All), said, None).unwrap();
        let ended = post(&request);
        // The other end sleeps on its descriptor, as a program with an event loop does.
        let mut fds = [rustix::event::PollFd::from_borrowed_fd(fd, rustix::event::PollFlags::IN)];
        assert_eq!(rustix::event::poll(&mut fds, None), Ok(1));
        two.agent.clear_event();
        assert_eq!(two.agent.take_notifications(), [("one".to_string(), vec![round])]);
        assert!(bytes(&two.memory, 1 << 20) == sent, "the notification was faster than the bytes");
        assert_eq!(ended.recv_timeout(LONG).unwrap(), End::Done { bytes: 1 << 20 });
    }
    let (sender, receiver) = mpsc::channel();
    for nth in 0..500u32 {
        let sender = sender.clone();
        one.agent.notify("two", nth.to_le_bytes().to_vec(), move |end| sender.send(end).unwrap()).unwrap();
    }
    assert!((0..500).all(|_| receiver.recv_timeout(LONG).unwrap() == Ok(())));
    let taken: Vec<Vec<u8>> = two.agent.take_notifications().into_iter().map(|(_, text)| text).collect();
    assert_eq!(taken, (0..500u32).map(|nth| nth.to_le_bytes().to_vec()).collect::<Vec<_>>());
}

#[test]
fn more_flows_are_tried_under_load_and_no_byte_is_lost() {
    let len = 16 << 20;
    let (one, two) = two(len);
    let requests =
        [Op::Write, Op::Read].map(|op| scattered(&one, "two", two.registration.base(), op, 16_384, 1024));
    let (sent, began, mut flows_seen) = (fill(&one.memory, len, 1), Instant::now(), 0);
    // What is written and read back in the same order is what it was.
    for round in 0.. {
        assert_eq!(run(&requests[round % 2]), End::Done { bytes: len as u64 });
        flows_seen = flows_seen.max(one.agent.stats()[0].flows.len());
        if flows_seen > 1 && round > 50 {
            break;
        }
        assert!(began.elapsed() < 2 * LONG, "there never was a second flow");
    }
    assert!(bytes(&one.memory, len) == sent);
}

#[test]
fn what_a_peer_denies_holds_nobody_else_up() {
    let (one, two) = two(1 << 20);
    let gone = end("three", 1 << 20);
    let request = scattered(&one, "two", two.registration.base(), Op::Read, 1024, 1024);
    let third = two.agent.register(Arc::clone(&gone.memory) as _, Access::OPEN).unwrap();
    one.agent.add_peer(&two.agent.metadata()).unwrap();
    let denied = scattered(&one, "two", third.base(), Op::Read, 1024, 1024);
    two.agent.deregister(third).unwrap();
    let deny_and_time = || {
        for _ in 0..30 {
            let end = run(&denied);
            assert!(
                matches!(end, End::Failed { why: PeerError::Unmoved(Reason::Denied { .. }), .. }),
                "{end:?}"
            );
        }
        let began = Instant::now();
        assert_eq!(run(&request), End::Done { bytes: 1 << 20 });
        began.elapsed()
    };
    // Were each denial a failure of the connection, it would rest for a second by now. The shortest
    // of a few: on a busy machine this process may have to wait for its turn.
    let took: Vec<_> = (0..5).map(|_| deny_and_time()).collect();
    assert!(took.iter().any(|took| *took < Duration::from_millis(700)), "{took:?}");
}

#[test]
fn a_failed_request_notifies_nobody() {
    let (one, two) = two(4096);
    let local = one.agent.prepare_local(&blocks(one.registration.base(), 64, 64)).unwrap();
    let remote = one.agent.prepare_remote("two", &blocks(two.registration.base(), 64, 64)).unwrap();
    let said = Some(b"done".to_vec());
    let request =
        one.agent.request(Op::Write, (&local, Select::All), (&remote, Select::All), said, None).unwrap();
    two.agent.deregister(two.registration).unwrap();
    assert!(matches!(run(&request), End::Failed { .. }));
    let (sender, receiver) = mpsc::channel();
    one.agent.notify("two", b"after".to_vec(), move |end| sender.send(end).unwrap()).unwrap();
    assert_eq!(receiver.recv_timeout(LONG).unwrap(), Ok(()));
    assert_eq!(two.agent.take_notifications(), [("one".to_string(), b"after".to_vec())]);
}

#[test]
fn two_hundred_random_cancels_leave_no_byte_behind() {
    let len = 4 << 20;
    let (one, two) = two(len);
    let requests =
        [Op::Write, Op::Read].map(|op| scattered(&one, "two", two.registration.base(), op, 4_096, 1024));
    one.agent.connect("two").unwrap();
    // Made before, so that the memory is used again as soon as the cancel returns.
    let (ours, theirs) = (fill(&one.memory, len, 1), fill(&two.memory, len, 2));
    let (mut dice, mut cancelled) = (forebay_transfer::SplitMix(9), 0);
    for round in 0..200 {
        let request = &requests[round % 2];
        let ended = post(request);
        std::thread::sleep(Duration::from_micros(dice.draw() % 2_500));
        request.cancel();
        // From here on the memory of both ends is somebody else's.
        assert!(one.memory.write(0, &ours) && two.memory.write(0, &theirs));
        let end = ended.recv_timeout(LONG).unwrap();
        cancelled += u32::from(matches!(end, End::Cancelled { .. }));
        assert!(matches!(end, End::Cancelled { .. } | End::Done { .. }), "{end:?}");
        std::thread::sleep(Duration::from_millis(1));
        assert!(bytes(&one.memory, len) == ours, "round {round}: a byte was written here after the cancel");
        assert!(
            bytes(&two.memory, len) == theirs,
            "round {round}: a byte was written there after the cancel"
        );
    }
    assert!(cancelled >= 20, "{cancelled} of 200 were cancelled before their end");
    assert_eq!(run(&requests[0]), End::Done { bytes: len as u64 });
}

#[test]
fn a_limit_ends_a_request_and_nothing_of_it_is_left() {
    let (one, two) = two(64 << 20);
    let local = one.agent.prepare_local(&blocks(one.registration.base(), 4096, 16_384)).unwrap();
    let remote = one.agent.prepare_remote("two", &blocks(two.registration.base(), 4096, 16_384)).unwrap();
    let order = Select::Indices(shuffled(16_384));
    one.agent.connect("two").unwrap();
    let request =
        one.agent.request(Op::Write, (&local, Select::All), (&remote, order), None, Some(3_000)).unwrap();
    let end = run(&request);
    assert!(matches!(end, End::Failed { why: PeerError::Late { limit_us: 3_000 }, .. }), "{end:?}");
    let after = fill(&two.memory, 64 << 20, 4);
    std::thread::sleep(Duration::from_millis(20));
    assert!(bytes(&two.memory, 64 << 20) == after);
    assert_eq!(one.agent.stats()[0].counts.faults["late"], 1);
}

#[test]
fn a_peer_that_is_removed_ends_what_is_under_way() {
    let (one, two) = two(64 << 20);
    let request = scattered(&one, "two", two.registration.base(), Op::Write, 4096, 16_384);
    one.agent.connect("two").unwrap();
    let ended = post(&request);
    one.agent.remove_peer("two").unwrap();
    let end = ended.recv_timeout(LONG).unwrap();
    assert!(matches!(end, End::Cancelled { .. } | End::Done { .. }), "{end:?}");
    let end = run(&request);
    assert!(matches!(end, End::Failed { why: PeerError::Removed { .. }, .. }), "{end:?}");
    assert!(matches!(one.agent.connect("two"), Err(AgentError::NoSuchPeer { .. })));
    // The same metadata make it known again.
    one.agent.add_peer(&two.agent.metadata()).unwrap();
    let request = scattered(&one, "two", two.registration.base(), Op::Write, 4096, 16_384);
    assert_eq!(run(&request), End::Done { bytes: 64 << 20 });
}

#[test]
fn an_agent_that_ends_ends_its_requests() {
    let (one, two) = two(64 << 20);
    let request = scattered(&one, "two", two.registration.base(), Op::Write, 4096, 16_384);
    let ended = post(&request);
    let memory = Arc::clone(&two.memory);
    drop(one);
    let end = ended.recv_timeout(LONG).unwrap();
    assert!(matches!(end, End::Cancelled { .. } | End::Failed { .. } | End::Done { .. }), "{end:?}");
    let after = fill(&memory, 64 << 20, 4);
    std::thread::sleep(Duration::from_millis(20));
    assert!(bytes(&memory, 64 << 20) == after);
    assert!(matches!(request.post(|_| ()), Err(AgentError::Peer(PeerError::Ended))));
}

#[test]
fn nobody_at_the_address_is_said_at_once() {
    let one = end("one", 4096);
    let gone = {
        let two = end("two", 4096);
        one.agent.add_peer(&two.agent.metadata()).unwrap();
        two.registration
    };
    let request = scattered(&one, "two", gone.base(), Op::Read, 64, 64);
    let asked = Instant::now();
    let end = run(&request);
    let End::Failed { why: PeerError::Unreachable { why, .. }, .. } = &end else { panic!("{end:?}") };
    assert!(
        why.contains("refused") && asked.elapsed() < Duration::from_secs(4),
        "{why} {:?}",
        asked.elapsed()
    );
}

#[test]
fn a_new_instance_voids_what_was_known_of_the_old_one() {
    let one = end("one", 4096);
    let first = end("two", 4096);
    let address = first.agent.address().unwrap();
    one.agent.add_peer(&first.agent.metadata()).unwrap();
    let before = scattered(&one, "two", first.registration.base(), Op::Read, 64, 64);
    assert_eq!(run(&before), End::Done { bytes: 4096 });
    drop(first);
    let config = AgentConfig { listen: Some(address), ..AgentConfig::named("two") };
    let again = end_with(config, 4096);
    // The connection's end has to be noticed, or the first attempt fails for that.
    eventually("the old connection is forgotten", || one.agent.stats()[0].flows.is_empty());
    let end = run(&before);
    assert!(matches!(end, End::Failed { why: PeerError::Restarted { .. }, .. }), "{end:?}");
    one.agent.add_peer(&again.agent.metadata()).unwrap();
    let after = scattered(&one, "two", again.registration.base(), Op::Read, 64, 64);
    assert_eq!(run(&after), End::Done { bytes: 4096 });
    let end = run(&before);
    assert!(matches!(end, End::Failed { why: PeerError::Restarted { .. }, .. }), "{end:?}");
}

#[test]
fn a_wrong_token_is_told() {
    let config = AgentConfig { token: b"right".to_vec(), ..AgentConfig::named("two") };
    let two = end_with(config, 4096);
    let one = end("one", 4096);
    one.agent.add_peer(&two.agent.metadata()).unwrap();
    let refused = one.agent.connect("two");
    let Err(AgentError::Peer(PeerError::Unreachable { why, .. })) = refused else { panic!("{refused:?}") };
    assert!(why.contains("token"), "{why}");
}

#[test]
fn agents_with_one_token_are_let_in_or_told_at_once_that_it_is_too_long() {
    for bytes in [0, 256, 257, 4096] {
        let agent = |name| Agent::start(AgentConfig { token: vec![b'x'; bytes], ..AgentConfig::named(name) });
        match (agent("one"), agent("two")) {
            (Ok(one), Ok(two)) => {
                one.add_peer(&two.metadata()).unwrap();
                one.connect("two").unwrap();
            }
            (refused, _) => assert!(bytes > 256, "{:?}", refused.map(drop)),
        }
    }
}

#[derive(Default)]
struct Echo {
    gone: AtomicU32,
    held: Mutex<Vec<Reply>>,
}

impl Service for Echo {
    fn call(&self, _from: Identity, body: Vec<u8>, reply: Reply) {
        match body.as_slice() {
            b"no" => reply.refuse("I would rather not".into()),
            b"hold" => self.held.lock().unwrap().push(reply),
            _ => reply.send(body),
        }
    }

    fn gone(&self, _from: Identity) {
        self.gone.fetch_add(1, Ordering::Relaxed);
    }
}

#[test]
fn calls_are_answered_declined_or_late() {
    let echo = Arc::new(Echo::default());
    let config = AgentConfig { service: Some(Arc::clone(&echo) as _), ..AgentConfig::named("two") };
    let two = Agent::start(config).unwrap();
    let one = Agent::start(AgentConfig { listen: None, ..AgentConfig::named("one") }).unwrap();
    // By address only, as nodes know each other.
    one.add_address("two", two.address().unwrap()).unwrap();
    let call = |body: &[u8], limit_us| {
        let (sender, receiver) = mpsc::channel();
        one.call("two", body.to_vec(), limit_us, move |end| sender.send(end).unwrap()).unwrap();
        receiver.recv_timeout(LONG).unwrap()
    };
    assert_eq!(call(b"hello", 10_000_000), Ok(b"hello".to_vec()));
    let Err(PeerError::Unanswered { why, .. }) = call(b"no", 10_000_000) else { panic!() };
    assert!(why.to_string().contains("rather not"), "{why}");
    assert_eq!(call(b"hold", 50_000), Err(PeerError::Late { limit_us: 50_000 }));
    let (sender, receiver) = mpsc::channel();
    let ends = sender.clone();
    let on_reply = move |end| ends.send(end).unwrap();
    let on_late = move |late| sender.send(Ok(late)).unwrap();
    one.call_and_hear("two", b"hold".to_vec(), 50_000, on_reply, on_late).unwrap();
    assert_eq!(receiver.recv_timeout(LONG).unwrap(), Err(PeerError::Late { limit_us: 50_000 }));
    std::mem::take(&mut *echo.held.lock().unwrap()).into_iter().for_each(|held| held.send(b"so".into()));
    assert_eq!(receiver.recv_timeout(LONG).unwrap(), Ok(b"so".to_vec()));
    assert!(receiver.recv().is_err(), "nothing else comes");
    drop(one);
    eventually("the other end hears of it", || echo.gone.load(Ordering::Relaxed) == 1);
}

#[test]
fn leased_memory_is_read_under_a_lease_that_lives_and_no_longer() {
    let (one, two) = two(4096);
    let memory = Arc::new(HostBuffer::new(4096));
    fill(&memory, 4096, 7);
    let leased = two.agent.register(Arc::clone(&memory) as _, Access::LEASED_READ).unwrap();
    let holder = one.agent.identity().instance;
    let spans = vec![LeasedSpan { region: leased.offered(), offset: 1024, len: 1024 }];
    let (sender, ends) = mpsc::channel();
    let told = move |end| sender.send(end).unwrap();
    let lease = two.agent.leases().grant(holder, spans, 3_600_000_000, told.clone()).unwrap();
    one.agent.connect("two").unwrap();
    let region = one.agent.region("two", leased.offered(), lease).unwrap();
    let read = |region, offset| {
        let (from, to) = (Span::new(region, offset, 512), Span::new(one.registration.region(), 0, 512));
        let pairs = vec![SpanPair::new(from, to)];
        one.agent.mover().run(Transfer::new(pairs, Class::Demand)).unwrap()
    };
    assert_eq!(read(region, 1024), forebay_transfer::End::Done { bytes: 512 });
    assert!(matches!(read(region, 512), forebay_transfer::End::Failed(_)), "the lease is for other bytes");
    let none = one.agent.region("two", leased.offered(), 0).unwrap();
    assert!(matches!(read(none, 1024), forebay_transfer::End::Failed(_)), "there is no lease");
    assert!(two.agent.leases().revoke(lease));
    assert!(matches!(read(region, 1024), forebay_transfer::End::Failed(_)), "it was taken back");
    one.agent.forget_region(region).unwrap();
    // A lease ends with its time, also if nobody asks.
    let spans = vec![LeasedSpan { region: leased.offered(), offset: 0, len: 1 }];
    two.agent.leases().grant(holder, spans.clone(), 20_000, told.clone()).unwrap();
    two.agent.leases().grant(holder, spans, 3_600_000_000, told).unwrap();
    drop(one);
    let ends: Vec<String> = (0..3).map(|_| format!("{:?}", ends.recv_timeout(LONG).unwrap())).collect();
    assert!(ends[0] == "Revoked" && ends.contains(&"HolderGone".to_string()), "{ends:?}");
    assert!(two.agent.leases().is_empty());
}

#[test]
fn an_agent_starts_within_20_ms_and_its_metadata_are_small() {
    let mut times: Vec<Duration> = (0..20)
        .map(|_| {
            let began = Instant::now();
            let agent = Agent::start(AgentConfig::named("one")).unwrap();
            let took = began.elapsed();
            assert!(agent.metadata().len() < 100);
            took
        })
        .collect();
    times.sort();
    assert!(times[0] < Duration::from_millis(20), "{times:?}");
}

#[test]
fn garbage_is_no_metadata() {
    let one = Agent::start(AgentConfig::named("one")).unwrap();
    for garbage in [&b""[..], b"GET / HTTP/1.1", &[0xff; 300], b"FBYAGENT"] {
        assert!(matches!(one.add_peer(garbage), Err(AgentError::Metadata(_))));
    }
    let region = PeerRegion { key: 1, generation: 1, len: 1 };
    assert!(matches!(one.region("nobody", region, 0), Err(AgentError::NoSuchPeer { .. })));
    let unspecified = AgentConfig { listen: Some(([0, 0, 0, 0], 0).into()), ..AgentConfig::named("one") };
    assert!(matches!(Agent::start(unspecified), Err(AgentError::Unspecified { .. })));
    assert!(matches!(Agent::start(AgentConfig::named("")), Err(AgentError::Name { bytes: 0 })));
}

#[test]
fn a_notification_ends_once_also_where_its_agent_ends() {
    const NOTIFICATIONS: usize = 1_000;
    let two = end("two", 4096);
    for _ in 0..20 {
        let one = Agent::start(AgentConfig { listen: None, ..AgentConfig::named("one") }).unwrap();
        one.add_peer(&two.agent.metadata()).unwrap();
        one.connect("two").unwrap();
        let (sender, receiver) = mpsc::channel();
        for _ in 0..NOTIFICATIONS {
            let sender = sender.clone();
            one.notify("two", vec![0; 1000], move |end| sender.send(end).unwrap()).unwrap();
        }
        drop((one, sender));
        assert_eq!(receiver.into_iter().count(), NOTIFICATIONS);
        two.agent.take_notifications();
    }
}

#[test]
fn a_flood_of_notifications_arrives_whole_and_in_its_order() {
    const NOTIFICATIONS: u64 = 40_000;
    let (one, two) = two(4096);
    let (sender, receiver) = mpsc::channel();
    for number in 0..NOTIFICATIONS {
        let sender = sender.clone();
        let on_end = move |end| drop(sender.send(end));
        one.agent.notify_when_room("two", number.to_le_bytes().to_vec(), on_end).unwrap();
    }
    drop(sender);
    let ends: Vec<_> = receiver.into_iter().collect();
    assert!(
        ends.len() as u64 == NOTIFICATIONS && ends.iter().all(Result::is_ok),
        "{:?}",
        ends.iter().find(|end| end.is_err())
    );
    let taken = two.agent.take_notifications();
    assert!(
        taken
            .into_iter()
            .map(|(_, text)| text)
            .eq((0..NOTIFICATIONS).map(|number| number.to_le_bytes().to_vec()))
    );
}

#[test]
fn a_notification_without_room_is_refused_and_what_was_taken_in_ends() {
    let deaf = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let one = Agent::start(AgentConfig { connect_limit_us: 1_000_000, ..AgentConfig::named("one") }).unwrap();
    one.add_address("deaf", deaf.local_addr().unwrap()).unwrap();
    let (sender, receiver) = mpsc::channel();
    let send = || {
        let sender = sender.clone();
        one.notify("deaf", vec![7], move |end| drop(sender.send(end)))
    };
    let begun = Instant::now();
    let taken = (0..NOTIFICATIONS_OPEN_MAX).take_while(|_| send().is_ok()).count();
    let refused = send();
    // A machine that is slow enough has given up on the first ones meanwhile.
    if begun.elapsed() < Duration::from_millis(900) {
        assert!(
            matches!(refused, Err(AgentError::Peer(PeerError::Full(_)))) && taken == NOTIFICATIONS_OPEN_MAX,
            "{refused:?}"
        );
    }
    let taken = taken + usize::from(refused.is_ok());
    drop(sender);
    let ended = receiver.into_iter().take(taken).filter(Result::is_err).count();
    assert_eq!(ended, taken, "each is told, once");
    let stat = one.stats().into_iter().find(|stat| stat.name == "deaf").unwrap();
    assert_eq!(stat.counts.faults.get("not_notified"), Some(&(taken as u64)));
}

#[test]
fn memory_that_is_not_there_is_refused_with_its_range() {
    struct At(usize, usize);
    // SAFETY: it is not there, and the agent is to find that out: nothing touches it.
    unsafe impl Backing for At {
        fn as_ptr(&self) -> *mut u8 {
            self.0 as *mut u8
        }
        fn len(&self) -> usize {
            self.1
        }
    }
    let one = Agent::start(AgentConfig::named("one")).unwrap();
    let refuse = |base, len| one.register(Arc::new(At(base, len)), Access::OPEN).unwrap_err();
    for (base, len) in [(0, 10), (4096, 0), (4096, 1 << 63), (usize::MAX - 9, 20)] {
        assert!(matches!(refuse(base, len), AgentError::Absent(Absent::Unsound { .. })), "{base:#x} {len}");
    }
    assert!(refuse(8192, 100).to_string().ends_with("0x2000..0x2064 is not mapped"));
    // What may be read only is not offered to be written.
    static CONSTANT: [u8; 64] = [1; 64];
    let constant = || Arc::new(At(CONSTANT.as_ptr() as usize, CONSTANT.len()));
    assert!(matches!(one.register(constant(), Access::OPEN), Err(AgentError::Absent(Absent::Part { .. }))));
    one.register(constant(), Access { write: false, ..Access::OPEN }).unwrap();
}
