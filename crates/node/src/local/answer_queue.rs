//! Answers on their way to a client, from any thread and without waiting: what the socket has no
//! room for stays here until the client's own thread sends it. This file knows bytes and their
//! order.
//!
//! It needs no limit of its own: while anything waits here the client's thread takes no further
//! request, so what can come is bounded by what the client may have under way, and may watch.

use forebay_client::protocol::frame::Frame;
use forebay_client::protocol::socket::{WakeUp, send_some, send_some_with};
use forebay_transfer::lock::Mutex;
use rustix::fd::{BorrowedFd, OwnedFd};
use std::collections::VecDeque;
use std::io;

/// What waits for a client.
#[derive(Debug)]
pub struct AnswerQueue {
    /// What is sent leaves it without moving the rest, which may be tens of MB.
    waiting: Mutex<VecDeque<u8>>,
    socket: OwnedFd,
    wake_up: WakeUp,
}

impl AnswerQueue {
    pub fn new(socket: OwnedFd) -> io::Result<AnswerQueue> {
        Ok(AnswerQueue { waiting: Mutex::default(), socket, wake_up: WakeUp::new()? })
    }
    pub fn socket(&self) -> &OwnedFd {
        &self.socket
    }

    /// Called when the client's thread has something to do.
    pub fn wake_up(&self) -> &WakeUp {
        &self.wake_up
    }

    /// Sends a frame, or what there is room for; the rest is the thread's.
    pub fn put(&self, frame: &Frame) {
        let bytes = frame.encode();
        let mut waiting = self.waiting.lock();
        let rest = match waiting.is_empty() {
            // The thread finds out by itself that the client is gone.
            true => &bytes[send_some(&self.socket, &bytes).unwrap_or(bytes.len())..],
            false => &bytes[..],
        };
        if !rest.is_empty() {
            waiting.extend(rest);
            drop(waiting);
            self.wake_up.wake();
        }
    }

    /// Sends a short frame with a descriptor. `false`: there was no room, and nothing was sent.
    pub fn put_with(&self, frame: &Frame, descriptor: BorrowedFd) -> bool {
        let bytes = frame.encode();
        let mut waiting = self.waiting.lock();
        if !waiting.is_empty() {
            return false;
        }
        // The thread finds out by itself that the client is gone.
        let sent = send_some_with(&self.socket, &bytes, descriptor).unwrap_or(bytes.len());
        if sent > 0 && sent < bytes.len() {
            waiting.extend(&bytes[sent..]);
            drop(waiting);
            self.wake_up.wake();
        }
        sent > 0
    }

    /// Sends what waits, and says whether anything still does. Nothing waits for a client that
    /// takes nothing any more.
    pub fn flush(&self) -> bool {
        let mut waiting = self.waiting.lock();
        if !waiting.is_empty() {
            let sent = send_some(&self.socket, waiting.as_slices().0).unwrap_or(waiting.len());
            waiting.drain(..sent);
        }
        !waiting.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use forebay_client::protocol::frame::Inbox;
    use forebay_client::protocol::socket::receive;
    use std::os::unix::net::UnixStream;
    use std::time::{Duration, Instant};

    #[test]
    fn a_slow_reader_gets_every_frame_in_order_and_nobody_waits_for_it() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let answers = AnswerQueue::new(ours.into()).unwrap();
        let theirs = OwnedFd::from(theirs);
        let frame = |number| Frame::new(1, number, vec![number as u8; 50_000]);
        (0..40).for_each(|number| answers.put(&frame(number)));
        assert!(answers.flush(), "more than a socket holds");
        let (mut inbox, mut bytes, mut found) = (Inbox::default(), vec![0; 70_000], Vec::new());
        while found.len() < 40 {
            answers.flush();
            let received = receive(&theirs, &mut bytes).unwrap();
            inbox.put(&bytes[..received]);
            while let Some(frame) = inbox.next_frame().unwrap() {
                found.push(frame);
            }
        }
        assert!(found.into_iter().eq((0..40).map(frame)));
    }

    #[test]
    fn what_waits_is_not_moved_about_for_a_reader_that_takes_a_little_at_a_time() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let answers = AnswerQueue::new(ours.into()).unwrap();
        let theirs = OwnedFd::from(theirs);
        (0..128).for_each(|number| answers.put(&Frame::new(1, number, vec![1; 1 << 20])));
        let (mut bytes, since) = (vec![0; 70_000], Instant::now());
        while answers.flush() {
            receive(&theirs, &mut bytes).unwrap();
        }
        // Moved each time, it were more than 100 GB.
        assert!(since.elapsed() < Duration::from_secs(3), "{:?}", since.elapsed());
    }
}
