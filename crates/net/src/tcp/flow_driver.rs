//! A flow's asking end at work. Usually its thread carries out what is posted; a small operation is
//! begun by the thread that posts it, if nobody else is at it, so that nobody has to be woken up
//! for it. This file joins inbox, connection and carrier.

use super::carrier::{Carrier, Ready};
use super::connection::Connection;
use super::error::Broken;
use super::handle::{Caller, FlowHandle, FlowOptions, Message, PeerInfo};
use super::peer::PeerRegions;
use super::requester::Requester;
use super::socket::Watch;
use super::wake::WakeUp;
use forebay_transfer::lock::Mutex;
use forebay_transfer::{Completion, Inbox, LinkOp, Memory, OpId, Outcome};
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Operations up to this length are begun by the thread that posts them: it is held up no longer
/// than a wake-up takes.
const SMALL_BYTES: u64 = 64 << 10;

/// A flow's worker, for its thread and for those who post.
pub(super) struct FlowDriver {
    /// `None`: the flow has ended.
    worker: Mutex<Option<Worker>>,
    inbox: Arc<Inbox<Message>>,
    /// Whether the carrier can be waited for while another thread uses it.
    may_run_ahead: bool,
    wake: WakeUp,
}

/// How the thread waits.
struct Sleep {
    sending: bool,
    timeout: Option<Duration>,
}

impl FlowDriver {
    /// Exchanges the greetings over a carrier.
    pub fn greet(
        carrier: Box<dyn Carrier>,
        requester: Requester,
        regions: PeerRegions,
        options: &FlowOptions,
    ) -> Result<(FlowDriver, Option<Watch>, FlowHandle, PeerInfo), Broken> {
        let wake = WakeUp::new()?;
        let waker = wake.clone();
        let inbox = Arc::new(Inbox::new(Arc::new(move || waker.wake())));
        let handle = FlowHandle::new(Arc::clone(&inbox));
        let watch = carrier.watch()?.map(Watch);
        let mut worker = Worker {
            connection: Connection::new(requester, options.progress_limit_us, 0),
            carrier,
            wake: wake.clone(),
            epoch: Instant::now(),
            op_limit_us: options.op_limit_us,
            handle: handle.clone(),
            regions,
            sleeps_until_us: 0,
            broken: None,
            asked: HashMap::new(),
            called: HashMap::new(),
        };
        let peer = worker.greet(options.connect_limit_us)?;
        let may_run_ahead = watch.is_some();
        Ok((FlowDriver { worker: Mutex::new(Some(worker)), inbox, may_run_ahead, wake }, watch, handle, peer))
    }

    /// Takes an operation in.
    pub fn begin(&self, op: LinkOp, memory: &Arc<Memory>, done: Completion) {
        let ahead = self.may_run_ahead && op.bytes <= SMALL_BYTES;
        let message = Message::Op(op, Arc::clone(memory), done);
        let posted = if ahead { self.inbox.post_unseen(message) } else { self.inbox.post(message) };
        if let Err(Message::Op(_, _, done)) = posted {
            return done.finish(Outcome::Failed { error: Broken::Ended.to_string() });
        }
        if ahead && self.run_ahead() {
            self.inbox.rouse();
        }
    }

    /// Says whether the flow's own thread is needed.
    fn run_ahead(&self) -> bool {
        // Whoever has it may have looked for messages already.
        let Some(mut worker) = self.worker.try_lock() else { return true };
        worker.as_mut().is_none_or(Worker::run_ahead)
    }

    /// The flow's thread: carries out what is posted until the flow is dropped or breaks, and then
    /// fails the rest.
    pub fn run(&self, watch: Option<Watch>) {
        let broken = self.drive(watch.as_ref()).err().unwrap_or(Broken::Ended);
        // It would keep the connection open.
        drop(watch);
        let worker = self.worker.lock().take();
        if let Some(worker) = worker {
            let handle = worker.handle.clone();
            worker.end(&broken);
            handle.tell_watchers(&broken);
            self.refuse(&handle, &broken);
        }
    }

    fn drive(&self, watch: Option<&Watch>) -> Result<(), Broken> {
        let mut ready = Ready::default();
        loop {
            let mut held = self.worker.lock();
            let Some(worker) = held.as_mut() else { return Ok(()) };
            let Some(sleep) = worker.step(ready)? else { return Ok(()) };
            ready = match watch {
                Some(watch) => {
                    drop(held);
                    watch.wait(&self.wake, sleep.sending, sleep.timeout)?
                }
                None => worker.wait(&sleep)?,
            };
        }
    }

    /// Fails what is posted to a flow that has ended, until it is dropped.
    fn refuse(&self, handle: &FlowHandle, broken: &Broken) {
        let mut messages = Vec::new();
        loop {
            let open = self.inbox.take(&mut messages);
            for message in messages.drain(..) {
                match message {
                    Message::Op(_, _, done) => {
                        handle.end(Some(done), Outcome::Failed { error: broken.to_string() });
                    }
                    Message::Call(_, _, mut caller) => caller.hear(Err(broken.clone().into())),
                    Message::CancelOp(_) | Message::Doubt | Message::Sever => {}
                }
            }
            if !open {
                return;
            }
            if self.inbox.may_sleep(false) && self.wake.wait(None, None).is_err() {
                // Without a wait the thread would spin. What is posted from now on fails when the
                // flow is dropped.
                self.inbox.close();
            }
        }
    }
}

/// Why an operation that was cancelled has failed.
const CANCELLED: &str = "the operation was cancelled";

/// What only one thread has at a time.
pub(super) struct Worker {
    connection: Connection<Requester>,
    carrier: Box<dyn Carrier>,
    wake: WakeUp,
    epoch: Instant,
    op_limit_us: u64,
    handle: FlowHandle,
    regions: PeerRegions,
    /// When the flow's thread goes on by itself.
    sleeps_until_us: u64,
    /// The flow has ended, and its thread has not seen it yet.
    broken: Option<Broken>,
    /// Who waits for which operation.
    asked: HashMap<u64, Completion>,
    /// Who waits for which call, or for an answer that comes too late.
    called: HashMap<u64, Caller>,
}

impl Worker {
    fn greet(&mut self, limit_us: u64) -> Result<PeerInfo, Broken> {
        let left_us = limit_us.saturating_sub(self.now_us());
        self.carrier.shake_hands(&self.wake, left_us, &|| false)?;
        let speaks_for = self.carrier.speaks_for();
        let mut ready = Ready::default();
        loop {
            let now_us = self.now_us();
            let pumped = self.connection.pump(now_us, &mut *self.carrier, ready)?;
            if let Some((welcome, regions)) = self.connection.role.peer() {
                speaks_for.check(&welcome.from.node).map_err(Broken::Turned)?;
                return Ok(PeerInfo { identity: welcome.from, regions: regions.to_vec() });
            }
            if now_us >= limit_us {
                return Err(Broken::Frozen { limit_us });
            }
            self.sleeps_until_us = limit_us;
            ready = self.wait(&Sleep { sending: pumped.send_blocked, timeout: self.timeout(pumped.more) })?;
        }
    }

    /// Carries out what was posted, and what the peer has sent. `None`: the flow was dropped, and
    /// all is done.
    fn step(&mut self, ready: Ready) -> Result<Option<Sleep>, Broken> {
        if let Some(broken) = self.broken.take() {
            return Err(broken);
        }
        let mut messages = Vec::new();
        let open = self.handle.inbox.take(&mut messages);
        let now_us = self.now_us();
        self.take_in(now_us, &mut messages)?;
        let pumped = self.connection.pump(now_us, &mut *self.carrier, ready);
        self.deliver_ends();
        let pumped = pumped?;
        if !open && self.connection.role.is_idle() {
            return Ok(None);
        }
        let awake = pumped.more || !self.handle.inbox.may_sleep(!open);
        self.sleeps_until_us = self.connection.next_timeout_us().unwrap_or(u64::MAX);
        Ok(Some(Sleep { sending: pumped.send_blocked, timeout: self.timeout(awake) }))
    }

    /// Carries out what was posted on the thread that has posted it. Says whether the flow's own
    /// thread is needed too.
    fn run_ahead(&mut self) -> bool {
        let mut messages = Vec::new();
        self.handle.inbox.take_unseen(&mut messages);
        let now_us = self.now_us();
        let taken = self.take_in(now_us, &mut messages);
        let pumped = taken.and_then(|()| self.connection.pump(now_us, &mut *self.carrier, Ready::default()));
        self.deliver_ends();
        match pumped {
            Ok(pumped) => {
                let until_us = self.connection.next_timeout_us().unwrap_or(u64::MAX);
                pumped.more || pumped.send_blocked || until_us < self.sleeps_until_us
            }
            Err(broken) => {
                self.broken.get_or_insert(broken);
                true
            }
        }
    }

    fn timeout(&self, awake: bool) -> Option<Duration> {
        match self.sleeps_until_us {
            _ if awake => Some(Duration::ZERO),
            u64::MAX => None,
            // A little late rather than twice: waits end early by what the clock is rounded.
            until_us => Some(Duration::from_micros(until_us.saturating_sub(self.now_us()).saturating_add(1))),
        }
    }

    fn wait(&mut self, sleep: &Sleep) -> Result<Ready, Broken> {
        Ok(self.carrier.wait(&self.wake, sleep.sending, sleep.timeout)?)
    }

    /// Ends what is under way. First nothing can move any more, then operations end.
    fn end(self, broken: &Broken) {
        let Worker { mut connection, carrier, handle, mut asked, mut called, .. } = self;
        handle.set_broken(broken);
        carrier.reset();
        connection.role.fail_all(broken);
        for (number, outcome) in connection.role.take_ended() {
            handle.end(asked.remove(&number), outcome);
        }
        for (number, call_end) in connection.role.calls.take_ended() {
            called.remove(&number).into_iter().for_each(|mut caller| caller.hear(call_end.clone()));
        }
    }

    /// Acts on what was posted. An error ends the flow; what was posted behind it fails.
    fn take_in(&mut self, now_us: u64, messages: &mut Vec<Message>) -> Result<(), Broken> {
        let mut verdict = Ok(());
        for message in messages.drain(..) {
            match message {
                Message::CancelOp(op) => self.cancel(op),
                Message::Op(op, memory, done) => self.begin(now_us, &op, &memory, done),
                Message::Call(body, limit_us, caller) => {
                    let number = self.connection.role.call(now_us, body, limit_us);
                    self.called.insert(number, caller);
                }
                Message::Doubt => verdict = verdict.and_then(|()| self.connection.fail_if_silent(now_us)),
                Message::Sever => verdict = Err(Broken::Ended),
            }
        }
        verdict
    }

    fn cancel(&mut self, op: OpId) {
        let asked = self.asked.iter().find(|(_, done)| done.op() == op);
        if let Some(number) = asked.map(|(number, _)| *number) {
            self.connection.role.cancel(number, CANCELLED);
        }
    }

    fn begin(&mut self, now_us: u64, op: &LinkOp, memory: &Memory, done: Completion) {
        let deadline_us = now_us.saturating_add(self.op_limit_us);
        match self.regions.translate(op, memory, deadline_us) {
            Err(error) => self.handle.end(Some(done), Outcome::Failed { error }),
            Ok(operation) => {
                let number = self.connection.role.submit(now_us, operation);
                self.asked.insert(number, done);
            }
        }
    }

    fn deliver_ends(&mut self) {
        for (number, outcome) in self.connection.role.take_ended() {
            self.handle.end(self.asked.remove(&number), outcome);
        }
        let ended_calls: Vec<_> = self.connection.role.calls.take_ended().collect();
        for (number, call_end) in ended_calls {
            let Entry::Occupied(mut caller) = self.called.entry(number) else { continue };
            caller.get_mut().hear(call_end);
            if !self.connection.role.calls.is_unanswered(number) {
                caller.remove();
            }
        }
    }

    fn now_us(&self) -> u64 {
        self.epoch.elapsed().as_micros() as u64
    }
}
