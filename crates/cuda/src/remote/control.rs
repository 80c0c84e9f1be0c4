//! The node's control thread: carries out what engines ask of relays, one thread for all of them.
//! It polls while anything is in flight and sleeps otherwise, until an engine rings.

use super::link_priority::LinkPriority;
use super::ring::{self, Answerer, Header, Run, Violation};
use super::shared::SharedFile;
use super::socket::{self, Bell, Ringer};
use super::wire::Uuid;
use crate::device::{Event, Stream};
use crate::driver::{CudaError, abi::Address};
use crate::links::Direction;
use crate::pinned::PinnedBehind;
use forebay_transfer::lock::{Condvar, Mutex, RwLock};
use std::collections::{HashMap, VecDeque};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How long the thread looks for requests before it sleeps: longer than the gap between two lots of
/// a transfer.
const LINGER: Duration = Duration::from_micros(100);

/// What an engine's request handler and the control thread share of it.
#[derive(Debug)]
pub struct Engine {
    pub gpu: Uuid,
    pub socket: OwnedFd,
    pub ring: SharedFile,
    /// Memory by the numbers that the engine gave it.
    pub memories: RwLock<HashMap<u64, Arc<PinnedBehind>>>,
    /// The engine is gone: nothing more is taken.
    closing: AtomicBool,
    drained: Mutex<Option<Drained>>,
    has_drained: Condvar,
    /// What it did that it must not, if anything.
    pub violation: Mutex<Option<Violation>>,
}

/// How an engine's requests ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Drained {
    /// Nothing of them is under way.
    Quiet,
    /// The driver cannot say: memory that they use must be left to them for good.
    Lost,
}

/// One direction of a relay for one engine.
#[derive(Debug)]
pub struct RequestQueue {
    gpu: Uuid,
    direction: Direction,
    stream: Stream,
    staging: Address,
    staging_bytes: u64,
    answerer: Answerer,
    in_flight: VecDeque<Flight>,
    /// Events to be used again.
    spare: Vec<Event>,
}

/// A request that was put into a stream.
#[derive(Debug)]
struct Flight {
    event: Event,
    posted: Result<(), CudaError>,
    /// Not to be unmapped until it is over.
    _memories: Vec<Arc<PinnedBehind>>,
}

/// An engine as the control thread has it.
struct Served {
    engine: Arc<Engine>,
    bell: Option<Bell>,
    queues: Vec<RequestQueue>,
    /// The driver cannot say when what was put in is over: then it never is.
    lost: bool,
}

#[derive(Debug)]
pub struct Control {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

/// What others tell the thread.
#[derive(Debug)]
pub struct Shared {
    inbox: Mutex<Vec<Served>>,
    fresh: AtomicBool,
    closed: AtomicBool,
    ringer: Ringer,
    requests: AtomicU64,
    bytes: AtomicU64,
}

impl std::fmt::Debug for Served {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Served").field("queues", &self.queues.len()).finish_non_exhaustive()
    }
}

impl Engine {
    pub fn new(gpu: Uuid, socket: OwnedFd, ring: SharedFile) -> Engine {
        Engine {
            gpu,
            socket,
            ring,
            memories: RwLock::default(),
            closing: AtomicBool::new(false),
            drained: Mutex::new(None),
            has_drained: Condvar::new(),
            violation: Mutex::new(None),
        }
    }

    fn memory(&self, number: u64) -> Option<Arc<PinnedBehind>> {
        self.memories.read().get(&number).cloned()
    }

    /// Parts from the engine; its request handler sees the end.
    fn part(&self) {
        self.closing.store(true, Ordering::Release);
        socket::part(&self.socket);
    }

    fn is_closing(&self) -> bool {
        self.closing.load(Ordering::Acquire)
    }

    fn set_drained(&self, drained: Drained) {
        if drained == Drained::Quiet {
            Header::of(self.ring.words()).set_quiet();
        }
        *self.drained.lock() = Some(drained);
        self.has_drained.notify_all();
    }
}

impl RequestQueue {
    /// A queue of a GPU whose copies go through `stream`, between host memory and staging of so
    /// many bytes at an address.
    pub fn new(
        gpu: Uuid,
        direction: Direction,
        stream: Stream,
        (staging, staging_bytes): (Address, u64),
    ) -> RequestQueue {
        let (answerer, in_flight, spare) = (Answerer::default(), VecDeque::new(), Vec::new());
        RequestQueue { gpu, direction, stream, staging, staging_bytes, answerer, in_flight, spare }
    }

    /// Puts a request into the stream. All of it is checked before anything is.
    fn start(&mut self, engine: &Engine, runs: &[Run]) -> Result<Result<u64, CudaError>, Violation> {
        let mut memories = Vec::with_capacity(runs.len());
        for run in runs {
            let memory = engine.memory(run.memory).ok_or(Violation::Memory { memory: run.memory })?;
            run.check(memory.memory().len() as u64, self.staging_bytes)?;
            memories.push(memory);
        }
        Ok(self.post(runs, memories))
    }

    fn post(&mut self, runs: &[Run], memories: Vec<Arc<PinnedBehind>>) -> Result<u64, CudaError> {
        let device = Arc::clone(self.stream.device());
        let _current = device.enter()?;
        let event = self.spare.pop().map_or_else(|| Event::new(&device), Ok)?;
        let posted = runs.iter().zip(&memories).try_for_each(|(run, memory)| self.copy(run, memory));
        event.record(&self.stream)?;
        self.in_flight.push_back(Flight { event, posted, _memories: memories });
        Ok(runs.iter().map(|run| run.bytes).sum())
    }

    /// Copies a run, in parts where its memory was pinned in parts.
    fn copy(&self, run: &Run, memory: &PinnedBehind) -> Result<(), CudaError> {
        let mut done = 0;
        while done < run.bytes {
            let offset = run.offset + done;
            let bytes = (run.bytes - done).min(memory.piece_bytes() - offset % memory.piece_bytes());
            let host = memory.memory().as_ptr() as Address + offset;
            let staging = self.staging + run.staging + done;
            let (from, to) = self.direction.in_order(host, staging);
            // SAFETY: the run was checked against both lengths. The memory stays mapped and pinned,
            // and the staging allocated, until the request is over; who else writes them is the
            // engine's affair, whose bytes they are.
            unsafe { self.stream.copy(from, to, bytes)? };
            done += bytes;
        }
        Ok(())
    }

    /// Answers what has passed; says how much it was.
    fn end_passed(&mut self, words: &[AtomicU64]) -> usize {
        let mut ended = 0;
        while let Some(front) = self.in_flight.front() {
            let passed = match front.event.is_passed() {
                Ok(false) => break,
                Ok(true) => Ok(()),
                Err(error) => Err(error),
            };
            let Some(Flight { event, posted, .. }) = self.in_flight.pop_front() else { break };
            let status = posted.and(passed).map_or_else(|error| error.status.unsigned_abs().into(), |()| 0);
            self.answerer.answer(words, status);
            self.spare.push(event);
            ended += 1;
        }
        ended
    }
}

impl Served {
    /// Takes and ends what can be; says how much that was. Whoever writes nonsense is parted from.
    fn step(&mut self, shared: &Shared, link_priority: &mut LinkPriority, runs: &mut Vec<Run>) -> usize {
        let engine = Arc::clone(&self.engine);
        let words = engine.ring.words();
        Header::of(words).beat();
        let mut done = 0;
        for index in 0..self.queues.len() {
            done += self.queues[index].end_passed(ring::queue(words, index));
            if engine.is_closing() {
                continue;
            }
            match self.take(index, shared, link_priority, runs) {
                Ok(taken) => done += taken,
                Err(violation) => {
                    *engine.violation.lock() = Some(violation);
                    engine.part();
                }
            }
        }
        done
    }

    /// Takes everything that was asked of a queue, unless the link's own engine goes first.
    fn take(
        &mut self,
        index: usize,
        shared: &Shared,
        link_priority: &mut LinkPriority,
        runs: &mut Vec<Run>,
    ) -> Result<usize, Violation> {
        let queue = &mut self.queues[index];
        let words = ring::queue(self.engine.ring.words(), index);
        let mut taken = 0;
        while queue.answerer.is_asked(words)
            && link_priority.lets_start(queue.gpu, queue.direction, Instant::now)
        {
            // The engine may have taken it back since it was seen.
            if !queue.answerer.take(words, runs)? {
                break;
            }
            match queue.start(&self.engine, runs)? {
                Ok(bytes) => {
                    shared.requests.fetch_add(1, Ordering::Relaxed);
                    shared.bytes.fetch_add(bytes, Ordering::Relaxed);
                }
                Err(_) => {
                    self.lost = true;
                    self.engine.part();
                    return Ok(taken);
                }
            }
            taken += 1;
        }
        Ok(taken)
    }

    /// Notes on which links the engine itself copies.
    fn note_own(&self, link_priority: &mut LinkPriority) {
        let header = Header::of(self.engine.ring.words());
        let own = Direction::BOTH.into_iter().filter(|direction| header.is_own(*direction as usize));
        own.for_each(|direction| link_priority.note(self.engine.gpu, direction));
    }

    fn in_flight(&self) -> usize {
        self.queues.iter().map(|queue| queue.in_flight.len()).sum()
    }

    fn is_over(&self) -> bool {
        self.engine.is_closing() && self.in_flight() == 0
    }

    fn end(self) {
        let engine = Arc::clone(&self.engine);
        if self.lost {
            std::mem::forget(self);
            return engine.set_drained(Drained::Lost);
        }
        // Streams go before the memory that they used.
        drop(self);
        engine.set_drained(Drained::Quiet);
    }

    /// Whether something waits to be taken. What is nonsense waits too.
    fn has_requests(&self) -> bool {
        let words = self.engine.ring.words();
        !self.engine.is_closing()
            && (0..self.queues.len())
                .any(|index| self.queues[index].answerer.is_asked(ring::queue(words, index)))
    }
}

impl Control {
    pub fn spawn() -> std::io::Result<Control> {
        let (ringer, bell) = socket::bell()?;
        let shared = Arc::new(Shared {
            inbox: Mutex::default(),
            fresh: AtomicBool::new(false),
            closed: AtomicBool::new(false),
            ringer,
            requests: AtomicU64::new(0),
            bytes: AtomicU64::new(0),
        });
        let own = Arc::clone(&shared);
        let thread =
            std::thread::Builder::new().name("forebay-relay".into()).spawn(move || own.run(&bell))?;
        Ok(Control { shared, thread: Some(thread) })
    }

    /// What request handlers tell the thread through.
    pub fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }
}

impl Drop for Control {
    fn drop(&mut self) {
        self.shared.closed.store(true, Ordering::Release);
        self.shared.tell();
        if let Some(thread) = self.thread.take() {
            // A panic of the thread has already been printed; there is nobody left to tell.
            let _ = thread.join();
        }
    }
}

impl Shared {
    /// Serves an engine from now on.
    pub fn serve(&self, engine: &Arc<Engine>, bell: Bell, queues: Vec<RequestQueue>) {
        let served = Served { engine: Arc::clone(engine), bell: Some(bell), queues, lost: false };
        self.inbox.lock().push(served);
        self.tell();
    }

    /// Takes nothing more from an engine, and waits until what was taken has ended.
    pub fn finish(&self, engine: &Engine) -> Drained {
        engine.closing.store(true, Ordering::Release);
        self.tell();
        let mut drained = engine.drained.lock();
        loop {
            match *drained {
                Some(drained) => return drained,
                None => engine.has_drained.wait(&mut drained),
            }
        }
    }

    /// Requests that were started, and their bytes.
    pub fn counters(&self) -> (u64, u64) {
        (self.requests.load(Ordering::Relaxed), self.bytes.load(Ordering::Relaxed))
    }

    fn tell(&self) {
        self.fresh.store(true, Ordering::Release);
        self.ringer.ring();
    }

    fn run(&self, bell: &Bell) {
        let (mut served, mut runs, mut link_priority) =
            (Vec::<Served>::new(), Vec::new(), LinkPriority::default());
        let mut idle_since = Instant::now();
        while !(self.closed.load(Ordering::Acquire) && served.is_empty()) {
            if self.fresh.swap(false, Ordering::AcqRel) {
                served.append(&mut self.inbox.lock());
            }
            link_priority.forget();
            served.iter().for_each(|served| served.note_own(&mut link_priority));
            let step = |served: &mut Served| served.step(self, &mut link_priority, &mut runs);
            let done = served.iter_mut().map(step).sum::<usize>();
            served.extract_if(.., |served| served.is_over()).for_each(Served::end);
            if done > 0 || served.iter().any(|served| served.in_flight() > 0) {
                idle_since = Instant::now();
                std::hint::spin_loop();
            } else if idle_since.elapsed() < LINGER {
                std::hint::spin_loop();
            } else {
                self.sleep(bell, &mut served);
            }
        }
    }

    /// Sleeps until somebody rings, unless something was asked in the meantime.
    fn sleep(&self, bell: &Bell, served: &mut [Served]) {
        let headers = |served: &[Served], asleep| {
            served.iter().for_each(|served| Header::of(served.engine.ring.words()).set_asleep(asleep));
        };
        headers(served, true);
        let has_work = self.fresh.load(Ordering::Acquire) || served.iter().any(Served::has_requests);
        if !has_work {
            let bells = served.iter().filter_map(|served| served.bell.as_ref());
            let fds: Vec<_> = std::iter::once(bell).chain(bells).map(Bell::as_fd).collect();
            // A wait that fails is a look too many.
            let _ = socket::wait(&fds, &[], None);
            bell.clear();
            for served in served.iter_mut() {
                // An engine that is gone rings for ever.
                served.bell = served.bell.take().filter(Bell::clear);
            }
        }
        headers(served, false);
    }
}
