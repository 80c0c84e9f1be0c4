//! The node's socket: who is let in, how many, and the thread of each client. This file knows users, tokens and threads; it
//! must never know what a client wants. Connections that have not said who they are have a room of their own, in which the
//! process that has most of them gives way.

use super::desk::{Desk, Next};
use crate::node::{Inside, Shared};
use forebay_client::protocol::answer::{Answer, Refusal};
use forebay_client::protocol::frame::{Asked, Frame, Inbox, UNASKED};
use forebay_client::protocol::request::{Hello, Request};
use forebay_client::protocol::socket::{self, WakeUp};
use forebay_transfer::listen::{Admission, Credentials, RoomPlace, SocketFile, bind_socket};
use rustix::fd::OwnedFd;
use rustix::net::SocketType;
use std::io;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long the socket rests when the system has no descriptors or threads left.
const REST: Duration = Duration::from_millis(100);
/// How long a long request may take to come whole.
const UNFINISHED_LIMIT: Duration = Duration::from_secs(10);
/// Bytes that are received at a time.
const RECEIVE_BYTES: usize = 64 << 10;

/// The socket, bound. Its file goes with it.
#[derive(Debug)]
pub struct Listener {
    socket: UnixListener,
    _file: SocketFile,
}

impl Listener {
    /// Binds the socket. A file that a node left behind is replaced, one on which a node answers is not.
    pub fn bind(path: &Path, admission: &Admission) -> io::Result<Listener> {
        let (socket, file) = bind_socket(path, SocketType::STREAM, admission.mode())?;
        Ok(Listener { socket: socket.into(), _file: file })
    }

    /// Lets clients in until the node stops.
    pub fn run(&self, node: &Arc<Shared>, wake_up: &WakeUp) {
        while !node.is_stopped() {
            let waited = socket::wait(&self.socket, wake_up, None, (true, false), None);
            if waited.is_err() {
                std::thread::sleep(REST);
            }
            loop {
                match self.socket.accept() {
                    Ok((stream, _)) => admit(node, Arc::new(stream.into())),
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

/// Gives a connection of a user that may connect a thread, in which it says who it is, as soon as there is a place.
fn admit(node: &Arc<Shared>, stream: Arc<OwnedFd>) {
    if node.is_draining() || node.is_stopped() {
        return refuse(node, &stream, Refusal::Draining, "the node is shutting down".into());
    }
    let credentials = match node.admission.check_user(&stream) {
        Ok(credentials) => credentials,
        Err(why) => return refuse(node, &stream, Refusal::NotAllowed, why.to_string()),
    };
    // Whose place another one gets is told so, and finds that it is over.
    let (evicting, evicted, places) = (Arc::clone(node), Arc::clone(&stream), node.room.places());
    let evict = move || {
        let why = format!("{places} connections have not said who they are; the oldest gave way to the next");
        match evicting.is_stopped() {
            true => refuse(&evicting, &evicted, Refusal::Draining, "the node is shutting down".into()),
            false => refuse(&evicting, &evicted, Refusal::Limit, why),
        }
        socket::part(&evicted);
    };
    let Some(place) = node.room.enter(&socket::peer_process(&stream), evict, || node.is_stopped()) else {
        return;
    };
    let (own, greeting) = (Arc::clone(node), node.greet());
    let serve = move || match greet(&own, &stream, &place) {
        Ok((guest, inside)) => {
            drop((place, greeting));
            // Nobody else has it any more: what would have evicted this connection is gone with its place.
            if let Some(stream) = Arc::into_inner(stream) {
                serve(&own, stream, guest, credentials);
            }
            drop(inside);
        }
        Err(_) if place.is_evicted() => drop(greeting),
        Err((refusal, why)) => {
            refuse(&own, &stream, refusal, why);
            drop(greeting);
        }
    };
    // A client for whom there is no thread sees the end.
    if std::thread::Builder::new().name("forebay-desk".into()).spawn(serve).is_err() {
        node.count_refused(Refusal::Limit, "the system gives no thread");
    }
}

/// Tells a client why it is not let in.
fn refuse(node: &Shared, stream: &OwnedFd, refusal: Refusal, why: String) {
    node.count_refused(refusal, &why);
    let frame = Answer::Refused(refusal, why).encode(UNASKED);
    // Whoever does not read it sees the end.
    let _ = socket::send_some(stream, &frame.encode());
}

/// A client that is let in.
struct Guest {
    hello: Hello,
    /// What it said behind its hello.
    inbox: Inbox,
}

/// Hears who the client is, and lets it in or not.
fn greet(
    node: &Arc<Shared>,
    stream: &OwnedFd,
    place: &RoomPlace<i32>,
) -> Result<(Guest, Inside), (Refusal, String)> {
    let io = |doing: &'static str| move |error: io::Error| (Refusal::NotAllowed, format!("{doing}: {error}"));
    let limit = node.limits.authentication;
    socket::set_patience(stream, Some(limit), Some(limit)).map_err(io("the socket"))?;
    let mut inbox = Inbox::new(Arc::clone(&node.unfinished));
    let frame = first_frame(stream, &mut inbox, limit).map_err(io("the hello"))?;
    let hello = match Request::decode(&frame) {
        Ok(Request::Hello(hello)) => hello,
        Ok(_) => return Err((Refusal::BadWords, "the first request is no hello".into())),
        Err(bad) => return Err((Refusal::BadWords, bad.to_string())),
    };
    // Behind its version, which is the clearer word to a client of another one.
    frame.check_unasked().map_err(|bad| (Refusal::BadWords, bad.to_string()))?;
    let admitted = node.admission.check_token(&hello.token);
    admitted.map_err(|why| (Refusal::NotAllowed, why.to_string()))?;
    let Some(inside) = node.enter() else {
        let why = format!("{} clients are connected; no more may be", node.limits.clients);
        return Err((Refusal::Limit, why));
    };
    if !place.leave() {
        return Err((Refusal::Limit, "it gave way to another connection".into()));
    }
    let arena_bytes = node.store.stat().capacity_bytes;
    let welcome = Answer::Welcome { instance: node.instance, arena_bytes }.encode(frame.asked()).encode();
    socket::send_with(stream, &welcome, node.store.arena_fd()).map_err(io("the welcome"))?;
    socket::set_patience(stream, None, None).map_err(io("the socket"))?;
    inbox.open();
    Ok((Guest { hello, inbox }, inside))
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

/// Answers a client until it goes, and then frees what it held.
fn serve(node: &Arc<Shared>, stream: OwnedFd, guest: Guest, credentials: Credentials) {
    let Guest { hello, inbox } = guest;
    let Ok(desk) = Desk::new(Arc::clone(node), stream, hello.tenant, hello.name) else { return };
    let desk = Arc::new(desk);
    let seat = node.seat(&desk);
    let said_bye = attend(node, &desk, &credentials.process, inbox).unwrap_or(false);
    desk.session().disconnect();
    desk.unwatch();
    if !said_bye && desk.session().slots() > 0 {
        wait_for_exit(node, &desk, &credentials);
    }
    desk.session().quiet();
    drop(seat);
    node.let_go();
}

/// Takes requests until the client goes, or its process does and leaves its socket to a child. Says whether it said goodbye.
fn attend(node: &Shared, desk: &Arc<Desk>, process: &OwnedFd, mut inbox: Inbox) -> io::Result<bool> {
    let mut bytes = vec![0; RECEIVE_BYTES];
    let stream = desk.outbox.socket();
    let mut unfinished_since = None;
    while !node.is_stopped() {
        match take_all(desk, &mut inbox) {
            Next::Go => {}
            Next::Bye => return Ok(true),
            Next::HangUp => break,
        }
        let sending = desk.outbox.flush();
        let expiry = desk.expire().map(Duration::from_micros);
        let left = time_left(&inbox, &mut unfinished_since);
        if left == Some(Duration::ZERO) {
            let seconds = UNFINISHED_LIMIT.as_secs();
            hang_up(desk, UNASKED, &format_args!("a request has not come whole within {seconds} s"));
            break;
        }
        let timeout = expiry.into_iter().chain(left).min();
        let ready = socket::wait(stream, desk.outbox.wake_up(), Some(process), (!sending, sending), timeout)?;
        if sending || !ready.readable {
            // Whoever takes no answers any more may have said goodbye before: that is read first.
            if (ready.gone && !sending) || ready.exited {
                break;
            }
            continue;
        }
        match socket::receive(stream, &mut bytes)? {
            0 => break,
            received => inbox.put(&bytes[..received]),
        }
    }
    Ok(false)
}

/// How long a long request that has begun may still take.
fn time_left(inbox: &Inbox, since: &mut Option<Instant>) -> Option<Duration> {
    if !inbox.holds_room() {
        *since = None;
        return None;
    }
    let elapsed = since.get_or_insert_with(Instant::now).elapsed();
    Some(UNFINISHED_LIMIT.saturating_sub(elapsed))
}

/// Takes every whole request that has come.
fn take_all(desk: &Arc<Desk>, inbox: &mut Inbox) -> Next {
    loop {
        let frame = match inbox.next_frame() {
            Ok(Some(frame)) => frame,
            Ok(None) => return Next::Go,
            Err(bad) => return hang_up(desk, UNASKED, &bad),
        };
        if let Err(bad) = frame.check_unasked() {
            return hang_up(desk, UNASKED, &bad);
        }
        let next = match Request::decode(&frame) {
            Ok(request) => desk.take(frame.asked(), request),
            Err(bad) => hang_up(desk, frame.asked(), &bad),
        };
        if next != Next::Go {
            return next;
        }
    }
}

/// Tells a client that it does not speak the protocol.
fn hang_up(desk: &Desk, asked: Asked, bad: &dyn std::fmt::Display) -> Next {
    desk.outbox.put(&Answer::Refused(Refusal::BadWords, bad.to_string()).encode(asked));
    Next::HangUp
}

/// Sleeps until the process of a client that went without a word has exited: until then it may write its slots.
fn wait_for_exit(node: &Shared, desk: &Desk, credentials: &Credentials) {
    node.count_orphans(desk.session().slots());
    socket::part(desk.outbox.socket());
    while !node.is_stopped() {
        match socket::wait(&credentials.process, desk.outbox.wake_up(), None, (true, false), None) {
            Ok(ready) if ready.readable => return,
            Ok(_) => {}
            Err(_) => std::thread::sleep(REST),
        }
    }
}
