//! Notifications: small messages between agents, each taken in exactly once. This file knows their
//! bytes, which were seen before, and how many wait.
//!
//! ```text
//!  0  number  u64   of the notification, by its sender for this peer
//!  8  floor   u64   every number below this one has been settled
//! 16  name    u16, and as many bytes of UTF-8: the sender
//!     text    the rest
//! ```
//! A sender whose connection broke before the answer came sends a notification again, under its
//! number. The receiver knows it by the sender's instance and that number.

use crate::bytes::{Field, Reader, put_bytes};
use crate::metadata::{NAME_BYTES_MAX, is_name};
use crate::tcp::CALL_BYTES_MAX;
use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};

/// Bytes of a notification at most. With its head it fits into one call.
pub const NOTIFICATION_BYTES_MAX: usize = CALL_BYTES_MAX as usize - 64 - NAME_BYTES_MAX;
/// Notifications that may wait to be taken.
pub const NOTIFICATIONS_MAX: usize = 65_536;
const WAITING_BYTES_MAX: usize = 64 << 20;
/// Notifications to one peer that are on their way or wait for their turn. Fewer than the peer
/// remembers.
pub const NOTIFICATIONS_OPEN_MAX: usize = 16_384;
pub const NOTIFICATIONS_OPEN_BYTES_MAX: usize = 64 << 20;
/// Notifications to one peer that are on their way at a time: fewer than calls that a flow takes
/// in.
const UNDER_WAY_MAX: usize = 512;
/// Numbers of one sender that are remembered above its floor.
const SEEN_MAX: usize = 65_536;
/// Senders that are remembered after they went: they may come back with what they do not know to
/// have arrived.
const GONE_MAX: usize = 1_024;

/// A notification as it travels.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Notification<'a> {
    pub number: u64,
    pub floor: u64,
    pub from: &'a str,
    pub text: &'a [u8],
}

impl<'a> Notification<'a> {
    pub fn put(&self, out: &mut Vec<u8>) {
        (self.number, self.floor).put(out);
        put_bytes(self.from.as_bytes(), u16::MAX, out);
        out.extend(self.text);
    }

    pub fn parse(bytes: &'a [u8]) -> Option<Notification<'a>> {
        let mut reader = Reader(bytes);
        let (number, floor) = reader.get()?;
        let from = std::str::from_utf8(reader.bytes()?).ok().filter(|name| is_name(name))?;
        (floor <= number).then_some(Notification { number, floor, from, text: reader.0 })
    }
}

/// What is sent to one peer: numbers, and whose turn it is. A notification is open from when it is
/// taken in until it is settled.
#[derive(Debug)]
pub(crate) struct OutgoingNotifications<N> {
    next: u64,
    /// With their lengths.
    open: BTreeMap<u64, usize>,
    open_bytes: usize,
    /// Those whose turn has not come.
    queue: VecDeque<N>,
}

impl<N> Default for OutgoingNotifications<N> {
    fn default() -> OutgoingNotifications<N> {
        OutgoingNotifications { next: 0, open: BTreeMap::new(), open_bytes: 0, queue: VecDeque::new() }
    }
}

impl<N> OutgoingNotifications<N> {
    /// Takes a notification of so many bytes in, behind those that wait. There has to be room for
    /// it.
    pub fn open(&mut self, bytes: usize, notification: impl FnOnce(u64) -> N) {
        let number = self.next;
        self.next += 1;
        self.open.insert(number, bytes);
        self.open_bytes += bytes;
        self.queue.push_back(notification(number));
    }

    /// Whether one more of so many bytes may be taken in.
    pub fn has_room(&self, bytes: usize) -> bool {
        self.open.len() < NOTIFICATIONS_OPEN_MAX
            && self.open_bytes.saturating_add(bytes) <= NOTIFICATIONS_OPEN_BYTES_MAX
    }

    /// The one whose turn it is, if there is one: from now on it is on its way, until it is
    /// settled.
    pub fn next_turn(&mut self) -> Option<N> {
        let under_way = self.open.len() - self.queue.len();
        if under_way >= UNDER_WAY_MAX { None } else { self.queue.pop_front() }
    }

    /// Notifications that are open, and their bytes.
    pub fn held(&self) -> (usize, usize) {
        (self.open.len(), self.open_bytes)
    }

    /// Everything below is settled.
    pub fn floor(&self) -> u64 {
        self.open.first_key_value().map_or(self.next, |(number, _)| *number)
    }

    /// Nothing more is sent under this number.
    pub fn settle(&mut self, number: u64) {
        self.open_bytes -= self.open.remove(&number).unwrap_or_default();
    }
}

/// What came in.
#[derive(Debug, Default)]
pub(crate) struct IncomingNotifications {
    waiting: VecDeque<(String, Vec<u8>)>,
    waiting_bytes: usize,
    senders: HashMap<[u8; 16], Seen>,
    gone: VecDeque<[u8; 16]>,
}

/// What one sender has sent.
#[derive(Debug, Default)]
struct Seen {
    floor: u64,
    above: BTreeSet<u64>,
}

impl IncomingNotifications {
    /// Takes a notification of this instance in, once. Says whether it was new; an error is why it
    /// may not come in.
    pub fn take_in(&mut self, instance: [u8; 16], notification: &Notification<'_>) -> Result<bool, String> {
        let bytes = self.waiting_bytes + notification.text.len();
        let full = self.waiting.len() >= NOTIFICATIONS_MAX || bytes > WAITING_BYTES_MAX;
        // Whoever speaks is here, or back.
        self.gone.retain(|other| *other != instance);
        let seen = self.senders.entry(instance).or_default();
        seen.raise(notification.floor);
        if notification.number < seen.floor || seen.above.contains(&notification.number) {
            return Ok(false);
        }
        if seen.above.len() >= SEEN_MAX {
            return Err(format!("more than {SEEN_MAX} notifications of this agent are not settled"));
        }
        if full {
            let waiting = self.waiting.len();
            return Err(format!("{waiting} notifications of {} bytes wait to be taken", self.waiting_bytes));
        }
        seen.above.insert(notification.number);
        self.waiting_bytes = bytes;
        self.waiting.push_back((notification.from.to_owned(), notification.text.to_vec()));
        Ok(true)
    }

    /// A sender has lost its last connection. Of those who went long ago nothing is remembered.
    pub fn gone(&mut self, instance: [u8; 16]) {
        if !self.senders.contains_key(&instance) {
            return;
        }
        self.gone.retain(|other| *other != instance);
        self.gone.push_back(instance);
        if self.gone.len() > GONE_MAX
            && let Some(oldest) = self.gone.pop_front()
        {
            self.senders.remove(&oldest);
        }
    }

    /// Everything that waits, with the names of the senders.
    pub fn take(&mut self) -> Vec<(String, Vec<u8>)> {
        self.waiting_bytes = 0;
        self.waiting.drain(..).collect()
    }
}

impl Seen {
    fn raise(&mut self, floor: u64) {
        if floor > self.floor {
            self.floor = floor;
            self.above = self.above.split_off(&floor);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_receiver_without_room_refuses_and_forgets_nothing() {
        let mut incoming = IncomingNotifications::default();
        let send = |incoming: &mut IncomingNotifications, number| {
            let notification =
                Notification { number, floor: number.saturating_sub(1), from: "a", text: &[0; 1024] };
            incoming.take_in([1; 16], &notification)
        };
        let taken = (0..NOTIFICATIONS_MAX as u64 + 10)
            .filter(|number| send(&mut incoming, *number) == Ok(true))
            .count();
        assert_eq!(taken, NOTIFICATIONS_MAX);
        assert_eq!(incoming.take().len(), NOTIFICATIONS_MAX);
        assert_eq!(
            send(&mut incoming, NOTIFICATIONS_MAX as u64 + 9),
            Ok(true),
            "what was refused may come again"
        );
    }

    #[test]
    fn a_sender_without_room_takes_nothing_in_and_turns_come_in_order() {
        let mut outgoing = OutgoingNotifications::<u64>::default();
        while outgoing.has_room(1) {
            outgoing.open(1, |number| number);
        }
        assert_eq!(outgoing.held(), (NOTIFICATIONS_OPEN_MAX, NOTIFICATIONS_OPEN_MAX));
        let mut under_way: VecDeque<u64> = std::iter::from_fn(|| outgoing.next_turn()).collect();
        assert_eq!(under_way.len(), UNDER_WAY_MAX);
        for number in 0..NOTIFICATIONS_OPEN_MAX as u64 {
            assert_eq!(under_way.pop_front(), Some(number), "each has its turn, in order");
            outgoing.settle(number);
            under_way.extend(outgoing.next_turn());
        }
        assert_eq!((outgoing.held(), outgoing.floor()), ((0, 0), NOTIFICATIONS_OPEN_MAX as u64));
        assert!(!outgoing.has_room(NOTIFICATIONS_OPEN_BYTES_MAX + 1), "too many bytes");
    }

    #[test]
    fn senders_that_went_long_ago_are_forgotten() {
        let mut incoming = IncomingNotifications::default();
        for sender in 0..GONE_MAX as u32 * 3 {
            let mut instance = [0; 16];
            instance[..4].copy_from_slice(&sender.to_le_bytes());
            incoming.take_in(instance, &Notification { number: 0, floor: 0, from: "a", text: &[] }).unwrap();
            incoming.gone(instance);
        }
        assert_eq!((incoming.senders.len(), incoming.gone.len()), (GONE_MAX, GONE_MAX));
    }

    proptest! {
        #[test]
        fn notices_survive_their_way(
            number in any::<u64>(), below in any::<u64>(), from in "[a-zä]{1,30}",
            text in prop::collection::vec(any::<u8>(), 0..50),
        ) {
            let notification = Notification { number, floor: number.saturating_sub(below), from: &from, text: &text };
            let mut bytes = Vec::new();
            notification.put(&mut bytes);
            prop_assert_eq!(Notification::parse(&bytes), Some(notification));
        }

        #[test]
        fn any_bytes_are_a_notice_or_refused(bytes in prop::collection::vec(any::<u8>(), 0..60)) {
            if let Some(notification) = Notification::parse(&bytes) {
                prop_assert!(notification.floor <= notification.number && !notification.from.is_empty());
            }
        }

        /// Deliveries that come twice, late and in any order, as connections break and come back.
        #[test]
        fn each_notice_is_taken_in_once(sends in prop::collection::vec((0usize..20, any::<bool>()), 1..200)) {
            let (mut outgoing, mut incoming) = (OutgoingNotifications::<u64>::default(), IncomingNotifications::default());
            let mut open: Vec<u64> = Vec::new();
            let mut taken = Vec::new();
            for (pick, settled) in sends {
                let number = open.get(pick).copied().unwrap_or_else(|| {
                    outgoing.open(8, |number| number);
                    open.extend(outgoing.next_turn());
                    open[open.len() - 1]
                });
                let notification = Notification { number, floor: outgoing.floor(), from: "a", text: &number.to_le_bytes() };
                incoming.take_in([1; 16], &notification).unwrap();
                taken.extend(incoming.take());
                if settled {
                    outgoing.settle(number);
                    open.retain(|other| *other != number);
                } else {
                    incoming.gone([1; 16]);
                }
            }
            let count = taken.len();
            taken.sort();
            taken.dedup();
            prop_assert_eq!(taken.len(), count);
            prop_assert_eq!(count as u64, outgoing.next);
        }
    }
}
