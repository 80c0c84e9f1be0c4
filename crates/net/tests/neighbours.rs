//! An agent that is well treated by one peer and badly by others: who floods, stalls or lies to it
//! costs the good one nothing.
#![allow(clippy::unwrap_used)]

mod common;

use common::relay::Relay;
use common::*;
use forebay_net::{AgentConfig, End, Op};
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};

const BLOCK: u64 = 16 << 10;
const BLOCKS: u64 = 1_024;
const BYTES: usize = (BLOCK * BLOCKS) as usize;

/// Speaks to an agent in one way after the other, until told to stop: nothing, noise, half a frame,
/// HTTP, a header that promises more than there may be.
fn pester(agent: SocketAddr, stop: &AtomicBool) -> u64 {
    let half_a_greeting = [&[1, 0, 1, 0, 82, 0, 0, 0][..], &[0; 8]].concat();
    let words: [&[u8]; 5] = [b"", &[0xa5; 70_000], &half_a_greeting, b"GET / HTTP/1.1\r\n\r\n", &[0xff; 24]];
    let mut silent = Vec::new();
    let mut pestered = 0;
    while !stop.load(Ordering::Relaxed) {
        let Ok(mut stream) = TcpStream::connect(agent) else { continue };
        let word = words[pestered as usize % words.len()];
        pestered += 1;
        // It may be cut off before it has said all.
        let _ = stream.write_all(word);
        if word.len() < 24 {
            silent.push(stream);
        } else {
            let _ = stream.read(&mut [0; 1]);
        }
        if silent.len() > 100 {
            silent.clear();
        }
    }
    pestered
}

#[test]
fn a_good_peer_is_served_beside_hostile_ones_and_one_that_takes_no_answers() {
    let owner = end_with(AgentConfig { progress_limit_us: 2_000_000, ..AgentConfig::named("owner") }, BYTES);
    let address = owner.agent.address().unwrap();
    let expected = fill(&owner.memory, BYTES, 1);
    let good = end("good", BYTES);
    good.agent.add_peer(&owner.agent.metadata()).unwrap();
    let request = scattered(&good, "owner", owner.registration.base(), Op::Read, BLOCK, BLOCKS);

    // Of all that it asks for it takes the first part.
    let deaf = Relay::taking(address, 100_000);
    let slow = end("slow", BYTES);
    slow.agent.add_address("owner", deaf.address).unwrap();
    slow.agent.connect("owner").unwrap();

    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let hostile: Vec<_> = (0..2).map(|_| scope.spawn(|| pester(address, &stop))).collect();
        let region = slow.agent.region("owner", owner.registration.offered(), 0).unwrap();
        let stalled = stalled_read(&slow, region);
        for round in 0..20 {
            fill(&good.memory, BYTES, 100 + round);
            assert_eq!(run(&request), End::Done { bytes: BYTES as u64 });
            let order = shuffled(BLOCKS);
            let found = bytes(&good.memory, BYTES);
            let same = order.iter().enumerate().all(|(here, there)| {
                found.chunks(BLOCK as usize).nth(here) == expected.chunks(BLOCK as usize).nth(*there as usize)
            });
            assert!(same, "wrong bytes in round {round}");
        }
        // The one that does not listen has learnt that nobody waits for it.
        assert!(matches!(stalled.recv_timeout(LONG).unwrap(), forebay_transfer::End::Failed(_)));
        stop.store(true, Ordering::Relaxed);
        let pestered: u64 = hostile.into_iter().map(|thread| thread.join().unwrap()).sum();
        assert!(pestered > 10, "{pestered}");
    });
    let counts = &good.agent.stats()[0].counts;
    assert!(counts.faults.is_empty() && counts.done == 20, "{counts:?}");
}

/// Begins to read all that the owner has, through the mover itself.
fn stalled_read(
    slow: &common::End,
    theirs: forebay_transfer::RegionId,
) -> std::sync::mpsc::Receiver<forebay_transfer::End> {
    use forebay_transfer::{Class, Span, SpanPair, Transfer};
    let (sender, receiver) = std::sync::mpsc::channel();
    let from = Span::new(theirs, 0, BYTES as u64);
    let to = Span::new(slow.registration.region(), 0, BYTES as u64);
    let transfer = Transfer::new(vec![SpanPair::new(from, to)], Class::Demand);
    slow.agent.mover().submit(transfer, move |end| drop(sender.send(end))).unwrap();
    receiver
}
