//! One connection of an engine to a node's relays, from the welcome to the end: what was asked,
//! whether the node is alive, and when what it was asked to do is over.
//!
//! A request is over when it was answered, when the node said that nothing is under way any more,
//! or when its process has ended: the driver then has taken its queues down. A node that hangs is
//! none of these. What reads host memory may be given up then, since nobody uses that staging
//! again; what writes host memory stays open until it is quiet.

use super::ring::{self, Asker, Header, Run};
use super::shared::SharedFile;
use super::socket::Ringer;
use crate::links::Direction;
use crate::poller::Watch;
use forebay_transfer::lock::{Mutex, RwLock};
use forebay_transfer::{Completion, LinkOp, Outcome, RegionId};
use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// How long a node may show no sign of life while it has something to do.
const SILENCE: Duration = Duration::from_secs(2);

#[derive(Debug)]
pub struct Session {
    pub socket: OwnedFd,
    pub process: OwnedFd,
    ring: SharedFile,
    bell: Ringer,
    /// Tells the thread that keeps the connection.
    supervisor: Arc<Ringer>,
    memories: RwLock<HashMap<RegionId, Known>>,
    /// Nothing more is asked, and answers are not waited for by the control thread.
    down: AtomicBool,
    open: AtomicUsize,
    /// Those of them that the control thread does not watch any more.
    parked: Mutex<Vec<Parked>>,
    pulse: Pulse,
}

/// Memory that the node has.
#[derive(Debug, Clone, Copy)]
pub struct Known {
    pub memory: u64,
    /// Where the region begins in it.
    pub offset: u64,
}

/// The node's last sign of life.
#[derive(Debug)]
struct Pulse {
    epoch: Instant,
    beats: AtomicU64,
    since_us: AtomicU64,
}

/// A request that was put into a queue.
pub struct Request {
    session: Arc<Session>,
    queue: usize,
    number: u64,
    asked_us: u64,
}

/// A copy of the engine's own on its GPU's PCIe link, for as long as this lives.
pub struct OwnCopy {
    session: Arc<Session>,
    direction: Direction,
}

impl OwnCopy {
    pub fn new(session: Arc<Session>, direction: Direction) -> OwnCopy {
        session.header().begin_own(direction as usize);
        OwnCopy { session, direction }
    }
}

impl Drop for OwnCopy {
    fn drop(&mut self) {
        self.session.header().end_own(self.direction as usize);
    }
}

/// An operation that waits until the links are down: its lot would otherwise come back over the
/// same link at once.
#[derive(Debug)]
struct Parked {
    /// Queue, number and bytes of its request, if host memory may still be written for it.
    writes: Option<(usize, u64, u64)>,
    done: Completion,
}

impl Session {
    /// A connection to a node that has said welcome. Its ring was checked.
    pub fn new(
        socket: OwnedFd,
        process: OwnedFd,
        ring: SharedFile,
        bell: Ringer,
        supervisor: Arc<Ringer>,
    ) -> Session {
        let pulse =
            Pulse { epoch: Instant::now(), beats: AtomicU64::default(), since_us: AtomicU64::default() };
        Session {
            socket,
            process,
            ring,
            bell,
            supervisor,
            memories: RwLock::default(),
            down: AtomicBool::new(false),
            open: AtomicUsize::new(0),
            parked: Mutex::default(),
            pulse,
        }
    }

    /// Notes that the node has a region's memory.
    pub fn know(&self, region: RegionId, known: Known) {
        self.memories.write().insert(region, known);
    }

    pub fn forget(&self, region: RegionId) {
        self.memories.write().remove(&region);
    }

    /// The connection is of no more use. Whoever waits for answers is told by the supervisor.
    pub fn take_down(&self) {
        self.down.store(true, Ordering::Release);
        self.supervisor.ring();
    }

    pub fn is_down(&self) -> bool {
        self.down.load(Ordering::Acquire)
    }

    /// Asks for an operation, or for as much of its beginning as fits into a request; says how many
    /// bytes that is.
    pub fn ask(
        self: &Arc<Session>,
        queue: usize,
        asker: &mut Asker,
        direction: Direction,
        op: &LinkOp,
    ) -> Result<(Request, u64), &'static str> {
        let (runs, bytes) = self.runs(direction, op).ok_or("the node was not given this memory")?;
        self.open.fetch_add(1, Ordering::AcqRel);
        let Some(number) = asker.ask(ring::queue(self.ring.words(), queue), &runs) else {
            self.open.fetch_sub(1, Ordering::AcqRel);
            return Err("the ring is full");
        };
        if self.header().is_asleep() {
            self.bell.ring();
        }
        Ok((Request { session: Arc::clone(self), queue, number, asked_us: self.pulse.now_us() }, bytes))
    }

    /// The runs of an operation. Pairs that continue each other on both sides become one.
    fn runs(&self, direction: Direction, op: &LinkOp) -> Option<(Vec<Run>, u64)> {
        let memories = self.memories.read();
        let (mut runs, mut all_bytes): (Vec<Run>, u64) = (Vec::new(), 0);
        for pair in &op.pairs {
            let (host, staging) = direction.in_order(pair.from, pair.to);
            let known = memories.get(&host.region)?;
            let (memory, offset, staging) = (known.memory, known.offset + host.offset, staging.offset);
            let bytes = pair.from.len;
            let full = runs.len() == ring::RUNS_MAX;
            match runs.last_mut() {
                Some(last)
                    if (last.memory, last.offset + last.bytes, last.staging + last.bytes)
                        == (memory, offset, staging) =>
                {
                    last.bytes += bytes;
                }
                _ if full => break,
                _ => runs.push(Run { memory, offset, staging, bytes }),
            }
            all_bytes += bytes;
        }
        Some((runs, all_bytes))
    }

    fn header(&self) -> Header<'_> {
        Header::of(self.ring.words())
    }

    fn answer(&self, queue: usize, number: u64) -> Option<u64> {
        ring::answer(ring::queue(self.ring.words(), queue), number)
    }

    /// Takes the connection down if the node shows no sign of life although it was asked something
    /// long ago.
    fn check_pulse(&self, asked_us: u64) {
        let (now_us, beats) = (self.pulse.now_us(), self.header().beats());
        if self.pulse.beats.swap(beats, Ordering::Relaxed) != beats {
            return self.pulse.since_us.store(now_us, Ordering::Relaxed);
        }
        let since_us = self.pulse.since_us.load(Ordering::Relaxed).max(asked_us);
        if now_us.saturating_sub(since_us) > SILENCE.as_micros() as u64 {
            self.take_down();
        }
    }

    /// Leaves an operation, which was not asked for because the connection is down, to the
    /// supervisor.
    pub fn park(&self, done: Completion) {
        self.open.fetch_add(1, Ordering::AcqRel);
        self.parked.lock().push(Parked { writes: None, done });
        self.supervisor.ring();
    }

    /// Ends parked operations that are over. To be called once the links are down. `gone` says that
    /// the node's process has ended.
    pub fn settle(&self, gone: bool) {
        // Answers come before the word that says that all is quiet.
        let is_quiet = gone || self.header().is_quiet();
        let mut parked = self.parked.lock();
        let all = parked.drain(..);
        let answered = |(queue, number, _)| self.answer(queue, number).is_some();
        let (over, open) = all.partition(|parked: &Parked| is_quiet || parked.writes.is_none_or(answered));
        *parked = open;
        drop(parked);
        for Parked { writes, done } in over {
            let outcome = writes.and_then(|(queue, number, bytes)| self.outcome(queue, number, bytes));
            let given_up = || Outcome::Failed { error: "the node's relay is gone".into() };
            self.finish(done, outcome.unwrap_or_else(given_up));
        }
    }

    pub fn is_settled(&self) -> bool {
        self.open.load(Ordering::Acquire) == 0
    }

    fn outcome(&self, queue: usize, number: u64, bytes: u64) -> Option<Outcome> {
        self.answer(queue, number).map(|status| match status {
            0 => Outcome::Moved { bytes },
            status => Outcome::Failed { error: format!("the node's driver: error {status}") },
        })
    }

    fn finish(&self, done: Completion, outcome: Outcome) {
        self.open.fetch_sub(1, Ordering::AcqRel);
        done.finish(outcome);
    }
}

impl Request {
    /// A second view of the request, for who waits for it.
    pub fn watch(&self) -> Box<dyn Watch> {
        let Request { ref session, queue, number, asked_us } = *self;
        Box::new(Request { session: Arc::clone(session), queue, number, asked_us })
    }

    /// Ends the operation, now that the request has passed, or leaves it to the supervisor.
    pub fn end(self, direction: Direction, bytes: u64, done: Completion) {
        let Request { session, queue, number, .. } = self;
        if let Some(outcome) = session.outcome(queue, number, bytes) {
            return session.finish(done, outcome);
        }
        let writes = (direction == Direction::DeviceToHost).then_some((queue, number, bytes));
        session.parked.lock().push(Parked { writes, done });
        session.supervisor.ring();
    }
}

impl Watch for Request {
    fn passed(&self) -> bool {
        if self.session.is_down() || self.session.answer(self.queue, self.number).is_some() {
            return true;
        }
        self.session.check_pulse(self.asked_us);
        false
    }
}

impl Pulse {
    fn now_us(&self) -> u64 {
        self.epoch.elapsed().as_micros() as u64
    }
}
