//! The queue between submitters, links and the mover thread: many post, one takes. This file knows waking and closing;
//! it must never know what a message means. Its loom model is in `tests/loom_mailbox.rs`.

#[cfg(loom)]
use loom::sync::{Condvar, Mutex, MutexGuard};
#[cfg(not(loom))]
use std::sync::{Condvar, Mutex, MutexGuard};
use std::time::Duration;
use thiserror::Error;

/// A bounded queue from many threads to one that sleeps while there is nothing to take.
pub struct Mailbox<T> {
    state: Mutex<State<T>>,
    posted: Condvar,
    limit: usize,
}

struct State<T> {
    messages: Vec<T>,
    closed: bool,
}

/// Why a message was not taken in. It was dropped.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum PostError {
    /// As many messages wait as may.
    #[error("{limit} messages wait; no more may")]
    Full {
        /// The limit.
        limit: usize,
    },
    /// The receiver is gone.
    #[error("the receiver is gone")]
    Closed,
}

impl<T> Mailbox<T> {
    /// A mailbox in which `limit` messages may wait.
    pub fn new(limit: usize) -> Mailbox<T> {
        Mailbox {
            state: Mutex::new(State { messages: Vec::new(), closed: false }),
            posted: Condvar::new(),
            limit,
        }
    }

    /// Posts a message, unless the mailbox is full or closed.
    pub fn post(&self, message: T) -> Result<(), PostError> {
        self.post_within(message, self.limit)
    }

    /// Posts a message that is bounded by other means.
    pub fn post_unbounded(&self, message: T) -> Result<(), PostError> {
        self.post_within(message, usize::MAX)
    }

    /// Waits for messages and appends all of them to `into`. Returns at the latest after `timeout`, if one is given, and
    /// says whether the mailbox may still deliver: `false` once it is closed and empty.
    pub fn take(&self, into: &mut Vec<T>, timeout: Option<Duration>) -> bool {
        let mut state = self.lock();
        while state.messages.is_empty() && !state.closed {
            match timeout {
                None => state = recover(self.posted.wait(state)),
                Some(timeout) => {
                    state = match self.posted.wait_timeout(state, timeout) {
                        Ok((state, _)) => state,
                        Err(poisoned) => poisoned.into_inner().0,
                    };
                    break;
                }
            }
        }
        into.append(&mut state.messages);
        !(state.closed && into.is_empty())
    }

    /// Lets no further message in. What was posted before is still delivered.
    pub fn close(&self) {
        self.lock().closed = true;
        self.posted.notify_all();
    }

    fn post_within(&self, message: T, limit: usize) -> Result<(), PostError> {
        let mut state = self.lock();
        if state.closed {
            return Err(PostError::Closed);
        }
        if state.messages.len() >= limit {
            return Err(PostError::Full { limit });
        }
        state.messages.push(message);
        let was_empty = state.messages.len() == 1;
        drop(state);
        if was_empty {
            // Only the first message finds the receiver asleep; later ones are taken with it.
            self.posted.notify_one();
        }
        Ok(())
    }

    fn lock(&self) -> MutexGuard<'_, State<T>> {
        recover(self.state.lock())
    }
}

impl<T> std::fmt::Debug for Mailbox<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let state = self.lock();
        let (waiting, closed) = (state.messages.len(), state.closed);
        f.debug_struct("Mailbox").field("waiting", &waiting).field("closed", &closed).finish()
    }
}

/// A poster that panicked left the queue whole: every change to it is a single call.
fn recover<G>(result: Result<G, std::sync::PoisonError<G>>) -> G {
    result.unwrap_or_else(std::sync::PoisonError::into_inner)
}
