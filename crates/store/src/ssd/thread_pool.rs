//! A pool of a few threads for checksums, copies and callbacks: work that is too long for the
//! mover's thread.

use forebay_transfer::lock::{Condvar, Mutex};
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

/// Threads at most: CRC-32C of one thread keeps up with several disks.
const THREADS_MAX: usize = 4;

type Job = Box<dyn FnOnce() + Send>;

/// A few threads that sleep while there is nothing to do. They end when the pool is dropped and all
/// jobs are done.
pub(super) struct ThreadPool {
    queue: Arc<Queue>,
}

#[derive(Default)]
struct Queue {
    state: Mutex<State>,
    wake: Condvar,
}

#[derive(Default)]
struct State {
    jobs: VecDeque<Job>,
    /// Threads that wait for a job.
    idle: usize,
    ended: bool,
}

impl ThreadPool {
    /// Starts a thread for each processor, but no more than a few.
    pub fn start() -> std::io::Result<ThreadPool> {
        let processors = std::thread::available_parallelism().map_or(1, usize::from);
        let pool = ThreadPool { queue: Arc::default() };
        for _ in 0..processors.min(THREADS_MAX) {
            let queue = Arc::clone(&pool.queue);
            std::thread::Builder::new().name("forebay-ssd".into()).spawn(move || queue.work())?;
        }
        Ok(pool)
    }

    /// Has a thread run `job`. The number of jobs is bounded by what submits them: operations that
    /// were admitted.
    pub fn run(&self, job: impl FnOnce() + Send + 'static) {
        let mut state = self.queue.state.lock();
        state.jobs.push_back(Box::new(job));
        if state.idle > 0 {
            drop(state);
            self.queue.wake.notify_one();
        }
    }
}

impl Drop for ThreadPool {
    fn drop(&mut self) {
        self.queue.state.lock().ended = true;
        self.queue.wake.notify_all();
    }
}

impl Queue {
    fn work(&self) {
        while let Some(job) = self.next() {
            // A callback that panics has been reported by then, and the others are not to suffer
            // for it.
            let _ = catch_unwind(AssertUnwindSafe(job));
        }
    }

    fn next(&self) -> Option<Job> {
        let mut state = self.state.lock();
        loop {
            if let Some(job) = state.jobs.pop_front() {
                return Some(job);
            }
            if state.ended {
                return None;
            }
            state.idle += 1;
            self.wake.wait(&mut state);
            state.idle -= 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::channel;

    #[test]
    fn every_job_is_done_although_some_panic_and_the_crew_is_dropped() {
        let pool = ThreadPool::start().unwrap();
        let (sender, receiver) = channel();
        for number in 0..100 {
            let sender = sender.clone();
            pool.run(move || {
                sender.send(number).unwrap();
                assert!(number % 10 != 0, "told to panic");
            });
        }
        drop((pool, sender));
        let mut done: Vec<i32> = receiver.iter().collect();
        done.sort_unstable();
        assert_eq!(done, (0..100).collect::<Vec<_>>());
    }
}
