//! A flow as a link of the mover: a connection to a peer, and the thread that drives its asking end. This file joins the
//! parts; it must never decide what is said on the wire.

use super::asking::{AskingEnd, Caller, Message};
use super::call::CallError;
use super::carrier::Carrier;
use super::command::PeerRegion;
use super::connection::Broken;
use super::ending::Ending;
use super::frame::VERSION;
use super::greeting::{Hello, Identity};
use super::peer::PeerRegions;
use super::requester::Requester;
use super::session::Session;
use super::socket::Socket;
use super::tls::{TlsConfig, is_beyond_loopback};
use forebay_transfer::Inbox;
use forebay_transfer::{Completion, Link, LinkOp, Memory, OpId, Process};
use parking_lot::Mutex;
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;
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

/// A connection to a peer as a link of a mover. The window of its [`LinkSpec`](forebay_transfer::LinkSpec) should have two
/// lots or more, so that one travels while the next is made ready.
///
/// A broken flow fails every operation, at once; the mover uses other routes. Dropping the flow finishes what was
/// started.
///
/// ```
/// use crate::tcp::*;
/// use forebay_transfer::*;
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
/// let (flow, peer) = Flow::connect(server.address(), me, regions.clone(), FlowOptions::default())?;
/// let link = handle.add_link(LinkSpec::new("flow0", 2, 64 << 20), Box::new(flow))?;
/// handle.add_path(PathSpec::direct(here, there, link))??;
/// let theirs = regions.register(&handle, there, peer.regions[0], 0)?;
/// let ours = handle.register(here, Arc::new(HostBuffer::new(8192)))?;
/// let pair = SpanPair::new(Span::new(ours, 0, 4096), Span::new(theirs, 4096, 4096));
/// let end = handle.run(Transfer::new(vec![pair], Class::Demand))?;
///
/// assert_eq!(end, End::Done { bytes: 4096 });
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct Flow {
    end: Arc<AskingEnd>,
    handle: FlowHandle,
    thread: Option<JoinHandle<()>>,
    process: Process,
}

/// Speaks to a flow while a mover owns it. Cheap to clone, usable from any thread.
#[derive(Clone)]
pub struct FlowHandle {
    pub(super) inbox: Arc<Inbox<Message>>,
    pub(super) stats: Arc<Mutex<FlowStats>>,
    pub(super) ending: Arc<Ending>,
}

impl Flow {
    /// Connects to a peer and waits until it has let this end in.
    pub fn connect(
        address: SocketAddr,
        me: Identity,
        regions: PeerRegions,
        options: FlowOptions,
    ) -> Result<(Flow, Peer), FlowError> {
        if options.tls.is_none() && !options.plain_beyond_loopback && is_beyond_loopback(address) {
            return Err(FlowError::Plain { address });
        }
        let limit = Duration::from_micros(options.connect_limit_us.max(1));
        let stream = TcpStream::connect_timeout(&address, limit)
            .map_err(|source| FlowError::Connect { address, source })?;
        let socket = Socket::new(stream, options.socket_buffer_bytes)?;
        let over = Flow::over(Box::new(socket), me, regions, &options);
        over.map_err(|broken| FlowError::Greeting { address, broken })
    }

    /// Greets the peer at the other end of a connection that has come about.
    pub(crate) fn over(
        carrier: Box<dyn Carrier>,
        me: Identity,
        regions: PeerRegions,
        options: &FlowOptions,
    ) -> Result<(Flow, Peer), Broken> {
        let system = |error: std::io::Error| Broken::System(error.to_string());
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
        let requester = Requester::new(hello, options.ping_after_us, 0);
        let (end, watch, handle, peer) = AskingEnd::greet(carrier, requester, regions, options)?;
        let end = Arc::new(end);
        let own = Arc::clone(&end);
        let thread = std::thread::Builder::new().name("forebay-flow".into()).spawn(move || own.run(watch));
        Ok((Flow { end, handle, thread: Some(thread.map_err(system)?), process: Process::current() }, peer))
    }

    /// Speaks to the flow after it was given to a mover.
    pub fn handle(&self) -> FlowHandle {
        self.handle.clone()
    }
}

impl Link for Flow {
    fn start(&mut self, op: LinkOp, memory: &Arc<Memory>, done: Completion) {
        self.end.begin(op, memory, done);
    }

    fn cancel(&mut self, op: OpId) {
        // A flow that has ended has nothing left to cancel.
        let _ = self.handle.inbox.post(Message::CancelOp(op));
    }
}

impl Drop for Flow {
    fn drop(&mut self) {
        if !self.process.is_current() {
            // The thread, and whoever holds a lock, are the parent's.
            return std::mem::forget(self.thread.take());
        }
        self.handle.inbox.close();
        if let Some(thread) = self.thread.take() {
            // A panic of the thread has already been printed, and its operations reported failures.
            let _ = thread.join();
        }
    }
}

impl FlowHandle {
    pub(super) fn new(inbox: Arc<Inbox<Message>>) -> FlowHandle {
        FlowHandle { inbox, stats: Arc::default(), ending: Arc::default() }
    }

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

    /// Another flow has found the peer frozen. This one ends as well, unless it has moved a byte lately: then it is that
    /// other connection which is.
    pub fn doubt(&self) {
        // A flow that has ended is beyond doubt.
        let _ = self.inbox.post(Message::Doubt);
    }

    /// Asks the peer for something beside its memory and tells `on_reply`, once, on the flow's thread, which moves no byte
    /// meanwhile. Calls overtake operations, and each other's answers. A call that waits is given up after `limit_us`.
    pub fn call(
        &self,
        body: Vec<u8>,
        limit_us: u64,
        on_reply: impl FnOnce(Result<Vec<u8>, CallError>) + Send + 'static,
    ) {
        self.call_and_hear(body, limit_us, on_reply, |_| {});
    }

    /// The same, for who has to know the answer also after the limit: `on_late` is told then, once, if one comes.
    pub fn call_and_hear(
        &self,
        body: Vec<u8>,
        limit_us: u64,
        on_reply: impl FnOnce(Result<Vec<u8>, CallError>) + Send + 'static,
        on_late: impl FnOnce(Vec<u8>) + Send + 'static,
    ) {
        let caller = Caller { on_reply: Some(Box::new(on_reply)), on_late: Some(Box::new(on_late)) };
        if let Err(Message::Call(_, _, mut caller)) = self.inbox.post(Message::Call(body, limit_us, caller)) {
            caller.hear(Err(self.ending.broken().unwrap_or(Broken::Ended).into()));
        }
    }

    /// Tells `watcher`, once, why the flow has ended: on the flow's thread after all operations and calls, or at once if
    /// that is past.
    pub fn on_broken(&self, watcher: impl FnOnce(Broken) + Send + 'static) {
        self.ending.watch(Box::new(watcher));
    }

    /// What the flow has done so far.
    pub fn stats(&self) -> FlowStats {
        self.stats.lock().clone()
    }
}

impl std::fmt::Debug for Flow {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Flow").field("handle", &self.handle).finish_non_exhaustive()
    }
}

impl std::fmt::Debug for FlowHandle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("FlowHandle").field("stats", &self.stats()).finish_non_exhaustive()
    }
}
