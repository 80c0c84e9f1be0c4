//! Jobs and the times at which they are due, on one thread that sleeps in between.

use forebay_transfer::Process;
use forebay_transfer::lock::{Condvar, Mutex};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

type Job = Box<dyn FnOnce() + Send>;

/// Names a job that is not done yet.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Due {
    pub at_us: u64,
    number: u64,
}

/// Takes jobs in, from any thread.
#[derive(Clone, Default)]
pub(crate) struct Timer {
    shared: Arc<Shared>,
}

struct Shared {
    state: Mutex<State>,
    changed: Condvar,
    epoch: Instant,
}

#[derive(Default)]
struct State {
    jobs: BTreeMap<Due, Job>,
    next: u64,
    closed: bool,
}

impl Default for Shared {
    fn default() -> Shared {
        Shared { state: Mutex::default(), changed: Condvar::new(), epoch: Instant::now() }
    }
}

/// The thread. Dropping it drops the jobs that are not due.
pub(crate) struct TimerThread {
    timer: Timer,
    thread: Option<JoinHandle<()>>,
    process: Process,
}

impl TimerThread {
    pub fn spawn() -> std::io::Result<TimerThread> {
        let timer = Timer::default();
        let own = timer.clone();
        let thread = std::thread::Builder::new().name("forebay-timer".into()).spawn(move || own.run())?;
        Ok(TimerThread { timer, thread: Some(thread), process: Process::current() })
    }

    pub fn timer(&self) -> Timer {
        self.timer.clone()
    }
}

impl Drop for TimerThread {
    fn drop(&mut self) {
        if !self.process.is_current() {
            // The thread, and whoever holds the lock, are the parent's.
            return std::mem::forget(self.thread.take());
        }
        let jobs = {
            let mut state = self.timer.shared.state.lock();
            state.closed = true;
            std::mem::take(&mut state.jobs)
        };
        self.timer.shared.changed.notify_all();
        // What jobs own is dropped without the lock.
        drop(jobs);
        if let Some(thread) = self.thread.take() {
            // A panic of the thread has already been printed.
            let _ = thread.join();
        }
    }
}

impl Timer {
    pub fn now_us(&self) -> u64 {
        self.shared.epoch.elapsed().as_micros() as u64
    }

    /// Has a job done as soon as the thread is free.
    pub fn soon(&self, job: impl FnOnce() + Send + 'static) {
        self.at(0, job);
    }

    /// Has a job done at a time, unless the timer has ended. Jobs must not wait for long.
    pub fn at(&self, at_us: u64, job: impl FnOnce() + Send + 'static) -> Due {
        let mut state = self.shared.state.lock();
        let due = Due { at_us, number: state.next };
        if state.closed {
            return due;
        }
        state.next += 1;
        state.jobs.insert(due, Box::new(job));
        let is_first = state.jobs.first_key_value().is_some_and(|(first, _)| *first == due);
        drop(state);
        if is_first {
            self.shared.changed.notify_one();
        }
        due
    }

    /// Forgets a job, if it is not done yet.
    pub fn forget(&self, due: Due) {
        let job = self.shared.state.lock().jobs.remove(&due);
        drop(job);
    }

    /// When jobs are due.
    #[cfg(test)]
    pub fn due_us(&self) -> Vec<u64> {
        self.shared.state.lock().jobs.keys().map(|due| due.at_us).collect()
    }

    fn run(self) {
        let mut state = self.shared.state.lock();
        while !state.closed {
            let first = state.jobs.first_key_value().map(|(due, _)| due.at_us);
            let wait_us = first.map(|at_us| at_us.saturating_sub(self.now_us()));
            match wait_us {
                Some(0) => {
                    let job = state.jobs.pop_first();
                    drop(state);
                    if let Some((_, job)) = job {
                        job();
                    }
                    state = self.shared.state.lock();
                }
                Some(wait_us) => {
                    // A little late rather than twice.
                    let timeout = Duration::from_micros(wait_us + 1);
                    self.shared.changed.wait_for(&mut state, timeout);
                }
                None => self.shared.changed.wait(&mut state),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;

    #[test]
    fn jobs_are_done_in_the_order_of_their_times_and_forgotten_ones_never() {
        let thread = TimerThread::spawn().unwrap();
        let timer = thread.timer();
        let (sender, receiver) = mpsc::channel();
        let tell = |name: &'static str| {
            let sender = sender.clone();
            move || sender.send(name).unwrap()
        };
        let soon_us = timer.now_us() + 50_000;
        timer.at(soon_us + 20_000, tell("third"));
        timer.at(soon_us, tell("second"));
        let forgotten = timer.at(soon_us + 10_000, tell("forgotten"));
        timer.soon(tell("first"));
        timer.forget(forgotten);
        timer.at(u64::MAX, tell("never"));
        let seen: Vec<_> = (0..3).map(|_| receiver.recv().unwrap()).collect();
        assert_eq!(seen, ["first", "second", "third"]);
        drop(thread);
        timer.soon(tell("after the end"));
        drop(sender);
        assert_eq!(receiver.try_recv(), Err(mpsc::TryRecvError::Disconnected));
    }
}
