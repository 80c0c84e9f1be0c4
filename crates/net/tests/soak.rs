//! A peer that is killed in the middle of transfers in both directions and comes back as another
//! instance, again and again. After each death: no wrong byte, no request without an end; after all
//! of them: no descriptor, thread or memory more than at the beginning. A process of its own, since
//! those are counted for the whole process.
//!
//! `FOREBAY_SOAK_ROUNDS` says how many deaths, `FOREBAY_SOAK_JSON` where the results object goes.
#![allow(clippy::unwrap_used)]

mod common;

use common::heap;
use common::other::{self, Other, introduce, order};
use common::*;
use forebay_net::{Access, End, Op, Request, Select};
use forebay_results::{Results, Row};
use forebay_transfer::HostBuffer;
use forebay_transfer::SplitMix;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

#[global_allocator]
static HEAP: heap::Counted = heap::Counted;

const ROUNDS: u64 = 60;
/// After these everything that is kept for good is there.
const WARM_UP: u64 = 10;
/// A region of either end, in blocks that are moved in an order of their own.
const BLOCK: u64 = 16 << 10;
const BLOCKS: u64 = 256;
const REGION: usize = (BLOCK * BLOCKS) as usize;
/// A peer lives so long at most.
const LIFE_US: u64 = 80_000;
/// More of the heap after many deaths than after few is a leak, but for this much: tables grow in
/// steps, and the last peer's timers may be there still.
const HEAP_SLACK_KIB: i64 = 1 << 10;
/// The same of what the system counts. The allocator keeps an arena for each of several threads.
const RESIDENT_SLACK_KIB: i64 = 16 << 10;

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

fn region_at(base: u64, region: u64) -> forebay_net::Descriptors {
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

/// Bytes that are not what they should be.
fn differing(found: &[u8], expected: &[u8]) -> u64 {
    found.iter().zip(expected).filter(|(found, expected)| found != expected).count() as u64
}

fn put(memory: &HostBuffer, region: u64, bytes: &[u8]) {
    assert!(memory.write(region as usize * REGION, bytes));
}

/// What a peer says that has read wrong bytes; how many follows.
const WRONG: &str = "wrong ";

/// Not a test: a peer that reads and writes the memory of whoever has started it until it is
/// killed.
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
        if looked.recv_timeout(LONG).unwrap() == (End::Done { bytes: REGION as u64 }) {
            let wrong = differing(&region(&own.memory, LOOKED_AT), &expected);
            if wrong > 0 {
                own.agent.notify("one", format!("{WRONG}{wrong}").into_bytes(), |_| {}).unwrap();
            }
        }
        written.recv_timeout(LONG).unwrap();
    }
}

/// What this process has.
#[derive(Debug, Clone, Copy)]
struct Footprint {
    descriptors: usize,
    threads: usize,
    /// As the system counts it, after the allocator has given back what nobody holds.
    resident_kib: i64,
    /// Of the heap.
    held_kib: i64,
}

impl Footprint {
    fn now() -> Footprint {
        let count = |what| std::fs::read_dir(what).unwrap().count();
        let held_kib = (heap::held_bytes() >> 10) as i64;
        heap::trim();
        let status = std::fs::read_to_string("/proc/self/status").unwrap();
        let resident = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
        Footprint {
            descriptors: count("/proc/self/fd"),
            threads: count("/proc/self/task"),
            resident_kib: resident.trim().trim_end_matches(" kB").parse().unwrap(),
            held_kib,
        }
    }

    /// The least of a while: threads of connections that have ended are on their way out.
    fn settled() -> Footprint {
        let samples = (0..20).map(|_| {
            std::thread::sleep(Duration::from_millis(20));
            Footprint::now()
        });
        samples.min_by_key(|found| (found.threads, found.descriptors, found.held_kib)).unwrap()
    }
}

#[derive(Debug, Default)]
struct Tally {
    done: AtomicU64,
    failed: AtomicU64,
    wrong_bytes: AtomicU64,
    /// Requests without an end.
    hangs: AtomicU64,
}

impl Tally {
    /// Runs a request and says whether it succeeded.
    fn run(&self, request: &Request) -> bool {
        let (is_done, counter) = match post(request).recv_timeout(LONG) {
            Ok(End::Done { bytes }) => (bytes == REGION as u64, &self.done),
            Ok(End::Failed { .. }) => (false, &self.failed),
            Ok(End::Cancelled { .. }) => panic!("nobody cancelled it"),
            Err(_) => (false, &self.hangs),
        };
        counter.fetch_add(1, Ordering::Relaxed);
        is_done
    }

    fn compare(&self, found: &[u8], expected: &[u8]) {
        self.wrong_bytes.fetch_add(differing(found, expected), Ordering::Relaxed);
    }

    fn wrong_bytes(&self) -> u64 {
        self.wrong_bytes.load(Ordering::Relaxed)
    }

    fn hangs(&self) -> u64 {
        self.hangs.load(Ordering::Relaxed)
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
        assert_eq!(self.end.agent.add_peer(&other.metadata()).unwrap(), "other");
        if let Some(before) = before {
            let end = run(before);
            assert!(matches!(end, End::Failed { moved_bytes: 0, .. }), "taken for the one before: {end:?}");
        }
        let written = other.base() + WRITTEN * REGION as u64;
        let fetch = request(&self.end, Op::Read, FETCHED, ("other", other.base()));
        let write = request(&self.end, Op::Write, OURS, ("other", written));
        let back = request(&self.end, Op::Read, RETURNED, ("other", written));
        let (memory, tally, nothing) = (&self.end.memory, &self.tally, vec![0; REGION]);
        let expected = in_our_order(&theirs);
        let died = std::thread::scope(|scope| {
            scope.spawn(|| {
                put(memory, FETCHED, &nothing);
                while tally.run(&fetch) {
                    tally.compare(&region(memory, FETCHED), &expected);
                    put(memory, FETCHED, &nothing);
                }
            });
            scope.spawn(|| {
                put(memory, RETURNED, &nothing);
                while tally.run(&write) && tally.run(&back) {
                    tally.compare(&region(memory, RETURNED), &ours);
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
        self.hear(round, &dropped, &theirs);
        fetch
    }

    /// What the peer of this round said: that it has read wrong bytes, or written all of its own.
    fn hear(&mut self, round: u64, dropped: &HostBuffer, theirs: &[u8]) {
        let mut wrote = false;
        for (_, text) in self.end.agent.take_notifications() {
            let text = String::from_utf8(text).unwrap();
            if let Some(wrong) = text.strip_prefix(WRONG) {
                self.tally.wrong_bytes.fetch_add(wrong.parse().unwrap(), Ordering::Relaxed);
            }
            wrote |= text == format!("written {round}");
        }
        if wrote {
            self.writers += 1;
            self.tally.compare(&in_our_order(&region(dropped, 0)), theirs);
        }
    }
}

/// What this process had at first, in the middle and at the end.
struct Course {
    deaths: u64,
    at: [Footprint; 3],
}

impl Course {
    /// Lets peers live and die until there were so many, or something hangs.
    fn run(survivor: &mut Survivor, deaths: u64) -> Course {
        let mut dice = SplitMix(deaths);
        let (mut before, mut at) = (None, Vec::new());
        for round in 0..deaths + WARM_UP {
            if round == WARM_UP || round == WARM_UP + deaths / 2 {
                at.push(Footprint::settled());
            }
            let life = Duration::from_micros(dice.draw() % LIFE_US);
            before = Some(survivor.round(round, life, before.as_ref()));
            if survivor.tally.hangs() > 0 {
                break;
            }
        }
        let mut last = Footprint::settled();
        let first = at.first().copied().unwrap_or(last);
        let until = Instant::now() + LONG;
        while (last.descriptors > first.descriptors || last.threads > first.threads) && Instant::now() < until
        {
            last = Footprint::settled();
        }
        Course { deaths, at: [first, at.get(1).copied().unwrap_or(last), last] }
    }

    /// How much more of something there was at the end of each half than at its beginning.
    fn growth(&self, of: impl Fn(&Footprint) -> i64) -> [i64; 2] {
        let [first, middle, last] = &self.at;
        [of(middle) - of(first), of(last) - of(middle)]
    }

    fn write(&self, tally: &Tally, file: &Path) {
        let mut results = Results::new("soak");
        let mut row = |name: &str, unit, value: f64| {
            results.rows.push(Row::of_runs(format!("net.soak.{name}"), unit, &[value]));
        };
        let more = |of: fn(&Footprint) -> i64| self.growth(of).iter().sum::<i64>() as f64;
        row("deaths", "processes", self.deaths as f64);
        row("wrong_bytes", "bytes", tally.wrong_bytes() as f64);
        row("hangs", "requests", tally.hangs() as f64);
        row("fds_leaked", "descriptors", more(|found| found.descriptors as i64));
        row("threads_leaked", "threads", more(|found| found.threads as i64));
        row("heap_growth_mib", "MiB", more(|found| found.held_kib) / 1024.0);
        row("rss_growth_mib", "MiB", more(|found| found.resident_kib) / 1024.0);
        results.write(file).unwrap();
    }
}

#[test]
fn a_peer_that_is_killed_again_and_again_costs_no_byte_no_hang_and_leaves_nothing() {
    let deaths: u64 = std::env::var("FOREBAY_SOAK_ROUNDS").map_or(ROUNDS, |rounds| rounds.parse().unwrap());
    let (tally, slowest_end) = (Tally::default(), Duration::ZERO);
    let mut survivor = Survivor { end: end("one", 3 * REGION), tally, writers: 0, slowest_end };
    let course = Course::run(&mut survivor, deaths);
    let Survivor { tally, writers, slowest_end, .. } = survivor;
    println!("SOAK deaths {deaths}, {tally:?}, {writers} peers had written, slowest end {slowest_end:?}");
    course.at.iter().for_each(|found| println!("SOAK {found:?}"));
    if let Some(file) = std::env::var_os("FOREBAY_SOAK_JSON") {
        course.write(&tally, Path::new(&file));
    }
    assert!(tally.done.load(Ordering::Relaxed) > 0 && writers > 0, "nothing was moved");
    assert_eq!((tally.wrong_bytes(), tally.hangs()), (0, 0));
    assert!(slowest_end < LONG / 3, "{slowest_end:?}");
    let [first, _, last] = course.at;
    assert!(last.descriptors <= first.descriptors && last.threads <= first.threads, "{:?}", course.at);
    let held = course.growth(|found| found.held_kib);
    assert!(held.iter().all(|kib| *kib < HEAP_SLACK_KIB), "the heap grew by {held:?} KiB");
    let resident: i64 = course.growth(|found| found.resident_kib).iter().sum();
    assert!(resident < RESIDENT_SLACK_KIB, "{resident} KiB: {:?}", course.at);
}
