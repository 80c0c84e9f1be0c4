//! A peer that is killed in the middle of transfers in both directions and comes back as another instance, again and again.
//! After each death: no wrong byte, no request without an end; after all of them: no descriptor, thread or memory more than
//! at the beginning. A process of its own, since those are counted for the whole process.
//!
//! `FOREBAY_SOAK_ROUNDS` says how many deaths; the figures are printed.
#![allow(clippy::unwrap_used)]

mod common;

use common::other::{self, Other, introduce, order};
use common::*;
use forebay_agent::{Access, End, Op, Request, Select};
use forebay_mover::HostBuffer;
use forebay_mover::sim::SplitMix;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

const ROUNDS: u64 = 60;
/// After these everything that is kept for good is there.
const WARM_UP: u64 = 10;
/// A region of either end, in blocks that are moved in an order of their own.
const BLOCK: u64 = 16 << 10;
const BLOCKS: u64 = 256;
const REGION: usize = (BLOCK * BLOCKS) as usize;
/// A peer lives so long at most.
const LIFE_US: u64 = 80_000;

/// Regions of the end that survives, side by side.
const OURS: u64 = 0;
const FETCHED: u64 = 1;
const RETURNED: u64 = 2;
/// Regions of the peer.
const THEIRS: u64 = 0;
const WRITTEN: u64 = 1;
const LOOKED_AT: u64 = 2;

/// What a region of this end or the peer's has in a round.
fn content(round: u64, of_peer: bool) -> Vec<u8> {
    let mut dice = SplitMix(round * 2 + u64::from(of_peer));
    (0..REGION / 8).flat_map(|_| dice.draw().to_le_bytes()).collect()
}

fn region_at(base: u64, region: u64) -> forebay_agent::Descriptors {
    blocks(base + region * REGION as u64, BLOCK, BLOCKS)
}

/// All blocks of a region here and of one at a peer, whose order is another.
fn request_with(
    end: &common::End,
    op: Op,
    region: u64,
    (peer, address): (&str, u64),
    notification: Option<Vec<u8>>,
) -> Request {
    let local = end.agent.prepare_local(&region_at(end.registration.base(), region)).unwrap();
    let remote = end.agent.prepare_remote(peer, &region_at(address, 0)).unwrap();
    let order = Select::Indices(shuffled(BLOCKS));
    end.agent.request(op, (&local, Select::All), (&remote, order), notification, None).unwrap()
}

fn request(end: &common::End, op: Op, region: u64, peer: (&str, u64)) -> Request {
    request_with(end, op, region, peer, None)
}

/// The bytes of a region at a peer in the order that they have here.
fn in_our_order(bytes: &[u8]) -> Vec<u8> {
    let block = |block: u32| &bytes[block as usize * BLOCK as usize..][..BLOCK as usize];
    shuffled(BLOCKS).into_iter().flat_map(block).copied().collect()
}

fn region(memory: &HostBuffer, region: u64) -> Vec<u8> {
    let mut found = vec![0; REGION];
    assert!(memory.read(region as usize * REGION, &mut found));
    found
}

fn put(memory: &HostBuffer, region: u64, bytes: &[u8]) {
    assert!(memory.write(region as usize * REGION, bytes));
}

/// Not a test: a peer that reads and writes the memory of whoever has started it until it is killed.
#[test]
#[ignore = "started by other tests"]
fn a_short_lived_peer() {
    let Some(order) = order() else { return };
    let [round, ours, dropped, metadata] =
        order.splitn(4, ' ').collect::<Vec<_>>().try_into().expect("four words");
    let (round, ours, dropped): (u64, u64, u64) =
        (round.parse().unwrap(), ours.parse().unwrap(), dropped.parse().unwrap());
    let own = end("other", 3 * REGION);
    put(&own.memory, THEIRS, &content(round, true));
    own.agent.add_peer(&other::from_words(metadata)).unwrap();
    introduce(&own);
    let expected = in_our_order(&content(round, false));
    let look = request(&own, Op::Read, LOOKED_AT, ("one", ours));
    let said = Some(format!("written {round}").into_bytes());
    let write = request_with(&own, Op::Write, THEIRS, ("one", dropped), said);
    loop {
        let (looked, written) = (post(&look), post(&write));
        if looked.recv_timeout(LONG).unwrap() == (End::Done { bytes: REGION as u64 })
            && region(&own.memory, LOOKED_AT) != expected
        {
            own.agent.notify("one", b"wrong".to_vec(), |_| {}).unwrap();
        }
        written.recv_timeout(LONG).unwrap();
    }
}

/// What this process has.
#[derive(Debug, Clone, Copy)]
struct Footprint {
    descriptors: usize,
    threads: usize,
    memory_kib: u64,
}

impl Footprint {
    fn now() -> Footprint {
        let count = |what| std::fs::read_dir(what).unwrap().count();
        let status = std::fs::read_to_string("/proc/self/status").unwrap();
        let memory = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
        Footprint {
            descriptors: count("/proc/self/fd"),
            threads: count("/proc/self/task"),
            memory_kib: memory.trim().trim_end_matches(" kB").parse().unwrap(),
        }
    }

    /// The least of a while: threads of connections that have ended are on their way out.
    fn settled() -> Footprint {
        let samples = (0..20).map(|_| {
            std::thread::sleep(Duration::from_millis(20));
            Footprint::now()
        });
        samples.min_by_key(|found| (found.threads, found.descriptors)).unwrap()
    }
}

#[derive(Debug, Default)]
struct Tally {
    done: AtomicU64,
    failed: AtomicU64,
}

impl Tally {
    /// Runs a request and says whether it succeeded.
    fn run(&self, request: &Request) -> bool {
        let is_done = match run(request) {
            End::Done { bytes } => bytes == REGION as u64,
            End::Failed { .. } => false,
            End::Cancelled { .. } => panic!("nobody cancelled it"),
        };
        let counter = if is_done { &self.done } else { &self.failed };
        counter.fetch_add(1, Ordering::Relaxed);
        is_done
    }
}

/// The end that survives.
struct Survivor {
    end: common::End,
    tally: Tally,
    /// Peers that had written all of their region before they died.
    writers: u64,
    slowest_end: Duration,
}

impl Survivor {
    /// A peer lives and dies. `before`: a request to the one before it.
    fn round(&mut self, round: u64, life: Duration, before: Option<&Request>) -> Request {
        let (ours, theirs) = (content(round, false), content(round, true));
        put(&self.end.memory, OURS, &ours);
        let dropped = Arc::new(HostBuffer::new(REGION));
        let drop_at = self.end.agent.register(Arc::clone(&dropped) as _, Access::OPEN).unwrap();
        let metadata = other::to_words(&self.end.agent.metadata());
        let order = format!("{round} {} {} {metadata}", self.end.registration.base(), drop_at.base());
        let other = Other::spawn("a_short_lived_peer", order);
        assert_eq!(self.end.agent.add_peer(&other.metadata).unwrap(), "other");
        if let Some(before) = before {
            let end = run(before);
            assert!(matches!(end, End::Failed { moved_bytes: 0, .. }), "taken for the one before: {end:?}");
        }
        let written = other.base + WRITTEN * REGION as u64;
        let fetch = request(&self.end, Op::Read, FETCHED, ("other", other.base));
        let write = request(&self.end, Op::Write, OURS, ("other", written));
        let back = request(&self.end, Op::Read, RETURNED, ("other", written));
        let (memory, tally, nothing) = (&self.end.memory, &self.tally, vec![0; REGION]);
        let expected = in_our_order(&theirs);
        let died = std::thread::scope(|scope| {
            scope.spawn(|| {
                put(memory, FETCHED, &nothing);
                while tally.run(&fetch) {
                    assert!(region(memory, FETCHED) == expected, "round {round}: wrong bytes were read");
                    put(memory, FETCHED, &nothing);
                }
            });
            scope.spawn(|| {
                put(memory, RETURNED, &nothing);
                while tally.run(&write) && tally.run(&back) {
                    assert!(region(memory, RETURNED) == ours, "round {round}: wrong bytes were written");
                    put(memory, RETURNED, &nothing);
                }
            });
            std::thread::sleep(life);
            drop(other);
            Instant::now()
        });
        self.slowest_end = self.slowest_end.max(died.elapsed());
        // What the dead peer had sent and was not placed is not placed any more.
        self.end.agent.deregister(drop_at).unwrap();
        let said = self.end.agent.take_notifications();
        assert!(said.iter().all(|(_, text)| text != b"wrong"), "round {round}: the peer read wrong bytes");
        if said.contains(&("other".into(), format!("written {round}").into_bytes())) {
            self.writers += 1;
            assert!(
                in_our_order(&region(&dropped, 0)) == theirs,
                "round {round}: the peer wrote wrong bytes"
            );
        }
        fetch
    }
}

#[test]
fn a_peer_that_is_killed_again_and_again_costs_no_byte_no_hang_and_leaves_nothing() {
    let rounds: u64 = std::env::var("FOREBAY_SOAK_ROUNDS").map_or(ROUNDS, |rounds| rounds.parse().unwrap());
    let mut dice = SplitMix(rounds);
    let (tally, slowest_end) = (Tally::default(), Duration::ZERO);
    let mut survivor = Survivor { end: end("one", 3 * REGION), tally, writers: 0, slowest_end };
    let (mut before, mut warm) = (None, None);
    for round in 0..rounds + WARM_UP {
        if round == WARM_UP {
            warm = Some(Footprint::settled());
        }
        let life = Duration::from_micros(dice.draw() % LIFE_US);
        before = Some(survivor.round(round, life, before.as_ref()));
    }
    let warm = warm.unwrap();
    let mut last = Footprint::settled();
    let until = Instant::now() + LONG;
    while last.descriptors > warm.descriptors || last.threads > warm.threads {
        assert!(Instant::now() < until, "{warm:?} at first, {last:?} after {rounds} deaths");
        last = Footprint::settled();
    }
    println!("SOAK deaths {rounds}, {:?}, {} peers had written", survivor.tally, survivor.writers);
    println!("SOAK slowest end {:?}, {warm:?} at first, {last:?} at the end", survivor.slowest_end);
    assert!(survivor.tally.done.into_inner() > 0 && survivor.writers > 0, "nothing was moved");
    assert!(survivor.slowest_end < LONG / 3, "{:?}", survivor.slowest_end);
    assert!(last.memory_kib < warm.memory_kib + (32 << 10), "{warm:?} at first, {last:?} at the end");
}
