//! A flow as a link of the mover: a connection to a peer, and the thread that drives its asking
//! end. This file joins the parts.

use super::carrier::Carrier;
use super::error::{Broken, FlowError, VERSION};
use super::flow_driver::FlowDriver;
use super::greeting::{Hello, Identity};
use super::handle::{FlowHandle, FlowOptions, Message, PeerInfo};
use super::peer::PeerRegions;
use super::requester::Requester;
use super::socket::Socket;
use super::tls::is_beyond_loopback;
use super::tls_session::TlsSession;
use forebay_transfer::{Completion, Link, LinkOp, Memory, OpId, Process};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

/// A connection to a peer as a link of a mover. The window of its
/// [`LinkSpec`](forebay_transfer::LinkSpec) should have two lots or more, so that one travels while
/// the next is made ready.
///
/// A broken flow fails every operation, at once; the mover uses other routes. Dropping the flow
/// finishes what was started.
///
/// ```
/// use forebay_net::tcp::*;
/// use forebay_transfer::*;
/// use std::sync::Arc;
///
/// // One process offers memory.
/// let exports = Arc::new(Exports::default());
/// exports.offer(7, Arc::new(HostBuffer::new(8192)), Access::OPEN)?;
/// let me = Identity::starting([1; 16])?;
/// let options = ServerOptions::default();
/// let server = TcpServer::listen(([127, 0, 0, 1], 0).into(), me, exports, None, options)?;
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
    driver: Arc<FlowDriver>,
    handle: FlowHandle,
    thread: Option<JoinHandle<()>>,
    process: Process,
}

impl Flow {
    /// Connects to a peer and waits until it has let this end in.
    pub fn connect(
        address: SocketAddr,
        me: Identity,
        regions: PeerRegions,
        options: FlowOptions,
    ) -> Result<(Flow, PeerInfo), FlowError> {
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
    ) -> Result<(Flow, PeerInfo), Broken> {
        let carrier = match &options.tls {
            Some(tls) => Box::new(TlsSession::client(carrier, tls)?),
            None => carrier,
        };
        let hello = Hello {
            versions: (VERSION, VERSION),
            from: me,
            to_instance: options.instance.unwrap_or_default(),
            token: options.token.clone(),
        };
        let requester = Requester::new(hello, options.ping_after_us, 0);
        let (driver, watch, handle, peer) = FlowDriver::greet(carrier, requester, regions, options)?;
        let driver = Arc::new(driver);
        let own = Arc::clone(&driver);
        let thread = std::thread::Builder::new().name("forebay-flow".into()).spawn(move || own.run(watch));
        Ok((Flow { driver, handle, thread: Some(thread?), process: Process::current() }, peer))
    }

    /// Speaks to the flow after it was given to a mover.
    pub fn handle(&self) -> FlowHandle {
        self.handle.clone()
    }
}

impl Link for Flow {
    fn start(&mut self, op: LinkOp, memory: &Arc<Memory>, done: Completion) {
        self.driver.begin(op, memory, done);
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

impl std::fmt::Debug for Flow {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Flow").field("handle", &self.handle).finish_non_exhaustive()
    }
}
