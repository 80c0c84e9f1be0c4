//! What answers other preflights: the port that a node would have, with its token and TLS, memory
//! that is measured with, and an echo for datagrams. Knows who may be measured with.

use super::checks::versions::Versions;
use super::line::Credentials;
use super::measure::pair::{self, REGION_BYTES};
use super::questions::{self, COOKIE_BYTES, HostFacts, Question};
use super::way::Way;
use forebay_cuda::topology::Root;
use forebay_net::tcp::{Access, Exports, Reply, ServerOptions, Service, TcpServer};
use forebay_net::{About, Identity};
use forebay_transfer::HostBuffer;
use forebay_transfer::lock::Mutex;
use std::io;
use std::net::{SocketAddr, UdpSocket};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

/// Questions that are answered at a time; others are declined. Each has a thread.
const ANSWERING_MAX: usize = 32;
/// How often the echo looks whether it is to end.
const ECHO_WAIT: Duration = Duration::from_millis(100);

/// What the responder knows of its host.
pub struct Host {
    pub root: Root,
    pub credentials: Credentials,
    pub versions: Versions,
    /// With whom this host measures when it is asked: nobody else is shown its token.
    pub peers: Vec<SocketAddr>,
    /// Added to the time that peers are told. For tests; otherwise 0.
    pub clock_offset_us: i64,
}

/// Answers until it is dropped.
pub struct Responder {
    server: TcpServer,
    _echo: Option<Echo>,
}

impl Responder {
    /// Listens. Where no datagrams can be taken there is no echo.
    pub fn start(listen: SocketAddr, host: Host) -> io::Result<Responder> {
        let exports = Arc::new(Exports::default());
        let offered = exports.offer(1, Arc::new(HostBuffer::new(REGION_BYTES)), Access::OPEN);
        offered.map_err(io::Error::other)?;
        let options = ServerOptions {
            token: host.credentials.token.clone(),
            tls: host.credentials.tls.clone(),
            plain_beyond_loopback: host.credentials.is_plain,
            ..ServerOptions::default()
        };
        let me = host.credentials.me;
        let mut cookie = [0; COOKIE_BYTES];
        rustix::rand::getrandom(&mut cookie, rustix::rand::GetRandomFlags::empty())?;
        let echo = Echo::start(listen, cookie).ok();
        // The same port for both, also where the system chooses it.
        let listen = echo.as_ref().map_or(listen, |echo| echo.address);
        let answers = Answers {
            host: Arc::new(host),
            cookie: echo.as_ref().map(|_| cookie),
            answering: Arc::default(),
            measuring: Arc::default(),
        };
        let server = TcpServer::listen(listen, me, exports, Some(Arc::new(answers)), options)?;
        Ok(Responder { server, _echo: echo })
    }

    pub fn address(&self) -> SocketAddr {
        self.server.address()
    }
}

/// Answers calls.
struct Answers {
    host: Arc<Host>,
    cookie: Option<[u8; COOKIE_BYTES]>,
    /// Held once by each question that is being answered.
    answering: Arc<()>,
    /// A pair is measured at a time.
    measuring: Arc<Mutex<()>>,
}

impl Service for Answers {
    fn call(&self, _from: Identity, call: Vec<u8>, reply: Reply) {
        if About::is_asked(&call) {
            let mut about = About::now();
            about.time_us = about.time_us.saturating_add_signed(self.host.clock_offset_us);
            return reply.send(about.to_bytes());
        }
        match Question::of_call(&call) {
            None => reply.refuse("a preflight answers questions of others only; no node runs here".into()),
            Some(Err(why)) => reply.refuse(why),
            Some(Ok(_)) if Arc::strong_count(&self.answering) > ANSWERING_MAX => {
                reply.refuse(format!("{ANSWERING_MAX} questions are being answered"));
            }
            Some(Ok(question)) => self.answer(question, reply),
        }
    }

    fn gone(&self, _from: Identity) {}
}

impl Answers {
    /// On a thread of its own, since it takes time. Without one the reply is dropped, which
    /// declines.
    fn answer(&self, question: Question, reply: Reply) {
        let (host, cookie, measuring) = (Arc::clone(&self.host), self.cookie, Arc::clone(&self.measuring));
        let answering = Arc::clone(&self.answering);
        let answer = move || {
            match answer(&host, cookie, &measuring, &question) {
                Ok(answer) => reply.send(answer),
                Err(why) => reply.refuse(why),
            }
            drop(answering);
        };
        let _ = std::thread::Builder::new().name("preflight-answer".into()).spawn(answer);
    }
}

fn answer(
    host: &Host,
    cookie: Option<[u8; COOKIE_BYTES]>,
    measuring: &Mutex<()>,
    question: &Question,
) -> Result<Vec<u8>, String> {
    match question {
        Question::Host { reaching } => {
            let back = Way::to(*reaching, &host.root).ok();
            Ok(questions::write(&HostFacts { versions: host.versions.clone(), back, cookie }))
        }
        Question::Segments => Ok(questions::write(&pair::segments(&host.root)?)),
        Question::Measure { with, .. } if !host.peers.contains(with) => {
            tracing::warn!(%with, "measurement with a host that is no peer refused");
            Err(format!("{with} is none of this host's peers: give all hosts the same list"))
        }
        Question::Measure { with, plan } => {
            let busy = || "this host measures another pair: have one host run with --measure".to_owned();
            let _measuring = measuring.try_lock().ok_or_else(busy)?;
            Ok(questions::write(&pair::measure(*with, &host.credentials, plan, &host.root)?))
        }
    }
}

/// Answers datagrams that begin with the cookie, which only those know who were let in, with fewer
/// bytes than came: the cookie, and the address that they came from.
struct Echo {
    address: SocketAddr,
    ends: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Echo {
    fn start(listen: SocketAddr, cookie: [u8; COOKIE_BYTES]) -> io::Result<Echo> {
        let socket = UdpSocket::bind(listen)?;
        let address = socket.local_addr()?;
        socket.set_read_timeout(Some(ECHO_WAIT))?;
        let ends = Arc::new(AtomicBool::new(false));
        let told = Arc::clone(&ends);
        let echo = move || {
            let mut datagram = vec![0; 1 << 16];
            while !told.load(Ordering::Acquire) {
                // A datagram that failed is one that was lost.
                let Ok((bytes, from)) = socket.recv_from(&mut datagram) else { continue };
                let answer = [&cookie[..], from.ip().to_canonical().to_string().as_bytes()].concat();
                if datagram[..bytes].starts_with(&cookie) && bytes >= answer.len() {
                    let _ = socket.send_to(&answer, from);
                }
            }
        };
        let thread = std::thread::Builder::new().name("preflight-echo".into()).spawn(echo)?;
        Ok(Echo { address, ends, thread: Some(thread) })
    }
}

impl Drop for Echo {
    fn drop(&mut self) {
        self.ends.store(true, Ordering::Release);
        if let Some(thread) = self.thread.take() {
            // A panic of the thread has already been printed.
            let _ = thread.join();
        }
    }
}
