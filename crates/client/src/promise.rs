//! A value that comes later, from another thread, for whoever sleeps until then.

use parking_lot::{Condvar, Mutex};
use std::sync::Arc;
use std::time::{Duration, Instant};

#[derive(Debug)]
struct Shared<T> {
    state: Mutex<State<T>>,
    kept: Condvar,
}

#[derive(Debug)]
struct State<T> {
    value: Option<T>,
    /// The promise was dropped, kept or not.
    over: bool,
}

/// The end that gives the value. Dropped without, the other end gets none.
#[derive(Debug)]
pub struct Promise<T>(Arc<Shared<T>>);

/// The end that gets the value.
#[derive(Debug)]
pub struct Promised<T>(Arc<Shared<T>>);

/// Both ends.
pub fn promise<T>() -> (Promise<T>, Promised<T>) {
    let state = State { value: None, over: false };
    let shared = Arc::new(Shared { state: Mutex::new(state), kept: Condvar::new() });
    (Promise(Arc::clone(&shared)), Promised(shared))
}

impl<T> Promise<T> {
    /// Gives the value.
    pub fn keep(self, value: T) {
        self.0.state.lock().value = Some(value);
    }
}

impl<T> Drop for Promise<T> {
    fn drop(&mut self) {
        self.0.state.lock().over = true;
        self.0.kept.notify_one();
    }
}

impl<T> Promised<T> {
    /// Sleeps until the value is there, there will be none, or the time is over: then there is none
    /// either.
    pub fn wait(self, limit: Duration) -> Option<T> {
        let until = Instant::now() + limit;
        let mut state = self.0.state.lock();
        while !state.over {
            let left = until.checked_duration_since(Instant::now()).filter(|left| !left.is_zero())?;
            self.0.kept.wait_for(&mut state, left);
        }
        state.value.take()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_comes_across_threads_and_a_broken_promise_is_seen_at_once() {
        let (promise, promised) = super::promise();
        let thread = std::thread::spawn(move || promise.keep(5));
        assert_eq!(promised.wait(Duration::from_secs(60)), Some(5));
        thread.join().unwrap();
        let (promise, promised) = super::promise::<u8>();
        drop(promise);
        assert_eq!(promised.wait(Duration::from_secs(60)), None);
        let (_promise, promised) = super::promise::<u8>();
        assert_eq!(promised.wait(Duration::from_millis(1)), None);
    }
}
