//! A flow as a link of the mover: a connection to a peer, and the thread that drives its asking end. This file joins the
//! parts; it must never decide what is said on the wire.

use super::call::{CallEnd, CallError};
use super::carrier::Carrier;
use super::command::PeerRegion;
use super::connection::{Broken, Connection, Pumped};
use super::ending::Ending;
use super::frame::VERSION;
use super::greeting::{Hello, Identity};
use super::peer::PeerRegions;
use super::requester::{Operation, Patience, Requester};
use super::session::Session;
use super::socket::{Ready, Socket, WakeUp};
use super::tls::{TlsConfig, is_beyond_loopback};
use crate::disk::inbox::Inbox;
use forebay_mover::{Completion, Link, LinkOp, Memory, OpId, Outcome};
use std::collections::HashMap;
use std::net::{SocketAddr, TcpStream};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use thiserror::Error;

/// How a flow is used.
#[derive(Debug, Clone)]
pub struct FlowOptions {
    /// Shown to the peer if it asks for one. At most [`TOKEN_BYTES_MAX`](super::TOKEN_BYTES_MAX) bytes.
    pub token: Vec<u8>,
    /// The instance to speak to; another one is an error. `None`: whoever answers.
    pub instance: Option<[u8; 16]>,
    /// Connecting and the greeting may take this long.
    pub connect_limit_us: u64,
    /// With something under way and no byte moved for this long, the peer counts as frozen and the flow ends.
    pub progress_limit_us: u64,
    /// An operation may take this long.
    pub op_limit_us: u64,
    /// A flow that is in use asks after this much silence whether the peer is alive.
    pub ping_after_us: u64,
    /// The socket's buffers, each; the system decides otherwise.
    pub socket_buffer_bytes: Option<usize>,
    /// This node's certificate and whom it trusts. `None`: plain text.
    pub tls: Option<Arc<TlsConfig>>,
    /// Plain text also to addresses beyond loopback.
    pub plain_beyond_loopback: bool,
}

impl Default for FlowOptions {
    fn default() -> FlowOptions {
        FlowOptions {
            token: Vec::new(),
            instance: None,
            connect_limit_us: 5_000_000,
            progress_limit_us: 2_000_000,
            op_limit_us: 30_000_000,
            ping_after_us: 1_000_000,
            socket_buffer_bytes: None,
            tls: None,
            plain_beyond_loopback: false,
        }
    }
}

/// Why there is no flow.
#[derive(Debug, Error)]
pub enum FlowError {
    /// Plain text would leave the machine.
    #[error("{address} is beyond loopback: give TLS, or allow plain_beyond_loopback")]
    Plain {
        /// Where to.
        address: SocketAddr,
    },
    /// No connection came about.
    #[error("{address}: {source}")]
    Connect {
        /// Where to.
        address: SocketAddr,
        /// What the system said.
        source: std::io::Error,
    },
    /// The system lacks something this end needs.
    #[error("a flow could not be set up: {0}")]
    System(#[from] std::io::Error),
    /// The connection ended before the peer let this end in.
    #[error("{address}: {broken}")]
    Greeting {
        /// Where to.
        address: SocketAddr,
        /// How it ended.
        broken: Broken,
    },
}

/// Who was found at the other end.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Peer {
    /// Who it is.
    pub identity: Identity,
    /// What it offered when the flow began.
    pub regions: Vec<PeerRegion>,
}

/// What a flow has done so far.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct FlowStats {
    /// Bytes of operations that succeeded.
    pub moved_bytes: u64,
    /// Operations that succeeded.
    pub done: u64,
    /// Operations that failed.
    pub failed: u64,
    /// Operations whose bytes arrived damaged.
    pub corrupt: u64,
    /// Why the flow ended, if it has.
    pub broken: Option<Broken>,
}

/// A connection to a peer as a link of a mover. The window of its [`LinkSpec`](forebay_mover::LinkSpec) should have two
/// lots or more, so that one travels while the next is made ready.
///
/// A broken flow fails every operation, at once; the mover uses other routes. Dropping the flow finishes what was
/// started.
///
/// ```
/// use forebay_links::tcp::*;
/// use forebay_mover::*;
/// use std::sync::Arc;
///
/// // One process offers memory.
/// let exports = Arc::new(Exports::new(Arc::new(NoLeases)));
/// exports.offer(7, Arc::new(HostBuffer::new(8192)), Access::OPEN)?;
/// let me = Identity::starting([1; 16])?;
/// let server = TcpServer::listen(([127, 0, 0, 1], 0).into(), me, exports, ServerOptions::default())?;
///
/// // Another one writes to it.
/// let mover = MoverThread::spawn(Limits::default())?;
/// let handle = mover.handle();
/// let (here, there) = (Place::Host(0), Place::Peer(1));
/// let regions = PeerRegions::default();
/// let me = Identity::starting([2; 16])?;
/// let (flow, peer) = TcpFlow::connect(server.address(), me, regions.clone(), FlowOptions::default())?;
/// let link = handle.add_link(LinkSpec::new("flow0", 2, 64 << 20), Box::new(flow))?;
/// handle.add_route(RouteSpec::direct(here, there, link))??;
/// let theirs = regions.register(&handle, there, peer.regions[0], 0)?;
/// let ours = handle.register(here, Arc::new(HostBuffer::new(8192)))?;
/// let pair = SpanPair::new(Span::new(ours, 0, 4096), Span::new(theirs, 4096, 4096));
/// let end = handle.run(Transfer::new(vec![pair], Class::Demand))?;
///
/// assert_eq!(end, End::Done { bytes: 4096 });
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct TcpFlow {
    handle: FlowHandle,
    thread: Option<JoinHandle<()>>,
}

/// Speaks to a flow while a mover owns it. Cheap to clone, usable from any thread.
#[derive(Clone)]
pub struct FlowHandle {
    inbox: Arc<Inbox<Message>>,
    stats: Arc<Mutex<FlowStats>>,
    ending: Arc<Ending>,
}

enum Message {
    Op(LinkOp, Arc<Memory>, Completion),
    Call(Vec<u8>, u64, Caller),
    Cancel,
    CancelOp(OpId),
    Sever,
}

/// Whoever waits for the end of a call. Hears of it once, also when the flow's thread comes to grief.
struct Caller(Option<Box<dyn FnOnce(CallEnd) + Send>>);

fn hear(caller: Option<Caller>, end: CallEnd) {
    if let Some(on_reply) = caller.and_then(|mut caller| caller.0.take()) {
        on_reply(end);
    }
}

impl Drop for Caller {
    fn drop(&mut self) {
        if let Some(on_reply) = self.0.take() {
            on_reply(Err(Broken::Ended.into()));
        }
    }
}

impl TcpFlow {
    /// Connects to a peer and waits until it has let this end in.
    pub fn connect(
        address: SocketAddr,
        me: Identity,
        regions: PeerRegions,
        options: FlowOptions,
    ) -> Result<(TcpFlow, Peer), FlowError> {
        if options.tls.is_none() && !options.plain_beyond_loopback && is_beyond_loopback(address) {
            return Err(FlowError::Plain { address });
        }
        let limit = Duration::from_micros(options.connect_limit_us.max(1));
        let stream = TcpStream::connect_timeout(&address, limit)
            .map_err(|source| FlowError::Connect { address, source })?;
        let socket = Socket::new(stream, options.socket_buffer_bytes)?;
        let over = TcpFlow::over(Box::new(socket), me, regions, &options);
        over.map_err(|broken| FlowError::Greeting { address, broken })
    }

    /// Greets the peer at the other end of a connection that has come about.
    pub(crate) fn over(
        carrier: Box<dyn Carrier>,
        me: Identity,
        regions: PeerRegions,
        options: &FlowOptions,
    ) -> Result<(TcpFlow, Peer), Broken> {
        let system = |error: std::io::Error| Broken::System(error.to_string());
        let wake = WakeUp::new().map_err(system)?;
        let carrier = match &options.tls {
            Some(tls) => Box::new(Session::asking(carrier, tls).map_err(system)?),
            None => carrier,
        };
        let hello = Hello {
            versions: (VERSION, VERSION),
            from: me,
            to_instance: options.instance.unwrap_or_default(),
            token: options.token.clone(),
        };
        let patience = Patience { ping_after_us: options.ping_after_us };
        let requester = Requester::new(hello, patience, 0);
        let waker = wake.clone();
        let inbox = Arc::new(Inbox::new(Arc::new(move || waker.wake())));
        let handle = FlowHandle { inbox, stats: Arc::default(), ending: Arc::default() };
        let mut worker = Worker {
            connection: Connection::new(requester, options.progress_limit_us, 0),
            carrier,
            wake,
            epoch: Instant::now(),
            op_limit_us: options.op_limit_us,
            handle: handle.clone(),
            regions,
            asked: HashMap::new(),
            called: HashMap::new(),
        };
        let peer = worker.greet(options.connect_limit_us)?;
        let thread = std::thread::Builder::new().name("forebay-flow".into()).spawn(move || worker.run());
        Ok((TcpFlow { handle, thread: Some(thread.map_err(system)?) }, peer))
    }

    /// Speaks to the flow after it was given to a mover.
    pub fn handle(&self) -> FlowHandle {
        self.handle.clone()
    }
}

impl Link for TcpFlow {
    fn start(&mut self, op: LinkOp, memory: &Arc<Memory>, done: Completion) {
        let message = Message::Op(op, Arc::clone(memory), done);
        if let Err(Message::Op(_, _, done)) = self.handle.inbox.post(message) {
            done.finish(Outcome::Failed { error: Broken::Ended.to_string() });
        }
    }

    fn cancel(&mut self, op: OpId) {
        // A flow that has ended has nothing left to cancel.
        let _ = self.handle.inbox.post(Message::CancelOp(op));
    }
}

impl Drop for TcpFlow {
    fn drop(&mut self) {
        self.handle.inbox.close();
        if let Some(thread) = self.thread.take() {
            // A panic of the thread has already been printed, and its operations reported failures.
            let _ = thread.join();
        }
    }
}

impl FlowHandle {
    /// Asks for an early end of all operations that are under way. Each fails once it is quiet at both ends, unless it
    /// succeeds before. To be called after the mover's transfers were cancelled, or it tries again.
    pub fn cancel_all(&self) {
        // A flow that has ended has nothing left to cancel.
        let _ = self.inbox.post(Message::Cancel);
    }

    /// Ends the connection now. Operations that are under way fail at once and touch nothing any more, at either end; the
    /// peer is not waited for. For a peer that is known to be frozen or gone.
    pub fn sever(&self) {
        // A flow that has ended has nothing left to sever.
        let _ = self.inbox.post(Message::Sever);
    }

    /// Asks the peer for something beside its memory and tells `on_reply`, once, on the flow's thread, which moves no byte
    /// meanwhile. Calls overtake operations, and each other's answers. A call that waits is given up after `limit_us`.
    pub fn call(
        &self,
        body: Vec<u8>,
        limit_us: u64,
        on_reply: impl FnOnce(Result<Vec<u8>, CallError>) + Send + 'static,
    ) {
        let caller = Caller(Some(Box::new(on_reply)));
        if let Err(Message::Call(_, _, caller)) = self.inbox.post(Message::Call(body, limit_us, caller)) {
            hear(Some(caller), Err(self.ending.broken().unwrap_or(Broken::Ended).into()));
        }
    }

    /// Tells `watcher`, once, why the flow has ended: on the flow's thread after all operations and calls, or at once if
    /// that is past.
    pub fn on_broken(&self, watcher: impl FnOnce(Broken) + Send + 'static) {
        self.ending.watch(Box::new(watcher));
    }

    /// What the flow has done so far.
    pub fn stats(&self) -> FlowStats {
        self.stats.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl std::fmt::Debug for FlowHandle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("FlowHandle").field("stats", &self.stats()).finish_non_exhaustive()
    }
}

/// Why an operation that was cancelled has failed.
const CANCELLED: &str = "the operation was cancelled";

/// What the flow's thread owns.
struct Worker {
    connection: Connection<Requester>,
    carrier: Box<dyn Carrier>,
    wake: WakeUp,
    epoch: Instant,
    op_limit_us: u64,
    handle: FlowHandle,
    regions: PeerRegions,
    /// Who waits for which operation.
    asked: HashMap<u64, Completion>,
    /// Who waits for which call.
    called: HashMap<u64, Caller>,
}

impl Worker {
    /// Exchanges the greetings.
    fn greet(&mut self, limit_us: u64) -> Result<Peer, Broken> {
        let left_us = limit_us.saturating_sub(self.now_us());
        self.carrier.shake_hands(&self.wake, left_us, &|| false)?;
        let speaks_for = self.carrier.speaks_for();
        let mut ready = Ready::default();
        loop {
            let now_us = self.now_us();
            let pumped = self.connection.pump(now_us, &mut *self.carrier, ready.readable)?;
            if let Some((welcome, regions)) = self.connection.role.peer() {
                speaks_for.check(&welcome.from.node).map_err(Broken::Turned)?;
                return Ok(Peer { identity: welcome.from, regions: regions.to_vec() });
            }
            if now_us >= limit_us {
                return Err(Broken::Frozen { limit_us });
            }
            ready = self.wait(pumped, true, Some(limit_us))?;
        }
    }

    fn run(mut self) {
        let broken = self.drive().err().unwrap_or(Broken::Ended);
        self.handle.stats.lock().unwrap_or_else(PoisonError::into_inner).broken = Some(broken.clone());
        let Worker { mut connection, carrier, wake, handle, mut asked, mut called, .. } = self;
        // First nothing can move any more, then operations end.
        carrier.reset();
        connection.role.fail_all(&broken);
        for (number, outcome) in connection.role.take_ended() {
            end(&handle.stats, asked.remove(&number), outcome);
        }
        for (number, call_end) in connection.role.take_ended_calls() {
            hear(called.remove(&number), call_end);
        }
        drop(connection);
        handle.ending.over(&broken);
        let mut messages = Vec::new();
        loop {
            let open = handle.inbox.take(&mut messages);
            for message in messages.drain(..) {
                match message {
                    Message::Op(_, _, done) => {
                        end(&handle.stats, Some(done), Outcome::Failed { error: broken.to_string() });
                    }
                    Message::Call(_, _, caller) => hear(Some(caller), Err(broken.clone().into())),
                    Message::Cancel | Message::CancelOp(_) | Message::Sever => {}
                }
            }
            if !open {
                return;
            }
            if handle.inbox.may_sleep(false) && wake.wait(None, None).is_err() {
                // Without a wait the thread would spin. What is posted from now on fails when the flow is dropped.
                handle.inbox.close();
            }
        }
    }

    /// Carries out what is posted until the flow is dropped, or breaks.
    fn drive(&mut self) -> Result<(), Broken> {
        let mut messages = Vec::new();
        let mut ready = Ready::default();
        loop {
            let open = self.handle.inbox.take(&mut messages);
            let now_us = self.now_us();
            self.take_in(now_us, &mut messages)?;
            let pumped = self.connection.pump(now_us, &mut *self.carrier, ready.readable);
            self.deliver_ends();
            if !open && self.connection.role.is_idle() {
                return Ok(());
            }
            let may_sleep = self.handle.inbox.may_sleep(!open);
            let timeout_us = self.connection.next_timeout_us();
            ready = self.wait(pumped?, may_sleep, timeout_us)?;
        }
    }

    /// Acts on what was posted. An error ends the flow; what was posted behind it fails.
    fn take_in(&mut self, now_us: u64, messages: &mut Vec<Message>) -> Result<(), Broken> {
        let mut severed = false;
        for message in messages.drain(..) {
            match message {
                Message::Cancel => self.connection.role.cancel_all(CANCELLED),
                Message::CancelOp(op) => self.cancel(op),
                Message::Op(op, memory, done) => self.begin(now_us, &op, &memory, done),
                Message::Call(body, limit_us, caller) => {
                    let number = self.connection.role.call(now_us, body, limit_us);
                    self.called.insert(number, caller);
                }
                Message::Sever => severed = true,
            }
        }
        if severed { Err(Broken::Ended) } else { Ok(()) }
    }

    fn cancel(&mut self, op: OpId) {
        let asked = self.asked.iter().find(|(_, done)| done.op() == op);
        if let Some(number) = asked.map(|(number, _)| *number) {
            self.connection.role.cancel(number, CANCELLED);
        }
    }

    fn begin(&mut self, now_us: u64, op: &LinkOp, memory: &Memory, done: Completion) {
        match self.regions.translate(op, memory) {
            Err(error) => end(&self.handle.stats, Some(done), Outcome::Failed { error }),
            Ok(asking) => {
                let deadline_us = now_us.saturating_add(self.op_limit_us);
                let (wish, command, payload) = (asking.wish, asking.command, asking.payload);
                let operation = Operation { wish, command, payload, deadline_us };
                let number = self.connection.role.submit(now_us, operation);
                self.asked.insert(number, done);
            }
        }
    }

    fn deliver_ends(&mut self) {
        for (number, outcome) in self.connection.role.take_ended() {
            end(&self.handle.stats, self.asked.remove(&number), outcome);
        }
        for (number, call_end) in self.connection.role.take_ended_calls() {
            hear(self.called.remove(&number), call_end);
        }
    }

    fn wait(&mut self, pumped: Pumped, may_sleep: bool, until_us: Option<u64>) -> Result<Ready, Broken> {
        let timeout = match until_us {
            _ if pumped.more || !may_sleep => Some(Duration::ZERO),
            // A little late rather than twice: waits end early by what the clock is rounded.
            Some(until_us) => {
                Some(Duration::from_micros(until_us.saturating_sub(self.now_us()).saturating_add(1)))
            }
            None => None,
        };
        let waited = self.carrier.wait(&self.wake, pumped.send_blocked, timeout);
        waited.map_err(|error| Broken::System(error.to_string()))
    }

    fn now_us(&self) -> u64 {
        self.epoch.elapsed().as_micros() as u64
    }
}

/// Counts an outcome and tells whoever waits for it.
fn end(stats: &Mutex<FlowStats>, done: Option<Completion>, outcome: Outcome) {
    let mut counted = stats.lock().unwrap_or_else(PoisonError::into_inner);
    match &outcome {
        Outcome::Moved { bytes } => {
            counted.done += 1;
            counted.moved_bytes += bytes;
        }
        Outcome::Failed { .. } | Outcome::Denied { .. } => counted.failed += 1,
        Outcome::Corrupt => counted.corrupt += 1,
    }
    drop(counted);
    if let Some(done) = done {
        done.finish(outcome);
    }
}
