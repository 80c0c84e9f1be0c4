//! Where a worker's callbacks put what they are told: messages that have come, requests that are
//! over, an endpoint that has failed. Everything here happens on the worker's thread, inside calls
//! of `worker_progress` or of the function that the request was begun with; so nothing is borrowed
//! here while such a call is made.

use super::endpoint_description::Secret;
use super::sys::{self, AmReceived, Endpoint, Status};
use super::window::Window;
use crate::bytes::{Reader, codes};
use crate::tcp::DATA_BYTES_MAX;
use libc::{c_void, size_t};
use std::cell::RefCell;

/// Bytes of a message at most: a DATA of the wire with what surrounds it.
pub(super) const SLOT_BYTES: usize = DATA_BYTES_MAX as usize + (4 << 10);
/// Messages that wait on their way out, and as many on their way in.
pub(super) const SLOTS: usize = 8;

/// What precedes the bytes of every message.
///
/// ```text
///  0  secret   16 bytes  of the end that it is for
/// 16  number   u64       little endian: the first is 0
/// 24  kind     u64       1: bytes of the stream. 2: no more will come. 3: forget what came and was not used
/// ```
pub(super) const HEADER_BYTES: usize = 32;

codes! {
    /// What a message is.
    pub(super) enum Kind: u64 {
        Bytes = 1,
        End = 2,
        Reset = 3,
    }
}

pub(super) type Header = [u8; HEADER_BYTES];

pub(super) fn header(secret: &Secret, number: u64, kind: Kind) -> Header {
    let mut header = [0; HEADER_BYTES];
    header[..16].copy_from_slice(secret);
    header[16..24].copy_from_slice(&number.to_le_bytes());
    header[24..].copy_from_slice(&(kind as u64).to_le_bytes());
    header
}

/// `None`: not for the end with this secret, or of no known kind.
fn parse(header: &[u8], secret: &Secret) -> Option<(u64, Kind)> {
    let mut reader = Reader(header);
    let (to, number, kind): (Secret, u64, u64) = reader.get()?;
    let kind = Kind::of(kind).filter(|_| to == *secret)?;
    reader.whole((number, kind))
}

/// A message that is here, or on its way.
#[derive(Debug)]
pub(super) enum Message {
    /// Its bytes are in UCX's memory, until they are released.
    Held { data: *mut c_void, len: usize },
    /// Its bytes are at the peer, and can be fetched into a slot.
    Offered { offer: *mut c_void, len: usize },
    /// Its bytes are being fetched.
    Coming { len: usize },
    /// Its bytes are in a slot.
    Here { slot: usize, len: usize },
    /// There is no message after it.
    End,
}

/// What callbacks have told.
pub(super) struct Callbacks {
    /// What messages to this end carry.
    secret: Secret,
    state: RefCell<State>,
}

pub(super) struct State {
    pub inbound: Window<Message>,
    /// Free slots that a message can be sent from.
    pub outgoing: Vec<usize>,
    /// Free slots that a message can be fetched into.
    pub incoming: Vec<usize>,
    /// Why nothing goes on.
    pub failed: Option<Status>,
    /// Nothing of what came is to be used any more.
    pub reset: bool,
}

impl Callbacks {
    pub fn new(secret: Secret) -> Callbacks {
        let state = State {
            inbound: Window::default(),
            outgoing: (0..SLOTS).collect(),
            incoming: (0..SLOTS).collect(),
            failed: None,
            reset: false,
        };
        Callbacks { secret, state: RefCell::new(state) }
    }

    /// Whether no slot is in use.
    pub fn are_all_free(&self) -> bool {
        self.with(|state| state.outgoing.len() == SLOTS && state.incoming.len() == SLOTS)
    }

    pub fn with<T>(&self, f: impl FnOnce(&mut State) -> T) -> T {
        f(&mut self.state.borrow_mut())
    }

    /// A message has come. Says whether its data is kept.
    fn message(&self, header: &[u8], data: *mut c_void, len: usize, attributes: u64) -> bool {
        // What was meant for another end is none of this one's business.
        let Some((number, kind)) = parse(header, &self.secret) else { return false };
        let rndv = attributes & sys::AM_RECEIVED_RNDV != 0;
        let message = match kind {
            Kind::Reset => {
                self.with(|state| state.reset = true);
                return false;
            }
            Kind::End => Message::End,
            Kind::Bytes if len == 0 || len > SLOT_BYTES => {
                self.with(|state| state.note(sys::INVALID_PARAM));
                return false;
            }
            Kind::Bytes if rndv => Message::Offered { offer: data, len },
            Kind::Bytes if attributes & sys::AM_RECEIVED_DATA != 0 => Message::Held { data, len },
            Kind::Bytes => {
                self.with(|state| state.note(sys::INVALID_PARAM));
                return false;
            }
        };
        let kept = kind == Kind::Bytes;
        self.with(|state| match state.inbound.insert(number, message) {
            Ok(()) => kept,
            Err(_) => {
                state.note(sys::INVALID_PARAM);
                false
            }
        })
    }
}

impl State {
    /// The first message that is only offered, and a slot to fetch it into: its number, the offer,
    /// its length, the slot.
    pub fn take_offer(&mut self) -> Option<(u64, *mut c_void, usize, usize)> {
        let offered = self.inbound.iter().find_map(|(number, message)| match message {
            Message::Offered { offer, len } => Some((number, *offer, *len)),
            _ => None,
        });
        let (number, offer, len) = offered?;
        let slot = self.incoming.pop()?;
        if let Some(message) = self.inbound.get(number) {
            *message = Message::Coming { len };
        }
        Some((number, offer, len, slot))
    }

    /// A message that was sent is the peer's, or will never be.
    pub fn sent(&mut self, slot: usize, status: Status) {
        self.outgoing.push(slot);
        self.note(status);
    }

    /// The bytes of a message have come, or will never.
    pub fn fetched(&mut self, number: u64, slot: usize, status: Status, len: usize) {
        match self.inbound.get(number) {
            Some(message @ Message::Coming { .. }) if status == sys::OK => {
                let whole = matches!(message, Message::Coming { len: due } if *due == len);
                *message = Message::Here { slot, len };
                self.note(if whole { sys::OK } else { sys::MESSAGE_TRUNCATED });
            }
            _ => {
                self.incoming.push(slot);
                self.note(if status == sys::OK { sys::INVALID_PARAM } else { status });
            }
        }
    }

    /// Nothing goes on if the status is a failure. The first one counts.
    pub fn note(&mut self, status: Status) {
        if status != sys::OK {
            self.failed = self.failed.or(Some(status));
        }
    }
}

/// What a request is for, as its callback is told. Lives as long as the callbacks.
pub(super) struct Ticket {
    pub callbacks: *const Callbacks,
    pub slot: usize,
    /// Of the message that is being fetched.
    pub number: u64,
}

/// Called with a message.
pub(super) unsafe extern "C" fn on_message(
    arg: *mut c_void,
    header: *const c_void,
    header_len: size_t,
    data: *mut c_void,
    len: size_t,
    param: *const AmReceived,
) -> Status {
    if header.is_null() || header_len != HEADER_BYTES {
        return sys::OK;
    }
    // SAFETY: UCX passes the callbacks that the worker was given, which outlives it, a header of
    // this length, and parameters.
    let (callbacks, header, attributes) = unsafe {
        let header = std::slice::from_raw_parts(header.cast::<u8>(), header_len);
        (&*arg.cast::<Callbacks>(), header, (*param).attributes)
    };
    if callbacks.message(header, data, len, attributes) { sys::IN_PROGRESS } else { sys::OK }
}

/// Called when a message is sent.
pub(super) unsafe extern "C" fn on_sent(request: *mut c_void, status: Status, ticket: *mut c_void) {
    // SAFETY: tickets live as long as the callbacks, and both outlive the worker. The request is
    // over.
    unsafe {
        let ticket = &*ticket.cast::<Ticket>();
        (*ticket.callbacks).with(|state| state.sent(ticket.slot, status));
        free(request);
    }
}

/// Called when the bytes of a message are here.
pub(super) unsafe extern "C" fn on_fetched(
    request: *mut c_void,
    status: Status,
    len: size_t,
    ticket: *mut c_void,
) {
    // SAFETY: as for `on_sent`.
    unsafe {
        let ticket = &*ticket.cast::<Ticket>();
        (*ticket.callbacks).with(|state| state.fetched(ticket.number, ticket.slot, status, len));
        free(request);
    }
}

/// Called when the endpoint has failed.
pub(super) unsafe extern "C" fn on_failed(arg: *mut c_void, _endpoint: *mut Endpoint, status: Status) {
    // SAFETY: the argument is the callbacks, which outlives the endpoint.
    unsafe { &*arg.cast::<Callbacks>() }.with(|state| state.note(status));
}

/// Gives a request back.
///
/// # Safety
///
/// It must be one, and over.
unsafe fn free(request: *mut c_void) {
    if let Ok(ucp) = sys::Ucp::get() {
        // SAFETY: the caller says so.
        unsafe { (ucp.request_free)(request) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RNDV: u64 = sys::AM_RECEIVED_RNDV;
    const DATA: u64 = sys::AM_RECEIVED_DATA;

    fn message(callbacks: &Callbacks, header: &[u8], len: usize, attributes: u64) -> bool {
        callbacks.message(header, std::ptr::without_provenance_mut(8), len, attributes)
    }

    #[test]
    fn messages_without_the_secret_are_not_noticed() {
        let callbacks = Callbacks::new([1; 16]);
        assert!(!message(&callbacks, &header(&[2; 16], 0, Kind::Reset), 0, 0));
        assert!(!message(&callbacks, &header(&[2; 16], 0, Kind::Bytes), 10, DATA));
        assert!(!message(&callbacks, &header(&[1; 16], 0, Kind::Bytes)[1..], 10, DATA));
        callbacks.with(|state| assert!(!state.reset && state.failed.is_none() && state.inbound.len() == 0));
        assert!(message(&callbacks, &header(&[1; 16], 0, Kind::Bytes), 10, DATA));
    }

    #[test]
    fn a_peer_that_breaks_the_rules_ends_the_connection() {
        let rules: [(u64, usize, u64); 5] = [
            (0, 0, DATA),
            (0, SLOT_BYTES + 1, DATA),
            (0, SLOT_BYTES + 1, RNDV),
            (0, 10, 0),
            (1 << 40, 10, DATA),
        ];
        for (number, len, attributes) in rules {
            let callbacks = Callbacks::new([1; 16]);
            assert!(!message(&callbacks, &header(&[1; 16], number, Kind::Bytes), len, attributes));
            assert_eq!(
                callbacks.with(|state| state.failed),
                Some(sys::INVALID_PARAM),
                "{number} {len} {attributes}"
            );
        }
        let callbacks = Callbacks::new([1; 16]);
        assert!(message(&callbacks, &header(&[1; 16], 0, Kind::Bytes), 10, DATA));
        assert!(!message(&callbacks, &header(&[1; 16], 0, Kind::Bytes), 10, DATA), "twice");
        assert!(callbacks.with(|state| state.failed.is_some()));
    }

    #[test]
    fn a_message_that_came_in_part_is_none() {
        let callbacks = Callbacks::new([1; 16]);
        assert!(message(&callbacks, &header(&[1; 16], 0, Kind::Bytes), 10, RNDV));
        callbacks.with(|state| {
            let slot = state.incoming.pop().unwrap();
            *state.inbound.front().unwrap() = Message::Coming { len: 10 };
            state.fetched(0, slot, sys::OK, 9);
            assert_eq!(state.failed, Some(sys::MESSAGE_TRUNCATED));
        });
    }
}
