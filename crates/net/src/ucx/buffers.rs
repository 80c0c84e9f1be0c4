//! A connection's own memory. Bytes of messages wait in slots on their way out and in: nothing but
//! slots is ever shown to UCX. This file has the memory and counts it.

use super::callbacks::{Callbacks, HEADER_BYTES, Header, SLOT_BYTES, SLOTS, Ticket};
use forebay_transfer::{Backing, HostBuffer};
use libc::c_void;

/// The slots of one direction, with what goes with each. UCX keeps addresses of what is in here,
/// which stays in place.
struct Slots {
    memory: HostBuffer,
    headers: Box<[Header]>,
    tickets: Box<[Ticket]>,
}

impl Slots {
    fn new(callbacks: *const Callbacks) -> Slots {
        Slots {
            memory: HostBuffer::new(SLOTS * SLOT_BYTES),
            headers: (0..SLOTS).map(|_| [0; HEADER_BYTES]).collect(),
            tickets: (0..SLOTS).map(|slot| Ticket { callbacks, slot, number: 0 }).collect(),
        }
    }

    fn start(&self, slot: usize) -> *mut u8 {
        assert!(slot < SLOTS);
        // SAFETY: there are as many slots in the memory.
        unsafe { self.memory.as_ptr().add(slot * SLOT_BYTES) }
    }

    fn ticket(&mut self, slot: usize, number: u64) -> *mut c_void {
        self.tickets[slot].number = number;
        (&raw mut self.tickets[slot]).cast()
    }
}

/// Everything that UCX has addresses of. To be kept until it lets go.
pub(super) struct MessageBuffers {
    pub callbacks: Box<Callbacks>,
    outgoing: Slots,
    incoming: Slots,
}

impl MessageBuffers {
    pub fn new(callbacks: Callbacks) -> MessageBuffers {
        let callbacks = Box::new(callbacks);
        let (outgoing, incoming) = (Slots::new(&raw const *callbacks), Slots::new(&raw const *callbacks));
        MessageBuffers { callbacks, outgoing, incoming }
    }

    /// The start of a slot that messages are sent from.
    pub fn outgoing(&self, slot: usize) -> *mut u8 {
        self.outgoing.start(slot)
    }

    /// The start of a slot that messages are fetched into.
    pub fn incoming(&self, slot: usize) -> *mut u8 {
        self.incoming.start(slot)
    }

    /// Header and ticket of a message that is to be sent.
    pub fn sending(&mut self, slot: usize, number: u64, header: Header) -> (*const Header, *mut c_void) {
        self.outgoing.headers[slot] = header;
        (&raw const self.outgoing.headers[slot], self.outgoing.ticket(slot, number))
    }

    /// The ticket of a message that is to be fetched.
    pub fn fetching(&mut self, slot: usize, number: u64) -> *mut c_void {
        self.incoming.ticket(slot, number)
    }
}
