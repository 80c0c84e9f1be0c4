//! Sends a notification until the peer has taken it in, or time is over, or the peer is gone. This
//! file knows when to send, and when again.
//!
//! What is sent to one peer goes in its order, a window of it at a time, and what has no room is
//! refused: nothing is dropped.

use crate::call_handler;
use crate::connect;
use crate::error::{AgentError, PeerError};
use crate::notifications::{NOTIFICATION_BYTES_MAX, Notification};
use crate::peer::{Attempt, Peer};
use crate::shared::Shared;
use crate::tcp::CallError;
use std::sync::{Arc, Weak};
use std::time::Instant;

/// How long after a connection broke, or had no room, a notification is sent again.
const AGAIN_US: u64 = 1_000;

type OnEnd = Box<dyn FnOnce(Result<(), PeerError>) + Send>;

/// A notification on its way, or one that waits for its turn.
struct Sending {
    shared: Weak<Shared>,
    peer: Arc<Peer>,
    number: u64,
    text: Vec<u8>,
    until_us: u64,
    /// `None`: it was called.
    on_end: Option<OnEnd>,
}

/// Sends `text`, and calls `on_end` once: after a success the peer has it, exactly once; after a
/// failure it may have it, if the answer was lost. Without room for it on the way to the peer, it
/// waits for some until `wait_until`. An error means that nothing was sent, and that `on_end` is
/// not called.
pub(crate) fn send(
    shared: &Arc<Shared>,
    peer: &Arc<Peer>,
    text: Vec<u8>,
    until_us: u64,
    wait_until: Option<Instant>,
    on_end: impl FnOnce(Result<(), PeerError>) + Send + 'static,
) -> Result<(), PeerError> {
    let bytes = text.len();
    let (weak, its) = (Arc::downgrade(shared), Arc::clone(peer));
    let on_end: Option<OnEnd> = Some(Box::new(on_end));
    let notification = |number| {
        let sending = Sending { shared: weak, peer: its, number, text, until_us, on_end };
        Box::new(move || sending.attempt()) as Attempt
    };
    peer.hold_notification(bytes, wait_until, notification)?;
    peer.send_notifications();
    Ok(())
}

impl Sending {
    fn attempt(self) {
        let Some(shared) = self.shared.upgrade() else { return self.end(Err(PeerError::Ended)) };
        let (peer, until_us) = (Arc::clone(&self.peer), self.until_us);
        connect::when_up(&shared, &peer, until_us, move |up| match up {
            Ok(()) => self.speak(),
            Err(why) => self.end(Err(why)),
        });
    }

    fn speak(self) {
        let Some(shared) = self.shared.upgrade() else { return self.end(Err(PeerError::Ended)) };
        let now_us = shared.timer.now_us();
        // The flow may have ended a moment ago.
        let Some(flow) = self.peer.flow() else { return self.again(&shared, now_us) };
        let floor = self.peer.state().outgoing.floor();
        let mut body = vec![call_handler::NOTIFICATIONS];
        Notification { number: self.number, floor, from: &shared.name, text: &self.text }.put(&mut body);
        let limit_us = self.until_us.saturating_sub(now_us);
        flow.call(body, limit_us, move |answer| match answer {
            Ok(_) => self.end(Ok(())),
            Err(CallError::Broken(_) | CallError::TooMany) => match self.shared.upgrade() {
                Some(shared) => self.again(&shared, shared.timer.now_us()),
                None => self.end(Err(PeerError::Ended)),
            },
            Err(why) => {
                let peer = self.peer.name.clone();
                self.end(Err(PeerError::Unanswered { peer, why }));
            }
        });
    }

    /// Sends it again, over the next connection or when calls have been answered: the peer knows it
    /// by its number.
    fn again(self, shared: &Arc<Shared>, now_us: u64) {
        if now_us >= self.until_us {
            let why = self.peer.error();
            let late = || {
                let why = "the connection was lost, or had no room, until time was over".into();
                PeerError::Unreachable { peer: self.peer.name.clone(), why }
            };
            let why = why.unwrap_or_else(late);
            return self.end(Err(why));
        }
        shared.timer.at(now_us + AGAIN_US, move || self.attempt());
    }

    fn end(mut self, result: Result<(), PeerError>) {
        self.settle(result);
    }

    fn settle(&mut self, result: Result<(), PeerError>) {
        let Some(on_end) = self.on_end.take() else { return };
        self.peer.settle_notification(self.number);
        on_end(result);
        self.peer.send_notifications();
    }
}

/// What waits to be sent again when the agent ends is dropped.
impl Drop for Sending {
    fn drop(&mut self) {
        self.settle(Err(PeerError::Ended));
    }
}

/// Whether a notification, if there is one, is short enough.
pub(crate) fn check(text: Option<&[u8]>) -> Result<(), AgentError> {
    match text.map_or(0, <[u8]>::len) {
        bytes if bytes > NOTIFICATION_BYTES_MAX => Err(AgentError::TooLong { bytes }),
        _ => Ok(()),
    }
}
