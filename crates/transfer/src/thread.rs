//! The mover at work: one [`Mover`] with real links and a clock. This file is glue: it carries
//! messages between callers, the schedule and the links.
//!
//! Whoever submits starts what can start, and whoever completes an operation starts the next one
//! and tells callers of ends: nobody is woken up for that. Callers are never told by a thread that
//! submits, which may hold locks of theirs; what it leaves behind, and what overruns its time, is
//! for the mover's own thread. Idle, that sleeps.

use crate::alarm::Alarm;
use crate::combining_lock::{CombiningLock, Left, PostError};
use crate::driver::{Completed, Completion, Link, LinkOp, Outcome};
use crate::link::{LinkId, LinkSpec};
use crate::memory::{Backing, Memory};
use crate::mover::{Event, Limits, Mover, OpId};
use crate::path::{PathError, PathId, PathSpec};
use crate::process::{Forked, Process};
use crate::region::Refused;
use crate::region::{Place, RegionId, Span};
use crate::telemetry::Telemetry;
use crate::transfer::{Class, End, Failure, Reason, Transfer, TransferId};
use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;
use std::time::Instant;
use thiserror::Error;

/// Messages that may wait for the mover.
const MESSAGES_MAX: usize = 65_536;

type OnEnd = Box<dyn FnOnce(End) + Send>;
type OnQuiet = Box<dyn FnMut(&[Span]) + Send>;

/// What others tell the mover.
enum Message {
    Submit(Ticket, Transfer, OnEnd),
    Cancel(Ticket),
    Raise(Ticket, Class),
    Completed(OpId, Outcome),
    Control(Box<dyn FnOnce(&mut Worker) + Send>),
}

/// Names a submission before the schedule has seen it.
type Ticket = u64;

/// A mover at work. Dropping it ends it: what is under way goes on as far as its links see to it
/// when they are dropped, and transfers that have not ended then fail.
#[derive(Debug)]
pub struct MoverThread {
    handle: MoverHandle,
    thread: Option<JoinHandle<()>>,
}

/// Submits to a mover. Cheap to clone, usable from any thread.
#[derive(Debug, Clone)]
pub struct MoverHandle {
    shared: Arc<Shared>,
    next_ticket: Arc<AtomicU64>,
}

/// What submitters, links and the mover's own thread have in common.
#[derive(Debug)]
pub(crate) struct Shared {
    lock: CombiningLock<Message, Worker>,
    /// Wakes the mover's own thread.
    alarm: Alarm,
    memory: Arc<Memory>,
    epoch: Instant,
    process: Process,
}

/// What is done about ends that callers wait for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Ends {
    /// They are told.
    Tell,
    /// They are left to another thread.
    Leave,
}

/// A submitted transfer, for [`MoverHandle::cancel`] and [`MoverHandle::raise`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Submitted(Ticket);

/// Why a transfer was not taken in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[error("the mover takes nothing in: {0}")]
pub struct SubmitError(#[from] PostError);

/// Why a mover does nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum Closed {
    #[error("the mover has ended")]
    Ended,
    #[error(transparent)]
    Forked(#[from] Forked),
}

impl MoverThread {
    /// Starts a mover without links or paths.
    pub fn spawn(limits: Limits) -> std::io::Result<MoverThread> {
        let memory = Arc::new(Memory::default());
        let epoch = Instant::now();
        let worker = Worker {
            mover: Mover::new(limits),
            drivers: Vec::new(),
            memory: Arc::clone(&memory),
            epoch,
            by_ticket: HashMap::new(),
            callers: HashMap::new(),
            refused: Vec::new(),
            on_quiet: Vec::new(),
        };
        let lock = CombiningLock::new(MESSAGES_MAX, worker);
        let shared =
            Arc::new(Shared { lock, alarm: Alarm::new(epoch), memory, epoch, process: Process::current() });
        let own = Arc::clone(&shared);
        let thread = std::thread::Builder::new().name("forebay-mover".into()).spawn(move || own.run())?;
        let handle = MoverHandle { shared, next_ticket: Arc::default() };
        Ok(MoverThread { handle, thread: Some(thread) })
    }

    pub fn handle(&self) -> MoverHandle {
        self.handle.clone()
    }
}

impl Drop for MoverThread {
    fn drop(&mut self) {
        if !self.handle.shared.process.is_current() {
            return std::mem::forget(self.thread.take());
        }
        self.handle.shared.alarm.close();
        if let Some(thread) = self.thread.take() {
            // A panic of the thread has already been printed; there is nobody left to tell.
            let _ = thread.join();
        }
    }
}

impl MoverHandle {
    /// Microseconds since the mover started: the clock of deadlines.
    pub fn now_us(&self) -> u64 {
        self.shared.epoch.elapsed().as_micros() as u64
    }

    /// Where links and checks find a region's bytes.
    pub fn memory(&self) -> &Arc<Memory> {
        &self.shared.memory
    }

    /// Registers memory at a place. It stays alive until it is unregistered.
    pub fn register(&self, place: Place, backing: Arc<dyn Backing>) -> Result<RegionId, Closed> {
        self.control(move |worker| {
            let region = worker.mover.add_region(place, backing.len() as u64);
            worker.memory.insert(region, backing);
            region
        })
    }

    /// Registers bytes that no address reaches, such as a file's: only a link that knows the region
    /// can move them.
    pub fn register_opaque(&self, place: Place, len: u64) -> Result<RegionId, Closed> {
        self.control(move |worker| worker.mover.add_region(place, len))
    }

    /// Forgets a region. Refused while a transfer uses it.
    pub fn unregister(&self, region: RegionId) -> Result<Result<(), Refused>, Closed> {
        self.control(move |worker| {
            worker.mover.remove_region(region)?;
            worker.memory.remove(region);
            Ok(())
        })
    }

    /// Adds a link and what drives it.
    pub fn add_link(&self, spec: LinkSpec, link: Box<dyn Link>) -> Result<LinkId, Closed> {
        self.control(move |worker| {
            worker.drivers.push(link);
            worker.mover.add_link(spec)
        })
    }

    pub fn add_path(&self, spec: PathSpec) -> Result<Result<PathId, PathError>, Closed> {
        self.control(move |worker| worker.mover.add_path(spec))
    }

    /// Takes a link out of service, or puts it back.
    pub fn set_link_up(&self, link: LinkId, up: bool) -> Result<(), Closed> {
        self.control(move |worker| {
            let now_us = worker.now_us();
            if up { worker.mover.link_up(link) } else { worker.mover.link_down(now_us, link) }
        })
    }

    pub fn telemetry(&self) -> Result<Telemetry, Closed> {
        self.control(|worker| worker.mover.telemetry())
    }

    /// Submits a transfer. `on_end` is called exactly once, on a thread of the mover or of a link,
    /// never on this one, so it must be short and must not wait for the mover; a refusal arrives
    /// there too, as [`Reason::Refused`]. The spans belong to the mover until then.
    pub fn submit(
        &self,
        transfer: Transfer,
        on_end: impl FnOnce(End) + Send + 'static,
    ) -> Result<Submitted, SubmitError> {
        self.shared.process.check().map_err(PostError::from)?;
        let ticket = self.next_ticket.fetch_add(1, Ordering::Relaxed);
        self.shared.lock.post(Message::Submit(ticket, transfer, Box::new(on_end)))?;
        self.shared.work(Ends::Leave);
        Ok(Submitted(ticket))
    }

    /// Submits a transfer and waits until it ended.
    pub fn run(&self, transfer: Transfer) -> Result<End, SubmitError> {
        let (sender, receiver) = mpsc::sync_channel(1);
        self.submit(transfer, move |end| drop(sender.send(end)))?;
        receiver.recv().map_err(|_| SubmitError(PostError::Closed))
    }

    /// Asks for an early end. The transfer ends as cancelled once it is quiet, unless it ended
    /// before.
    pub fn cancel(&self, submitted: Submitted) {
        self.tell(Message::Cancel(submitted.0));
    }

    /// Makes a transfer more urgent that has not ended.
    pub fn raise(&self, submitted: Submitted, class: Class) {
        self.tell(Message::Raise(submitted.0, class));
    }

    fn tell(&self, message: Message) {
        // A mover that is gone has no transfers left, and another process's is out of reach.
        if self.shared.process.is_current() && self.shared.lock.post_unbounded(message).is_ok() {
            self.shared.work(Ends::Leave);
        }
    }

    /// Has `listener` called, on a thread of the mover or of a link, with spans that leave
    /// quarantine, whoever's they are.
    pub fn on_quiet(&self, listener: impl FnMut(&[Span]) + Send + 'static) -> Result<(), Closed> {
        self.control(move |worker| worker.on_quiet.push(Box::new(listener)))
    }

    fn control<R: Send + 'static>(
        &self,
        act: impl FnOnce(&mut Worker) -> R + Send + 'static,
    ) -> Result<R, Closed> {
        self.shared.process.check()?;
        let (sender, receiver) = mpsc::sync_channel(1);
        let message = Message::Control(Box::new(move |worker| drop(sender.send(act(worker)))));
        self.shared.lock.post_unbounded(message).map_err(|_| Closed::Ended)?;
        self.shared.work(Ends::Leave);
        receiver.recv().map_err(|_| Closed::Ended)
    }
}

impl Completed for Shared {
    /// The windows of the links bound how many can.
    fn completed(self: Arc<Shared>, op: OpId, outcome: Outcome) {
        // If the mover has ended nobody waits for this operation.
        if self.lock.post_unbounded(Message::Completed(op, outcome)).is_ok() {
            self.work(Ends::Tell);
        }
    }
}

impl Shared {
    /// Carries out what was posted, unless another thread does.
    fn work(self: &Arc<Shared>, ends: Ends) {
        let mut ring_at_us = None;
        let left = self.lock.combine(|worker, messages| ring_at_us = worker.round(self, messages, ends));
        let ring_at_us = if left == Left::More { Some(0) } else { ring_at_us };
        // Only now, so that the mover's thread does not find the worker taken.
        if let Some(at_us) = ring_at_us {
            self.alarm.ring_at(at_us);
        }
    }

    /// The mover's own thread.
    fn run(self: Arc<Shared>) {
        while self.alarm.wait() {
            self.work(Ends::Tell);
        }
        // Outside of every lock: links wait for their threads when they are dropped, which still
        // say what became of operations.
        drop(self.lock.with_worker(|worker| std::mem::take(&mut worker.drivers)));
        drop(self.lock.close(Worker::end));
    }
}

/// What only one thread has at a time.
struct Worker {
    mover: Mover,
    drivers: Vec<Box<dyn Link>>,
    memory: Arc<Memory>,
    epoch: Instant,
    by_ticket: HashMap<Ticket, TransferId>,
    callers: HashMap<TransferId, (Ticket, OnEnd)>,
    /// Those who have not been told yet.
    refused: Vec<(OnEnd, End)>,
    on_quiet: Vec<OnQuiet>,
}

impl Worker {
    fn now_us(&self) -> u64 {
        self.epoch.elapsed().as_micros() as u64
    }

    /// Does everything that can be done now. Gives the time at which there is more to do, if there
    /// is.
    fn round(&mut self, shared: &Arc<Shared>, messages: &mut Vec<Message>, ends: Ends) -> Option<u64> {
        for message in messages.drain(..) {
            self.handle(message);
        }
        self.mover.expire(self.now_us());
        self.start_what_can_start(shared);
        if ends == Ends::Tell {
            self.tell_ends();
        }
        if self.mover.has_events() || !self.refused.is_empty() {
            return Some(0);
        }
        self.mover.next_timeout_us()
    }

    /// Carries out what was posted before the end, and fails what has not ended. Callers are told
    /// under the worker's lock, as ever.
    fn end(&mut self, messages: &mut Vec<Message>) {
        for message in messages.drain(..) {
            self.handle(message);
        }
        self.mover.end_all(self.now_us());
        self.tell_ends();
    }

    fn handle(&mut self, message: Message) {
        let now_us = self.now_us();
        match message {
            Message::Submit(ticket, transfer, on_end) => match self.mover.submit(now_us, transfer) {
                Ok(id) => {
                    self.by_ticket.insert(ticket, id);
                    self.callers.insert(id, (ticket, on_end));
                }
                Err(refused) => {
                    let reason = Reason::Refused(refused);
                    let (unmoved, quarantined) = (Vec::new(), Vec::new());
                    let failure = Failure { reason, unmoved, moved_bytes: 0, quarantined };
                    self.refused.push((on_end, End::Failed(failure)));
                }
            },
            Message::Cancel(ticket) => {
                if let Some(id) = self.by_ticket.get(&ticket) {
                    self.mover.cancel(now_us, *id);
                    for (link, op) in self.mover.under_way(*id) {
                        if let Some(driver) = self.drivers.get_mut(link.index()) {
                            driver.cancel(op);
                        }
                    }
                }
            }
            Message::Raise(ticket, class) => {
                if let Some(id) = self.by_ticket.get(&ticket) {
                    self.mover.raise(*id, class);
                }
            }
            Message::Completed(op, outcome) => self.mover.complete(now_us, op, outcome),
            Message::Control(act) => act(self),
        }
    }

    fn start_what_can_start(&mut self, shared: &Arc<Shared>) {
        while let Some(start) = self.mover.poll(self.now_us()) {
            let done = Completion::new(start.op, Arc::clone(shared) as _);
            let op = LinkOp { pairs: start.pairs, bytes: start.bytes };
            match self.drivers.get_mut(start.link.index()) {
                Some(driver) => driver.start(op, &self.memory, done),
                None => done.finish(Outcome::Failed { error: "the link has no driver".into() }),
            }
        }
    }

    fn tell_ends(&mut self) {
        for (on_end, end) in self.refused.drain(..) {
            on_end(end);
        }
        while let Some(event) = self.mover.next_event() {
            match event {
                Event::Ended(id, end) => {
                    if let Some((ticket, on_end)) = self.callers.remove(&id) {
                        self.by_ticket.remove(&ticket);
                        on_end(end);
                    }
                }
                Event::Quiet(_, spans) => self.on_quiet.iter_mut().for_each(|listener| listener(&spans)),
            }
        }
    }
}
