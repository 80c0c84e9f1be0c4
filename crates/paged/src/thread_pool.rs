//! The cache's own threads: they take checksums and act on answers of the node, neither of which
//! may hold up a mover's or a connection's thread. Loads go before stores. With nothing to do the
//! threads sleep.

use forebay_transfer::lock::{Condvar, Mutex};
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Instant;

type Task = Box<dyn FnOnce() + Send>;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Urgency {
    /// A request waits.
    Load,
    /// Nobody waits.
    Store,
}

#[derive(Default)]
pub struct TaskQueue {
    state: Mutex<State>,
    posted: Condvar,
}

#[derive(Default)]
struct State {
    loads: VecDeque<Task>,
    stores: VecDeque<Task>,
    timed: BTreeMap<(Instant, u64), Task>,
    next_timed: u64,
    closed: bool,
}

/// The threads. Dropped, they finish what was posted and forget what was timed.
#[derive(Debug)]
pub struct ThreadPool {
    tasks: Arc<TaskQueue>,
    threads: Vec<JoinHandle<()>>,
}

impl ThreadPool {
    /// So many threads, one at least.
    pub fn new(threads: usize) -> std::io::Result<ThreadPool> {
        let mut pool = ThreadPool { tasks: Arc::default(), threads: Vec::new() };
        for number in 0..threads.max(1) {
            let tasks = Arc::clone(&pool.tasks);
            let name = format!("forebay-kv-{number}");
            pool.threads.push(std::thread::Builder::new().name(name).spawn(move || tasks.work())?);
        }
        Ok(pool)
    }

    pub fn tasks(&self) -> Arc<TaskQueue> {
        Arc::clone(&self.tasks)
    }
}

impl Drop for ThreadPool {
    fn drop(&mut self) {
        self.tasks.state.lock().closed = true;
        self.tasks.posted.notify_all();
        for thread in self.threads.drain(..) {
            // A panic of the thread has already been printed.
            let _ = thread.join();
        }
    }
}

impl TaskQueue {
    /// Does something soon. Afterwards if the threads have ended, on this one, so that nothing that
    /// was begun is forgotten.
    pub fn post(&self, urgency: Urgency, task: impl FnOnce() + Send + 'static) {
        let mut state = self.state.lock();
        if state.closed {
            drop(state);
            return task();
        }
        match urgency {
            Urgency::Load => state.loads.push_back(Box::new(task)),
            Urgency::Store => state.stores.push_back(Box::new(task)),
        }
        drop(state);
        self.posted.notify_one();
    }

    /// Does something at a time, if the threads are there still.
    pub fn post_at(&self, at: Instant, task: impl FnOnce() + Send + 'static) {
        let mut state = self.state.lock();
        let number = state.next_timed;
        state.next_timed += 1;
        state.timed.insert((at, number), Box::new(task));
        let is_first = state.timed.keys().next() == Some(&(at, number));
        drop(state);
        if is_first {
            self.posted.notify_one();
        }
    }

    fn work(&self) {
        while let Some(task) = self.next() {
            task();
        }
    }

    fn next(&self) -> Option<Task> {
        let mut state = self.state.lock();
        loop {
            let due = state.timed.keys().next().map(|(at, _)| *at);
            let left = due.map(|at| at.saturating_duration_since(Instant::now()));
            if left.is_some_and(|left| left.is_zero()) {
                return state.timed.pop_first().map(|(_, task)| task);
            }
            if let Some(task) = state.loads.pop_front().or_else(|| state.stores.pop_front()) {
                return Some(task);
            }
            if state.closed {
                return None;
            }
            match left {
                None => self.posted.wait(&mut state),
                Some(left) => drop(self.posted.wait_for(&mut state, left)),
            }
        }
    }
}

impl std::fmt::Debug for TaskQueue {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("TaskQueue").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::channel;
    use std::time::Duration;

    #[test]
    fn loads_go_before_stores_and_timed_tasks_come_in_their_order() {
        let pool = ThreadPool::new(1).unwrap();
        let (tasks, (sender, receiver)) = (pool.tasks(), channel());
        let (go, wait) = channel::<()>();
        tasks.post(Urgency::Store, move || assert!(wait.recv().is_ok()));
        let say = |what: &'static str| {
            let sender = sender.clone();
            move || sender.send(what).unwrap_or_default()
        };
        let now = Instant::now();
        tasks.post_at(now + Duration::from_millis(60), say("later"));
        tasks.post_at(now + Duration::from_millis(40), say("soon"));
        tasks.post(Urgency::Store, say("store"));
        tasks.post(Urgency::Load, say("load"));
        go.send(()).unwrap();
        let said: Vec<_> = (0..4).map(|_| receiver.recv_timeout(Duration::from_secs(30)).unwrap()).collect();
        let place = |what| said.iter().position(|said| *said == what).unwrap();
        assert!(place("load") < place("store") && place("soon") < place("later"), "{said:?}");
    }
}
