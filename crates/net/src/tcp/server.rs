//! The port on which peers reach a node's memory: who is let in, how many, and the thread of each
//! connection. This file counts and closes.

use super::carrier::{Carrier, Ready};
use super::command::FaultCode;
use super::connection::{Connection, Pumped};
use super::error::Broken;
use super::exports::Exports;
use super::greeting::{Hello, Identity, Refusal, RefusalCode};
use super::responder::{Authenticator, Responder, farewell};
use super::service::{CallSession, Service};
use super::socket::Socket;
use super::tls::{SpeaksFor, TlsConfig, is_beyond_loopback};
use super::tls_session::TlsSession;
use super::wake::WakeUp;
use forebay_transfer::listen::{Room, RoomPlace, RoomStat};
use forebay_transfer::lock::Mutex;
use forebay_transfer::{LogGate, Process};
use std::collections::HashMap;
use std::io;
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How long the port pauses when the system has no descriptors or threads left.
const PAUSE: Duration = Duration::from_millis(100);

/// What a server allows.
#[derive(Clone)]
pub struct ServerOptions {
    /// What peers have to show. Empty: nothing.
    pub token: Vec<u8>,
    /// Connections at a time that were let in, of all peers.
    pub flows_max: usize,
    /// Connections at a time that were not let in yet. Of a full room the oldest gives way to one
    /// that comes.
    pub pending_max: usize,
    /// Connections at a time, of one peer.
    pub flows_per_peer_max: usize,
    /// A connection that says nothing valid for this long is closed.
    pub greeting_limit_us: u64,
    /// A peer that moves no byte of what is due for this long counts as frozen.
    pub progress_limit_us: u64,
    /// How long operations that are under way may take when the server is closed.
    pub drain_limit_us: u64,
    /// The sockets' buffers, each; the system decides otherwise.
    pub socket_buffer_bytes: Option<usize>,
    /// This node's certificate and whom it trusts. `None`: plain text.
    pub tls: Option<Arc<TlsConfig>>,
    /// Plain text also on addresses that others can reach.
    pub plain_beyond_loopback: bool,
}

impl Default for ServerOptions {
    fn default() -> ServerOptions {
        ServerOptions {
            token: Vec::new(),
            flows_max: 256,
            pending_max: 64,
            flows_per_peer_max: 32,
            greeting_limit_us: 2_000_000,
            progress_limit_us: 2_000_000,
            drain_limit_us: 5_000_000,
            socket_buffer_bytes: None,
            tls: None,
            plain_beyond_loopback: false,
        }
    }
}

/// What a server has done so far.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ServerStats {
    /// Connections that are open, greeted or not.
    pub flows: usize,
    /// Connections that were not let in yet, and those that gave way to others.
    pub pending: RoomStat,
    /// Connections that were let in.
    pub let_in: u64,
    /// Connections that were refused, by reason.
    pub refused: HashMap<RefusalCode, u64>,
    /// Operations that failed, by reason.
    pub faults: HashMap<FaultCode, u64>,
}

/// Listens for peers. Dropping it closes the port, lets operations that are under way end, and
/// closes the connections.
pub struct TcpServer {
    shared: Arc<Shared>,
    address: SocketAddr,
    thread: Option<JoinHandle<()>>,
    process: Process,
}

struct Shared {
    me: Identity,
    exports: Arc<Exports>,
    service: Option<Arc<dyn Service>>,
    options: ServerOptions,
    closing: AtomicBool,
    state: Mutex<State>,
    /// Connections that are not let in yet, by address; those that came beside the port have none.
    room: Arc<Room<Option<IpAddr>>>,
    /// Held while a peer is let in or said to be gone, so that the two never overtake each other.
    membership: Mutex<()>,
    /// Connections that came about beside the port.
    arrived: Mutex<Vec<Box<dyn Carrier>>>,
    wake: WakeUp,
    /// For the line that says that a peer's bytes arrived damaged.
    corrupt: LogGate,
}

#[derive(Default)]
struct State {
    stats: ServerStats,
    flows_of: HashMap<Identity, usize>,
    wakes: HashMap<u64, WakeUp>,
    /// A gate for the log lines of each reason, so that one reason does not hide another.
    gates: HashMap<RefusalCode, Arc<LogGate>>,
}

impl TcpServer {
    /// Listens on an address. `service` answers calls; without one they are refused. Without TLS an
    /// address beyond loopback is refused unless it is asked for: whoever can reach it sees plain
    /// text.
    pub fn listen(
        address: SocketAddr,
        me: Identity,
        exports: Arc<Exports>,
        service: Option<Arc<dyn Service>>,
        options: ServerOptions,
    ) -> io::Result<TcpServer> {
        if options.tls.is_none() && !options.plain_beyond_loopback && is_beyond_loopback(address) {
            let why = format!("{address} is beyond loopback: give TLS, or allow plain_beyond_loopback");
            return Err(io::Error::new(io::ErrorKind::PermissionDenied, why));
        }
        let listener = TcpListener::bind(address)?;
        listener.set_nonblocking(true)?;
        let address = listener.local_addr()?;
        let room = Room::new("the peers' port", options.pending_max);
        let shared = Arc::new(Shared {
            room,
            me,
            exports,
            service,
            options,
            closing: AtomicBool::new(false),
            state: Mutex::default(),
            membership: Mutex::default(),
            arrived: Mutex::default(),
            wake: WakeUp::new()?,
            corrupt: LogGate::new(),
        });
        let port = Port { shared: Arc::clone(&shared), threads: HashMap::new(), next: 0 };
        let thread =
            std::thread::Builder::new().name("forebay-port".into()).spawn(move || port.run(&listener))?;
        Ok(TcpServer { shared, address, thread: Some(thread), process: Process::current() })
    }

    /// Where peers connect to.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// The way in beside the port.
    pub fn acceptor(&self) -> Acceptor {
        Acceptor(Arc::downgrade(&self.shared))
    }

    pub fn stats(&self) -> ServerStats {
        let state = self.shared.state.lock();
        ServerStats { flows: state.wakes.len(), pending: self.shared.room.stat(), ..state.stats.clone() }
    }
}

/// A way into a server beside its port, for connections that come about otherwise. Does not keep
/// the server.
#[derive(Clone)]
pub struct Acceptor(Weak<Shared>);

impl Acceptor {
    /// Has a connection served as if it had come through the port. `false`: the server has ended.
    pub(crate) fn adopt(&self, carrier: Box<dyn Carrier>) -> bool {
        let open = self.0.upgrade().filter(|shared| !shared.closing.load(Ordering::Acquire));
        let Some(shared) = open else { return false };
        shared.arrived.lock().push(carrier);
        shared.wake.wake();
        true
    }
}

impl Drop for TcpServer {
    fn drop(&mut self) {
        if !self.process.is_current() {
            // The threads, and whoever holds a lock, are the parent's.
            return std::mem::forget(self.thread.take());
        }
        self.shared.closing.store(true, Ordering::Release);
        self.shared.wake.wake();
        self.shared.state.lock().wakes.values().for_each(WakeUp::wake);
        if let Some(thread) = self.thread.take() {
            // A panic of the thread has already been printed.
            let _ = thread.join();
        }
    }
}

impl Shared {
    fn take_arrived(&self) -> Vec<Box<dyn Carrier>> {
        std::mem::take(&mut *self.arrived.lock())
    }

    /// Lets a peer in, or says why not.
    fn admit(&self, hello: &Hello) -> Result<(), Refusal> {
        if !same(&hello.token, &self.options.token) {
            let text = "the token is not the one that is asked for".into();
            return Err(Refusal { code: RefusalCode::Token, text });
        }
        let _nobody_goes = self.membership.lock();
        let mut state = self.state.lock();
        let open: usize = state.flows_of.values().sum();
        if open >= self.options.flows_max {
            let text = format!("{open} flows are open; no more may");
            return Err(Refusal { code: RefusalCode::TooManyFlows, text });
        }
        let of_node = |(from, flows): (&Identity, &usize)| (from.node == hello.from.node).then_some(*flows);
        let flows: usize = state.flows_of.iter().filter_map(of_node).sum();
        let flows_max = self.options.flows_per_peer_max;
        if flows >= flows_max {
            let text = format!("the peer has {flows} flows; allowed: {flows_max}");
            return Err(Refusal { code: RefusalCode::TooManyFlows, text });
        }
        *state.flows_of.entry(hello.from).or_default() += 1;
        state.stats.let_in += 1;
        Ok(())
    }

    /// A connection of a peer that was let in has ended.
    fn forget(&self, peer: Identity) {
        let _nobody_comes = self.membership.lock();
        let mut state = self.state.lock();
        let Some(flows) = state.flows_of.get_mut(&peer) else { return };
        *flows -= 1;
        if *flows == 0 {
            state.flows_of.remove(&peer);
            drop(state);
            self.service.iter().for_each(|service| service.gone(peer));
        }
    }

    /// Counts a refusal, and tells it at most once a minute for each reason.
    fn count_refusal(&self, from: Option<IpAddr>, broken: &Broken) {
        let code = match broken {
            Broken::Turned(refusal) => refusal.code,
            Broken::Bad(bad) => bad.into(),
            Broken::Tls(_) => RefusalCode::Certificate,
            _ => return,
        };
        let mut state = self.state.lock();
        *state.stats.refused.entry(code).or_default() += 1;
        let gate = Arc::clone(state.gates.entry(code).or_default());
        drop(state);
        if let Some(repeated) = gate.pass() {
            let from = name_of(from);
            let why = match broken {
                Broken::Turned(refusal) => refusal.text.clone(),
                Broken::Bad(bad) => format!("it sent {bad}"),
                other => other.to_string(),
            };
            tracing::warn!(from, reason = code.label(), detail = why, repeated, "peer refused");
        }
    }
}

/// Where a connection came from, for the log.
fn name_of(from: Option<IpAddr>) -> String {
    from.map_or_else(|| "a rail".to_owned(), |from| from.to_string())
}

/// Whether two tokens are the same, in a time that does not tell where they differ.
fn same(one: &[u8], other: &[u8]) -> bool {
    let differing = one.iter().zip(other).fold(0, |differing, (one, other)| differing | (one ^ other));
    one.len() == other.len() && std::hint::black_box(differing) == 0
}

/// What the port's thread owns.
struct Port {
    shared: Arc<Shared>,
    threads: HashMap<u64, JoinHandle<()>>,
    next: u64,
}

impl Port {
    fn run(mut self, listener: &TcpListener) {
        while !self.shared.closing.load(Ordering::Acquire) {
            for carrier in self.shared.take_arrived() {
                // Where threads or descriptors are short, the peer finds that the connection has
                // ended.
                let _ = self.host(carrier, None);
            }
            let rest = match listener.accept() {
                Ok((stream, from)) => self.receive(stream, from.ip()).is_err(),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    // A wait that fails would make the thread spin.
                    let waited = self.shared.wake.wait(Some(listener), None);
                    waited.is_err()
                }
                // Of those who connect some are gone already; where descriptors are short, a rest
                // helps.
                Err(_) => true,
            };
            self.reap();
            if rest {
                std::thread::sleep(PAUSE);
            }
        }
        for thread in self.threads.into_values() {
            let _ = thread.join();
        }
    }

    fn receive(&mut self, stream: TcpStream, from: IpAddr) -> io::Result<()> {
        let socket = Socket::new(stream, self.shared.options.socket_buffer_bytes)?;
        self.host(Box::new(socket), Some(from))
    }

    /// Gives what has come about a thread of its own, as soon as there is a place for one that is
    /// not let in yet.
    fn host(&mut self, carrier: Box<dyn Carrier>, from: Option<IpAddr>) -> io::Result<()> {
        let carrier = match &self.shared.options.tls {
            Some(tls) => Box::new(TlsSession::server(carrier, tls)?),
            None => carrier,
        };
        let (number, wake) = (self.next, WakeUp::new()?);
        let evict = wake.clone();
        let is_closing = || self.shared.closing.load(Ordering::Acquire);
        let place = self.shared.room.enter(&from, move || evict.wake(), is_closing);
        let Some(place) = place.map(Arc::new) else { return Ok(()) };
        self.next += 1;
        self.shared.state.lock().wakes.insert(number, wake.clone());
        let accepted = AcceptedConnection {
            shared: Arc::clone(&self.shared),
            number,
            from,
            place,
            peer: Arc::default(),
        };
        let spawned = std::thread::Builder::new()
            .name("forebay-peer".into())
            .spawn(move || accepted.run(carrier, &wake));
        self.threads.insert(number, spawned?);
        Ok(())
    }

    /// Forgets the threads of connections that have ended.
    fn reap(&mut self) {
        self.threads.retain(|_, thread| !thread.is_finished());
    }
}

/// A connection that a peer has made. Forgotten by the server when this is dropped.
struct AcceptedConnection {
    shared: Arc<Shared>,
    number: u64,
    from: Option<IpAddr>,
    /// Among those that are not let in yet.
    place: Arc<RoomPlace<Option<IpAddr>>>,
    /// Whose it is, once that is known.
    peer: Arc<Mutex<Option<Identity>>>,
}

impl AcceptedConnection {
    fn run(self, mut carrier: Box<dyn Carrier>, wake: &WakeUp) {
        match self.serve(&mut *carrier, wake) {
            Ok(()) => carrier.part(&[]),
            Err(broken) => {
                self.shared.count_refusal(self.from, &broken);
                match farewell(&broken) {
                    Some(bytes) => carrier.part(&bytes),
                    None => carrier.reset(),
                }
            }
        }
    }

    /// Carries out what the peer asks for, until it goes or the server is closed.
    fn serve(&self, carrier: &mut dyn Carrier, wake: &WakeUp) -> Result<(), Broken> {
        let epoch = Instant::now();
        let now_us = || epoch.elapsed().as_micros() as u64;
        let options = &self.shared.options;
        self.shake_hands(carrier, wake)?;
        let exports = Arc::clone(&self.shared.exports);
        let (waker, copied) = (wake.clone(), wake.clone());
        let session = CallSession::new(self.shared.service.clone(), move || waker.wake());
        let (authenticator, greet_until_us) =
            (self.authenticator(carrier.speaks_for()), options.greeting_limit_us);
        let responder = Responder::new(self.shared.me, exports, authenticator, session, greet_until_us);
        let responder = responder.waking(Arc::new(move || copied.wake()));
        let mut connection = Connection::new(responder, options.progress_limit_us, 0);
        let mut ready = Ready::default();
        let mut drained_by_us = u64::MAX;
        loop {
            if self.shared.closing.load(Ordering::Acquire) && drained_by_us == u64::MAX {
                connection.role.close();
                drained_by_us = now_us().saturating_add(options.drain_limit_us);
            }
            if self.place.is_evicted() {
                return Err(Broken::Turned(self.evicted()));
            }
            // What a peer sent before it gave up must not be carried out after.
            if ready.reset {
                return Err(Broken::Closed);
            }
            let pumped = connection.pump(now_us(), carrier, ready);
            self.count_faults(&mut connection.role);
            let pumped = pumped?;
            let drained = connection.role.is_idle() && !pumped.send_blocked && !pumped.more;
            if drained_by_us < u64::MAX && (drained || now_us() >= drained_by_us) {
                return Ok(());
            }
            let until_us = connection.next_timeout_us().unwrap_or(u64::MAX).min(drained_by_us);
            let timeout = match pumped {
                Pumped { more: true, .. } => Some(Duration::ZERO),
                _ if until_us == u64::MAX => None,
                _ => Some(Duration::from_micros(until_us.saturating_sub(now_us()).saturating_add(1))),
            };
            ready = match pumped.stalled {
                // What the peer has sent stays where it is until a copy has ended.
                true => {
                    wake.wait(None, timeout)?;
                    Ready { readable: true, ..Ready::default() }
                }
                false => carrier.wait(wake, pumped.send_blocked, timeout)?,
            };
        }
    }

    fn shake_hands(&self, carrier: &mut dyn Carrier, wake: &WakeUp) -> Result<(), Broken> {
        let limit_us = self.shared.options.greeting_limit_us;
        let is_over = || self.shared.closing.load(Ordering::Acquire) || self.place.is_evicted();
        let shaken = carrier.shake_hands(wake, limit_us, &is_over);
        shaken.map_err(|broken| match broken {
            Broken::Ended if self.place.is_evicted() => Broken::Turned(self.evicted()),
            Broken::Frozen { .. } => {
                Broken::turned(RefusalCode::NotForebay, "no TLS handshake came to its end in time")
            }
            broken => broken,
        })
    }

    /// What a connection hears that gave way to another before it was let in.
    fn evicted(&self) -> Refusal {
        let places = self.shared.room.places();
        let text =
            format!("{places} connections have not said who they are; the oldest gave way to the next");
        Refusal { code: RefusalCode::TooManyFlows, text }
    }

    fn authenticator(&self, speaks_for: SpeaksFor) -> Authenticator {
        let (shared, peer) = (Arc::clone(&self.shared), Arc::clone(&self.peer));
        let (place, evicted) = (Arc::clone(&self.place), self.evicted());
        Box::new(move |hello| {
            speaks_for.check(&hello.from.node)?;
            if !place.leave() {
                return Err(evicted.clone());
            }
            shared.admit(hello)?;
            *peer.lock() = Some(hello.from);
            Ok(())
        })
    }

    fn count_faults(&self, responder: &mut Responder) {
        let mut faults = responder.take_faults().peekable();
        if faults.peek().is_some() {
            let mut corrupt = false;
            let mut state = self.shared.state.lock();
            faults.for_each(|code| {
                corrupt |= code == FaultCode::Corrupt;
                *state.stats.faults.entry(code).or_default() += 1;
            });
            drop(state);
            if corrupt && let Some(repeated) = self.shared.corrupt.pass() {
                tracing::warn!(from = name_of(self.from), repeated, "corrupt frame");
            }
        }
    }
}

impl Drop for AcceptedConnection {
    fn drop(&mut self) {
        let peer = *self.peer.lock();
        if let Some(peer) = peer {
            self.shared.forget(peer);
        }
        self.shared.state.lock().wakes.remove(&self.number);
    }
}
