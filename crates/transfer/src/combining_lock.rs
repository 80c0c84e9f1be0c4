//! Work that whoever comes carries out: many threads post messages for one worker, and a thread
//! that has just posted does the work itself unless another one is at it, so that nobody has to be
//! woken up for it. Its loom model is in `tests/loom_combining_lock.rs`.

use crate::process::Forked;
#[cfg(loom)]
use loom::sync::{Mutex, MutexGuard};
#[cfg(not(loom))]
use std::sync::{Mutex, MutexGuard};
use std::sync::{PoisonError, TryLockError};
use thiserror::Error;

/// Times that a thread goes on with what others have posted meanwhile.
const ROUNDS_MAX: usize = 8;

/// A worker and the messages that wait for it.
pub struct CombiningLock<M, W> {
    queue: Mutex<Queue<M>>,
    worker: Mutex<Option<Working<M, W>>>,
    limit: usize,
}

struct Queue<M> {
    messages: Vec<M>,
    closed: bool,
}

/// The worker, and the messages that it has before it.
struct Working<M, W> {
    worker: W,
    messages: Vec<M>,
}

/// Why a message was not taken in. It was dropped.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum PostError {
    #[error("{limit} messages wait; no more may")]
    Full { limit: usize },
    #[error(transparent)]
    Forked(#[from] Forked),
    #[error("the worker is gone")]
    Closed,
}

/// What is left after a round of work.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Left {
    /// Nothing, or another thread is at it.
    Nothing,
    /// Messages that came meanwhile. Somebody has to come once more.
    More,
}

impl<M, W> CombiningLock<M, W> {
    /// `limit` messages may wait for the worker.
    pub fn new(limit: usize, worker: W) -> CombiningLock<M, W> {
        let queue = Queue { messages: Vec::new(), closed: false };
        let working = Working { worker, messages: Vec::new() };
        CombiningLock { queue: Mutex::new(queue), worker: Mutex::new(Some(working)), limit }
    }

    /// Posts a message, unless too many wait or the worker is gone. To be followed by a
    /// [`combine`](CombiningLock::combine).
    pub fn post(&self, message: M) -> Result<(), PostError> {
        self.post_within(message, self.limit)
    }

    /// Posts a message that is bounded by other means. To be followed by a
    /// [`combine`](CombiningLock::combine).
    pub fn post_unbounded(&self, message: M) -> Result<(), PostError> {
        self.post_within(message, usize::MAX)
    }

    /// Has `work` carry out what waits, unless another thread is at it, which will see what this
    /// one has posted. Never waits for that thread, so it may be called from inside of `work`.
    pub fn combine(&self, mut work: impl FnMut(&mut W, &mut Vec<M>)) -> Left {
        for _ in 0..ROUNDS_MAX {
            let mut working = match self.worker.try_lock() {
                Ok(working) => working,
                // Whoever panicked did so on a broken invariant of the worker, which its own checks
                // find again.
                Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
                Err(TryLockError::WouldBlock) => return Left::Nothing,
            };
            let Some(Working { worker, messages }) = working.as_mut() else { return Left::Nothing };
            std::mem::swap(messages, &mut self.lock().messages);
            work(worker, messages);
            messages.clear();
            drop(working);
            // Whoever posted while this thread had the worker was turned away, and relies on this
            // look.
            if self.lock().messages.is_empty() {
                return Left::Nothing;
            }
        }
        Left::More
    }

    /// Does something with the worker between two rounds, unless it is gone. Waits for the thread
    /// that is at it. What is posted meanwhile is for the next round.
    pub fn with_worker<T>(&self, act: impl FnOnce(&mut W) -> T) -> Option<T> {
        let mut working = self.worker.lock().unwrap_or_else(PoisonError::into_inner);
        working.as_mut().map(|working| act(&mut working.worker))
    }

    /// Lets no further message in, has `work` carry out what was posted before, and gives the
    /// worker back. Waits for the thread that is at it.
    pub fn close(&self, work: impl FnOnce(&mut W, &mut Vec<M>)) -> Option<W> {
        self.lock().closed = true;
        let taken = self.worker.lock().unwrap_or_else(PoisonError::into_inner).take();
        let Working { mut worker, mut messages } = taken?;
        std::mem::swap(&mut messages, &mut self.lock().messages);
        work(&mut worker, &mut messages);
        Some(worker)
    }

    fn post_within(&self, message: M, limit: usize) -> Result<(), PostError> {
        let mut queue = self.lock();
        if queue.closed {
            return Err(PostError::Closed);
        }
        if queue.messages.len() >= limit {
            return Err(PostError::Full { limit });
        }
        queue.messages.push(message);
        Ok(())
    }

    /// A poster that panicked left the queue whole: every change to it is a single call.
    fn lock(&self) -> MutexGuard<'_, Queue<M>> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<M, W> std::fmt::Debug for CombiningLock<M, W> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let queue = self.lock();
        let (waiting, closed) = (queue.messages.len(), queue.closed);
        f.debug_struct("CombiningLock")
            .field("waiting", &waiting)
            .field("closed", &closed)
            .finish_non_exhaustive()
    }
}
