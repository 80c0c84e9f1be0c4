//! A stream of bytes between two workers: what a connection needs of a socket, made of UCX's active messages. This file
//! does the calls; it must never know what the bytes say.
//!
//! Bytes are copied into a slot, sent as one message, and copied out of a slot or of UCX's own memory at the other end. UCX
//! never sees an address of memory that is offered to peers or is a target of an operation, so whatever a peer, its NIC or
//! the library does late can only reach slots; `docs/decisions/004-ucx-link.md` says why that is worth two copies.

use super::card::{Card, Process, Secret};
use super::desk::{self, Desk, Header, Kind, Message, Ticket, header};
use super::error::UcxError;
use super::process;
use super::rail::{Context, Fabric};
use super::report::{self, Lane};
use super::sys::{self, Begun, RequestParam, Status};
use crate::tcp::{CHUNK_BYTES_MAX, Carrier, Ready, WakeUp, Wire};
use forebay_mover::{Backing, HostBuffer};
use libc::c_void;
use rustix::event::{PollFd, PollFlags};
use rustix::fd::{BorrowedFd, OwnedFd};
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Bytes of a message: a DATA of the wire with what surrounds it.
const SLOT_BYTES: usize = CHUNK_BYTES_MAX as usize + (4 << 10);
/// Messages that wait on their way out, and as many on their way in.
const SLOTS: usize = 8;
/// Messages that may wait to be read before no more are asked for.
const WAITING_MAX: usize = 64;
/// Calls for progress at a time.
const ROUNDS: usize = 64;
/// How long an end that closes waits for UCX to let go of its slots.
const CLOSE_LIMIT: Duration = Duration::from_millis(500);
/// How long last words may take.
const LAST_WORDS_LIMIT: Duration = Duration::from_millis(50);
/// The only kind of active message.
const MESSAGE: libc::c_uint = 1;

/// A worker that waits for a peer to be named.
pub(super) struct Pipe {
    context: Arc<Context>,
    worker: *mut sys::Worker,
    endpoint: *mut sys::Endpoint,
    /// UCX's own, so never closed here.
    event_fd: BorrowedFd<'static>,
    /// The peer's process, where that is how its death is found.
    peer_process: Option<OwnedFd>,
    peer_secret: Secret,
    desk: Box<Desk>,
    outgoing: Side,
    incoming: Side,
    /// The number of the next message.
    number: u64,
    /// Bytes of the message that is being read that were read already.
    read: usize,
}

/// The slots of one direction. Boxed: UCX keeps addresses of what is in here.
struct Side {
    memory: HostBuffer,
    headers: Box<[Header]>,
    tickets: Box<[Ticket]>,
}

// SAFETY: the worker was made for several threads, one at a time, and everything else here is reached through the pipe.
unsafe impl Send for Pipe {}

impl Side {
    fn new(desk: *const Desk) -> Side {
        Side {
            memory: HostBuffer::new(SLOTS * SLOT_BYTES),
            headers: (0..SLOTS).map(|_| [0; desk::HEADER_BYTES]).collect(),
            tickets: (0..SLOTS).map(|slot| Ticket { desk, slot, number: 0 }).collect(),
        }
    }

    fn start(&self, slot: usize) -> *mut u8 {
        // SAFETY: there are as many slots in the memory as there are numbers of them.
        unsafe { self.memory.as_ptr().add(slot * SLOT_BYTES) }
    }

    fn ticket(&mut self, slot: usize, number: u64) -> *mut c_void {
        self.tickets[slot].number = number;
        (&raw mut self.tickets[slot]).cast()
    }
}

impl Pipe {
    /// A worker of its own, and what the peer has to know of it.
    pub fn new(context: &Arc<Context>) -> Result<(Pipe, Card), UcxError> {
        let ucp = context.ucp;
        let mut secret = Secret::default();
        process::random(&mut secret)?;
        // SAFETY: all fields are numbers or pointers that may be null; the mask says which are meant.
        let mut params: sys::WorkerParams = unsafe { std::mem::zeroed() };
        params.field_mask = sys::WORKER_THREAD_MODE | sys::WORKER_FLAGS;
        params.thread_mode = sys::THREAD_MODE_SERIALIZED;
        // What a peer that is gone has not fetched is no leak.
        params.flags = sys::WORKER_IGNORE_REQUEST_LEAK;
        let mut worker = std::ptr::null_mut();
        // SAFETY: the context is open, the parameters whole, and the worker is written.
        ucp.check("a worker", unsafe { (ucp.worker_create)(context.handle, &params, &mut worker) })?;
        let desk = Box::new(Desk::new(secret, SLOT_BYTES, SLOTS));
        let mut pipe = Pipe {
            context: Arc::clone(context),
            worker,
            endpoint: std::ptr::null_mut(),
            // SAFETY: replaced below, and not used before; descriptor 0 is as good as any.
            event_fd: unsafe { BorrowedFd::borrow_raw(0) },
            peer_process: None,
            peer_secret: Secret::default(),
            outgoing: Side::new(&raw const *desk),
            incoming: Side::new(&raw const *desk),
            desk,
            number: 0,
            read: 0,
        };
        let address = pipe.prepare()?;
        let (major, minor, _) = ucp.release();
        let release = (major as u16, minor as u16);
        let fabric = context.options.fabric;
        Ok((pipe, Card { release, fabric, secret, process: Process::own()?, address }))
    }

    /// Says what is to be done with messages, and reads the worker's address.
    fn prepare(&mut self) -> Result<Vec<u8>, UcxError> {
        let ucp = self.context.ucp;
        let mut fd = -1;
        // SAFETY: the worker is open; the descriptor is written.
        ucp.check("the worker's event descriptor", unsafe { (ucp.worker_event_fd)(self.worker, &mut fd) })?;
        // SAFETY: the descriptor is open for as long as the worker, which the pipe ends last.
        self.event_fd = unsafe { BorrowedFd::borrow_raw(fd) };
        let handler = sys::AmHandler {
            field_mask: sys::AM_HANDLER_ALL,
            id: MESSAGE,
            flags: sys::AM_WHOLE_MESSAGE | sys::AM_PERSISTENT_DATA,
            callback: desk::on_message,
            arg: self.desk(),
        };
        // SAFETY: the handler's argument outlives the worker.
        ucp.check("a handler", unsafe { (ucp.worker_set_am_handler)(self.worker, &handler) })?;
        let (mut address, mut len) = (std::ptr::null_mut(), 0);
        // SAFETY: address and length are written.
        ucp.check("its address", unsafe { (ucp.worker_address)(self.worker, &mut address, &mut len) })?;
        // SAFETY: `len` bytes are at `address` until it is released.
        unsafe {
            let bytes = std::slice::from_raw_parts(address.cast::<u8>(), len).to_vec();
            (ucp.worker_release_address)(self.worker, address);
            Ok(bytes)
        }
    }

    /// Names the peer.
    pub fn connect(&mut self, card: &Card) -> Result<(), UcxError> {
        let ucp = self.context.ucp;
        let sudden = self.context.options.fabric != Fabric::Memory;
        if !sudden {
            self.peer_process = Some(card.process.watch()?);
        }
        // SAFETY: all fields are numbers or pointers that may be null; the mask says which are meant.
        let mut params: sys::EpParams = unsafe { std::mem::zeroed() };
        params.field_mask = sys::EP_REMOTE_ADDRESS | sys::EP_ERR_HANDLING_MODE | sys::EP_ERR_HANDLER;
        params.address = card.address.as_ptr().cast();
        // Shared memory has no errors of its own: there the peer's process is watched.
        params.err_mode = if sudden { sys::ERR_HANDLING_MODE_PEER } else { sys::ERR_HANDLING_MODE_NONE };
        params.err_handler = Some(desk::on_failed);
        params.err_handler_arg = self.desk();
        // SAFETY: the parameters are whole; the address is of a peer that was let in; the endpoint is written.
        let created = unsafe { (ucp.ep_create)(self.worker, &params, &mut self.endpoint) };
        self.peer_secret = card.secret;
        ucp.check("an endpoint", created)
    }

    /// What carries the bytes.
    pub fn lanes(&self) -> Vec<Lane> {
        let ucp = self.context.ucp;
        if self.endpoint.is_null() {
            return Vec::new();
        }
        // SAFETY: the endpoint and the stream are open.
        report::lanes(&ucp.printed(|stream| unsafe { (ucp.ep_print)(self.endpoint, stream) }))
    }

    fn desk(&self) -> *mut c_void {
        (&raw const *self.desk).cast_mut().cast()
    }

    /// Lets UCX work, and has it fetch what the peer offers.
    fn progress(&mut self) {
        for _ in 0..ROUNDS {
            if self.desk.with(|state| state.inbound.len()) >= WAITING_MAX && self.ready().readable {
                break;
            }
            // SAFETY: the worker is open, and this is the only thread that uses it. Nothing of the desk is borrowed.
            let worked = unsafe { (self.context.ucp.worker_progress)(self.worker) };
            while self.fetch() {}
            if worked == 0 {
                break;
            }
        }
    }

    /// Begins to fetch the first message that is only offered, if there is a slot. Says whether there may be another.
    fn fetch(&mut self) -> bool {
        let next = self.desk.with(|state| {
            let offered = state.inbound.iter().find_map(|(number, message)| match message {
                Message::Offered { offer, len } => Some((number, *offer, *len)),
                _ => None,
            });
            let (number, offer, len) = offered?;
            let slot = state.incoming.take()?;
            if let Some(message) = state.inbound.get(number) {
                *message = Message::Coming { len };
            }
            Some((number, offer, len, slot))
        });
        let Some((number, offer, len, slot)) = next else { return false };
        let mut param = RequestParam::plain();
        param.op_attr_mask = sys::OP_CALLBACK | sys::OP_USER_DATA;
        param.callback.receive = desk::on_fetched;
        param.user_data = self.incoming.ticket(slot, number);
        let start = self.incoming.start(slot).cast();
        // SAFETY: the offer is used once; the slot has room for as much as a message may have, and is nobody else's
        // until the request is over, which the ticket tells.
        let fetched = unsafe { (self.context.ucp.am_receive)(self.worker, offer, start, len, &param) };
        match begun(fetched) {
            None => {}
            Some(status) => self.desk.with(|state| state.fetched(number, slot, status, len)),
        }
        true
    }

    /// Sends what is in a slot, which may be nothing.
    fn post(&mut self, slot: usize, len: usize, kind: Kind) {
        self.outgoing.headers[slot] = header(&self.peer_secret, self.number, kind);
        let mut param = RequestParam::plain();
        param.op_attr_mask = sys::OP_CALLBACK | sys::OP_USER_DATA;
        param.callback.send = desk::on_sent;
        param.user_data = self.outgoing.ticket(slot, self.number);
        self.number += 1;
        let head = self.outgoing.headers[slot].as_ptr().cast();
        let bytes = self.outgoing.start(slot).cast_const().cast();
        // SAFETY: header and bytes stay as they are until the request is over, which the ticket tells.
        let sent = unsafe {
            (self.context.ucp.am_send)(self.endpoint, MESSAGE, head, desk::HEADER_BYTES, bytes, len, &param)
        };
        if let Some(status) = begun(sent) {
            self.desk.with(|state| state.sent(slot, status));
        }
    }

    /// A message without bytes, if there is a slot to send it from. Waits a little until it is gone.
    fn last_words(&mut self, kind: Kind) {
        let Some(slot) = self.desk.with(|state| state.outgoing.take()) else { return };
        self.post(slot, 0, kind);
        let until = Instant::now() + LAST_WORDS_LIMIT;
        self.progress_until(until, |pipe| pipe.desk.with(|state| state.outgoing.in_use() == 0));
    }

    /// Lets UCX work until `over` or a time. Says whether it is over.
    fn progress_until(&mut self, until: Instant, mut over: impl FnMut(&mut Pipe) -> bool) -> bool {
        loop {
            // Whatever comes now is not wanted, but UCX has to see it.
            // SAFETY: as in `progress`.
            let worked = unsafe { (self.context.ucp.worker_progress)(self.worker) };
            if over(self) {
                return true;
            }
            if Instant::now() >= until {
                return false;
            }
            if worked == 0 {
                std::thread::sleep(Duration::from_micros(50));
            }
        }
    }

    /// Has the event descriptor tell of what comes from now on. `false`: something has come already.
    fn arm(&self) -> io::Result<bool> {
        // SAFETY: the worker is open.
        match unsafe { (self.context.ucp.worker_arm)(self.worker) } {
            sys::OK => Ok(true),
            sys::BUSY => Ok(false),
            status => Err(io::Error::other(self.context.ucp.text(status))),
        }
    }

    /// What a wait is for has come.
    fn ready(&self) -> Ready {
        self.desk.with(|state| {
            let reset = state.reset || state.failed.is_some();
            let readable = matches!(
                state.inbound.front(),
                Some(Message::Held { .. } | Message::Here { .. } | Message::End)
            );
            Ready { readable: reset || readable, reset }
        })
    }

    fn may_send(&self) -> bool {
        self.desk.with(|state| state.outgoing.any_free())
    }

    /// Copies as much of the first message as there is room for. `None`: there is none, or it is the end.
    ///
    /// # Safety
    ///
    /// The room must be writable.
    unsafe fn read(&mut self, room: &mut Room<'_>) -> Option<usize> {
        let found = self.desk.with(|state| match state.inbound.front() {
            Some(Message::Held { data, len }) => Some((data.cast::<u8>().cast_const(), *len)),
            Some(Message::Here { slot, len }) => Some((self.incoming.start(*slot).cast_const(), *len)),
            _ => None,
        });
        let (start, len) = found?;
        // SAFETY: a message's bytes stay until it is released; `read` is below its length; the room is writable.
        let copied = unsafe { room.fill(start.add(self.read), len - self.read) };
        self.read += copied;
        if self.read == len {
            self.read = 0;
            let message = self.desk.with(|state| state.inbound.take_front());
            message.into_iter().for_each(|message| self.release(message));
        }
        Some(copied)
    }

    fn release(&self, message: Message) {
        match message {
            Message::Here { slot, .. } => self.desk.with(|state| state.incoming.give_back(slot)),
            Message::Held { data, .. } | Message::Offered { offer: data, .. } => {
                // SAFETY: the data was kept when it came, and is released once.
                unsafe { (self.context.ucp.am_release)(self.worker, data) };
            }
            Message::Coming { .. } | Message::End => {}
        }
    }

    /// Closes the endpoint. Says whether the worker can be ended so that nothing reaches the slots any more.
    fn close(&mut self) -> bool {
        let ucp = self.context.ucp;
        let until = Instant::now() + CLOSE_LIMIT;
        if self.context.options.fabric == Fabric::Memory {
            // Ending the worker closes the endpoint. Peers only ever read slots, by a system call that fails when they
            // are gone; writing is left to this process (`RNDV_SCHEME` of the rail).
            self.discard();
            return true;
        }
        if !self.endpoint.is_null() {
            let mut param = RequestParam::plain();
            param.op_attr_mask = sys::OP_FLAGS;
            param.flags = sys::EP_CLOSE_FORCE;
            // SAFETY: the endpoint is open, and not used after.
            let closing = unsafe { (ucp.ep_close)(std::mem::take(&mut self.endpoint), &param) };
            if let Begun::Request(request) = sys::begun(closing) {
                // SAFETY: the request is given back below, not before.
                let over = |_: &mut Pipe| unsafe { (ucp.request_status)(request) } != sys::IN_PROGRESS;
                let closed = self.progress_until(until, over);
                // SAFETY: this end is done with it; UCX frees it when it is over.
                unsafe { (ucp.request_free)(request) };
                if !closed {
                    return false;
                }
            }
        }
        self.progress_until(until, |pipe| {
            pipe.discard();
            pipe.desk.with(|state| state.outgoing.in_use() + state.incoming.in_use() == 0)
        })
    }

    /// Gives back what has come and was not read.
    fn discard(&self) {
        let messages: Vec<_> = self.desk.with(|state| state.inbound.drain().collect());
        messages.into_iter().for_each(|message| self.release(message));
    }
}

/// What a call that may go on says: `None`, its callback will be called; otherwise how it ended.
fn begun(pointer: sys::StatusPtr) -> Option<Status> {
    match sys::begun(pointer) {
        Begun::Done => Some(sys::OK),
        Begun::Failed(status) => Some(status),
        Begun::Request(_) => None,
    }
}

/// Where received bytes go.
struct Room<'a> {
    slices: &'a [libc::iovec],
    /// Bytes of the first slice that are filled.
    filled: usize,
}

impl Room<'_> {
    /// Copies bytes into what is left, and says how many.
    ///
    /// # Safety
    ///
    /// The bytes must be readable, the slices writable.
    unsafe fn fill(&mut self, start: *const u8, len: usize) -> usize {
        let mut copied = 0;
        while let (true, Some(slice)) = (copied < len, self.slices.first()) {
            let now = (slice.iov_len - self.filled).min(len - copied);
            // SAFETY: the caller says so; both lengths have room for `now` bytes.
            unsafe {
                let target = slice.iov_base.cast::<u8>().add(self.filled);
                std::ptr::copy_nonoverlapping(start.add(copied), target, now);
            }
            copied += now;
            self.filled += now;
            if self.filled == slice.iov_len {
                self.slices = &self.slices[1..];
                self.filled = 0;
            }
        }
        copied
    }
}

impl Wire for Pipe {
    unsafe fn send(&mut self, slices: &[libc::iovec]) -> io::Result<usize> {
        if self.ready().reset {
            return Err(io::ErrorKind::ConnectionReset.into());
        }
        if !self.may_send() {
            self.progress();
        }
        let Some(slot) = self.desk.with(|state| state.outgoing.take()) else {
            return Err(io::ErrorKind::WouldBlock.into());
        };
        let room = [libc::iovec { iov_base: self.outgoing.start(slot).cast(), iov_len: SLOT_BYTES }];
        let mut room = Room { slices: &room, filled: 0 };
        // SAFETY: the slot is this end's until it is posted; the caller says that the slices are readable.
        let len = slices.iter().map(|slice| unsafe { room.fill(slice.iov_base.cast(), slice.iov_len) }).sum();
        self.post(slot, len, Kind::Bytes);
        Ok(len)
    }

    unsafe fn receive(&mut self, slices: &[libc::iovec]) -> io::Result<usize> {
        if !self.ready().readable {
            self.progress();
        }
        if self.desk.with(|state| state.reset) {
            return Err(io::ErrorKind::ConnectionReset.into());
        }
        let mut room = Room { slices, filled: 0 };
        let mut received = 0;
        // SAFETY: the caller says that the slices are writable.
        while let (false, Some(copied)) = (room.slices.is_empty(), unsafe { self.read(&mut room) }) {
            received += copied;
        }
        if received > 0 {
            return Ok(received);
        }
        match self.desk.with(|state| (matches!(state.inbound.front(), Some(Message::End)), state.failed)) {
            (true, _) => Ok(0),
            (false, Some(_)) => Err(io::ErrorKind::ConnectionReset.into()),
            (false, None) => Err(io::ErrorKind::WouldBlock.into()),
        }
    }
}

impl Carrier for Pipe {
    fn wait(&mut self, waker: &WakeUp, sending: bool, timeout: Option<Duration>) -> io::Result<Ready> {
        let until = timeout.map(|timeout| Instant::now() + timeout);
        loop {
            self.progress();
            let ready = self.ready();
            let left = until.map(|until| until.saturating_duration_since(Instant::now()));
            let found = ready.readable || (sending && self.may_send());
            let busy = !found && !self.arm()?;
            let mut fds = vec![PollFd::new(&self.event_fd, PollFlags::IN)];
            fds.extend(self.peer_process.as_ref().map(|process| PollFd::new(process, PollFlags::IN)));
            let nap = if found || busy { Some(Duration::ZERO) } else { left };
            let woken = waker.wait_beside(&mut fds, nap)?;
            if self.peer_process.is_some() && !fds[1].revents().is_empty() {
                self.peer_process = None;
                self.desk.with(|state| state.failed = state.failed.or(Some(sys::CONNECTION_RESET)));
                continue;
            }
            if found || woken || left == Some(Duration::ZERO) {
                return Ok(ready);
            }
        }
    }

    fn reset(mut self: Box<Self>) {
        if !self.ready().reset && !self.endpoint.is_null() {
            self.last_words(Kind::Reset);
        }
    }

    fn part(mut self: Box<Self>, farewell: &[u8]) {
        if self.ready().reset || self.endpoint.is_null() {
            return;
        }
        if !farewell.is_empty() {
            let slice =
                libc::iovec { iov_base: farewell.as_ptr().cast_mut().cast(), iov_len: farewell.len() };
            // SAFETY: the slice is the farewell. Whoever does not listen is not told.
            let _ = unsafe { self.send(&[slice]) };
        }
        self.last_words(Kind::End);
    }
}

impl std::fmt::Debug for Pipe {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Pipe")
            .field("context", &self.context)
            .field("number", &self.number)
            .finish_non_exhaustive()
    }
}

impl Drop for Pipe {
    fn drop(&mut self) {
        if self.close() {
            // SAFETY: nothing is under way, and nobody else uses the worker.
            unsafe { (self.context.ucp.worker_destroy)(self.worker) };
            return;
        }
        // UCX, or a peer by it, may still reach the slots: they are never used again.
        self.context.quarantine();
        let fresh = Box::new(Desk::new(Secret::default(), 0, 0));
        let (outgoing, incoming) = (Side::new(&raw const *fresh), Side::new(&raw const *fresh));
        std::mem::forget(std::mem::replace(&mut self.outgoing, outgoing));
        std::mem::forget(std::mem::replace(&mut self.incoming, incoming));
        std::mem::forget(std::mem::replace(&mut self.desk, fresh));
        std::mem::forget(Arc::clone(&self.context));
    }
}
