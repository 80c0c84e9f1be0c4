//! The node's socket: who is let in, how many, and the thread of each connection. Connections that
//! have not said who they are have a room of their own, in which the process that has most of them
//! gives way.

use super::clients::{Clients, ThreadPermit};
use super::connection::{REST, Welcomed, serve};
use crate::hand_over::{NotGiven, Successor, TAKE_OVER};
use forebay_client::protocol::answer::{Answer, Refusal};
use forebay_client::protocol::frame::{Frame, Inbox, UNASKED};
use forebay_client::protocol::request::Request;
use forebay_client::protocol::socket::{self, WakeUp};
use forebay_transfer::listen::{Admission, Credentials, RoomPlace, SocketFile, bind_socket, inherit_socket};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::net::SocketType;
use rustix::process::geteuid;
use std::io;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The socket, bound. Its file goes with it.
#[derive(Debug)]
pub struct Listener {
    socket: UnixListener,
    file: SocketFile,
}

/// Who said hello.
enum Greeted {
    Client(Welcomed, ThreadPermit),
    /// A node that wants this one's memory, with its offer.
    Successor(Credentials, Vec<u8>),
}

impl Listener {
    /// Binds the socket. A file that a node left behind is replaced, one on which a node answers is
    /// not.
    pub fn bind(path: &Path, admission: &Admission) -> io::Result<Listener> {
        let (socket, file) = bind_socket(path, SocketType::STREAM, admission.mode())?;
        Ok(Listener { socket: socket.into(), file })
    }

    /// Goes on with the socket of another node, with those that wait to be let in.
    pub fn inherit(path: &Path, socket: OwnedFd, admission: &Admission) -> io::Result<Listener> {
        let file = inherit_socket(path, &socket, admission.mode())?;
        Ok(Listener { socket: socket.into(), file })
    }

    /// Ends here, and leaves the socket to another node.
    pub fn leave(self) {
        self.file.leave();
    }

    /// Lets clients in until the node stops.
    pub fn run(&self, clients: &Arc<Clients>, wake_up: &WakeUp) {
        while !clients.is_stopped() {
            let waited = socket::wait(&self.socket, wake_up, None, (true, false), None);
            if waited.is_err() {
                std::thread::sleep(REST);
            }
            loop {
                match self.socket.accept() {
                    Ok((stream, _)) => admit(clients, Arc::new(stream.into())),
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                    Err(_) => {
                        std::thread::sleep(REST);
                        break;
                    }
                }
            }
        }
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// Gives a connection of a user that may connect a thread, in which it says who it is, as soon as
/// there is a place.
fn admit(clients: &Arc<Clients>, stream: Arc<OwnedFd>) {
    if clients.is_draining() || clients.is_stopped() {
        return refuse(clients, &stream, Refusal::Draining, "the node is shutting down".into());
    }
    let credentials = match clients.admission.check_user(&stream) {
        Ok(credentials) => credentials,
        Err(why) => return refuse(clients, &stream, Refusal::NotAllowed, why.to_string()),
    };
    // Whose place another one gets is told so, and finds that it is over.
    let (evicting, evicted, places) = (Arc::clone(clients), Arc::clone(&stream), clients.room.places());
    let evict = move || {
        let why = format!("{places} connections have not said who they are; the oldest gave way to the next");
        match evicting.is_stopped() {
            true => refuse(&evicting, &evicted, Refusal::Draining, "the node is shutting down".into()),
            // The room has told of it.
            false => {
                evicting.count_evicted();
                tell_refused(&evicted, Refusal::Limit, why);
            }
        }
        socket::disconnect(&evicted);
    };
    let Some(place) = clients.room.enter(&socket::peer_process(&stream), evict, || clients.is_stopped())
    else {
        return;
    };
    let (own, greeting) = (Arc::clone(clients), clients.greet());
    let run = move || let_in(&own, stream, place, greeting, credentials);
    // A client for whom there is no thread sees the end.
    if std::thread::Builder::new().name("forebay-session".into()).spawn(run).is_err() {
        clients.count_refused(Refusal::Limit, "the system gives no thread");
    }
}

/// Hears who it is, and answers a client until it goes.
fn let_in(
    clients: &Arc<Clients>,
    stream: Arc<OwnedFd>,
    place: RoomPlace<i32>,
    greeting: ThreadPermit,
    credentials: Credentials,
) {
    match greet(clients, &stream, &place, credentials) {
        Ok(Greeted::Client(welcomed, permit)) => {
            drop((place, greeting));
            // Nobody else has it any more: what would have evicted this connection is gone with its
            // place.
            if let Some(stream) = Arc::into_inner(stream) {
                serve(clients, stream, welcomed);
            }
            drop(permit);
        }
        Ok(Greeted::Successor(credentials, offer)) => {
            drop((place, greeting));
            let stream = Arc::into_inner(stream);
            if let Some(Ok(successor)) = stream.map(|stream| Successor::new(stream, credentials)) {
                clients.meet(successor, &offer);
            }
        }
        Err(_) if place.is_evicted() => drop(greeting),
        Err((refusal, why)) => {
            refuse(clients, &stream, refusal, why);
            drop(greeting);
        }
    }
}

/// Does not let a client in, and tells it and the log why.
fn refuse(clients: &Clients, stream: &OwnedFd, refusal: Refusal, why: String) {
    clients.count_refused(refusal, &why);
    tell_refused(stream, refusal, why);
}

fn tell_refused(stream: &OwnedFd, refusal: Refusal, why: String) {
    let frame = Answer::Refused(refusal, why).encode(UNASKED);
    // Whoever does not read it sees the end.
    let _ = socket::send_some(stream, &frame.encode());
}

/// Hears who the client is, and lets it in or not.
fn greet(
    clients: &Arc<Clients>,
    stream: &OwnedFd,
    place: &RoomPlace<i32>,
    credentials: Credentials,
) -> Result<Greeted, (Refusal, String)> {
    let io = |doing: &'static str| move |error: io::Error| (Refusal::NotAllowed, format!("{doing}: {error}"));
    let limit = Duration::from_millis(clients.limits.authentication_ms);
    socket::set_timeouts(stream, Some(limit), Some(limit)).map_err(io("the socket"))?;
    let mut inbox = Inbox::new(Arc::clone(&clients.unfinished));
    let frame = first_frame(stream, &mut inbox, limit).map_err(io("the hello"))?;
    let gave_way = || (Refusal::Limit, "it gave way to another connection".into());
    if frame.kind == TAKE_OVER {
        check_successor(&frame, &credentials)?;
        return place.leave().then_some(Greeted::Successor(credentials, frame.body)).ok_or_else(gave_way);
    }
    let hello = match Request::decode(&frame) {
        Ok(Request::Hello(hello)) => hello,
        Ok(_) => return Err((Refusal::BadRequest, "the first request is no hello".into())),
        Err(bad) => return Err((Refusal::BadRequest, bad.to_string())),
    };
    // Behind its version, which is the clearer word to a client of another one.
    frame.check_unasked().map_err(|bad| (Refusal::BadRequest, bad.to_string()))?;
    let admitted = clients.admission.check_token(&hello.token);
    admitted.map_err(|why| (Refusal::NotAllowed, why.to_string()))?;
    let Some(permit) = clients.enter() else {
        let why = format!("{} clients are connected; no more may be", clients.limits.clients);
        return Err((Refusal::Limit, why));
    };
    if !place.leave() {
        return Err(gave_way());
    }
    let arena_bytes = clients.store.stat().capacity_bytes;
    let welcome = Answer::Welcome { instance: clients.instance, arena_bytes }.encode(frame.asked()).encode();
    socket::send_with(stream, &welcome, clients.store.arena_fd()).map_err(io("the welcome"))?;
    socket::set_timeouts(stream, None, None).map_err(io("the socket"))?;
    inbox.open();
    Ok(Greeted::Client(Welcomed { hello, inbox, credentials }, permit))
}

/// Memory is handed over to root and to the node's own user, whoever else may connect.
fn check_successor(frame: &Frame, credentials: &Credentials) -> Result<(), (Refusal, String)> {
    frame.check_unasked().map_err(|bad| (Refusal::BadRequest, bad.to_string()))?;
    match credentials.uid {
        uid if uid == 0 || uid == geteuid().as_raw() => Ok(()),
        uid => Err((Refusal::NotAllowed, NotGiven::User { uid }.to_string())),
    }
}

fn first_frame(stream: &OwnedFd, inbox: &mut Inbox, limit: Duration) -> io::Result<Frame> {
    let mut bytes = [0; 8192];
    let until = Instant::now() + limit;
    while Instant::now() < until {
        match socket::receive(stream, &mut bytes)? {
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            received => inbox.put(&bytes[..received]),
        }
        if let Some(frame) = inbox.next_frame().map_err(io::Error::other)? {
            return Ok(frame);
        }
    }
    Err(io::ErrorKind::TimedOut.into())
}
