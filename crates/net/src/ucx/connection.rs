//! A stream of bytes between two workers: what a connection needs of a socket, made of UCX's active
//! messages. This file says when they are sent and fetched, and when it is over.
//!
//! Bytes are copied into a slot, sent as one message, and copied out of a slot or of UCX's own
//! memory at the other end. UCX never sees an address of memory that is offered to peers or is a
//! target of an operation, so whatever a peer, its NIC or the library does late can only reach
//! slots; `docs/decisions/004-ucx-link.md` says why that is worth two copies.

use super::buffers::MessageBuffers;
use super::callbacks::{Callbacks, Kind, Message, SLOT_BYTES, SLOTS, State, header};
use super::context::UcxContext;
use super::endpoint_description::{EndpointDescription, Secret};
use super::error::UcxError;
use super::fabric::Fabric;
use super::report::Lane;
use super::sys;
use super::timeout::TurnTimeout;
use super::worker::{Closing, Worker};
use crate::bytes::random;
use crate::host_process::HostProcess;
use crate::tcp::{Carrier, Ready, Scatter, WakeUp, Wire, slice};
use rustix::event::{PollFd, PollFlags};
use rustix::fd::{BorrowedFd, OwnedFd};
use std::io;
use std::mem::ManuallyDrop;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Messages that may wait to be read before no more are asked for.
const WAITING_MAX: usize = 64;
/// Calls for progress at a time.
const ROUNDS: usize = 64;
/// How long an end that closes waits for UCX to let go of its slots.
const CLOSE_LIMIT: Duration = Duration::from_millis(500);
/// How long last words may take.
const LAST_WORDS_LIMIT: Duration = Duration::from_millis(50);

/// One end of the stream.
pub(super) struct UcxConnection {
    worker: ManuallyDrop<Worker>,
    buffers: ManuallyDrop<MessageBuffers>,
    event_fd: BorrowedFd<'static>,
    /// The peer's process, where that is how its death is found.
    peer_process: Option<OwnedFd>,
    peer_secret: Secret,
    /// The number of the next message.
    number: u64,
    /// Bytes of the message that is being read that were read already.
    read: usize,
}

// SAFETY: callbacks run inside calls of the worker, so whatever the buffers has is used by the
// thread that has the connection.
unsafe impl Send for UcxConnection {}

impl UcxConnection {
    /// An end that waits for a peer to be named, and what the peer has to know of it.
    pub fn new(context: &Arc<UcxContext>) -> Result<(UcxConnection, EndpointDescription), UcxError> {
        let drawn = random();
        let secret: Secret =
            drawn.map_err(|error| UcxError::System { doing: "drawing a secret", why: error.to_string() })?;
        // Before the worker, so that it is dropped after it.
        let buffers = MessageBuffers::new(Callbacks::new(secret));
        let worker = Worker::new(context)?;
        // SAFETY: the buffers keeps the callbacks until the worker has ended, and `Callbacks::with`
        // borrows it around no call.
        unsafe { worker.listen(&buffers.callbacks) }?;
        let (major, minor, _) = context.ucp.release();
        let description = EndpointDescription {
            release: (major as u16, minor as u16),
            fabric: context.fabric(),
            secret,
            process: HostProcess::own()?,
            address: worker.address()?,
        };
        let connection = UcxConnection {
            event_fd: worker.event_fd()?,
            worker: ManuallyDrop::new(worker),
            buffers: ManuallyDrop::new(buffers),
            peer_process: None,
            peer_secret: Secret::default(),
            number: 0,
            read: 0,
        };
        Ok((connection, description))
    }

    /// Names the peer, which has to have been let in.
    pub fn connect(&mut self, description: &EndpointDescription) -> Result<(), UcxError> {
        if self.worker.context.fabric() == Fabric::Memory {
            // Shared memory has no errors of its own.
            self.peer_process = Some(description.process.watch()?);
        }
        self.peer_secret = description.secret;
        // SAFETY: as in `new`.
        unsafe { self.worker.connect(description, &self.buffers.callbacks) }
    }

    pub fn lanes(&self) -> Vec<Lane> {
        self.worker.lanes()
    }

    fn with<T>(&self, f: impl FnOnce(&mut State) -> T) -> T {
        self.buffers.callbacks.with(f)
    }

    /// Lets UCX work, and has it fetch what the peer offers.
    fn progress(&mut self) {
        for _ in 0..ROUNDS {
            if self.with(|state| state.inbound.len()) >= WAITING_MAX && self.ready().readable {
                break;
            }
            let more = self.worker.progress();
            while self.fetch() {}
            if !more {
                break;
            }
        }
    }

    /// Begins to fetch the first message that is only offered, if there is a slot. Says whether
    /// there may be another.
    fn fetch(&mut self) -> bool {
        let Some((number, offer, len, slot)) = self.with(State::take_offer) else { return false };
        let (start, ticket) = (self.buffers.incoming(slot), self.buffers.fetching(slot, number));
        // SAFETY: the offer was taken, once; the slot has room for as much as a message may have,
        // and is nobody else's until the request is over, which the ticket tells.
        if let Some(status) = unsafe { self.worker.fetch(offer, start, len, ticket) } {
            self.with(|state| state.fetched(number, slot, status, len));
        }
        true
    }

    /// Sends what is in a slot, which may be nothing.
    fn post(&mut self, slot: usize, len: usize, kind: Kind) {
        let (number, bytes) = (self.number, self.buffers.outgoing(slot));
        self.number += 1;
        let (header, ticket) = self.buffers.sending(slot, number, header(&self.peer_secret, number, kind));
        // SAFETY: the slot with its header and ticket is nobody else's until the request is over,
        // which the ticket tells.
        if let Some(status) = unsafe { self.worker.send(header, bytes, len, ticket) } {
            self.with(|state| state.sent(slot, status));
        }
    }

    /// A message without bytes, if there is a slot to send it from. Waits a little until it is
    /// gone.
    fn last_words(&mut self, kind: Kind) {
        if self.ready().reset || !self.worker.is_connected() {
            return;
        }
        let Some(slot) = self.with(|state| state.outgoing.pop()) else { return };
        self.post(slot, 0, kind);
        self.progress_for(LAST_WORDS_LIMIT, |connection| {
            connection.with(|state| state.outgoing.len() == SLOTS)
        });
    }

    /// Lets UCX work until `over`, at most for so long. Says whether it is over.
    fn progress_for(&mut self, limit: Duration, mut over: impl FnMut(&mut UcxConnection) -> bool) -> bool {
        let mut timeout = TurnTimeout::new(limit, Instant::now());
        loop {
            // Whatever comes now is not wanted, but UCX has to see it.
            let more = self.worker.progress();
            if over(self) {
                return true;
            }
            if timeout.is_over(Instant::now()) {
                return false;
            }
            if !more {
                std::thread::sleep(Duration::from_micros(50));
            }
        }
    }

    /// What has come, if a wait is for it.
    fn ready(&self) -> Ready {
        self.with(|state| {
            let reset = state.reset || state.failed.is_some();
            let readable = matches!(
                state.inbound.front(),
                Some(Message::Held { .. } | Message::Here { .. } | Message::End)
            );
            Ready { readable: reset || readable, writable: false, reset }
        })
    }

    fn may_send(&self) -> bool {
        self.with(|state| !state.outgoing.is_empty())
    }

    /// Copies as much of the first message as there is room for. `None`: there is none, or it is
    /// the end.
    fn read(&mut self, room: &mut Scatter<'_>) -> Option<usize> {
        let found = self.with(|state| match state.inbound.front() {
            Some(Message::Held { data, len }) => Some((data.cast::<u8>().cast_const(), *len)),
            Some(Message::Here { slot, len }) => Some((self.buffers.incoming(*slot).cast_const(), *len)),
            _ => None,
        });
        let (start, len) = found?;
        // SAFETY: a message's bytes stay until it is released; `read` is below its length; nobody
        // else has a slice of them.
        let copied = unsafe { room.put(start.add(self.read), len - self.read) };
        self.read += copied;
        if self.read == len {
            self.read = 0;
            let message = self.with(|state| state.inbound.take_front());
            message.into_iter().for_each(|message| self.release(message));
        }
        Some(copied)
    }

    fn release(&self, message: Message) {
        match message {
            Message::Here { slot, .. } => self.with(|state| state.incoming.push(slot)),
            Message::Held { data, .. } | Message::Offered { offer: data, .. } => {
                // SAFETY: the data was kept when it came, and is released once.
                unsafe { self.worker.release(data) };
            }
            Message::Coming { .. } | Message::End => {}
        }
    }

    /// Closes the endpoint. Says whether the worker can be ended so that nothing reaches the slots
    /// any more.
    fn close(&mut self) -> bool {
        if self.worker.context.fabric() == Fabric::Memory {
            // Ending the worker closes the endpoint. Peers only ever read slots (`RNDV_SCHEME` of
            // the rail), and one that does so after the end finds that the CRC is wrong.
            self.discard();
            return true;
        }
        let closing = self.worker.close();
        let over = move || closing.as_ref().is_none_or(Closing::is_over);
        self.progress_for(CLOSE_LIMIT, |connection| {
            connection.discard();
            over() && connection.buffers.callbacks.are_all_free()
        })
    }

    /// Gives back what has come and was not read.
    fn discard(&self) {
        let messages: Vec<_> = self.with(|state| state.inbound.drain().collect());
        messages.into_iter().for_each(|message| self.release(message));
    }
}

impl Wire for UcxConnection {
    unsafe fn send(&mut self, slices: &[libc::iovec]) -> io::Result<usize> {
        if self.ready().reset {
            return Err(io::ErrorKind::ConnectionReset.into());
        }
        if !self.may_send() {
            self.progress();
        }
        let Some(slot) = self.with(|state| state.outgoing.pop()) else {
            return Err(io::ErrorKind::WouldBlock.into());
        };
        let room = [slice(self.buffers.outgoing(slot), SLOT_BYTES)];
        // SAFETY: the slot is this end's until it is posted; the caller says that the slices are
        // readable.
        let len = unsafe {
            let mut room = Scatter::over(&room);
            slices.iter().map(|slice| room.put(slice.iov_base.cast(), slice.iov_len)).sum()
        };
        self.post(slot, len, Kind::Bytes);
        Ok(len)
    }

    unsafe fn receive(&mut self, slices: &[libc::iovec]) -> io::Result<usize> {
        if !self.ready().readable {
            self.progress();
        }
        if self.with(|state| state.reset) {
            return Err(io::ErrorKind::ConnectionReset.into());
        }
        // SAFETY: the caller says that the slices are writable.
        let mut room = unsafe { Scatter::over(slices) };
        while !room.is_full() && self.read(&mut room).is_some() {}
        if room.placed > 0 {
            return Ok(room.placed);
        }
        match self.with(|state| (matches!(state.inbound.front(), Some(Message::End)), state.failed)) {
            (true, _) => Ok(0),
            (false, Some(_)) => Err(io::ErrorKind::ConnectionReset.into()),
            (false, None) => Err(io::ErrorKind::WouldBlock.into()),
        }
    }
}

impl Carrier for UcxConnection {
    fn wait(&mut self, waker: &WakeUp, sending: bool, timeout: Option<Duration>) -> io::Result<Ready> {
        let until = timeout.map(|timeout| Instant::now() + timeout);
        loop {
            self.progress();
            let ready = Ready { writable: sending && self.may_send(), ..self.ready() };
            let left = until.map(|until| until.saturating_duration_since(Instant::now()));
            let found = ready.readable || ready.writable;
            let busy = !found && !self.worker.arm()?;
            let mut fds = vec![PollFd::new(&self.event_fd, PollFlags::IN)];
            fds.extend(self.peer_process.as_ref().map(|process| PollFd::new(process, PollFlags::IN)));
            let sleep = if found || busy { Some(Duration::ZERO) } else { left };
            let woken = waker.wait_beside(&mut fds, sleep)?;
            if self.peer_process.is_some() && !fds[1].revents().is_empty() {
                self.peer_process = None;
                self.with(|state| state.note(sys::CONNECTION_RESET));
                continue;
            }
            if found || woken || left == Some(Duration::ZERO) {
                return Ok(ready);
            }
        }
    }

    fn reset(mut self: Box<Self>) {
        self.last_words(Kind::Reset);
    }

    fn part(mut self: Box<Self>, farewell: &[u8]) {
        if !farewell.is_empty() && self.worker.is_connected() {
            let slice = slice(farewell.as_ptr().cast_mut(), farewell.len());
            // SAFETY: the slice is the farewell. Whoever does not listen is not told.
            let _ = unsafe { self.send(&[slice]) };
        }
        self.last_words(Kind::End);
    }
}

impl Drop for UcxConnection {
    fn drop(&mut self) {
        if !self.close() {
            // UCX may still reach the slots. They stay where they are, and are never used again.
            self.worker.context.quarantine();
            return;
        }
        // SAFETY: neither is used after this. The worker ends first, and with it the last use of
        // the buffers.
        unsafe {
            ManuallyDrop::drop(&mut self.worker);
            ManuallyDrop::drop(&mut self.buffers);
        }
    }
}
