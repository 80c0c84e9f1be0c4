//! Two agents that speak TLS: every byte and word arrives, whoever is not trusted is told so soon,
//! and what breaks comes back.
#![allow(clippy::unwrap_used)]

mod common;

use common::relay::Relay;
use common::tls::Authority;
use common::*;
use forebay_net::{AgentConfig, AgentError, End, Op, PeerError};
use std::time::{Duration, Instant};
use testkit::eventually;

const BLOCK: u64 = 20_000;
const BLOCKS: u64 = 500;
const BYTES: usize = (BLOCK * BLOCKS) as usize;

/// Moves all blocks there and back, and compares them.
fn there_and_back(one: &common::End, two: &common::End, seed: u64) {
    let bytes_there = fill(&one.memory, BYTES, seed);
    let write = scattered(one, two.agent.name(), two.registration.base(), Op::Write, BLOCK, BLOCKS);
    assert_eq!(run(&write), End::Done { bytes: BYTES as u64 });
    assert!(bytes(&two.memory, BYTES) != bytes_there, "the order there is another one");
    fill(&one.memory, BYTES, seed + 1);
    let read = scattered(one, two.agent.name(), two.registration.base(), Op::Read, BLOCK, BLOCKS);
    assert_eq!(run(&read), End::Done { bytes: BYTES as u64 });
    assert!(bytes(&one.memory, BYTES) == bytes_there, "other bytes came back");
}

#[test]
fn bytes_and_words_arrive_over_tls() {
    let authority = Authority::new();
    let one = end_with(authority.config("one", &authority), BYTES);
    let two = end_with(authority.config("two", &authority), BYTES);
    one.agent.add_peer(&two.agent.metadata()).unwrap();
    there_and_back(&one, &two, 1);
    one.agent.notify("two", b"a word".to_vec(), |_| {}).unwrap();
    eventually("the word is there", || {
        two.agent.take_notifications() == [("one".into(), b"a word".to_vec())]
    });
}

#[test]
fn a_connection_that_is_cut_in_the_middle_fails_what_is_under_way_and_the_next_one_works() {
    let authority = Authority::new();
    // The relay has to know the address before the agent listens there: one of this machine's that
    // nobody else asks for.
    let listen = std::net::TcpListener::bind("127.83.7.1:0").unwrap().local_addr().unwrap();
    let relay = Relay::before(listen);
    let (listen, advertise) = (Some(listen), Some(relay.address));
    let config = AgentConfig { listen, advertise, ..authority.config("two", &authority) };
    let one = end_with(authority.config("one", &authority), BYTES);
    let two = end_with(config, BYTES);
    one.agent.add_peer(&two.agent.metadata()).unwrap();
    there_and_back(&one, &two, 3);
    let request = scattered(&one, "two", two.registration.base(), Op::Write, BLOCK, BLOCKS);
    let mut failed = 0;
    for round in 0..100u64 {
        let ended = post(&request);
        std::thread::sleep(Duration::from_millis(round % 7));
        relay.cut();
        match ended.recv_timeout(LONG).unwrap() {
            End::Done { .. } => {}
            End::Failed { why: PeerError::Lost { .. } | PeerError::Unreachable { .. }, .. } => failed += 1,
            end => panic!("{end:?}"),
        }
        if failed == 5 {
            break;
        }
    }
    assert_eq!(failed, 5, "never in the middle");
    eventually("there is a connection again", || run(&request) == End::Done { bytes: BYTES as u64 });
    there_and_back(&one, &two, 5);
}

#[test]
fn whoever_is_not_trusted_or_speaks_plain_text_is_told_at_once_and_the_others_do_not_notice() {
    let (ours, theirs) = (Authority::new(), Authority::new());
    let two = end_with(ours.config("two", &ours), BYTES);
    let good = end_with(ours.config("good", &ours), BYTES);
    good.agent.add_peer(&two.agent.metadata()).unwrap();
    there_and_back(&good, &two, 7);
    let strangers = [
        ("of another authority", end_with(theirs.config("stranger", &theirs), BYTES)),
        ("with another authority's certificate", end_with(ours.config("stranger", &theirs), BYTES)),
        ("in plain text", end("stranger", BYTES)),
    ];
    for (what, stranger) in strangers {
        stranger.agent.add_peer(&two.agent.metadata()).unwrap();
        let before = bytes(&two.memory, BYTES);
        fill(&stranger.memory, BYTES, 99);
        let request = scattered(&stranger, "two", two.registration.base(), Op::Write, BLOCK, BLOCKS);
        let asked = Instant::now();
        let end = run(&request);
        assert!(
            matches!(&end, End::Failed { why: PeerError::Unreachable { .. } | PeerError::Lost { .. }, .. }),
            "{what}: {end:?}"
        );
        assert!(asked.elapsed() < Duration::from_secs(4), "{what}: {:?}", asked.elapsed());
        assert!(bytes(&two.memory, BYTES) == before, "{what}: something was written");
        // Nor does an agent speak to an owner that it does not trust.
        good.agent.add_peer(&stranger.agent.metadata()).unwrap();
        let refused = good.agent.connect("stranger");
        assert!(
            matches!(refused, Err(AgentError::Peer(PeerError::Unreachable { .. }))),
            "{what}: {refused:?}"
        );
    }
    there_and_back(&good, &two, 9);
    let counts = &good.agent.stats().into_iter().find(|peer| peer.name == "two").unwrap().counts;
    assert!(counts.faults.is_empty(), "{:?}", counts.faults);
}
