//! The mover thread: one [`Mover`] with real links, a clock and a mailbox. This file is glue: it carries messages between
//! callers, the schedule and the links. It must never decide what moves when.
//!
//! The thread sleeps until a message arrives or an operation overruns its limit; idle, it costs nothing.

use crate::driver::{Completion, Link, LinkOp, Outcome};
use crate::link::{LinkId, LinkSpec};
use crate::mailbox::{Mailbox, PostError};
use crate::memory::{Backing, Memory};
use crate::mover::{Event, Limits, Mover, OpId};
use crate::region::{Place, RegionId, Span};
use crate::route::{RouteError, RouteId, RouteSpec};
use crate::telemetry::Telemetry;
use crate::transfer::{End, Failure, Reason, Refused, Transfer, TransferId};
use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use thiserror::Error;

/// Messages that may wait for the mover thread.
const MAILBOX_LIMIT: usize = 65_536;

type OnEnd = Box<dyn FnOnce(End) + Send>;
type OnQuiet = Box<dyn FnMut(&[Span]) + Send>;

/// What others tell the mover thread.
pub(crate) enum Message {
    Submit(Ticket, Transfer, OnEnd),
    Cancel(Ticket),
    Completed(OpId, Outcome),
    Control(Box<dyn FnOnce(&mut Worker) + Send>),
}

/// Names a submission before the schedule has seen it.
type Ticket = u64;

/// A mover at work on a thread of its own. Dropping it ends the thread; transfers that have not ended then never will,
/// so stop submitting and wait for what is under way first.
#[derive(Debug)]
pub struct MoverThread {
    handle: MoverHandle,
    thread: Option<JoinHandle<()>>,
}

/// Submits to a mover thread. Cheap to clone, usable from any thread.
#[derive(Debug, Clone)]
pub struct MoverHandle {
    mailbox: Arc<Mailbox<Message>>,
    memory: Arc<Memory>,
    next_ticket: Arc<AtomicU64>,
    epoch: Instant,
}

/// A submitted transfer, for [`MoverHandle::cancel`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Submitted(Ticket);

/// Why a transfer was not taken in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[error("the mover takes nothing in: {0}")]
pub struct SubmitError(#[from] PostError);

/// The mover thread has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[error("the mover thread has ended")]
pub struct Closed;

impl MoverThread {
    /// Starts a mover without links or routes.
    pub fn spawn(limits: Limits) -> std::io::Result<MoverThread> {
        let mailbox = Arc::new(Mailbox::new(MAILBOX_LIMIT));
        let memory = Arc::new(Memory::default());
        let epoch = Instant::now();
        let handle = MoverHandle {
            mailbox: Arc::clone(&mailbox),
            memory: Arc::clone(&memory),
            next_ticket: Arc::default(),
            epoch,
        };
        let worker = Worker {
            mover: Mover::new(limits),
            drivers: Vec::new(),
            memory,
            mailbox,
            epoch,
            by_ticket: HashMap::new(),
            callers: HashMap::new(),
            on_quiet: Vec::new(),
        };
        let thread = std::thread::Builder::new().name("forebay-mover".into()).spawn(move || worker.run())?;
        Ok(MoverThread { handle, thread: Some(thread) })
    }

    /// A handle to submit with.
    pub fn handle(&self) -> MoverHandle {
        self.handle.clone()
    }
}

impl Drop for MoverThread {
    fn drop(&mut self) {
        self.handle.mailbox.close();
        if let Some(thread) = self.thread.take() {
            // A panic of the mover thread has already been printed; there is nobody left to tell.
            let _ = thread.join();
        }
    }
}

impl MoverHandle {
    /// Microseconds since the mover started: the clock of deadlines.
    pub fn now_us(&self) -> u64 {
        self.epoch.elapsed().as_micros() as u64
    }

    /// Where links and checks find a region's bytes.
    pub fn memory(&self) -> &Arc<Memory> {
        &self.memory
    }

    /// Registers memory at a place. It stays alive until it is unregistered.
    pub fn register(&self, place: Place, backing: Arc<dyn Backing>) -> Result<RegionId, Closed> {
        self.control(move |worker| {
            let region = worker.mover.add_region(place, backing.len() as u64);
            worker.memory.insert(region, backing);
            region
        })
    }

    /// Registers bytes that no address reaches, such as a file's: only a link that knows the region can move them.
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

    /// Adds a route.
    pub fn add_route(&self, spec: RouteSpec) -> Result<Result<RouteId, RouteError>, Closed> {
        self.control(move |worker| worker.mover.add_route(spec))
    }

    /// Takes a link out of service, or puts it back.
    pub fn set_link_up(&self, link: LinkId, up: bool) -> Result<(), Closed> {
        self.control(move |worker| {
            let now_us = worker.now_us();
            if up { worker.mover.link_up(link) } else { worker.mover.link_down(now_us, link) }
        })
    }

    /// A snapshot of all counters.
    pub fn telemetry(&self) -> Result<Telemetry, Closed> {
        self.control(|worker| worker.mover.telemetry())
    }

    /// Submits a transfer. `on_end` is called exactly once, on the mover thread, so it must be short and must not wait
    /// for the mover; a refusal arrives there too, as [`Reason::Refused`]. The spans belong to the mover until then.
    pub fn submit(
        &self,
        transfer: Transfer,
        on_end: impl FnOnce(End) + Send + 'static,
    ) -> Result<Submitted, SubmitError> {
        let ticket = self.next_ticket.fetch_add(1, Ordering::Relaxed);
        self.mailbox.post(Message::Submit(ticket, transfer, Box::new(on_end)))?;
        Ok(Submitted(ticket))
    }

    /// Submits a transfer and waits until it ended.
    pub fn run(&self, transfer: Transfer) -> Result<End, SubmitError> {
        let (sender, receiver) = mpsc::sync_channel(1);
        self.submit(transfer, move |end| drop(sender.send(end)))?;
        receiver.recv().map_err(|_| SubmitError(PostError::Closed))
    }

    /// Asks for an early end. The transfer ends as cancelled once it is quiet, unless it ended before.
    pub fn cancel(&self, submitted: Submitted) {
        // A mover that is gone has nothing left to cancel.
        let _ = self.mailbox.post_unbounded(Message::Cancel(submitted.0));
    }

    /// Has `listener` called, on the mover thread, with spans that leave quarantine, whoever's they are.
    pub fn on_quiet(&self, listener: impl FnMut(&[Span]) + Send + 'static) -> Result<(), Closed> {
        self.control(move |worker| worker.on_quiet.push(Box::new(listener)))
    }

    fn control<R: Send + 'static>(
        &self,
        act: impl FnOnce(&mut Worker) -> R + Send + 'static,
    ) -> Result<R, Closed> {
        let (sender, receiver) = mpsc::sync_channel(1);
        let message = Message::Control(Box::new(move |worker| drop(sender.send(act(worker)))));
        self.mailbox.post_unbounded(message).map_err(|_| Closed)?;
        receiver.recv().map_err(|_| Closed)
    }
}

/// What the mover thread owns.
pub(crate) struct Worker {
    mover: Mover,
    drivers: Vec<Box<dyn Link>>,
    memory: Arc<Memory>,
    mailbox: Arc<Mailbox<Message>>,
    epoch: Instant,
    by_ticket: HashMap<Ticket, TransferId>,
    callers: HashMap<TransferId, (Ticket, OnEnd)>,
    on_quiet: Vec<OnQuiet>,
}

impl Worker {
    fn now_us(&self) -> u64 {
        self.epoch.elapsed().as_micros() as u64
    }

    fn run(mut self) {
        let mut messages = Vec::new();
        let mailbox = Arc::clone(&self.mailbox);
        loop {
            let now_us = self.now_us();
            let timeout = self
                .mover
                .next_timeout_us(now_us)
                .map(|at_us| Duration::from_micros(at_us.saturating_sub(now_us)));
            if !mailbox.take(&mut messages, timeout) {
                return;
            }
            for message in messages.drain(..) {
                self.handle(message);
            }
            self.mover.expire(self.now_us());
            self.start_what_can_start();
            self.deliver_ends();
        }
    }

    fn handle(&mut self, message: Message) {
        let now_us = self.now_us();
        match message {
            Message::Submit(ticket, transfer, on_end) => match self.mover.submit(now_us, transfer) {
                Ok(id) => {
                    self.by_ticket.insert(ticket, id);
                    self.callers.insert(id, (ticket, on_end));
                }
                Err(refused) => on_end(End::Failed(Failure {
                    reason: Reason::Refused(refused),
                    unmoved: Vec::new(),
                    moved_bytes: 0,
                    quarantined: Vec::new(),
                })),
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
            Message::Completed(op, outcome) => self.mover.complete(now_us, op, outcome),
            Message::Control(act) => act(self),
        }
    }

    fn start_what_can_start(&mut self) {
        while let Some(start) = self.mover.poll(self.now_us()) {
            let done = Completion::new(start.op, Arc::clone(&self.mailbox));
            let op = LinkOp { pairs: start.pairs, bytes: start.bytes };
            match self.drivers.get_mut(start.link.index()) {
                Some(driver) => driver.start(op, &self.memory, done),
                None => done.finish(Outcome::Failed { error: "the link has no driver".into() }),
            }
        }
    }

    fn deliver_ends(&mut self) {
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
