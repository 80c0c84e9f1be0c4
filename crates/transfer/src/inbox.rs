//! Messages to a thread of a disk or network link. The thread sleeps in the kernel, not here, so a
//! post to a sleeping thread wakes it there. This file carries messages.

use crate::lock::{Mutex, MutexGuard};
use std::sync::Arc;

/// Wakes a thread that sleeps in the kernel, from any thread. A wake-up that nobody waits for is
/// kept for the next wait.
pub type Waker = Arc<dyn Fn() + Send + Sync>;

/// Messages to one thread.
pub struct Inbox<T> {
    state: Mutex<State<T>>,
    waker: Waker,
}

struct State<T> {
    messages: Vec<T>,
    /// The reader is waiting, or about to wait, in the kernel.
    asleep: bool,
    closed: bool,
}

impl<T> Inbox<T> {
    /// An empty inbox whose reader is woken by `waker`.
    pub fn new(waker: Waker) -> Inbox<T> {
        Inbox { state: Mutex::new(State { messages: Vec::new(), asleep: false, closed: false }), waker }
    }

    /// Posts a message, or gives it back when the inbox is closed.
    pub fn post(&self, message: T) -> Result<(), T> {
        let mut state = self.state.lock();
        if state.closed {
            return Err(message);
        }
        state.messages.push(message);
        self.wake(state);
        Ok(())
    }

    /// Posts a message that the caller takes itself, or has the reader [roused](Inbox::rouse) for.
    pub fn post_unseen(&self, message: T) -> Result<(), T> {
        let mut state = self.state.lock();
        if state.closed {
            return Err(message);
        }
        state.messages.push(message);
        Ok(())
    }

    /// Appends all messages to `into`, for another than the reader, which sleeps on if it does.
    pub fn take_unseen(&self, into: &mut Vec<T>) {
        into.append(&mut self.state.lock().messages);
    }

    /// Wakes the reader if it sleeps.
    pub fn rouse(&self) {
        self.wake(self.state.lock());
    }

    /// Lets no further message in. What was posted before is still read.
    pub fn close(&self) {
        let mut state = self.state.lock();
        state.closed = true;
        self.wake(state);
    }

    /// Appends all messages to `into`, and says whether more may come.
    pub fn take(&self, into: &mut Vec<T>) -> bool {
        let mut state = self.state.lock();
        state.asleep = false;
        into.append(&mut state.messages);
        !state.closed
    }

    /// To be called before waiting in the kernel. `false` means that there is something to take
    /// first; after `true`, every post and the close wake the kernel up, until the next
    /// [`take`](Inbox::take).
    pub fn may_sleep(&self, seen_closed: bool) -> bool {
        let mut state = self.state.lock();
        state.asleep = state.messages.is_empty() && state.closed == seen_closed;
        state.asleep
    }

    /// The first post after the reader fell asleep wakes it; the others find it on its way.
    fn wake(&self, mut state: MutexGuard<'_, State<T>>) {
        let asleep = std::mem::replace(&mut state.asleep, false);
        drop(state);
        if asleep {
            (self.waker)();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU32, Ordering};

    #[test]
    fn a_sleeping_reader_is_woken_once_and_a_busy_one_never() {
        let wakes = Arc::new(AtomicU32::new(0));
        let counter = Arc::clone(&wakes);
        let inbox = Inbox::new(Arc::new(move || {
            counter.fetch_add(1, Ordering::Relaxed);
        }));
        let mut messages = Vec::new();
        inbox.post(1).unwrap();
        assert!(!inbox.may_sleep(false), "a message waits");
        assert!(inbox.take(&mut messages));
        assert!(inbox.may_sleep(false));
        inbox.post(2).unwrap();
        inbox.post(3).unwrap();
        assert_eq!(wakes.load(Ordering::Relaxed), 1);
        assert!(inbox.take(&mut messages) && inbox.may_sleep(false));
        inbox.close();
        assert_eq!(wakes.load(Ordering::Relaxed), 2);
        assert_eq!(inbox.post(4), Err(4));
        assert!(!inbox.may_sleep(false), "the close was not seen yet");
        assert!(!inbox.take(&mut messages) && inbox.may_sleep(true));
        assert_eq!(messages, [1, 2, 3]);
    }
}
