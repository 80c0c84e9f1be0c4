//! A connection of a client that is let in: its thread takes requests until the client goes, and
//! then frees what the client held. Slots of a client that went without a word are kept until its
//! process has exited, since its copies may still write them.

use super::client::Client;
use super::clients::Clients;
use super::ring_request;
use super::session::{Next, Session};
use forebay_client::protocol::answer::{Answer, Refusal};
use forebay_client::protocol::frame::{Asked, Inbox, UNASKED};
use forebay_client::protocol::request::{Hello, Request};
use forebay_client::protocol::socket;
use forebay_transfer::listen::Credentials;
use rustix::fd::OwnedFd;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};
use thiserror::Error;

/// How long a thread rests when the system cannot wait for a descriptor.
pub const REST: Duration = Duration::from_millis(100);
/// How long a long request may take to come whole.
const UNFINISHED_LIMIT: Duration = Duration::from_secs(10);
/// Bytes that are received at a time.
const RECEIVE_BYTES: usize = 64 << 10;

/// A client that is let in.
pub struct Welcomed {
    pub hello: Hello,
    /// What it said behind its hello.
    pub inbox: Inbox,
    pub credentials: Credentials,
}

/// Why a connection is over.
#[derive(Debug, Error)]
enum Gone {
    #[error("it said goodbye")]
    Goodbye,
    #[error("it closed the connection")]
    Closed,
    #[error("its process exited")]
    Exited,
    #[error("bad request: {0}")]
    BadRequest(String),
    #[error("the node stops")]
    Stopped,
    #[error("the connection failed: {0}")]
    Failed(#[from] io::Error),
}

/// Answers a client until it goes, and then frees what it held.
pub fn serve(clients: &Arc<Clients>, stream: OwnedFd, welcomed: Welcomed) {
    let Welcomed { hello, inbox, credentials } = welcomed;
    let Ok(client) = Client::new(stream, hello.tenant, hello.name, &clients.limits) else { return };
    let client = Arc::new(client);
    let registration = clients.register(&client);
    let name = client.name.as_str();
    tracing::info!(client = name, tenant = client.tenant.0, uid = credentials.uid, "client connected");
    let is_operator = credentials.is_operator();
    let session = Arc::new(Session::new(Arc::clone(clients), Arc::clone(&client), is_operator));
    let gone = take_requests(clients, &session, &credentials.process, inbox).unwrap_or_else(Gone::Failed);
    let held = client.leases();
    let (leases, slots) = (held.leases(), held.slots());
    drop(held);
    match gone {
        Gone::Goodbye => tracing::info!(client = name, reason = %gone, leases, slots, "client gone"),
        _ => tracing::warn!(client = name, reason = %gone, leases, slots, "client gone"),
    }
    client.stop_ring();
    client.leases().disconnect();
    client.unwatch();
    if !matches!(gone, Gone::Goodbye) && client.leases().slots() > 0 {
        wait_for_exit(clients, &client, &credentials);
    }
    client.leases().free_slots();
    drop(registration);
    clients.let_go();
}

/// Takes requests until the client goes, or its process does and leaves its socket to a child.
fn take_requests(
    clients: &Clients,
    session: &Arc<Session>,
    process: &OwnedFd,
    mut inbox: Inbox,
) -> io::Result<Gone> {
    let mut bytes = vec![0; RECEIVE_BYTES];
    let answers = &session.client.answers;
    let stream = answers.socket();
    let mut unfinished_since = None;
    while !clients.is_stopped() {
        if let Err(gone) = take_all(session, &mut inbox) {
            return Ok(gone);
        }
        let sending = answers.flush();
        let expiry = session.expire().map(Duration::from_micros);
        let left = time_left(&inbox, &mut unfinished_since);
        if left == Some(Duration::ZERO) {
            let seconds = UNFINISHED_LIMIT.as_secs();
            let why = format!("a request has not come whole within {seconds} s");
            return Ok(hang_up(&session.client, UNASKED, why));
        }
        let timeout = expiry.into_iter().chain(left).min();
        let ready = socket::wait(stream, answers.wake_up(), Some(process), (!sending, sending), timeout)?;
        if sending || !ready.readable {
            // Whoever takes no answers any more may have said goodbye before: that is read first.
            if ready.exited {
                return Ok(Gone::Exited);
            }
            if ready.gone && !sending {
                return Ok(Gone::Closed);
            }
            continue;
        }
        match socket::receive(stream, &mut bytes)? {
            0 => return Ok(Gone::Closed),
            received => inbox.put(&bytes[..received]),
        }
    }
    Ok(Gone::Stopped)
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
fn take_all(session: &Arc<Session>, inbox: &mut Inbox) -> Result<(), Gone> {
    let bad = |asked, bad: &dyn std::fmt::Display| hang_up(&session.client, asked, bad.to_string());
    while let Some(frame) = inbox.next_frame().map_err(|error| bad(UNASKED, &error))? {
        frame.check_unasked().map_err(|error| bad(UNASKED, &error))?;
        let request = Request::decode(&frame).map_err(|error| bad(frame.asked(), &error))?;
        match session.take(frame.asked(), request) {
            Next::Go => {}
            Next::OpenRing => ring_request::open(session, frame.asked()),
            Next::Bye => return Err(Gone::Goodbye),
            Next::HangUp(why) => return Err(bad(frame.asked(), &why)),
        }
    }
    Ok(())
}

/// Tells a client that it does not speak the protocol.
fn hang_up(client: &Client, asked: Asked, why: String) -> Gone {
    client.answers.put(&Answer::Refused(Refusal::BadRequest, why.clone()).encode(asked));
    Gone::BadRequest(why)
}

/// Sleeps until the process of a client that went without a word has exited: until then it may
/// write its slots.
fn wait_for_exit(clients: &Clients, client: &Client, credentials: &Credentials) {
    clients.count_orphans(&client.name, client.leases().slots());
    socket::disconnect(client.answers.socket());
    while !clients.is_stopped() {
        match socket::wait(&credentials.process, client.answers.wake_up(), None, (true, false), None) {
            Ok(ready) if ready.readable => {
                return tracing::info!(client = client.name, "client's process exited; its slots are free");
            }
            Ok(_) => {}
            Err(_) => std::thread::sleep(REST),
        }
    }
}
